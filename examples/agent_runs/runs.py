"""An agent service: ``POST /runs`` runs a loop of model turns and tools. Start it: python runs.py [port]

A session has a history, a run has a row. Every tool call in a history must have its result, or no provider accepts it
again; no row may say ``running`` when nothing runs; and nobody may be told of a success that was not written. Clients
leave in the middle of a tool, calls time out, the database fails, hangs, or commits and loses the reply. ``BARE=1``
serves the same as one writes it first. ``RUNS_DB`` is the database, SQLite or PostgreSQL.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
from fastapi import FastAPI, HTTPException
from opentelemetry import trace
from pydantic import BaseModel
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine
from starlette.responses import JSONResponse, Response, StreamingResponse

from hangup import HangupMiddleware, HookFailure, Outcome, State, add_finalizer, before_success, current_call, step
from hangup.journal import Journal, JournalError

logger = logging.getLogger("agent")

Message = dict[str, Any]


class Ask(BaseModel):
    session: str
    prompt: str
    stream: bool = False


class Store:
    """Histories, and the run rows of the bare half. Each function is one statement, and so one transaction."""

    def __init__(self, url: str) -> None:
        url = url.replace("sqlite:", "sqlite+aiosqlite:").replace("postgresql:", "postgresql+asyncpg:")
        self.engine = create_async_engine(url, isolation_level="AUTOCOMMIT", pool_pre_ping=True)

    async def execute(self, statement: str, **values: Any) -> list[dict[str, Any]]:
        async with self.engine.connect() as connection:
            found = await connection.execute(text(statement), values)
            return [dict(row) for row in found.mappings()] if found.returns_rows else []

    async def create_tables(self) -> None:
        await self.execute("CREATE TABLE IF NOT EXISTS sessions (id text PRIMARY KEY, messages text)")
        columns = "id text PRIMARY KEY, session text, state text, result text"
        await self.execute(f"CREATE TABLE IF NOT EXISTS bare_runs ({columns})")

    async def load_messages(self, session: str) -> list[Message]:
        rows = await self.execute("SELECT messages FROM sessions WHERE id = :id", id=session)
        messages: list[Message] = json.loads(rows[0]["messages"]) if rows else []
        return messages

    async def save_messages(self, session: str, messages: list[Message]) -> None:
        insert = (
            "INSERT INTO sessions VALUES (:id, :messages) ON CONFLICT (id) DO UPDATE SET messages = excluded.messages"
        )
        await self.execute(insert, id=session, messages=json.dumps(messages))

    async def create_run(self, id: str, session: str) -> None:
        await self.execute("INSERT INTO bare_runs VALUES (:id, :session, 'running', NULL)", id=id, session=session)

    async def update_run(self, id: str, state: str, result: str | None) -> None:
        update = "UPDATE bare_runs SET state = :state, result = :result WHERE id = :id"
        await self.execute(update, id=id, state=state, result=result)

    async def get_run(self, id: str) -> dict[str, Any] | None:
        rows = await self.execute("SELECT * FROM bare_runs WHERE id = :id", id=id)
        return rows[0] if rows else None


# ---------------------------------------------------------------------- the agent: a stand-in model, and two tools


class Refused(Exception):
    """The provider does not accept the history."""


def model(history: list[Message]) -> Message:
    """Calls the tools that the prompt names, then answers. Like every provider it refuses a call without a result."""
    for n, message in enumerate(history):
        calls = [call["id"] for call in message.get("tool_calls", [])]
        results = [later.get("tool_call_id") for later in history[n + 1 : n + 1 + len(calls)]]
        if calls != results:
            raise Refused("an assistant message with 'tool_calls' must be followed by tool messages")
    if history[-1]["role"] == "tool":
        return {"role": "assistant", "content": f"I have {history[-1]['content']}."}
    calls = [
        {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for name in history[-1]["content"].split()
        if name in TOOLS
    ]
    return (
        {"role": "assistant", "content": None, "tool_calls": calls}
        if calls
        else {"role": "assistant", "content": "Hello."}
    )


async def look_up() -> str:
    return "looked it up"


async def search() -> str:
    """An asynchronous tool that takes a minute."""
    await anyio.sleep(60)
    return "searched"


def crunch() -> str:
    """A synchronous tool that takes a minute, in a thread. Nothing stops a thread: it looks for itself."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with suppress(LookupError):  # bare there is nothing to look at
            current_call().token.raise_if_canceled()
        time.sleep(0.01)
    return "crunched"


TOOLS: dict[str, Callable[[], Awaitable[str]]] = {
    "look_up": look_up,
    "search": search,
    "crunch": partial(anyio.to_thread.run_sync, crunch),
}


#: What a piece of work is done in: a span, or a step.
Span = Callable[[str], AbstractContextManager[Any]]


async def use(call: Message, span: Span) -> Message:
    """Run a tool, and give its result."""
    name = call["function"]["name"]
    with span(f"tool {name}"):
        result = await TOOLS[name]()
    return {"role": "tool", "tool_call_id": call["id"], "content": result}


