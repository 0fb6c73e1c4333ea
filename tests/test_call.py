"""Rules 13, 16, 17, 19: the end of a call; access to it; misuse."""

from __future__ import annotations

import asyncio
import functools
import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import AsyncMock

import anyio
import pytest
from starlette.endpoints import HTTPEndpoint
from starlette.types import Message, Receive, Scope, Send

from hangup import (
    Cause,
    HangupMiddleware,
    Outcome,
    Phase,
    Policy,
    State,
    Step,
    add_finalizer,
    before_success,
    current_call,
    step,
)
from hangup.testing import Peer, Quirks, WebSocketPeer

from .helpers import END, START, Watch, answer, chunk, types, until, watched

pytestmark = pytest.mark.anyio


def lines(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= level and r.name == "hangup"]


async def test_a_completed_call_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, body=b"hello")

    peer = Peer()
    watch = Watch(app)
    await peer.run(watch)
    assert (peer.status, peer.body, peer.complete) == (200, b"hello", True)
    outcome = watch.outcome
    assert (outcome.state, outcome.cause, outcome.delivered) == (State.COMPLETED, None, True)
    assert outcome.phase is Phase.AFTER_RESPONSE
    assert outcome.status_code == 200
    assert outcome.duration > 0
    assert outcome.stop_latency is None
    assert lines(caplog) == []


async def test_a_canceled_call_leaves_one_line_and_a_quiet_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with step("ask the model"), step("call a tool"):
            await anyio.sleep(60)

    peer = Peer(path="/runs\n'")
    watch = Watch(app)
    async with peer.calling(watch):
        await watched(peer)
        peer.hang_up()
    [line] = lines(caplog)
    assert line.startswith('GET "/runs\\n\'" canceled: client_disconnect before_response, 0.')
    assert line.endswith(", in flight: call a tool, ask the model")
    assert types(peer.late) == ["http.response.start", "http.response.body"]
    assert peer.late[0]["status"] == 499
    assert watch.outcome.status_code is None
    assert watch.outcome.stop_latency is not None
    assert 0 <= watch.outcome.stop_latency < watch.outcome.duration


async def test_a_stream_that_was_cut_is_ended_quietly_without_a_second_start() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        await send(chunk(b"x"))
        await anyio.sleep(60)

    peer = Peer()
    watch = Watch(app)
    async with peer.calling(watch):
        await watched(peer)
        peer.hang_up()
    assert types(peer.late) == ["http.response.body"]
    assert watch.outcome.phase is Phase.DURING_RESPONSE
    assert watch.outcome.status_code == 200


