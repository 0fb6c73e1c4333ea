"""Where others can watch: the moments of a call, of its steps and of its finalizers.

The core calls what is gathered here and knows nothing of who listens; telemetry is one listener. A moment that nobody
listens to costs a look. A listener that raises is logged and changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, TypeVarTuple

if TYPE_CHECKING:
    from ._call import Call
    from ._finalizers import Finalizer
    from ._lifecycle import FinalizerRecord, Lifecycle, State
    from ._steps import Step

logger: Final = logging.getLogger("hangup")

Args = TypeVarTuple("Args")
R = TypeVar("R")


class StepMark(Protocol):
    """What a listener keeps with a step that has been entered."""

    def leave(self) -> object:
        """The step is left, here and now: in the context and the thread in which this is called. Once is enough."""

    def end(self, step: Step, error: BaseException | None) -> object:
        """The state of the step is settled, perhaps some time after it ended, anywhere. Exactly once."""


class FinalizerMark(Protocol):
    """What a listener keeps with a finalizer that is running."""

    def end(self, record: FinalizerRecord) -> object:
        """It has ended."""


class Instrumentation:
    """A listener. Override the moments of interest; the others are never called. None of them may suspend."""

    def call_started(self, call: Call) -> None:
        """The call begins. In its task and context, which the application is going to inherit."""

    def call_inside(self, call: Call) -> bool:
        """The call enters a `HangupMiddleware` inside the one where it began. Whether there is anything between."""
        return False

    def call_leaving(self, call: Call, state: State, life: Lifecycle) -> None:
        """The application has been stopped, or has raised. Where `call_inside` was true, before those between know.

        How the call is going to end: its ``state``, and a copy of its ``life`` that has been judged.
        """

    def call_stopped(self, call: Call) -> None:
        """A cause has arrived. On the event loop, before anything is interrupted or answered."""

    def response_ending(self, call: Call) -> None:
        """The last frame is about to be handed over. Only for a call that has a `Call.trace`."""

    def call_finishing(self, call: Call) -> None:
        """The application has returned, and the outcome is there. Before the synthetic finish, and the finalizers.

        Not for a call that has nothing to do at its end: there, `response_ending` is followed by `call_ended`.
        """

    def call_ended(self, call: Call) -> None:
        """The call has ended, finalizers included."""

    def step_started(self, step: Step) -> StepMark | None:
        """A step is entered. In whichever thread; outside of calls too."""
        return None

    def finalizer_started(self, call: Call, finalizer: Finalizer) -> FinalizerMark | None:
        """A finalizer is about to run. In the context in which it will."""
        return None

    def log_fields(self, call: Call) -> Mapping[str, object]:
        """What goes into the ``extra`` of the line that a call leaves in the log."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """What is to be called at each moment, None where nobody listens. See `Instrumentation`."""

    call_started: Callable[[Call], object] | None = None
    call_inside: Callable[[Call], bool] | None = None
    call_leaving: Callable[[Call, State, Lifecycle], object] | None = None
    call_stopped: Callable[[Call], object] | None = None
    response_ending: Callable[[Call], object] | None = None
    call_finishing: Callable[[Call], object] | None = None
    call_ended: Callable[[Call], object] | None = None
    step_started: Callable[[Step], StepMark | None] | None = None
    finalizer_started: Callable[[Call, Finalizer], FinalizerMark | None] | None = None
    log_fields: Callable[[Call], Mapping[str, object]] | None = None


#: What listens to steps outside of any call.
outside: Hooks = Hooks()


def hooks_of(listener: Instrumentation) -> Hooks:
    """The moments that ``listener`` overrides."""
    found: dict[str, Any] = {}
    for field in fields(Hooks):
        if getattr(type(listener), field.name) is not getattr(Instrumentation, field.name):
            found[field.name] = getattr(listener, field.name)
    return Hooks(**found)


def tell(hook: Callable[[*Args], R] | None, *args: *Args) -> R | None:
    """Call ``hook``, if there is one. If it raises that is logged, and the answer is None."""
    if hook is None:
        return None
    try:
        return hook(*args)
    except Exception as exc:
        report(hook, exc)
        return None


def report(hook: object, error: Exception) -> None:
    """``hook`` raised ``error``."""
    logger.error("An instrumentation raised: %r", hook, exc_info=error)
