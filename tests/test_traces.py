"""What a backend receives of a call that was canceled: real sockets, real uvicorn, OTLP over HTTP."""

from __future__ import annotations

import importlib.util
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from .backend import Backend, ReceivedPoint, ReceivedSpan, receiving
from .helpers import ROUTE_IN_SCOPE
from .real import close_with_reset

ROOT = Path(__file__).parent.parent

_markers = itertools.count(1)


@dataclass
class TracedServer:
    """A server of `traced_app` and the backend it exports to."""

    source: str
    backend: Backend
    port: int = 0
    asked_at: int = 0
    log: list[str] = field(default_factory=list)
    reached: set[str] = field(default_factory=set)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def ask(self, path: str, marker: str, *, body: bytes = b"", length: int = 0) -> socket.socket:
        """Send a request. A ``length`` beyond the ``body`` is a body that never comes."""
        self.asked_at = time.time_ns()
        client = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        head = (
            f"{'POST' if length else 'GET'} {path}{'&' if '?' in path else '?'}marker={marker} HTTP/1.1\r\nhost: x\r\n"
        )
        if length:
            head += f"content-length: {length}\r\n"
        client.sendall(head.encode() + b"\r\n" + body)
        return client

    def wait_until_reached(self, marker: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: marker in self.reached, 10), (marker, self.log)

    def new_marker(self) -> str:
        return f"{self.source}-{next(_markers)}"

    def ended(self, name: str) -> int:
        return sum(span.name == name for span in self.backend.spans)

    def call(self, path: str, *, expect: bytes, canceled: bool = True) -> list[ReceivedSpan]:
        """Ask for ``path``, wait for the answer, and return the trace when it is whole."""
        marker = self.new_marker()
        with self.ask(path, marker) as client:
            received = b""
            while expect not in received:
                received += (part := client.recv(65536))
                assert part, received
        return self.trace(marker, canceled=canceled)

    def abort(self, path: str, *, body: bytes = b"", length: int = 0, until: bytes = b"") -> list[ReceivedSpan]:
        """Ask for ``path``, hang up when the work is under way, and return the trace when it is whole."""
        marker = self.new_marker()
        with self.ask(path, marker, body=body, length=length) as client:
            received = b""
            while until not in received:
                received += client.recv(65536)
            self.wait_until_reached(marker)
        return self.trace(marker)

    def trace(self, marker: str, *, canceled: bool = True) -> list[ReceivedSpan]:
        """The trace of a call, once the last span of it has arrived."""

        def whole() -> list[ReceivedSpan]:
            spans = self.backend.trace_of(marker)
            if self.source == "none":  # every span is a trace of its own
                spans = [span for span in self.backend.spans if span.start >= self.asked_at] if spans else []
            wanted = [span.name == "hangup.cancel" for span in spans] if canceled else [True]
            served = [span.kind == "SERVER" for span in spans] if self.source != "none" else [True]
            return spans if any(wanted) and any(served) else []

        found: list[ReceivedSpan] = self.backend.wait_for(whole, f"the trace of {marker}")
        return found


def only(spans: list[ReceivedSpan], name: str) -> ReceivedSpan:
    found = [span for span in spans if span.name == name]
    assert len(found) == 1, (name, [span.name for span in spans])
    return found[0]


def ancestors(span: ReceivedSpan, spans: list[ReceivedSpan]) -> list[ReceivedSpan]:
    """The spans around ``span``, innermost first."""
    found = [other for other in spans if other.span_id == span.parent_id]
    return found + ancestors(found[0], spans) if found else []


