"""Functions of the user's that must run whatever happens, and must not run for ever.

Finalizers, ``cancel=`` of steps and ``before_success`` hooks all run here: in a task of their own, so that nothing
which happens to the handler's task, and no shield or scope of anybody, reaches them; a coroutine function is awaited,
a plain function runs in a worker thread. One that outstays its time is interrupted once, as soon as it can be reached.
If it swallows that too it is left behind.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from contextvars import Context
from typing import Any, Final

import anyio
import anyio.lowlevel
import anyio.to_thread

from ._errors import is_for_loop
from ._interrupt import Interruptible, Supervisor
from ._runtime import endure, spawn

#: Seconds that a function may take to wind up after it was cut off.
CUT_GRACE: Final = 0.5

# Threads for plain functions: apart from anyio's own forty, which handlers nobody can stop may all be holding.
_limiter: anyio.lowlevel.RunVar[anyio.CapacityLimiter] = anyio.lowlevel.RunVar("hangup_threads")


class Bounded:
    """One run of one function. `error` is what it raised; `cut` and `left_behind` say how it had to be stopped."""

    __slots__ = ("_args", "_fn", "_supervisor", "_work", "cut", "error", "left_behind")

    def __init__(self, fn: Callable[..., object], *args: object) -> None:
        self._fn = fn
        self._args = args
        self._work: Interruptible | None = None
        self._supervisor: Supervisor | None = None
        self.error: BaseException | None = None
        self.cut = False
        self.left_behind = False

    async def run(self, timeout: float, context: Context, name: str, *, eager: bool = False) -> None:
        """Run it, for at most ``timeout`` seconds. Never raises, and survives the cancellation of the caller.

        For ``eager``, see `spawn`: not before the application has returned, lest what runs interrupts its caller.
        """
        job = spawn(self._run, context=context, name=name, eager=eager)
        if await endure(job, timeout):
            return
        self.cut = True
        if self._work is not None:
            # Perhaps it is just about to resume, or inside a shield: that is waited for, also once it is left behind.
            self._supervisor = Supervisor(self._work, grace=math.inf, who=name, context=context, on_landed=lambda: None)
            self._supervisor.interrupt()
        self.left_behind = not await endure(job, CUT_GRACE)

    async def _run(self) -> None:
        self._work = work = Interruptible()
        try:
            with work.outer, work.inner:
                if inspect.iscoroutinefunction(self._fn):
                    await self._fn(*self._args)
                else:
                    await _run_in_thread(self._fn, *self._args)
        except BaseException as exc:
            self.error = exc
            if is_for_loop(exc):
                raise
        finally:
            if self._supervisor is not None:
                self._supervisor.stand_down()


async def _run_in_thread(fn: Callable[..., object], *args: object) -> None:
    results: list[Any] = []
    await anyio.to_thread.run_sync(lambda: results.append(fn(*args)), abandon_on_cancel=True, limiter=_thread_limiter())
    for result in results:
        if inspect.isawaitable(result):  # a lambda around a coroutine function
            await result
        elif inspect.isgenerator(result) or inspect.isasyncgen(result):
            raise TypeError(f"{name_of(fn)} returned a generator, of which nothing has run: is there a yield in it?")


def _thread_limiter() -> anyio.CapacityLimiter:
    try:
        return _limiter.get()
    except LookupError:
        limiter = anyio.CapacityLimiter(40)
        _limiter.set(limiter)
        return limiter


def name_of(fn: Callable[..., object]) -> str:
    """What to call ``fn`` in a record or a log line."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    name: str = getattr(fn, "__qualname__", type(fn).__qualname__)
    return name.rpartition("<locals>.")[2]
