"""Steps, spans and metrics in process: what ends how, and what must stay quiet."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import re
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextvars import copy_context
from pathlib import Path
from typing import Any, ClassVar

import anyio
import pytest
from opentelemetry import baggage, propagate, trace
from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace import Span as SDKSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import SpanKind, StatusCode
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
from starlette.types import Message, Receive, Scope, Send

from hangup import (
    AmbiguousOutcome,
    Cause,
    HangupMiddleware,
    State,
    add_finalizer,
    before_success,
    current_call,
    step,
    telemetry,
)
from hangup._hooks import Instrumentation, hooks_of, tell
from hangup.telemetry import CancellationSpanProcessor
from hangup.testing import Peer, WebSocketPeer

from .helpers import END, ROUTE_IN_SCOPE, START, Watch, answer, chunk, until, watched

pytestmark = pytest.mark.anyio

_exporter = InMemorySpanExporter()


class _Switch(Sampler):
    """A provider can be set once in a process; whether it samples is for each test to say."""

    on = True
    out: ClassVar[set[str]] = set()  #: what is sampled out, with all below it, by name
    all_the_same: ClassVar[set[str]] = set()  #: what is recorded, whatever is around it

    def should_sample(
        self,
        parent_context: Any,
        trace_id: int,
        name: str,
        kind: Any = None,
        attributes: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> SamplingResult:
        parent = trace.get_current_span(parent_context).get_span_context()
        follows = self.on and name not in self.out and (parent.trace_flags.sampled or not parent.is_valid)
        decision = Decision.RECORD_AND_SAMPLE if follows or name in self.all_the_same else Decision.DROP
        return SamplingResult(decision, attributes, parent.trace_state)

    def get_description(self) -> str:
        return "switch"


_switch = _Switch()


class _Mask(SpanProcessor):
    """Hides secrets, and copies a tenant from the baggage: what people write such processors for."""

    def on_start(self, span: SDKSpan, parent_context: Context | None = None) -> None:
        if "secret" in (span.attributes or {}):
            span.set_attribute("secret", "***")
        tenant = baggage.get_baggage("tenant", parent_context)
        if tenant is not None:
            span.set_attribute("tenant", str(tenant))


@pytest.fixture(scope="module", autouse=True)
def _provider() -> Iterator[None]:
    provider = TracerProvider(sampler=_switch)
    provider.add_span_processor(CancellationSpanProcessor())
    provider.add_span_processor(_Mask())
    provider.add_span_processor(SimpleSpanProcessor(_exporter))
    trace.set_tracer_provider(provider)
    yield
    _switch.on = False  # the tests that come after are none of ours


@pytest.fixture(autouse=True)
def spans(caplog: pytest.LogCaptureFixture) -> Iterator[Spans]:
    """What has ended. And whatever a test does, OpenTelemetry has nothing to complain of."""
    _switch.on = True
    _switch.out.clear()
    _switch.all_the_same.clear()
    _exporter.clear()
    yield Spans()
    said = [(r.name, r.getMessage()) for r in caplog.get_records("call")]  # `caplog.records` are those of the teardown
    assert [text for name, text in said if name.startswith("opentelemetry")] == []
    assert [text for _, text in said if text.startswith("An instrumentation raised")] == []
    assert trace.get_current_span() is trace.INVALID_SPAN
    assert telemetry._owners == {}


class Spans:
    """The spans that have ended, by name."""

    def __call__(self, name: str) -> list[ReadableSpan]:
        return [span for span in _exporter.get_finished_spans() if span.name == name]

    def __getitem__(self, name: str) -> ReadableSpan:
        [span] = self(name)
        return span

    @property
    def names(self) -> list[str]:
        return [span.name for span in _exporter.get_finished_spans()]


def facts(span: ReadableSpan) -> tuple[Any, ...]:
    """State, cause, status and error type of ``span``."""
    found = span.attributes or {}
    return (
        found.get("hangup.state"),
        found.get("hangup.cause"),
        span.status.status_code.name,
        found.get("error.type"),
    )


CANCELED = ("canceled", "client_disconnect", "UNSET", None)


def served(app: Any, **options: Any) -> Watch:
    """``app``, the middleware, and a server span around both that ends with the last frame."""
    watch = Watch(app, **options)
    tracer = trace.get_tracer("server")

    async def server(scope: Scope, receive: Receive, send: Send) -> None:
        span = tracer.start_span("server", kind=SpanKind.SERVER)

        async def send_and_end(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.set_attribute("http.response.status_code", message["status"])
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                span.end()

        with trace.use_span(span, record_exception=False, set_status_on_exception=False):
            await HangupMiddleware.__call__(watch.app, scope, receive, send_and_end)
        if span.is_recording():
            span.end()

    watch.server = server  # type: ignore[attr-defined]
    return watch


async def hang_up_on(app: Any, **options: Any) -> Watch:
    """Call ``app``, hang up when it waits, and return what was watched."""
    watch = served(app, **options)
    peer = Peer()
    async with peer.calling(watch.server):  # type: ignore[attr-defined]
        await watched(peer)
        peer.hang_up()
    assert peer.error is None
    return watch


# ---------------------------------------------------------------------- what ends how


async def test_each_end_of_a_step_has_its_state_status_and_error_type(spans: Spans) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with step("completes", {"a": 1}):
            pass
        with contextlib.suppress(ValueError), step("fails"):
            raise ValueError("bad")
        with contextlib.suppress(AmbiguousOutcome), step("ambiguous"):
            raise AmbiguousOutcome
        with anyio.move_on_after(0), step("canceled by its own scope"):
            await anyio.sleep(60)
        with step("in flight"):
            await anyio.sleep(60)

    await hang_up_on(app)
    assert facts(spans["completes"]) == ("completed", None, "UNSET", None)
    assert dict(spans["completes"].attributes or {})["a"] == 1
    assert facts(spans["fails"]) == ("failed", None, "ERROR", "ValueError")
    assert spans["fails"].status.description == "bad"
    assert [event.name for event in spans["fails"].events] == ["exception"]
    # It ends when the call does, for until then somebody may know better. By then the call has a cause.
    assert facts(spans["ambiguous"]) == ("ambiguous", "client_disconnect", "ERROR", "ambiguous")
    assert facts(spans["canceled by its own scope"]) == ("canceled", "unknown", "UNSET", None)
    assert facts(spans["in flight"]) == CANCELED
    assert spans["in flight"].events == ()
    assert all(span.kind is SpanKind.INTERNAL for span in _exporter.get_finished_spans() if span.name != "server")
    assert all(span.parent == spans["server"].context for span in [spans["fails"], spans["in flight"]])


@pytest.mark.parametrize(
    ("cause", "option", "status"),
    [
        (Cause.CLIENT_DISCONNECT, "unset", "UNSET"),
        (Cause.REQUESTED, "unset", "UNSET"),
        (Cause.UNKNOWN, "unset", "UNSET"),
        (Cause.SERVER_SHUTDOWN, "unset", "ERROR"),
        (Cause.CLIENT_DISCONNECT, "error", "ERROR"),
        (Cause.REQUESTED, "error", "ERROR"),
        (Cause.SERVER_SHUTDOWN, "error", "ERROR"),
        (Cause.REQUESTED, lambda cause: "error" if cause == "requested" else "unset", "ERROR"),
        (Cause.SERVER_SHUTDOWN, lambda cause: "error" if cause == "requested" else "unset", "UNSET"),
        (Cause.TIMEOUT, "unset", "ERROR"),
        (Cause.TIMEOUT, lambda cause: "unset", "ERROR"),
    ],
)
async def test_the_status_of_what_was_stopped_depends_on_the_cause(
    spans: Spans, cause: Cause, option: Any, status: str
) -> None:
    other = trace.get_tracer("a library")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with other.start_as_current_span("of a library"), step("work"):
            current_call().stop(cause)
            await anyio.sleep(60)

    watch = served(app, cancel_status=option)
    await Peer().run(watch.server)  # type: ignore[attr-defined]
    timeout = cause is Cause.TIMEOUT
    error = ("timeout" if timeout else cause) if status == "ERROR" else None
    for name in ("work", "of a library", "hangup.cancel", "server"):
        if name != "server" or spans[name].attributes["hangup.state"]:  # type: ignore[index]
            assert facts(spans[name]) == ("timed_out" if timeout else "canceled", cause, status, error), name


async def test_a_cancel_status_that_makes_no_sense_is_logged_and_changes_nothing(
    spans: Spans, caplog: pytest.LogCaptureFixture
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with step("work"):
            await anyio.sleep(60)

    watch = await hang_up_on(app, cancel_status=lambda cause: "red")
    assert watch.outcome.state is State.CANCELED
    assert facts(spans["work"]) == CANCELED
    assert "cancel_status is to return 'unset' or 'error', not 'red'" in caplog.text
    caplog.clear()


async def test_where_the_status_cannot_be_asked_for_everything_else_is_written(
    spans: Spans, caplog: pytest.LogCaptureFixture
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with trace.get_tracer("a library").start_as_current_span("of a library"), step("work"):
            await anyio.sleep(60)

    await hang_up_on(app, cancel_status=lambda cause: 1 / 0)
    for name in ("work", "of a library", "hangup.cancel", "server"):
        assert facts(spans[name]) == CANCELED, name
    assert (spans["server"].attributes or {})["hangup.delivered"] is False
    assert "ZeroDivisionError" in caplog.text
    caplog.clear()


async def test_an_error_that_has_no_text_is_an_error_all_the_same(
    spans: Spans, caplog: pytest.LogCaptureFixture
) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    with contextlib.suppress(Mute), step("work"):
        raise Mute
    assert facts(spans["work"])[:3] == ("failed", None, "ERROR")
    caplog.clear()


async def test_an_effect_in_flight_ends_ambiguous_and_a_confirmed_one_does_not(spans: Spans) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with step("pay", effect=True), step("told", effect=True) as told:
            try:
                await anyio.sleep(60)
            finally:
                told.confirm()

    watch = await hang_up_on(app)
    assert watch.outcome.state is State.AMBIGUOUS
    assert facts(spans["pay"]) == ("ambiguous", "client_disconnect", "ERROR", "ambiguous")
    assert facts(spans["told"]) == CANCELED
    assert facts(spans["server"]) == ("ambiguous", "client_disconnect", "ERROR", "ambiguous")


async def test_an_ambiguous_call_that_nobody_stopped_has_no_cause(spans: Spans) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(AmbiguousOutcome), step("pay", effect=True):
            raise AmbiguousOutcome("the link was lost")
        await send(START)
        await anyio.sleep(0)
        await send({**END, "more_body": True})

    watch = served(app)
    await Peer().run(watch.server)  # type: ignore[attr-defined]
    assert (watch.outcome.state, watch.outcome.cause) == (State.AMBIGUOUS, None)
    assert facts(spans["server"])[:2] == ("ambiguous", None)


@pytest.mark.parametrize("status", [200, 502])
async def test_a_server_span_that_ends_with_the_last_frame_says_ambiguous(spans: Spans, status: int) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(AmbiguousOutcome), step("pay", effect=True):
            raise AmbiguousOutcome("the link was lost")
        await send({**START, "status": status})
        await send(END)  # the client is told in the body

    watch = served(app)
    await Peer().run(watch.server)  # type: ignore[attr-defined]
    assert (watch.outcome.state, watch.outcome.cause) == (State.AMBIGUOUS, None)
    assert facts(spans["server"]) == ("ambiguous", None, "ERROR", "ambiguous")


@pytest.mark.parametrize("works", [True, False])
async def test_the_span_of_a_step_waits_for_what_its_cancel_makes_of_it(
    spans: Spans, works: bool, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[int] = []

    async def cancel() -> None:
        await anyio.sleep(0.01)
        told.append(time.time_ns())
        if not works:
            raise ValueError("no")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with step("job", cancel=cancel):
            await anyio.sleep(60)

    await hang_up_on(app)
    span = spans["job"]
    assert facts(span) == (CANCELED if works else ("ambiguous", "client_disconnect", "ERROR", "ambiguous"))
    assert span.end_time is not None
    assert span.end_time < told[0]  # it ended when it was left


async def test_a_step_still_open_when_its_call_ends_is_swept(spans: Spans) -> None:
    left: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        left.append(step("forgotten").__enter__())
        try:
            await anyio.sleep(60)
        finally:
            assert not spans("forgotten")

    await hang_up_on(app)
    assert facts(spans["forgotten"]) == CANCELED
    assert (spans["forgotten"].attributes or {})["hangup.cancel.latency"] > 0  # type: ignore[operator]
    left[0].__exit__(None, None, None)
    assert len(spans("forgotten")) == 1


# ---------------------------------------------------------------------- the server span, and hangup.cancel


async def test_the_server_span_and_the_cancel_span_say_what_happened(spans: Spans) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        add_finalizer(lambda: None, name="one")

        @add_finalizer
        async def two() -> None:
            with step("inside a finalizer"):
                await anyio.sleep(0)
            raise ValueError("bad")

        with step("done"):
            pass
        with contextlib.suppress(OSError), step("failed"):
            raise OSError
        with step("outer"), step("inner"):
            await anyio.sleep(60)

    await hang_up_on(app)
    server, cancel = dict(spans["server"].attributes or {}), dict(spans["hangup.cancel"].attributes or {})
    assert facts(spans["server"]) == CANCELED
    assert server["http.response.status_code"] == 499
    assert server["hangup.phase"] == "before_response"
    assert server["hangup.delivered"] is False
    assert (server["hangup.steps.completed"], server["hangup.steps.failed"], server["hangup.steps.canceled"]) == (
        1,
        1,
        2,
    )
    assert 0 <= server["hangup.cancel.latency"] < server["hangup.cancel.elapsed"] + 5  # type: ignore[operator]
    assert cancel["hangup.steps.in_flight"] == ("outer", "inner")
    assert (cancel["hangup.finalizers"], cancel["hangup.finalizers.failed"]) == (2, 1)
    assert facts(spans["finalizer one"]) == ("completed", None, "UNSET", None)
    assert facts(spans["finalizer two"]) == ("failed", None, "ERROR", "ValueError")
    assert spans["finalizer two"].parent == spans["finalizer one"].parent == spans["hangup.cancel"].context
    assert spans["inside a finalizer"].parent == spans["finalizer two"].context
    assert spans.names[-1] == "hangup.cancel"


async def test_a_finalizer_that_was_cut_off_says_so(spans: Spans) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        @add_finalizer
        async def endless() -> None:
            await anyio.sleep(60)

        await answer(send)

    watch = served(app, finalizer_timeout=0.01)
    await Peer().run(watch.server)  # type: ignore[attr-defined]
    assert facts(spans["finalizer endless"]) == ("timed_out", None, "ERROR", "timeout")
    assert spans["finalizer endless"].parent == spans["server"].context
    assert spans("hangup.cancel") == []


@pytest.mark.usefixtures("beginning_in_time")
async def test_after_a_deadline_the_server_span_knows_before_the_504_ends_it(spans: Spans) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with step("work"):
            await anyio.sleep(60)

    watch = served(app, timeout=0.03)
    peer = Peer()
    await peer.run(watch.server)  # type: ignore[attr-defined]
    assert peer.status == 504
    assert facts(spans["server"]) == ("timed_out", "timeout", "ERROR", "timeout")
    assert (spans["server"].attributes or {})["http.response.status_code"] == 504
    assert facts(spans["work"]) == ("timed_out", "timeout", "ERROR", "timeout")


async def test_a_completed_call_is_called_so_before_its_span_ends(spans: Spans) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, 503 if scope["path"] == "/bad" else 200)

    for path, state in (("/", "completed"), ("/bad", "failed")):
        _exporter.clear()
        await Peer(path=path).run(served(app).server)  # type: ignore[attr-defined]
        assert facts(spans["server"]) == (state, None, "UNSET", None)
        assert spans.names == ["server"]


async def test_a_before_success_hook_that_fails_is_on_the_server_span(
    spans: Spans, caplog: pytest.LogCaptureFixture
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        @before_success
        async def write_row() -> None:
            raise OSError("disk full")

        await answer(send)

    peer = Peer()
    await peer.run(served(app).server)  # type: ignore[attr-defined]
    assert peer.status == 500
    assert (spans["server"].attributes or {})["hangup.state"] == "failed"


async def test_work_that_is_finished_for_nobody_is_completed_and_not_delivered(spans: Spans) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        await send(chunk(b"x"))
        with step("work"):
            await until(lambda: current_call().life.left)
        await send(END)

    await hang_up_on(app, policy="finish")
    assert facts(spans["server"]) == ("completed", None, "UNSET", None)
    assert (spans["server"].attributes or {})["hangup.delivered"] is False
    assert facts(spans["work"]) == ("completed", None, "UNSET", None)


async def test_a_reason_is_an_attribute(spans: Spans) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        current_call().cancel("over budget")
        await anyio.sleep(60)

    await Peer().run(served(app).server)  # type: ignore[attr-defined]
    assert (spans["hangup.cancel"].attributes or {})["hangup.reason"] == "over budget"
    assert (spans["server"].attributes or {})["hangup.reason"] == "over budget"


async def test_a_span_of_the_application_around_the_call_is_no_server_span(spans: Spans) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await anyio.sleep(60)

    peer = Peer()
    with trace.get_tracer("app").start_as_current_span("a test client"):
        async with peer.calling(HangupMiddleware(app)):
            await watched(peer)
            peer.hang_up()
    assert facts(spans["a test client"]) == (None, None, "UNSET", None)
    assert spans["hangup.cancel"].parent == spans["a test client"].context


async def test_mounted_twice_the_records_belong_under_the_span_between(spans: Spans) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        add_finalizer(lambda: None, name="close")
        await anyio.sleep(60)

    async def between(scope: Scope, receive: Receive, send: Send) -> None:
        with trace.get_tracer("between").start_as_current_span("between"):
            await inner(scope, receive, send)

    inner = HangupMiddleware(app)
    peer = Peer()
    async with peer.calling(HangupMiddleware(between)):
        await watched(peer)
        peer.hang_up()
    parent = spans["hangup.cancel"].parent
    assert parent is not None
    assert parent.span_id == spans["between"].get_span_context().span_id  # type: ignore[union-attr]
    assert spans["between"].attributes == {
        "hangup.state": "canceled",
        "hangup.cause": "client_disconnect",
        "hangup.cancel.elapsed": (spans["between"].attributes or {})["hangup.cancel.elapsed"],
    }


@pytest.mark.parametrize("goodbye", [True, False])
async def test_a_websocket_that_said_goodbye_was_not_cut_off(spans: Spans, goodbye: bool) -> None:
    async def chat(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        with step("talk"), trace.get_tracer("a library").start_as_current_span("listen"):
            while (await receive())["type"] == "websocket.receive":
                pass

    peer = WebSocketPeer()
    async with peer.calling(served(chat).server):  # type: ignore[attr-defined]
        await peer.wait_for(lambda: peer.accepted and peer.reading and not peer.unread)
        peer.close() if goodbye else peer.hang_up()
    expected = ("completed", None, "UNSET", None) if goodbye else CANCELED
    assert facts(spans["server"]) == expected
    assert len(spans("hangup.cancel")) == (not goodbye)
    # The application was told by a message, and went on by itself: what it did then is done.
    assert facts(spans["talk"]) == ("completed", None, "UNSET", None)
    assert facts(spans["listen"]) == ((None, None, "UNSET", None) if goodbye else CANCELED)


@pytest.mark.parametrize("kind", [SpanKind.SERVER, SpanKind.INTERNAL])
async def test_where_the_server_span_is_further_in_the_records_are_below_it(
    spans: Spans, kind: SpanKind, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hangup")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        context = baggage.set_baggage("tenant", "acme")
        span = trace.get_tracer("server").start_span("server", context, kind=kind)
        with attached(trace.set_span_in_context(span, context)):
            add_finalizer(lambda: None, name="close")
            try:
                with step("work"):
                    await anyio.sleep(60)
            finally:
                span.end()

    peer = Peer()
    async with peer.calling(HangupMiddleware(app)):
        await watched(peer)
        peer.hang_up()
    server = spans["server"].context
    assert server is not None
    for name in ("work", "hangup.cancel", "finalizer close"):
        assert spans[name].context.trace_id == server.trace_id, name
        assert (spans[name].attributes or {})["tenant"] == "acme", name
    assert spans["hangup.cancel"].parent is not None
    assert spans["hangup.cancel"].parent.span_id == server.span_id
    [record] = [r for r in caplog.records if r.name == "hangup" and r.levelno == logging.INFO]
    assert record.__dict__["hangup_span_id"] == trace.format_span_id(server.span_id)


@contextlib.contextmanager
def attached(context: Context) -> Iterator[None]:
    token = otel_context.attach(context)
    try:
        yield
    finally:
        otel_context.detach(token)


async def test_a_step_without_anything_around_it_is_no_parent_of_what_ends_the_call(spans: Spans) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with step("outer"), step("inner"):
            await anyio.sleep(60)

    peer = Peer()
    async with peer.calling(HangupMiddleware(app)):
        await watched(peer)
        peer.hang_up()
    assert spans["inner"].parent == spans["outer"].context
    assert spans["hangup.cancel"].parent is None


# ---------------------------------------------------------------------- steps anywhere


async def test_steps_nest_and_are_current_inside_and_only_there(spans: Spans) -> None:
    before = trace.get_current_span()
    async with step("outer"):
        with step("inner"):
            with trace.get_tracer("other").start_as_current_span("of a library"):
                pass
        await anyio.sleep(0)
    assert trace.get_current_span() is before
    assert spans["of a library"].parent == spans["inner"].context
    assert spans["inner"].parent == spans["outer"].context
    assert spans["outer"].parent is None


async def test_a_decorator_makes_a_span_per_call(spans: Spans) -> None:
    @step("decorated")
    async def work(n: int) -> int:
        await anyio.sleep(0)
        return n

    assert [await work(1), await work(2)] == [1, 2]
    assert len(spans("decorated")) == 2


async def test_attributes_are_written_over_by_whoever_comes_last(spans: Spans) -> None:
    with step("work", {"secret": "hunter2", "tool": "?", "model": "?"}) as work:
        trace.get_current_span().set_attribute("tool", "search")
        work.attributes["model"] = "small"
        work.attributes["tokens"] = 3
    attributes = dict(spans["work"].attributes or {})
    assert attributes["secret"] == "***"
    assert (attributes["tool"], attributes["model"], attributes["tokens"]) == ("search", "small", 3)


async def test_whoever_is_held_up_at_the_end_of_a_step_does_not_end_it_before_its_start(
    spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    def held_up() -> float:
        time.sleep(0.002)
        return time.perf_counter()

    monkeypatch.setattr("hangup.telemetry.clock", held_up)
    with step("short"):
        pass
    span = spans["short"]
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.start_time <= span.end_time


async def test_a_step_in_a_thread_belongs_to_its_call(spans: Spans) -> None:
    def work() -> None:
        with step("in a thread"):
            assert current_call().steps_in_flight == ("around", "in a thread")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with step("around"):
            await anyio.to_thread.run_sync(work)
        await answer(send)

    await Peer().run(served(app).server)  # type: ignore[attr-defined]
    assert spans["in a thread"].parent == spans["around"].context
    with step("in a plain thread"):
        pass
    thread = threading.Thread(target=lambda: step("no call").__enter__().__exit__(None, None, None))
    thread.start()
    thread.join()
    assert facts(spans["no call"]) == ("completed", None, "UNSET", None)


async def test_outside_a_call_a_step_is_a_plain_span(spans: Spans) -> None:
    with contextlib.suppress(ValueError), step("alone"):
        raise ValueError("bad")
    with anyio.move_on_after(0):
        async with step("cut off"):
            await anyio.sleep(60)
    assert facts(spans["alone"]) == ("failed", None, "ERROR", "ValueError")
    assert facts(spans["cut off"]) == ("canceled", "unknown", "UNSET", None)
    with contextlib.suppress(AmbiguousOutcome), step("who knows"):
        raise AmbiguousOutcome
    assert facts(spans["who knows"]) == ("ambiguous", "unknown", "ERROR", "ambiguous")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
async def test_the_end_of_the_process_is_no_error_of_the_step(spans: Spans, error: type[BaseException]) -> None:
    with contextlib.suppress(error), step("work"):
        raise error
    assert facts(spans["work"]) == ("failed", None, "UNSET", None)
    assert spans["work"].events == ()


async def test_a_step_entered_twice_says_so_and_its_span_is_unharmed(
    spans: Spans, caplog: pytest.LogCaptureFixture
) -> None:
    before = otel_context.get_current()
    once = step("once")
    with once, once:
        pass
    with once:
        assert otel_context.get_current() is before
    assert facts(spans["once"]) == ("completed", None, "UNSET", None)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]


async def test_steps_left_out_of_order_leave_nothing_behind(spans: Spans) -> None:
    before = otel_context.get_current()
    one, two, three = step("one"), step("two"), step("three")
    one.__enter__()
    two.__enter__()
    three.__enter__()
    one.__exit__(None, None, None)
    two.__exit__(None, None, None)
    assert trace.get_current_span().get_span_context().span_id
    three.__exit__(None, None, None)
    assert otel_context.get_current() is before
    assert spans["three"].parent == spans["two"].context
    assert [len(spans(name)) for name in ("one", "two", "three")] == [1, 1, 1]


async def test_a_step_left_in_another_context_takes_nothing_of_that_back(spans: Spans) -> None:
    """The context in which it is current was copied: `detach` with its token would log an error."""
    before = otel_context.get_current()
    left = step("work")
    left.__enter__()
    copied = copy_context()
    copied.run(left.__exit__, None, None, None)
    assert copied.run(otel_context.get_current) is before
    assert trace.get_current_span() is not trace.INVALID_SPAN  # here, it was never left
    otel_context.attach(before)
    assert facts(spans["work"]) == ("completed", None, "UNSET", None)


async def _steps_across_yield(name: str) -> AsyncIterator[int]:
    with step(name), step(f"inner {name}"):
        n = 0
        while True:
            yield n
            n += 1


async def test_a_generator_closed_by_another_task_ends_its_steps(spans: Spans) -> None:
    generators = [_steps_across_yield("a"), _steps_across_yield("b")]

    async def consume() -> None:
        for generator in generators:
            await anext(generator)

    async def close() -> None:
        for generator in generators:
            await generator.aclose()  # type: ignore[attr-defined]

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(consume)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(close)
    for name in ("a", "inner a", "b", "inner b"):
        assert facts(spans[name]) == ("canceled", "unknown", "UNSET", None)


async def test_a_generator_left_to_the_garbage_collector_ends_its_steps(spans: Spans, on_trio: bool) -> None:
    if on_trio:
        return  # trio collects them at the end of the run, and warns

    async def consume() -> None:
        await anext(_steps_across_yield("a"))

    await asyncio.create_task(consume())
    gc.collect()
    await until(lambda: spans("a"))
    assert facts(spans["a"]) == facts(spans["inner a"]) == ("canceled", "unknown", "UNSET", None)


# ---------------------------------------------------------------------- spans of others


async def test_spans_of_others_are_marked_if_they_were_in_flight_and_only_then(spans: Spans) -> None:
    tracer = trace.get_tracer("a library")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with tracer.start_as_current_span("before"):
            pass
        with tracer.start_as_current_span("in flight"):
            try:
                await anyio.sleep(60)
            finally:
                with tracer.start_as_current_span("cleanup"):
                    pass

    await hang_up_on(app)
    assert facts(spans["in flight"]) == CANCELED
    assert (spans["in flight"].attributes or {})["hangup.cancel.elapsed"] > 0  # type: ignore[operator]
    assert facts(spans["before"]) == facts(spans["cleanup"]) == (None, None, "UNSET", None)


async def test_a_span_is_marked_once(spans: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    marks: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        span = trace.get_tracer("a library").start_span("never ends")
        monkeypatch.setattr(span, "set_attributes", marks.append)
        await anyio.sleep(60)

    await hang_up_on(app)
    assert [mark["hangup.state"] for mark in marks] == ["canceled"]


async def test_a_call_that_goes_on_under_the_policy_signal_is_not_marked_unless_it_stops(spans: Spans) -> None:
    tracer = trace.get_tracer("a library")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        token = current_call().token
        with tracer.start_as_current_span("query"):
            await token.wait()
        await answer(send) if scope["path"] == "/" else token.raise_if_canceled()

    await hang_up_on(app, policy="signal")
    assert facts(spans["query"]) == (None, None, "UNSET", None)


async def test_spans_that_never_end_are_forgotten_with_their_call(
    spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "MAX_SPANS", 10)
    tracer = trace.get_tracer("a library")
    calls: list[Any] = []
    leaked: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        call = current_call()
        calls.append(call)
        leaked.extend(tracer.start_span(f"never {n}") for n in range(100))
        assert len(call.trace.spans) == 10
        for span in leaked[10:]:
            span.end()
        assert len(call.trace.spans) == 10
        for n in range(10):
            leaked[n].end()
        assert len(call.trace.spans) == 0
        leaked[:] = [tracer.start_span("never")]
        await anyio.sleep(60)

    await hang_up_on(app)
    assert leaked[0].is_recording()
    assert facts(leaked[0]) == CANCELED
    assert calls[0].trace.spans is None
    leaked[0].end()


@pytest.mark.parametrize("where", ["a thread", "another call"])
async def test_spans_that_end_elsewhere_are_forgotten_all_the_same(spans: Spans, where: str) -> None:
    tracer = trace.get_tracer("a library")
    started: list[Any] = []

    async def end(scope: Scope, receive: Receive, send: Send) -> None:
        for span in started:
            span.end()
        await answer(send)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        started.extend(tracer.start_span(f"one of {n}") for n in range(10))
        assert len(current_call().trace.spans) == 10
        if where == "a thread":
            thread = threading.Thread(target=lambda: [span.end() for span in started])
            thread.start()
            thread.join()
        else:
            await Peer().run(HangupMiddleware(end))
        assert current_call().trace.spans == {}
        await answer(send)

    peer = Peer()
    await peer.run(served(app).server)  # type: ignore[attr-defined]
    assert peer.error is None


async def test_a_task_that_outlives_its_call_is_not_remembered(spans: Spans, on_trio: bool) -> None:
    if on_trio:
        return
    tracer = trace.get_tracer("a library")
    over = anyio.Event()
    tasks: list[asyncio.Task[None]] = []

    async def outlive() -> None:
        await over.wait()
        with tracer.start_as_current_span("late"), step("late step"):
            pass

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        tasks.append(asyncio.create_task(outlive()))
        await answer(send)

    await Peer().run(served(app).server)  # type: ignore[attr-defined]
    over.set()
    await tasks[0]
    assert facts(spans["late"]) == (None, None, "UNSET", None)
    assert facts(spans["late step"]) == ("completed", None, "UNSET", None)


async def test_the_processor_has_nothing_to_flush() -> None:
    processor = CancellationSpanProcessor()
    assert processor.force_flush()
    processor.shutdown()


# ---------------------------------------------------------------------- logs


async def test_the_line_of_a_canceled_call_carries_ids_and_is_no_error(
    spans: Spans, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hangup")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await anyio.sleep(60)

    await hang_up_on(app)
    [record] = [r for r in caplog.records if r.name == "hangup"]
    context = spans["server"].context
    assert context is not None
    assert record.levelno == logging.INFO
    assert record.__dict__["hangup_trace_id"] == trace.format_trace_id(context.trace_id)
    assert record.__dict__["hangup_span_id"] == trace.format_span_id(context.span_id)
    assert record.__dict__["hangup_state"] == "canceled"
    assert record.__dict__["hangup_cause"] == "client_disconnect"


# ---------------------------------------------------------------------- bad input


async def test_what_is_sampled_out_leaves_no_span_and_no_noise(spans: Spans) -> None:
    _switch.on = False

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        add_finalizer(lambda: None)
        before = trace.get_current_span()
        with step("work"):
            assert trace.get_current_span() is before
            await anyio.sleep(60)

    watch = await hang_up_on(app)
    assert [(s.name, s.state) for s in watch.outcome.steps] == [("work", State.CANCELED)]
    assert spans.names == []


@pytest.mark.parametrize("around", ["nothing", "what is sampled"])
async def test_what_is_below_a_step_that_was_sampled_out_goes_with_it(spans: Spans, around: str) -> None:
    _switch.out.add("work")
    tracer = trace.get_tracer("a library")
    headers: dict[str, str] = {}
    with tracer.start_as_current_span("around") if around != "nothing" else contextlib.nullcontext():
        outside = trace.get_current_span()
        with step("work"):
            propagate.inject(headers)
            ids = trace.get_current_span().get_span_context()
            with tracer.start_as_current_span("query"), step("step below"):
                pass
        assert trace.get_current_span() is outside
    assert spans.names == (["around"] if around != "nothing" else [])
    assert headers["traceparent"].split("-")[1:3] == [
        trace.format_trace_id(ids.trace_id),
        trace.format_span_id(ids.span_id),
    ]
    assert not ids.trace_flags.sampled


async def test_a_step_may_be_recorded_where_what_is_around_it_is_not(spans: Spans) -> None:
    _switch.out.add("around")
    _switch.all_the_same.add("work")
    tracer = trace.get_tracer("a library")
    with tracer.start_as_current_span("around"):
        outside = trace.get_current_span()
        with step("work"), tracer.start_as_current_span("query"):
            pass
        assert trace.get_current_span() is outside
    assert spans.names == ["query", "work"]
    assert spans["query"].parent == spans["work"].context


async def test_finalizers_go_with_a_cancel_span_that_was_sampled_out(spans: Spans) -> None:
    _switch.out.update({"hangup.cancel", "finalizer two"})

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        @add_finalizer
        async def two() -> None:
            with step("inside a finalizer"):
                pass

        await answer(send) if scope["path"] == "/done" else await anyio.sleep(60)

    peer = Peer()
    async with peer.calling(HangupMiddleware(app)):
        await watched(peer)
        peer.hang_up()
    await Peer(path="/done").run(HangupMiddleware(app))
    assert spans.names == []


async def test_a_tracer_that_does_nothing_leaves_the_span_around_a_step_current(
    spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "_tracer", trace.NoOpTracer())

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        before = trace.get_current_span()
        with step("work"):
            assert trace.get_current_span() is before
        await answer(send)

    peer = Peer()
    await peer.run(served(app).server)  # type: ignore[attr-defined]
    assert peer.error is None
    assert spans.names == ["server"]


async def test_switched_off_nothing_is_recorded(spans: Spans) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with step("work"):
            await anyio.sleep(60)

    watch = await hang_up_on(app, telemetry=False)
    assert watch.outcome.state is State.CANCELED
    assert spans.names == ["server"]
    assert facts(spans["server"]) == (None, None, "UNSET", None)


async def test_an_instrumentation_that_raises_is_logged_and_changes_nothing(
    spans: Spans, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def boom(*args: Any) -> Any:
        raise ValueError("boom")

    for moment in ("call_started", "call_stopped", "call_finishing", "call_ended", "step_started", "log_fields"):
        monkeypatch.setattr(telemetry.Telemetry, moment, boom)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with step("work"):
            await anyio.sleep(60)

    watch = await hang_up_on(app)
    assert watch.outcome.state is State.CANCELED
    assert [(s.name, s.state) for s in watch.outcome.steps] == [("work", State.CANCELED)]
    assert caplog.text.count("An instrumentation raised") == 6
    caplog.clear()


def test_only_what_is_overridden_is_called() -> None:
    class Listener(Instrumentation):
        def call_ended(self, call: Any) -> None:
            pass

    hooks = hooks_of(Listener())
    assert hooks.call_ended is not None
    assert hooks.step_started is None
    assert tell(hooks.call_started, None) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"telemetry": "yes"}, TypeError, "telemetry is True or False, not 'yes'"),
        ({"detailed_metrics": 1}, TypeError, "detailed_metrics is True or False, not 1"),
        (
            {"cancel_status": "red"},
            ValueError,
            "cancel_status is 'unset', 'error' or a function of the Cause, not 'red'",
        ),
        (
            {"cancel_status": None},
            TypeError,
            "cancel_status takes 'unset', 'error' or a function of the Cause, not None",
        ),
    ],
)
def test_a_wrong_option_is_named_with_its_choices(options: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        HangupMiddleware(Starlette(), **options)
    assert text in str(caught.value)


# ---------------------------------------------------------------------- routes


async def test_the_route_is_a_template_and_visible_outside(spans: Spans) -> None:
    async def endpoint(request: Request) -> PlainTextResponse:
        return PlainTextResponse("x")

    inner = Starlette(routes=[Route("/items/{id}", endpoint)])
    app = Starlette(routes=[Route("/plain/{x}", endpoint), Mount("/of/{tenant}/shop", inner)])
    expected = {
        "/plain/4": "/plain/{x}",
        "/of/acme/shop/items/9": "/of/{tenant}/shop/items/{id}",
        "/of/shop/shop/items/9": "/of/{tenant}/{tenant}/items/{id}",  # not a raw path, whatever else it is
        "/nothing/here": None,
    }
    for path, route in expected.items():
        seen: list[Any] = []

        async def look(scope: Scope, receive: Receive, send: Send, seen: list[Any] = seen) -> None:
            await app(scope, receive, send)
            call = current_call()
            seen.append(telemetry.route_of(call.shown_scope, call.scope))

        peer = Peer(path=path)
        await peer.run(HangupMiddleware(look))
        assert seen == [route if ROUTE_IN_SCOPE else None]
        if not ROUTE_IN_SCOPE:
            continue
        assert getattr(peer.scope.get("route"), "path_format", None) == (route and route[route.rindex("/", 0, -5) :])


def test_of_a_route_that_is_not_known_nothing_is_said() -> None:
    assert telemetry.route_of(None, {}) is None
    assert telemetry.route_of({}, {}) is None
    assert telemetry.route_of({"route": object()}, {}) is None
    assert telemetry.route_of({"path_template": "/a/{b}"}, {}) == "/a/{b}"


# ---------------------------------------------------------------------- the package


def test_one_module_imports_opentelemetry_and_the_sdk_is_imported_by_none() -> None:
    source = Path(telemetry.__file__).parent
    found = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if re.search(r"^\s*(from|import) opentelemetry", path.read_text(), re.MULTILINE)
    }
    assert found == {"telemetry.py"}


QUIET = """
import asyncio, logging, sys
logging.basicConfig(level=logging.DEBUG, format="%(name)s %(levelname)s %(message)s", stream=sys.stdout)
logging.getLogger("asyncio").setLevel(logging.ERROR)  # with -X dev it tells slow machines so
{before}
import anyio
from hangup import HangupMiddleware, add_finalizer, step
from hangup.testing import Peer, WebSocketPeer

