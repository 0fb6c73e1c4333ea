"""What the tests of the journal share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from sqlalchemy import text
from starlette.types import Receive, Scope, Send

from hangup import HangupMiddleware, current_call
from hangup.journal import Journal, Run
from hangup.testing import Peer

from ..helpers import answer


class Working:
    """An application that opens a run and then does what it is told."""

    def __init__(self, journal: Journal, work: Callable[[Run], Any] | None = None, **options: Any) -> None:
        self.runs: list[Run] = []
        self._work = work
        self.open_options: dict[str, Any] = {}
        self.outcomes: list[Any] = []
        self.app = HangupMiddleware(self._run, journal=journal, observers=[self.outcomes.append], **options)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        run = await current_call().open_run("test", **self.open_options)
        self.runs.append(run)
        if self._work is not None:
            await self._work(run)
        await answer(send, body=b"done")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)

    @property
    def run(self) -> Run:
        [run] = self.runs
        return run


async def for_ever(run: Run) -> None:
    await anyio.sleep(60)


@asynccontextmanager
async def running(app: Working, **options: Any) -> AsyncIterator[tuple[Peer, Run]]:
    """A call whose run is open, in the block; its end after it."""
    peer = Peer(**options)
    before = len(app.runs)
    async with peer.calling(app):
        await eventually(lambda: len(app.runs) > before or peer.ended)
        yield peer, app.runs[-1]


async def eventually(condition: Callable[[], Any], timeout: float = 15, *, pause: float = 0.01) -> None:
    """Wait for ``condition()``, sync or async, to hold."""
    with anyio.fail_after(timeout):
        while True:
            held = condition()
            if asyncio.iscoroutine(held):
                held = await held
            if held:
                return
            await asyncio.sleep(pause)


async def sql(journal: Journal, statement: str) -> None:
    async with journal.database.engine.connect() as connection:
        await connection.execute(text(statement))


async def count_rewrites(journal: Journal) -> None:
    """Have the database itself count every change of a terminal row."""
    async with journal.database.engine.connect() as connection:
        await connection.execute(text("CREATE TABLE rewrites (id TEXT)"))
        if journal.database.is_sqlite:
            await connection.execute(
                text(
                    "CREATE TRIGGER final AFTER UPDATE ON hangup_runs WHEN OLD.state <> 'running' "
                    "BEGIN INSERT INTO rewrites VALUES (OLD.id); END"
                )
            )
        else:
            await connection.execute(
                text(
                    "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS "
                    "$$ BEGIN INSERT INTO rewrites VALUES (OLD.id); RETURN NULL; END $$"
                )
            )
            await connection.execute(
                text(
                    "CREATE TRIGGER final AFTER UPDATE ON hangup_runs FOR EACH ROW "
                    "WHEN (OLD.state <> 'running') EXECUTE FUNCTION note()"
                )
            )


async def rewrites(journal: Journal) -> int:
    async with journal.database.engine.connect() as connection:
        return int((await connection.execute(text("SELECT count(*) FROM rewrites"))).scalar_one())


async def expire(journal: Journal, *ids: str) -> None:
    """As if nobody had renewed these leases."""
    for id in ids:
        await sql(journal, f"UPDATE hangup_runs SET lease_until = '2020-01-01 00:00:00.000000' WHERE id = '{id}'")


def lines(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= level and r.name == "hangup"]
