"""Shutdown: what the calls of one event loop share, and how they end together.

No server tells its HTTP handlers that it was asked to stop, and some cancel them and tear the application down in the
same instant. So shutdown has a flag of its own, raised by the signal (see `_signals`) or by hand, and what the
application tears down is kept until its calls and their finalizers have ended.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

import anyio

from ._runtime import call_later, loop_runner
from ._watch import Sweeper, Turnstile

if TYPE_CHECKING:
    from ._call import Call

logger: Final = logging.getLogger("hangup")

#: How many calls hear in one turn of the event loop that their clients have left: some milliseconds of work.
AT_ONCE: Final = 50

#: All that are in use, of all middlewares.
heres: Final[WeakSet[Here]] = WeakSet()


class Here:
    """What the calls of one event loop share: the sweeper, the way in from other threads, and who is in flight."""

    __slots__ = (
        "__weakref__",
        "_quiet",
        "calls",
        "grace",
        "hears",
        "late",
        "run_soon",
        "shutting_down",
        "stopping",
        "sweeper",
        "thread",
        "turnstile",
    )

    def __init__(self, watch_after: float, grace: float | None) -> None:
        self.sweeper: Sweeper = Sweeper(watch_after)
        self.turnstile: Turnstile = Turnstile(AT_ONCE)
        self.run_soon: Callable[[Callable[[], object]], object] = loop_runner()
        self.thread: int = threading.get_ident()
        self.calls: set[Call] = set()
        self.late: set[Any] = set()  #: finalizers that were registered after the end of their call, and run
        self.grace: float | None = grace  #: seconds from the signal until calls are canceled; None: they never are
        self.hears: bool = False  #: of signals
        self.shutting_down: bool = False
        self.stopping: bool = False  #: calls are canceled, new ones too
        self._quiet: anyio.Event | None = None
        heres.add(self)

    def leave(self, call: Call) -> None:
        """``call`` has ended."""
        self.calls.discard(call)
        if self._quiet is not None:
            self._look()

    def ended(self, finalizer: object) -> None:
        """A late finalizer has ended."""
        self.late.discard(finalizer)
        self._look()

    def announce(self) -> None:
        """The process was told to stop. From any thread, and from signal handlers."""
        if not self.shutting_down:
            self.shutting_down = True
            try:
                self.run_soon(self._arm)
            except RuntimeError:
                pass  # the loop is closed

    def restart(self) -> None:
        """A server starts on this loop, perhaps not the first, or has ended and left nobody behind."""
        self.shutting_down = self.stopping = False

    def stop(self) -> None:
        """Cancel every call, and those that come. On the event loop."""
        self.shutting_down = self.stopping = True
        for call in tuple(self.calls):
            call.shut_down()

    async def drain(self, timeout: float) -> bool:
        """`stop`, and wait until every call and every finalizer has ended. False after ``timeout`` seconds."""
        self.stop()
        with anyio.move_on_after(timeout):
            while self.calls or self.late:
                if self._quiet is None:
                    self._quiet = anyio.Event()
                await self._quiet.wait()
        return not self.calls and not self.late

    async def hold(self, finalizer_budget: float) -> None:
        """`drain`, for as long as the calls in flight may need: to clean up, and for their finalizers."""
        timeout = max((call.policy.grace for call in self.calls), default=0.0) + finalizer_budget
        if not await self.drain(timeout):
            logger.warning(
                "shutdown goes on after %g s with %d calls and %d late finalizers unfinished: %s",
                timeout,
                len(self.calls),
                len(self.late),
                ", ".join(sorted(call.who for call in self.calls)[:10]) or "-",
            )

    def _arm(self) -> None:
        if self.grace is not None:
            call_later(self.grace, self._grace_over)

    def _grace_over(self) -> None:
        if self.shutting_down:  # not restarted meanwhile
            self.stop()

    def _look(self) -> None:
        if self._quiet is not None and not self.calls and not self.late:
            self._quiet.set()
            self._quiet = None
