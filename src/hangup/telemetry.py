"""OpenTelemetry: the spans, attributes and metrics of calls, steps and finalizers. Only the API is needed.

This is the one module that imports OpenTelemetry. It listens to the core through `Instrumentation`, and keeps what it
has to remember of a call in ``Call.trace``.

What the records say, and why:

* A span that was canceled carries ``hangup.state="canceled"``: without it, it looks like one that completed. Its status
  is UNSET by default. A client that changed its mind is no error of the server, as in gRPC's conventions. Nothing ever
  gets the status OK: that is for applications to give.
* The facts of a cancellation are attributes, not events: there is nothing to time that the attributes do not say, and
  the traceback of a ``CancelledError`` costs 200 µs and helps nobody.
* A span is the current one while its work runs, also one that was sampled out: what is below goes with it, and the
  services that are called hear of that. It is taken back only where it still is the current one. A generator may be
  closed by another task, or by the garbage collector, and its context is not ours to change.
* Where nothing is set up, a step costs a microsecond. Nothing is built for a span that does not record.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import context as otel_context
from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, StatusCode

from . import _hooks
from ._current import current
from ._lifecycle import Cause, FinalizerRecord, Stage, State
from ._options import status_of_cancel
from ._runtime import clock
from ._shutdown import heres
from ._version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
    from opentelemetry.sdk.trace import Span as SDKSpan

    from ._call import Call
    from ._finalizers import Finalizer
    from ._lifecycle import Lifecycle, Outcome
    from ._options import CancelStatus
    from ._steps import Step
else:
    SpanProcessor = object  # the SDK asks for the methods, not for the class

__all__ = ["CancellationSpanProcessor"]

logger: Final = logging.getLogger("hangup")

STATE: Final = "hangup.state"
CAUSE: Final = "hangup.cause"
REASON: Final = "hangup.reason"
PHASE: Final = "hangup.phase"
DELIVERED: Final = "hangup.delivered"
ELAPSED: Final = "hangup.cancel.elapsed"
LATENCY: Final = "hangup.cancel.latency"
STEP_NAME: Final = "hangup.step.name"
STEPS_IN_FLIGHT: Final = "hangup.steps.in_flight"
STEPS: Final = {
    State.COMPLETED: "hangup.steps.completed",
    State.FAILED: "hangup.steps.failed",
    State.CANCELED: "hangup.steps.canceled",
    State.TIMED_OUT: "hangup.steps.timed_out",
    State.AMBIGUOUS: "hangup.steps.ambiguous",
}
FINALIZER_NAME: Final = "hangup.finalizer.name"
FINALIZERS: Final = "hangup.finalizers"
FINALIZERS_FAILED: Final = "hangup.finalizers.failed"
ERROR_TYPE: Final = "error.type"
METHOD: Final = "http.request.method"
ROUTE: Final = "http.route"

#: Seconds between looks whether a provider of metrics has been set, while there is none.
LOOK_EVERY: Final = 0.01

#: How many steps in flight are named.
MAX_NAMES: Final = 16

#: How many spans of a call `CancellationSpanProcessor` remembers at a time.
MAX_SPANS: Final = 1000

#: Seconds. Those that the semantic conventions advise for HTTP durations.
_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)

_METHODS: Final = frozenset({"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "QUERY", "TRACE"})


# Both are proxies until a provider is set, and go to it from then on. Whether one is there is never asked.
_tracer: Final = trace.get_tracer("hangup", __version__)
_meter: Final = metrics.get_meter("hangup", __version__)

#: The key of the current span, which the API keeps to itself.
(_SPAN,) = trace.set_span_in_context(INVALID_SPAN, Context())

#: In the OpenTelemetry context of the code inside a step: its `_StepSpan`.
_STEP: Final = otel_context.create_key("hangup-step")

_creating: Final = threading.Lock()

_NOTHING: Final[Mapping[str, Any]] = {}


class CallTrace:
    """What is remembered of one call."""

    __slots__ = ("cancel", "named", "parent", "server", "spans")

    def __init__(self, server: Span | None, parent: Context | None) -> None:
        self.server: Span | None = server  #: the span that was current when the call began
        self.parent: Context | None = parent  #: the context that `hangup.cancel` and finalizers belong under
        self.cancel: Span | None = None
        self.named: bool = False  #: the steps in flight were there to be named when the cause arrived
        self.spans: dict[int, Span] | None = {}  #: of others, started in the call and not ended; None: no more


#: By their ids, the spans of others that are remembered, and what remembers them: they may end anywhere.
_owners: Final[dict[int, CallTrace]] = {}


class Telemetry(_hooks.Instrumentation):
    """Records calls, steps and finalizers.

    ``cancel_status`` says what status a span of canceled work gets, by its cause. ``detailed`` adds the metrics of
    steps and finalizers.
    """

    def __init__(self, cancel_status: Callable[[Cause], CancelStatus], *, detailed: bool = False) -> None:
        self._cancel_status = cancel_status
        self._detailed = detailed
        self._hinted = False
        self._start_span: Callable[..., Span] = _tracer.start_span
        self._direct = False
        self._metered = False
        self._look_next = 0.0

    # ------------------------------------------------------------------ the call

    def call_started(self, call: Call) -> None:
        context = otel_context.get_current()
        if _SPAN in context:
            call.trace = CallTrace(trace.get_current_span(context), context)

    def call_inside(self, call: Call) -> bool:
        context = otel_context.get_current()
        remembered: CallTrace | None = call.trace
        if _SPAN not in context:
            return False
        span = trace.get_current_span(context)
        if remembered is not None and remembered.server is not None:
            return span is not remembered.server
        if span.get_span_context().is_valid:
            remembered = _trace_of(call)
            remembered.server, remembered.parent = span, context
            if remembered.spans and _server_span(remembered) is not None:
                _forget(span)  # it is written to as what it is, and not marked as one among many
            self.hint(reached=True)
        return True

    def call_leaving(self, call: Call, state: State, life: Lifecycle) -> None:
        remembered: CallTrace | None = call.trace
        server = _server_span(remembered) if remembered is not None else None
        if server is None:
            return
        attributes = _ending(call, state, life)
        if CAUSE in attributes:
            now = clock()
            stopped_at = call.stopped_at or now
            attributes[ELAPSED], attributes[LATENCY] = _since(call.started, stopped_at), _since(stopped_at, now)
        server.set_attributes(attributes)
        self._set_status(server, state, life.cause)

    def call_stopped(self, call: Call) -> None:
        life = call.life
        if life.parted:
            return  # a WebSocket whose client said goodbye: nothing was cut off
        remembered = _trace_of(call)
        assert life.cause is not None
        assert life.phase is not None
        attributes: dict[str, Any] = {CAUSE: life.cause.value, PHASE: life.phase.value}
        if life.reason is not None:
            attributes[REASON] = life.reason
        server = _server_span(remembered)
        if server is not None:
            # A deadline is answered at once, and that may end this span.
            server.set_attributes({**attributes, ELAPSED: _since(call.started, call.stopped_at)})
            if life.cause is Cause.TIMEOUT:
                server.set_attribute(STATE, State.TIMED_OUT.value)
                self._set_status(server, State.TIMED_OUT, life.cause)
        in_flight = call.steps_in_flight
        if in_flight:
            attributes[STEPS_IN_FLIGHT] = in_flight[:MAX_NAMES]
            remembered.named = True
        parent = remembered.parent if remembered.parent is not None else Context()
        span = _tracer.start_span("hangup.cancel", parent, attributes=attributes, start_time=_wall(call.stopped_at))
        if _matters(span, parent):
            remembered.cancel = span
            if remembered.server is None:
                self.hint()
        if not (life.cause is Cause.CLIENT_DISCONNECT and call.policy.disconnect == "signal"):
            self._mark_others(call, remembered)

    def response_ending(self, call: Call) -> None:
        server = _server_span(call.trace)
        if server is not None:
            counts = _step_counts(call)
            state = _expected_state(call.life, counts)
            server.set_attributes({STATE: state.value, **counts})
            if state is State.AMBIGUOUS:
                self._set_status(server, state, None)

    def call_finishing(self, call: Call) -> None:
        outcome, remembered = call.outcome, call.trace
        assert outcome is not None
        if remembered is None:
            return
        attributes = _ending(call, outcome.state, outcome)
        if outcome.stop_latency is not None and not (call.life.parted and outcome.state is State.COMPLETED):
            attributes[LATENCY] = outcome.stop_latency
        if remembered.cancel is not None:
            remembered.cancel.set_attributes(attributes)
            if outcome.in_flight and not remembered.named:
                # The cancellation of somebody else: by the time it is here, the steps have ended.
                remembered.cancel.set_attribute(STEPS_IN_FLIGHT, outcome.in_flight[:MAX_NAMES])
            self._set_status(remembered.cancel, outcome.state, outcome.cause)
        server = _server_span(remembered)
        if server is not None:
            server.set_attributes(attributes)
            # Of a failure, the status is the business of whoever made the span: it saw the exception and the answer.
            self._set_status(server, outcome.state, outcome.cause)
        if outcome.state in {State.CANCELED, State.TIMED_OUT, State.AMBIGUOUS} and outcome.cause is not None:
            self._mark_others(call, remembered)

    def call_ended(self, call: Call) -> None:
        remembered: CallTrace | None = call.trace
        if remembered is not None:
            self._end_trace(call, remembered)
        if self._metered or self._look_for_meter(call.started):
            self._record_call(call)

    def _end_trace(self, call: Call, remembered: CallTrace) -> None:
        _forget_all(remembered)
        remembered.spans = None
        if remembered.cancel is not None:
            records = call.outcome.finalizers if call.outcome is not None else ()
            remembered.cancel.set_attributes(
                {FINALIZERS: len(records), FINALIZERS_FAILED: sum(r.state is not State.COMPLETED for r in records)}
            )
            remembered.cancel.end()

    def _look_for_meter(self, now: float) -> bool:
        """Whether a provider of metrics is set, looked up once in `LOOK_EVERY` seconds: it costs a microsecond."""
        if now < self._look_next:
            return False
        self._look_next = now + LOOK_EVERY
        # The API has no other way to ask. Under another name, everything is recorded, and the proxy drops it.
        self._metered = type(metrics.get_meter_provider()).__name__ != "_ProxyMeterProvider"
        return self._metered

    def _record_call(self, call: Call) -> None:
        state, ended = call.end
        attributes: dict[str, Any] = {STATE: state.value}
        method = call.scope.get("method")
        if method is not None:
            attributes[METHOD] = method if method in _METHODS else "_OTHER"
        route = route_of(call.shown_scope, call.scope)
        if route is not None:
            attributes[ROUTE] = route
        if state is not State.COMPLETED:
            self._add_reasons(call, attributes)
        _call_duration.record(ended - call.started, attributes)

    def _add_reasons(self, call: Call, attributes: dict[str, Any]) -> None:
        """Why the call did not complete; and how long it took to end, if it was stopped."""
        (state, ended), cause, outcome = call.end, call.life.cause, call.outcome
        if cause is not None:
            attributes[CAUSE] = cause.value
            if call.stopped_at is not None:
                _cancel_latency.record(_since(call.stopped_at, ended), {CAUSE: cause.value})
        error_type = self._error_type(state, cause, outcome.error if outcome is not None else None)
        if error_type is None and state is State.FAILED:
            status = call.life.status or 0
            error_type = str(status) if status >= 500 else "_OTHER"  # as the conventions have it
        if error_type is not None:
            attributes[ERROR_TYPE] = error_type

    def log_fields(self, call: Call) -> dict[str, object]:
        state, _ = call.end
        found: dict[str, object] = {"hangup_state": state.value}
        if call.life.cause is not None:
            found["hangup_cause"] = call.life.cause.value
        remembered: CallTrace | None = call.trace
        span = None
        if remembered is not None:
            parent = remembered.parent
            span = trace.get_current_span(parent) if parent is not None else remembered.cancel
        ids = span.get_span_context() if span is not None else None
        if ids is not None and ids.is_valid:
            found["hangup_trace_id"] = trace.format_trace_id(ids.trace_id)
            found["hangup_span_id"] = trace.format_span_id(ids.span_id)
        return found

    def _mark_others(self, call: Call, remembered: CallTrace) -> None:
        """Mark the spans in flight that are not ours, each once."""
        assert call.life.cause is not None
        state = State.TIMED_OUT if call.life.cause is Cause.TIMEOUT else State.CANCELED
        for span in _forget_all(remembered):
            if span.is_recording():
                attributes: dict[str, Any] = {
                    STATE: state.value,
                    CAUSE: call.life.cause.value,
                    ELAPSED: _age(span, call),
                }
                if getattr(span, "kind", None) is SpanKind.SERVER:
                    assert call.life.phase is not None
                    attributes[PHASE] = call.life.phase.value
                span.set_attributes(attributes)
                self._set_status(span, state, call.life.cause)

    # ------------------------------------------------------------------ steps and finalizers

    def step_started(self, step: Step) -> _hooks.StepMark | None:
        attributes = step.attributes
        start = self._start_span
        span = start(step.name, attributes=attributes) if attributes else start(step.name)
        if span is not INVALID_SPAN:
            if not self._direct:
                self._go_direct()
            previous = otel_context.get_current()
            if _matters(span, previous):
                return _StepSpan(self, span, step, previous)
        return _StepClock(self) if self._detailed else None

    def _go_direct(self) -> None:
        """A provider is there, or a trace came in: leave out the proxy, which costs a third of a microsecond."""
        tracer = trace.get_tracer("hangup", __version__)
        if not isinstance(tracer, trace.ProxyTracer):
            self._start_span = tracer.start_span
            self._direct = True

    def finalizer_started(self, call: Call, finalizer: Finalizer) -> _hooks.FinalizerMark | None:
        remembered: CallTrace | None = call.trace
        parent = None
        if remembered is not None:
            parent = remembered.parent
            if remembered.cancel is not None:
                parent = trace.set_span_in_context(remembered.cancel, parent)
        span = _tracer.start_span(f"finalizer {finalizer.name}", parent, attributes={FINALIZER_NAME: finalizer.name})
        if _matters(span, otel_context.get_current()):
            # The finalizer's own context, which nobody else uses: no need to take it back.
            otel_context.attach(trace.set_span_in_context(span))
            return _FinalizerSpan(self, span)
        return _FinalizerSpan(self, INVALID_SPAN) if self._detailed else None

    def end_step(self, span: Span, step: Step, error: BaseException | None, given: Mapping[str, Any]) -> None:
        """End the span of ``step``, which was ``given`` attributes when it started."""
        assert step.state is not None
        try:
            # What it was given is there, and perhaps no longer as it was given: somebody may have masked a secret.
            attributes = {k: v for k, v in step.attributes.items() if k not in given or given[k] is not v}
            attributes.update({STEP_NAME: step.name, STATE: step.state.value})
            cause = _cause_of(step)
            if cause is not None:
                attributes[CAUSE] = cause.value
                if step.call is not None and step.call.stopped_at is not None:
                    attributes[LATENCY] = _since(step.call.stopped_at, step.ended)
            span.set_attributes(attributes)
            self._set_status(span, step.state, cause, error)
        finally:
            span.end(_wall(step.ended))

    def record_step(self, step: Step, error: BaseException | None) -> None:
        """Enter ``step`` into the metrics, if they are wanted."""
        if self._detailed and step.started is not None and step.state is not None:
            attributes: dict[str, Any] = {STEP_NAME: step.name, STATE: step.state.value}
            cause = _cause_of(step)
            if cause is not None:
                attributes[CAUSE] = cause.value
            error_type = self._error_type(step.state, cause, error)
            if error_type is not None:
                attributes[ERROR_TYPE] = error_type
            _step_duration.record(_since(step.started, step.ended), attributes)

    def end_finalizer(self, span: Span, record: FinalizerRecord) -> None:
        """End the span of a finalizer, and enter it into the metrics, if they are wanted."""
        attributes: dict[str, Any] = {FINALIZER_NAME: record.name, STATE: record.state.value}
        try:
            if span.is_recording():
                span.set_attributes(attributes)
                self._set_status(span, record.state, None, record.error)
        finally:
            span.end()
        if self._detailed:
            error_type = self._error_type(record.state, None, record.error)
            if error_type is not None:
                attributes[ERROR_TYPE] = error_type
            _finalizer_duration.record(record.duration, attributes)

    # ------------------------------------------------------------------ status

    def _error_type(self, state: State, cause: Cause | None, error: BaseException | None) -> str | None:
        """What sort of error ``state`` is; None if it is none, or nobody has said which."""
        if state is State.FAILED:
            # As the SDK has it: what is no Exception is no error.
            return _type_name(error) if isinstance(error, Exception) else None
        if state is State.TIMED_OUT:
            return "timeout"
        if state is State.AMBIGUOUS:
            return "ambiguous"
        if state is State.CANCELED and cause is not None and self._is_error(cause):
            return cause.value
        return None

    def _set_status(self, span: Span, state: State, cause: Cause | None, error: BaseException | None = None) -> None:
        """Set the status, where ``state`` is an error. Never OK."""
        error_type = self._error_type(state, cause, error)
        if error_type is not None:
            span.set_attribute(ERROR_TYPE, error_type)
            span.set_status(StatusCode.ERROR, error_type)
            if state is State.FAILED and error is not None:
                span.set_status(StatusCode.ERROR, str(error))  # last: it is the user's code, and may raise
                span.record_exception(error)

    def _is_error(self, cause: Cause) -> bool:
        try:
            answer = self._cancel_status(cause)
            if answer not in {"unset", "error"}:
                raise ValueError(f"cancel_status is to return 'unset' or 'error', not {answer!r}")
        except Exception as exc:
            _hooks.report(self._cancel_status, exc)
            return False
        return answer == "error"

    def hint(self, *, reached: bool = False) -> None:
        """Say, once, that the call begins before the trace; and whether what makes the server span was ``reached``."""
        if not self._hinted:
            self._hinted = True
            logger.debug(
                "No span is current where HangupMiddleware begins, but there is one inside: the server span is made "
                "further in, or not at all. %s HangupMiddleware inside what makes it (FastAPI and its "
                "instrumentation: app.add_middleware; else: after it in the list of middleware)%s",
                "A part of it stands there, which says all that is to be said. Simpler is to mount"
                if reached
                else "Mount",
                "." if reached else ", or once more inside, so that it gets the status 499 and the state of the call.",
            )


class _StepSpan:
    """The span of a step that is open."""

    __slots__ = ("_context", "_given", "_left", "_previous", "_span", "_telemetry")

    def __init__(self, telemetry: Telemetry, span: Span, step: Step, previous: Context) -> None:
        self._telemetry = telemetry
        self._span = span
        self._given: Mapping[str, Any] = dict(step.attributes) if step.attributes else _NOTHING
        self._left = False
        self._previous = previous
        self._context: Context | None = Context({**previous, _SPAN: span, _STEP: self})
        otel_context.attach(self._context)
        call = step.call
        if call is not None and (call.trace is None or call.trace.parent is None) and _STEP not in previous:
            _adopt(call, previous, telemetry)

    def leave(self) -> None:
        self._left = True
        context, self._context = self._context, None
        if context is not None and otel_context.get_current() is context:
            # Not `detach`: its token belongs to the context in which the step was entered, and this may be a copy.
            previous = self._previous
            while (outer := _ended_step(previous)) is not None:  # left out of order
                previous = outer._previous
            otel_context.attach(previous)

    def end(self, step: Step, error: BaseException | None) -> None:
        if self._span.is_recording():
            self._telemetry.end_step(self._span, step, error, self._given)
        self._telemetry.record_step(step, error)


class _StepClock:
    """A step of which only the duration is wanted."""

    __slots__ = ("_telemetry",)

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def leave(self) -> None:
        pass

    def end(self, step: Step, error: BaseException | None) -> None:
        self._telemetry.record_step(step, error)


class _FinalizerSpan:
    """The span of a finalizer that is running."""

    __slots__ = ("_span", "_telemetry")

    def __init__(self, telemetry: Telemetry, span: Span) -> None:
        self._telemetry = telemetry
        self._span = span

    def end(self, record: FinalizerRecord) -> None:
        self._telemetry.end_finalizer(self._span, record)


class CancellationSpanProcessor(SpanProcessor):
    """Marks the spans of others that are in flight when their call is canceled. For the SDK's ``TracerProvider``::

        provider.add_span_processor(CancellationSpanProcessor())

    The span of an HTTP client, a database or an LLM SDK that a cancellation flies through ends like one that has
    completed. With this it carries ``hangup.state``, ``hangup.cause`` and, as ``hangup.cancel.elapsed``, how many
    seconds of it had passed when the cause arrived; what is left of its duration is the time it took to end. A span
    that starts after the cause is cleanup, and is not marked. At most 1,000 spans in flight are remembered per call,
    and none beyond its end.

    The order among the processors does not matter. One for the process is enough. From any thread.
    """

    def on_start(self, span: SDKSpan, parent_context: Context | None = None) -> None:
        """Remember ``span``, if it starts inside a call that has not been told to stop."""
        call = current.get()
        if call is None or call.over or call.life.cause is not None or call.hooks.call_stopped is None:
            return
        scope = span.instrumentation_scope
        if scope is not None and scope.name == "hangup":
            return
        remembered = _trace_of(call)
        if span.kind is SpanKind.SERVER and remembered.parent is None:
            remembered.parent = trace.set_span_in_context(span, parent_context)
        spans, ids = remembered.spans, span.get_span_context()
        if spans is not None and ids is not None and len(spans) < MAX_SPANS:
            _owners[ids.span_id] = remembered
            spans[ids.span_id] = span

    def _on_ending(self, span: SDKSpan) -> None:
        # The SDK calls this on every processor. When it does, the attributes are frozen already.
        pass

    def on_end(self, span: ReadableSpan) -> None:
        """Forget ``span``, wherever it ends."""
        _forget(span)

    def shutdown(self) -> None:
        """Nothing to do."""

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Nothing to do."""
        return True


