"""WebSockets: the same life, the message first, and what the ends of clients mean."""

from __future__ import annotations

import logging
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import WebSocketRoute
from starlette.types import Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from hangup import (
    Cause,
    HookFailure,
    Outcome,
    Phase,
    Policy,
    State,
    add_finalizer,
    before_success,
    current_call,
    protect,
    step,
)
from hangup.testing import Quirks, WebSocketPeer

from .helpers import Watch, types, until

pytestmark = pytest.mark.anyio

ACCEPT = {"type": "websocket.accept"}
CLOSE = {"type": "websocket.close", "code": 1000}
ONCE = Quirks(latched=False)
RAISES = Quirks(send_error=OSError("gone"))


def text(message: str) -> dict[str, Any]:
    return {"type": "websocket.send", "text": message}


async def accept(receive: Receive, send: Send) -> None:
    assert (await receive())["type"] == "websocket.connect"
    await send(ACCEPT)


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """A handler that listens, and returns when the client has gone."""
    await accept(receive, send)
    while (message := await receive())["type"] == "websocket.receive":
        await send({**message, "type": "websocket.send"})


async def reading(peer: WebSocketPeer) -> None:
    """Wait until the server's ``receive`` is pending, with everything before it taken."""
    await peer.wait_for(lambda: peer.accepted and peer.reading and not peer.unread)


def summary(outcome: Outcome) -> tuple[Any, ...]:
    return (outcome.state, outcome.cause, outcome.close_code)


# ---------------------------------------------------------------------- how it ends


@pytest.mark.parametrize(
    ("leave", "state", "cause", "code"),
    [
        (lambda peer: peer.close(1000), State.COMPLETED, Cause.CLIENT_DISCONNECT, 1000),
        (lambda peer: peer.close(1001), State.COMPLETED, Cause.CLIENT_DISCONNECT, 1001),
        (lambda peer: peer.close(4321), State.COMPLETED, Cause.CLIENT_DISCONNECT, 4321),
        (lambda peer: peer.close(1005), State.COMPLETED, Cause.CLIENT_DISCONNECT, 1005),
        (lambda peer: peer.close(1002), State.CANCELED, Cause.CLIENT_DISCONNECT, 1002),
        (lambda peer: peer.close(1011), State.CANCELED, Cause.CLIENT_DISCONNECT, 1011),
        (lambda peer: peer.hang_up(), State.CANCELED, Cause.CLIENT_DISCONNECT, 1005),
        (lambda peer: peer.shut_down(), State.CANCELED, Cause.SERVER_SHUTDOWN, 1012),
    ],
    ids=["1000", "1001", "4321", "no code", "1002", "1011", "vanished", "1012"],
)
@pytest.mark.parametrize("quirks", [Quirks(), ONCE], ids=["latched", "once"])
async def test_how_a_client_leaves_a_handler_that_listens(
    leave: Any, state: State, cause: Cause, code: int, quirks: Quirks
) -> None:
    ran: list[Outcome] = []
    got: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        add_finalizer(lambda outcome: ran.append(outcome))
        await echo(scope, receive, send)
        got.extend([await receive(), await receive()])  # latched
        await anyio.sleep(0)  # not interrupted

    peer = WebSocketPeer(quirks=quirks, messages=["hello", b"\x00"])
    watch = Watch(app)
    async with peer.calling(watch):
        await reading(peer)
        leave(peer)
    assert peer.received == ["hello", b"\x00"]
    assert summary(watch.outcome) == (state, cause, code)
    assert (watch.outcome.phase, watch.outcome.status_code) == (Phase.DURING_RESPONSE, 101)
    assert watch.outcome.delivered is (state is State.COMPLETED)
    assert [m["code"] for m in got] == [code, code]
    assert len(ran) == 1
    assert peer.error is None