async def app(scope, receive, send):
    add_finalizer(lambda: None)
    with step("a step"):
        await anyio.sleep(60)

async def main():
    peer = Peer()
    async with peer.calling(HangupMiddleware(app, detailed_metrics=True)):
        await peer.wait_for(lambda: peer.reading and not peer._pieces)
        {midway}
        peer.hang_up()
    with step("outside"):
        pass

asyncio.run(main())
{after}
"""

NO_SDK = "sys.modules['opentelemetry.sdk'] = None"
SDK = """
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
def set_up():
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    metrics.set_meter_provider(MeterProvider([reader]))
"""
SHOW = """
print(sorted(span.name for span in exporter.get_finished_spans()))
data = reader.get_metrics_data()
metrics = [m.name for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics]
print(sorted(name for name in metrics if name.startswith("hangup.")))
"""
LINE = "hangup INFO GET '/' canceled: client_disconnect before_response, "


def run_script(**parts: str) -> list[str]:
    script = QUIET.format(**{"before": "", "midway": "pass", "after": "", **parts})
    result = subprocess.run([sys.executable, "-X", "dev", "-c", script], capture_output=True, text=True, timeout=20)
    assert (result.returncode, result.stderr) == (0, ""), result.stderr + result.stdout
    return result.stdout.splitlines()


@pytest.mark.parametrize("before", ["", NO_SDK, SDK], ids=["no provider set", "no SDK installed", "SDK not set up"])
def test_without_a_provider_there_is_the_line_in_the_log_and_nothing_else(before: str) -> None:
    [line] = run_script(before=before)
    assert line.startswith(LINE)


METRICS = ["active_calls", "call.duration", "cancel.latency", "finalizer.duration", "step.duration"]


def test_a_provider_that_is_set_before_the_import_gets_everything() -> None:
    hint, line, spans, metrics = run_script(before=SDK + "set_up()", after=SHOW)
    assert hint.startswith("hangup DEBUG No span is current where HangupMiddleware begins")
    assert line.startswith(LINE)
    assert spans == str(sorted(["a step", "finalizer <lambda>", "hangup.cancel", "outside"]))
    assert metrics == str([f"hangup.{name}" for name in METRICS])


def test_a_provider_that_is_set_late_gets_what_begins_from_then_on() -> None:
    *_, spans, metrics = run_script(before=SDK, midway="set_up()", after=SHOW)
    assert spans == str(sorted(["finalizer <lambda>", "hangup.cancel", "outside"]))
    assert metrics == str([f"hangup.{name}" for name in METRICS])


def test_a_backend_that_is_down_is_no_business_of_the_calls() -> None:
    down = """
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
for noisy in ("opentelemetry", "urllib3"):
    logging.getLogger(noisy).setLevel(logging.CRITICAL)
