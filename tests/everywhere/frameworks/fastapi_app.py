"""FastAPI, mounted by `add_middleware`; its native SSE."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fastapi import BackgroundTasks, Depends, FastAPI, Request
from fastapi.responses import StreamingResponse
from fastapi.sse import EventSourceResponse

from hangup import HangupMiddleware
from hangup.starlette import closing_stream

from ..witness import note_outcome, policy_by_header
from . import base

MOUNTS_ITSELF = True

app = FastAPI()
app.add_middleware(HangupMiddleware, policy=policy_by_header, observers=[note_outcome])


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
async def body(request: Request) -> str:
    base.prepare()
    base.note("parked")
    return base.read(len(await request.body()))


@app.get("/stream")
async def stream() -> StreamingResponse:
    return StreamingResponse(base.chunks())


@app.get("/sgen")
async def sgen() -> StreamingResponse:
    return StreamingResponse(base.sync_chunks())


@app.get("/closing")
async def closing() -> StreamingResponse:
    return StreamingResponse(closing_stream(base.sync_chunks()))


@app.get("/sse", response_class=EventSourceResponse)
async def sse() -> AsyncIterator[dict[str, str]]:
    async for _ in base.chunks():
        yield {"text": "data: x"}


@app.get("/background")
async def background(tasks: BackgroundTasks) -> str:
    base.prepare()
    tasks.add_task(base.after)
    return "done"


@app.get("/dep")
async def dep(value: int = Depends(base.dependency)) -> str:
    return await base.idle()


@app.get("/fails")
async def fails() -> None:
    base.fail()
