"""Steps: named units of work inside a call."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextvars import Context, copy_context
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, ParamSpec, Self, TypeVar

import anyio

from . import _hooks
from ._bounded import Bounded
from ._errors import contains
from ._lifecycle import Cause, State, StepRecord
from ._options import is_awaited, requires
from ._runtime import Job, clock, endure, spawn
from ._token import Canceled

if TYPE_CHECKING:
    from ._call import Call

logger: Final = logging.getLogger("hangup")

Cancel = Callable[[], object]
P = ParamSpec("P")
R = TypeVar("R")


_COMPLETED: Final = State.COMPLETED

#: How many finished steps a record keeps.
MAX_STEPS: Final = 1000


#: Seconds that the ``cancel=`` of a step outside any call may take.
OUTSIDE_TIMEOUT: Final = 5.0


class AmbiguousOutcome(Exception):
    """Raise it when nobody can know whether an effect happened: the step that it leaves, and the call, are ambiguous.

    For a live client it is an error like any other that leaves the application.
    """


class StepLog:
    """The steps of one call. Appended to from any thread."""

    __slots__ = ("cancels", "done", "omitted", "open", "unresolved")

    def __init__(self) -> None:
        self.open: dict[Step, None] = {}
        self.done: list[Step] = []
        self.omitted: int = 0
        self.unresolved: dict[Step, None] = {}  #: steps that are ambiguous
        self.cancels: list[Job] = []  #: ``cancel=`` callbacks that were started

    def end(self, step: Step) -> None:
        """``step`` has ended."""
        self.open.pop(step, None)
        if len(self.done) < MAX_STEPS:
            self.done.append(step)
        else:
            self.omitted += 1

    async def cancels_ended(self) -> None:
        """Wait for the ``cancel=`` of all, whatever is done to the caller: then it is known what is ambiguous."""
        while self.cancels:
            await endure(self.cancels.pop())

    def close(self) -> None:
        """The call is over: it and its steps let go of each other."""
        for step in self.done:
            step.call = step._log = None


class Step:
    """A step that is entered with ``with`` or ``async with``, or wraps a coroutine function. Made by `hangup.step`.

    It ends ``completed``; ``failed`` if an exception leaves it; ``canceled`` or ``timed_out`` if a cancellation
    leaves it, or anything else once the call has been told to stop; ``ambiguous`` if that happens to an effect that
    was neither confirmed nor successfully canceled. The exception always goes on.

    One object is one step. To enter it again changes nothing but for a WARNING: the work runs, unrecorded. As a
    decorator it makes a new step per call.
    """

    __slots__ = (
        "_cancel",
        "_confirmed",
        "_log",
        "_mark",
        "_settled",
        "attributes",
        "call",
        "effect",
        "ended",
        "name",
        "started",
        "state",
    )

    def __init__(
        self,
        name: str,
        attributes: Mapping[str, Any] | None,
        call: Call | None,
        cancel: Cancel | None = None,
        effect: bool = False,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise TypeError(f"step() takes a name, a short text with few values, not {name!r}")
        if cancel is not None:
            requires("step(cancel=) takes a function without arguments", cancel)
        if effect is not False and effect is not True:
            raise TypeError(f"step(effect=) is True or False, not {effect!r}")
        if attributes and type(attributes) is not dict and not isinstance(attributes, Mapping):
            raise TypeError(f"step() takes attributes by name, {{'key': value}}, not {attributes!r}")
        self.name: str = name
        self.attributes: dict[str, Any] = dict(attributes) if attributes else {}
        self.effect: bool = effect
        self.call: Call | None = call
        self._cancel = cancel
        self._confirmed = self._settled = False
        self._log: StepLog | None = None
        self._mark: _hooks.StepMark | None = None
        self.started: float | None = None
        self.ended: float | None = None
        self.state: State | None = None

    def confirm(self) -> None:
        """Say that it is known what became of the effect. Also after the step was left, until the state is written.

        A second call, or one on a step that is not ambiguous, changes nothing; neither does one from a finalizer.
        """
        self._confirmed = True
        if self.state is State.AMBIGUOUS and self.call is not None and not self.call.over:
            log = self.call.step_log()
            if log.unresolved.pop(self, 0) is None:
                self.state = self._canceled_state()
                self.settle()

    def __enter__(self) -> Self:
        self._enter()
        if self.effect and self._is_guarded():
            self._guard_soon()
        return self

    def _enter(self) -> None:
        if self.started is not None:
            logger.warning("step(%r) was entered before: make a new step for each piece of work", self.name)
            return
        self.started = clock()
        call = self.call
        if call is not None:
            log = self._log = call.step_log()
            log.open[self] = None
            hook = call.hooks.step_started
        else:
            hook = _hooks.outside.step_started
        if hook is not None:
            try:
                self._mark = hook(self)
            except Exception as exc:
                _hooks.report(hook, exc)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if exc is None and self._mark is None and self.ended is None:  # the usual end, at no more than it needs
            self.ended = clock()
            self.state = _COMPLETED
            if self._log is not None:
                self._log.end(self)
        else:
            self._leave(exc)
        if self.effect and self._is_guarded():
            self._guard_soon()

    async def __aenter__(self) -> Self:
        self._enter()
        if self.effect and self._is_guarded():
            try:
                await self._guard()
            except BaseException as exc:  # the effect has not begun
                if self._mark is not None:
                    _hooks.tell(self._mark.leave)
                self._end(State.FAILED if isinstance(exc, Exception) else self._canceled_state(), exc)
                raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        job = self._leave(exc)
        if job is not None:
            await endure(job)
        if self.effect and self._is_guarded():
            await endure(spawn(self._guard_quietly, name=f"hangup: after effect {self.name}"))

    def _is_guarded(self) -> bool:
        call = self.call  # the end of the call takes it away, perhaps while a thread is here
        return call is not None and bool(call.effect_guards)

    async def _guard(self) -> None:
        assert self.call is not None
        for guard in list(self.call.effect_guards):
            await guard()

    async def _guard_quietly(self) -> None:
        try:
            await self._guard()
        except Exception:
            logger.warning("step %r: its effect could not be noted", self.name, exc_info=True)

    def _guard_soon(self) -> None:
        """Without ``async`` there is no waiting: the effect may begin before it is noted."""
        assert self.call is not None
        self.call.on_loop(lambda: spawn(self._guard_quietly, name=f"hangup: effect {self.name}"))

    def __call__(self, fn: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
        plain = inspect.isfunction(fn) and not (is_awaited(fn) or is_awaited(inspect.unwrap(fn)))
        if plain or isinstance(fn, type) or not callable(fn):
            raise TypeError(f"step() decorates a coroutine function, not {fn!r}: elsewhere it is `with step(...):`")
        name, attributes, cancel, effect = self.name, self.attributes, self._cancel, self.effect

        @functools.wraps(fn)
        async def run(*args: P.args, **kwargs: P.kwargs) -> R:
            from ._current import step

            async with step(name, attributes, cancel=cancel, effect=effect):
                return await fn(*args, **kwargs)

        return run

    def __repr__(self) -> str:
        return f"<Step {self.name!r} {self.state or ('open' if self.started is not None else 'new')}>"

    def _leave(self, exc: BaseException | None) -> Job | None:
        if self._mark is not None:
            _hooks.tell(self._mark.leave)
        if self.ended is not None:
            return None
        if exc is None:
            self._end(State.COMPLETED)
        elif contains(exc, AmbiguousOutcome):
            self._end(State.AMBIGUOUS)
        elif self._was_canceled(exc):
            return self.sweep()
        else:
            self._end(State.FAILED, exc)
        return None

    def sweep(self) -> Job | None:
        """End the step as canceled, and start its ``cancel=``. The call does this to steps left open."""
        if self._cancel is not None:
            cancel, self._cancel = self._cancel, None
            self._end(State.AMBIGUOUS, pending=True)  # until it is known better
            return self._start(cancel)
        self._end(State.AMBIGUOUS if self.effect and not self._confirmed else self._canceled_state())
        return None

    def _start(self, cancel: Cancel) -> Job | None:
        context = copy_context()

        def start() -> Job:
            job = spawn(self._run_cancel, cancel, context, name=f"hangup: cancel of step {self.name}")
            if self.call is not None:
                self.call.step_log().cancels.append(job)
            return job

        try:
            return self.call.on_loop(start) if self.call is not None else start()
        except RuntimeError as exc:  # in a thread, outside of any call; or after the end of the loop
            logger.error(
                "cancel= of step %r cannot run here: what became of the step is ambiguous", self.name, exc_info=exc
            )
            self._settle_late()
            return None

    async def _run_cancel(self, cancel: Cancel, context: Context) -> None:
        run = Bounded(cancel)
        timeout = self.call.hook_timeout if self.call is not None else OUTSIDE_TIMEOUT
        await run.run(timeout, context, f"hangup: cancel of step {self.name}")
        if run.cut or run.error is not None:
            how = f"took longer than {timeout:g} s" if run.cut else "failed"
            text = "cancel= of step %r %s: what became of the step is ambiguous"
            logger.error(text, self.name, how, exc_info=run.error, extra={"hangup_step": self.name})
            if not self._confirmed:
                self._settle_late()
                return
        self.state = self._canceled_state()
        if self.call is not None:
            self.call.step_log().unresolved.pop(self, None)
        self.settle()

    def settle(self, error: BaseException | None = None) -> None:
        """The state is final: those who listen are told. A second call changes nothing."""
        if not self._settled:
            self._settled = True
            if self._mark is not None:
                _hooks.tell(self._mark.end, self, error)

    def _settle_late(self) -> None:
        """Nobody comes any more to say what became of the effect: the call is over, or there is none."""
        if self.call is None or self.call.over:
            self.settle()

    def _end(self, state: State, error: BaseException | None = None, *, pending: bool = False) -> None:
        self.ended = clock()
        self.state = state
        log = self._log
        if log is not None:
            log.end(self)
            if state is State.AMBIGUOUS:
                log.unresolved[self] = None
        if self._mark is not None:
            if state is not State.AMBIGUOUS:
                self.settle(error)
            elif not pending:
                self._settle_late()

    def _was_canceled(self, exc: BaseException) -> bool:
        call = self.call
        return (call is not None and call.told_cause is not None) or _is_cancellation(exc)

    def _canceled_state(self) -> State:
        call = self.call
        timed_out = call is not None and call.cause is Cause.TIMEOUT
        return State.TIMED_OUT if timed_out else State.CANCELED

    def record(self, call_started: float) -> StepRecord:
        """The record of a step that has ended. ``call_started`` by the same clock."""
        assert self.started is not None
        assert self.ended is not None
        assert self.state is not None
        return StepRecord(
            name=self.name,
            state=self.state,
            started=self.started - call_started,
            duration=self.ended - self.started,
            effect=self.effect,
        )


def _is_cancellation(exc: BaseException) -> bool:
    if isinstance(exc, BaseExceptionGroup):
        return all(map(_is_cancellation, exc.exceptions))
    if isinstance(exc, (Canceled, GeneratorExit)):
        return True
    try:
        return isinstance(exc, anyio.get_cancelled_exc_class())
    except anyio.NoEventLoopError:
        return False  # in a thread
