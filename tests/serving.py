"""An application for servers in processes of their own. It notes what happens to it, one line each, on stdout."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from hangup import HangupMiddleware, Outcome, add_finalizer, current_call


def note(*words: Any) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def note_outcome(outcome: Outcome) -> None:
    note("outcome", outcome.state, outcome.cause, outcome.close_code)


@asynccontextmanager
async def lifespan(app: Any) -> AsyncIterator[None]:
    note("startup")
    yield
    note("teardown")


async def clean_up() -> None:
    await asyncio.sleep(0.1)
    note("finalized")


async def sse(request: Request) -> Response:
    add_finalizer(clean_up)

    async def events() -> AsyncIterator[bytes]:
        yield b"data: hello\n\n"
        note("running")
        await asyncio.sleep(600)

    return StreamingResponse(events(), media_type="text/event-stream")


async def work(request: Request) -> Response:
    add_finalizer(clean_up)
    note("running")
    await asyncio.sleep(600)
    return PlainTextResponse("done")


async def listen(ws: WebSocket) -> None:
    """Echoes until the client has gone."""
    await ws.accept()
    note("running")
    while True:
        await ws.send_text(await ws.receive_text())


async def push(ws: WebSocket) -> None:
    """Only sends."""
    token = current_call().token
    token.add_callback(lambda: note("token"))
    await ws.accept()
    note("running")
    while True:
        await ws.send_text("tick")
        await asyncio.sleep(0.01)


async def slow(ws: WebSocket) -> None:
    """Takes a while to accept."""
    note("running")
    await asyncio.sleep(0.3)
    await ws.accept()
    await ws.send_text("hello")
    await ws.close()


def _seconds(name: str) -> float | None:
    return float(os.environ[name]) if name in os.environ else None


app = HangupMiddleware(
    Starlette(
        lifespan=lifespan,
        routes=[
            Route("/sse", sse),
            Route("/work", work),
            WebSocketRoute("/listen", listen),
            WebSocketRoute("/push", push),
            WebSocketRoute("/slow", slow),
        ],
    ),
    shutdown_grace=_seconds("SHUTDOWN_GRACE"),
    observers=[note_outcome],
)