@pytest.mark.parametrize("code", [1005, 1006])
async def test_whatever_code_the_server_invents_a_vanished_client_is_canceled(code: int) -> None:
    peer = WebSocketPeer(quirks=Quirks(vanished_code=code))
    watch = Watch(echo)
    async with peer.calling(watch):
        await reading(peer)
        peer.hang_up()
    assert summary(watch.outcome) == (State.CANCELED, Cause.CLIENT_DISCONNECT, code)
    assert not watch.outcome.delivered


async def test_hypercorns_1006_for_a_proper_close_is_believed() -> None:
    peer = WebSocketPeer(quirks=Quirks(closed_code=1006))
    watch = Watch(echo)
    async with peer.calling(watch):
        await reading(peer)
        peer.close(1000)
    assert summary(watch.outcome) == (State.CANCELED, Cause.CLIENT_DISCONNECT, 1006)


@pytest.mark.parametrize(
    ("code", "state"),
    [
        (1000, State.COMPLETED),
        (1008, State.COMPLETED),
        (4000, State.COMPLETED),
        (1011, State.FAILED),
        (1012, State.FAILED),
        (1013, State.FAILED),
    ],
)
async def test_the_application_closes(code: int, state: State) -> None:
    got: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await accept(receive, send)
        await send({"type": "websocket.close", "code": code})
        got.append(await receive())

    peer = WebSocketPeer()
    watch = Watch(app)
    await peer.run(watch)
    assert peer.close_code == code
    assert summary(watch.outcome) == (state, None, code)
    assert watch.outcome.delivered
    assert got[0] == {"type": "websocket.disconnect", "code": code, "reason": ""}


async def test_a_return_without_a_close_is_an_end_too() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await accept(receive, send)
        await send(text("bye"))

    peer = WebSocketPeer()
    watch = Watch(app)
    await peer.run(watch)
    assert types(peer.sent) == ["websocket.accept", "websocket.send"]  # the rest is left to the server
    assert summary(watch.outcome) == (State.COMPLETED, None, None)


async def test_an_exception_for_a_live_client_is_a_failure_and_passes_through() -> None:
    error = ValueError("a bug")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await accept(receive, send)
        raise error

    peer = WebSocketPeer()
    watch = Watch(app)
    await peer.run(watch)
    assert peer.error is error
    assert watch.outcome.state is State.FAILED
    assert watch.outcome.error is error


async def test_a_return_before_accept_has_failed() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()

    peer = WebSocketPeer()
    watch = Watch(app)
    await peer.run(watch)
    assert watch.outcome.state is State.FAILED
    assert peer.sent == []


async def test_refusing_the_handshake() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.close"})

    peer = WebSocketPeer()
    watch = Watch(app)
    await peer.run(watch)
    assert peer.status == 403
    assert (watch.outcome.state, watch.outcome.status_code) == (State.COMPLETED, 403)


@pytest.mark.parametrize(("status", "state"), [(401, State.COMPLETED), (503, State.FAILED)])
async def test_a_denial_response(status: int, state: State) -> None:
    async def deny(ws: WebSocket) -> None:
        await ws.send_denial_response(PlainTextResponse("no", status))

    peer = WebSocketPeer()
    watch = Watch(Starlette(routes=[WebSocketRoute("/", deny)]))
    await peer.run(watch)
    assert peer.status == status
    assert (watch.outcome.state, watch.outcome.status_code) == (state, status)
    assert watch.outcome.phase is Phase.AFTER_RESPONSE


# ---------------------------------------------------------------------- message, grace, interruption


@pytest.mark.parametrize("leave", ["close", "hang_up"])
async def test_a_handler_that_does_not_listen_is_interrupted_after_its_grace(leave: str) -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await accept(receive, send)
        call = current_call()
        try:
            with step("the model"):
                await call.token.wait()
                log.append("token")
                await anyio.sleep(60)
        finally:
            await checkpoint() if call.work.native else None
            log.append("interrupted once")

    peer = WebSocketPeer()
    watch = Watch(app, grace=0.05)
    async with peer.calling(watch):
        await reading(peer)
        getattr(peer, leave)()
    assert log == ["token", "interrupted once"]
    assert watch.outcome.state is State.CANCELED  # also after a goodbye: the work was cut off
    assert watch.outcome.in_flight == ("the model",)
    assert watch.outcome.stop_latency is not None
    assert watch.outcome.stop_latency > 0.045  # uvloop counts whole milliseconds