# ---------------------------------------------------------------------- spans


def _trace_of(call: Call) -> CallTrace:
    remembered: CallTrace | None = call.trace
    if remembered is None:
        with _creating:
            remembered = call.trace
            if remembered is None:
                remembered = call.trace = CallTrace(None, None)
    return remembered


def _adopt(call: Call, context: Context, telemetry: Telemetry) -> None:
    """No span was current when the call began. The one around its first step is the best there is to be a parent."""
    remembered = _trace_of(call)
    if remembered.parent is None and trace.get_current_span(context).get_span_context().is_valid:
        remembered.parent = context
        telemetry.hint()


def _matters(span: Span, context: Context) -> bool:
    """Whether it makes a difference that ``span`` is current, and not the one that is in ``context``.

    Also if it was sampled out, and what is around it was not: what is below it goes with it. But not if it was sampled
    out like the rest of its trace, or comes from a tracer that does nothing.
    """
    if span.is_recording():
        return True
    ids, outer = span.get_span_context(), trace.get_current_span(context).get_span_context()
    return (
        ids.trace_id != outer.trace_id
        or ids.trace_flags != outer.trace_flags
        or ids.trace_state is not outer.trace_state
    )


def _server_span(remembered: CallTrace) -> Span | None:
    """The server span, if it was there when the call began and can still be written to."""
    span = remembered.server
    if span is not None and span.is_recording() and getattr(span, "kind", SpanKind.SERVER) is SpanKind.SERVER:
        return span
    return None


