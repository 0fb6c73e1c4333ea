"""A small reference model of how a call ends, and the scripts it is asked about.

A `Script` is a server, an application and a client, who leaves or does not, written down. `Model` walks through it and
says what has to come out; `play` has it performed, with the real middleware between a scripted server and a scripted
application. The application stops at *gates*. There, and nowhere else, something happens to the call; so what happens
when is certain, and no clock is needed.

The model knows nothing of the middleware's own table. It keeps these rules of the design:

* 5: frames decide, not exceptions. 6: a response is complete when its last frame is handed over.
* 7: the first cause wins.
* 13: an unresolved effect, a failure before the application knew, what it was told, what it raised, what it completed.
* 15: ``before_success`` hooks run when success is about to be seen, and only then.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from hypothesis import strategies as st

from hangup.testing import Quirks

Policy = Literal["cancel", "signal", "finish"]
Event = Literal["hang up", "cancel", "time out", "shut down", "server cancels"]
#: What the application does. Those in `GATES` stop at a gate. After `blocked` and `protect` comes a gate, always.
Op = Literal[
    "gate", "start", "chunk", "blocked", "last", "look", "listen", "protect", "effect", "undoable", "stuck", "child"
]
Reaction = Literal["pass on", "clean up", "return", "fail", "swallow"]
Ending = Literal["return", "raise", "ambiguous"]

GATES = {"gate", "listen", "protect", "effect", "undoable", "stuck", "blocked"}

CAUSES: dict[Event, str] = {
    "hang up": "client_disconnect",
    "cancel": "requested",
    "time out": "timeout",
    "shut down": "server_shutdown",
}
ANSWERS = {"timeout": 504, "server_shutdown": 503, "requested": 499}


@dataclass(frozen=True)
class Script:
    policy: Policy
    quirks: Quirks
    status: int
    ops: tuple[Op, ...]
    reaction: Reaction
    ending: Ending
    events: tuple[tuple[int, Event], ...]  #: at which gate, counted from 0; at most one at each
    hooks: tuple[bool, ...]  #: whether each succeeds
    finalizers: tuple[Literal["completed", "failed", "timed_out"], ...]  #: how each ends
    child_fails: bool


@dataclass
class Expected:
    """What has to come out."""

    state: str = ""
    cause: str | None = None
    phase: str = ""
    delivered: bool = False
    hooks_run: int = 0
    status: int | None = None  #: what a client that stayed has got
    complete: bool = False  #: and whether it has got all of it
    escapes: str | None = None
    #: Where the application stops, what happens there, and whether that interrupts it, moves it on, or neither.
    plan: list[tuple[int, Event | None, Literal["interrupts", "moves on", "nothing"]]] = field(default_factory=list)


class Ended(Exception):
    """The application has ended: with nothing, or with an error of this kind."""

    def __init__(self, error: str | None = None) -> None:
        self.error = error


class Model:
    """Walks through a script. `walk` is the answer."""

    def __init__(self, script: Script, *, trio: bool) -> None:
        self.script = script
        self.trio = trio
        self.out = Expected()
        self.left = self.told = self.complete = self.failed = self.unresolved = self.cut = False
        self.chosen: int | None = None  #: the status, once it counts
        self.held = False  #: a start is held back by hooks
        self.signaled = False  #: told by its token, and no more
        self.pending = False  #: an interruption waits for the next gate
        self.interrupted = False  #: once, by us
        self.foreign = False  #: the server's cancel is passed on
        self.child = self.child_interrupted = False
        self.gate = -1

    def walk(self) -> Expected:
        error, events = None, dict(self.script.events)
        try:
            for op in self.script.ops:
                if op in GATES:
                    self.gate += 1
                    self._at_gate(op, events.get(self.gate))
                else:
                    self._do(op)
            if self.script.ending != "return":
                raise Ended("RuntimeError" if self.script.ending == "raise" else "AmbiguousOutcome")
        except Ended as ended:
            error = ended.error
        self._end(error)
        return self.out

    # ------------------------------------------------------------------ what happens to the call

    def _at_gate(self, op: str, event: Event | None) -> None:
        if op == "listen" and (self.complete or self.left):
            self._hear()
            return
        if op == "blocked":
            if self._refuses(chunk=True):
                return
            self._start_counts()
            if self.left:
                return
        if self.pending and op != "protect":
            self.pending = False
            self._plan(None, "interrupts")
            self._interrupted(op)
        elif event is not None:
            self._happens(event, op)
        elif op == "listen":
            self._happens("hang up", op)  # something has to come
        else:
            self._plan(None, "nothing")

    def _plan(self, event: Event | None, effect: Literal["interrupts", "moves on", "nothing"]) -> None:
        self.out.plan.append((self.gate, event, effect))

    def _happens(self, event: Event, op: str) -> None:
        if event == "server cancels":
            self._plan(event, "interrupts")
            self.foreign = True
            self._interrupted(op)
            return
        late = self.complete and event in {"hang up", "time out"}
        leaves = event == "hang up" and not late and self.out.cause != "timeout"  # which has cut it off already
        finish = leaves and self.script.policy == "finish"
        signal = event == "hang up" and self.script.policy == "signal"
        first = self.out.cause is None and not late and not finish
        if leaves:
            self._mark()
            self.left = True
        if first:
            self._mark()
            self.out.cause = CAUSES[event]
            self.child_interrupted = self.child_interrupted or not signal
            if event == "time out":
                self._cut()
        # A deadline, or a shutdown, ends what was only signaled, too. What is interrupted already has its grace.
        insists = not first and not late and self.signaled and event in {"time out", "shut down"}
        self.signaled = (self.signaled or (first and signal)) and not insists
        if op == "listen" and leaves:
            self._plan(event, "moves on")
            self._hear()
        elif op == "blocked" and (leaves or (first and self.cut)):
            self._plan(event, "moves on")
            if not finish and (signal or self.interrupted):
                self.told = True
                raise Ended("OSError")
            self.pending = not finish
        elif (first and not signal) or insists:
            if op == "protect":
                self._plan(event, "nothing")
                self.pending = True
            else:
                self._plan(event, "interrupts")
                self._interrupted(op)
        else:
            self._plan(event, "nothing")
            if op == "listen":
                self._happens("hang up", op)  # its client leaves in the end

    def _cut(self) -> None:
        """The deadline has passed: its client hears so at once."""
        self.told = self.cut = True
        if self.out.status is None:
            self.out.status, self.out.complete = 504, True

    def _interrupted(self, op: str) -> None:
        """The application is interrupted where it stands, and reacts."""
        self.interrupted = self.interrupted or not self.foreign
        reaction = self.script.reaction
        if not self.foreign and not (self.trio and reaction == "return"):  # there nobody can see it
            # On trio an interruption shows at the end, when the call learns of it: whatever had been completed.
            self.told = self.told or self.trio or self._matters()
        if op in {"effect", "stuck"}:
            self.unresolved = True
        if reaction in {"pass on", "clean up"}:
            raise Ended("Cancelled")
        self.foreign = False
        if reaction == "return":
            raise Ended
        if reaction == "fail":
            raise Ended("ValueError")

    def _matters(self) -> bool:
        """Whether the cause still means something: after a whole response no client that left, and no deadline does."""
        return not self.complete or self.out.cause not in {"client_disconnect", "timeout"}

    def _hear(self) -> None:
        """It gets the message that says its client has left."""
        if (self.out.cause is not None or self.left) and not self.complete:
            self.told = True
            self.pending = self.pending and self.trio  # it has its grace instead

    # ------------------------------------------------------------------ what the application does

    def _do(self, op: str) -> None:
        if op == "child":
            self.child = True
        elif op == "look":
            if self.out.cause is not None and not self.complete:
                self.told = True
        elif op == "start":
            if self._refuses():
                return
            if self.script.hooks and not self.left:
                self.held = True
            else:
                self._start()
        elif op == "chunk":
            if self._refuses(chunk=True):
                return
            self._start_counts()
        elif op == "last":
            if self._refuses():
                return
            self._last()

    def _refuses(self, *, chunk: bool = False) -> bool:
        """Whether a frame is taken and thrown away; an error if the application hears by it that nobody wants it."""
        if not self.left and not self.cut:
            return False
        if self.held:  # it counts, although nobody sees it
            self.held = False
            if not (self.told and self.left):
                self._start()
        if self.script.policy == "finish" and not self.told:
            return False
        if self.told or chunk:
            self.told = True
            raise Ended("OSError")
        return False

    def _start_counts(self) -> None:
        if self.held:
            self.held = False
            self._start()

    def _start(self) -> None:
        self.chosen = self.script.status
        if self.script.status >= 500 and not self.told:
            self.failed = True
        if not self.left and not self.cut:
            self.out.status = self.script.status

    def _last(self) -> None:
        if not self.left and self.script.status < 400:
            for succeeds in self.script.hooks:
                self.out.hooks_run += 1
                if not succeeds:
                    self._hook_failed()
        self._start_counts()
        self.complete = True
        if not self.left:
            self.out.delivered = self.out.complete = True

    def _hook_failed(self) -> None:
        self.cut = True
        if not self.told:
            self.failed = True
        if self.out.status is None:
            self.out.status, self.out.complete, self.chosen = 500, True, 500
        self.held = False
        raise Ended("HookError")

    # ------------------------------------------------------------------ how it ends

    def _end(self, error: str | None) -> None:
        out = self.out
        if self.foreign and error == "Cancelled":
            if out.cause is None and not (self.left and self.complete):  # a client that left means nothing by then
                out.cause = "client_disconnect" if self.left else "unknown"
                self._mark()
            self.told = self.told or (out.cause is not None and self._matters())
            out.escapes = "Cancelled"
        raised = error not in {None, "Cancelled"} and not self.told
        if error == "AmbiguousOutcome":
            self.unresolved = True
        child_fails = self.child and self.script.child_fails and not self.child_interrupted
        if child_fails and error is None and not self.told:
            raised = True
        self._mark()
        if self.unresolved:
            out.state = "ambiguous"
        elif self.failed:
            out.state = "failed"
        elif self.told:
            out.state = "timed_out" if out.cause == "timeout" else "canceled"
        elif raised:
            out.state = "failed"
        elif self.complete:
            out.state = "completed"
        elif out.cause is not None or self.left:
            out.state = "timed_out" if out.cause == "timeout" else "canceled"
        else:
            out.state = "failed"
        if error not in {None, "Cancelled", "HookError"} and not self.told:
            out.escapes = error
        if out.status is None and self.told and not self.foreign and out.cause in ANSWERS:
            out.status, out.complete = ANSWERS[out.cause or ""], True

    def _mark(self) -> None:
        if not self.out.phase:
            begun = self.chosen is not None
            self.out.phase = "after_response" if self.complete else "during_response" if begun else "before_response"


# ---------------------------------------------------------------------- scripts


QUIRKS = st.builds(
    Quirks,
    latched=st.booleans(),
    disconnect_on_complete=st.booleans(),
    disconnect_before_final_returns=st.booleans(),
    send_error=st.sampled_from([None, OSError("the client has gone")]),
    send_stays_blocked=st.booleans(),
    body_lost=st.booleans(),
)
FRAMES: list[tuple[Op, ...]] = [
    (),
    ("start", "last"),
    ("start", "chunk", "last"),
    ("start", "chunk", "chunk", "last"),
    ("start", "chunk"),
    ("start", "chunk", "blocked", "gate", "last"),
    ("start", "blocked", "gate"),
]
OTHERS: list[tuple[Op, ...]] = [
    ("gate",),
    ("look",),
    ("listen",),
    ("protect", "gate"),
    ("effect",),
    ("undoable",),
    ("stuck",),
    ("child",),
]


@st.composite
def scripts(draw: st.DrawFn, *, trio: bool) -> Script:
    ops: list[Op] = []
    # What is cut off by its deadline and goes on to listen hears nothing more: Django would cancel its view once more.
    timed = draw(st.booleans())
    # Under `finish` it does not hear of its client before it has answered: it would listen for ever.
    policy: Policy = draw(st.sampled_from(["cancel", "cancel", "signal", "finish"]))
    others = [other for other in OTHERS if other != ("listen",)] if timed or policy == "finish" else OTHERS
    frames = draw(st.sampled_from(FRAMES))
    for frame in frames:
        for other in draw(st.lists(st.sampled_from(others), max_size=2)):
            ops.extend(other)
        ops.append(frame)
    for other in draw(st.lists(st.sampled_from(others), max_size=2)):
        ops.extend(other)
    ops = [op for at, op in enumerate(ops) if op != "child" or "child" not in ops[:at]]
    gates = sum(op in GATES for op in ops)
    kinds: list[Event] = ["hang up", "cancel", "shut down"]
    if timed:
        kinds.append("time out")
    events: list[tuple[int, Event]] = []
    if gates:
        places = draw(st.lists(st.integers(0, gates - 1), unique=True, max_size=3))
        events = [(place, draw(st.sampled_from(kinds))) for place in sorted(places)]
        if not trio and draw(st.integers(0, 4)) == 0:
            last = events[-1][0] + 1 if events else 0
            if last < gates:
                events.append((last, "server cancels"))
    # trio cancels by level: who swallows that spins.
    reactions: list[Reaction] = ["pass on", "clean up", "return", "fail"]
    if not trio:
        reactions += ["swallow", "swallow"]
    quirks = draw(QUIRKS)
    if "blocked" in frames:  # else it is open whether the send returns before the disconnect is known
        quirks = replace(quirks, send_stays_blocked=True)
    return Script(
        policy=policy,
        quirks=quirks,
        status=draw(st.sampled_from([200, 200, 200, 404, 500])),
        ops=tuple(ops),
        reaction=draw(st.sampled_from(reactions)),
        ending=draw(st.sampled_from(["return", "return", "return", "raise", "ambiguous"])),
        events=tuple(events),
        hooks=() if "blocked" in frames else tuple(draw(st.lists(st.sampled_from([True, True, False]), max_size=2))),
        finalizers=tuple(
            draw(st.lists(st.sampled_from(["completed", "completed", "failed", "timed_out"]), max_size=2))
        ),
        child_fails=draw(st.booleans()),
    )
