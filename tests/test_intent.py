"""Policies per route, deadlines, critical sections, children: what a disconnect should do here."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextvars import Context, ContextVar, copy_context
from typing import Any

import anyio
import anyio.to_thread
import pytest
from anyio.lowlevel import checkpoint
from fastapi import Depends, FastAPI
from fastapi.responses import StreamingResponse
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from hangup import (
    Cause,
    HangupMiddleware,
    Outcome,
    Policy,
    State,
    add_finalizer,
    current_call,
    on_disconnect,
    protect,
    step,
)
from hangup.testing import Peer

from .helpers import END, START, Watch, answer, chunk, until, watched

pytestmark = pytest.mark.anyio

# ---------------------------------------------------------------------- policy per route


def api(outcomes: list[Outcome], **options: Any) -> FastAPI:
    app = FastAPI()
    app.add_middleware(HangupMiddleware, observers=[outcomes.append], **options)
    return app


async def test_a_route_may_finish_while_the_application_cancels() -> None:
    outcomes: list[Outcome] = []
    app = api(outcomes)
    log: list[str] = []

    def number(q: int = 7) -> int:
        return q

    @app.get("/{name}")
    @on_disconnect("finish")
    async def order(name: str, request: Request, n: int = Depends(number)) -> dict[str, Any]:
        await peer.wait_for(lambda: peer.left)
        await until(lambda: current_call().life.left)
        await anyio.sleep(0.01)
        log.append(f"{name} {n}")
        return {"ok": True}

    peer = Peer(path="/pizza", query="q=9")
    async with peer.calling(app):
        await watched(peer)
        peer.hang_up()
    assert log == ["pizza 9"]
    assert [(o.state, o.delivered, o.cause, o.status_code) for o in outcomes] == [(State.COMPLETED, False, None, 200)]


async def test_a_route_may_cancel_while_the_application_finishes() -> None:
    outcomes: list[Outcome] = []
    app = api(outcomes, policy="finish")

    @app.get("/")
    @on_disconnect("cancel")
    async def search() -> None:
        await anyio.sleep(60)

    peer = Peer()
    async with peer.calling(app):
        await watched(peer)
        peer.hang_up()
    assert [o.state for o in outcomes] == [State.CANCELED]


async def test_every_kind_of_endpoint_keeps_its_kind_and_signature() -> None:
    @on_disconnect("finish")
    async def coroutine(a: int, *, b: str = "x") -> None:
        """Doc."""

    @on_disconnect("finish")
    def plain(a: int) -> None: ...

    @on_disconnect("finish")
    def parts(a: int) -> Iterator[int]:
        yield a

    @on_disconnect("finish")
    async def stream(a: int) -> AsyncIterator[int]:
        yield a

    assert inspect.iscoroutinefunction(coroutine)
    assert str(inspect.signature(coroutine)) == "(a: 'int', *, b: 'str' = 'x') -> 'None'"
    assert coroutine.__doc__ == "Doc."
    assert not inspect.iscoroutinefunction(plain)
    assert list(parts(1)) == [1]
    assert inspect.isasyncgenfunction(stream)
    assert [x async for x in stream(2)] == [2]
    await coroutine(1)


async def test_a_plain_function_and_a_method_are_covered() -> None:
    outcomes: list[Outcome] = []
    seen: list[str] = []

    class Orders(HTTPEndpoint):
        @on_disconnect("finish")
        async def get(self, request: Request) -> Response:
            seen.append(current_call().policy.disconnect)
            return JSONResponse({})

    @on_disconnect("signal", grace=3)
    def work(request: Request) -> Response:
        call = current_call()
        seen.append(f"{call.policy.disconnect} {call.policy.grace}")
        return JSONResponse({})

    app = Starlette(
        routes=[Route("/orders", Orders), Route("/work", work)],
        middleware=[Middleware(HangupMiddleware, observers=[outcomes.append])],
    )
    await Peer(path="/orders").run(app)
    await Peer(path="/work").run(app)
    assert seen[0] == "finish"
    assert seen[1] in {"signal 3", "signal 3.0"}


async def test_a_route_takes_effect_while_its_dependencies_run() -> None:
    outcomes: list[Outcome] = []
    app = api(outcomes)
    log: list[str] = []

    async def slow_dependency() -> int:
        await peer.wait_for(lambda: peer.left)
        await until(lambda: current_call().life.left)
        return 1

    @app.get("/")
    @on_disconnect("finish")
    async def order(n: int = Depends(slow_dependency)) -> int:
        log.append("ran")
        return n

    peer = Peer()
    async with peer.calling(app):
        await watched(peer)
        peer.hang_up()
    assert log == ["ran"]
    assert [o.state for o in outcomes] == [State.COMPLETED]


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_route_whose_policy_nobody_has_defined_is_an_error_of_its_own(leaves: bool) -> None:
    outcomes: list[Outcome] = []
    app = api(outcomes)
    go_on = anyio.Event()

    @app.get("/undefined")
    @on_disconnect("undefined")
    async def undefined(_: None = Depends(go_on.wait)) -> None: ...

    @app.get("/other")
    async def other() -> None:
        await anyio.sleep(60)

    peer, others = Peer(path="/undefined"), Peer(path="/other")
    async with others.calling(app), peer.calling(app):
        await watched(peer)
        await watched(others)
        if leaves:
            peer.hang_up()
        else:
            go_on.set()
        others.hang_up()
    assert sorted(o.state for o in outcomes) == [State.CANCELED, State.CANCELED if leaves else State.FAILED]
    if not leaves:
        assert peer.status == 500
        assert isinstance(peer.error, ValueError)
        assert "policy is one of 'cancel', 'signal', 'finish', not 'undefined'" in str(peer.error)


async def test_an_object_that_is_awaited_stays_that_and_a_class_is_no_endpoint() -> None:
    class Endpoint:
        async def __call__(self) -> str:
            return "awaited"

    endpoint = on_disconnect("finish")(Endpoint())
    assert inspect.iscoroutinefunction(endpoint)
    assert await endpoint() == "awaited"
    with pytest.raises(TypeError, match="decorates an endpoint, a function or a method, not <class"):
        on_disconnect("finish")(HTTPEndpoint)


async def test_the_running_call_has_the_last_word() -> None:
    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        current_call().policy = Policy("finish")

        @on_disconnect("cancel")
        async def endpoint() -> None:
            assert current_call().policy.disconnect == "finish"

        await endpoint()
        with pytest.raises(TypeError, match="policy takes a Policy"):
            current_call().policy = "cancel"  # type: ignore[assignment]
        await answer(send)

    peer = Peer()
    watch = Watch(inner)
    await peer.run(watch)
    assert peer.error is None
    assert watch.outcome.state is State.COMPLETED


# What the client did before a policy was chosen counts as well.


async def leave(peer: Peer) -> None:
    """In the application: the client leaves, and that is known."""
    with anyio.CancelScope(shield=True):
        peer.hang_up()
        await until(lambda: current_call().life.left)


@pytest.mark.parametrize("before", ["signal", "finish"])
@pytest.mark.parametrize("how", ["assigned", "in a thread", "by the route"])
async def test_a_client_that_left_before_the_policy_was_cancel_is_interrupted(before: str, how: str) -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        call = current_call()
        call.start_soon(child)
        call.token.add_callback(lambda: log.append("token"))
        await watched(peer)
        await leave(peer)
        await anyio.wait_all_tasks_blocked()
        log.append("go on")

        @on_disconnect("cancel", grace=60)
        async def endpoint() -> None:
            await anyio.sleep(60)

        try:
            if how == "by the route":
                await endpoint()
            elif how == "in a thread":
                thread = threading.Thread(target=setattr, args=(call, "policy", Policy("cancel", grace=60)))
                thread.start()
                thread.join()
            else:
                call.policy = Policy("cancel", grace=60)
            await anyio.sleep(60)
        finally:
            log.append("interrupted")

    async def child() -> None:
        try:
            await anyio.sleep(60)
        finally:
            log.append("child")

    peer = Peer()
    watch = Watch(app, policy=before)
    await peer.run(watch)
    first = ["token", "go on"] if before == "signal" else ["go on", "token"]
    assert log[:2] == first
    assert sorted(log[2:]) == ["child", "interrupted"]
    assert (watch.outcome.state, watch.outcome.cause) == (State.CANCELED, Cause.CLIENT_DISCONNECT)
    assert peer.error is None


async def test_a_client_that_left_before_the_policy_was_signal_flips_the_token() -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await watched(peer)
        await leave(peer)
        assert not current_call().token.canceled
        current_call().policy = Policy("signal")
        await anyio.sleep(0.1)
        log.append(str(current_call().token.cause))

    peer = Peer()
    watch = Watch(app, policy="finish")
    await peer.run(watch)
    assert log == ["client_disconnect"]
    assert watch.outcome.state is State.CANCELED


async def test_an_application_that_listens_hears_when_it_is_no_longer_to_finish() -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        log.append((await receive())["type"])
        await anyio.sleep(0.01)
        log.append("cleaned up")

    peer = Peer()
    watch = Watch(app, policy="finish")
    async with peer.calling(watch):
        await watched(peer)
        [call] = watch.app.calls_in_flight
        peer.hang_up()
        await until(lambda: call.life.left)
        await anyio.wait_all_tasks_blocked()
        assert log == []
        call.policy = Policy("cancel")
    assert log == ["http.disconnect", "cleaned up"]
    assert watch.outcome.state is State.CANCELED


async def test_who_was_told_under_another_policy_keeps_its_grace() -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        log.append((await receive())["type"])
        current_call().policy = Policy("cancel", grace=60)
        await anyio.sleep(0.1)
        log.append("cleaned up")

    peer = Peer()
    watch = Watch(app, policy="signal")
    async with peer.calling(watch):
        await watched(peer)
        peer.hang_up()
    assert log == ["http.disconnect", "cleaned up"]
    assert watch.outcome.state is State.CANCELED


@pytest.mark.parametrize("after", ["signal", "finish"])
async def test_an_interruption_that_waits_is_called_off_by_the_policy(after: Any) -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with protect():
            await watched(peer)
            await leave(peer)
            current_call().policy = Policy(after)
        await anyio.sleep(0.2)
        await answer(send)
        log.append("finished")

    peer = Peer()
    watch = Watch(app)
    await peer.run(watch)
    assert log == ["finished"]
    assert (watch.outcome.state, watch.outcome.cause) == (State.COMPLETED, Cause.CLIENT_DISCONNECT)
    assert not watch.outcome.delivered


async def test_an_interruption_that_was_called_off_comes_all_the_same_with_the_deadline() -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with protect():
            await watched(peer)
            await leave(peer)
            current_call().policy = Policy("signal", timeout=0.1)
        try:
            await anyio.sleep(60)
        finally:
            log.append("interrupted")

    peer = Peer()
    watch = Watch(app)
    await peer.run(watch)
    assert log == ["interrupted"]
    assert (watch.outcome.state, watch.outcome.cause) == (State.CANCELED, Cause.CLIENT_DISCONNECT)


@pytest.mark.parametrize("after", ["signal", "finish"])
async def test_who_was_interrupted_is_canceled_whatever_the_policy_says_then(after: Any, on_trio: bool) -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await anyio.sleep(60)
        except anyio.get_cancelled_exc_class():
            current_call().policy = Policy(after)
            with anyio.CancelScope(shield=on_trio):
                await anyio.sleep(0.01)
            log.append("cleaned up")
            raise

    peer = Peer()
    watch = Watch(app)
    async with peer.calling(watch):
        await watched(peer)
        peer.hang_up()
    assert log == ["cleaned up"]
    assert (watch.outcome.state, watch.outcome.cause) == (State.CANCELED, Cause.CLIENT_DISCONNECT)


@pytest.mark.parametrize("longer", [True, False])
async def test_who_cleans_up_may_have_another_grace(longer: bool) -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        log.append((await receive())["type"])
        current_call().policy = Policy(grace=60 if longer else 0.01)
        try:
            await anyio.sleep(0.8 if longer else 60)
            log.append("cleaned up")
        except anyio.get_cancelled_exc_class():
            log.append("interrupted")
            raise

    peer = Peer()
    async with peer.calling(Watch(app, grace=0.5 if longer else 60)):
        await watched(peer)
        peer.hang_up()
    assert log == ["http.disconnect", "cleaned up" if longer else "interrupted"]


async def test_named_policies() -> None:
    seen: list[Policy] = []

    @on_disconnect("llm")
    async def chat(send: Send) -> None:
        seen.append(current_call().policy)
        await answer(send)

    @on_disconnect("typo")
    async def wrong(send: Send) -> None:
        raise AssertionError

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert current_call().policy == upload
        await (wrong if scope["path"] == "/wrong" else chat)(send)

    llm, upload = Policy("cancel", timeout=300), Policy("finish")
    watch = Watch(app, policy="upload", policies={"llm": llm, "upload": upload})
    await Peer().run(watch)
    assert seen == [llm]
    peer = Peer(path="/wrong")
    await peer.run(watch)
    assert "policy is one of 'cancel', 'signal', 'finish', 'llm', 'upload', not 'typo'" in str(peer.error)


async def test_an_opt_out_wins_over_a_default() -> None:
    seen: list[Any] = []

    @on_disconnect(timeout=None)
    async def forever(send: Send) -> None:
        seen.append((current_call().policy, current_call().token.remaining()))
        await answer(send)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await forever(send)

    await Peer().run(Watch(app, timeout=30, grace=2))
    assert seen == [(Policy("cancel", grace=2, timeout=None), None)]


async def test_on_disconnect_outside_a_call_does_nothing_and_checks_its_arguments() -> None:
    @on_disconnect("finish")
    async def endpoint() -> int:
        return 1

    assert await endpoint() == 1
    with pytest.raises(ValueError, match="timeout takes more than 0 seconds, or None for no limit, not 0"):
        on_disconnect(timeout=0)
    with pytest.raises(TypeError, match="the name of a policy"):
        on_disconnect(Policy())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="decorates an endpoint"):
        on_disconnect()(1)  # type: ignore[type-var]
    with pytest.raises(TypeError, match="decorates an endpoint"):
        on_disconnect()(staticmethod(print))
    with pytest.raises(TypeError, match="decorates an endpoint once, with all it wants"):
        on_disconnect(timeout=1)(endpoint)


# ---------------------------------------------------------------------- deadlines


@pytest.mark.usefixtures("beginning_in_time")
async def test_a_timeout_answers_504_and_interrupts() -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert current_call().token.remaining() == pytest.approx(0.03)
        add_finalizer(lambda outcome: log.append(f"finalizer {outcome.state}"))
        try:
            await anyio.sleep(60)
        finally:
            log.append(f"interrupted {current_call().token.cause}")

    peer = Peer()
    watch = Watch(app, timeout=0.03)
    async with peer.calling(watch):
        pass
    assert (peer.status, peer.body, peer.complete) == (504, b"Gateway Timeout", True)
    assert log == ["interrupted timeout", "finalizer timed_out"]
    assert peer.error is None
    outcome = watch.outcome
    assert (outcome.state, outcome.cause, outcome.status_code) == (State.TIMED_OUT, Cause.TIMEOUT, 504)
    assert not outcome.delivered


@pytest.mark.usefixtures("beginning_in_time")
async def test_the_client_hears_of_a_timeout_at_once_however_long_the_cleanup() -> None:
    release = anyio.Event()
    errors: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await anyio.sleep(60)
        finally:
            with anyio.CancelScope(shield=True):
                await release.wait()
            for message in (START, chunk(b"x"), END):
                try:
                    await send(message)
                except OSError as exc:
                    errors.append(str(exc))

    peer = Peer()
    watch = Watch(app, timeout=0.06)
    async with peer.calling(watch):
        await peer.wait_for(lambda: peer.complete)
        assert not peer.ended
        release.set()
    assert peer.status == 504
    assert len(peer.sent) == 2
    assert errors == ["the response was cut"] * 3
    assert watch.outcome.state is State.TIMED_OUT


async def test_a_thread_that_outlasts_its_deadline_is_timed_out_whatever_it_answers() -> None:
    release = threading.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await anyio.to_thread.run_sync(release.wait, 5)
        await answer(send)

    peer = Peer()
    watch = Watch(app, timeout=0.03)
    async with peer.calling(watch):
        await peer.wait_for(lambda: peer.status == 504)
        release.set()
    assert peer.complete
    assert watch.outcome.state is State.TIMED_OUT


@pytest.mark.usefixtures("beginning_in_time")
async def test_a_stream_whose_time_is_over_is_cut_without_a_clean_end() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        while True:
            await send(chunk(b"x"))
            await anyio.sleep(0.001)

    peer = Peer()
    watch = Watch(app, timeout=0.05)
    async with peer.calling(watch):
        pass
    assert peer.status == 200
    assert not peer.complete
    assert peer.error is None
    assert watch.outcome.state is State.TIMED_OUT


@pytest.mark.usefixtures("beginning_in_time")
async def test_a_background_task_is_not_subject_to_the_deadline() -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send)
        await anyio.sleep(0.1)
        log.append("background")

    peer = Peer()
    watch = Watch(app, timeout=0.03)
    async with peer.calling(watch):
        pass
    assert log == ["background"]
    assert watch.outcome.state is State.COMPLETED


@pytest.mark.usefixtures("beginning_in_time")
async def test_a_failure_before_the_deadline_stays_a_failure() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, 500)
        await anyio.sleep(0.05)

    peer = Peer()
    watch = Watch(app, timeout=0.02)
    async with peer.calling(watch):
        pass
    assert watch.outcome.state is State.FAILED


async def test_a_client_that_does_not_read_is_timed_out() -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        await send(chunk(b"x"))
        peer.stop_reading()
        try:
            for _ in range(3):
                await send(chunk(b"y"))
                await anyio.sleep(60)
        finally:
            log.append("cleaned up")

    peer = Peer()
    watch = Watch(app, send_timeout=0.03)
    async with peer.calling(watch):
        pass
    assert log == ["cleaned up"]
    assert peer.error is None
    assert (watch.outcome.state, watch.outcome.reason) == (State.TIMED_OUT, "send_timeout")


@pytest.mark.usefixtures("beginning_in_time")
async def test_policy_finish_has_a_deadline_all_the_same() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await anyio.sleep(60)

    peer = Peer()
    watch = Watch(app, policy="finish", timeout=0.1)
    async with peer.calling(watch):
        await watched(peer)
        peer.hang_up()
    assert watch.outcome.state is State.TIMED_OUT


@pytest.mark.parametrize("timeout", [0.01, 0.03, 0.06])
@pytest.mark.usefixtures("beginning_in_time")
async def test_a_deadline_interrupts_once_and_the_cleanup_has_its_grace(timeout: float, on_trio: bool) -> None:
    """Also one that passes before the call has lasted, which is when deadlines are armed."""
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await anyio.sleep(60)
        finally:
            with anyio.CancelScope(shield=on_trio):
                await anyio.sleep(0.1)
            log.append("cleaned up")

    watch = Watch(app, timeout=timeout)
    await Peer().run(watch)
    assert log == ["cleaned up"]
    assert watch.outcome.state is State.TIMED_OUT


@pytest.mark.usefixtures("beginning_in_time")
async def test_a_deadline_does_not_cut_the_cleanup_of_a_call_that_was_canceled_before(on_trio: bool) -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        current_call().cancel()
        try:
            await anyio.sleep(60)
        finally:
            with anyio.CancelScope(shield=on_trio):
                await anyio.sleep(0.1)
            log.append("cleaned up")

    watch = Watch(app, timeout=0.06)
    await Peer().run(watch)
    assert log == ["cleaned up"]
    assert watch.outcome.cause is Cause.REQUESTED


async def test_policy_signal_has_a_deadline_all_the_same_and_the_first_cause_stays() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await anyio.sleep(60)

    peer = Peer()
    watch = Watch(app, policy="signal", timeout=0.5)
    async with peer.calling(watch):
        await watched(peer)
        peer.hang_up()
    assert watch.outcome.state is State.CANCELED
    assert watch.outcome.cause is Cause.CLIENT_DISCONNECT


async def test_a_deadline_can_be_set_while_running() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        current_call().policy = Policy(timeout=0.05)
        await anyio.sleep(60)

    peer = Peer()
    watch = Watch(app)
    async with peer.calling(watch):
        pass
    assert peer.status == 504


@pytest.mark.parametrize(("ms", "limit"), [("40000", 40), ("999999", 60)])
async def test_the_callers_deadline_shortens_and_never_lengthens(ms: str, limit: float) -> None:
    seen: list[float] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        remaining = current_call().token.remaining()
        assert remaining is not None
        seen.append(remaining)
        await answer(send)

    peer = Peer(headers=[("X-Request-Timeout-Ms", ms)])
    await peer.run(Watch(app, timeout=60, deadline_header="x-request-timeout-ms"))
    assert 0 < seen[0] <= limit


@pytest.mark.parametrize("value", ["", "soon", "1e3", "9" * 400], ids=["empty", "word", "float", "400 digits"])
async def test_a_deadline_that_makes_no_sense_is_ignored(value: str) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert current_call().token.remaining() is None
        await answer(send)

    peer = Peer(headers=[("X-Request-Timeout-Ms", value)])
    await peer.run(Watch(app, deadline_header="X-Request-Timeout-Ms"))
    assert peer.status == 200


@pytest.mark.parametrize("value", ["0", "-5"])
async def test_a_call_whose_time_is_over_does_not_start(value: str) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError

    peer = Peer(headers=[("X-Request-Timeout-Ms", value)])
    watch = Watch(app, deadline_header="X-Request-Timeout-Ms")
    await peer.run(watch)
    assert peer.error is None
    assert (peer.status, peer.complete) == (504, True)
    assert watch.outcome.state is State.TIMED_OUT


async def test_the_header_is_looked_at_only_where_that_was_asked_for() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert current_call().token.remaining() is None
        await answer(send)

    peer = Peer(headers=[("X-Request-Timeout-Ms", "0")])
    await peer.run(Watch(app))
    assert peer.status == 200


async def test_no_deadline_fires_under_a_debugger(monkeypatch: pytest.MonkeyPatch) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await anyio.sleep(0.1)
        await answer(send)

    monkeypatch.setattr("hangup._call.debugging", lambda: True)
    peer = Peer()
    watch = Watch(app, timeout=0.02)
    async with peer.calling(watch):
        pass
    assert watch.outcome.state is State.COMPLETED


def test_a_debugger_is_recognised_and_coverage_is_none() -> None:
    from hangup._deadline import debugging

    class Pdb:
        def __call__(self, *args: Any) -> None:
            return None

    before = sys.gettrace()
    found = []
    for module in ("bdb", "coverage.pytracer"):
        Pdb.__module__ = module
        tracer = Pdb()
        sys.settrace(tracer)
        try:
            found.append(debugging())
        finally:
            sys.settrace(before)
    assert found == [True, False]
    if sys.version_info >= (3, 12):
        sys.monitoring.use_tool_id(sys.monitoring.DEBUGGER_ID, "debugger")
        try:
            assert debugging()
        finally:
            sys.monitoring.free_tool_id(sys.monitoring.DEBUGGER_ID)


# ---------------------------------------------------------------------- protect


async def test_protect_holds_a_cancellation_off_until_its_end() -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with protect():
                await until(lambda: current_call().cause)
                with protect():  # it nests
                    await anyio.sleep(0.02)
                log.append("both statements")
            await anyio.sleep(60)
        finally:
            log.append("interrupted")

    peer = Peer()
    watch = Watch(app)
    async with peer.calling(watch):
        await watched(peer)
        peer.hang_up()
    assert log == ["both statements", "interrupted"]
    assert watch.outcome.state is State.CANCELED


async def test_protect_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with protect():
            try:
                await anyio.sleep(60)
            finally:
                log.append("interrupted inside")

    peer = Peer()
    watch = Watch(app, max_protect=0.02)
    async with peer.calling(watch):
        await watched(peer)
        peer.hang_up()
    assert log == ["interrupted inside"]
    [warning] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "max_protect, 0.02 s" in warning


async def test_protect_in_a_thread_and_outside_a_call_is_harmless(on_trio: bool) -> None:
    def work() -> int:
        with protect():
            return 1

    assert await anyio.to_thread.run_sync(work) == 1
    if not on_trio:
        assert await asyncio.to_thread(work) == 1, "here the context says that this is asyncio"
    section = protect()
    with section:
        await anyio.sleep(0)
    with pytest.raises(RuntimeError, match="make a new one"):
        section.__enter__()


async def test_protect_works_in_a_finalizer_that_is_cut_off() -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def close() -> None:
            with protect():
                await anyio.sleep(0.05)
                log.append("closed")

        add_finalizer(close, timeout=0.02)
        await answer(send)

    await Peer().run(Watch(app))
    assert log == ["closed"]


# ---------------------------------------------------------------------- children


async def test_children_end_with_the_call_and_are_joined_before_its_state_is_written(on_trio: bool) -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def child(name: str) -> None:
            assert current_call().scope is peer.scope
            try:
                await anyio.sleep(60)
            finally:
                with anyio.CancelScope(shield=on_trio):
                    await anyio.sleep(0.02)
                log.append(name)

        call = current_call()
        call.start_soon(child, "a")
        call.start_soon(child, "b")
        await anyio.sleep(60)

    def observe(outcome: Outcome) -> None:
        log.append(str(outcome.state))

    peer = Peer()
    async with peer.calling(HangupMiddleware(app, observers=[observe])):
        await watched(peer)
        peer.hang_up()
    assert sorted(log[:2]) == ["a", "b"]
    assert log[2:] == ["canceled"]


async def test_a_completed_call_waits_for_its_children_like_for_a_background_task() -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def child() -> None:
            await peer.wait_for(lambda: peer.complete)
            log.append("child")
            current_call().start_soon(grandchild)

        async def grandchild() -> None:
            log.append("grandchild")

        current_call().start_soon(child)
        await answer(send)

    peer = Peer()
    watch = Watch(app)
    async with peer.calling(watch):
        pass
    assert log == ["child", "grandchild"]
    assert watch.outcome.state is State.COMPLETED


async def test_a_child_that_fails_fails_the_call_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def child() -> None:
            raise ValueError("a child's")

        current_call().start_soon(child)
        await answer(send)

    peer = Peer()
    watch = Watch(app)
    async with peer.calling(watch):
        pass
    assert watch.outcome.state is State.FAILED
    assert isinstance(watch.outcome.error, ValueError)
    assert peer.error is None
    assert "a child task of GET '/' failed" in caplog.text


class OddError(BaseException):
    pass


@pytest.mark.parametrize("error", [OddError(), GeneratorExit(), BaseExceptionGroup("odd", [OddError()])])
async def test_a_child_that_raises_what_is_no_exception_fails_the_call_too(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """trio would stop for it, and asyncio say so when the task is collected."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def child() -> None:
            raise error

        current_call().start_soon(child)
        await answer(send)

    peer = Peer()
    watch = Watch(app)
    await peer.run(watch)
    assert (watch.outcome.state, watch.outcome.error) == (State.FAILED, error)
    gc.collect()
    await anyio.sleep(0)
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == ["a child task of GET '/' failed"]


