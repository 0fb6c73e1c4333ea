"""One run: its handle for the handler, and how its row is opened and closed.

The rules:

* The row is there before the work begins, and is closed before the client can see success.
* What a write came to is never guessed. When its reply is lost it is sent again: an ``INSERT`` of the same id meets
  itself, an ``UPDATE ... WHERE state = 'running'`` finds nothing left to do. Then the row is read, and its fence says
  whether it was this run that wrote it.
* Nothing the client does interrupts a write: each is a task of its own, and the end of the call waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from .._lifecycle import Outcome, Phase, State
from .._success import HookFailure
from ..telemetry import current_trace_id
from ._errors import DuplicateRun, JournalError, JournalUnavailable, RunEnded
from ._records import RESULT_LIMIT, RunRecord, checked_json, cut_text, names_as_text

if TYPE_CHECKING:
    from .._call import Call
    from ._journal import Journal

logger: Final = logging.getLogger("hangup")

#: Seconds between tries: doubling from the first to the last.
_FIRST_PAUSE: Final = 0.05
_LAST_PAUSE: Final = 1.0

#: How much of the time there is may be used: the rest is for saying that it was not enough.
_SHARE: Final = 0.9


class Superseded(JournalError):
    """The row was closed before. `record` is what it says, None if it is gone; `ours` whether this run wrote it."""

    def __init__(self, run: Run, record: RunRecord | None, *, ours: bool) -> None:
        said = f"already says {record.state} ({record.cause or 'no cause'})" if record is not None else "was deleted"
        super().__init__(f"the row of run {run.id} {said}")
        self.record = record
        self.ours = ours


class Run:
    """A run that is in the journal: what ``await current_call().open_run(...)`` returns.

    Used on the event loop of its call. It ends with the call; nothing has to be closed.
    """

    def __init__(
        self,
        journal: Journal,
        call: Call,
        *,
        id: str,
        name: str,
        owner: str | None,
        attributes: dict[str, Any] | None,
    ) -> None:
        self.id: Final = id
        self.name: Final = name
        self.owner: Final = owner
        self.attributes: Final = attributes
        self.call: Final = call
        self.fence: Final = os.urandom(16).hex()
        self.opened: bool = False  #: its row is known to be there
        self.closing: bool = False  #: its terminal row is being written, or is to be: too late to write it as running
        self.finishing: bool = False  #: `finish` is at work
        self.lost = False  #: another has closed its row
        self._journal = journal
        self._state: str | None = None
        self._result: Any = None
        self._inserting: asyncio.Event | None = None
        self._effects: tuple[str, ...] = ()
        self._effects_turn = asyncio.Lock()
        self._trace_id = current_trace_id()

    # ------------------------------------------------------------------ what handlers use

    @property
    def state(self) -> str | None:
        """What its row says, once it is known to be terminal. It follows from the outcome of the call."""
        return self._state

    @property
    def result(self) -> Any:
        """What came of it: written with the terminal row. Anything JSON can hold, up to 1 MiB.

        It is copied when it is assigned: to change it, assign again.
        """
        return self._result

    @result.setter
    def result(self, value: Any) -> None:
        if self.state is not None:
            raise RunEnded(f"run {self.id} has ended, its row is final")
        self._result = checked_json("result", value, RESULT_LIMIT)

    async def checkpoint(self, result: Any) -> None:
        """Write a partial result now: it survives a hang-up, and the end of the process. Replaces the one before.

        :raises RunEnded: if the run has ended, or its row was closed by another.
        :raises JournalUnavailable: if it could not be written. The run goes on, and a later write includes it.
        :raises TypeError: if it is not JSON.
        :raises ValueError: likewise, and if it is too long.
        """
        self.result = result
        written = await self._journal.hold(
            self._journal.insist(lambda: self._journal.store.checkpoint(self.id, self.fence, self._result))
        )
        if not written:
            raise RunEnded(f"run {self.id} has ended: its row was closed by another")

    def __repr__(self) -> str:
        return f"<Run {self.id} {self.name!r} {self.state or ('running' if self.opened else 'opening')}>"

    # ------------------------------------------------------------------ opening

    async def open(self) -> None:
        """Write the running row. If the handler is interrupted meanwhile the write goes on, and `finish` waits for it.

        :raises DuplicateRun: if the id is taken.
        :raises JournalUnavailable: if it could not be written in time.
        :raises RunEnded: if the call has ended before it was.
        :raises SchemaError: if there is no such table.
        """
        self._inserting = asyncio.Event()
        await self._journal.hold(self._insert(self._inserting))

    async def _insert(self, inserted: asyncio.Event) -> None:
        try:
            await self._journal.insist(self._insert_once)
            self.opened = True
        finally:
            inserted.set()

    @property
    def opening(self) -> bool:
        """Whether its row is being written now: what has become of it shows when that has ended."""
        return self._inserting is not None and not self._inserting.is_set()

    async def _insert_once(self) -> None:
        if self.closing:
            raise RunEnded(f"run {self.id} was not opened: its call has ended")
        values = {
            "id": self.id,
            "name": self.name,
            "owner": self.owner,
            "instance": self._journal.instance,
            "fence": self.fence,
            "trace_id": self._trace_id,
            "attributes": self.attributes,
        }
        try:
            await self._journal.store.open(values, self._journal.lease)
        except DuplicateRun:
            found = await self._journal.store.look_up(self.id)
            if found is None or found[1] != self.fence:
                raise DuplicateRun(f"there is a run of the id {self.id} already") from None
            # The reply to an earlier attempt was lost, and this may have taken longer than a lease
            if found[0].ended:
                raise RunEnded(f"run {self.id} has ended: it took too long to open") from None

    # ------------------------------------------------------------------ closing

    def closing_of(self, outcome: Outcome) -> dict[str, Any]:
        """What the row is to say of ``outcome``."""
        error = outcome.error
        unresolved = [step.name for step in outcome.steps if step.effect and step.state is State.AMBIGUOUS]
        return self._closing(
            state=str(outcome.state),
            cause=None if outcome.cause is None else str(outcome.cause),
            phase=str(outcome.phase),
            reason=cut_text(outcome.reason),
            http_status=outcome.status_code,
            delivered=outcome.delivered,
            error=None if error is None else cut_text(f"{type(error).__name__}: {cut_text(error)}"),
            effects=names_as_text(unresolved),
        )

    def closing_of_success(self) -> dict[str, Any]:
        """What the row is to say of a success that is about to become visible."""
        life = self.call.life
        return self._closing(
            state=str(State.COMPLETED),
            cause=None if life.cause is None else str(life.cause),
            phase=str(life.phase or Phase.AFTER_RESPONSE),
            reason=cut_text(life.reason),
            http_status=self.call.status_code,
            delivered=not life.left,
        )

    def _closing(self, **said: Any) -> dict[str, Any]:
        names = ("cause", "phase", "reason", "http_status", "delivered", "error", "effects")
        values = {"new_" + name: said.get(name) for name in names}
        return {**values, "new_state": said["state"], "new_result": self._result, "run": self.id, "by": self.fence}

    async def finish(self, outcome: Outcome) -> None:
        """The finalizer: close the row by what became of the call, unless its success was written already.

        :raises JournalUnavailable: if it cannot be done in time. Then it is tried again with each renewal of leases,
            and if that comes too late the lease takes over.
        """
        journal = self._journal
        journal.forget(self.call)
        if self.state is not None:
            journal.release(self)
            return
        self.closing = self.finishing = True
        try:
            closing = journal.unsettled[self] = self.closing_of(outcome)
            async with asyncio.timeout(_SHARE * journal.close_timeout):
                if self._inserting is not None:
                    await self._inserting.wait()
                await settle(journal, [self], [closing], forever=self.opened)
        except Superseded as exc:
            self.report_superseded(exc, str(outcome.state))
        except (JournalError, TimeoutError) as exc:
            if not self.opened and not self.opening:
                journal.unsettled.pop(self, None)
                return  # nobody was told that there is such a run, and if there is, its lease takes over
            raise JournalUnavailable(
                f"run {self.id} could not be closed as {outcome.state}: its lease takes over ({exc})"
            ) from exc
        finally:
            self.finishing = False
            journal.release(self)
        journal.unsettled.pop(self, None)

    def has_ended(self, state: str) -> None:
        """Its row is terminal, and says ``state``."""
        self._state = state

    def report_superseded(self, exc: Superseded, state: str) -> None:
        """The row was terminal before it could say ``state``: take note, and say so at ERROR."""
        if not self.opened and exc.record is None:
            return  # it was never written
        self.has_ended(exc.record.state if exc.record is not None else "deleted")
        if exc.ours:
            # `before_success` wrote it, the reply was lost until it was too late to say so to the client
            logger.error("%s: the client was not told, the outcome of the call is %s", exc, state)
        elif not self.lost:
            logger.error("%s, by another: the outcome %s is not written", exc, state)

    # ------------------------------------------------------------------ effects

    async def note_effects(self) -> None:
        """Write which effects are in flight now: what a sweep has to know when this process is gone.

        :raises RunEnded: if the row was closed by another: the effect must not begin.
        :raises JournalUnavailable: if it could not be written.
        """
        async with self._effects_turn:
            names = self.call.effects_in_flight
            if names == self._effects or self.closing:
                return
            written = await self._journal.hold(
                self._journal.insist(
                    lambda: self._journal.store.note_effects(self.id, self.fence, names_as_text(names))
                )
            )
            if not written and not self.closing:
                raise RunEnded(f"run {self.id} has ended: its row was closed by another")
            self._effects = names


async def settle(
    journal: Journal, runs: Sequence[Run], closings: Sequence[Mapping[str, Any]], *, forever: bool = True
) -> None:
    """Write terminal rows, all or none, however often it takes. The caller sets the limit.

    :raises Superseded: if a row was terminal and does not say what it should.
    :raises JournalUnavailable: at the first failure, if not ``forever``.
    """
    pause = _FIRST_PAUSE
    while True:
        try:
            if all(await journal.store.close(*closings)):
                break
            if await are_written(journal, runs, closings):
                break
        except JournalUnavailable as exc:
            if not forever:
                raise
            logger.info("closing %s: %s; trying again", ", ".join(run.id for run in runs), exc)
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LAST_PAUSE)
    for run, closing in zip(runs, closings, strict=True):
        run.has_ended(closing["new_state"])


async def are_written(journal: Journal, runs: Sequence[Run], closings: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the rows say what they should already: the reply to an earlier try was lost.

    :raises Superseded: if one is terminal and says something else, or is gone.
    """
    written = 0
    for run, closing in zip(runs, closings, strict=True):
        found = await journal.store.look_up(run.id)
        if found is None:
            raise Superseded(run, None, ours=False)
        record, fence, closed_by = found
        if fence != run.fence:
            raise Superseded(run, None, ours=False)  # an id that was taken: our row never was
        if record.ended:
            ours = closed_by == run.fence
            if not ours or record.state != closing["new_state"]:
                raise Superseded(run, record, ours=ours)
            written += 1
    return written == len(runs)