@contextmanager
def serving(source: str) -> Iterator[TracedServer]:
    with receiving() as backend:
        server = TracedServer(source, backend)
        env = {**os.environ, "OTEL_SEMCONV_STABILITY_OPT_IN": "http", "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.traced_app", source, str(backend.port)],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

        def read(lines: Iterable[str], take: Callable[[str], object]) -> None:
            for line in lines:
                with server.changed:
                    take(line.rstrip("\n"))
                    server.changed.notify_all()

        def on_output(line: str) -> None:
            kind, _, value = line.partition(" ")
            if kind == "port":
                server.port = int(value)
            elif kind == "reached":
                server.reached.add(value)

        assert process.stdout is not None
        assert process.stderr is not None
        threads = [
            threading.Thread(target=read, args=(process.stdout, on_output)),
            threading.Thread(target=read, args=(process.stderr, server.log.append)),
        ]
        for thread in threads:
            thread.start()
        try:
            with server.changed:
                assert server.changed.wait_for(lambda: server.port or process.poll() is not None, 15), server.log
                assert server.port, server.log
            yield server
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            finally:
                process.kill()
                process.wait()
                for thread in threads:
                    thread.join()
                process.stdout.close()
                process.stderr.close()


WITH_SERVER_SPAN = ("contrib-asgi", "contrib-fastapi", "contrib-starlette", "fastapi", "starlette")


def _sources(*sources: str) -> list[Any]:
    have = {"fastapi": "fastapi.telemetry", "starlette": "starlette.middleware.opentelemetry"}
    return [
        pytest.param(
            source,
            marks=pytest.mark.skipif(
                source in have and importlib.util.find_spec(have[source]) is None,
                reason=f"this {source} has no telemetry of its own",
            ),
        )
        for source in sources
    ]


@pytest.fixture(scope="module", params=_sources(*WITH_SERVER_SPAN, "none"))
def server(request: pytest.FixtureRequest) -> Iterator[TracedServer]:
    with serving(request.param) as found:
        yield found
    unwanted = ("Failed to detach", "ended span", "ERROR hangup", "An instrumentation raised", "never awaited")
    assert [line for line in found.log if any(text in line for text in unwanted)] == []


WHERE = pytest.mark.parametrize("position", ["inside", "outside", "twice"])


def check(server: TracedServer, spans: list[ReceivedSpan], *, cause: str, phase: str, status: int | None) -> None:
    """What has to hold in every cell but for the server span."""
    work, cancel = only(spans, "work"), only(spans, "hangup.cancel")
    assert (work.status, work.state, work.cause) == ("UNSET", "canceled", cause)
    assert work.events == ()
    assert (cancel.status, cancel.state, cancel.cause) == ("UNSET", "canceled", cause)
    assert cancel.attributes["hangup.phase"] == phase
    assert cancel.attributes["hangup.steps.in_flight"] == ["work"]
    assert 0 <= cancel.attributes["hangup.cancel.latency"] < 5
    if cause == "client_disconnect":
        assert 0 <= work.attributes["hangup.cancel.latency"] <= cancel.attributes["hangup.cancel.latency"]
        assert work.start <= cancel.start <= work.end <= cancel.end
    assert all(span.status != "OK" for span in spans)
    if server.source == "none":
        return
    [span] = [span for span in spans if span.kind == "SERVER"]
    assert cancel.parent_id == span.span_id
    between = ancestors(work, spans)
    assert between.pop() is span
    if cause == "client_disconnect":  # FastAPI's own spans, say, of the endpoint
        assert {other.state for other in between} <= {"canceled"}
    assert span.http_status == status
    assert (span.state, span.cause) == ("canceled", cause)
    assert span.attributes["hangup.phase"] == phase
    assert span.attributes["hangup.steps.canceled"] == 1
    assert 0 <= span.attributes["hangup.cancel.latency"] < 5
    assert 0 < span.attributes["hangup.cancel.elapsed"] < 20


@WHERE
def test_a_slow_handler(server: TracedServer, position: str) -> None:
    spans = server.abort(f"/{position}/slow")
    check(server, spans, cause="client_disconnect", phase="before_response", status=499)
    assert only(spans, "plan").state == "completed" if server.source != "none" else True
    finalizer, cancel = only(spans, "finalizer close_row"), only(spans, "hangup.cancel")
    assert finalizer.parent_id == cancel.span_id
    assert (finalizer.status, finalizer.state) == ("UNSET", "completed")
    assert cancel.start <= finalizer.start <= finalizer.end <= cancel.end
    assert finalizer.end - finalizer.start >= 9_000_000  # it sleeps 10 ms
    check_server_status(server, spans)


