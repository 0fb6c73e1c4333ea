"""Finalizers: what a call must not end without. They run one after the other, last registered first, each under its
timeout and all under one budget; see `Bounded` for how.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context, copy_context
from typing import Final

from . import _hooks
from ._bounded import Bounded, name_of
from ._lifecycle import FinalizerRecord, Outcome, State
from ._options import requires, seconds
from ._runtime import clock

logger: Final = logging.getLogger("hangup")


#: Tells the listener that a finalizer starts, and returns the mark that it leaves.
Observe = Callable[["Finalizer"], "_hooks.FinalizerMark | None"]


class Finalizer:
    """One registered function, with the context it was registered in."""

    __slots__ = ("_context", "_takes_outcome", "fn", "name", "timeout")

    def __init__(self, fn: Callable[..., object], *, name: str | None, timeout: float | None) -> None:
        required = requires("add_finalizer() takes a function of no argument or of the Outcome", fn, 1)
        if timeout is not None:
            seconds("add_finalizer(timeout=)", timeout)
        self.fn: Callable[..., object] = fn
        self._takes_outcome = required > 0
        self._context: Context = copy_context()
        self.name: str = name or name_of(fn)
        self.timeout: float | None = timeout

    async def run(self, outcome: Outcome, timeout: float, who: str, observe: Observe | None = None) -> FinalizerRecord:
        """Run to the end, or for ``timeout`` seconds. Never raises, and survives the cancellation of the caller."""
        mark = self._context.run(observe, self) if observe is not None else None
        started = clock()
        run = Bounded(self.fn, outcome) if self._takes_outcome else Bounded(self.fn)
        await run.run(timeout, self._context, f"hangup: finalizer {self.name}", eager=True)
        state = State.TIMED_OUT if run.cut else State.FAILED if run.error is not None else State.COMPLETED
        extra = {"hangup_finalizer": self.name}
        if state is State.TIMED_OUT:
            text = "finalizer %s of %s was cut off after %.3g s%s"
            still = " and goes on regardless; it is left behind" if run.left_behind else ""
            logger.error(text, self.name, who, timeout, still, extra=extra)
        elif state is State.FAILED:
            logger.error("finalizer %s of %s failed", self.name, who, exc_info=run.error, extra=extra)
        record = FinalizerRecord(name=self.name, state=state, duration=clock() - started, error=run.error)
        if mark is not None:
            _hooks.tell(mark.end, record)
        return record


class Finalizers:
    """The finalizers of one call."""

    __slots__ = ("_pending", "begun", "records")

    def __init__(self) -> None:
        self._pending: list[Finalizer] = []
        self.begun: bool = False  #: some run, or have run
        self.records: list[FinalizerRecord] = []

    def add(self, finalizer: Finalizer) -> None:
        """Register. Also from a finalizer that is running, and from any thread."""
        self._pending.append(finalizer)

    def drop(self, fn: Callable[..., object]) -> bool:
        """Take ``fn`` back. False if it is not registered, or has begun."""
        for finalizer in self._pending:
            if finalizer.fn == fn:
                with suppress(ValueError):  # begun meanwhile, for this may be another thread
                    self._pending.remove(finalizer)
                    return True
        return False

    @property
    def pending(self) -> bool:
        """Whether any is left to run."""
        return bool(self._pending)

    async def run(
        self, outcome: Outcome, *, timeout: float, budget: float, who: str, observe: Observe | None = None
    ) -> tuple[FinalizerRecord, ...]:
        """Run all, last registered first, and those they register. Never raises. Seconds.

        One for which no budget is left gets a tenth of its timeout all the same: it is better tried than dropped.
        """
        self.begun = True
        deadline = clock() + budget
        while self._pending:
            finalizer = self._pending.pop()
            own = min(finalizer.timeout or timeout, budget)
            self.records.append(await finalizer.run(outcome, max(min(own, deadline - clock()), own / 10), who, observe))
        return tuple(self.records)

    def __del__(self) -> None:
        if self._pending:
            names = ", ".join(finalizer.name for finalizer in self._pending)
            warnings.warn(
                f"a call was dropped with finalizers pending: {names}", ResourceWarning, stacklevel=1, source=self
            )
