"""What the demo plays, and what is right for each: the promise as a table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from hangup import Cause, Phase, State


class Cleanup(StrEnum):
    """What became of the ``finally`` of a handler, a generator or a dependency."""

    FINISHED = "finished"  #: before the request ended
    LATE = "late"  #: after it
    LOST = "lost"  #: cut off, or not before the server stopped


class Moment(StrEnum):
    """When the client hangs up."""

    BEFORE_RESPONSE = "before response"
    MID_UPLOAD = "mid-upload"
    DURING_RESPONSE = "during response"
    AFTER_RESPONSE = "after response"

    @property
    def phase(self) -> Phase:
        """What the record has to call it."""
        return Phase.BEFORE_RESPONSE if self is Moment.MID_UPLOAD else Phase(self.replace(" ", "_"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A request, the moment of the hang-up, and what is then right with hangup."""

    name: str
    method: str = "GET"
    path: str
    moment: Moment = Moment.BEFORE_RESPONSE
    awaited: bytes = b"\r\n\r\n"  #: what has to arrive before a hang-up during or after the response
    body_size: int = 0
    body_sent: int = 0

    states: frozenset[State] = frozenset({State.CANCELED})
    cause: Cause | None = Cause.CLIENT_DISCONNECT
    delivered: bool = False
    told_by: frozenset[str] = frozenset({"CancelledError"})  #: what may leave the work; nothing: it runs to its end
    cleanups: frozenset[Cleanup] = frozenset({Cleanup.FINISHED})
    keeps_row: bool = False
    finalizers: int = 0
    in_flight: tuple[str, ...] = ()


SCENARIOS: Final = (
    Scenario(
        name="agent run",
        method="POST",
        path="/runs/{run}",
        keeps_row=True,
        finalizers=1,
        in_flight=("call tool",),
    ),
    Scenario(
        name="agent run, streamed",
        method="POST",
        path="/runs/{run}/stream",
        moment=Moment.DURING_RESPONSE,
        awaited=b"planned",
        keeps_row=True,
        finalizers=1,
        in_flight=("call tool",),
    ),
    Scenario(name="SSE stream", path="/events", moment=Moment.DURING_RESPONSE, awaited=b"data: 0"),
    Scenario(name="slow handler", path="/answer"),
    Scenario(name="yield dependency", path="/orders"),
    # Nothing stops a thread. It is waited for, and what it did is what the record says. FastAPI then writes the answer
    # out in a second thread: an interruption that lands in between, which is rare, makes it canceled.
    Scenario(
        name="def handler",
        path="/report",
        states=frozenset({State.COMPLETED, State.CANCELED}),
        told_by=frozenset(),
    ),
    # It ends at its next chunk. Starlette leaves closing it to the garbage collector, which does so at once, but not
    # before the request has ended.
    Scenario(
        name="sync generator",
        path="/lines",
        moment=Moment.DURING_RESPONSE,
        awaited=b"0\n",
        told_by=frozenset({"GeneratorExit"}),
        cleanups=frozenset({Cleanup.FINISHED, Cleanup.LATE}),
    ),
    # Bare, it is reading, so `request.stream()` raises; with hangup it is interrupted where it reads.
    Scenario(
        name="upload",
        method="POST",
        path="/files/{run}",
        moment=Moment.MID_UPLOAD,
        body_size=1_000_000,
        body_sent=100_000,
    ),
    # The client has all it asked for. Hanging up now is no disconnect.
    Scenario(
        name="background task",
        method="POST",
        path="/mail",
        moment=Moment.AFTER_RESPONSE,
        awaited=b'{"mail":"queued"}',
        states=frozenset({State.COMPLETED}),
        cause=None,
        delivered=True,
        told_by=frozenset(),
    ),
)

#: How a connection can end.
WAYS: Final = ("FIN", "RST")
