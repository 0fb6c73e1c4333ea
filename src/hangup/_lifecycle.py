"""What a call is, and how it may end: every transition in one table.

This module knows nothing of event loops, ASGI or tracing, and imports only the standard library. Events go in,
one terminal state comes out. It takes no lock: everything here happens on the event loop of the call.

The rules it keeps:

* The first cause wins and is never rewritten.
* Frames decide, not exceptions: what counts is how far the response had come when the cause arrived.
* A response is complete when its last frame is handed over. The client leaving after that, or a deadline, changes
  nothing: background tasks live there. Only a request to stop (``requested``, ``server_shutdown``, ``unknown``)
  still means something then.
* A cause matters from the moment the application has been *told*: interrupted, handed the disconnect, refused a
  ``send()``, or seen looking at a canceled token. Frames sent after that are no completion. Work that ended before
  the application could know of the cause is judged by what it did, and only its delivery is in doubt.
* A failure that came before the cause stays a failure.
* A client that says goodbye (`Lifecycle.part`) has ended the conversation, not cut it off: the call is completed,
  unless its work had to be interrupted.
* Whatever the order of events, exactly one terminal state comes out, and none is illegal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum, auto
from typing import Final


class State(StrEnum):
    """The terminal state of a call or a step. A call has exactly one."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"
    TIMED_OUT = "timed_out"
    AMBIGUOUS = "ambiguous"


class Cause(StrEnum):
    """Why a call was told to stop. Few values on purpose: they are metric labels."""

    CLIENT_DISCONNECT = "client_disconnect"
    TIMEOUT = "timeout"
    SERVER_SHUTDOWN = "server_shutdown"
    REQUESTED = "requested"
    UNKNOWN = "unknown"


class Phase(StrEnum):
    """Where the response stood when the cause arrived, or at the end when none did."""

    BEFORE_RESPONSE = "before_response"
    DURING_RESPONSE = "during_response"
    AFTER_RESPONSE = "after_response"


class Stage(IntEnum):
    """Where a call stands while it runs. `TRANSITIONS` says how it moves."""

    WAITING = auto()  #: nothing of the response has been handed over
    STREAMING = auto()  #: the response has started
    COMPLETE = auto()  #: the last frame has been handed over
    STOPPING = auto()  #: a cause is there, the application does not know it yet
    TOLD = auto()  #: the application knows
    ENDED = auto()


class Event(IntEnum):
    """What can happen to a call."""

    START = 0  #: the application starts its response
    FINISH = auto()  #: the application hands over the last frame
    LEAVE = auto()  #: the client left, or the deadline passed: matters until the response is complete
    STOP = auto()  #: somebody wants the work to stop: matters until the application returns
    TELL = auto()  #: the application has learned of the cause
    LEARN = auto()  #: it turns out that the application had learned of it before it went on
    END = auto()  #: the application has returned or raised


#: Every transition. An event a stage does not list leaves the stage as it is.
TRANSITIONS: Final[Mapping[Stage, Mapping[Event, Stage]]] = {
    Stage.WAITING: {
        Event.START: Stage.STREAMING,
        Event.FINISH: Stage.COMPLETE,
        Event.LEAVE: Stage.STOPPING,
        Event.STOP: Stage.STOPPING,
        Event.END: Stage.ENDED,
    },
    Stage.STREAMING: {
        Event.FINISH: Stage.COMPLETE,
        Event.LEAVE: Stage.STOPPING,
        Event.STOP: Stage.STOPPING,
        Event.END: Stage.ENDED,
    },
    Stage.COMPLETE: {
        Event.STOP: Stage.STOPPING,
        Event.LEARN: Stage.TOLD,
        Event.END: Stage.ENDED,
    },
    Stage.STOPPING: {
        Event.FINISH: Stage.COMPLETE,
        Event.TELL: Stage.TOLD,
        Event.LEARN: Stage.TOLD,
        Event.END: Stage.ENDED,
    },
    Stage.TOLD: {
        Event.END: Stage.ENDED,
    },
    Stage.ENDED: {},
}