def _forget(span: Span | ReadableSpan) -> None:
    ids = span.get_span_context()
    owner = _owners.pop(ids.span_id, None) if ids is not None else None
    if ids is not None and owner is not None and owner.spans:
        owner.spans.pop(ids.span_id, None)


def _forget_all(remembered: CallTrace) -> list[Span]:
    """The spans that were remembered."""
    spans = list((remembered.spans or {}).values())
    for span in spans:
        _forget(span)
    return spans


def _ended_step(context: Context) -> _StepSpan | None:
    """The step whose span is current in ``context``, if it has been left."""
    mark = context.get(_STEP)
    return mark if isinstance(mark, _StepSpan) and mark._left and context.get(_SPAN) is mark._span else None


def _expected_state(life: Lifecycle, counts: dict[str, int]) -> State:
    """How the call is going to end, as far as the last frame and the ``counts`` of its steps tell."""
    if STEPS[State.AMBIGUOUS] in counts and life.stage is not Stage.TOLD:  # then its `cancel=` may be under way
        return State.AMBIGUOUS
    if life.failed:
        return State.FAILED
    if life.stage is Stage.TOLD:
        return State.TIMED_OUT if life.cause is Cause.TIMEOUT else State.CANCELED
    return State.COMPLETED


def _step_counts(call: Call) -> dict[str, int]:
    counts: dict[str, int] = {}
    for state in call.step_states:
        counts[STEPS[state]] = counts.get(STEPS[state], 0) + 1
    return counts


