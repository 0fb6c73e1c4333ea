"""One cancellation, through the front door.

anyio cancels by level: while a cancelled scope is open, every ``await`` in it raises again, so ``finally: await ...``
is cut off at its first step. `Task.cancel` cancels once, but goes straight through anyio's shields: worker threads are
orphaned and half-closed connections leak. `Interruptible` gets one cancellation that respects every shield out of
anyio's public API.

The work runs in two nested scopes. To interrupt it, the inner one is made a shield and the outer one cancelled, so
nothing arrives yet. Opening the shield makes anyio deliver at once, to every task below that no other shield protects;
closing it again, before anything else can run, leaves a single ``CancelledError``. Whether the host task got it shows
in `Task.cancelling`. If it did not, it is inside somebody's shield or just about to resume, and one tries again.
Until the first interruption the shield is open, and the scopes of others further out reach the work as ever.

A server that cancels the task itself does so through every shield, and the work cleans up then. That is not to be cut
off: while the host carries a request of somebody else an interruption waits, for as long as the grace. A timeout of the
application's own looks the same, but takes its request back when its block is left.

trio's tasks expect cancellation by level, and trio has no other kind. There the outer scope is simply cancelled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import Context
from typing import Final

import anyio

from ._runtime import NativeTask, Timer, call_later, clock, current_task, is_running, scope_class, spawn, where

logger: Final = logging.getLogger("hangup")

#: How often a deaf task is interrupted before it is left alone and reported.
ATTEMPTS: Final = 3

#: Seconds between tries to deliver to a task that cannot be reached. The first tries are for one that was just about to
#: resume; after them it is inside a shield, most often a worker thread's, and looking often would only hit the moment
#: between two of them, in which the answer of a finished thread would be lost.
_PAUSES: Final = (0.0, 0.0, 0.02)
_LAST_PAUSE: Final = 0.05


class Interruptible:
    """Work that can be interrupted. Enter `outer`, then `inner`, in the task that does the work.

    ``native`` says that the host is an `asyncio.Task`; else it is a trio task.
    """

    __slots__ = ("_carried", "cancels_before", "host", "inner", "landed", "native", "outer")

    def __init__(self) -> None:
        host, native = current_task()
        new = scope_class(native)
        self.host: NativeTask = host
        self.native: bool = native
        self.outer: anyio.CancelScope = new()
        self.inner: anyio.CancelScope = new()
        self.landed: int = 0  #: how many interruptions were delivered
        #: How many `Task.cancel` requests the host carried when it came.
        self.cancels_before: int = host.cancelling() if native else 0
        self._carried = self.cancels_before  # when it came, or was interrupted last: what is more, is by others

    def interrupt(self) -> bool:
        """Deliver one cancellation. False if it could not land now; call it again shortly.

        Call it on the event loop. From inside the work itself it never lands: a running task cannot be reached.
        """
        host = self.host
        if not self.native:
            self.inner.shield = False
            self.outer.cancel()
            self.landed += 1
            return True
        if is_running(host):
            return False
        before = host.cancelling()
        self.inner.shield = True
        self.outer.cancel()
        self.inner.shield = False
        self.inner.shield = True
        landed: bool = host.cancelling() > before
        if landed:
            self.landed += 1
            self._carried = host.cancelling()
        return landed

    def let_go(self) -> None:
        """The work may go on. On trio, that takes the cancellation back from whatever comes next."""
        if self.outer.cancel_called:
            self.inner.shield = True

    def has_heard(self) -> bool:
        """Whether others have cancelled the host since it was interrupted last, and have not taken that back."""
        if not self.native:
            return False
        carries = self.host.cancelling()
        self._carried = min(self._carried, carries)
        return bool(carries > self._carried)

    def cancels_since(self) -> int:
        """How many `Task.cancel` requests of others the host carries now. Always 0 on trio, which has none."""
        return self.host.cancelling() - self.cancels_before if self.native else 0


class Supervisor:
    """Interrupts one piece of work: once, and again after each ``grace`` seconds that it goes on, `ATTEMPTS` in all.

    Then it is left alone, and one WARNING names where it is. While the work cannot be reached it is tried up to twenty
    times a second. ``on_landed`` is called on each delivery. All on the event loop.

    ``foreign``: the task of the work belongs to a server, which may cancel it too. For that it has its grace as well.
    """

    __slots__ = (
        "_context",
        "_foreign",
        "_grace",
        "_held_off",
        "_on_landed",
        "_spared",
        "_timer",
        "_told",
        "_who",
        "_work",
        "unresponsive",
    )

    def __init__(
        self,
        work: Interruptible,
        *,
        grace: float,
        who: str,
        context: Context,
        on_landed: Callable[[], object],
        foreign: bool = False,
    ) -> None:
        self._work = work
        self._grace = grace
        self._who = who
        self._context = context
        self._on_landed = on_landed
        self._foreign = foreign
        self._timer: Timer | None = None
        self._held_off = False
        self._told: float | None = None  # since when it has its grace
        self._spared: float | None = None  # the same, for the cancellation of somebody else
        self.unresponsive = False  #: all interruptions were delivered, and the work went on

    def interrupt(self) -> None:
        """Interrupt now, or as soon as the work can be reached."""
        self.stand_down()
        if self._deliver():
            self.interrupt_later()
        else:
            self._insist()

    def interrupt_later(self) -> None:
        """The work has been told: interrupt it if it is still there after its grace."""
        self.stand_down()
        self._wait()

    def change_grace(self, grace: float) -> None:
        """From now on it has ``grace`` seconds, counted from when it was told."""
        if grace != self._grace:
            self._grace = grace
            if self._told is not None:
                told = self._told
                self.stand_down()
                self._wait(told)

    def hold_off(self) -> None:
        """The work hears by an error before it could be reached: it gets its grace after all. Works once."""
        if not self._held_off and not self._work.landed:
            self._held_off = True
            self.interrupt_later()

    def stand_down(self) -> None:
        """No more interruptions, or not for now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._told = None

    def _wait(self, told: float | None = None) -> None:
        now = clock()
        self._told = now if told is None else told
        self._timer = call_later(max(self._told + self._grace - now, 0.0), self._insist)

    def _deliver(self) -> bool:
        """Interrupt it now. False if that cannot be, or if it cleans up because others have cancelled it."""
        if not (self._foreign and self._work.has_heard()):
            self._spared = None
        elif self._spared is None:
            self._spared = clock()
        if (self._spared is not None and clock() < self._spared + self._grace) or not self._work.interrupt():
            return False
        self._spared = None
        self._on_landed()
        return True

    def _insist(self) -> None:
        self._told = None
        self._timer = spawn(self._keep_on, context=self._context.copy(), name="hangup: supervisor")

    async def _keep_on(self) -> None:
        work = self._work
        if work.landed < ATTEMPTS:
            pauses = iter(_PAUSES)
            while not self._deliver():  # noqa: ASYNC110 # what it waits for sets no event
                await anyio.sleep(next(pauses, _LAST_PAUSE))
            self._wait()
            return
        self.unresponsive = True
        logger.warning(
            "%s goes on although it was interrupted %d times, %g s apart: it swallows its cancellation. It is at %s",
            self._who,
            ATTEMPTS,
            self._grace,
            where(work.host) or "an unknown place",
        )