async def test_a_server_that_never_returns_from_the_quiet_end_holds_nobody_up() -> None:
    """hypercorn's HTTP/2 after a lost connection."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await anyio.sleep(60)

    class Stuck(Peer):
        async def send(self, message: Message) -> None:
            await anyio.sleep(60)

    peer = Stuck()
    with anyio.fail_after(5):
        async with peer.calling(Watch(app)):
            await watched(peer)
            peer.hang_up()


async def test_a_server_that_refuses_the_quiet_end_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await anyio.sleep(60)

    peer = Peer(quirks=Quirks(send_error=RuntimeError("unable to perform operation on closed transport")))
    async with peer.calling(Watch(app)):
        await watched(peer)
        peer.hang_up()
    assert peer.error is None
    assert lines(caplog, logging.WARNING) == []


class Odd(BaseException):
    pass


@pytest.mark.parametrize(
    "left",
    [
        None,
        OSError("gone"),
        RuntimeError("no response returned"),
        ExceptionGroup("x", [ValueError(), OSError()]),
    ],
    ids=repr,
)
async def test_whatever_leaves_the_application_after_it_was_told_is_swallowed(
    left: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "hangup")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await receive()
        if left is not None:
            raise left

    peer = Peer()
    watch = Watch(app)
    async with peer.calling(watch):
        await watched(peer)
        peer.hang_up()
    assert peer.error is None
    assert watch.outcome.state is State.CANCELED
    assert watch.outcome.error is None
    if left is not None:
        assert any(type(left).__name__ in line for line in lines(caplog, logging.DEBUG))


@pytest.mark.parametrize("point", ["http.response.start", "http.response.body"])
@pytest.mark.parametrize(
    ("error", "of_a_client"),
    [
        (ConnectionRefusedError(111, "the store of sessions is down"), False),
        (FileNotFoundError(2, "no template"), False),
        (TimeoutError(), False),
        (TimeoutError(110, "Connection timed out"), True),
        (BrokenPipeError(32, "Broken pipe"), True),
        (ConnectionResetError(), True),
        (OSError(113, "No route to host"), True),
    ],
    ids=repr,
)
async def test_a_middleware_outside_that_fails_in_its_send_is_no_disconnect(
    error: OSError, of_a_client: bool, point: str
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send(START)
        await send(chunk(b"x"))

    peer = Peer()
    watch = Watch(app)

    async def outside(scope: Scope, receive: Receive, send: Send) -> None:
        async def save(message: Message) -> None:
            if message["type"] == point:
                raise error
            await send(message)

        await watch(scope, receive, save)

    await peer.run(outside)
    assert peer.error is (None if of_a_client else error)
    assert watch.outcome.state is (State.CANCELED if of_a_client else State.FAILED)
    assert watch.outcome.cause is (Cause.CLIENT_DISCONNECT if of_a_client else None)
    assert watch.outcome.error is peer.error


async def test_for_a_live_client_nothing_is_swallowed_and_nothing_wrapped() -> None:
    error = ValueError("a bug")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise error

    peer = Peer()
    watch = Watch(app)
    await peer.run(watch)
    assert peer.error is error
    assert watch.outcome.state is State.FAILED
    assert watch.outcome.error is error
    assert peer.sent == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
async def test_the_end_of_the_process_is_never_swallowed(error: type[BaseException], on_trio: bool) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await receive()
        raise error

    peer = Peer()

    async def server() -> None:
        with pytest.raises(error):
            await Watch(app)(peer.scope, peer.receive, peer.send)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server)
        await watched(peer)
        peer.hang_up()


@pytest.mark.parametrize("started", [False, True])
async def test_an_application_that_returns_without_a_response_has_failed(started: bool) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if started:
            await send(START)

    peer = Peer()
    watch = Watch(app)
    await peer.run(watch)
    assert watch.outcome.state is State.FAILED
    assert len(peer.sent) == started


async def test_a_background_task_runs_to_its_end_with_the_client_gone() -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send)
        await anyio.sleep(0.05)  # past the sweeper
        log.append("background")

    peer = Peer()
    watch = Watch(app)
    async with peer.calling(watch):
        await peer.wait_for(lambda: peer.complete)
        peer.hang_up()
    assert log == ["background"]
    assert watch.outcome.state is State.COMPLETED
    assert watch.outcome.cause is None
    assert watch.outcome.delivered


@pytest.mark.parametrize(
    "last",
    [
        [{"type": "http.response.pathsend", "path": "/etc/hostname"}],
        [
            {"type": "http.response.body", "body": b"x", "more_body": False},
            {"type": "http.response.trailers", "headers": [], "more_trailers": True},
            {"type": "http.response.trailers", "headers": []},
        ],
        [{"type": "http.response.body"}],
    ],
    ids=["pathsend", "trailers", "bare body"],
)
async def test_what_counts_as_the_last_frame(last: list[Message]) -> None:
    finished: list[bool] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({**START, "trailers": len(last) == 3})
        for message in last:
            finished.append(current_call().life.finished)
            await send(message)
        finished.append(current_call().life.finished)

    sent: list[Message] = []

    async def take(message: Message) -> None:
        sent.append(message)

    watch = Watch(app)
    await watch(Peer().scope, Peer().receive, take)
    assert finished == [False] * len(last) + [True]
    assert watch.outcome.state is State.COMPLETED
    assert sent[1:] == last


async def test_messages_that_are_no_frames_pass_through() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.early_hint", "links": []})
        await answer(send)

    peer = Peer()
    watch = Watch(app)
    await peer.run(watch)
    assert types(peer.sent) == ["http.response.early_hint", "http.response.start", "http.response.body"]
    assert watch.outcome.state is State.COMPLETED


async def test_a_protocol_error_of_the_application_is_its_own() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send)
        await send(END)

    peer = Peer()
    watch = Watch(app)
    await peer.run(watch)
    assert isinstance(peer.error, RuntimeError)
    assert watch.outcome.state is State.FAILED


@pytest.mark.parametrize("latched", [False, True], ids=["live client", "client gone"])
async def test_the_servers_cancellation_passes_through_after_finalizers_and_record(
    on_trio: bool, latched: bool
) -> None:
    if on_trio:
        return
    ran: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        add_finalizer(lambda: ran.append("finalizer"))
        try:
            await anyio.sleep(60)
        finally:
            await anyio.sleep(0.01)
            ran.append("cleanup")

    peer = Peer()
    watch = Watch(app, policy="finish" if latched else "cancel")
    task = asyncio.ensure_future(watch(peer.scope, peer.receive, peer.send))
    await watched(peer)
    if latched:
        peer.hang_up()
        await anyio.wait_all_tasks_blocked()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ran == ["cleanup", "finalizer"]
    assert watch.outcome.state is State.CANCELED
    assert watch.outcome.cause is (Cause.CLIENT_DISCONNECT if latched else Cause.UNKNOWN)


@pytest.mark.parametrize("left", ["never", "before the end", "after the end"])
async def test_a_background_task_that_the_server_cancels_is_canceled_for_a_cause(left: str, on_trio: bool) -> None:
    if on_trio:
        return
    causes: list[Cause | None] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if left == "before the end":
            await peer.wait_for(lambda: peer.left)
            await until(lambda: current_call().life.left)
        await answer(send)
        if left == "after the end":
            peer.hang_up()
        answered.set()
        try:
            await anyio.sleep(60)
        finally:
            token = current_call().token
            add_finalizer(lambda: causes.append(token.cause))

    answered = anyio.Event()
    peer = Peer()
    watch = Watch(app, policy="finish")
    task = asyncio.ensure_future(watch(peer.scope, peer.receive, peer.send))
    if left == "before the end":
        await watched(peer)
        peer.hang_up()
    await answered.wait()
    await anyio.wait_all_tasks_blocked()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    before = left == "before the end"
    cause = Cause.CLIENT_DISCONNECT if before else Cause.UNKNOWN
    assert (watch.outcome.state, watch.outcome.cause, causes) == (State.CANCELED, cause, [cause])
    assert watch.outcome.phase is (Phase.BEFORE_RESPONSE if before else Phase.AFTER_RESPONSE)
    assert watch.outcome.delivered is not before


async def test_the_servers_cancellation_on_top_of_ours_is_given_back(on_trio: bool) -> None:
    if on_trio:
        return
    cancelled = anyio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await anyio.sleep(60)
        finally:
            cancelled.set()
            await anyio.sleep(60)

    peer = Peer()
    watch = Watch(app)
    task = asyncio.ensure_future(watch(peer.scope, peer.receive, peer.send))
    await watched(peer)
    peer.hang_up()
    await cancelled.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert watch.outcome.state is State.CANCELED
    assert watch.outcome.cause is Cause.CLIENT_DISCONNECT


async def test_a_cancelled_error_that_is_not_anyios_is_still_ours(on_trio: bool) -> None:
    """asgiref hands on a CancelledError of its own making; anyio's scope does not absorb that."""
    if on_trio:
        return

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await anyio.sleep(60)
        except asyncio.CancelledError:
            raise asyncio.CancelledError from None

    peer = Peer()
    watch = Watch(app)
    async with peer.calling(watch):
        await watched(peer)
        peer.hang_up()
    assert peer.error is None
    assert watch.outcome.state is State.CANCELED


