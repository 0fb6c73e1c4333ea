"""Clients leave in the middle of a tool: bare, the row says ``running`` and the session is broken; mended, neither."""

from __future__ import annotations

import json
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import anyio
import httpx
import pytest
from openai.types.chat import ChatCompletionMessageParam
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import TypeAdapter
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as Event
from tests.journal.postgres import PostgresServer
from tests.real import Serving, read_all, reset, serving, wait_for

from hangup import Cause, Outcome, State
from runs import TOOLS, Message, Store, make_app

pytestmark = pytest.mark.timeout(60)
Spans = Callable[[], dict[str, Any]]
LEAVE = pytest.mark.parametrize("leave", [socket.socket.close, reset], ids=["FIN", "RST"])


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = PostgresServer()
    try:
        server.start()
        yield server.url()
    finally:
        server.remove()


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    """Telemetry as a service sets it up."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> Callable[[], dict[str, Any]]:
    """The state that each span says it ended in, by its name."""
    exporter.clear()

    def ended() -> dict[str, Any]:
        return {span.name: (span.attributes or {}).get("hangup.state") for span in exporter.get_finished_spans()}

    return ended


class Watching:
    """Sees when a call learns that its client has left, and which have not ended."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.left = threading.Event()
        self.calls = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def watched() -> Event:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left.set()
            return message

        self.calls += scope["type"] == "http"
        try:
            await self.app(scope, watched, send)
        finally:
            self.calls -= scope["type"] == "http"


class System:
    """The service on PostgreSQL, and its clients."""

    def __init__(self, server: Serving, url: str, outcomes: list[Outcome], watching: Watching) -> None:
        self.server = server
        self.url = url
        self.watching = watching
        self.outcomes = outcomes
        self.session = uuid.uuid4().hex

    def post(self, prompt: str, *, stream: bool) -> socket.socket:
        """A raw client that has sent its request."""
        body = json.dumps({"session": self.session, "prompt": prompt, "stream": stream})
        client = self.server.connect()
        head = "POST /runs HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        return client

    def ask(self, prompt: str) -> httpx.Response:
        body = {"session": self.session, "prompt": prompt}
        return httpx.post(f"{self.server.url}/runs", json=body, timeout=20)

    def get(self, run: str) -> Any:
        return httpx.get(f"{self.server.url}/runs/{run}").json()

    def rows(self, table: str) -> list[dict[str, Any]]:
        column = "session" if table == "bare_runs" else "owner"

        async def read() -> list[dict[str, Any]]:
            store = Store(self.url)
            try:
                return await store.execute(f"SELECT * FROM {table} WHERE {column} = :session", session=self.session)
            finally:
                await store.engine.dispose()

        return anyio.run(read)

    def history(self) -> list[Message]:
        async def read() -> list[Message]:
            store = Store(self.url)
            try:
                return await store.load_messages(self.session)
            finally:
                await store.engine.dispose()

        return anyio.run(read)


def system(url: str, *, mended: bool, **options: Any) -> Iterator[System]:
    outcomes: list[Outcome] = []
    if mended:
        options["observers"] = [outcomes.append]
    watching = Watching(make_app(url, mended=mended, **options))
    with serving(watching, lifespan="on") as server:
        yield System(server, url, outcomes, watching)


@pytest.fixture
def mended(url: str) -> Iterator[System]:
    yield from system(url, mended=True)


@pytest.fixture
def bare(url: str) -> Iterator[System]:
    yield from system(url, mended=False)


def check(history: list[Message]) -> None:
    """What a provider checks: the types, and that every tool call has its result right behind it."""
    messages = TypeAdapter(list[ChatCompletionMessageParam]).validate_python(history)
    assert len(messages) == len(history)
    for n, message in enumerate(history):
        calls = [call["id"] for call in message.get("tool_calls", [])]
        assert [later.get("tool_call_id") for later in history[n + 1 : n + 1 + len(calls)]] == calls