async def test_a_handler_that_receives_later_gets_the_message_and_no_interruption() -> None:
    got: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await accept(receive, send)
        await until(lambda: current_call().cause)
        await anyio.sleep(0.02)  # would be interrupted here
        got.append(await receive())
        await anyio.sleep(0.02)  # or here

    peer = WebSocketPeer()
    watch = Watch(app)
    async with peer.calling(watch):
        await reading(peer)
        peer.hang_up()
    assert got == [{"type": "websocket.disconnect", "code": 1005}]
    assert watch.outcome.state is State.CANCELED


async def test_a_listener_that_carries_on_is_interrupted_after_its_grace() -> None:
    got: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await echo(scope, receive, send)
        got.append("message")
        try:
            await anyio.sleep(60)
        finally:
            got.append("interrupted")

    peer = WebSocketPeer()
    watch = Watch(app, policy=Policy("cancel", grace=0.02))
    async with peer.calling(watch):
        await reading(peer)
        peer.close()
    assert got == ["message", "interrupted"]
    assert watch.outcome.state is State.CANCELED


async def test_leaving_a_protected_section_does_not_end_the_grace() -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await accept(receive, send)
        with protect():
            await until(lambda: current_call().life.left)
        await anyio.sleep(0.02)
        log.append((await receive())["type"])

    peer = WebSocketPeer()
    async with peer.calling(Watch(app)):
        await reading(peer)
        peer.hang_up()
    assert log == ["websocket.disconnect"]


@pytest.mark.parametrize("quirks", [Quirks(), RAISES], ids=["silent", "raising"])
@pytest.mark.parametrize(
    ("leave", "state"),
    [("close", State.COMPLETED), ("hang_up", State.CANCELED)],
)
async def test_a_handler_that_only_sends_learns_of_the_close(quirks: Quirks, leave: str, state: State) -> None:
    errors: list[BaseException] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await accept(receive, send)
        try:
            while True:
                await send(text("tick"))
                await anyio.sleep(0.001)
        except OSError as exc:
            errors.append(exc)
            raise

    peer = WebSocketPeer(quirks=quirks)
    watch = Watch(app)
    async with peer.calling(watch):
        await peer.wait_for(lambda: len(peer.received) == 3)
        getattr(peer, leave)()
    assert len(errors) == 1
    assert peer.error is None
    assert watch.outcome.state is state
    assert watch.outcome.cause is Cause.CLIENT_DISCONNECT


async def test_a_server_whose_send_raises_and_says_no_more_has_lost_its_client() -> None:
    class Mute(WebSocketPeer):
        async def receive(self) -> Message:
            if self.reads:
                await anyio.sleep_forever()
            return await super().receive()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await accept(receive, send)
        await peer.wait_for(lambda: peer.left)
        await send(text("late"))

    peer = Mute(quirks=RAISES)
    watch = Watch(app)
    async with peer.calling(watch):
        await peer.wait_for(lambda: peer.accepted)
        peer.hang_up()
    assert summary(watch.outcome) == (State.CANCELED, Cause.CLIENT_DISCONNECT, 1006)
    assert peer.error is None


