"""`Journal`: what is handed to the middleware, and asked about runs."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextvars import Context
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar
from uuid import uuid4

from sqlalchemy.engine import URL
from starlette.requests import Request
from starlette.routing import Router

from .._lifecycle import State
from .._options import flag, seconds
from .._success import HookFailure
from ._database import Database
from ._errors import DuplicateRun, JournalError, JournalUnavailable, RunEnded, SchemaError
from ._ids import new_id
from ._keeper import Keeper
from ._mailbox import Mailbox
from ._records import (
    CancelReply,
    CancelStatus,
    Page,
    RunRecord,
    checked_attributes,
    checked_id,
    checked_moment,
    checked_name,
    checked_number,
    checked_owner,
    cut_text,
)
from ._run import Run, Together
from ._store import RUNNING, Store
from ._tasks import start

if TYPE_CHECKING:
    from .._call import Call

T = TypeVar("T")

logger: Final = logging.getLogger("hangup")

#: Seconds between looks at a row, of those who wait for it: doubling from the first to the last.
_FIRST_LOOK: Final = 0.01
_LAST_LOOK: Final = 0.25

#: Seconds that a transaction may take from its time stamp to its commit and still be seen by `Journal.watch`.
_OVERLAP: Final = timedelta(seconds=5)

#: Longest reason, in characters: a notification of PostgreSQL holds 8,000 bytes.
_REASON_LENGTH: Final = 1000

#: Who may see and stop which runs: all (True), those of one owner (the owner), or none (False, None).
Authorize = Callable[[Request], Any]


class Journal:
    """Durable run records: ``HangupMiddleware(app, journal=Journal("sqlite:///runs.db"))``.

    One object per process and event loop. It starts with the first use, or with the application's lifespan; it can
    also be used on its own, to read and to cancel: ``async with Journal(url) as journal: ...``. Needs asyncio:
    SQLAlchemy does not run on trio.

    :param url: ``sqlite:///path`` or ``postgresql://user@host/database``, as SQLAlchemy has it.
    :param create: create the table if there is none. False if your migrations do, with `hangup.journal.metadata`.
    :param lease: seconds after which a running row that nobody renewed is taken for lost, and closed.
    :param renew_every: seconds between renewals, and between sweeps; by default a third of ``lease``.
    :param timeout: seconds that one statement may take before it is given up, and tried again.
    :param open_timeout: seconds that opening a run, or a checkpoint, may take with all tries.
    :param close_timeout: seconds that closing one may take with all tries. Not more than the middleware's
        ``finalizer_timeout`` is used to record a success.
    :param poll_every: seconds between looks for cancels; by default 0.05 on SQLite, and 2 on PostgreSQL, which
        notifies.
    :param pool_size: how many connections may be open; on PostgreSQL one more listens.
    :param engine_options: more options for SQLAlchemy's ``create_async_engine``.
    :raises ValueError: for a URL that is none, or of another database, and for numbers out of range.
    """

    def __init__(
        self,
        url: str | URL,
        *,
        create: bool = True,
        lease: float = 30.0,
        renew_every: float | None = None,
        timeout: float = 2.0,
        open_timeout: float = 5.0,
        close_timeout: float = 5.0,
        poll_every: float | None = None,
        pool_size: int = 5,
        engine_options: Mapping[str, Any] | None = None,
    ) -> None:
        checked_number("pool_size", pool_size)
        if engine_options is not None and not isinstance(engine_options, Mapping):
            raise TypeError(f"engine_options takes a mapping, {{'echo': True}} for example, not {engine_options!r}")
        self.lease: Final = seconds("lease", lease)
        if math.isinf(self.lease):
            raise ValueError("lease takes seconds: a run that may be lost for ever is never closed")
        self.renew_every: Final = seconds("renew_every", lease / 3 if renew_every is None else renew_every)
        if self.renew_every > self.lease / 2:
            raise ValueError(f"renew_every takes at most half of lease ({lease:g} s), not {self.renew_every:g}")
        self.close_timeout: Final = seconds("close_timeout", close_timeout)
        self._open_timeout = seconds("open_timeout", open_timeout)
        self._create = flag("create", create)
        self.database: Final = Database(
            url,
            timeout=seconds("timeout", timeout),
            pool_size=pool_size + 1,
            engine_options=engine_options or {},
        )
        default_poll = 0.05 if self.database.is_sqlite else 2.0
        self.poll_every: Final = seconds("poll_every", default_poll if poll_every is None else poll_every)
        self.store: Final = Store(self.database)
        #: The name of this journal in its rows: machine, process, and something random.
        self.instance: Final = f"{socket.gethostname()[:80]}-{os.getpid()}-{uuid4().hex[:8]}"
        #: The runs whose leases are renewed, by id.
        self.live: Final[dict[str, Run]] = {}
        #: Runs that have ended, and what their rows are to say as soon as they can be written.
        self.unsettled: Final[dict[Run, Mapping[str, Any]]] = {}
        self._together: dict[Call, Together] = {}
        self._calls: list[Callable[[], Iterable[Call]]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._held: set[asyncio.Future[Any]] = set()
        self._users = 0
        self._prepared = False
        self._preparing = asyncio.Lock()
        self._stopping = asyncio.Event()
        self.keeper: Final = Keeper(self)
        self.mailbox: Final = Mailbox(self)

    # ------------------------------------------------------------------ starting and stopping

    async def start(self) -> None:
        """Create the table if need be, renew leases, sweep, and listen for cancels. A second call does nothing.

        A database that is away is no error here: runs cannot be opened until it is back.

        :raises SchemaError: if the table is of an older version, or missing and ``create`` is False.
        :raises RuntimeError: on trio, or if the journal is in use on another event loop.
        """
        loop = _running_loop()
        if self._loop is loop:
            if any(task.done() for task in self._tasks.values()):
                self._go_on(loop)
            return
        if self._loop is not None:
            if not self._loop.is_closed():
                raise RuntimeError("this Journal is in use on another event loop: make one for each")
            self._users = 0
            for of_that_loop in (self._tasks, self.live, self._together, self._held):  # nothing goes on there any more
                of_that_loop.clear()
            await self.database.dispose()
        self._loop = loop
        self._stopping = asyncio.Event()
        self._preparing = asyncio.Lock()
        try:
            await self.prepare()
        except JournalUnavailable as exc:
            logger.error("journal: %s; no run can be opened until the database is back", exc)
        except SchemaError:
            self._loop = None
            await self.database.dispose()
            raise
        finally:
            if self._loop is loop:  # also if whoever came first was interrupted: others rely on it by now
                self._go_on(loop)

    def _go_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have the keeper and the mailbox at work: for the first time, or again if somebody has cancelled them."""
        for name, keep_on in (("leases", self.keeper.keep_on), ("cancels", self.mailbox.keep_on)):
            task = self._tasks.get(name)
            if task is not None and task.done():
                logger.warning("journal: what looks after %s was cancelled, and is started again", name)
            if task is None or task.done():
                # In a context of its own: the call that happens to come first is not to be held, or counted, or traced.
                self._tasks[name] = loop.create_task(keep_on(), name=f"hangup: journal {name}", context=Context())

    async def prepare(self) -> None:
        """See that the table is there, once. Raises as `start` does, and JournalUnavailable."""
        if not self._prepared:
            async with self._preparing:
                if not self._prepared:
                    await self.database.prepare(create=self._create)
                    self._prepared = True

    async def close(self) -> None:
        """Stop, and close the connections. Runs that still go on are left to their leases, with a WARNING.

        A second call does nothing. It can be started again.
        """
        if self._loop is None:
            return
        tasks = list(self._tasks.values())
        self._tasks.clear()
        # They are let finish what they are at: a connection that is dropped half open is never closed.
        self._stopping.set()
        if tasks:
            _, slow = await asyncio.wait(tasks, timeout=self.close_timeout)
            for task in slow:
                task.cancel()
            if slow:
                await asyncio.wait(slow, timeout=self.close_timeout)
        if self._held:
            await asyncio.wait(self._held, timeout=self.close_timeout)
        try:
            await self.keeper.settle_late()
        except JournalError as exc:
            logger.error("journal: %d runs could not be closed: %s; their leases take over", len(self.unsettled), exc)
        if self.live:
            logger.warning("journal: closed with %d runs going on; their leases take over", len(self.live))
        self._loop = None
        await self.database.dispose()

    async def __aenter__(self) -> Self:
        """`start`. Several may be in here at once, two applications for example: the last that leaves closes it."""
        await self.start()
        self._users += 1
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._users -= 1
        if self._users <= 0:
            await self.close()

    # ------------------------------------------------------------------ opening

    async def open_run(
        self,
        call: Call,
        name: str,
        *,
        id: str | None = None,
        owner: str | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> Run:
        """Open a run in ``call``. See `hangup.Call.open_run`, which is how to call it."""
        run = Run(
            self,
            call,
            id=new_id() if id is None else checked_id(id),
            name=checked_name(name),
            owner=checked_owner(owner),
            attributes=checked_attributes(attributes),
        )
        if run.id in self.live:
            raise DuplicateRun(f"there is a run of the id {run.id} already")
        if call.outcome is not None:
            raise RuntimeError("open_run(): the call has ended")
        self.live[run.id] = run
        call.add_finalizer(run.finish, name="journal: close run", timeout=self.close_timeout)  # a metric label
        try:
            await self.start()
            if not self._prepared:
                await self.insist(self.prepare)
            await run.open()
        except (JournalUnavailable, SchemaError, RunEnded) as exc:
            self.release(run)
            logger.error("run %s (%s) could not be opened: %s", run.id, name, exc, extra={"hangup_run": run.id})
            refusal = "The run could not be recorded, and was not started"
            failure = HookFailure(refusal, status=503, headers={"Retry-After": "1"})
            failure.__cause__ = exc
            await call.refuse(failure)
            raise
        except (DuplicateRun, RuntimeError):  # nothing of it is in the database
            self.release(run)
            call.drop_finalizer(run.finish)
            raise
        if not run.closing:  # else the call has ended meanwhile
            call.effect_guards.append(run.note_effects)
            self._commit_with(call, run)
        return run

    def release(self, run: Run) -> None:
        """The lease of ``run`` is not renewed any more."""
        if self.live.get(run.id) is run:
            del self.live[run.id]

    def forget(self, call: Call) -> None:
        """``call`` has ended: no success of it will be written any more."""
        self._together.pop(call, None)

    def _commit_with(self, call: Call, run: Run) -> None:
        together = self._together.get(call)
        if together is None:
            together = Together(self, call)
            try:
                call.add_last_hook(together.commit)
            except RuntimeError:
                return  # after the response: the outcome closes it
            self._together[call] = together
        together.runs.append(run)

    # ------------------------------------------------------------------ cancel

    async def cancel(self, run_id: str, reason: str | None = None, *, timeout: float = 2.0) -> CancelReply:
        """Ask for a run to stop, wherever it runs. Its token fires with cause ``requested``.

        Returns when the instance that runs it has told it, or after ``timeout`` seconds: then the request stays
        written down (``pending``), and is heard when that instance comes round, or its lease ends. What was asked
        first is not changed by a second request.

        :raises ValueError: for a malformed id. A well-formed one that nobody knows is ``unknown``.
        :raises JournalUnavailable: if the database cannot be reached, and the run is not one of this process.
        """
        checked_id(run_id)
        limit = seconds("timeout", timeout, zero=True)
        reason = (cut_text(reason) or "")[:_REASON_LENGTH] or None
        await self.start()
        told = self.mailbox.tell(run_id, reason)
        try:
            asked = await self.insist(lambda: self.store.ask(run_id, reason))
            if told:
                await self.insist(lambda: self.store.seen(run_id))
        except JournalUnavailable:
            if not told:
                raise
            return CancelReply(CancelStatus.DELIVERED, None)
        deadline = time.monotonic() + limit
        pause = _FIRST_LOOK
        while True:
            record = await self.insist(lambda: self.store.get(run_id))
            status = _status_of(record, asked=asked, told=told)
            if status is not CancelStatus.PENDING or time.monotonic() >= deadline:
                return CancelReply(status, record)
            await asyncio.sleep(min(pause, max(deadline - time.monotonic(), 0)))
            pause = min(2 * pause, _LAST_LOOK)

    # ------------------------------------------------------------------ reading

    async def get(self, run_id: str) -> RunRecord | None:
        """The record of a run, None if there is none.

        :raises ValueError: for a malformed id.
        :raises JournalUnavailable: if the database cannot be reached.
        """
        checked_id(run_id)
        await self.start()
        return await self.insist(lambda: self.store.get(run_id))

    async def list(
        self,
        *,
        state: str | None = None,
        name: str | None = None,
        owner: str | None = None,
        opened_after: datetime | None = None,
        opened_before: datetime | None = None,
        limit: int = 50,
        after: str | None = None,
    ) -> Page:
        """A page of runs, newest first. All filters have to hold.

        :param limit: how many, 1 to 1000.
        :param after: the ``next`` of the page before. Rows that come meanwhile do not shift the pages.
        :raises ValueError: for a filter, limit or cursor that is none.
        """
        if state is not None and state not in {RUNNING, *State}:
            raise ValueError(f"state is one of {', '.join(map(repr, [RUNNING, *map(str, State)]))}, not {state!r}")
        if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= 1000:
            raise ValueError(f"limit takes 1 to 1000, not {limit!r}")
        for option, moment in (("opened_after", opened_after), ("opened_before", opened_before)):
            if moment is not None:
                checked_moment(option, moment)
        filters = {
            "state": None if state is None else str(state),
            "name": None if name is None else checked_name(name),
            "owner": checked_owner(owner),
            "opened_after": opened_after,
            "opened_before": opened_before,
        }
        await self.start()
        return await self.insist(lambda: self.store.list(filters, limit=limit, after=after))

    async def wait(self, run_id: str, timeout: float | None = None) -> RunRecord:
        """Wait for a run to end, at most ``timeout`` seconds, and return its terminal record.

        :raises LookupError: if there is no such run.
        :raises TimeoutError: if it has not ended in time.
        """
        checked_id(run_id)
        limit = None if timeout is None else seconds("timeout", timeout, zero=True)
        pause = _FIRST_LOOK
        async with asyncio.timeout(limit):
            while True:
                record = await self.get(run_id)
                if record is None:
                    raise LookupError(f"there is no run {run_id}")
                if record.ended:
                    return record
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LAST_LOOK)

    async def watch(self) -> AsyncIterator[RunRecord]:
        """Every run that is opened or closed from now on, within about 0.25 s, on all instances.

        A run that is opened and closed between two looks appears once, as it ended. While the database is away
        nothing comes, and what happened meanwhile follows.
        """
        await self.start()
        since = await self.insist(self.store.now)
        before = await self.insist(lambda: self.store.changed(since - _OVERLAP))
        seen: dict[tuple[str, str], datetime] = {(record.id, record.state): since for record in before}
        while True:
            await asyncio.sleep(_LAST_LOOK)
            try:
                records = await self.store.changed(since - _OVERLAP)
                now = await self.store.now()
            except JournalUnavailable:
                continue
            for record in records:
                key = (record.id, record.state)
                if key not in seen and (record.closed_at or record.opened_at) > since - _OVERLAP:
                    seen[key] = now
                    yield record
            since = now
            for key in [key for key, at in seen.items() if at < now - 4 * _OVERLAP]:
                del seen[key]

    async def purge(self, older_than: float | timedelta, *, batch: int = 1000) -> int:
        """Delete runs that ended more than ``older_than`` (seconds) ago, ``batch`` at a time. How many.

        Running rows are never deleted.
        """
        if isinstance(older_than, timedelta):
            older_than = older_than.total_seconds()
        age = seconds("older_than", older_than, zero=True)
        checked_number("batch", batch)
        await self.start()
        deleted = 0
        while count := await self.insist(lambda: self.store.purge(age, batch)):
            deleted += count
        return deleted

    # ------------------------------------------------------------------ the web

    def router(self, *, authorize: Authorize) -> Router:
        """Routes to mount: ``GET /runs``, ``GET /runs/{id}``, ``POST /runs/{id}/cancel``, ``GET /runs/{id}/events``.

        :param authorize: called with each request, awaited if need be. What it returns says whose runs may be seen
            and stopped: True for all, an owner for those of that owner, False or None for none (403). It may raise a
            Starlette ``HTTPException`` of its own, 401 for example.
        """
        from ._router import make_router

        return make_router(self, authorize)

    def inspector(self, *, authorize: Authorize) -> Router:
        """A page to mount: the calls in flight on this instance and the recent runs, live, with cancel buttons.

        :param authorize: as in `router`. The calls of this instance are shown, and can be stopped, with True only.
        """
        from ._inspector import make_inspector

        return make_inspector(self, authorize)

    def attach(self, calls: Callable[[], Iterable[Call]]) -> None:
        """The middleware: where the calls in flight are to be found."""
        self._calls.append(calls)

    @property
    def calls_in_flight(self) -> tuple[Call, ...]:
        """The calls of the middlewares that have this journal."""
        return tuple(call for calls in self._calls for call in calls())

    # ------------------------------------------------------------------ what the parts share

    async def rest(self, pause: float, sooner: asyncio.Event | None = None) -> bool:
        """Sleep for ``pause`` seconds, or until `close`, or until ``sooner`` is set. True if the journal stops."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self._stopping, sooner) if event is not None]
        try:
            await asyncio.wait(waits, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return self._stopping.is_set()

    async def insist(self, attempt: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Call ``attempt`` until it succeeds or ``open_timeout`` seconds have passed. It must bear repetition.

        :raises JournalUnavailable: what the last try raised.
        """
        deadline = time.monotonic() + self._open_timeout
        pause = 0.05
        while True:
            try:
                return await attempt()
            except JournalUnavailable:
                if time.monotonic() + pause >= deadline:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)

    async def hold(self, work: Coroutine[Any, Any, T]) -> T:
        """Await ``work`` as a task of its own. If the caller is interrupted it goes on, and `close` waits for it."""
        # What `asyncio.shield` does, with one turn of the event loop for three: every run comes through here.
        told: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        async def run() -> None:
            try:
                result = await work
            except BaseException as exc:
                if not told.done():  # else whoever waited was interrupted: nobody will look
                    told.set_exception(exc)
                if not isinstance(exc, Exception):
                    raise
            else:
                if not told.done():
                    told.set_result(result)

        task = start(run())
        if not task.done():
            self._held.add(task)
            task.add_done_callback(self._release)
        return await told

    def _release(self, task: asyncio.Future[Any]) -> None:
        self._held.discard(task)
        if not task.cancelled():
            task.exception()  # nobody else will look

    def hold_quietly(self, work: Coroutine[Any, Any, object]) -> None:
        """`hold`, in the background; an error of the journal is logged at DEBUG."""

        async def run() -> None:
            try:
                await work
            except JournalError as exc:
                logger.debug("journal: %s", exc)

        task = asyncio.ensure_future(run())
        self._held.add(task)
        task.add_done_callback(self._release)


def _status_of(record: RunRecord | None, *, asked: bool, told: bool) -> CancelStatus:
    if told:
        return CancelStatus.DELIVERED  # though its row may not be there yet
    if record is None:
        return CancelStatus.UNKNOWN
    if record.cancel_seen_at is not None and not record.ended:
        return CancelStatus.DELIVERED
    if record.ended:
        heard = record.cancel_seen_at is not None or record.cause == "requested"
        return CancelStatus.DELIVERED if asked and heard else CancelStatus.ENDED
    return CancelStatus.PENDING


def _running_loop() -> asyncio.AbstractEventLoop:
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    if task is None:
        raise RuntimeError("the journal needs asyncio: SQLAlchemy's asyncio support does not run on trio")
    return asyncio.get_running_loop()
