"""Mounted around what makes the server span: that span says what it would say had the middleware been inside."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import anyio
import pytest
from anyio.lowlevel import checkpoint
from fastapi import FastAPI
from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
from opentelemetry.instrumentation.starlette import StarletteInstrumentor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.middleware.opentelemetry import OpenTelemetryMiddleware as NativeMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hangup import AmbiguousOutcome, HangupMiddleware, Outcome, before_success, current_call, step
from hangup._inside import Inside, move_in
from hangup.telemetry import CancellationSpanProcessor
from hangup.testing import Peer, WebSocketPeer

from .helpers import END, START, answer, chunk, until, watched

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("watching_at_once")]

SOURCES = ("contrib-asgi", "contrib-fastapi", "contrib-starlette", "fastapi", "starlette")


@dataclass
class Traced:
    """A source of server spans, and what ended."""

    source: str
    exporter: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)
    instrumented: list[Callable[[], object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.provider = TracerProvider()
        self.provider.add_span_processor(CancellationSpanProcessor())
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def mount(
        self,
        app: ASGIApp,
        *,
        inside: bool,
        middleware: tuple[Middleware, ...] = (),
        kept: list[HangupMiddleware] | None = None,
        **options: Any,
    ) -> ASGIApp:
        """``app`` with telemetry, and hangup inside or around it. ``middleware`` is between them, if that is around."""

        def hangup(app: ASGIApp) -> HangupMiddleware:
            found = HangupMiddleware(app, **options)
            if kept is not None:
                kept.append(found)
            return found

        provider = self.provider
        own = [Middleware(hangup)] if inside else []
        traced: ASGIApp
        if self.source == "contrib-asgi":
            traced = OpenTelemetryMiddleware(hangup(app) if inside else app, tracer_provider=provider)
        elif self.source == "starlette":
            native = Middleware(NativeMiddleware, tracer_provider=provider)
            traced = Starlette(routes=[Mount("/", app)], middleware=[*middleware, native, *own])
        elif self.source == "contrib-starlette":
            page = traced = Starlette(routes=[Mount("/", app)], middleware=own)
            StarletteInstrumentor.instrument_app(page, tracer_provider=provider)
        else:
            native_spans = self.source == "fastapi"
            api = traced = FastAPI(
                middleware=own,
                openapi_url=None,
                telemetry={"tracer_provider": provider, "tracing": native_spans, "metrics": False, "logs": False},
            )
            api.mount("/", app)
            if self.source == "contrib-fastapi":
                FastAPIInstrumentor.instrument_app(api, tracer_provider=provider)
                self.instrumented.append(lambda: FastAPIInstrumentor.uninstrument_app(api))
        return traced if inside else hangup(traced)

    @property
    def span(self) -> ReadableSpan:
        """The server span."""
        [span] = [span for span in self.exporter.get_finished_spans() if span.kind is SpanKind.SERVER]
        return span

    def said(self) -> dict[str, Any]:
        """What the server span says, but for how long things took, and what is known when is up to its source."""
        span = self.span
        attributes: dict[str, Any] = dict(span.attributes or {})
        for duration in ("hangup.cancel.elapsed", "hangup.cancel.latency"):
            assert 0 <= attributes.get(duration, 0) < 5
        said = {name: attributes.get(f"hangup.{name}") for name in ("state", "cause", "phase", "reason")}
        said["code"] = attributes.get("http.response.status_code", attributes.get("http.status_code"))
        said["error"] = attributes.get("error.type")
        return {**said, "status": span.status.status_code.name, "events": [event.name for event in span.events]}


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def traced(source: str) -> Iterator[Callable[[], Traced]]:
    made: list[Traced] = []

    def make() -> Traced:
        made.append(Traced(source))
        return made[-1]

    yield make
    for one in made:
        for undo in one.instrumented:
            undo()


# ---------------------------------------------------------------------- the ways in which a call can end


async def waits(scope: Scope, receive: Receive, send: Send) -> None:
    with step("work"):
        await anyio.sleep(60)


async def streams(scope: Scope, receive: Receive, send: Send) -> None:
    await send(START)
    await send(chunk(b"chunk"))
    with step("work"):
        await anyio.sleep(60)


async def reads(scope: Scope, receive: Receive, send: Send) -> None:
    while True:
        await receive()


async def listens(scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def swallows(scope: Scope, receive: Receive, send: Send) -> None:
    with contextlib.suppress(anyio.get_cancelled_exc_class()):
        await anyio.sleep(60)


async def answers_all_the_same(scope: Scope, receive: Receive, send: Send) -> None:
    try:
        await anyio.sleep(60)
    except anyio.get_cancelled_exc_class():
        await answer(send)


async def answers_500(scope: Scope, receive: Receive, send: Send) -> None:
    try:
        await anyio.sleep(60)
    except anyio.get_cancelled_exc_class():
        await answer(send, 500)


async def turns_it_into_an_error(scope: Scope, receive: Receive, send: Send) -> None:
    try:
        await anyio.sleep(60)
    except anyio.get_cancelled_exc_class():
        raise RuntimeError("canceled") from None


async def turns_it_into_a_group(scope: Scope, receive: Receive, send: Send) -> None:
    try:
        await anyio.sleep(60)
    except anyio.get_cancelled_exc_class():
        raise ExceptionGroup("canceled", [RuntimeError("one"), OSError("two")]) from None


async def goes_on_sending(scope: Scope, receive: Receive, send: Send) -> None:
    await send(START)
    with contextlib.suppress(anyio.get_cancelled_exc_class()):
        await anyio.sleep(60)
    while True:
        await send(chunk(b"late"))


async def cannot_be_reached(scope: Scope, receive: Receive, send: Send) -> None:
    with anyio.CancelScope(shield=True):
        await until(lambda: current_call().cause is not None)
    await answer(send)


async def leaves_an_effect(scope: Scope, receive: Receive, send: Send) -> None:
    with step("pay", effect=True):
        await anyio.sleep(60)


async def undoes_its_effect(scope: Scope, receive: Receive, send: Send) -> None:
    async def undo() -> None:
        await anyio.sleep(0.001)

    with step("pay", effect=True, cancel=undo):
        await anyio.sleep(60)


async def fails_to_undo(scope: Scope, receive: Receive, send: Send) -> None:
    async def undo() -> None:
        raise OSError("unreachable")

    with step("reserve", cancel=undo):
        await anyio.sleep(60)


async def leaves_an_effect_open(scope: Scope, receive: Receive, send: Send) -> None:
    step("pay", effect=True).__enter__()
    await anyio.sleep(60)


async def does_not_know(scope: Scope, receive: Receive, send: Send) -> None:
    with step("plan"):
        pass
    try:
        await anyio.sleep(60)
    except anyio.get_cancelled_exc_class():
        raise AmbiguousOutcome("who knows") from None


async def fails(scope: Scope, receive: Receive, send: Send) -> None:
    raise ValueError("no")


async def fails_in_its_stream(scope: Scope, receive: Receive, send: Send) -> None:
    await send(START)
    raise ValueError("no")


async def says_500(scope: Scope, receive: Receive, send: Send) -> None:
    await answer(send, 500)


async def completes(scope: Scope, receive: Receive, send: Send) -> None:
    with step("work"):
        await answer(send)


async def completes_a_stream(scope: Scope, receive: Receive, send: Send) -> None:
    await send(START)
    await send(chunk(b"chunk"))
    await send(END)


async def may_not_succeed(scope: Scope, receive: Receive, send: Send) -> None:
    @before_success
    async def write_row() -> None:
        raise OSError("disk full")

    await answer(send)


async def may_not_end_its_stream(scope: Scope, receive: Receive, send: Send) -> None:
    await send(START)
    await send(chunk(b"chunk"))

    @before_success
    async def write_row() -> None:
        raise OSError("disk full")

    await send(END)


async def ends_its_stream_all_the_same(scope: Scope, receive: Receive, send: Send) -> None:
    with contextlib.suppress(OSError):
        await may_not_end_its_stream(scope, receive, send)
    await send(END)


async def cancels_itself(scope: Scope, receive: Receive, send: Send) -> None:
    current_call().cancel("enough")
    await anyio.sleep(60)


async def cancels_its_stream(scope: Scope, receive: Receive, send: Send) -> None:
    await send(START)
    current_call().cancel()
    await anyio.sleep(60)


async def finishes(scope: Scope, receive: Receive, send: Send) -> None:
    await until(lambda: current_call().life.left)
    await answer(send)


HANG_UP = (
    waits,
    streams,
    reads,
    listens,
    swallows,
    answers_all_the_same,
    answers_500,
    turns_it_into_an_error,
    turns_it_into_a_group,
    goes_on_sending,
    cannot_be_reached,
    leaves_an_effect,
    undoes_its_effect,
    fails_to_undo,
    leaves_an_effect_open,
    does_not_know,
)
NO_HANG_UP = (
    fails,
    fails_in_its_stream,
    says_500,
    completes,
    completes_a_stream,
    may_not_succeed,
    may_not_end_its_stream,
    ends_its_stream_all_the_same,
    cancels_itself,
    cancels_its_stream,
)


async def play(traced: Traced, app: ASGIApp, *, inside: bool, hang_up: bool, **options: Any) -> tuple[Any, ...]:
    """What the server span says, what the client got, and how the call ended."""
    outcomes: list[Outcome] = []
    peer = Peer(method="POST", body=[b"half"], body_ends=False) if app is reads else Peer()
    mounted = traced.mount(app, inside=inside, observers=[outcomes.append], **options)
    async with peer.calling(mounted):
        if hang_up:
            await watched(peer)
            peer.hang_up()
    [outcome] = outcomes
    return traced.said(), peer.sent, type(peer.error), outcome.state, outcome.cause


def names(apps: tuple[Callable[..., Any], ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("app", [pytest.param(app, id=app.__name__) for app in apps])


@names(HANG_UP)
async def test_after_a_hang_up_outside_says_what_inside_says(traced: Callable[[], Traced], app: ASGIApp) -> None:
    expected = await play(traced(), app, inside=True, hang_up=True)
    assert await play(traced(), app, inside=False, hang_up=True) == expected
    said = expected[0]
    assert (said["status"] == "ERROR") == (said["state"] == "ambiguous")
    assert said["code"] == (200 if app in {streams, goes_on_sending} else 499)


@names(NO_HANG_UP)
async def test_with_a_client_that_stays_outside_says_what_inside_says(
    traced: Callable[[], Traced], source: str, app: ASGIApp, on_trio: bool
) -> None:
    expected = await play(traced(), app, inside=True, hang_up=False)
    found = await play(traced(), app, inside=False, hang_up=False)
    if source == "fastapi" and app is cancels_its_stream:
        # A response without an end is an error to FastAPI, and so is the cancellation that it sees from inside.
        errors = found[0].pop("error"), expected[0].pop("error")
        assert errors == ("asyncio.exceptions.CancelledError" if not on_trio else "trio.Cancelled", "RuntimeError")
    assert found == expected


@names((waits, cannot_be_reached))
async def test_where_every_cancellation_is_an_error_outside_says_what_inside_says(
    traced: Callable[[], Traced], app: ASGIApp
) -> None:
    expected = await play(traced(), app, inside=True, hang_up=True, cancel_status="error")
    assert await play(traced(), app, inside=False, hang_up=True, cancel_status="error") == expected
    assert expected[0]["status"] == ("ERROR" if app is waits else "UNSET")


@names((listens, finishes))
async def test_under_another_policy_outside_says_what_inside_says(traced: Callable[[], Traced], app: ASGIApp) -> None:
    policy = "finish" if app is finishes else "signal"
    expected = await play(traced(), app, inside=True, hang_up=True, policy=policy)
    assert await play(traced(), app, inside=False, hang_up=True, policy=policy) == expected


@names((waits, swallows, turns_it_into_an_error, answers_500))
@pytest.mark.usefixtures("beginning_in_time")
async def test_a_timeout_is_a_504_to_the_client_and_on_the_span(traced: Callable[[], Traced], app: ASGIApp) -> None:
    results = [await play(traced(), app, inside=inside, hang_up=False, timeout=0.02) for inside in (True, False)]
    for said, sent, error, *_ in results:
        assert said.pop("error") in {"timeout", "504"}  # whose word is the last is a race where the span goes on
        assert (said["state"], said["status"], error) == ("timed_out", "ERROR", type(None))
        assert said["code"] == sent[0]["status"] == 504
    assert results[0] == results[1]


@names((waits, turns_it_into_an_error))
async def test_a_shutdown_is_a_503_to_the_client_and_on_the_span(traced: Callable[[], Traced], app: ASGIApp) -> None:
    async def shut_down(*, inside: bool) -> tuple[dict[str, Any], list[Message]]:
        one = traced()
        kept: list[HangupMiddleware] = []
        peer = Peer()
        async with peer.calling(one.mount(app, inside=inside, kept=kept)):
            await watched(peer)
            assert await kept[0].drain(5)
        return one.said(), peer.sent

    results = [await shut_down(inside=inside) for inside in (True, False)]
    for said, sent in results:
        assert said.pop("error") in {"server_shutdown", "503"}
        assert said["code"] == sent[0]["status"] == 503
        assert (said["state"], said["cause"], said["status"]) == ("canceled", "server_shutdown", "ERROR")
    assert results[0] == results[1]


async def test_a_cancellation_of_somebody_elses_goes_on_and_is_told(traced: Callable[[], Traced]) -> None:
    results = []
    for inside in (True, False):
        one = traced()
        peer = Peer()
        mounted = one.mount(waits, inside=inside)
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(peer.run, mounted)
                await watched(peer)
                scope.cancel()
        assert scope.cancelled_caught
        assert peer.sent == []
        results.append(one.said())
    assert results[0] == results[1]
    assert (results[0]["state"], results[0]["cause"], results[0]["code"]) == ("canceled", "unknown", None)


@pytest.mark.parametrize("anyio_backend", [("asyncio", {})])  # trio has nothing of the kind
@pytest.mark.parametrize("swallow", [False, True])
async def test_a_cancel_of_the_server_while_the_end_is_prepared_is_given_back(
    traced: Callable[[], Traced], swallow: bool
) -> None:
    undoing, go_on = anyio.Event(), anyio.Event()

    async def undo() -> None:
        undoing.set()
        await go_on.wait()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(asyncio.CancelledError) if swallow else contextlib.nullcontext():
            with step("pay", effect=True, cancel=undo):
                await anyio.sleep(60)

    one, peer = traced(), Peer()
    task = asyncio.create_task(peer.run(one.mount(app, inside=False)))
    await watched(peer)
    peer.hang_up()
    await undoing.wait()
    await anyio.wait_all_tasks_blocked()
    task.cancel()
    await anyio.wait_all_tasks_blocked()
    assert not task.done()
    go_on.set()
    await asyncio.wait([task], timeout=5)
    assert task.cancelled()
    assert (one.said()["state"], one.said()["cause"], one.said()["code"]) == ("canceled", "client_disconnect", 499)


@pytest.mark.parametrize("anyio_backend", [("asyncio", {})])
async def test_a_cancel_of_the_server_that_comes_after_ours_is_no_answer(traced: Callable[[], Traced]) -> None:
    """The client is told nothing then, and so nothing is shown."""

    async def canceled_twice(*, inside: bool) -> tuple[dict[str, Any], list[Message]]:
        cleaning = anyio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            current_call().cancel()
            try:
                await anyio.sleep(60)
            finally:
                cleaning.set()
                await anyio.sleep(60)

        one, peer = traced(), Peer()
        task = asyncio.create_task(peer.run(one.mount(app, inside=inside)))
        await cleaning.wait()
        await anyio.wait_all_tasks_blocked()
        task.cancel()
        await asyncio.wait([task], timeout=5)
        assert task.cancelled()
        return one.said(), peer.sent

    said, sent = await canceled_twice(inside=True)
    assert await canceled_twice(inside=False) == (said, sent)
    assert (said["state"], said["cause"], said["code"], sent) == ("canceled", "requested", None, [])


# ---------------------------------------------------------------------- what else is between


class Unit:
    """What a transaction is: committed if the application returns, rolled back if anything leaves it."""

    ends: ClassVar[list[str]] = []

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.app(scope, receive, send)
        except BaseException as exc:
            self.ends.append(type(exc).__name__)
            raise
        self.ends.append("committed")


class Plain(BaseHTTPMiddleware):
    """Runs the application in a task of its own, and hands its messages over one by one."""

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        return await call_next(request)


async def test_middleware_between_sees_the_cancellation_as_ever(on_trio: bool) -> None:
    traced = Traced("starlette")
    Unit.ends.clear()
    outcome = await play(traced, waits, inside=False, hang_up=True, middleware=(Middleware(Unit),))
    assert Unit.ends == ["Cancelled" if on_trio else "CancelledError"]
    assert outcome[0]["code"] == 499


@names((waits, streams))
async def test_base_http_middleware_between_changes_nothing_and_costs_no_time(app: ASGIApp) -> None:
    traced = Traced("starlette")
    said, *_ = await play(traced, app, inside=False, hang_up=True, middleware=(Middleware(Plain),))
    assert (said["state"], said["code"]) == ("canceled", 499 if app is waits else 200)
    assert said["status"] == "UNSET"


async def test_what_is_between_may_take_its_time_or_refuse() -> None:
    class Slow(Unit):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            async def send_slowly(message: Message) -> None:
                await checkpoint()
                await send(message)

            await self.app(scope, receive, send_slowly)

    class Strict(Unit):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            async def send_what_is_known(message: Message) -> None:
                if message.get("status") == 499:
                    raise RuntimeError("what is 499?")
                await send(message)

            await self.app(scope, receive, send_what_is_known)

    # FastAPI waits for what is sent before it takes note of it; to Starlette every exception is an error.
    for between, source in ((Slow, "fastapi"), (Strict, "starlette")):
        traced = Traced(source)
        app = traced.mount(waits, inside=False).app  # type: ignore[attr-defined]
        outcomes: list[Outcome] = []
        peer = Peer()
        async with peer.calling(HangupMiddleware(between(app), observers=[outcomes.append])):
            await watched(peer)
            peer.hang_up()
        assert peer.error is None
        assert [(outcome.state, outcome.cause) for outcome in outcomes] == [("canceled", "client_disconnect")]
        said = traced.said()
        assert (said["state"], said["code"], said["status"], said["events"]) == ("canceled", 499, "UNSET", [])


async def test_what_is_between_may_still_answer_a_live_client() -> None:
    class Teapot(Unit):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await self.app(scope, receive, send)
            finally:
                await answer(send, 418)

    traced, peer = Traced("starlette"), Peer()
    app = traced.mount(cancels_itself, inside=False).app  # type: ignore[attr-defined]
    await peer.run(HangupMiddleware(Teapot(app)))
    assert (peer.status, traced.said()["code"]) == (418, 499)


async def test_a_live_client_is_answered_when_the_call_ends_and_not_when_it_is_shown() -> None:
    answered: list[bool] = []
    begun = anyio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def child() -> None:
            begun.set()
            try:
                await anyio.sleep(60)
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.wait_all_tasks_blocked()  # whoever would answer now has done so
                answered.append(bool(peer.sent))

        current_call().start_soon(child)
        await begun.wait()
        current_call().cancel()
        await anyio.sleep(60)

    traced, peer = Traced("starlette"), Peer()
    await peer.run(traced.mount(app, inside=False))
    assert answered == [False]
    assert (peer.status, traced.said()["code"]) == (499, 499)


async def test_a_scope_between_that_gives_up_in_time_is_no_end_of_the_call() -> None:
    """What looks like the cancellation of somebody else may be caught by who made it, further out but in the call."""
    traced = Traced("contrib-asgi")
    outcomes: list[Outcome] = []

    async def patient(scope: Scope, receive: Receive, send: Send) -> None:
        with anyio.move_on_after(0.01):
            await inner(scope, receive, send)
        await answer(send, 202)

    inner = HangupMiddleware(waits)
    peer = Peer()
    mounted = OpenTelemetryMiddleware(patient, tracer_provider=traced.provider)
    await peer.run(HangupMiddleware(mounted, observers=[outcomes.append]))
    assert peer.status == 202
    assert [(outcome.state, outcome.cause) for outcome in outcomes] == [("completed", None)]
    assert (traced.said()["state"], traced.said()["code"]) == ("completed", 202)


async def test_two_sources_of_spans_are_both_told() -> None:
    outer, inner = Traced("contrib-asgi"), Traced("starlette")
    peer = Peer()
    nested = OpenTelemetryMiddleware(
        Starlette(
            routes=[Mount("/", waits)], middleware=[Middleware(NativeMiddleware, tracer_provider=inner.provider)]
        ),
        tracer_provider=outer.provider,
    )
    async with peer.calling(HangupMiddleware(nested)):
        await watched(peer)
        peer.hang_up()
    assert (outer.said()["code"], inner.said()["code"]) == (499, 499)
    assert outer.said()["state"] == "canceled"
    assert [message["type"] for message in peer.late] == ["http.response.start", "http.response.body"]


async def test_the_metrics_of_fastapi_know_of_no_error_without_spans_either() -> None:
    reader = InMemoryMetricReader()
    meters = MeterProvider([reader])
    api = FastAPI(openapi_url=None, telemetry={"meter_provider": meters, "tracing": False, "logs": False})
    api.mount("/", waits)
    peer = Peer()
    async with peer.calling(HangupMiddleware(api)):
        await watched(peer)
        peer.hang_up()
    data = reader.get_metrics_data()
    assert data is not None
    [duration] = [
        point
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name == "http.server.request.duration"
        for point in metric.data.data_points
    ]
    attributes = dict(duration.attributes or {})
    assert attributes["http.response.status_code"] == 499
    assert "error.type" not in attributes


async def talks(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "websocket.accept"})
    with step("talk"):
        while (await receive())["type"] == "websocket.receive":
            pass


async def cannot_listen(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "websocket.accept"})
    with step("pay", effect=True):
        await anyio.sleep(60)


async def never_answers(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    await anyio.sleep(60)


async def closes(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "websocket.accept"})
    await send({"type": "websocket.close", "code": 1000})


async def closes_twice(scope: Scope, receive: Receive, send: Send) -> None:
    await closes(scope, receive, send)
    await send({"type": "websocket.send", "text": "late"})


async def closes_1011(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "websocket.accept"})
    await send({"type": "websocket.close", "code": 1011})


async def accepts_and_returns(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "websocket.accept"})


async def says_nothing(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()


async def declines(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "websocket.close"})


async def breaks(scope: Scope, receive: Receive, send: Send) -> None:
    await accepts_and_returns(scope, receive, send)
    raise ValueError("no")


async def ends_itself(scope: Scope, receive: Receive, send: Send) -> None:
    await accepts_and_returns(scope, receive, send)
    current_call().cancel("enough")
    await anyio.sleep(60)


@pytest.mark.parametrize(
    ("app", "end", "state"),
    [
        (talks, "hang up", "canceled"),
        (talks, "goodbye", "completed"),
        (cannot_listen, "hang up", "ambiguous"),
        (cannot_listen, "goodbye", "ambiguous"),
        (never_answers, "hang up", "canceled"),
        (never_answers, "timeout", "timed_out"),
        (talks, "timeout", "timed_out"),
        (closes, None, "completed"),
        (closes_twice, None, "completed"),
        (closes_1011, None, "failed"),
        (accepts_and_returns, None, "completed"),
        (says_nothing, None, "failed"),
        (declines, None, "completed"),
        (breaks, None, "failed"),
        (ends_itself, None, "canceled"),
    ],
)
@pytest.mark.usefixtures("beginning_in_time")
async def test_of_a_websocket_outside_says_what_inside_says(
    traced: Callable[[], Traced], source: str, app: ASGIApp, end: str | None, state: str
) -> None:
    if source == "starlette":
        return  # it knows no WebSockets

    async def run(*, inside: bool, twice: bool = False) -> tuple[Any, ...]:
        one, peer, outcomes = traced(), WebSocketPeer(), list[Outcome]()
        options: dict[str, Any] = {"observers": [outcomes.append], "grace": 0.01}
        if end == "timeout":
            options["timeout"] = 0.02
        mounted = one.mount(app, inside=inside or twice, **options)
        async with peer.calling(HangupMiddleware(hidden(mounted), **options) if twice else mounted):
            if end in {"hang up", "goodbye"}:
                await peer.wait_for(
                    lambda: peer.reading and not peer.unread and (peer.accepted or app is never_answers)
                )
                peer.hang_up() if end == "hang up" else peer.close()
        [outcome] = outcomes
        said = one.said()
        if source == "fastapi":  # it does not look at what is sent, and takes what passes through it for an error
            said = {name: said[name] for name in ("state", "cause", "phase", "reason")}
        delivered = (one.span.attributes or {}).get("hangup.delivered")
        return said, delivered, peer.sent, type(peer.error), outcome.state, outcome.cause

    expected = await run(inside=True)
    assert expected[0]["state"] == expected[4] == state
    assert await run(inside=False) == expected
    assert await run(inside=True, twice=True) == expected


def hidden(app: ASGIApp) -> ASGIApp:
    async def hide(scope: Scope, receive: Receive, send: Send) -> None:
        await app(scope, receive, send)

    return hide


async def test_of_a_websocket_with_hooks_nothing_is_said_before_they_have_run(traced: Callable[[], Traced]) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await accepts_and_returns(scope, receive, send)

        @before_success
        async def write_row() -> None:
            raise OSError("disk full")

    one, peer = Traced("contrib-asgi"), WebSocketPeer()
    await peer.run(one.mount(app, inside=False))
    assert one.said()["state"] is None


async def test_a_websocket_passes_through() -> None:
    traced = Traced("fastapi")
    steps: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "websocket.connect"
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "text": (await receive())["text"].upper()})
        steps.append((await receive())["type"])

    peer = WebSocketPeer()
    async with peer.calling(traced.mount(app, inside=False)):
        await peer.wait_for(lambda: peer.accepted)
        peer.say("hello")
        await peer.wait_for(lambda: peer.received)
        peer.close()
    assert (peer.received, steps) == (["HELLO"], ["websocket.disconnect"])
    assert traced.said()["state"] == "completed"


async def test_where_there_is_nobody_to_be_told_it_is_not_there() -> None:
    seen: list[Send] = []

    class Looks(Unit):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            seen.append(send)
            await self.app(scope, receive, send)

    traced = Traced("contrib-asgi")
    twice = HangupMiddleware(Looks(HangupMiddleware(Looks(completes))))
    await Peer().run(twice)
    await Peer().run(OpenTelemetryMiddleware(twice, tracer_provider=traced.provider))
    assert len(seen) == 4
    assert (seen[0], seen[2]) == (seen[1], seen[3])


# ---------------------------------------------------------------------- how it gets there


def stack_of(app: Starlette) -> list[Any]:
    return [entry.cls for entry in app.user_middleware]


def test_it_stands_inside_all_telemetry_and_outside_of_everything_else() -> None:
    page = Starlette(middleware=[Middleware(Unit), Middleware(NativeMiddleware), Middleware(Plain)])
    move_in(page)
    assert stack_of(page) == [Unit, NativeMiddleware, Inside, Plain]
    api = FastAPI(middleware=[Middleware(Unit)])
    move_in(api)
    assert stack_of(api) == [Inside, Unit]
    traced = OpenTelemetryMiddleware(waits)
    application = traced.app
    move_in(traced)
    assert isinstance(traced.app, Inside)
    assert traced.app.app is application


def test_it_moves_in_once() -> None:
    api = FastAPI()
    traced = OpenTelemetryMiddleware(Starlette(middleware=[Middleware(NativeMiddleware)]))
    application = traced.app
    for app in (api, api, Unit(api), traced, Unit(traced)):
        move_in(app)
    assert stack_of(api) == [Inside]
    assert isinstance(traced.app, Inside)
    assert traced.app.app is application


def test_where_the_whole_middleware_stands_inside_it_stays_away() -> None:
    api = FastAPI(middleware=[Middleware(Unit), Middleware(HangupMiddleware)])
    page = Starlette(middleware=[Middleware(NativeMiddleware), Middleware(HangupMiddleware)])
    whole = HangupMiddleware(waits)
    move_in(api)
    move_in(page)
    move_in(HangupMiddleware(api))
    assert (stack_of(api), stack_of(page)) == ([Unit, HangupMiddleware], [NativeMiddleware, HangupMiddleware])
    bare = NativeMiddleware(whole)
    move_in(bare)
    assert bare.app is whole


async def test_an_application_without_telemetry_or_that_has_started_is_left_alone() -> None:
    page = Starlette(middleware=[Middleware(Unit)])
    move_in(page)
    assert stack_of(page) == [Unit]
    api = FastAPI()
    await Peer().run(api)
    move_in(api)
    assert stack_of(api) == []
    await Peer().run(HangupMiddleware(api))
    off = FastAPI()
    await Peer().run(HangupMiddleware(off, telemetry=False))
    assert stack_of(off) == []


def test_what_has_no_end_is_not_followed_for_ever() -> None:
    unit = Unit(waits)
    unit.app = unit
    move_in(unit)
    move_in(None)


async def test_what_cannot_be_changed_is_no_business_of_the_calls(caplog: pytest.LogCaptureFixture) -> None:
    class Sealed(NativeMiddleware):
        def __setattr__(self, name: str, value: object) -> None:
            if hasattr(self, name):
                raise AttributeError(name)
            super().__setattr__(name, value)

    peer = Peer()
    await peer.run(HangupMiddleware(Sealed(completes)))
    assert peer.status == 200
    assert [record.levelno for record in caplog.records if "raised" in record.getMessage()] == [logging.ERROR]
