"""An agent run that can be watched. How to start it, and a place to look at it, are in README.md beside this file."""

import asyncio
from collections.abc import AsyncIterator

from fastapi import FastAPI
from fastapi.responses import StreamingResponse

import setup_tracing  # noqa: F401
from hangup import HangupMiddleware, Outcome, add_finalizer, step

app = FastAPI()  # has telemetry of its own: the server span
app.add_middleware(HangupMiddleware)

rows: dict[str, str] = {}


async def run_agent(question: str) -> AsyncIterator[str]:
    with step("invoke_agent researcher", {"gen_ai.operation.name": "invoke_agent", "input.value": question}):
        with step("plan", {"gen_ai.operation.name": "chat"}):
            await asyncio.sleep(0.4)
        yield "data: looking for sources\n\n"
        with step("execute_tool search", {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "search"}):
            await asyncio.sleep(0.6)
        yield "data: reading\n\n"
        with step(
            "execute_tool read_pages", {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "read_pages"}
        ):
            try:
                await asyncio.sleep(20)  # here the user presses Stop
            finally:
                await asyncio.sleep(0.15)  # and the browser that reads the pages is closed
        yield "data: done\n\n"


@app.post("/runs/{run}")
async def run(run: str, question: str) -> StreamingResponse:
    rows[run] = "running"

    @add_finalizer
    async def close_row(outcome: Outcome) -> None:
        await asyncio.sleep(0.1)
        rows[run] = outcome.state

    return StreamingResponse(run_agent(question), media_type="text/event-stream")