def _ending(call: Call, state: State, record: Lifecycle | Outcome) -> dict[str, Any]:
    """What is said of a call that has ended, or is about to."""
    attributes: dict[str, Any] = {STATE: state.value, DELIVERED: record.delivered, **_step_counts(call)}
    if record.cause is not None and record.phase is not None and state is not State.COMPLETED:
        attributes[CAUSE], attributes[PHASE] = record.cause.value, record.phase.value
    return attributes


def _cause_of(step: Step) -> Cause | None:
    """Why ``step`` did not end by itself; None if it did."""
    if step.state not in {State.CANCELED, State.TIMED_OUT, State.AMBIGUOUS}:
        return None
    return (step.call.life.cause if step.call is not None else None) or Cause.UNKNOWN


def _type_name(error: BaseException) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _since(start: float | None, end: float | None) -> float:
    return max(0.0, end - start) if start is not None and end is not None else 0.0


def _wall(moment: float | None) -> int:
    """A moment of our clock as nanoseconds since the epoch."""
    # In this order: whoever is held up between the two looks at the clock makes it later, never before a start.
    passed = 0 if moment is None else int((clock() - moment) * 1e9)
    return time.time_ns() - passed


def _age(span: Span, call: Call) -> float:
    """How many seconds of ``span`` had passed when the cause arrived."""
    started: int | None = getattr(span, "start_time", None)
    return max(0, _wall(call.stopped_at) - started) / 1e9 if started is not None else 0.0