provider = TracerProvider(shutdown_on_exit=False)
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter("http://127.0.0.1:9/v1/traces", timeout=0.1)))
trace.set_tracer_provider(provider)
"""
    _hint, line = run_script(before=SDK + down)
    assert line.startswith(LINE)


async def test_detailed_metrics_know_states_and_error_types() -> None:
    script = SDK + "set_up()\nimport contextlib"
    after = """
async def more(scope, receive, send):
    add_finalizer(lambda: 1 / 0)
    with contextlib.suppress(KeyError), step("fails"):
        {}["x"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})

async def bad(scope, receive, send):
    await send({"type": "http.response.start", "status": 503, "headers": []})
    await send({"type": "http.response.body", "body": b""})

async def broken(scope, receive, send):
    raise OSError

async def talk(scope, receive, send):
    while (await receive())["type"] != "websocket.disconnect":
        await send({"type": "websocket.accept"})

async def say_goodbye():
    peer = WebSocketPeer()
    async with peer.calling(HangupMiddleware(talk)):
        await peer.wait_for(lambda: peer.accepted)
        peer.close()

logging.disable(logging.CRITICAL)
asyncio.run(Peer(method="BREW").run(HangupMiddleware(more, detailed_metrics=True)))
asyncio.run(Peer(method="POST").run(HangupMiddleware(app, timeout=0.01, detailed_metrics=True)))
asyncio.run(Peer().run(HangupMiddleware(bad)))
with contextlib.suppress(OSError):
    asyncio.run(Peer().run(HangupMiddleware(broken)))