@WHERE
def test_a_stream_before_its_first_chunk(server: TracedServer, position: str) -> None:
    spans = server.abort(f"/{position}/stream/0")
    check(server, spans, cause="client_disconnect", phase="during_response", status=200)
    check_server_status(server, spans)


@WHERE
def test_a_stream_midway(server: TracedServer, position: str) -> None:
    spans = server.abort(f"/{position}/stream/1", until=b"chunk")
    check(server, spans, cause="client_disconnect", phase="during_response", status=200)
    check_server_status(server, spans)


@WHERE
def test_an_upload(server: TracedServer, position: str) -> None:
    spans = server.abort(f"/{position}/upload", body=b"x" * 1000, length=5000)
    # The handler is interrupted where it reads: no ClientDisconnect passes through what makes the server span.
    check(server, spans, cause="client_disconnect", phase="before_response", status=499)
    check_server_status(server, spans)


@WHERE
def test_a_timeout_by_an_outer_scope(server: TracedServer, position: str) -> None:
    """Not a hang-up, and not our doing: it passes through, and what makes the server span has its own opinion."""
    spans = server.call(f"/{position}/timeout/slow", expect=b"HTTP/1.1 504")
    check(server, spans, cause="unknown", phase="before_response", status=None)
    if server.source != "none":
        [span] = [span for span in spans if span.kind == "SERVER"]
        assert span.status == ("ERROR" if server.source == "fastapi" else "UNSET")


def check_server_status(server: TracedServer, spans: list[ReceivedSpan]) -> None:
    """The server span after a hang-up: canceled, and no error."""
    if server.source == "none":
        return
    [span] = [span for span in spans if span.kind == "SERVER"]
    assert (span.state, span.cause) == ("canceled", "client_disconnect")
    assert span.status == "UNSET"
    assert "error.type" not in span.attributes
    assert span.events == ()


@WHERE
def test_a_call_that_completes(server: TracedServer, position: str) -> None:
    spans = server.call(f"/{position}/quick/7", expect=b"done", canceled=False)
    assert only(spans, "work").state == "completed"
    assert [span.name for span in spans if span.name == "hangup.cancel"] == []
    assert {span.status for span in spans} == {"UNSET"}
    if server.source != "none":
        [span] = [span for span in spans if span.kind == "SERVER"]
        assert span.http_status == 200
        assert span.state == "completed"
        assert span.attributes["hangup.steps.completed"] == 1


@WHERE
@pytest.mark.parametrize("server", _sources(*WITH_SERVER_SPAN), indirect=True)  # by which the trace is found
def test_the_client_span_of_an_unmodified_handler(server: TracedServer, position: str) -> None:
    """An instrumented httpx waits for an answer that does not come. No line of the application knows of hangup."""
    with socket.create_server(("127.0.0.1", 0)) as upstream:
        upstream.settimeout(10)
        marker = server.new_marker()
        with server.ask(f"/{position}/upstream?port={upstream.getsockname()[1]}", marker):
            connection, _ = upstream.accept()
            connection.settimeout(10)
            assert marker.encode() in connection.recv(65536)
        spans = server.trace(marker)
        assert connection.recv(65536) == b""  # and the request is over
        connection.close()
    [client] = [span for span in spans if span.kind == "CLIENT"]
    assert client.scope == "opentelemetry.instrumentation.httpx"
    assert (client.status, client.state, client.cause) == ("UNSET", "canceled", "client_disconnect")
    # How long it went on after the cause is what is left of its duration.
    assert 0 < client.attributes["hangup.cancel.elapsed"] <= (client.end - client.start) / 1e9 + 0.001