def route_of(shown: Any, scope: Any) -> str | None:
    """The template of the route that was taken, None if that cannot be told. Never a raw path.

    ``shown`` is the scope as the router left it, ``scope`` as the server made it.
    """
    if shown is None:
        return None
    route = shown.get("route")
    template = getattr(route, "path_format", None)
    if template is None:
        template = shown.get("path_template")  # Litestar
        return template if isinstance(template, str) else None
    included = (shown.get("fastapi") or {}).get("effective_route_context")
    if included is not None and getattr(included, "original_route", None) is route:
        template = getattr(included, "path_format", template)  # with the prefix of the router it was included in
    root, mounted = scope.get("root_path") or "", shown.get("root_path") or ""
    if len(mounted) > len(root):
        # What was mounted around the route is here as it was in the URL. Its parameters go back to their names.
        known = getattr(route, "param_convertors", {})
        for name, value in (shown.get("path_params") or {}).items():
            if name not in known:
                mounted = mounted.replace(f"/{value}", f"/{{{name}}}")
        template = mounted + template
    return str(template)


# ---------------------------------------------------------------------- metrics


def _in_flight() -> Iterator[Call]:
    for here in list(heres):
        yield from (call for call in list(here.calls) if call.hooks.call_ended is not None)


def _active_calls(options: CallbackOptions) -> Iterable[Observation]:
    yield Observation(sum(1 for _ in _in_flight()))


