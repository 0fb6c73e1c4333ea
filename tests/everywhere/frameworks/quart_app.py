"""Quart."""

from __future__ import annotations

from quart import Quart, request

from . import base

app = Quart(__name__)


@app.get("/plain")
async def plain() -> str:
    return base.plain()


@app.get("/idle")
async def idle() -> str:
    return await base.idle()


@app.get("/thread")
def thread() -> str:
    return base.in_thread()


@app.post("/body")
async def body() -> str:
    base.prepare()
    base.note("parked")
    return base.read(len(await request.get_data()))


@app.get("/stream")
async def stream() -> object:
    return base.chunks()


@app.get("/sse")
async def sse() -> object:
    return base.chunks(), {"content-type": "text/event-stream"}


@app.get("/sgen")
async def sgen() -> object:
    return base.sync_chunks()


@app.get("/background")
async def background() -> str:
    base.prepare()
    app.add_background_task(base.after)
    return "done"


@app.get("/fails")
async def fails() -> str:
    base.fail()
    return ""
