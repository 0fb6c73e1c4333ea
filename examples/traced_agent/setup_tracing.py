"""The usual set-up of OpenTelemetry, and one line of hangup's. OTEL_EXPORTER_OTLP_ENDPOINT says where the spans go."""

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from hangup.telemetry import CancellationSpanProcessor

resource = Resource.create({"service.name": "agent", "openinference.project.name": "agent"})  # Phoenix: the project
provider = TracerProvider(resource=resource)
provider.add_span_processor(CancellationSpanProcessor())  # marks the spans of others: HTTP clients, databases, SDKs
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(), schedule_delay_millis=500))
trace.set_tracer_provider(provider)