def _active_steps(options: CallbackOptions) -> Iterable[Observation]:
    counts: dict[str, int] = {}
    for call in _in_flight():
        for name in call.steps_in_flight:
            counts[name] = counts.get(name, 0) + 1
    for name, count in counts.items():
        yield Observation(count, {STEP_NAME: name})


def _seconds(name: str, description: str) -> metrics.Histogram:
    return _meter.create_histogram(
        name, unit="s", description=description, explicit_bucket_boundaries_advisory=_BUCKETS
    )


_call_duration: Final = _seconds("hangup.call.duration", "From the start of a call to the return of the application.")
_cancel_latency: Final = _seconds("hangup.cancel.latency", "From the cause to the return of the application.")
_step_duration: Final = _seconds("hangup.step.duration", "Duration of steps.")
_finalizer_duration: Final = _seconds("hangup.finalizer.duration", "Duration of finalizers.")

# Looked at when a reader collects. Counting up and down would cost every call, whether anybody reads or not.
_meter.create_observable_up_down_counter(
    "hangup.active_calls", [_active_calls], unit="{call}", description="Calls in flight."
)
_meter.create_observable_up_down_counter(
    "hangup.active_steps", [_active_steps], unit="{step}", description="Steps in flight, inside calls."
)

_hooks.outside = _hooks.hooks_of(Telemetry(status_of_cancel("unset")))


def current_trace_id() -> str | None:
    """The id of the trace that is current, in hexadecimal; None if there is none."""
    ids = trace.get_current_span().get_span_context()
    return trace.format_trace_id(ids.trace_id) if ids.is_valid else None