async def test_a_runtime_error_from_a_dead_transport_is_a_disconnect() -> None:
    """gunicorn on uvloop, a client that leaves before it is accepted; uvicorn's legacy implementation."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await peer.wait_for(lambda: peer.left)
        await send(ACCEPT)

    peer = WebSocketPeer(quirks=Quirks(send_error=RuntimeError("unable to perform operation on closed transport")))
    watch = Watch(app)
    async with peer.calling(watch):
        await peer.wait_for(lambda: peer.reads)
        peer.hang_up()
    assert peer.error is None
    assert summary(watch.outcome) == (State.CANCELED, Cause.CLIENT_DISCONNECT, 1006)


async def test_a_blocked_send_is_released() -> None:
    released: list[BaseException] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await accept(receive, send)
        peer.stop_reading()
        try:
            await send(text("x"))
        except OSError as exc:
            released.append(exc)

    peer = WebSocketPeer(quirks=Quirks(send_stays_blocked=True))
    watch = Watch(app)
    async with peer.calling(watch):
        await reading(peer)
        peer.hang_up()
    assert len(released) == 1
    assert watch.outcome.state is State.CANCELED


async def test_a_handler_with_a_listening_task_has_its_blocked_send_released() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def listen() -> None:
            await receive()

        await accept(receive, send)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listen)
            await until(lambda: peer.reading)
            peer.stop_reading()
            await send(text("x"))

    peer = WebSocketPeer(quirks=Quirks(send_stays_blocked=True))
    watch = Watch(app)
    async with peer.calling(watch):
        await reading(peer)
        await anyio.wait_all_tasks_blocked()
        with anyio.fail_after(5):  # less than the grace
            peer.hang_up()
            await peer.wait_for(lambda: peer.ended)
    assert watch.outcome.state is State.CANCELED


async def test_policy_signal_tells_and_never_interrupts() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await accept(receive, send)
        await current_call().token.wait()
        await anyio.sleep(0.05)

    peer = WebSocketPeer()
    watch = Watch(app, policy="signal", grace=0.01)
    async with peer.calling(watch):
        await reading(peer)
        peer.hang_up()
    assert summary(watch.outcome) == (State.CANCELED, Cause.CLIENT_DISCONNECT, 1005)


async def test_policy_finish_carries_on_and_says_it_was_not_delivered() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await accept(receive, send)
        await until(lambda: current_call().life.left)
        await send(text("into the void"))
        await send(CLOSE)

    peer = WebSocketPeer()
    watch = Watch(app, policy="finish")
    async with peer.calling(watch):
        await reading(peer)
        peer.hang_up()
    assert watch.outcome.state is State.COMPLETED
    assert not watch.outcome.delivered


@pytest.mark.parametrize(
    ("cause", "code", "status"),
    [(Cause.REQUESTED, 1001, 499), (Cause.TIMEOUT, 1013, 504)],
    ids=["requested", "timeout"],
)
@pytest.mark.parametrize("point", ["accepted", "before", "before, no denial"])
@pytest.mark.usefixtures("beginning_in_time")
async def test_a_live_client_is_told_why_it_is_closed(cause: Cause, code: int, status: int, point: str) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        if point == "accepted":
            await send(ACCEPT)
        if cause is Cause.REQUESTED:
            current_call().cancel()
        await anyio.sleep(60)

    peer = WebSocketPeer(extra={} if "no denial" not in point else {"extensions": None})
    watch = Watch(app, timeout=0.03 if cause is Cause.TIMEOUT else None)
    await peer.run(watch)
    assert watch.outcome.cause is cause
    assert watch.outcome.state is (State.TIMED_OUT if cause is Cause.TIMEOUT else State.CANCELED)
    if point == "accepted":
        assert (peer.close_code, watch.outcome.close_code) == (code, code)
        assert watch.outcome.status_code == 101
    else:
        assert peer.status == watch.outcome.status_code == (status if point == "before" else 403)
    assert len(peer.sent) == (1 if point == "before, no denial" else 2)


# ---------------------------------------------------------------------- before accept, after the end


@pytest.mark.parametrize("quirks", [Quirks(), RAISES], ids=["silent", "raising"])
async def test_leaving_before_accept(quirks: Quirks, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)

    async def handler(ws: WebSocket) -> None:
        await peer.wait_for(lambda: peer.left)
        await anyio.sleep(0.05)
        await ws.accept()
        await ws.send_text("hello")
        await ws.close()

    peer = WebSocketPeer(quirks=quirks)
    watch = Watch(Starlette(routes=[WebSocketRoute("/", handler)]))
    async with peer.calling(watch):
        await peer.wait_for(lambda: peer.reading)
        peer.hang_up()
    assert peer.error is None
    assert summary(watch.outcome) == (State.CANCELED, Cause.CLIENT_DISCONNECT, 1006)
    assert watch.outcome.phase is Phase.BEFORE_RESPONSE
    assert peer.sent == []
    assert caplog.records == []


async def test_a_close_after_the_disconnect_is_dropped_and_a_send_raises() -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await echo(scope, receive, send)
        await send(CLOSE)
        await send(CLOSE)
        try:
            await send(text("late"))
        except OSError:
            log.append("OSError")
        await send(CLOSE)

    peer = WebSocketPeer()
    watch = Watch(app)
    async with peer.calling(watch):
        await reading(peer)
        peer.hang_up()
    assert log == ["OSError"]
    assert peer.late == []
    assert watch.outcome.close_code == 1005


async def test_after_its_own_close_a_send_raises_and_leaves_no_traceback() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await accept(receive, send)
        await send(CLOSE)
        await send(CLOSE)
        await send(text("late"))

    peer = WebSocketPeer()
    watch = Watch(app)
    await peer.run(watch)
    assert peer.error is None
    assert types(peer.sent) == ["websocket.accept", "websocket.close"]
    assert summary(watch.outcome) == (State.COMPLETED, None, 1000)


async def test_after_the_call_a_task_that_sends_is_told_and_one_that_closes_is_not() -> None:
    kept: list[tuple[Receive, Send]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        kept.append((receive, send))
        await accept(receive, send)

    peer = WebSocketPeer()
    watch = Watch(app)
    await peer.run(watch)
    [(receive, send)] = kept
    await send(CLOSE)
    with pytest.raises(OSError, match="the call has ended"):
        await send(text("late"))
    assert await receive() == {"type": "websocket.disconnect", "code": 1006, "reason": ""}
    assert types(peer.sent) == ["websocket.accept"]


@pytest.mark.parametrize("leave", ["close", "hang_up"])
async def test_starlettes_disconnect_is_no_traceback(leave: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)

    async def handler(ws: WebSocket) -> None:
        await ws.accept()
        while True:
            await ws.send_text(await ws.receive_text())

    peer = WebSocketPeer(messages=["a"])
    watch = Watch(Starlette(routes=[WebSocketRoute("/", handler)]))
    async with peer.calling(watch):
        await peer.wait_for(lambda: peer.received == ["a"])
        getattr(peer, leave)()
    assert peer.error is None
    assert watch.outcome.error is None
    assert watch.outcome.state is (State.COMPLETED if leave == "close" else State.CANCELED)
    assert caplog.records == []


# ---------------------------------------------------------------------- reading ahead


async def test_every_message_arrives_once_and_in_order_whoever_read_it() -> None:
    expected = [str(n) for n in range(300)]
    got: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await accept(receive, send)
        while len(got) < len(expected):
            if len(got) in {30, 120, 250}:
                await peer.wait_for(lambda: peer.reading)  # the watcher has read what there is
            if len(got) % 50:
                got.append((await receive())["text"])
            else:
                with anyio.move_on_after(0.001):  # a heartbeat: it gives up a wait, and no message
                    while len(got) < len(expected):
                        got.append((await receive())["text"])
        await send(CLOSE)

    peer = WebSocketPeer(messages=expected[:200])
    watch = Watch(app)
    async with peer.calling(watch):
        for message in expected[200:]:
            peer.say(message)
            await checkpoint()
    assert got == expected
    assert watch.outcome.state is State.COMPLETED


@pytest.mark.parametrize("message", ["x" * 1000, b"x" * 1000, ""], ids=["text", "bytes", "empty"])
async def test_the_read_ahead_is_bounded_and_the_record_says_so(message: str | bytes) -> None:
    got: list[Any] = []
    go_on = anyio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await accept(receive, send)
        await go_on.wait()
        while (m := await receive())["type"] == "websocket.receive":
            got.append(m.get("text", m.get("bytes")))

    peer = WebSocketPeer(messages=[message] * 100)
    watch = Watch(app, read_ahead=3000)
    async with peer.calling(watch):
        await peer.wait_for(lambda: peer.reads > 2)
        await anyio.wait_all_tasks_blocked()
        held = 100 - peer.unread
        assert held == (3 if message else 47)
        peer.close()
        go_on.set()
    assert got == [message] * 100
    assert watch.outcome.detection_suspended
    assert watch.outcome.state is State.COMPLETED


async def test_messages_before_the_disconnect_are_delivered_before_it() -> None:
    got: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await accept(receive, send)
        await until(lambda: current_call().cause)
        while (message := await receive())["type"] == "websocket.receive":
            got.append(message["text"])

    peer = WebSocketPeer(messages=["a", "b"])
    watch = Watch(app)
    async with peer.calling(watch):
        await reading(peer)
        peer.hang_up()
    assert got == ["a", "b"]
    assert watch.outcome.state is State.CANCELED


# ---------------------------------------------------------------------- success, and the rest


@pytest.mark.parametrize("closes", [True, False], ids=["close", "return"])
@pytest.mark.parametrize("fails", [True, False], ids=["fails", "succeeds"])
async def test_before_success_runs_before_the_end_is_visible(closes: bool, fails: bool) -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await accept(receive, send)

        @before_success
        async def commit() -> None:
            log.append(f"commit, close sent: {peer.close_code}")
            if fails:
                raise HookFailure("no")

        if closes:
            await send(CLOSE)

    peer = WebSocketPeer()
    watch = Watch(app)
    await peer.run(watch)
    assert log == ["commit, close sent: None"]
    assert watch.outcome.state is (State.FAILED if fails else State.COMPLETED)
    assert peer.close_code == (1011 if fails else 1000 if closes else None)
    assert watch.outcome.close_code == peer.close_code


@pytest.mark.parametrize("fails", [True, False], ids=["fails", "succeeds"])
@pytest.mark.parametrize("policy", ["cancel", "signal", "finish"])
@pytest.mark.parametrize("how", ["returns", "raises", "closes", "did not read on", "did not read on, and closes"])
async def test_a_goodbye_is_no_success_before_the_hooks(how: str, policy: str, fails: bool) -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await accept(receive, send)

        @before_success
        async def commit() -> None:
            log.append("commit")
            if fails:
                raise HookFailure("no")

        await reading(peer)
        with protect():
            peer.close()
            await until(lambda: current_call().life.left)
            if "read on" not in how:
                assert (await receive())["type"] == "websocket.disconnect"
            if "closes" in how:
                await send(CLOSE)
        if how == "raises":
            raise WebSocketDisconnect

    peer = WebSocketPeer()
    watch = Watch(app, policy=policy)
    await peer.run(watch)
    assert log == ["commit"]
    assert watch.outcome.state is (State.FAILED if fails else State.COMPLETED)
    assert peer.error is None


async def test_the_call_is_reachable_and_named() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["extensions"]["hangup"] is current_call()
        assert scope["asgi"]["spec_version"] == "2.4"
        assert repr(current_call()) == "<Call WEBSOCKET '/chat' waiting>"
        await send(CLOSE)

    peer = WebSocketPeer(path="/chat")
    await peer.run(Watch(app))
    assert peer.error is None


async def test_send_only_on_a_server_that_never_tells_is_watched_lazily() -> None:
    """Nothing is started for a connection that ends at once."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await accept(receive, send)
        await send(text("x"))
        await send(CLOSE)

    peer = WebSocketPeer()
    await peer.run(Watch(app))
    assert peer.reads == 1