async def test_an_observer_that_raises_is_logged_and_isolated(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Outcome] = []

    def bad(outcome: Outcome) -> None:
        raise ValueError("boom")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send)

    peer = Peer()
    await peer.run(HangupMiddleware(app, observers=[bad, seen.append]))
    assert peer.error is None
    assert len(seen) == 1
    assert "An observer raised" in caplog.text


async def test_steps_are_recorded_as_they_ended() -> None:
    @step("decorated")
    async def decorated(x: int) -> int:
        return x + 1

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert await decorated(1) == 2
        with pytest.raises(ValueError, match="bad"), step("fails"):
            raise ValueError("bad")
        async with step("outer", {"a": 1}) as outer:
            assert outer.attributes == {"a": 1}
            with step("inner"):
                assert current_call().steps_in_flight == ("outer", "inner")
                await anyio.sleep(60)

    peer = Peer()
    watch = Watch(app)
    async with peer.calling(watch):
        await watched(peer)
        peer.hang_up()
    assert [(s.name, s.state) for s in watch.outcome.steps] == [
        ("decorated", State.COMPLETED),
        ("fails", State.FAILED),
        ("inner", State.CANCELED),
        ("outer", State.CANCELED),
    ]
    assert all(s.duration >= 0 and s.started >= 0 for s in watch.outcome.steps)
    assert watch.outcome.in_flight == ("inner", "outer")


