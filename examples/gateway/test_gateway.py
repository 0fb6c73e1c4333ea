"""Every way to leave a turn, on both APIs, against a real worker. Bare, it is not told; mended, it is told once.

``either`` are the paths on which there is nothing to mend: they are right without hangup, and stay so with it.
"""

from __future__ import annotations

import gc
import json
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from tests.real import Serving, read_all, reset, serving, wait_for

from gateway import make_app
from hangup import Outcome, State
from worker import Frame, start_worker

APIS = ["chat", "responses"]
BOTH = pytest.mark.parametrize("api", APIS)
LEAVE = pytest.mark.parametrize("leave", [socket.socket.close, reset], ids=["FIN", "RST"])


class Worker:
    """A worker process, and its ledger."""

    def __init__(self) -> None:
        self.process, self.port = start_worker()
        self._socket = socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def ask(self, **frame: Any) -> Frame:
        data = json.dumps(frame).encode()
        self._socket.sendall(len(data).to_bytes(4, "big") + data)
        answer: Frame = json.loads(self._read(int.from_bytes(self._read(4), "big")))
        return answer

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            data += self._socket.recv(size - len(data))
        return data

    def ledger(self) -> dict[str, Frame]:
        ledger: dict[str, Frame] = self.ask(op="ledger")["ledger"]
        return ledger

    def entry(self, turn: str) -> Frame:
        return self.ledger().get(turn, {"state": None})

    def reaches(self, turn: str, state: str) -> None:
        wait_for(lambda: self.entry(turn)["state"] == state)

    def go(self, turn: str) -> None:
        self.ask(op="go", turn=turn)

    def close(self) -> None:
        self._socket.close()
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Dying(Worker):
    """A worker that dies each time a turn arrives: its link is reset, and the turn is not read."""

    def __init__(self) -> None:
        self.asked = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._die)
        self._thread.start()

    def _die(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return  # closed
            with link:
                self.asked += len(link.recv(1, socket.MSG_PEEK))

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


class Refusing:
    """A server whose ``send`` fails at one message, because the client has gone."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.at: str | None = None
        self.calls = 0  #: that have not ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def refuse(message: Message) -> None:
            last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if self.at == ("last" if last else message["type"]):
                raise ConnectionResetError(104, "Connection reset by peer")
            await send(message)

        self.calls += scope["type"] == "http"
        try:
            await self.app(scope, receive, refuse)
        finally:
            self.calls -= scope["type"] == "http"


class System:
    """A gateway and its worker, and a client of either API."""

    def __init__(
        self, server: Serving, worker: Worker, refusing: Refusing, outcomes: list[Outcome], spans: InMemorySpanExporter
    ) -> None:
        self.server = server
        self.worker = worker
        self.refusing = refusing
        self.outcomes = outcomes
        self.spans = spans
        self.client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")

    def body(self, api: str, prompt: str, *, call: str | None = None, stream: bool = True) -> Frame:
        if api == "chat":
            result = {"role": "tool", "tool_call_id": call, "content": "42"}
        else:
            result = {"type": "function_call_output", "call_id": call, "output": "42"}
        message = result if call is not None else {"role": "user", "content": prompt}
        return {"model": "worker", "stream": stream, "messages" if api == "chat" else "input": [message]}

    def post(self, api: str, prompt: str = "", *, call: str | None = None) -> socket.socket:
        """A raw client that has sent its request."""
        body = json.dumps(self.body(api, prompt, call=call)).encode()
        path = "/v1/chat/completions" if api == "chat" else "/v1/responses"
        client = self.server.connect()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        return client

    def ask(self, api: str, prompt: str = "", *, call: str | None = None, stream: bool = True) -> Any:
        """The official client: all events of a stream, or the whole answer."""
        create: Any = self.client.chat.completions.create if api == "chat" else self.client.responses.create
        answer = create(**self.body(api, prompt, call=call, stream=stream))
        return list(answer) if stream else answer

    def suspend(self, api: str, turn: str, then: str) -> str:
        """Run a turn up to its tool call, and give the id of that."""
        answer = self.ask(api, f"{turn} tool suspend {then}", stream=False)
        call: str = answer.choices[0].message.tool_calls[0].id if api == "chat" else answer.output[0].call_id
        return call

    def begin(self) -> None:
        """From here on only new calls count."""
        wait_for(lambda: not self.refusing.calls)
        self.outcomes.clear()
        self.spans.clear()

    def traced(self, api: str, prompt: str) -> ReadableSpan:
        """What telemetry says of a request that streams."""
        self.begin()
        read_all(self.post(api, prompt))
        wait_for(self.spans.get_finished_spans)
        [span] = self.spans.get_finished_spans()
        return span

    def abandoned(self) -> Outcome:
        """How the one call ended whose answer did not arrive."""
        wait_for(lambda: any(not outcome.delivered for outcome in self.outcomes))
        [outcome] = [outcome for outcome in self.outcomes if not outcome.delivered]
        return outcome


def system(*, mended: bool, patience: float = 60, worker: Worker | None = None) -> Iterator[System]:
    """A gateway that runs, and a worker of its own unless there is one that outlives it."""
    working = worker or Worker()
    outcomes: list[Outcome] = []
    refusing = Refusing(make_app(working.port, mended=mended, patience=patience, observers=[outcomes.append]))
    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    traced = OpenTelemetryMiddleware(refusing, tracer_provider=provider, exclude_spans=["receive", "send"])
    try:
        with serving(traced, lifespan="on") as server:
            running = System(server, working, refusing, outcomes, spans)
            yield running
            running.client.close()
    finally:
        if worker is None:
            working.close()


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def mended() -> Iterator[System]:
    yield from system(mended=True)


@pytest.fixture(scope="module")
def bare() -> Iterator[System]:
    yield from system(mended=False)


@pytest.fixture(params=["bare", "mended"])
def either(request: pytest.FixtureRequest) -> System:
    system: System = request.getfixturevalue(request.param)
    return system


@pytest.fixture
def turn() -> str:
    return uuid.uuid4().hex[:12]


def walk_out(on: System, path: str, api: str, turn: str, leave: Callable[[socket.socket], object]) -> None:
    """Be a client that leaves a turn, at one of the points where clients do."""
    if path == "after resume":
        client = on.post(api, call=on.suspend(api, turn, "say hold say"))
    else:
        client = on.post(api, f"{turn} {PATHS[path]}")
    on.worker.reaches(turn, "held")
    if path.startswith("when"):
        on.refusing.at = "last" if "last" in path else "http.response.start"
        try:
            on.worker.go(turn)
            read_all(client)
        finally:
            on.refusing.at = None
    else:
        leave(client)


PATHS = {
    "before the first chunk": "hold say",
    "between chunks": "say hold say",
    "in the middle of a suspension's frames": "tool hold tool suspend",
    "after resume": "",
    "when the header is written": "hold say hold say",
    "when the last frame of a suspension is written": "tool hold tool suspend",
}


@BOTH
@LEAVE
@pytest.mark.parametrize("path", PATHS)
def test_an_abandoned_turn_is_canceled_exactly_once(
    mended: System, path: str, api: str, leave: Callable[[socket.socket], object], turn: str
) -> None:
    mended.begin()
    walk_out(mended, path, api, turn, leave)
    mended.worker.reaches(turn, "interrupted")
    entry = mended.worker.entry(turn)
    assert (entry["submitted"], entry["canceled"], entry["late"]) == (1, 1, 0)
    outcome = mended.abandoned()
    completed = path == "when the last frame of a suspension is written"
    assert outcome.state is (State.COMPLETED if completed else State.CANCELED)


@pytest.fixture
def uncollected() -> Iterator[None]:
    """What is left in a cycle stays there: on an idle server the garbage collector may not come by for hours."""
    gc.disable()
    yield
    gc.enable()


@BOTH
@LEAVE
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.usefixtures("uncollected")
def test_bare_the_worker_is_not_told(
    bare: System, path: str, api: str, leave: Callable[[socket.socket], object], turn: str
) -> None:
    walk_out(bare, path, api, turn, leave)
    if path != "when the last frame of a suspension is written":
        bare.worker.go(turn)
    bare.worker.reaches(turn, "suspended" if "suspension" in path else "completed")  # for nobody
    assert bare.worker.entry(turn)["canceled"] == 0


@BOTH
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_completed_turn_is_never_canceled(either: System, api: str, stream: bool, turn: str) -> None:
    answer = either.ask(api, f"{turn} say say", stream=stream)
    if api == "chat":
        text = (
            "".join(e.choices[0].delta.content or "" for e in answer) if stream else answer.choices[0].message.content
        )
    else:
        text = "".join(e.delta for e in answer if e.type.endswith("delta")) if stream else answer.output_text
    assert text == "word 1 word 2 "
    entry = either.worker.entry(turn)
    assert (entry["state"], entry["submitted"], entry["canceled"], entry["late"]) == ("completed", 1, 0, 0)


@BOTH
def test_a_suspended_turn_is_resumed_once_and_completes(either: System, api: str, turn: str) -> None:
    call = either.suspend(api, turn, "say")
    either.ask(api, call=call)
    with pytest.raises(openai.NotFoundError, match="no turn is waiting"):
        either.ask(api, call=call)
    entry = either.worker.entry(turn)
    assert (entry["state"], entry["resumed"], entry["canceled"], entry["late"]) == ("completed", 1, 0, 0)


@BOTH
def test_a_suspended_turn_nobody_comes_back_for_is_released(api: str, turn: str) -> None:
    for on in system(mended=True, patience=0.2):
        call = on.suspend(api, turn, "say")
        on.worker.reaches(turn, "interrupted")
        assert on.worker.entry(turn)["canceled"] == 1
        with pytest.raises(openai.NotFoundError):
            on.ask(api, call=call)


@BOTH
def test_a_suspended_turn_is_released_when_the_gateway_stops(worker: Worker, api: str, turn: str) -> None:
    for on in system(mended=True, worker=worker):
        on.suspend(api, turn, "say")
    entry = worker.entry(turn)
    assert (entry["state"], entry["canceled"]) == ("interrupted", 1)


@BOTH
def test_bare_a_suspended_turn_is_held_for_ever(worker: Worker, api: str, turn: str) -> None:
    for on in system(mended=False, patience=0.1, worker=worker):
        on.suspend(api, turn, "say")
        suspended = time.monotonic()
        wait_for(lambda: time.monotonic() - suspended > 0.5)  # noqa: B023 - it is called here
    entry = worker.entry(turn)  # and not even the end of the gateway is its end
    assert (entry["state"], entry["canceled"]) == ("suspended", 0)


@BOTH
@pytest.mark.parametrize(
    ("prompt", "stream"), [("drop", True), ("drop", False), ("say drop", True), ("say drop", False)]
)
def test_a_lost_link_is_ambiguous_and_never_retried(
    mended: System, api: str, prompt: str, stream: bool, turn: str
) -> None:
    mended.begin()
    with pytest.raises(openai.APIError, match=r"the link of turn .* was lost"):  # with the client's own two retries on
        mended.ask(api, f"{turn} {prompt}", stream=stream)
    wait_for(lambda: mended.outcomes)
    [outcome] = mended.outcomes
    assert outcome.state is State.AMBIGUOUS
    assert not outcome.retry_safe
    entry = mended.worker.entry(turn)
    assert (entry["submitted"], entry["canceled"]) == (1, 0)


@BOTH
@pytest.mark.parametrize(("prompt", "stream"), [("drop", True), ("drop", False), ("say drop", False)])
def test_bare_a_lost_link_is_retried_into_three_turns(
    bare: System, api: str, prompt: str, stream: bool, turn: str
) -> None:
    with pytest.raises(openai.APIError):
        bare.ask(api, f"{turn} {prompt}", stream=stream)
    assert bare.worker.entry(turn)["submitted"] == 3


@BOTH
@pytest.mark.parametrize("prompt", ["say drop", "tool drop", "tool suspend say drop", "say interrupted"])
def test_a_stream_that_breaks_off_never_looks_whole_and_is_asked_for_once(
    either: System, api: str, prompt: str, turn: str
) -> None:
    """Whoever reads a stream has the turn's error in it, and the official client does not ask again."""
    why = "the worker has interrupted the turn" if "interrupted" in prompt else r"the link of turn .* was lost"
    if "suspend" in prompt:
        call = either.suspend(api, turn, "say drop")
        raw = read_all(either.post(api, call=either.suspend(api, f"{turn}-raw", "say drop")))
    else:
        call = None
        raw = read_all(either.post(api, f"{turn}-raw {prompt}"))
    with pytest.raises(openai.APIError, match=why):
        either.ask(api, f"{turn} {prompt}", call=call)
    entry = either.worker.entry(turn)
    assert (entry["submitted"], entry["resumed"], entry["canceled"]) == (1, int(call is not None), 0)
    assert b'"error"' in raw
    assert not looks_whole(raw)
    assert looks_whole(read_all(either.post(api, f"{turn}-whole say")))


def looks_whole(stream: bytes) -> bool:
    """Whether there is anything in ``stream`` by which clients know that it is the whole answer."""
    return any(end in stream for end in (b"[DONE]", b'"finish_reason": "', b"response.completed"))


@BOTH
@pytest.mark.parametrize("broken", ["say drop", "say interrupted"])
def test_bare_telemetry_takes_a_stream_that_breaks_off_for_a_success(
    bare: System, api: str, broken: str, turn: str
) -> None:
    lost, whole = bare.traced(api, f"{turn} {broken}"), bare.traced(api, f"{turn} say say")
    assert lost.status.status_code is whole.status.status_code is StatusCode.UNSET
    assert told_apart_by(lost, whole) == set()


@BOTH
@pytest.mark.parametrize(("broken", "step"), [("say drop", "ambiguous"), ("say interrupted", "failed")])
def test_telemetry_knows_a_stream_that_breaks_off(mended: System, api: str, broken: str, step: str, turn: str) -> None:
    lost, whole = mended.traced(api, f"{turn} {broken}"), mended.traced(api, f"{turn} say say")
    assert lost.attributes is not None
    assert lost.attributes[f"hangup.steps.{step}"] == 1
    if step == "ambiguous":
        assert (lost.attributes["hangup.state"], lost.status.status_code) == ("ambiguous", StatusCode.ERROR)
    assert told_apart_by(lost, whole) > {"hangup.steps.completed"}


def told_apart_by(one: ReadableSpan, other: ReadableSpan) -> set[str]:
    """The attributes in which two spans differ, but for the port of the client."""
    ones, others = dict(one.attributes or {}), dict(other.attributes or {})
    return {key for key in ones.keys() | others.keys() if ones.get(key) != others.get(key)} - {"net.peer.port"}


def lose_at_submit(api: str, stream: bool, *, mended: bool) -> tuple[int, list[Outcome]]:
    """Ask a gateway whose worker resets every link: how often that was asked, and the outcomes."""
    dying = Dying()
    try:
        for on in system(mended=mended, worker=dying):
            with pytest.raises(openai.InternalServerError, match=r"the link of turn .* was lost"):
                on.ask(api, "x say", stream=stream)
    finally:
        dying.close()
    return dying.asked, on.outcomes


@BOTH
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_link_lost_as_the_turn_is_submitted_is_ambiguous_and_never_retried(api: str, stream: bool) -> None:
    asked, outcomes = lose_at_submit(api, stream, mended=True)
    assert asked == 1
    assert [(outcome.state, outcome.retry_safe) for outcome in outcomes] == [(State.AMBIGUOUS, False)]


@BOTH
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_bare_a_link_lost_as_the_turn_is_submitted_is_retried(api: str, stream: bool) -> None:
    asked, _ = lose_at_submit(api, stream, mended=False)
    assert asked == 3


#: How the link of a suspended turn is lost, and whether the answer to its result is a stream.
LOST_LATER = pytest.mark.parametrize(
    ("how", "stream"),
    [("while suspended", True), ("while suspended", False), ("drop", True), ("drop", False), ("say drop", False)],
)


def lose_later(on: System, api: str, turn: str, how: str, stream: bool) -> None:
    """Bring the result of a suspended turn whose link is lost: before that, or after."""
    call = on.suspend(api, turn, "say" if how == "while suspended" else how)
    on.begin()
    if how == "while suspended":
        on.worker.process.kill()
        on.worker.process.wait()
    on.ask(api, call=call, stream=stream)


@BOTH
@LOST_LATER
def test_a_link_lost_after_the_suspension_is_ambiguous_and_never_retried(
    api: str, how: str, stream: bool, turn: str
) -> None:
    for on in system(mended=True):
        with pytest.raises(openai.InternalServerError, match=r"the link of turn .* was lost"):
            lose_later(on, api, turn, how, stream)
    assert [(outcome.state, outcome.retry_safe) for outcome in on.outcomes] == [(State.AMBIGUOUS, False)]


@BOTH
@LOST_LATER
def test_bare_a_link_lost_after_the_suspension_is_retried_into_there_is_no_such_turn(
    api: str, how: str, stream: bool, turn: str
) -> None:
    for on in system(mended=False):
        with pytest.raises(openai.NotFoundError, match="no turn is waiting"):  # though it may have used the result
            lose_later(on, api, turn, how, stream)


@BOTH
def test_suspended_turns_are_released_although_the_link_of_one_is_lost(
    worker: Worker, api: str, turn: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also when the gateway stops, and it stops without an error."""
    for on in system(mended=True, patience=0.2, worker=worker):
        on.suspend(api, f"{turn}-lost", "say")
        worker.ask(op="drop", turn=f"{turn}-lost")
        on.suspend(api, f"{turn}-1", "say")
        worker.reaches(f"{turn}-1", "interrupted")
    for on in system(mended=True, worker=worker):
        on.suspend(api, f"{turn}-lost-too", "say")
        worker.ask(op="drop", turn=f"{turn}-lost-too")
        on.suspend(api, f"{turn}-2", "say")
    assert worker.entry(f"{turn}-2")["state"] == "interrupted"
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


@BOTH
def test_a_link_lost_while_the_client_leaves_is_ambiguous(mended: System, api: str, turn: str) -> None:
    mended.begin()
    client = mended.post(api, f"{turn} deaf say hold")
    mended.worker.reaches(turn, "held")
    client.close()
    assert mended.abandoned().state is State.AMBIGUOUS
    assert mended.worker.entry(turn)["canceled"] == 1


@BOTH
def test_bare_nobody_knows_of_a_link_that_is_lost_after_the_client_left(bare: System, api: str, turn: str) -> None:
    client = bare.post(api, f"{turn} say hold drop")
    bare.worker.reaches(turn, "held")
    client.close()
    bare.worker.go(turn)
    bare.worker.reaches(turn, "drop")
    assert bare.worker.entry(turn)["canceled"] == 0


@BOTH
@pytest.mark.parametrize(
    ("prompt", "stream"),
    [("interrupted", True), ("interrupted", False), ("say interrupted", True), ("say interrupted", False)],
)
def test_a_turn_the_worker_interrupted_is_a_failure_and_neither_canceled_nor_repeated(
    mended: System, api: str, prompt: str, stream: bool, turn: str
) -> None:
    mended.begin()
    with pytest.raises(openai.APIError, match="the worker has interrupted the turn"):
        mended.ask(api, f"{turn} {prompt}", stream=stream)
    wait_for(lambda: mended.outcomes)
    [outcome] = mended.outcomes
    assert [step.state for step in outcome.steps] == [State.FAILED]
    entry = mended.worker.entry(turn)
    assert (entry["submitted"], entry["canceled"], entry["late"]) == (1, 0, 0)


@BOTH
@pytest.mark.parametrize(
    ("prompt", "stream"), [("interrupted", True), ("interrupted", False), ("say interrupted", False)]
)
def test_bare_a_turn_the_worker_interrupted_is_repeated_twice(
    bare: System, api: str, prompt: str, stream: bool, turn: str
) -> None:
    with pytest.raises(openai.APIError, match="the worker has interrupted the turn"):
        bare.ask(api, f"{turn} {prompt}", stream=stream)
    assert bare.worker.entry(turn)["submitted"] == 3


@BOTH
def test_without_a_worker_nothing_happened_and_a_retry_is_safe(api: str, turn: str) -> None:
    for on in system(mended=True):
        on.worker.process.kill()
        on.worker.process.wait()
        with pytest.raises(openai.InternalServerError, match="the worker is not there"):
            on.ask(api, f"{turn} say")
    assert [(outcome.state, outcome.retry_safe) for outcome in on.outcomes] == [(State.FAILED, True)] * 3


@pytest.mark.timeout(120)
def test_turns_left_at_a_random_moment(mended: System, rounds: Callable[[int, int], int]) -> None:
    """The count: exactly one cancel per abandoned turn, none for a completed one, no second submit."""
    seed = random.randrange(2**32)
    dice = random.Random(seed)
    mended.begin()
    turns = [f"{seed}-{n}" for n in range(rounds(50, 1000))]
    clients: list[socket.socket] = []
    for started, turn in enumerate(turns):
        wait_for(lambda started=started: started - len(mended.outcomes) < 12)  # type: ignore[misc]
        clients.append(mended.post(dice.choice(APIS), f"{turn} " + "say " * dice.randrange(1, 100)))
        if len(clients) > 8:
            client = clients.pop(0)
            for _ in range(dice.randrange(6)):
                client.recv(1 + dice.randrange(4096))
            dice.choice([socket.socket.close, reset])(client)
    for client in clients:
        client.close()
    wait_for(lambda: len(mended.outcomes) == len(turns), timeout=100)
    ledger = mended.worker.ledger()
    entries = [ledger[turn] for turn in turns if turn in ledger]  # a client may leave before its turn is submitted
    abandoned = [entry for entry in entries if entry["state"] == "interrupted"]
    completed = [entry for entry in entries if entry["state"] == "completed"]
    late = sum(entry["late"] for entry in entries)
    print(
        f"{len(turns)} clients: {len(abandoned)} turns abandoned, one cancel each; {len(completed)} completed, no "
        f"cancel each, {late} of them had just ended when one arrived; {len(turns) - len(entries)} were not submitted"
    )
    assert len(abandoned) + len(completed) == len(entries), seed
    assert {(e["submitted"], e["canceled"], e["late"]) for e in abandoned} == {(1, 1, 0)}, seed
    assert {(e["submitted"], e["canceled"]) for e in completed} <= {(1, 0)}, seed
    assert {entry["late"] for entry in completed} <= {0, 1}, seed
    states = [outcome.state for outcome in mended.outcomes]
    assert {*states} <= {State.COMPLETED, State.CANCELED}, seed
    assert states.count(State.CANCELED) >= len(abandoned) + late, seed
