"""BlackSheep."""

from __future__ import annotations

import asyncio

from blacksheep import Application, Request, Response, StreamedContent, get, post, text

from . import base

app = Application()


@get("/plain")
async def plain() -> Response:
    return text(base.plain())


@get("/idle")
async def idle() -> Response:
    return text(await base.idle())


@get("/thread")
def thread() -> Response:
    return text(base.blocking())


@post("/body")
async def body(request: Request) -> Response:
    base.prepare()
    base.note("parked")
    return text(base.read(len(await request.read() or b"")))


@get("/stream")
async def stream() -> Response:
    return Response(200, content=StreamedContent(b"text/plain", base.chunks))


@get("/sse")
async def sse() -> Response:
    return Response(200, content=StreamedContent(b"text/event-stream", base.chunks))


_tasks: set[asyncio.Task[None]] = set()


@get("/background")
async def background() -> Response:
    base.prepare()
    task = asyncio.create_task(base.after())
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return text("done")


@get("/fails")
async def fails() -> Response:
    base.fail()
    return text("")
