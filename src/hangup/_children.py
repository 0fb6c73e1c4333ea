"""Child tasks of a call: interrupted with it, and joined before its state is written."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Final

from ._bounded import name_of
from ._errors import is_for_loop, may_swallow
from ._interrupt import Interruptible, Supervisor
from ._runtime import Job, endure, spawn

logger: Final = logging.getLogger("hangup")


class Child:
    """One task that `Call.start_soon` started."""

    __slots__ = ("_context", "_fn", "_grace", "_job", "_stopped", "_supervisor", "_who", "error")

    def __init__(self, fn: Callable[[], Awaitable[object]], *, grace: float, who: str, context: Context) -> None:
        self._fn = fn
        self._grace = grace
        self._who = who
        self._context = context
        self._supervisor: Supervisor | None = None
        self._stopped = False
        self.error: BaseException | None = None
        self._job: Job = spawn(self._run, context=context, name=f"hangup: child of {who}")

    async def join(self) -> None:
        """Wait for the end, whatever happens to the waiting task meanwhile."""
        await endure(self._job)

    def interrupt(self) -> None:
        """Interrupt it once, and see to it that it ends. A second call changes nothing."""
        if self._stopped:
            return
        self._stopped = True
        if self._supervisor is not None:
            self._supervisor.interrupt()

    def change_grace(self, grace: float) -> None:
        """From now on it has ``grace`` seconds: `Supervisor.change_grace`."""
        self._grace = grace
        if self._supervisor is not None:
            self._supervisor.change_grace(grace)

    async def _run(self) -> None:
        if self._stopped:
            return
        work = Interruptible()
        self._supervisor = supervisor = Supervisor(
            work,
            grace=self._grace,
            who=f"a child task of {self._who}",
            context=self._context,
            on_landed=lambda: None,
        )
        try:
            with work.outer, work.inner:
                work_to_do = self._fn()
                if not inspect.isawaitable(work_to_do):
                    raise TypeError(f"start_soon() takes a coroutine function, and {name_of(self._fn)} is none")
                await work_to_do
        except BaseException as exc:
            if is_for_loop(exc) and not (self._stopped and may_swallow(exc)):
                raise
            if self._stopped:
                logger.debug("%r left a child task of %s after it was told to stop", exc, self._who)
            else:
                self.error = exc
                logger.error("a child task of %s failed", self._who, exc_info=exc)
        finally:
            supervisor.stand_down()
            self._supervisor = None