def test_metrics_carry_the_template_of_the_route_and_never_a_path(server: TracedServer) -> None:
    known = ROUTE_IN_SCOPE or "fastapi" in server.source or server.source == "none"
    server.call("/inside/quick/12345", expect=b"done", canceled=False)
    server.abort("/inside/slow")

    def arrived() -> bool:
        routes = {(p.name, p.attributes.get("http.route"), p.attributes.get("hangup.state")) for p in points()}
        return {
            ("hangup.call.duration", "/inside/quick/{item}" if known else None, "completed"),
            ("hangup.call.duration", "/inside/slow" if known else None, "canceled"),
            ("hangup.cancel.latency", None, None),
            ("hangup.active_calls", None, None),
        } <= routes

    def points() -> list[ReceivedPoint]:
        return [p for p in server.backend.points if p.name.startswith("hangup.")]

    server.backend.wait_for(arrived, "the metrics")
    assert "12345" not in str([p.attributes for p in points()])
    assert {p.name for p in points()} <= {
        "hangup.call.duration",
        "hangup.cancel.latency",
        "hangup.active_calls",
        "hangup.active_steps",
    }
    durations = [p for p in points() if p.name == "hangup.call.duration"]
    assert {p.unit for p in durations} == {"s"}
    assert {p.attributes["http.request.method"] for p in durations} <= {"GET", "POST"}
    for point in durations:
        assert set(point.attributes) <= {"http.request.method", "http.route", "hangup.state", "hangup.cause"}
        assert (point.attributes["hangup.state"] == "completed") == ("hangup.cause" not in point.attributes)
    server.backend.points.clear()
    server.backend.wait_for(
        lambda: [p.value for p in server.backend.points if p.name == "hangup.active_calls"][-1:] == [0],
        "no active call",
    )


def test_mounted_outside_the_better_way_is_named_once(server: TracedServer) -> None:
    for _ in range(2):
        for position in ("inside", "outside", "twice", "hidden"):
            server.abort(f"/{position}/slow")
    hints = [line for line in server.log if "No span is current where HangupMiddleware begins" in line]
    assert all(line.startswith("DEBUG hangup ") for line in hints)
    reached = [line for line in hints if "A part of it stands there" in line]
    # Once for each middleware that is not inside.
    assert (len(reached), len(hints) - len(reached)) == ((0, 4) if server.source == "none" else (2, 1))


def test_where_nobody_can_look_through_what_is_between_less_is_said(server: TracedServer) -> None:
    """Mounted once more inside, all is said: that is the position ``twice`` of the others."""
    spans = server.abort("/hidden/slow")
    work, cancel = only(spans, "work"), only(spans, "hangup.cancel")
    assert {(span.state, span.cause) for span in (work, cancel)} == {("canceled", "client_disconnect")}
    if server.source == "none":
        return
    [span] = [span for span in spans if span.kind == "SERVER"]
    assert cancel.parent_id == span.span_id
    assert (span.state, span.cause) == ("canceled", "client_disconnect")  # `CancellationSpanProcessor` says so
    assert span.http_status is None
    if server.source == "fastapi":
        # FastAPI takes every exception that passes through it for an error, and its word is the last.
        assert (span.status, span.attributes["error.type"]) == ("ERROR", "asyncio.exceptions.CancelledError")
    else:
        assert span.status == "UNSET"


@pytest.mark.parametrize("server", ["contrib-asgi"], indirect=True)
@pytest.mark.timeout(120)  # on a machine with ten times the work it can do
def test_a_thousand_aborted_streams_with_steps_across_yield_detach_quietly(server: TracedServer) -> None:
    """Generators are closed where they were left, by other tasks, and by the garbage collector."""

    def abort_many(count: int) -> None:
        for n in range(count):
            with server.ask("/inside/leaky", server.new_marker()) as client:
                client.recv(65536)
                if n % 2:  # stop reading for a while: then the generator is left at its `yield`, not at an `await`
                    close_with_reset(client)

    before = server.ended("both")
    with ThreadPoolExecutor(20) as pool:
        for job in [pool.submit(abort_many, 50) for _ in range(20)]:
            job.result()
    server.backend.wait_for(lambda: server.ended("both") >= before + 1000, "the steps of all streams", timeout=60)
    server.call("/inside/quick/1", expect=b"done", canceled=False)
    assert [line for line in server.log if "detach" in line.lower()] == []
    states = Counter(
        s.state for s in server.backend.spans if s.name in {"both", "one", "two", "inner one", "inner two"}
    )
    assert set(states) == {"canceled"}
