"""Hearing of SIGTERM and SIGINT, whoever handles them.

A server installs its handlers before it serves, and they do its work. Ours is put in front: it raises the flag of every
event loop that has calls, then calls theirs. That holds for `signal.signal` (uvicorn, daphne, uvicorn-worker) and for
``loop.add_signal_handler`` (hypercorn, granian, gunicorn): there the handler in the interpreter is an empty one, and
the loop hears through its wakeup descriptor as before. Where there is no handler there is nothing to hear: the process
ends at once.
"""

from __future__ import annotations

import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from ._shutdown import Here

SIGNALS: Final = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGBREAK") if hasattr(signal, name))

# Replaced as a whole, never changed: a signal handler may read it at any time.
_listeners: tuple[weakref.ref[Here], ...] = ()
_lock: Final = threading.Lock()


def listen(here: Here) -> None:
    """Have ``here`` hear of every signal from now on, whoever put our handlers in place."""
    global _listeners
    with _lock:
        _listeners = (*(ref for ref in _listeners if ref() is not None), weakref.ref(here))


def chain(*, lasting: bool = False) -> list[Link]:
    """Put our handlers in front of those that are installed. `Link.release` takes each away again.

    Only in the main thread; elsewhere, and where no handler is installed, it does nothing. ``lasting``: nobody will
    release them, as there is no lifespan. Then it does nothing either unless SIGTERM is handled: it is no server that
    is running. Tests, mostly.
    """
    if threading.current_thread() is not threading.main_thread():
        return []
    if lasting and not callable(signal.getsignal(signal.SIGTERM)):
        return []
    return [link for signum in SIGNALS if (link := _put_in_front(signum)) is not None]


class Link:
    """Our handler for one signal, in front of ``previous``. Once released it only passes on."""

    __slots__ = ("_holders", "_previous", "_signum")

    def __init__(self, signum: int, previous: Callable[[int, FrameType | None], Any]) -> None:
        self._signum = signum
        self._previous = previous
        self._holders = 0

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self._holders:
            for listener in _listeners:
                here = listener()
                if here is not None:
                    here.announce()
        self._previous(signum, frame)

    def hold(self) -> Link:
        """One more who wants it."""
        self._holders += 1
        return self

    def release(self) -> None:
        """One less. The last takes it away, unless somebody else has put theirs in front of it since."""
        self._holders -= 1
        front = signal.getsignal(self._signum)
        if not self._holders and isinstance(front, Link) and front is self:
            signal.signal(self._signum, self._previous)


def _put_in_front(signum: int) -> Link | None:
    previous = signal.getsignal(signum)
    if isinstance(previous, Link):
        return previous.hold()
    if not callable(previous):  # the default action, ignored, or not Python's
        return None
    link = Link(signum, previous)
    try:
        signal.signal(signum, link)
    except ValueError:
        return None  # a subinterpreter
    return link.hold()
