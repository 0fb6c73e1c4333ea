"""The phases of the server matrix, and how each is judged.

A cell is one run: a request that stands at a certain point, and a client that leaves in a certain way. It is judged by
the record of the server process alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from .clients import Client, H2Client
from .servers import Process, Server

#: Seconds that the work takes where nobody can know that the client has left.
BLIND_WORK: Final = 0.5

#: Seconds within which a call has to end once its client has left. gunicorn and daphne cancel after 3 and 10.
LEFT_TIMEOUT: Final = 8.0

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Want:
    """What the record has to say. None: not looked at; ``"*"``: it varies from run to run."""

    state: str = "canceled"
    cause: str | None = "client_disconnect"
    phase: str | None = None
    delivered: bool | None = False
    suspended: bool | None = None
    #: Events that have to be there once, beside those of every call.
    events: tuple[str, ...] = ()
    #: What leaves the application: only its own exception, for a live client. ``*``: it or nothing.
    error: str | None = None
    #: The handler saw a cancellation.
    raised: bool = False
    #: The handler was entered: it registered its two finalizers, and cleans up behind an ``await``.
    called: bool = True
    cleaned: bool | None = True
    step: bool = True
    #: Events that must not be there.
    never: tuple[str, ...] = ()
    #: What the server or framework logs by itself, and nobody can prevent.
    noise: tuple[str, ...] = ()
    status: int | None = None


@dataclass(frozen=True)
class Phase:
    """One row. ``ways`` are the ways to leave, by HTTP version; an empty one is a client that stays."""

    name: str
    title: str
    path: str
    want: Want
    ways: tuple[str, ...] = ("FIN", "RST")
    h2_ways: tuple[str, ...] = ("RST_STREAM", "FIN")
    body_size: int | None = None
    body_sent: int = 0
    headers: tuple[tuple[str, str], ...] = ()
    read_first: bytes = b""
    wait_for: str = "parked"
    slow_reader: bool = False
    #: Plays something else than: ask, wait, leave.
    script: Callable[[Process, Phase, str, str], int | None] | None = None

    def ways_for(self, server: Server) -> tuple[str, ...]:
        """The ways to leave that make sense there."""
        return self.h2_ways if server.http2 else self.ways


@dataclass
class Cell:
    """What was found. ``problems`` is empty if all was as it has to be."""

    server: str
    phase: str
    way: str
    problems: list[str] = field(default_factory=list)
    blind: str | None = None
    state: str | None = None
    cause: str | None = None
    stood: str | None = None
    delivered: bool | None = None
    suspended: bool = False
    varies: bool = False  #: the server decides by chance
    latency_ms: float | None = None  #: from the client's leaving to the token, if it was told

    def summary(self) -> str:
        """What must be the same tomorrow."""
        if self.varies:
            return "varies, blind spot"
        words = [self.state or "not called", self.cause, self.stood]
        words.append(None if self.delivered is None else "delivered" if self.delivered else "not delivered")
        words.append("suspended" if self.suspended else None)
        words.append("blind spot" if self.blind else None)
        return ", ".join(word for word in words if word)


def _completed(**more: Any) -> Want:
    return Want(**{"state": "completed", "cause": None, "phase": "after_response", "delivered": True, **more})


_BEFORE = Want(phase="before_response", events=("token",), raised=True)
_DURING = Want(phase="during_response", events=("token",), raised=True)


# ---------------------------------------------------------------------- scripts of their own


def _stay(process: Process, phase: Phase, run: str, way: str) -> None:
    """Stay to the end of the answer, and leave then."""
    body = b"x" * phase.body_sent
    if process.server.http2:
        with H2Client(process.port) as h2:
            stream = h2.ask(phase.path, run, body_size=phase.body_size, body=body)
            if phase.want.state == "completed":
                h2.finish(stream)
            process.wait_for_event(run, "left")
        return
    with Client(process.port) as client:
        client.ask(phase.path, run, body_size=phase.body_size, body=body, headers=phase.headers)
        if phase.want.state == "completed":
            client.read_response()
        process.wait_for_event(run, "left")


def _expect(process: Process, phase: Phase, run: str, way: str) -> None:
    """Send the body only when the server says 100."""
    with Client(process.port) as client:
        client.ask(phase.path, run, body_size=phase.body_size, headers=phase.headers)
        client.read_until(b" 100 ")  # hypercorn sends no reason phrase
        client.send(b"x" * (phase.body_size or 0))
        status, body = client.read_response()
        assert (status, body) == (200, str(phase.body_size).encode()), (status, body)


def _pipelined(process: Process, phase: Phase, run: str, way: str) -> int:
    """A second request waits behind the running one; then the client leaves."""
    with Client(process.port) as client:
        client.ask(phase.path, run, then=Client.request("/plain", f"{run}-behind"))
        process.wait_for_event(run, "parked")
        process.wait_until_quiet(run)
        return client.leave(way)


def _keepalive(process: Process, phase: Phase, run: str, way: str) -> None:
    """A hundred requests on one connection, this run being the last."""
    names = [f"{run}-{n}" for n in range(99)]
    with Client(process.port) as client:
        for name in (*names, run):
            client.ask("/plain", name)
            assert client.read_response() == (200, b"done")
    for name in names:
        process.wait_for_event(name, "left")
    wrong = [name for name in names if [e["what"] for e in process.of(name)].count("outcome") != 1]
    states = {e["outcome"]["state"] for name in names for e in process.of(name) if e["what"] == "outcome"}
    assert not wrong, wrong
    assert states == {"completed"}, states


def _siblings(process: Process, phase: Phase, run: str, way: str) -> int:
    """Two more streams on the connection, which end as if nothing had happened."""
    with H2Client(process.port) as client:
        other = client.ask("/idle?work=0.4", f"{run}-sibling")
        stream = client.ask(phase.path, run)
        another = client.ask("/thread?work=0.4", f"{run}-another")
        process.wait_for_event(run, "parked")
        process.wait_until_quiet(run)
        at = client.leave(way, stream)
        assert client.finish(other) == client.finish(another) == b"done"
        return at


def _interleaved(process: Process, phase: Phase, run: str, way: str) -> None:
    """A hundred streams on one connection, every third reset at a point of its own. No state leaks."""
    import random

    dice = random.Random(5)
    paths = ("/idle?work=1", "/started?work=1", "/stream?work=1", "/thread?work=1", "/plain")
    live: dict[int, str] = {}
    reset: dict[int, str] = {}
    kept: dict[int, str] = {}
    with H2Client(process.port) as client:
        for n in range(100):
            while len(live) - len(live.keys() & client.ended) >= 30:
                client.pump(1)
            name = f"{run}-{n}"
            live[client.ask(dice.choice(paths), name)] = name
            client.pump()
            running = sorted(live.keys() - client.ended)
            if running and dice.random() < 0.34:
                stream = dice.choice(running)
                client.leave("RST_STREAM", stream)
                reset[stream] = live.pop(stream)
        for stream in sorted(live):
            client.finish(stream)
            kept[stream] = live[stream]
    assert len(reset) > 20, len(reset)
    began = {name for name in reset.values() if process.find(name, "began")}  # gunicorn drops what is reset at once
    for name in (*began, *kept.values()):
        assert process.wait_for_event(name, "left"), f"{name} never ended"
        finalizers = sum(e["what"] == "finalizer" for e in process.of(name))
        assert finalizers == 2, f"{name}: {finalizers} finalizers"
    wrong = {name: _states(process, name) for name in kept.values() if _states(process, name) != ["completed"]}
    assert not wrong, wrong
    states = [_states(process, name) for name in began]
    assert all(state in (["canceled"], ["completed"]) for state in states), states  # it may have been done before
    assert sum(state == ["canceled"] for state in states) > len(began) / 2, states


def _states(process: Process, run: str) -> list[str]:
    return [e["outcome"]["state"] for e in process.of(run) if e["what"] == "outcome"]


# ---------------------------------------------------------------------- the rows

CONTINUE: Final = (("expect", "100-continue"),)

PHASES: Final[tuple[Phase, ...]] = (
    Phase("plain", "a complete answer", "/plain", _completed(), ("",), ("",), script=_stay),
    Phase(
        "idle",
        "the handler does something else",
        "/idle",
        _BEFORE,
        ("FIN", "RST", "HALF"),
        ("RST_STREAM", "FIN", "RST"),
    ),
    Phase(
        "listening",
        "the handler waits in `receive()`",
        "/listening",
        Want(phase="before_response", events=("token", "told by message")),
    ),
    Phase("started", "the response has started", "/started", _DURING, read_first=b"chunk "),
    Phase("stream", "in the middle of a stream", "/stream", _DURING, ("FIN", "RST", "HALF"), read_first=b"chunk "),
    Phase("blocked", "`send()` is blocked: the client does not read", "/blocked", _DURING, slow_reader=True),
    Phase(
        "blocked-last",
        "the last `send()` is blocked: a large answer in one piece",
        "/large",
        _completed(delivered=None),
        slow_reader=True,
    ),
    Phase("post-small", "1 kB of a 1 MB upload, unread", "/idle", _BEFORE, body_size=10**6, body_sent=1000),
    Phase("post-320k", "320 kB of a 1 MB upload, unread", "/idle", _BEFORE, body_size=10**6, body_sent=320_000),
    Phase(
        "post-320k-ahead",
        "the same with `read_ahead=1 MiB`",
        "/ahead/idle",
        _BEFORE,
        body_size=10**6,
        body_sent=320_000,
    ),
    Phase(
        "post-320k-stream",
        "320 kB of an upload unread, while streaming",
        "/stream",
        _DURING,
        body_size=10**6,
        body_sent=320_000,
        read_first=b"chunk ",
    ),
    Phase(
        "reading",
        "the handler reads the upload",
        "/reading",
        Want(phase="before_response", events=("token",)),
        ("FIN", "RST", "HALF"),
        body_size=10**6,
        body_sent=1000,
    ),
    Phase(
        "short-body",
        "a handler that takes the disconnect for the end of the body",
        "/short_body",
        Want(phase="before_response", events=("token",), raised=True, never=("body",)),
        body_size=10**6,
        body_sent=1000,
    ),
    Phase(
        "generator",
        "Starlette's stream; its generator has `finally: await`",
        "/generator",
        Want(phase="during_response", events=("token", "generator cleaned up")),
        read_first=b"data: x",
    ),
    Phase(
        "thread",
        "a `def` handler in a thread that looks at the token",
        "/thread",
        Want(phase="before_response", events=("token", "thread ended")),
    ),
    Phase(
        "background",
        "a background task after the complete answer",
        "/background",
        _completed(events=("background ended",)),
        h2_ways=("FIN", "RST"),
        read_first=b"done",
    ),
    Phase(
        "early", "answered before the upload has come", "/early", _completed(), ("",), ("",), 10**6, 1000, script=_stay
    ),
    Phase(
        "expect-unread",
        "`Expect: 100-continue`, never read",
        "/idle",
        _BEFORE,
        h2_ways=(),
        body_size=10**6,
        headers=CONTINUE,
    ),
    Phase(
        "expect-read",
        "`Expect: 100-continue`, read",
        "/reading",
        _completed(),
        ("",),
        (),
        body_size=5000,
        headers=CONTINUE,
        script=_expect,
    ),
    Phase(
        "pipelined",
        "a second request is pipelined behind",
        "/idle",
        _BEFORE,
        ("FIN",),
        (),
        script=_pipelined,
    ),
    Phase(
        "keep-alive", "the last of 100 requests on a connection", "/plain", _completed(), ("",), (), script=_keepalive
    ),
    Phase(
        "polling",
        "policy `signal`, the handler polls `is_disconnected()`",
        "/signal/polling",
        Want(phase="before_response", delivered=False, events=("token", "told by poll")),
    ),
    Phase(
        "finish",
        "policy `finish`",
        "/finish/idle?work=0.3",
        _completed(phase="before_response", delivered=False),
    ),
    Phase(
        "fails",
        "the handler raises",
        "/fails",
        Want(state="failed", cause=None, phase="before_response", error="ValueError", raised=True),
        ("",),
        ("",),
        script=_stay,
    ),
    Phase("siblings", "one of three streams is reset", "/idle", _BEFORE, (), ("RST_STREAM",), script=_siblings),
    Phase(
        "interleaved",
        "100 interleaved streams, every third reset",
        "/plain",
        _completed(),
        (),
        ("",),
        script=_interleaved,
    ),
)

BY_NAME: Final = {phase.name: phase for phase in PHASES}


def cells_of(server: Server) -> list[tuple[Phase, str]]:
    """Every cell of a server."""
    return [(phase, way) for phase in PHASES for way in phase.ways_for(server)]


# ---------------------------------------------------------------------- playing and judging


def play(process: Process, phase: Phase, way: str) -> Cell:
    """Play one cell, and judge it."""
    from .blind import blind_spot

    server = process.server
    cell = Cell(server.name, phase.name, way)
    run = f"{phase.name}-{way or 'stay'}-{next(_numbers)}"
    spot = blind_spot(server, phase, way)
    first = len(process.look())
    path = phase.path
    want: Want = phase.want
    if spot is not None:
        cell.blind = spot.why
        want = spot.want or want
        path = spot.path or path
        if want.state == "completed" and "work=" not in path:
            path = f"{path}?work={BLIND_WORK}"
    at: int | None = None
    try:
        if spot is not None and spot.never_called:
            _ask_and_leave(process, phase, path, run, way, called=False)
            judge_never_called(process, cell, run)
            return cell
        if phase.script is not None:
            from dataclasses import replace

            at = phase.script(process, replace(phase, path=path), run, way)
        else:
            at = _ask_and_leave(process, phase, path, run, way)
    except (OSError, AssertionError) as exc:
        cell.problems.append(f"the client got no further: {type(exc).__name__}: {exc}")
        if isinstance(exc, AssertionError):
            return cell
    if phase.name == "interleaved":
        settle(process, cell)
        return cell
    judge(process, cell, run, want, first, at, noise=(spot.noise,) if spot is not None and spot.noise else ())
    return cell


def _ask_and_leave(process: Process, phase: Phase, path: str, run: str, way: str, *, called: bool = True) -> int:
    body = b"x" * phase.body_sent
    if process.server.http2:
        with H2Client(process.port) as h2:
            stream = h2.ask(path, run, body_size=phase.body_size, body=body, read=not phase.slow_reader)
            if phase.read_first:
                h2.read_until(phase.read_first, stream)
            _wait_for_the_moment(process, phase, run, called)
            return h2.leave(way, stream)
    with Client(process.port, small_buffer=phase.slow_reader) as client:
        client.ask(path, run, body_size=phase.body_size, body=body, headers=phase.headers)
        if phase.read_first and called:
            client.read_until(phase.read_first)
        _wait_for_the_moment(process, phase, run, called)
        if phase.name == "expect-unread":
            client._socket.settimeout(0.05)
            try:
                client._read()
            except TimeoutError:
                pass
            if not process.server.traits & {"hypercorn", "daphne", "nginx"}:  # it asks by itself, whoever reads
                assert b" 100 " not in client.received, "the body was asked for although nobody reads it"
        return client.leave(way)


def _wait_for_the_moment(process: Process, phase: Phase, run: str, called: bool) -> None:
    if not called:
        import time

        time.sleep(0.3)  # nothing is to happen
        return
    assert process.wait_for_event(run, phase.wait_for), f"{phase.wait_for!r} was not reached"
    process.wait_until_quiet(run)


def judge_never_called(process: Process, cell: Cell, run: str) -> None:
    """Where the server keeps the request from the application, the application must not have been called."""
    if process.of(run):
        cell.problems.append("the application was called")


def judge(
    process: Process, cell: Cell, run: str, want: Want, first: int, at: int | None, *, noise: tuple[str, ...] = ()
) -> None:
    """Compare the record of ``run`` with ``want``."""
    problems = cell.problems
    if not process.wait_for_event(run, "left", timeout=LEFT_TIMEOUT):
        problems.append("the call never ended")
    settle(process, cell)
    if "thread ended" in want.events:  # some frameworks do not wait for it
        process.wait_for_event(run, "thread ended", timeout=LEFT_TIMEOUT)
    events = process.of(run)
    count = {what: sum(e["what"] == what for e in events) for what in {e["what"] for e in events}}
    outcomes = [e["outcome"] for e in events if e["what"] == "outcome"]
    if len(outcomes) != 1:
        problems.append(f"{len(outcomes)} outcomes")
        return
    [outcome] = outcomes
    cell.state, cell.cause, cell.stood = outcome["state"], outcome["cause"], outcome["phase"]
    cell.delivered, cell.suspended = outcome["delivered"], outcome["detection_suspended"]
    cell.varies = want.state == "*"
    if want.delivered is None:
        cell.delivered = None  # whether the last bytes arrived is a matter of milliseconds, and of no interest
    token = next((e for e in events if e["what"] == "token"), None)
    if token is not None and at is not None:
        cell.latency_ms = (token["at"] - at) / 1e6
    for key, found in (
        ("state", cell.state),
        ("cause", cell.cause),
        ("phase", cell.stood),
        ("delivered", cell.delivered),
        ("suspended", cell.suspended),
    ):
        wanted = getattr(want, key)
        if wanted == "*":
            continue
        if (wanted is not None or key == "cause") and found != wanted:
            problems.append(f"{key} is {found}, not {wanted}")
    for what in ("began", "left", *(("cleaned up",) if want.cleaned else ()), *want.events):
        if count.get(what, 0) != 1:
            problems.append(f"{what!r} {count.get(what, 0)} times")
    problems.extend(f"{what!r} happened" for what in want.never if what in count)
    kinds = sorted(e["kind"] for e in events if e["what"] == "finalizer")
    expected = ["async", "sync"] if want.called else []
    if kinds != expected or set(outcome["finalizers"]) != ({"completed"} if want.called else set()):
        problems.append(f"finalizers: {kinds}, recorded {outcome['finalizers']}")
    left: dict[str, Any] = next((e for e in events if e["what"] == "left"), {"error": None, "statuses": []})
    if want.error != "*" and left["error"] != want.error:
        problems.append(f"{left['error']} left the application for the server")
    if want.status is not None and left["statuses"] != [want.status]:
        problems.append(f"the server was given the status {left['statuses']}, not {want.status}")
    raised = [e["type"] for e in events if e["what"] == "raised"]
    if want.raised and len(raised) != 1:
        problems.append(f"the handler saw {raised}")
    if want.step and "work" in outcome["steps"]:
        expected_step = "completed" if not raised else "canceled" if cell.state == "canceled" else cell.state
        if outcome["steps"]["work"] != expected_step:
            problems.append(f"the step is {outcome['steps']['work']}, not {expected_step}")
    noise = (*noise, *want.noise)
    for event in process.look()[first:]:
        if event["what"] != "log" or any(part in f"{event['logger']}: {event['text']}" for part in noise):
            continue
        if want.error is None or event["logger"] == "hangup":
            problem = f"logged by {event['logger']}: {event['text']} {event['raised'] or ''}".strip()
            if problem not in problems:
                problems.append(problem)


def settle(process: Process, cell: Cell) -> None:
    """Nothing of the call may be left behind."""
    orphans: list[str] = []

    def nobody() -> bool:
        orphans[:] = process.census()
        return not orphans

    if not process.wait_for(nobody, timeout=4):
        cell.problems.append(f"left behind: {', '.join(orphans)}")
