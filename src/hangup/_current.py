"""The running call, and the free functions that act on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ._protect import Protect
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
            "context variables, as threads of your own do (asyncio.to_thread does not), hand the call on, or use "
            'scope["extensions"]["hangup"].'
        )
    return call


def add_finalizer(fn: F, *, name: str | None = None, timeout: float | None = None) -> F:
    """`Call.add_finalizer` of the current call.

    :raises LookupError: outside a call.
    """
    return current_call().add_finalizer(fn, name=name, timeout=timeout)


def before_success(fn: F) -> F:
    """`Call.add_before_success` of the current call. Returns ``fn``, so it can decorate.

    :raises LookupError: outside a call.
    """
    return current_call().add_before_success(fn)


def protect() -> Protect:
    """A critical section: ``with protect(): ...``. A cancellation that arrives inside is delivered when it ends.

    In handlers, steps, child tasks and finalizers. It nests. It holds off what `hangup` does and whatever else comes
    through a cancel scope. Once the call is to stop that is for at most ``max_protect`` seconds (an option of the
    middleware); then it is opened, with a WARNING. A server that cancels the task itself (`Task.cancel`) cannot
    be held off from in here. Outside a call it is an unbounded shield. In a thread, which nothing interrupts, it does
    nothing. A finalizer that is cut off inside, of a call that nobody stopped, goes on, and is left behind.
    """
    return Protect(current.get())


def step(
    name: str,
    attributes: Mapping[str, Any] | None = None,
    *,
    cancel: Callable[[], object] | None = None,
    effect: bool = False,
) -> Step:
    """A named unit of work, entered by ``with`` or ``async with``, or a decorator of a coroutine function.

    :param name: what it is. A metric label and a span name: few values.
    :param attributes: more about it, for the span.
    :param cancel: awaited exactly once if the step is left by cancellation: how an upstream, a worker or a child
        process is told. In a task of its own, under ``finalizer_timeout``; done before the state of the call is
        written. ``async with`` waits for it on the spot.
    :param effect: it changes the world. Left by cancellation without a ``cancel=`` that succeeded or a
        `Step.confirm`, the step and so the call is ``ambiguous``.

    Outside a call it times the work, and runs ``cancel=`` where there is an event loop.

    :raises TypeError: for an argument of the wrong kind, and when a plain function or a generator is decorated.
    """
    return Step(name, attributes, current.get(), cancel, effect)
