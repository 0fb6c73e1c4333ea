"""Falcon, with the middleware that copies the call to the request's context."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from falcon.asgi import App, Request, Response, SSEvent
from falcon.util import sync_to_async

from hangup.falcon import CallMiddleware

from . import base


class Plain:
    async def on_get(self, req: Request, resp: Response) -> None:
        resp.text = base.plain()


class Idle:
    async def on_get(self, req: Request, resp: Response) -> None:
        resp.text = await base.idle()


class Thread:
    async def on_get(self, req: Request, resp: Response) -> None:
        resp.text = await sync_to_async(base.in_thread, req.context.hangup)


class Body:
    async def on_post(self, req: Request, resp: Response) -> None:
        base.prepare()
        base.note("parked")
        resp.text = base.read(len(await req.stream.read()))


class Stream:
    async def on_get(self, req: Request, resp: Response) -> None:
        resp.stream = base.chunks()


class Sse:
    async def on_get(self, req: Request, resp: Response) -> None:
        async def events() -> AsyncIterator[SSEvent]:
            async for _ in base.chunks():
                yield SSEvent(text="data: x")

        resp.sse = events()


class Background:
    async def on_get(self, req: Request, resp: Response) -> None:
        base.prepare()
        resp.text = "done"
        resp.schedule(base.after)


class Fails:
    async def on_get(self, req: Request, resp: Response) -> None:
        base.fail()


app: Any = App(middleware=[CallMiddleware()])
for resource in (Plain, Idle, Thread, Body, Stream, Sse, Background, Fails):
    app.add_route(f"/{resource.__name__.lower()}", resource())