async def test_a_step_left_open_is_swept_when_its_call_ends() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        step("left open").__enter__()
        await answer(send)

    peer = Peer()
    watch = Watch(app)
    await peer.run(watch)
    [record] = watch.outcome.steps
    assert (record.name, record.state) == ("left open", State.CANCELED)


async def test_a_step_is_entered_once(caplog: pytest.LogCaptureFixture) -> None:
    once = step("once")
    with once:
        pass
    assert once.state is State.COMPLETED
    assert "once" in repr(once)
    ended = once.ended
    with pytest.raises(ValueError, match="the work's own"), once:
        raise ValueError("the work's own")
    assert (once.state, once.ended) == (State.COMPLETED, ended)
    assert lines(caplog) == ["step('once') was entered before: make a new step for each piece of work"]
    twice = step("twice")
    with twice, twice:
        assert twice.state is None
    assert twice.state is State.COMPLETED
    with pytest.raises(TypeError, match="a name"):
        step("")


async def test_misuse_of_steps_is_named_at_once() -> None:
    def plain() -> None: ...

    async def parts() -> AsyncIterator[None]:
        yield

    wrong: Any
    for wrong in (plain, parts, lambda: None, Step, 1):
        with pytest.raises(TypeError, match="decorates a coroutine function, not"):
            step("x")(wrong)
    for right in (anyio.sleep, functools.partial(anyio.sleep, 1), AsyncMock(), Peer().receive):
        step("x")(right)
    with pytest.raises(TypeError, match="takes attributes by name"):
        step("x", ["a"])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"step\(effect=\) is True or False, not 'no'"):
        step("x", effect="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"step\(cancel=\) takes a function without arguments, not .* requires 1"):
        step("x", cancel=_awaited)  # type: ignore[arg-type]


async def test_a_thousand_steps_are_kept_and_the_rest_counted() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for _ in range(1005):
            with step("s"):
                pass
        await answer(send)

    peer = Peer()
    watch = Watch(app)
    await peer.run(watch)
    assert len(watch.outcome.steps) == 1000
    assert watch.outcome.steps_omitted == 5


async def test_free_functions_outside_a_call_name_the_likely_mistake() -> None:
    for free in (current_call, lambda: add_finalizer(print)):
        with pytest.raises(LookupError, match="is HangupMiddleware mounted, and outermost"):
            free()
    with step("outside a call"):
        pass


async def test_the_call_is_reachable_through_scope_and_state_and_ends_with_the_call() -> None:
    calls: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        call = current_call()
        assert call is scope["extensions"]["hangup"]
        assert call is scope["state"]["hangup"]
        assert scope["state"]["kept"] == 1
        assert call.token is call.token
        assert call.outcome is None
        assert "waiting" in repr(call)
        calls.append(call)
        await answer(send)

    peer = Peer(extra={"state": {"kept": 1}, "extensions": {"other": {}}})
    await peer.run(HangupMiddleware(app))
    assert peer.error is None
    [call] = calls
    assert call.token.finished
    assert call.outcome.state is State.COMPLETED
    assert not call.cancel()
    assert "completed" in repr(call)
    assert peer.scope["state"] == {"kept": 1}
    with pytest.raises(LookupError):
        current_call()


async def test_send_after_the_end_raises() -> None:
    kept: list[Send] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        kept.append(send)
        await answer(send)

    peer = Peer()
    await peer.run(Watch(app))
    with pytest.raises(OSError, match="the call has ended"):
        await kept[0](END)
    assert len(peer.sent) == 2


async def test_send_from_ten_tasks_at_once() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def emit(body: bytes) -> None:
            await send(chunk(body))

        await send(START)
        async with anyio.create_task_group() as tasks:
            for n in range(10):
                tasks.start_soon(emit, b"%d" % n)
        await send(END)

    peer = Peer()
    watch = Watch(app)
    await peer.run(watch)
    assert sorted(peer.body) == sorted(b"0123456789")
    assert watch.outcome.state is State.COMPLETED


async def test_mounted_twice_the_inner_one_steps_aside() -> None:
    inner: list[Outcome] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await anyio.sleep(60)

    peer = Peer()
    watch = Watch(HangupMiddleware(app, observers=[inner.append]))
    async with peer.calling(watch):
        await watched(peer)
        peer.hang_up()
    assert watch.outcome.state is State.CANCELED
    assert inner == []


async def test_options_of_the_inner_one_of_two_count_for_nothing_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send)

    for _ in range(2):
        await Peer().run(HangupMiddleware(HangupMiddleware(app)))
    assert lines(caplog) == []
    twice = HangupMiddleware(HangupMiddleware(app, grace=10, timeout=5, observers=[print]), timeout=5)
    for _ in range(2):
        await Peer().run(twice)
    [said] = lines(caplog, logging.WARNING)
    assert "timeout, observers" in said
    assert "grace" not in said


