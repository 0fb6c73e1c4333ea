"""The application of the demo: what people write every day. Bare and with hangup it is the same code.

The marks (`observed`, `mark`) are for the demo's own eyes and change nothing. The one place that tells the two apart
is `closing`: with hangup a finalizer closes the row of a run; without, the ``finally`` that everybody writes.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from contextlib import closing as closed
from pathlib import Path
from typing import Annotated, Final

from fastapi import BackgroundTasks, Depends, FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse

from hangup import Outcome, add_finalizer, current_call, step

from .witness import mark, observed

#: Seconds that slow work takes: a model, a tool, a query. Much longer than a client needs to hang up.
WORK: Final = 2.0
#: The same for work in a thread, which has to be waited for.
THREAD_WORK: Final = 1.0
#: Seconds that a background task takes.
BACKGROUND_WORK: Final = 0.5
#: Seconds that a cleanup takes: a roll-back, a message to an upstream.
CLEANUP: Final = 0.1
#: Seconds between the chunks of a stream.
TICK: Final = 0.05


class Runs:
    """The table of agent runs, in SQLite."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._execute("CREATE TABLE IF NOT EXISTS runs (run TEXT PRIMARY KEY, state TEXT NOT NULL)")

    async def open(self, run: str) -> None:
        """A new row, ``running``."""
        await run_in_threadpool(self._execute, "INSERT INTO runs VALUES (?, 'running')", run)

    async def close(self, run: str, state: str) -> None:
        """The run has ended in ``state``."""
        await run_in_threadpool(self._execute, "UPDATE runs SET state = ? WHERE run = ?", state, run)

    def state(self, run: str) -> str | None:
        """What the row says; None if there is no row."""
        with closed(sqlite3.connect(self._path)) as database:
            row = database.execute("SELECT state FROM runs WHERE run = ?", (run,)).fetchone()
        return row[0] if row else None

    def _execute(self, statement: str, *values: str) -> None:
        with closed(sqlite3.connect(self._path, timeout=10)) as database, database:
            database.execute(statement, values)


def with_hangup() -> bool:
    """Whether the middleware is mounted."""
    try:
        current_call()
    except LookupError:
        return False
    return True


@asynccontextmanager
async def closing(runs: Runs, run: str) -> AsyncIterator[None]:
    """The row of ``run`` is closed when the block ends, whatever happens."""
    if with_hangup():

        async def close(outcome: Outcome) -> None:
            await runs.close(run, outcome.state)
            mark("cleaned up")

        mark("registered")
        add_finalizer(close)
        yield
    else:
        state = "failed"
        try:
            yield
            state = "completed"
        finally:
            await runs.close(run, state)
            mark("cleaned up")


async def agent(runs: Runs, run: str) -> AsyncIterator[str]:
    """A run of two steps that reports its progress as server-sent events."""
    await runs.open(run)
    async with closing(runs, run):
        with step("plan"):
            await asyncio.sleep(TICK)
        yield "data: planned\n\n"
        with step("call tool"), observed():
            await asyncio.sleep(WORK)
        yield "data: done\n\n"


async def ticks() -> AsyncIterator[str]:
    """Server-sent events, and an asynchronous cleanup."""
    try:
        with observed():
            for number in range(int(WORK / TICK)):
                yield f"data: {number}\n\n"
                await asyncio.sleep(TICK)
    finally:
        await asyncio.sleep(CLEANUP)
        mark("cleaned up")


def lines() -> Iterator[str]:
    """The same in an ordinary generator, which Starlette runs in threads."""
    try:
        with observed():
            for number in range(int(WORK / TICK)):
                yield f"{number}\n"
                time.sleep(TICK)
    finally:
        mark("cleaned up")


async def session() -> AsyncIterator[str]:
    """A dependency with an asynchronous teardown."""
    try:
        yield "session"
    finally:
        await asyncio.sleep(CLEANUP)
        mark("cleaned up")


async def deliver() -> None:
    """A background task."""
    with observed():
        await asyncio.sleep(BACKGROUND_WORK)
    mark("cleaned up")


def make_app(directory: Path) -> FastAPI:
    """The application. It keeps its files in ``directory``."""
    app = FastAPI()
    runs = Runs(directory / "runs.sqlite")

    @app.post("/runs/{run}")
    async def run_agent(run: str) -> list[str]:
        return [event async for event in agent(runs, run)]

    @app.post("/runs/{run}/stream")
    async def stream_agent(run: str) -> StreamingResponse:
        return StreamingResponse(agent(runs, run), media_type="text/event-stream")

    @app.get("/events")
    async def stream_events() -> StreamingResponse:
        return StreamingResponse(ticks(), media_type="text/event-stream")

    @app.get("/lines")
    def stream_lines() -> StreamingResponse:
        return StreamingResponse(lines(), media_type="text/plain")

    @app.get("/answer")
    async def answer() -> dict[str, int]:
        try:
            with observed():
                await asyncio.sleep(WORK)
            return {"answer": 42}
        finally:
            await asyncio.sleep(CLEANUP)
            mark("cleaned up")

    @app.get("/report")
    def report() -> dict[str, int]:
        try:
            with observed():
                time.sleep(THREAD_WORK)
            return {"pages": 12}
        finally:
            mark("cleaned up")

    @app.get("/orders")
    async def orders(session: Annotated[str, Depends(session)]) -> dict[str, str]:
        with observed():
            await asyncio.sleep(WORK)
        return {"read with": session}

    @app.post("/files/{name}")
    async def upload(name: str, request: Request) -> dict[str, int]:
        path = directory / name
        try:
            with path.open("wb") as file, observed():
                async for chunk in request.stream():
                    file.write(chunk)
            return {"size": path.stat().st_size}
        finally:
            await asyncio.sleep(CLEANUP)
            path.unlink()
            mark("cleaned up")

    @app.post("/mail")
    async def send_mail(background: BackgroundTasks) -> dict[str, str]:
        background.add_task(deliver)
        return {"mail": "queued"}

    return app
