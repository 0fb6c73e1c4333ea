"""Steps: named units of work inside a call."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, ParamSpec, Self, TypeVar

import anyio

from ._lifecycle import Cause, State, StepRecord
from ._runtime import clock

if TYPE_CHECKING:
    from ._call import Call

P = ParamSpec("P")
R = TypeVar("R")


#: How many finished steps a record keeps.
MAX_STEPS: Final = 1000


class StepLog:
    """The steps of one call. Appended to from any thread."""

    __slots__ = ("done", "omitted", "open")

    def __init__(self) -> None:
        self.open: dict[Step, None] = {}
        self.done: list[StepRecord] = []
        self.omitted = 0

    def end(self, step: Step, record: StepRecord) -> None:
        """``step`` has ended."""
        self.open.pop(step, None)
        if len(self.done) < MAX_STEPS:
            self.done.append(record)
        else:
            self.omitted += 1


class Step:
    """A step that is entered with ``with`` or ``async with``, or wraps a coroutine function. Made by `hangup.step`.

    It ends ``completed``; ``failed`` if an exception leaves it; ``canceled`` or ``timed_out`` if a cancellation
    leaves it, or anything else once the call has been told to stop. The exception always goes on.

    One object is one step: to enter it twice raises RuntimeError. As a decorator it makes a new one per call.
    """

    __slots__ = ("_call", "attributes", "ended", "name", "started", "state")

    def __init__(self, name: str, attributes: Mapping[str, Any] | None, call: Call | None) -> None:
        if not isinstance(name, str) or not name:
            raise TypeError(f"step() takes a name, a short text with few values, not {name!r}")
        self.name = name
        self.attributes = dict(attributes) if attributes else {}
        self._call = call
        self.started: float | None = None
        self.ended: float | None = None
        self.state: State | None = None

    def __enter__(self) -> Self:
        if self.started is not None:
            raise RuntimeError(f"step({self.name!r}) was entered before: make a new step for each piece of work")
        self.started = clock()
        if self._call is not None:
            self._call._step_log().open[self] = None
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._end(_state_of(exc, self._call))

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.__exit__(exc_type, exc, tb)

    def __call__(self, fn: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
        name, attributes = self.name, self.attributes

        @functools.wraps(fn)
        async def run(*args: P.args, **kwargs: P.kwargs) -> R:
            from ._current import step

            with step(name, attributes):
                return await fn(*args, **kwargs)

        return run

    def __repr__(self) -> str:
        return f"<Step {self.name!r} {self.state or ('open' if self.started is not None else 'new')}>"

    def _end(self, state: State) -> None:
        if self.ended is None:
            self.ended = clock()
            self.state = state
            if self._call is not None:
                self._call._step_log().end(self, self._record(self._call.started))

    def _record(self, call_started: float) -> StepRecord:
        assert self.started is not None
        assert self.ended is not None
        assert self.state is not None
        return StepRecord(
            name=self.name,
            state=self.state,
            started=self.started - call_started,
            duration=self.ended - self.started,
        )


def _state_of(exc: BaseException | None, call: Call | None) -> State:
    if exc is None:
        return State.COMPLETED
    told = call is not None and call.told_cause is not None
    if told or isinstance(exc, GeneratorExit) or _is_cancellation(exc):
        return State.TIMED_OUT if call is not None and call.cause is Cause.TIMEOUT else State.CANCELED
    return State.FAILED


def _is_cancellation(exc: BaseException) -> bool:
    try:
        return isinstance(exc, anyio.get_cancelled_exc_class())
    except anyio.NoEventLoopError:
        return False  # in a thread