async def test_other_scopes_pass_through() -> None:
    seen: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((scope, receive, send))

    peer = Peer()
    scope = {"type": "something.new"}
    await HangupMiddleware(app)(scope, peer.receive, peer.send)
    assert seen == [(scope, peer.receive, peer.send)]


async def test_calls_of_one_connection_share_nothing() -> None:
    tokens: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        tokens.append(current_call().token)
        if scope["path"] == "/slow":
            await anyio.sleep(60)
        await answer(send)

    app_ = Watch(app)
    slow, quick = Peer(path="/slow"), Peer(path="/quick")
    async with slow.calling(app_):
        await watched(slow)
        slow.hang_up()
        await quick.run(app_)
    assert [t.cause for t in tokens] == [Cause.CLIENT_DISCONNECT, None]


async def _awaited(_: object) -> None: ...


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"policy": "abort"}, ValueError, "policy is one of 'cancel', 'signal', 'finish', not 'abort'"),
        ({"policy": 3}, TypeError, "policy takes 'cancel', 'signal', 'finish', a Policy, or a function"),
        ({"grace": -1}, ValueError, "grace takes 0 or more seconds, not -1"),
        ({"grace": "10"}, TypeError, "grace takes seconds, not '10'"),
        ({"grace": float("nan")}, ValueError, "grace takes 0 or more seconds"),
        ({"finalizer_timeout": 0}, ValueError, "finalizer_timeout takes more than 0 seconds"),
        ({"finalizer_budget": True}, TypeError, "finalizer_budget takes seconds, not True"),
        ({"read_ahead": 1.5}, TypeError, "read_ahead takes a number of bytes, not 1.5"),
        ({"read_ahead": -1}, ValueError, "read_ahead takes 0 bytes or more"),
        ({"present_spec": "2.3"}, ValueError, "present_spec is '2.4' or 'server'"),
        ({"observers": 1}, TypeError, "observers takes a list of functions, not 1"),
        ({"observers": ["x"]}, TypeError, "observers takes functions of an Outcome, not 'x'"),
        ({"observers": [_awaited]}, TypeError, "observers takes functions that are not awaited"),
        ({"observers": [AsyncMock()]}, TypeError, "observers takes functions that are not awaited"),
        ({"policy": _awaited}, TypeError, "policy takes 'cancel', 'signal', 'finish', a Policy, or a function"),
        ({"policy": Policy}, TypeError, "policy takes 'cancel', 'signal', 'finish', a Policy, or a function"),
        ({"policy": lambda: Policy()}, TypeError, "a Policy, or a function of the scope, not <function"),
        ({"observers": [lambda: None]}, TypeError, "observers takes functions of an Outcome, not <function"),
        ({"cancel_status": lambda: "error"}, TypeError, "a function of the Cause, not <function"),
        ({"journal": type("Journal", (), {"open_run": print})}, TypeError, "such as Journal('sqlite:///runs.db'), not"),
        ({"policies": None}, TypeError, "policies takes Policy objects by name, not None"),
        ({"policies": [1]}, TypeError, "policies takes Policy objects by name, not [1]"),
        ({"policies": {"x": "finish"}}, TypeError, "policies takes Policy objects by name, not 'x': 'finish'"),
        ({"policies": {1: Policy()}}, TypeError, "policies takes Policy objects by name, not 1: Policy"),
        ({"policies": {"finish": Policy("finish")}}, ValueError, "policies takes names of your own, not 'finish'"),
        ({"present_spec": []}, ValueError, "present_spec is '2.4' or 'server', not []"),
        ({"typo": 1}, TypeError, "typo"),
    ],
)
def test_a_wrong_option_is_named_with_its_choices(options: Any, error: type[Exception], text: str) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        pass

    with pytest.raises(error) as caught:
        HangupMiddleware(app, **options)
    assert text in str(caught.value)


