"""How a request to cancel reaches the process that runs the run.

PostgreSQL notifies: one connection listens, and a cancel is there within milliseconds. Only cancels are notified. A
``NOTIFY`` takes a lock of the whole database cluster at its commit, which opening and closing runs must not wait for.
Under it is a net: every instance looks for requests to its runs now and then, and at once after it has connected.

SQLite has no such thing, but counts the commits of others: ``PRAGMA data_version`` costs a look at the file, so it can
be asked often, and the table is read only when it has changed.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Any, Final

from ._errors import JournalError
from ._store import CHANNEL

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from ._journal import Journal

logger: Final = logging.getLogger("hangup")

#: Seconds between looks while nobody listens.
_DEAF: Final = 0.25

#: Seconds between looks at whether a connection that listens is still wanted.
_LAST_RESORT: Final = 60.0


class Mailbox:
    """Hears of requests to cancel, and tells the runs."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.listening: bool = False

    def tell(self, run_id: str, reason: str | None) -> bool:
        """Tell a run of this process to stop. False if there is none of that id, or it is past being told."""
        run = self._journal.live.get(run_id)
        if run is None or run.call.outcome is not None or run.state is not None:
            return False
        return run.call.cancel(reason) or run.call.cause is not None

    async def keep_on(self) -> None:
        """Listen and look until the journal stops."""
        if self._journal.database.is_sqlite:
            await self._again_and_again(self._watch_file)
        else:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._again_and_again(self._listen))
                tasks.create_task(self._again_and_again(self._look_now_and_then))

    async def _again_and_again(self, work: Any) -> None:
        while True:
            try:
                await work()
            except Exception as exc:
                logger.debug("journal: %s: %r; trying again", work.__name__, exc)
            if await self._journal.rest(_DEAF):
                return

    # ------------------------------------------------------------------ PostgreSQL

    async def _listen(self) -> None:
        journal = self._journal
        async with asyncio.timeout(journal.database.timeout) as limit, journal.database.engine.connect() as connection:
            driver: Any = (await connection.get_raw_connection()).driver_connection
            gone = asyncio.Event()
            driver.add_termination_listener(lambda _: gone.set())
            await driver.add_listener(CHANNEL, self._on_notification)
            try:
                self.listening = True
                limit.reschedule(None)
                await self._look()  # for what was asked before
                while not gone.is_set() and not await self._journal.rest(_LAST_RESORT, gone):
                    pass
            finally:
                self.listening = False
                await connection.invalidate()  # it listens: nobody else may have it

    def _on_notification(self, connection: object, pid: int, channel: str, payload: object) -> None:
        try:
            asked = json.loads(str(payload))
            self._deliver(asked["id"], asked["reason"])
        except (ValueError, KeyError, TypeError):
            logger.debug("journal: a notification that is not ours: %.100r", payload)

    async def _look_now_and_then(self) -> None:
        every = self._journal.poll_every
        while not await self._journal.rest(every if self.listening else min(_DEAF, every)):
            await self._look()

    # ------------------------------------------------------------------ SQLite

    async def _watch_file(self) -> None:
        async with self._journal.database.engine.connect() as connection:
            before = None
            while not await self._journal.rest(self._journal.poll_every):
                version = await self._data_version(connection) if self._journal.live else None
                if version != before:
                    before = version
                    await self._look()

    @staticmethod
    async def _data_version(connection: AsyncConnection) -> Any:
        return (await connection.exec_driver_sql("PRAGMA data_version")).scalar()

    # ------------------------------------------------------------------ both

    async def _look(self) -> None:
        if self._journal.live:
            for run_id, reason in await self._journal.store.wanted(self._journal.instance):
                self._deliver(run_id, reason)

    def _deliver(self, run_id: str, reason: str | None) -> None:
        if self.tell(run_id, reason):
            self._journal.hold_quietly(self._seen(run_id))

    async def _seen(self, run_id: str) -> None:
        try:
            await self._journal.store.seen(run_id)
        except JournalError:
            await self._journal.insist(lambda: self._journal.store.seen(run_id))
