"""Litestar, with the provider."""

from __future__ import annotations

from collections.abc import AsyncIterator

from litestar import Litestar, Request, get, post
from litestar.background_tasks import BackgroundTask
from litestar.di import Provide
from litestar.response import Response, ServerSentEvent, Stream

from hangup import CancelToken
from hangup.litestar import provide_call, provide_token
from hangup.starlette import closing_stream

from . import base


@get("/plain")
async def plain(cancel_token: CancelToken) -> str:
    assert cancel_token is base.current_call().token
    return base.plain()


@get("/idle")
async def idle() -> str:
    return await base.idle()


@get("/thread", sync_to_thread=True)
def thread() -> str:
    return base.in_thread()


@post("/body")
async def body(request: Request[object, object, object]) -> str:
    base.prepare()
    base.note("parked")
    return base.read(len(await request.body()))


@get("/stream")
async def stream() -> Stream:
    return Stream(base.chunks())


@get("/sgen")
async def sgen() -> Stream:
    return Stream(base.sync_chunks())


@get("/closing")
async def closing() -> Stream:
    return Stream(closing_stream(base.sync_chunks()))


@get("/sse")
async def sse() -> ServerSentEvent:
    async def events() -> AsyncIterator[str]:
        async for _ in base.chunks():
            yield "data: x"

    return ServerSentEvent(events())


@get("/background")
async def background() -> Response[str]:
    base.prepare()
    return Response("done", background=BackgroundTask(base.after))


@get("/dep", dependencies={"value": Provide(base.dependency)})
async def dep(value: int) -> str:
    return await base.idle()


@get("/fails")
async def fails() -> None:
    base.fail()


app = Litestar(
    [plain, idle, thread, body, stream, sgen, closing, sse, background, dep, fails],
    dependencies={"call": provide_call, "cancel_token": provide_token},
)
