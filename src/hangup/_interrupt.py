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

trio's tasks expect cancellation by level, and trio has no other kind. There the outer scope is simply cancelled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import anyio

from ._runtime import NativeTask, current_task, where

logger: Final = logging.getLogger("hangup")

#: How often a deaf task is interrupted before it is left alone and reported.
ATTEMPTS: Final = 3

#: Seconds between tries to deliver to a task that cannot be reached now: doubling from the first to the last.
_FIRST_PAUSE: Final = 0.001
_LAST_PAUSE: Final = 0.05

# anyio looks its backend up on each `CancelScope()`, which costs more than the scope. The class is the same every time.
_scope_classes: dict[bool, Callable[[], anyio.CancelScope]] = {}


class Interruptible:
    """Work that can be interrupted. Enter `outer`, then `inner`, in the task that does the work.

    ``native`` says that the host is an `asyncio.Task`; else it is a trio task.
    """

    __slots__ = ("cancels_before", "host", "inner", "landed", "native", "outer")

    def __init__(self) -> None:
        self.host: NativeTask
        self.host, self.native = host, native = current_task()
        new = _scope_classes.get(native)
        if new is None:
            new = _scope_classes[native] = type(anyio.CancelScope())
        self.outer = new()
        self.inner = new()
        self.landed = 0  #: how many interruptions were delivered
        #: How many `Task.cancel` requests the host carried when it came.
        self.cancels_before: int = host.cancelling() if native else 0

    def interrupt(self) -> bool:
        """Deliver one cancellation. False if it could not land now; call it again shortly.

        Call it on the event loop. From inside the work itself it never lands: a running task cannot be reached.
        """
        host = self.host
        if not self.native:
            self.outer.cancel()
            self.landed += 1
            return True
        before = host.cancelling()
        self.inner.shield = True
        self.outer.cancel()
        self.inner.shield = False
        self.inner.shield = True
        landed: bool = host.cancelling() > before
        self.landed += landed
        return landed

    def let_go(self) -> None:
        """The work may go on. On trio, that takes the cancellation back from whatever comes next."""
        if self.outer.cancel_called:
            self.inner.shield = True

    def cancels_since(self) -> int:
        """How many `Task.cancel` requests of others the host carries now. Always 0 on trio, which has none."""
        return self.host.cancelling() - self.cancels_before if self.native else 0


async def insist(work: Interruptible, *, grace: float, on_landed: Callable[[], object]) -> None:
    """Interrupt ``work``, again after each ``grace`` seconds that it goes on, `ATTEMPTS` times in all. Then return.

    Cancel this when the work has ended. While the work cannot be reached it is tried up to twenty times a second.
    """
    while work.landed < ATTEMPTS:
        pause = 0.0
        while not work.interrupt():
            await anyio.sleep(pause)
            pause = min(max(2 * pause, _FIRST_PAUSE), _LAST_PAUSE)
        on_landed()
        await anyio.sleep(grace)


def report_unresponsive(work: Interruptible, who: str, grace: float) -> None:
    """One WARNING that names where deaf work is."""
    logger.warning(
        "%s goes on although it was interrupted %d times, %g s apart: it swallows its cancellation. It is at %s",
        who,
        ATTEMPTS,
        grace,
        where(work.host) or "an unknown place",
    )