#: The same table with every cell filled, to be indexed by ``[stage][event]``.
_NEXT: Final = {stage: tuple(TRANSITIONS[stage].get(event, stage) for event in Event) for stage in Stage}
_WAITING, _TOLD, _COMPLETE, _ENDED = Stage.WAITING, Stage.TOLD, Stage.COMPLETE, Stage.ENDED
_START, _FINISH = Event.START, Event.FINISH

_CAUSE_EVENT: Final[Mapping[Cause, Event]] = {
    Cause.CLIENT_DISCONNECT: Event.LEAVE,
    Cause.TIMEOUT: Event.LEAVE,
    Cause.SERVER_SHUTDOWN: Event.STOP,
    Cause.REQUESTED: Event.STOP,
    Cause.UNKNOWN: Event.STOP,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step of a call, as it ended. Times are seconds; ``started`` counts from the start of the call."""

    name: str
    state: State
    started: float
    duration: float
    #: Whether it was declared to change the world.
    effect: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalizerRecord:
    """One finalizer, as it ended: ``completed``, ``failed`` (it raised) or ``timed_out`` (it was cut off)."""

    name: str
    state: State
    duration: float
    error: BaseException | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The record of one call. Immutable; equal records compare equal.

    ``status_code`` is what the client was sent, or would have been had it stayed; ``None`` if the application never
    got that far. ``delivered`` is true when the last frame was handed to the server while the client was there: the
    most a server can know. ``duration`` is seconds from the start of the call to the return of the application;
    ``stop_latency`` seconds from the cause to that return. ``error`` is what the application raised on its own
    account. ``steps_omitted`` counts finished steps beyond the thousand that are kept.

    For a WebSocket ``status_code`` is 101 once it was accepted, and ``close_code`` is how it was closed: the code of
    the application's own close, or what the server reported.
    """

    state: State
    cause: Cause | None = None
    reason: str | None = None
    phase: Phase = Phase.BEFORE_RESPONSE
    status_code: int | None = None
    close_code: int | None = None
    delivered: bool = False
    duration: float = 0.0
    stop_latency: float | None = None
    steps: tuple[StepRecord, ...] = ()
    steps_omitted: int = 0
    finalizers: tuple[FinalizerRecord, ...] = ()
    error: BaseException | None = None
    #: How many tasks that the application started with a bare ``create_task`` outlived the call. They keep a token that
    #: says it is finished. None if not counted: without observers, on trio, on Python 3.11, with many calls in flight.
    left_running: int | None = None
    #: True when the application swallowed every interruption and its end had to be awaited.
    unresponsive: bool = False
    #: True when, at some time, a disconnect could not be seen: behind an unread request body, or behind a middleware
    #: outside that answers the body again instead.
    detection_suspended: bool = False

    @property
    def retry_safe(self) -> bool:
        """Whether the call may be made again: no declared effect has happened or may have."""
        return self.state is not State.AMBIGUOUS and not any(
            s.effect and s.state in {State.COMPLETED, State.AMBIGUOUS} for s in self.steps
        )

    @property
    def in_flight(self) -> tuple[str, ...]:
        """The names of the steps that had not completed or failed on their own."""
        return tuple(s.name for s in self.steps if s.state not in {State.COMPLETED, State.FAILED})


class Lifecycle:
    """The machine of one call. Events go in through the methods; `judge` answers once the call has ended."""

    __slots__ = (
        "cause",
        "close_code",
        "delivered",
        "failed",
        "finished",
        "interrupted",
        "left",
        "parted",
        "phase",
        "reason",
        "stage",
        "status",
        "unresolved",
    )

    def __init__(self) -> None:
        self.stage: Stage = Stage.WAITING
        self.cause: Cause | None = None
        self.reason: str | None = None
        self.phase: Phase | None = None
        self.status: int | None = None
        self.failed: bool = False  #: a 5xx was answered before the application was told
        self.left: bool = False  #: the client left before the response was complete
        self.parted: bool = False  #: it said goodbye
        self.interrupted: bool = False  #: the work was cut off
        self.close_code: int | None = None
        self.finished: bool = False  #: the last frame was handed over
        self.delivered: bool = False
        self.unresolved: bool = False  #: an effect was left in flight: nobody knows whether it happened

    def start(self, status: int) -> None:
        """The application starts its response. A second start is ignored, as is one for a client that has left."""
        stage = self.stage
        if self.status is not None or stage is _ENDED or (stage is _TOLD and self.left):
            return
        self.status = status
        self.failed = status >= 500 and stage is not _TOLD
        self.stage = _NEXT[stage][_START]

    def answer(self, status: int) -> None:
        """``status`` is answered in the application's stead. Whatever it had chosen, nobody has seen."""
        if self.stage is not _TOLD or not self.left:
            self.status = None
        self.start(status)

    def finish(self) -> None:
        """The application hands over its last frame. Call this before the frame is sent."""
        stage = self.stage
        if stage is _ENDED or (stage is _TOLD and self.left):
            return
        if not self.finished:
            self.finished = True
            self.delivered = self.delivered or not self.left
        self.stage = _NEXT[stage][_FINISH]

    def leave(self) -> bool:
        """The client left. True if that was before the response was complete, and new."""
        if self.left or self.finished or self.stage is Stage.ENDED:
            return False
        self.left = True
        if self.phase is None:
            self._mark_phase()
        self._on(Event.LEAVE)
        return True

    def part(self) -> None:
        """The client that leaves has said goodbye. What it was sent until now counts as delivered."""
        self.parted = self.delivered = True

    @property
    def parted_well(self) -> bool:
        """Whether it said goodbye, and the work was not cut off: a success, although the application was told."""
        return self.parted and not self.interrupted and self.cause in {None, Cause.CLIENT_DISCONNECT}

    def stop(self, cause: Cause, reason: str | None = None) -> bool:
        """A cause arrives. True if it is the first and still means something.

        After completion, a client that had left before means something: it was to be finished, and was not.
        """
        event = _CAUSE_EVENT[cause]
        if self.cause is not None or self.stage is Stage.ENDED:
            return False
        if self.finished and event is Event.LEAVE:
            if not (self.left and cause is Cause.CLIENT_DISCONNECT):
                return False
            event = Event.STOP
        self.cause = cause
        self.reason = reason
        if self.phase is None:
            self._mark_phase()
        self._on(event)
        return True

    def tell(self) -> None:
        """The application has learned that it is to stop. Means nothing before a cause or after completion."""
        self._on(Event.TELL)

    def interrupt(self) -> None:
        """The work was cut off: it has learned of the cause that way."""
        self.interrupted = True
        self._on(Event.TELL)

    def learn(self) -> None:
        """It turns out, at the end, that the application had known of the cause when it went on."""
        if self.cause is not None:
            self._on(Event.LEARN)

    def fail(self) -> None:
        """The work failed in a way that no frame shows."""
        if self.stage is not Stage.TOLD or self.parted_well:
            self.failed = True

    def undeliver(self) -> None:
        """The server refused the last frame."""
        self.delivered = False

    def judge(self, *, raised: bool) -> State:
        """End the call and name its state. ``raised``: an exception of the application's own left it."""
        stage = self.stage
        if self.phase is None:
            self._mark_phase()
        self.stage = _ENDED
        if self.unresolved:
            return State.AMBIGUOUS
        if self.failed:
            return State.FAILED
        if self.parted_well and not raised:
            return State.COMPLETED
        if stage is _TOLD:
            return self._stopped()
        if raised:
            return State.FAILED
        if self.finished:
            return State.COMPLETED
        return self._stopped() if self.cause is not None or self.left else State.FAILED

    def _stopped(self) -> State:
        if self.cause is None:  # the policy was to finish, and it gave up all the same
            self.cause = Cause.CLIENT_DISCONNECT
        return State.TIMED_OUT if self.cause is Cause.TIMEOUT else State.CANCELED

    def _on(self, event: Event) -> None:
        self.stage = _NEXT[self.stage][event]

    def _mark_phase(self) -> None:
        if self.finished:
            self.phase = Phase.AFTER_RESPONSE
        elif self.status is not None:
            self.phase = Phase.DURING_RESPONSE
        else:
            self.phase = Phase.BEFORE_RESPONSE
