"""`protect`: a critical section that a cancellation does not cut in two."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import TYPE_CHECKING, Final

import anyio

from ._runtime import Timer, call_later, current_loop

if TYPE_CHECKING:
    from ._call import Call

logger: Final = logging.getLogger("hangup")


class Protect:
    """Made by `hangup.protect`. Entered once, with ``with``."""

    __slots__ = ("_call", "_scope", "_timer")

    def __init__(self, call: Call | None) -> None:
        self._call = call
        self._scope: anyio.CancelScope | None = None
        self._timer: Timer | None = None

    def __enter__(self) -> None:
        if self._scope is not None:
            raise RuntimeError("protect() was entered before: make a new one for each section")
        try:
            current_loop()
        except RuntimeError:
            return  # in a thread, which nothing interrupts
        self._scope = anyio.CancelScope(shield=True)
        self._scope.__enter__()
        if self._call is not None:
            self._call.enter_protected(self)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> bool | None:
        if self._scope is None:
            return None
        if self._timer is not None:
            self._timer.cancel()
        swallowed = self._scope.__exit__(exc_type, exc, tb)
        if self._call is not None:
            self._call.leave_protected(self)
        return swallowed

    def bound(self, seconds: float) -> None:
        """A cancellation has come and waits: open the section if it goes on for ``seconds``."""
        if self._timer is None:
            self._timer = call_later(seconds, lambda: self._open(seconds))

    def _open(self, seconds: float) -> None:
        assert self._scope is not None
        assert self._call is not None
        logger.warning(
            "%s held its interruption off for longer than max_protect, %g s: it is interrupted inside the section",
            self._call.who,
            seconds,
        )
        self._scope.shield = False
        self._call.leave_protected(self)