asyncio.run(say_goodbye())
points = [
    (m.name, sorted(p.attributes.items()))
    for r in reader.get_metrics_data().resource_metrics
    for s in r.scope_metrics
    for m in s.metrics
    for p in m.data.data_points
]
for point in sorted(points):
    print(*point)
"""
    found = await anyio.to_thread.run_sync(lambda: run_script(before=script, after=after)[2:])
    calls = [line.removeprefix("hangup.call.duration ") for line in found if line.startswith("hangup.call.duration")]
    assert calls == [
        "[('error.type', '503'), ('hangup.state', 'failed'), ('http.request.method', 'GET')]",
        "[('error.type', 'OSError'), ('hangup.state', 'failed'), ('http.request.method', 'GET')]",
        "[('error.type', 'timeout'), ('hangup.cause', 'timeout'), ('hangup.state', 'timed_out'), "
        "('http.request.method', 'POST')]",
        "[('hangup.cause', 'client_disconnect'), ('hangup.state', 'canceled'), ('http.request.method', 'GET')]",
        "[('hangup.state', 'completed')]",  # a goodbye is no cause
        "[('hangup.state', 'completed'), ('http.request.method', '_OTHER')]",
    ]
    assert [line for line in found if not line.startswith("hangup.call.duration")] == [
        "hangup.active_calls []",
        "hangup.cancel.latency [('hangup.cause', 'client_disconnect')]",
        "hangup.cancel.latency [('hangup.cause', 'timeout')]",
        "hangup.finalizer.duration [('error.type', 'ZeroDivisionError'), ('hangup.finalizer.name', '<lambda>'), "
        "('hangup.state', 'failed')]",
        "hangup.finalizer.duration [('hangup.finalizer.name', '<lambda>'), ('hangup.state', 'completed')]",
        "hangup.step.duration [('error.type', 'KeyError'), ('hangup.state', 'failed'), ('hangup.step.name', 'fails')]",
        "hangup.step.duration [('error.type', 'timeout'), ('hangup.cause', 'timeout'), ('hangup.state', 'timed_out'), "
        "('hangup.step.name', 'a step')]",
        "hangup.step.duration [('hangup.cause', 'client_disconnect'), ('hangup.state', 'canceled'), "
        "('hangup.step.name', 'a step')]",
    ]


def test_no_status_is_ever_ok() -> None:
    assert "StatusCode.OK" not in Path(telemetry.__file__).read_text()
    assert StatusCode.OK.name == "OK"
