"""What the field cases need a process of their own for: a server that gets a signal, and a tracer provider."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from hangup import HangupMiddleware, Outcome, add_finalizer, step
from hangup.testing import Peer

from ..serving import note

pool = {"open": False}


@asynccontextmanager
async def lifespan(app: Any) -> AsyncIterator[None]:
    pool["open"] = True
    yield
    pool["open"] = False
    note("torn down")


async def clean_up() -> None:
    await asyncio.sleep(0.2)
    note("cleaned up" if pool["open"] else "the pool is closed")


def make(*, hangup: bool) -> ASGIApp:
    async def sse(request: Request) -> Response:
        if hangup:
            add_finalizer(clean_up)

        async def events() -> AsyncIterator[bytes]:
            try:
                yield b"data: hello\n\n"
                note("running")
                await asyncio.sleep(600)
            finally:
                if not hangup:
                    await asyncio.shield(asyncio.create_task(clean_up()))

        return StreamingResponse(events(), media_type="text/event-stream")

    def observe(outcome: Outcome) -> None:
        note(outcome.state, outcome.cause)

    app = Starlette(routes=[Route("/sse", sse)], lifespan=lifespan)
    return HangupMiddleware(app, shutdown_grace=0, observers=[observe]) if hangup else app


mounted = make(hangup=True)
bare = make(hangup=False)


async def spans(*, hangup: bool) -> dict[str, Any]:
    """Three spans, each in the next, when the client leaves."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    tracer = trace.get_tracer("test")
    errors: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            errors.append(record.getMessage())

    logging.getLogger().addHandler(Handler(logging.ERROR))

    def span(name: str) -> Any:
        return step(name) if hangup else tracer.start_as_current_span(name)

    async def run(request: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            with span("a"), span("b"), span("c"):
                yield b"part"
                if request.url.path == "/run":
                    await asyncio.sleep(600)

        return StreamingResponse(parts())

    app: ASGIApp = Starlette(routes=[Route("/run", run), Route("/next", run)])
    if hangup:
        app = HangupMiddleware(app)
    peer = Peer(path="/run")
    async with peer.calling(app):
        await peer.wait_for_body(b"part")
        await asyncio.sleep(0.1)  # for the watcher
        peer.hang_up()
    first = [s for s in exporter.get_finished_spans() if s.name in "abc"]
    exporter.clear()
    await Peer(path="/next").run(app)
    ids = {s.context.span_id for s in first if s.context is not None}
    return {
        "ended": [s.name for s in first],
        "canceled": sorted(s.name for s in first if (s.attributes or {}).get("hangup.state") == "canceled"),
        "errors": errors + [s.name for s in first if s.status.status_code is trace.StatusCode.ERROR],
        "foreign parent": any(s.parent is not None and s.parent.span_id in ids for s in exporter.get_finished_spans()),
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(spans(hangup=sys.argv[1] == "hangup"))))
