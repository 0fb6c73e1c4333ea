"""Starlette."""

from __future__ import annotations

import anyio
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from hangup.starlette import closing_stream

from . import base


async def plain(request: Request) -> Response:
    return PlainTextResponse(base.plain())


async def idle(request: Request) -> Response:
    return PlainTextResponse(await base.idle())


def thread(request: Request) -> Response:
    return PlainTextResponse(base.in_thread())


async def body(request: Request) -> Response:
    base.prepare()
    base.note("parked")
    return PlainTextResponse(base.read(len(await request.body())))


async def stream(request: Request) -> Response:
    return StreamingResponse(base.chunks())


async def sgen(request: Request) -> Response:
    return StreamingResponse(base.sync_chunks())


async def closing(request: Request) -> Response:
    return StreamingResponse(closing_stream(base.sync_chunks()))


async def background(request: Request) -> Response:
    base.prepare()
    return PlainTextResponse("done", background=BackgroundTask(base.after))


async def fails(request: Request) -> Response:
    base.fail()
    return Response()


async def swallow(request: Request) -> Response:
    """A handler that goes on after its cancellation, and answers."""
    base.prepare()
    base.note("parked")
    try:
        await anyio.sleep(30)
    except BaseException:
        base.note("raised")
    return PlainTextResponse("all the same")


ROUTES = [
    Route(f"/{fn.__name__}", fn, methods=["GET", "POST"])
    for fn in (plain, idle, thread, body, stream, sgen, closing, background, fails, swallow)
]
app = Starlette(routes=ROUTES)
