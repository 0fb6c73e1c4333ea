"""The running call, and the free functions that act on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ._steps import Step

if TYPE_CHECKING:
    from ._call import Call

F = TypeVar("F", bound=Callable[..., object])

current: Final[ContextVar[Call | None]] = ContextVar("hangup_call", default=None)


def current_call() -> Call:
    """The call that is running in this context: in its handler, its tasks, its threads.

    :raises LookupError: outside a call.
    """
    call = current.get()
    if call is None:
        raise LookupError(
            "current_call() outside a call: is HangupMiddleware mounted, and outermost? Where a framework drops "
            'context variables, use scope["extensions"]["hangup"].'
        )
    return call


def add_finalizer(fn: F, *, name: str | None = None, timeout: float | None = None) -> F:
    """`Call.add_finalizer` of the current call.

    :raises LookupError: outside a call.
    """
    return current_call().add_finalizer(fn, name=name, timeout=timeout)


def step(name: str, attributes: Mapping[str, Any] | None = None) -> Step:
    """A named unit of work, entered by ``with`` or ``async with``, or a decorator of a coroutine function.

    Outside a call it times the work and nothing more.
    """
    return Step(name, attributes, current.get())
