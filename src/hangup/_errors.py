"""What an exception that leaves the application means."""

from __future__ import annotations

import anyio


def may_swallow(exc: BaseException) -> bool:
    """Whether ``exc``, raised after the application was told to stop, ends with it."""
    if isinstance(exc, BaseExceptionGroup):
        return all(may_swallow(inner) for inner in exc.exceptions)
    return isinstance(exc, (Exception, GeneratorExit, anyio.get_cancelled_exc_class()))


def is_for_loop(exc: BaseException) -> bool:
    """Whether ``exc``, raised in a task of ours, goes on to the event loop: its teardown, or the end of the process.

    Anything else has nobody to go to, and trio stops for it.
    """
    return isinstance(exc, (KeyboardInterrupt, SystemExit, anyio.get_cancelled_exc_class()))


def contains(exc: BaseException, kind: type[BaseException]) -> bool:
    """Whether ``exc`` is a ``kind``, or a group with one in it."""
    if isinstance(exc, BaseExceptionGroup):
        return any(contains(inner, kind) for inner in exc.exceptions)
    return isinstance(exc, kind)


def follows_cancellation(exc: BaseException | None) -> bool:
    """Whether ``exc`` is a cancellation, or was raised while one was being handled."""
    cancelled = anyio.get_cancelled_exc_class()
    while exc is not None and not isinstance(exc, cancelled):
        exc = exc.__context__
    return exc is not None