async def test_a_child_runs_in_the_context_it_was_started_in() -> None:
    var: ContextVar[str] = ContextVar("var")
    seen: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        call = current_call()

        async def child() -> None:
            seen.append((var.get(), current_call() is call))
            var.set("the child's")

        var.set("the handler's")
        call.start_soon(child)
        copy_context().run(Context().run, call.start_soon, child_of_another)
        await answer(send)
        assert var.get() == "the handler's"

    async def child_of_another() -> None:
        seen.append((var.get("none"), current_call().scope is peer.scope))

    peer = Peer()
    await peer.run(Watch(app))
    assert peer.error is None
    assert sorted(seen) == [("none", True), ("the handler's", True)]


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_child_that_a_cancel_starts_is_joined_too(leaves: bool) -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        call = current_call()

        async def child() -> None:
            await anyio.sleep(0.02)
            log.append("child")
            step("its own", cancel=lambda: log.append("its own")).__enter__()

        async def tell_upstream() -> None:
            call.start_soon(child)
            log.append("told")

        step("left open", cancel=tell_upstream).__enter__()
        if leaves:
            await anyio.sleep(60)
        await answer(send)

    def observe(outcome: Outcome) -> None:
        log.append(str(outcome.state))

    peer = Peer()
    async with peer.calling(HangupMiddleware(app, observers=[observe])):
        if leaves:
            await watched(peer)
            peer.hang_up()
    assert log == (["told", "canceled"] if leaves else ["told", "child", "its own", "completed"])


