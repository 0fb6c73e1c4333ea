"""Finalizers: what a call must not end without.

Each runs in a task of its own, so that nothing which happens to the handler's task, and no shield or scope of anybody,
reaches it. They run one after the other, last registered first, each under its timeout and all under one budget. One
that outstays its time is interrupted once; if it swallows that too it is left behind, and the next one runs.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any, Final

import anyio
import anyio.lowlevel
import anyio.to_thread

from ._interrupt import Interruptible
from ._lifecycle import FinalizerRecord, Outcome, State
from ._runtime import clock, endure, spawn

logger: Final = logging.getLogger("hangup")

#: Seconds that a finalizer may take to wind up after it was cut off.
CUT_GRACE: Final = 0.5

# Threads for plain functions: apart from anyio's own forty, which handlers nobody can stop may all be holding.
_limiter: anyio.lowlevel.RunVar[anyio.CapacityLimiter] = anyio.lowlevel.RunVar("hangup_finalizer_threads")


class Finalizer:
    """One registered function, with the context it was registered in."""

    __slots__ = ("_context", "_error", "_work", "fn", "name", "takes_outcome", "timeout")

    def __init__(self, fn: Callable[..., object], *, name: str | None, timeout: float | None) -> None:
        if not callable(fn):
            raise TypeError(f"add_finalizer() takes a function of no argument or of the Outcome, not {fn!r}")
        if timeout is not None and not timeout > 0:
            raise ValueError(f"add_finalizer(timeout=) takes seconds, more than 0, not {timeout!r}")
        self.fn = fn
        self.name = name or _name_of(fn)
        self.timeout = timeout
        self.takes_outcome = _takes_argument(fn)
        self._context: Context = copy_context()
        self._work: Interruptible | None = None
        self._error: BaseException | None = None

    async def run(self, outcome: Outcome, timeout: float, who: str) -> FinalizerRecord:
        """Run to the end, or for ``timeout`` seconds. Never raises, and survives the cancellation of the caller."""
        started = clock()
        job = spawn(self._run, outcome, context=self._context, name=f"hangup: finalizer {self.name}")
        state = State.COMPLETED
        if not await endure(job, timeout):
            state = State.TIMED_OUT
            if self._work is not None:
                self._work.interrupt()
            stopped = await endure(job, CUT_GRACE)
            logger.error(
                "finalizer %s of %s was cut off after %.3g s%s",
                self.name,
                who,
                timeout,
                "" if stopped else " and goes on regardless; it is left behind",
                extra={"hangup_finalizer": self.name},
            )
        elif self._error is not None:
            state = State.FAILED
            logger.error(
                "finalizer %s of %s failed", self.name, who, exc_info=self._error, extra={"hangup_finalizer": self.name}
            )
        return FinalizerRecord(name=self.name, state=state, duration=clock() - started, error=self._error)

    async def _run(self, outcome: Outcome) -> None:
        self._work = work = Interruptible()
        try:
            with work.outer, work.inner:
                args = (outcome,) if self.takes_outcome else ()
                if inspect.iscoroutinefunction(self.fn):
                    await self.fn(*args)
                else:
                    results: list[object] = []
                    await anyio.to_thread.run_sync(
                        lambda: results.append(self.fn(*args)), abandon_on_cancel=True, limiter=_thread_limiter()
                    )
                    for result in results:
                        if inspect.isawaitable(result):  # a lambda around a coroutine function
                            await result
        except BaseException as exc:
            self._error = exc
            if not isinstance(exc, Exception):
                # KeyboardInterrupt, SystemExit, or the loop being torn down: recorded, and left to the loop.
                raise


class Finalizers:
    """The finalizers of one call."""

    __slots__ = ("_pending", "records")

    def __init__(self) -> None:
        self._pending: list[Finalizer] = []
        self.records: list[FinalizerRecord] = []

    def add(self, finalizer: Finalizer) -> None:
        """Register. Also from a finalizer that is running, and from any thread."""
        self._pending.append(finalizer)

    @property
    def pending(self) -> bool:
        """Whether any is left to run."""
        return bool(self._pending)

    async def run(self, outcome: Outcome, *, timeout: float, budget: float, who: str) -> tuple[FinalizerRecord, ...]:
        """Run all, last registered first, and those they register. Never raises. Seconds.

        One for which no budget is left gets a tenth of its timeout all the same: it is better tried than dropped.
        """
        deadline = clock() + budget
        while self._pending:
            finalizer = self._pending.pop()
            own = finalizer.timeout if finalizer.timeout is not None else timeout
            self.records.append(await finalizer.run(outcome, max(min(own, deadline - clock()), own / 10), who))
        return tuple(self.records)

    def __del__(self) -> None:
        if self._pending:
            names = ", ".join(finalizer.name for finalizer in self._pending)
            warnings.warn(
                f"a call was dropped with finalizers pending: {names}", ResourceWarning, stacklevel=1, source=self
            )


def _thread_limiter() -> anyio.CapacityLimiter:
    try:
        return _limiter.get()
    except LookupError:
        limiter = anyio.CapacityLimiter(40)
        _limiter.set(limiter)
        return limiter


def _name_of(fn: Callable[..., object]) -> str:
    while hasattr(fn, "func"):  # functools.partial
        fn = fn.func
    name: str = getattr(fn, "__qualname__", type(fn).__qualname__)
    return name.rpartition("<locals>.")[2]


def _takes_argument(fn: Callable[..., Any]) -> bool:
    """Whether ``fn`` takes the Outcome: whether it requires a positional argument."""
    if inspect.isfunction(fn):  # the quick way: `inspect.signature` costs 20 µs
        return fn.__code__.co_argcount > len(fn.__defaults__ or ())
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # some builtins have none
        return False
    return any(p.kind in {p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD} and p.default is p.empty for p in parameters)