class Together:
    """The runs of one call, whose success is written at once."""

    def __init__(self, journal: Journal, call: Call) -> None:
        self._journal = journal
        self._call = call
        self.runs: list[Run] = []

    async def commit(self) -> None:
        """The last ``before_success`` hook: the rows say ``completed`` before the client can see it.

        :raises HookFailure: if they do not, or nobody can know: the client must not be told of success.
        """
        runs = [run for run in self.runs if run.opened and run.state is None]
        if not runs or self._call.told_cause is not None or self._call.unresolved:
            return  # it answers although it was told to stop, or an effect is ambiguous: the outcome says what that is
        for run in runs:
            run.closing = True
        limit = _SHARE * min(self._journal.close_timeout, self._call.hook_timeout)
        ids = ", ".join(run.id for run in runs)
        try:
            async with asyncio.timeout(limit):
                await settle(self._journal, runs, [run.closing_of_success() for run in runs])
        except Superseded as exc:
            raise HookFailure(f"{exc}", status=503) from exc
        except TimeoutError as exc:
            # The database was away when it was asked what became of the commit. Nobody can know, so nothing is claimed.
            raise HookFailure(
                f"It is not known whether run {ids} has been recorded as completed. Ask for the run to see",
                status=503,
                headers={"Retry-After": "1"},
            ) from exc
        except JournalError as exc:
            raise HookFailure(f"The outcome of run {ids} could not be recorded", status=503) from exc
        self._journal.forget(self._call)
        for run in runs:
            self._journal.release(run)
            self._call.drop_finalizer(run.finish)
