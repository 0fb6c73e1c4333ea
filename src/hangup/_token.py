"""`CancelToken`: how a handler, a thread or a library learns that the work is to stop."""

from __future__ import annotations

import inspect
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Final

import anyio

from ._lifecycle import Cause
from ._options import requires
from ._runtime import clock, current_loop, loop_runner

logger: Final = logging.getLogger("hangup")

# One lock for all tokens: it is held for a few assignments, never while foreign code runs. Reentrant, because a signal
# handler may cancel a token while the main thread is in here.
_lock: Final = threading.RLock()


class Canceled(Exception):
    """Raised by `CancelToken.raise_if_canceled`. ``cause`` and ``reason`` say why.

    An ordinary exception, as in .NET, and not a `CancelledError`: it belongs to the code that asked for it, works in
    threads, and confuses no event loop.
    """

    def __init__(self, cause: Cause, reason: str | None = None) -> None:
        super().__init__(cause, reason)
        self.cause = cause
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.cause}: {self.reason}" if self.reason else str(self.cause)


class CancelToken:
    """Says whether the work of a call is to stop. Every call has one: ``current_call().token``.

    Safe to use from any thread. The first cause wins; later ones change nothing. Once its call has ended a token that
    was not canceled never will be: `finished` is true, and everybody who waited is let go.

    The shape is .NET's ``CancellationToken`` and Go's ``Context``: look (`canceled`), wait (`wait`, `wait_sync`), be
    called (`add_callback`), or raise (`raise_if_canceled`).
    """

    __slots__ = (
        "__weakref__",
        "_callbacks",
        "_canceled_at",
        "_cause",
        "_deadline",
        "_finished",
        "_notify",
        "_origin",
        "_parent",
        "_reason",
        "seen",
    )

    #: ``notify`` is called after the callbacks, in the thread that cancels: how a call hears of its own token.

    def __init__(self, notify: Callable[[], object] | None = None) -> None:
        self._notify = notify
        self._cause: Cause | None = None
        self._reason: str | None = None
        self._canceled_at: float | None = None
        self._finished = False
        self._deadline: float | None = None
        self._origin: CancelToken | None = None  # the parent that canceled it
        self._parent: CancelToken | None = None
        self.seen: bool = False  #: somebody saw that it is canceled, or a child of it
        self._callbacks: dict[object, Callable[[], object]] | None = None

    @property
    def canceled(self) -> bool:
        """True from the moment a cause arrived. Never suspends, takes no lock: fit for a loop in a thread."""
        if self._cause is None:
            return False
        self._see()
        return True

    @property
    def cause(self) -> Cause | None:
        """Why, or None while not canceled."""
        if self._cause is not None:
            self._see()
        return self._cause

    @property
    def reason(self) -> str | None:
        """The free text beside the cause, if any."""
        return self._reason

    @property
    def finished(self) -> bool:
        """True once the call has ended. A task that outlives its call can see that here."""
        return self._finished

    def remaining(self) -> float | None:
        """Seconds until the deadline of the call, 0.0 once it has passed; None if there is none (gRPC's sense)."""
        return None if self._deadline is None else max(self._deadline - clock(), 0.0)

    def child(self) -> CancelToken:
        """A token that is canceled with this one, with its cause, and can be canceled on its own without touching it.

        It is held by whoever uses it, not by its parent: one that is dropped leaves nothing behind.
        """
        child = CancelToken()
        child._deadline = self._deadline
        child._parent = self  # which nobody else may hold
        ref = weakref.ref(child, lambda _: stop())

        def follow() -> None:
            live = ref()
            if live is None:
                return
            if self._cause is not None:
                if live._cause is None:
                    live._origin = self
                live._cancel(self._cause, self._reason)
            else:
                live._finish()

        stop = self._add_waiter(follow)
        return child

    def raise_if_canceled(self) -> None:
        """Raise `Canceled` if canceled; else do nothing."""
        if self._cause is not None:
            self._see()
            raise Canceled(self._cause, self._reason)

    def cancel(self, reason: str | None = None) -> bool:
        """Ask for the work to stop: cause ``requested``. True if this was the first cause.

        From any thread, and from inside the call itself. False, and no effect, when the token was canceled before or
        its call has ended. Callbacks run before this returns, in this thread.
        """
        return self._cancel(Cause.REQUESTED, reason)

    def add_callback(self, fn: Callable[[], object]) -> Callable[[], bool]:
        """Call ``fn()`` once when the token is canceled, in the thread that cancels it. Keep it short.

        If the token is canceled already, ``fn`` runs at once, here. If the call ends without a cancel it never runs.
        An exception of ``fn`` is logged and keeps neither the others from running nor the cancel from happening.

        Returns ``stop``: call it to take the callback back. It answers True if that kept ``fn`` from running, False
        if ``fn`` ran, is running, or never will (Go's ``AfterFunc``). A second ``stop()`` answers False.

        :raises TypeError: if ``fn`` cannot be called without arguments, or is a coroutine function.
        """
        requires("add_callback() takes a function without arguments", fn)
        if inspect.iscoroutinefunction(fn):
            raise TypeError(
                f"add_callback() takes a function that is not awaited, not {fn!r}: await token.wait() instead"
            )
        return self._add(fn)

    def _add(self, fn: Callable[[], object]) -> Callable[[], bool]:
        key = object()
        with _lock:
            run_now = self._cause is not None
            if not run_now and not self._finished:
                if self._callbacks is None:
                    self._callbacks = {}
                self._callbacks[key] = fn
        if run_now:
            self._see()
            _call(fn)

        def stop() -> bool:
            with _lock:
                return self._callbacks is not None and self._callbacks.pop(key, None) is not None

        return stop

    async def wait(self) -> bool:
        """Wait until the token is canceled (True) or its call has ended without (False)."""
        if self._cause is None and not self._finished:
            event = anyio.Event()
            run_soon = loop_runner()
            thread = threading.get_ident()

            def wake() -> None:
                if threading.get_ident() == thread:
                    event.set()
                else:
                    run_soon(event.set)

            stop = self._add_waiter(wake)
            try:
                await event.wait()
            finally:
                stop()
        return self.canceled

    def wait_sync(self, timeout: float | None = None) -> bool:
        """Wait in a thread, at most ``timeout`` seconds, until the token is canceled (True).

        False if the time ran out or the call ended first. Never call it on the event loop: it blocks.

        :raises RuntimeError: on the event loop without a ``timeout``, where it would block for ever.
        """
        if timeout is None and self._cause is None and not self._finished and _is_on_loop():
            raise RuntimeError(
                "wait_sync() on the event loop, and without a timeout, would block it for ever: "
                "there it is `await token.wait()`"
            )
        event = threading.Event()
        stop = self._add_waiter(event.set)
        try:
            event.wait(timeout)
        finally:
            stop()
        return self.canceled

    def __repr__(self) -> str:
        state = str(self._cause) if self._cause is not None else "finished" if self._finished else "live"
        return f"<CancelToken {state}>"

    # What the call needs. Not public.

    def _see(self) -> None:
        self.seen = True
        if self._origin is not None:
            self._origin._see()

    def _cancel(self, cause: Cause, reason: str | None = None) -> bool:
        with _lock:
            if self._cause is not None or self._finished:
                return False
            self._canceled_at = clock()
            self._reason = reason
            self._cause = cause
            callbacks, self._callbacks = self._callbacks, None
            notify = self._notify
        for fn in (callbacks or {}).values():
            _call(fn)
        if notify is not None:
            notify()
        return True

    def _finish(self) -> None:
        with _lock:
            self._finished = True
            self._notify = None  # it refers to the call, which refers to this
            callbacks, self._callbacks = self._callbacks, None
        for fn in (callbacks or {}).values():
            if isinstance(fn, _Waiter):
                _call(fn)

    def _add_waiter(self, wake: Callable[[], object]) -> Callable[[], bool]:
        waiter = _Waiter(wake)
        stop = self._add(waiter)
        if self._finished:
            waiter()
        return stop


class _Waiter:
    """A callback that is also called when the call ends, so that nobody waits for ever."""

    __slots__ = ("wake",)

    def __init__(self, wake: Callable[[], object]) -> None:
        self.wake = wake

    def __call__(self) -> None:
        self.wake()


def _is_on_loop() -> bool:
    try:
        current_loop()
    except RuntimeError:
        return False
    return True


def _call(fn: Callable[[], object]) -> None:
    try:
        fn()
    except Exception:
        logger.exception("A callback of a CancelToken raised: %r", fn)