@pytest.mark.parametrize("how", ["protect", "message"])
async def test_a_child_started_before_the_handler_is_told_is_interrupted_when_it_is(how: str, on_trio: bool) -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        ended = anyio.Event()

        async def child() -> None:
            try:
                await anyio.sleep(60)
            finally:
                log.append("child")
                ended.set()

        call = current_call()
        await receive()
        try:
            with protect():
                await until(lambda: call.cause)
                call.start_soon(child)
                for _ in range(5):
                    await checkpoint()
                assert log == []
                if how == "message":
                    await receive()
                    return
            await anyio.sleep(60)
        finally:
            with anyio.move_on_after(5, shield=on_trio):
                await ended.wait()
            log.append("handler")

    peer = Peer()
    watch = Watch(app)
    async with peer.calling(watch):
        await watched(peer)
        peer.hang_up()
    assert log == ["child", "handler"]
    assert watch.outcome.state is State.CANCELED


@pytest.mark.parametrize("when", ["running", "told"])
async def test_another_grace_is_that_of_the_children_too(when: str) -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def child() -> None:
            try:
                await anyio.sleep(60)
            except anyio.get_cancelled_exc_class():
                log.append("told")
                await anyio.sleep(60)  # on trio that is the end of it
            finally:
                log.append("ended")

        def change() -> None:
            call.policy = Policy(grace=0.01)

        call = current_call()
        call.start_soon(child)
        await checkpoint()
        if when == "running":
            change()
        try:
            await anyio.sleep(60)
        finally:
            if when == "told":
                change()

    peer = Peer()
    async with peer.calling(Watch(app, grace=60)):
        await watched(peer)
        peer.hang_up()
    assert log == ["told", "ended"]