@pytest.mark.parametrize("kind", [Peer, WebSocketPeer])
@pytest.mark.parametrize("found", ["finish", None, ValueError("broken")])
async def test_a_policy_function_that_is_wrong_fails_its_call_and_no_other(found: Any, kind: Any) -> None:
    policies: list[Any] = [found, Policy("finish")]

    def choose(scope: Scope) -> Policy:
        policy = policies.pop(0)
        if isinstance(policy, Exception):
            raise policy
        return policy  # type: ignore[no-any-return]

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send)

    watch = Watch(app, policy=choose)
    peer = kind()
    await peer.run(watch)
    if isinstance(found, Exception):
        assert peer.error is found
    else:
        assert isinstance(peer.error, TypeError)
        assert f"returned {found!r}" in str(peer.error)
    assert peer.sent == []
    outcome = watch.outcomes.pop()
    assert (outcome.state, outcome.cause, outcome.error) == (State.FAILED, None, peer.error)
    assert watch.app.calls_in_flight == ()
    with pytest.raises(LookupError):
        current_call()
    peer = Peer()
    await peer.run(watch)
    assert (peer.error, peer.status, watch.outcome.state) == (None, 200, State.COMPLETED)
    with anyio.fail_after(5):
        assert await watch.app.drain(4)


def test_what_is_mounted_must_be_an_application() -> None:
    class Application:
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    def wsgi(environ: Any, start_response: Any) -> None: ...

    wrong: Any
    for wrong in ("app", None, Application, HangupMiddleware, wsgi, lambda: Application()):
        with pytest.raises(TypeError, match="wraps an ASGI application"):
            HangupMiddleware(wrong)

    class Mute(Application):
        __signature__ = "none"

    for right in (
        Application(),
        Mute(),
        functools.partial(Application.__call__, Application()),
        AsyncMock(),
        HTTPEndpoint,
    ):
        HangupMiddleware(right)


async def test_a_server_that_was_given_the_class_is_told_so() -> None:
    scope: Any = {"type": "http", "path": "/"}
    with pytest.raises(
        TypeError, match=r"the server was given the class HangupMiddleware: give it HangupMiddleware\(app"
    ):
        HangupMiddleware(scope)  # as uvicorn calls what it takes for an application of ASGI 2


def test_a_policy_is_one_of_three() -> None:
    with pytest.raises(ValueError, match="policy is one of"):
        Policy("abort")  # type: ignore[arg-type]