class Slow:
    """The tools that take a minute: when one is entered, and left. In the bare half they take until ``done``."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.left = threading.Event()
        self.done = threading.Event()

    async def search(self) -> str:
        while not self.done.is_set():
            await anyio.sleep(0.01)
        return "searched"

    def crunch(self) -> str:
        assert self.done.wait(30)
        return "crunched"

    def watch(self, tool: Callable[[], Any]) -> Callable[[], Any]:
        async def watched() -> Any:
            self.entered.set()
            try:
                return await tool()
            finally:
                self.left.set()

        return watched


@pytest.fixture(autouse=True)
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    slow = Slow()
    for name in ("search", "crunch"):
        monkeypatch.setitem(TOOLS, name, slow.watch(TOOLS[name]))
    return slow


def run_of(client: socket.socket) -> str:
    """The id of the run, from the first event of the stream."""
    data = b""
    while b"}\n\n" not in data:
        part = client.recv(65536)
        assert part, data
        data += part
    line = next(line for line in data.decode().splitlines() if line.startswith("data: "))
    run: str = json.loads(line.removeprefix("data: "))["id"]
    return run


@LEAVE
@pytest.mark.parametrize("prompt", ["search", "crunch", "look_up then search", "look_up then crunch"])
def test_a_run_whose_client_left_is_canceled_and_its_history_whole(
    mended: System, slow: Slow, spans: Spans, prompt: str, leave: Callable[[socket.socket], object]
) -> None:
    client = mended.post(prompt, stream=True)
    run = run_of(client)
    assert slow.entered.wait(10)
    leave(client)
    wait_for(lambda: mended.outcomes)
    [outcome] = mended.outcomes
    tool = prompt.split()[-1]
    assert (outcome.state, outcome.cause) == (State.CANCELED, Cause.CLIENT_DISCONNECT)
    assert [step.name for step in outcome.steps if step.state is State.CANCELED] == [f"tool {tool}"]
    assert spans()[f"tool {tool}"] == "canceled"
    assert spans()["model"] != "canceled"
    assert mended.get(run)["state"] == "canceled"
    [row] = mended.rows("hangup_runs")
    assert (row["state"], row["cause"]) == ("canceled", "client_disconnect")
    history = mended.history()
    check(history)
    assert history[-1]["content"] == "[not completed: client_disconnect]"
    assert [m["content"] for m in history if m["role"] == "tool"][:-1] == ["looked it up"] * ("look_up" in prompt)
    answer = mended.ask("please look_up")  # the session goes on
    assert (answer.status_code, answer.json()["result"]) == (201, "I have looked it up.")
    check(mended.history())


@LEAVE
@pytest.mark.parametrize("prompt", ["search", "crunch"])
def test_a_client_that_leaves_before_the_answer_is_the_same(
    mended: System, slow: Slow, spans: Spans, prompt: str, leave: Callable[[socket.socket], object]
) -> None:
    client = mended.post(prompt, stream=False)
    assert slow.entered.wait(10)
    leave(client)
    wait_for(lambda: mended.outcomes)
    assert spans()[f"tool {prompt}"] == "canceled"
    [row] = mended.rows("hangup_runs")
    assert (row["state"], row["cause"]) == ("canceled", "client_disconnect")
    check(mended.history())


@pytest.mark.parametrize("prompt", ["search", "crunch"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_deadline_gives_timed_out_by_the_same_path(url: str, spans: Spans, prompt: str, stream: bool) -> None:
    for on in system(url, mended=True, timeout=1):
        answer = read_all(on.post(prompt, stream=stream))
        assert stream or answer.startswith(b"HTTP/1.1 504 ")
        wait_for(lambda on=on: on.outcomes)  # type: ignore[misc]
        assert on.outcomes[0].state is State.TIMED_OUT
        assert spans()[f"tool {prompt}"] == "timed_out"
        [row] = on.rows("hangup_runs")
        assert (row["state"], row["cause"]) == ("timed_out", "timeout")
        history = on.history()
        check(history)
        assert history[-1]["content"] == "[not completed: timeout]"
        assert on.ask("hello").status_code == 201


@pytest.fixture
def until_done(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(TOOLS, "search", slow.watch(slow.search))
    monkeypatch.setitem(TOOLS, "crunch", slow.watch(partial(anyio.to_thread.run_sync, slow.crunch)))
    yield
    slow.done.set()


@LEAVE
def test_bare_the_row_says_running_and_the_session_is_broken(
    bare: System, slow: Slow, spans: Spans, leave: Callable[[socket.socket], object]
) -> None:
    client = bare.post("search", stream=True)
    run = run_of(client)
    assert slow.entered.wait(10)
    leave(client)
    assert slow.left.wait(10)
    wait_for(lambda: not bare.watching.calls)
    assert bare.history()[-1]["tool_calls"]  # without a result
    with pytest.raises(AssertionError):
        check(bare.history())
    assert bare.ask("hello").status_code == 500  # the provider refuses the history from now on
    assert bare.get(run)["state"] == "running"
    assert spans()["tool search"] is None  # its span looks like that of a tool that completed


@LEAVE
@pytest.mark.usefixtures("until_done")
def test_bare_a_synchronous_tool_works_on_for_nobody_and_the_row_says_running(
    bare: System, slow: Slow, spans: Spans, leave: Callable[[socket.socket], object]
) -> None:
    client = bare.post("crunch", stream=True)
    run = run_of(client)
    assert slow.entered.wait(10)
    leave(client)
    assert bare.watching.left.wait(10)
    assert not slow.left.is_set()  # it could not know
    slow.done.set()
    wait_for(lambda: not bare.watching.calls)
    assert bare.get(run)["state"] == "running"  # whether its result is in the history is a matter of luck
    assert spans()["tool crunch"] is None


@LEAVE
@pytest.mark.parametrize("prompt", ["search", "crunch"])
@pytest.mark.usefixtures("until_done")
def test_bare_a_client_that_leaves_before_the_answer_is_worked_for_all_the_same(
    bare: System, slow: Slow, spans: Spans, prompt: str, leave: Callable[[socket.socket], object]
) -> None:
    client = bare.post(prompt, stream=False)
    assert slow.entered.wait(10)
    leave(client)
    [row] = bare.rows("bare_runs")
    assert bare.get(row["id"])["state"] == "running"  # what came after the hang-up is answered
    assert not slow.left.is_set()
    slow.done.set()
    wait_for(lambda: bare.get(row["id"])["state"] == "completed")  # for nobody
    assert spans()[f"tool {prompt}"] is None