async def test_children_end_when_the_handler_raises() -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def child() -> None:
            try:
                await anyio.sleep(60)
            finally:
                log.append("child")

        current_call().start_soon(child)
        await anyio.sleep(0.001)
        raise ValueError

    peer = Peer()
    watch = Watch(app)
    async with peer.calling(watch):
        pass
    assert log == ["child"]
    assert isinstance(peer.error, ValueError)


async def test_misuse_of_start_soon_and_refuse_is_named(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        call = current_call()
        sleeping = anyio.sleep(0)
        with pytest.raises(TypeError, match=r"start_soon\(\) takes a coroutine function and its arguments, not <coro"):
            call.start_soon(sleeping)  # type: ignore[arg-type]
        sleeping.close()
        with pytest.raises(RuntimeError, match=r"start_soon\(sleep\) in a thread: there it is anyio\.from_thread"):
            await anyio.to_thread.run_sync(call.start_soon, anyio.sleep, 0)
        with pytest.raises(TypeError, match="refuse"):
            await call.refuse(503)  # type: ignore[arg-type]
        call.start_soon(len, ())  # type: ignore[arg-type]
        await answer(send)

    peer = Peer()
    watch = Watch(app)
    await peer.run(watch)
    assert (peer.error, peer.status) == (None, 200)
    assert str(watch.outcome.error) == "start_soon() takes a coroutine function, and len is none"


async def test_no_child_is_started_after_the_end() -> None:
    calls: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        calls.append(current_call())
        await answer(send)

    await Peer().run(Watch(app))
    with pytest.raises(RuntimeError, match="the call has ended"):
        calls[0].start_soon(anyio.sleep, 1)


async def test_a_child_token_follows_its_parent_and_not_the_other_way() -> None:
    seen: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        token = current_call().token
        one, two = token.child(), token.child()
        two.cancel("just this one")
        seen.append((token.canceled, one.canceled, two.cause))
        try:
            await anyio.sleep(60)
        finally:
            seen.append((one.cause, two.cause, token.child().cause))

    peer = Peer()
    async with peer.calling(Watch(app)):
        await watched(peer)
        peer.hang_up()
    assert seen == [
        (False, False, Cause.REQUESTED),
        (Cause.CLIENT_DISCONNECT, Cause.REQUESTED, Cause.CLIENT_DISCONNECT),
    ]


async def test_a_child_token_finishes_with_its_parent_and_leaves_nothing_behind() -> None:
    kept: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        token = current_call().token
        kept.append(token.child())
        for _ in range(100):
            token.child()
        assert len(token._callbacks or ()) == 1
        await answer(send)

    peer = Peer()
    await peer.run(Watch(app))
    assert peer.error is None
    assert kept[0].finished
    assert not kept[0].canceled


async def test_a_stream_of_an_async_generator_endpoint_is_closed_in_its_task() -> None:
    outcomes: list[Outcome] = []
    app = api(outcomes)
    log: list[str] = []

    @on_disconnect("cancel", grace=1)
    async def events() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"x"
                await anyio.sleep(0.001)
        finally:
            log.append("closed")

    @app.get("/")
    async def stream() -> StreamingResponse:
        return StreamingResponse(events())

    peer = Peer()
    async with peer.calling(app):
        await peer.wait_for_body(b"xxx")
        await watched(peer)
        peer.hang_up()
    assert log == ["closed"]
    assert END["type"] not in [m["type"] for m in peer.sent if not m.get("more_body", True)]


async def test_a_task_that_outlives_its_call_is_counted_and_sees_that_its_token_is_finished(on_trio: bool) -> None:
    if on_trio:
        return
    release = anyio.Event()
    seen: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def mail() -> None:
            await release.wait()
            token = current_call().token
            seen.append((token.finished, token.canceled, await token.wait()))

        tasks.append(asyncio.get_running_loop().create_task(mail()))
        await answer(send)

    tasks: list[Any] = []
    peer = Peer()
    watch = Watch(app)
    await peer.run(watch)
    assert watch.outcome.state is State.COMPLETED
    assert watch.outcome.left_running == (1 if sys.version_info >= (3, 12) else None)
    release.set()
    await tasks[0]
    assert seen == [(True, False, False)]


async def test_a_cleanup_that_a_cut_response_sets_off_is_not_interrupted_as_well(on_trio: bool) -> None:
    """The deadline finds the work about to resume, so the error of its ``send`` reaches it before the interruption."""
    if on_trio:
        return  # by level
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        resumed = loop.create_future()
        resumed.add_done_callback(lambda _: current_call().stop(Cause.TIMEOUT))
        loop.call_later(0.01, resumed.set_result, None)
        await resumed
        try:
            await send(START)
            await send(END)
        except OSError:
            await anyio.sleep(0.05)
            log.append("cleaned up")

    peer = Peer()
    watch = Watch(app)
    async with peer.calling(watch):
        pass
    assert log == ["cleaned up"]
    assert peer.status == 504
    assert watch.outcome.state is State.TIMED_OUT


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.usefixtures("beginning_in_time")
async def test_the_answer_to_a_deadline_does_not_tell_the_application_a_second_time() -> None:
    """Django listens beside its view, and cancels it on a disconnect: also on the one that follows our 504."""
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def view() -> None:
            try:
                await anyio.sleep(60)
            finally:
                await peer.wait_for(lambda: peer.complete)
                await anyio.sleep(0.02)
                log.append("cleaned up")

        async def listen() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            log.append("disconnect")

        working, listening = asyncio.create_task(view()), asyncio.create_task(listen())
        try:
            await asyncio.wait({working, listening}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            working.cancel()
            await asyncio.wait({working})
            ended.append(listening)

    ended: list[asyncio.Task[None]] = []
    peer = Peer()
    watch = Watch(app, timeout=0.05)
    async with peer.calling(watch):
        pass
    await ended[0]
    assert log == ["cleaned up", "disconnect"]
    assert peer.status == 504
    assert watch.outcome.state is State.TIMED_OUT