def test_a_peer_takes_lists() -> None:
    wrong: Any
    for wrong in (b"body", "body"):
        with pytest.raises(TypeError, match=r"body takes a list, \[b?'body'\] for one"):
            Peer(method="POST", body=wrong)
        with pytest.raises(TypeError, match="messages takes a list"):
            WebSocketPeer(messages=wrong)
    with pytest.raises(TypeError, match="headers takes a list of pairs"):
        Peer(headers={"accept": "*/*"})  # type: ignore[dict-item]


def test_the_import_is_light() -> None:
    code = (
        "import sys, hangup; "
        "print([m for m in ('starlette.routing', 'starlette.applications', 'fastapi', 'trio', 'opentelemetry.sdk', "
        "'sqlalchemy', 'uvicorn', 'rich') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


async def test_nothing_is_left_after_many_calls(on_trio: bool) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        add_finalizer(lambda: None)
        await anyio.sleep(60)

    watch = Watch(app)
    before = len(asyncio.all_tasks()) if not on_trio else 0
    async with anyio.create_task_group() as tasks:
        peers = [Peer() for _ in range(20)]
        for peer in peers:
            tasks.start_soon(peer.run, watch)
        for peer in peers:
            await watched(peer)
            peer.hang_up()
    here = next(iter(watch.app._heres.values()))
    assert here.calls == set()
    assert len(watch.outcomes) == 20
    if not on_trio:
        await until(lambda: len(asyncio.all_tasks()) == before)
    from hangup import _runtime

    await until(lambda: not _runtime._jobs)


async def test_the_servers_cancellation_in_the_turn_of_the_hang_up_is_not_taken_for_ours(on_trio: bool) -> None:
    """The ``send`` that is released had been cancelled by the server already."""
    if on_trio:
        return

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await watched(peer)  # so the watcher is the first to be woken
        peer.stop_reading()
        blocked.set()
        await send(START)

    blocked = anyio.Event()
    peer = Peer(quirks=Quirks(send_stays_blocked=True))
    watch = Watch(app)
    task = asyncio.ensure_future(watch(peer.scope, peer.receive, peer.send))
    await blocked.wait()
    peer.hang_up()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert watch.outcome.cause is Cause.CLIENT_DISCONNECT


@pytest.mark.parametrize("fails", [False, True])
async def test_the_servers_cancellation_while_hooks_run_comes_out_after_them(fails: bool, on_trio: bool) -> None:
    if on_trio:
        return

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await anyio.sleep(0)

        @before_success
        async def commit() -> None:
            task.cancel()
            await anyio.sleep(0.01)
            if fails:
                raise RuntimeError("no")

        await answer(send, body=b"saved")
        await anyio.sleep(60)

    peer = Peer()
    watch = Watch(app)
    task = asyncio.ensure_future(watch(peer.scope, peer.receive, peer.send))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert peer.status == (500 if fails else 200)
    assert peer.complete
    # The cancel is the server's, and what was to come after the response did not.
    assert watch.outcome.state is (State.FAILED if fails else State.CANCELED)


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "after a while"])
async def test_a_last_send_that_never_returns_is_let_go_when_the_client_has_left(at_once: bool) -> None:
    """hypercorn over HTTP/2: of a connection that is lost, the ``send`` of the last frame never returns."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if not at_once:
            await watched(peer)
        peer.stop_reading()
        await answer(send, body=b"large")

    peer = Peer(quirks=Quirks(send_stays_blocked=True))
    watch = Watch(app)
    async with peer.calling(watch):
        await watched(peer)
        peer.hang_up()
    assert peer.error is None
    assert (watch.outcome.state, watch.outcome.delivered) == (State.COMPLETED, False)


async def test_send_timeout_lets_go_of_the_last_frame(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        peer.stop_reading()
        await send(END)

    peer = Peer()
    watch = Watch(app, send_timeout=0.05)
    async with peer.calling(watch):
        pass
    assert (watch.outcome.state, watch.outcome.cause, watch.outcome.delivered) == (State.COMPLETED, None, False)
    assert caplog.text == ""
