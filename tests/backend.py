"""A backend for telemetry: what arrives over OTLP/HTTP, on a real socket, as a backend sees it."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

STATUS = {0: "UNSET", 1: "OK", 2: "ERROR"}
KIND = {1: "INTERNAL", 2: "SERVER", 3: "CLIENT"}


@dataclass(frozen=True, kw_only=True)
class ReceivedSpan:
    scope: str
    name: str
    kind: str
    status: str
    description: str
    attributes: dict[str, Any]
    events: tuple[str, ...]
    trace_id: str
    span_id: str
    parent_id: str
    start: int
    end: int

    @property
    def http_status(self) -> int | None:
        return self.attributes.get("http.response.status_code", self.attributes.get("http.status_code"))

    @property
    def state(self) -> str | None:
        return self.attributes.get("hangup.state")

    @property
    def cause(self) -> str | None:
        return self.attributes.get("hangup.cause")


@dataclass(frozen=True, kw_only=True)
class ReceivedPoint:
    name: str
    unit: str
    attributes: dict[str, Any]
    value: float
    count: int


@dataclass
class Backend:
    """Everything that was received. `wait_for` waits until something holds of it."""

    port: int = 0
    spans: list[ReceivedSpan] = field(default_factory=list)
    points: list[ReceivedPoint] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def trace_of(self, marker: str) -> list[ReceivedSpan]:
        """The spans of the traces in which a step carries ``test.marker == marker``, and that step."""
        with self._changed:
            ids = {s.trace_id for s in self.spans if s.attributes.get("test.marker") == marker}
            return [s for s in self.spans if s.trace_id in ids]

    def wait_for(self, condition: Callable[[], Any], what: str, timeout: float = 10) -> Any:
        deadline = time.monotonic() + timeout
        with self._changed:
            while not (found := condition()):
                left = deadline - time.monotonic()
                if left <= 0:
                    names = [(s.scope, s.name, s.status, s.attributes) for s in self.spans[-12:]]
                    raise TimeoutError(f"{what} did not arrive; the last spans are {names}")
                self._changed.wait(left)
            return found

    def take(self, path: str, body: bytes) -> None:
        with self._changed:
            if path == "/v1/traces":
                self.spans += _spans(ExportTraceServiceRequest.FromString(body))
            elif path == "/v1/metrics":
                self.points += _points(ExportMetricsServiceRequest.FromString(body))
            self._changed.notify_all()


@contextmanager
def receiving() -> Iterator[Backend]:
    """A backend on a free port of the loopback."""
    backend = Backend(_changed=threading.Condition(threading.RLock()))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            backend.take(self.path, body)
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    backend.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield backend
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _spans(request: Any) -> Iterator[ReceivedSpan]:
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield ReceivedSpan(
                    scope=scope.scope.name,
                    name=span.name,
                    kind=KIND.get(span.kind, str(span.kind)),
                    status=STATUS[span.status.code],
                    description=span.status.message,
                    attributes=_attributes(span.attributes),
                    events=tuple(event.name for event in span.events),
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    start=span.start_time_unix_nano,
                    end=span.end_time_unix_nano,
                )


def _points(request: Any) -> Iterator[ReceivedPoint]:
    for resource in request.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                data = getattr(metric, metric.WhichOneof("data"))
                for point in data.data_points:
                    histogram = hasattr(point, "bucket_counts")
                    yield ReceivedPoint(
                        name=metric.name,
                        unit=metric.unit,
                        attributes=_attributes(point.attributes),
                        value=point.sum if histogram else point.as_int or point.as_double,
                        count=point.count if histogram else 1,
                    )


def _attributes(found: Any) -> dict[str, Any]:
    return {item.key: _value(item.value) for item in found}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(v) for v in value.array_value.values] if kind == "array_value" else getattr(value, kind)
