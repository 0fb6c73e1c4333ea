"""Sanic, in its ASGI mode."""

from __future__ import annotations

from typing import Any

from sanic import Request, Sanic, response

from . import base

app: Any = Sanic("everywhere", configure_logging=False)
app.config.ACCESS_LOG = False


@app.get("/plain")
async def plain(request: Request) -> Any:
    return response.text(base.plain())


@app.get("/idle")
async def idle(request: Request) -> Any:
    return response.text(await base.idle())


@app.get("/thread")
def thread(request: Request) -> Any:
    return response.text(base.blocking())


@app.post("/body", stream=True)
async def body(request: Request) -> Any:
    base.prepare()
    base.note("parked")
    size = 0
    while (part := await request.stream.read()) is not None:
        size += len(part)
    return response.text(base.read(size))


@app.get("/stream")
async def stream(request: Request) -> None:
    answer = await request.respond(content_type="text/plain")
    async for part in base.chunks():
        await answer.send(part)


@app.get("/background")
async def background(request: Request) -> Any:
    base.prepare()
    request.app.add_task(base.after())
    return response.text("done")


@app.get("/fails")
async def fails(request: Request) -> Any:
    base.fail()