async def think(history: list[Message], span: Span) -> AsyncIterator[Message]:
    """The loop of an agent: adds to ``history`` what it gives."""
    while True:
        with span("model"):
            message = model(history)
        history.append(message)
        yield message
        if not message.get("tool_calls"):
            return
        for call in message["tool_calls"]:
            result = await use(call, span)
            history.append(result)
            yield result


def repaired(history: list[Message], why: str) -> list[Message]:
    """``history`` with a result for every tool call that has none."""
    whole: list[Message] = []
    results = {message["tool_call_id"]: message for message in history if message["role"] == "tool"}
    for message in history:
        if message["role"] != "tool":
            whole.append(message)
        for call in message.get("tool_calls", []):
            missing = {"role": "tool", "tool_call_id": call["id"], "content": f"[not completed: {why}]"}
            whole.append(results.get(call["id"], missing))
    return whole


# ---------------------------------------------------------------------- the service


class Bare:
    """As one writes it first. Persistence must not break a run, so its errors are suppressed."""

    def __init__(self, store: Store) -> None:
        self.store = store

    async def run(self, id: str, ask: Ask) -> AsyncIterator[Message]:
        history = [*await self.store.load_messages(ask.session), {"role": "user", "content": ask.prompt}]
        with suppress(Exception):
            await self.store.create_run(id, ask.session)
        state, result = "failed", None
        try:
            async for message in think(history, trace.get_tracer(__name__).start_as_current_span):
                with suppress(Exception):
                    await self.store.save_messages(ask.session, history)
                yield message
            state, result = "completed", history[-1]["content"]
        except anyio.get_cancelled_exc_class():
            state = "canceled"
            raise
        finally:
            with suppress(Exception):
                await self.store.update_run(id, state, result)

    async def get(self, id: str) -> dict[str, Any] | None:
        return await self.store.get_run(id)


class Mended:
    """With hangup: the row is there before the work begins and final before success is seen; the history is whole."""

    def __init__(self, store: Store, journal: Journal) -> None:
        self.store = store
        self.journal = journal

    async def run(self, id: str, ask: Ask) -> AsyncIterator[Message]:
        try:
            run = await current_call().open_run("agent", id=id, owner=ask.session)
        except JournalError as exc:
            logger.error("run %s of session %s was not started: %s", id, ask.session, exc)
            raise
        history = [*await self.store.load_messages(ask.session), {"role": "user", "content": ask.prompt}]

        @before_success
        async def save() -> None:
            try:
                await self.store.save_messages(ask.session, history)
            except Exception as exc:
                raise HookFailure("The history could not be saved", status=503) from exc

        @add_finalizer
        async def save_what_there_is(outcome: Outcome) -> None:
            if outcome.state is State.FAILED:
                logger.error("run %s of session %s failed", id, ask.session, exc_info=outcome.error)
            if outcome.state is not State.COMPLETED:
                await self.store.save_messages(ask.session, repaired(history, outcome.cause or outcome.state))

        async for message in think(history, step):
            yield message
        run.result = history[-1]["content"]

    async def get(self, id: str) -> dict[str, Any] | None:
        row = await self.journal.get(id)
        return None if row is None else {"id": row.id, "session": row.owner, "state": row.state, "result": row.result}


def make_app(url: str, *, mended: bool, journal: Journal | None = None, **options: Any) -> FastAPI:
    """The service on the database at ``url``, bare or mended. ``options`` are the middleware's."""
    store = Store(url)
    service: Bare | Mended = Bare(store)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await store.create_tables()
        yield
        await store.engine.dispose()

    app = FastAPI(lifespan=lifespan)
    if mended:
        journal = journal or Journal(url)
        service = Mended(store, journal)
        app.add_middleware(HangupMiddleware, journal=journal, **options)

    @app.post("/runs")
    async def post_run(ask: Ask) -> Response:
        id = uuid.uuid4().hex
        messages = service.run(id, ask)
        if not ask.stream:
            async for message in messages:
                last = message
            done = {"id": id, "session": ask.session, "state": "completed", "result": last["content"]}
            return JSONResponse(done, 201)

        first = await anext(messages)  # the client gets its 200 when the run has begun

        async def events() -> AsyncIterator[str]:
            yield f"data: {json.dumps({'id': id})}\n\ndata: {json.dumps(first)}\n\n"
            async for message in messages:
                yield f"data: {json.dumps(message)}\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    @app.get("/runs/{id}")
    async def get_run(id: str) -> dict[str, Any]:
        row = await service.get(id)
        if row is None:
            raise HTTPException(404)
        return row

    return app


if __name__ == "__main__":
    import uvicorn

    app = make_app(os.environ.get("RUNS_DB", "sqlite:///runs.db"), mended=not os.environ.get("BARE"))
    uvicorn.run(app, port=int(sys.argv[1]) if len(sys.argv) > 1 else 8000)
