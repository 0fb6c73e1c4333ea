"""A server to be traced: started as a process of its own, once for each source of server spans. See `test_traces`.

    python -m tests.traced_app SOURCE OTLP_PORT

Below ``/inside`` the middleware is mounted inside what makes the server span, below ``/outside`` around it. Below
``/hidden`` it is around it too, with something between that nobody can look through, and below ``/twice`` that as well,
and once more inside. Whatever is below ``/{position}/timeout`` runs in a scope of somebody else's, outermost of all,
that gives up after a moment.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import anyio
import httpx
import uvicorn
from fastapi import FastAPI
from opentelemetry import metrics, trace
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
from opentelemetry.instrumentation.httpx import HTTPXClientInstrumentor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from hangup import HangupMiddleware, add_finalizer, step
from hangup.telemetry import CancellationSpanProcessor

#: Seconds until the scope of somebody else's gives up.
PATIENCE = 0.15


def reached(marker: str) -> None:
    """Tell the test where the work is."""
    print("reached", marker, flush=True)


async def slow(request: Request) -> Response:
    marker = request.query_params["marker"]

    @add_finalizer
    async def close_row() -> None:
        await anyio.sleep(0.01)

    with step("plan"):
        await anyio.sleep(0)
    with step("work", {"test.marker": marker}):
        reached(marker)
        await anyio.sleep(60)
    raise AssertionError


async def stream(request: Request) -> Response:
    marker, after = request.query_params["marker"], request.path_params["after"]

    async def chunks() -> AsyncIterator[bytes]:
        with step("work", {"test.marker": marker}):
            for _ in range(after):
                yield b"chunk\n"
            reached(marker)
            await anyio.sleep(60)
            yield b"never"

    return StreamingResponse(chunks())


async def upload(request: Request) -> Response:
    marker = request.query_params["marker"]
    with step("work", {"test.marker": marker}):
        async for _ in request.stream():
            reached(marker)
    raise AssertionError


async def quick(request: Request) -> Response:
    with step("work", {"test.marker": request.query_params["marker"]}):
        return PlainTextResponse("done")


async def upstream(request: Request) -> Response:
    """Not a line of it knows that calls can be canceled."""
    marker = request.query_params["marker"]
    trace.get_current_span().set_attribute("test.marker", marker)
    async with httpx.AsyncClient() as client:
        answer = await client.get(f"http://127.0.0.1:{request.query_params['port']}/?{marker}")
    return PlainTextResponse(answer.text)


async def leaky(request: Request) -> Response:
    """Steps across ``yield``, and two generators that take turns."""

    async def part(name: str) -> AsyncIterator[bytes]:
        with step(name), step(f"inner {name}"):
            while True:
                yield b"x" * 4096
                await anyio.sleep(0.005)  # twenty of these at full speed leave no time to anybody else

    async def chunks() -> AsyncIterator[bytes]:
        one, two = part("one"), part("two")
        with step("both"):
            while True:
                yield await anext(one)
                yield await anext(two)

    return StreamingResponse(chunks())


def routes(prefix: str) -> list[tuple[str, Any, str]]:
    return [
        (f"{prefix}/slow", slow, "GET"),
        (f"{prefix}/stream/{{after:int}}", stream, "GET"),
        (f"{prefix}/upload", upload, "POST"),
        (f"{prefix}/timeout/slow", slow, "GET"),
        (f"{prefix}/quick/{{item}}", quick, "GET"),
        (f"{prefix}/upstream", upstream, "GET"),
        (f"{prefix}/leaky", leaky, "GET"),
    ]


def starlette(prefix: str) -> Starlette:
    return Starlette(routes=[Route(path, endpoint, methods=[method]) for path, endpoint, method in routes(prefix)])


def fastapi(prefix: str, *, native: bool) -> FastAPI:
    app = FastAPI(telemetry={"tracing": native, "metrics": native, "logs": False})
    for path, endpoint, method in routes(prefix):
        app.add_api_route(path, endpoint, methods=[method], response_model=None)
    return app


def make(source: str, prefix: str) -> ASGIApp:
    """An application below ``prefix`` with its source of server spans, and the middleware inside or outside."""
    inside = prefix in {"/inside", "/twice"}
    app: ASGIApp
    if source == "contrib-asgi":
        app = starlette(prefix)
        app = OpenTelemetryMiddleware(HangupMiddleware(app) if inside else app)
    elif source in {"contrib-fastapi", "fastapi", "none"}:
        app = api = fastapi(prefix, native=source == "fastapi")
        if inside:
            api.add_middleware(HangupMiddleware)
        if source == "contrib-fastapi":
            from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor

            FastAPIInstrumentor.instrument_app(api)
    else:
        app = page = starlette(prefix)
        if inside:
            page.add_middleware(HangupMiddleware)
        if source == "contrib-starlette":
            from opentelemetry.instrumentation.starlette import StarletteInstrumentor

            StarletteInstrumentor.instrument_app(page)
        else:
            assert source == "starlette"
            from starlette.middleware.opentelemetry import OpenTelemetryMiddleware as Native

            page.add_middleware(Native)
    if prefix == "/inside":
        return app
    return HangupMiddleware(app if prefix == "/outside" else hide(app))


def hide(app: ASGIApp) -> ASGIApp:
    async def hidden(scope: Scope, receive: Receive, send: Send) -> None:
        await app(scope, receive, send)

    return hidden


def main(source: str, otlp_port: int) -> None:
    logging.basicConfig(level=logging.DEBUG, stream=sys.stderr, format="%(levelname)s %(name)s %(message)s")
    for noisy in ("asyncio", "urllib3", "httpcore", "httpx", "opentelemetry.exporter", "opentelemetry.sdk"):
        logging.getLogger(noisy).setLevel(logging.INFO)
    tracers = TracerProvider()
    exporter = OTLPSpanExporter(f"http://127.0.0.1:{otlp_port}/v1/traces")
    tracers.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=30))
    tracers.add_span_processor(CancellationSpanProcessor())
    trace.set_tracer_provider(tracers)
    reader = PeriodicExportingMetricReader(OTLPMetricExporter(f"http://127.0.0.1:{otlp_port}/v1/metrics"), 200)
    metrics.set_meter_provider(MeterProvider([reader]))
    HTTPXClientInstrumentor().instrument()
    apps = {prefix: make(source, prefix) for prefix in ("/inside", "/outside", "/twice", "/hidden")}

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        app = apps["/" + scope["path"].split("/")[1]]
        if "/timeout/" not in scope["path"]:
            await app(scope, receive, send)
            return
        with anyio.move_on_after(PATIENCE) as patience:
            await app(scope, receive, send)
        if patience.cancelled_caught:
            await send({"type": "http.response.start", "status": 504, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})

    listener = socket.create_server(("127.0.0.1", 0))
    print("port", listener.getsockname()[1], flush=True)
    config = uvicorn.Config(serve, log_level="warning", log_config=None)
    asyncio.run(uvicorn.Server(config).serve(sockets=[listener]))
    tracers.shutdown()
    metrics.get_meter_provider().shutdown()  # type: ignore[attr-defined]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
