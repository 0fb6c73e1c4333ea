"""Rules 7 to 11: how the application is told, interrupted once, and what its ``send`` does afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest
from anyio.lowlevel import checkpoint
from starlette.types import Message, Receive, Scope, Send

from hangup import Call, Cause, Phase, Policy, State, before_success, current_call, protect
from hangup.testing import Peer, Quirks

from .helpers import END, START, Watch, answer, chunk, until, watched

pytestmark = pytest.mark.anyio

App = Any


async def test_finally_await_completes(on_trio: bool) -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await anyio.sleep(60)
        except anyio.get_cancelled_exc_class():
            log.append("cancelled")
            raise
        finally:
            with anyio.CancelScope(shield=on_trio):  # trio's tasks know that they have to
                await anyio.sleep(0.01)
                await checkpoint()
            log.append("cleaned up")

    peer = Peer()
    watch = Watch(app)
    async with peer.calling(watch):
        await watched(peer)
        peer.hang_up()
    assert log == ["cancelled", "cleaned up"]
    assert peer.error is None
    assert watch.outcome.state is State.CANCELED
    assert watch.outcome.phase is Phase.BEFORE_RESPONSE


async def test_the_host_task_is_left_without_a_pending_cancel(on_trio: bool) -> None:
    if on_trio:
        return
    counts: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await anyio.sleep(60)

    async def server(scope: Scope, receive: Receive, send: Send) -> None:
        await Watch(app)(scope, receive, send)
        task = asyncio.current_task()
        assert task is not None
        counts.append(task.cancelling())
        await anyio.sleep(0.001)

    peer = Peer()
    async with peer.calling(server):
        await watched(peer)
        peer.hang_up()
    assert counts == [0]


async def test_the_token_flips_before_the_interruption() -> None:
    order: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        current_call().token.add_callback(lambda: order.append(f"callback in {current_call().scope['path']}"))
        try:
            await anyio.sleep(60)
        except anyio.get_cancelled_exc_class():
            order.append(f"interrupted, {current_call().token.cause}")
            raise

    peer = Peer(path="/x")
    async with peer.calling(Watch(app)):
        await watched(peer)
        peer.hang_up()
    assert order == ["callback in /x", "interrupted, client_disconnect"]


async def test_a_listening_application_is_told_and_not_interrupted() -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        log.append((await receive())["type"])
        await anyio.sleep(0.01)
        log.append("cleaned up")

    peer = Peer()
    watch = Watch(app)
    async with peer.calling(watch):
        await watched(peer)
        peer.hang_up()
    assert log == ["http.disconnect", "cleaned up"]
    assert watch.outcome.state is State.CANCELED


async def test_a_listening_application_that_outstays_its_grace_is_interrupted() -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        log.append((await receive())["type"])
        try:
            await anyio.sleep(60)
        except anyio.get_cancelled_exc_class():
            log.append("interrupted")
            raise

    peer = Peer()
    async with peer.calling(Watch(app, grace=0.02)):
        await watched(peer)
        peer.hang_up()
    assert log == ["http.disconnect", "interrupted"]


@pytest.mark.parametrize("ahead", [False, True], ids=["reading", "watched"])
async def test_an_application_that_reads_its_body_is_interrupted_there_and_never_gets_a_short_one(
    ahead: bool, on_trio: bool
) -> None:
    """Falcon and Sanic take the disconnect message for the end of the body."""
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        more = True
        try:
            if ahead:
                await watched(peer)
            while more:
                message = await receive()
                log.append(message.get("body", b"").decode())
                more = message.get("more_body", False)
            log.append("short body")
        except anyio.get_cancelled_exc_class():
            log.append("interrupted")
            with anyio.CancelScope(shield=on_trio):
                log.append((await receive())["type"])
                await anyio.sleep(0.01)
            log.append("cleaned up")
            raise

    peer = Peer(method="POST", body=[b"5 of 10"], body_ends=False)
    watch = Watch(app)
    async with peer.calling(watch):
        await until(lambda: log)
        await watched(peer)
        peer.hang_up()
    assert log == ["5 of 10", "interrupted", "http.disconnect", "cleaned up"]
    assert peer.error is None
    assert watch.outcome.state is State.CANCELED


async def test_a_reader_of_the_body_that_is_out_of_reach_gets_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hangup._call.REACH", 0.05)
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with anyio.CancelScope(shield=True):
            while (message := await receive())["type"] == "http.request":
                pass
            log.append(message["type"])

    peer = Peer(method="POST", body=[b"5 of 10"], body_ends=False)
    watch = Watch(app)
    async with peer.calling(watch):
        await watched(peer)
        peer.hang_up()
    assert log == ["http.disconnect"]
    assert watch.outcome.state is State.CANCELED


@pytest.mark.parametrize("policy", ["signal", "finish"])
async def test_a_reader_of_the_body_that_is_not_to_be_interrupted_gets_the_message(policy: str) -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (message := await receive())["type"] == "http.request":
            pass
        await anyio.sleep(0.01)
        log.append(message["type"])

    peer = Peer(method="POST", body=[b"5 of 10"], body_ends=False)
    async with peer.calling(Watch(app, policy=policy)):
        await watched(peer)
        peer.hang_up()
    assert log == ["http.disconnect"]


async def test_a_shield_of_the_application_is_respected_and_the_interruption_comes_after_it() -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with anyio.CancelScope(shield=True):
            await until(lambda: current_call().cause)
            await anyio.sleep(0.02)
            log.append("shielded")
        try:
            await anyio.sleep(60)
        finally:
            log.append("interrupted")

    peer = Peer()
    watch = Watch(app)
    async with peer.calling(watch):
        await watched(peer)
        peer.hang_up()
    assert log == ["shielded", "interrupted"]
    assert watch.outcome.state is State.CANCELED


async def test_a_thread_is_waited_for_and_its_answer_counts() -> None:
    ended = 0.0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        def work() -> None:
            nonlocal ended
            assert gone.wait(5)
            time.sleep(0.05)  # the thread's own work
            ended = time.perf_counter()

        await anyio.to_thread.run_sync(work)
        await answer(send)

    gone = threading.Event()
    peer = Peer()
    watch = Watch(app)
    async with peer.calling(watch):
        await watched(peer)
        peer.hang_up()
        await until(lambda: peer.left)
        gone.set()
    assert ended
    assert watch.outcome.state is State.COMPLETED
    assert watch.outcome.cause is Cause.CLIENT_DISCONNECT
    assert not watch.outcome.delivered
    assert watch.outcome.status_code == 200


@pytest.mark.parametrize("generations", [0, 1, 2])
async def test_a_thread_that_looked_at_its_token_knew(generations: int) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        token = current_call().token
        for _ in range(generations):
            token = token.child()

        def work() -> None:
            assert token.wait_sync(5)

        await anyio.to_thread.run_sync(work)
        await answer(send)

    peer = Peer()
    watch = Watch(app)
    async with peer.calling(watch):
        await watched(peer)
        peer.hang_up()
    assert watch.outcome.state is State.CANCELED


async def test_a_look_at_a_child_token_that_was_canceled_on_its_own_tells_nothing() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        child = current_call().token.child()
        child.cancel("the other one was faster")
        with anyio.CancelScope(shield=True):
            await until(lambda: current_call().cause)
        assert child.canceled
        await answer(send)

    peer = Peer()
    watch = Watch(app)
    async with peer.calling(watch):
        await watched(peer)
        peer.hang_up()
    assert watch.outcome.state is State.COMPLETED


async def test_a_thread_that_fails_after_the_client_left_has_failed() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        def work() -> None:
            assert gone.wait(5)
            raise ValueError("a bug")

        await anyio.to_thread.run_sync(work)

    gone = threading.Event()
    peer = Peer()
    watch = Watch(app)
    async with peer.calling(watch):
        await watched(peer)
        peer.hang_up()
        await until(lambda: peer.left)
        gone.set()
    assert watch.outcome.state is State.FAILED
    assert isinstance(watch.outcome.error, ValueError)
    assert isinstance(peer.error, ValueError)


async def test_work_that_ended_as_the_client_left_goes_to_its_background_task() -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with anyio.CancelScope(shield=True):
            await until(lambda: peer.left)
            await anyio.wait_all_tasks_blocked()
        await answer(send)
        await anyio.sleep(0.01)
        log.append("background")

    peer = Peer()
    watch = Watch(app)
    async with peer.calling(watch):
        await watched(peer)
        peer.hang_up()
    assert log == ["background"]
    assert watch.outcome.state is State.COMPLETED


async def test_a_handler_that_swallows_everything_is_reported_and_left_alone(
    caplog: pytest.LogCaptureFixture, on_trio: bool
) -> None:
    caught = 0

    async def deaf() -> None:
        nonlocal caught
        while not done.is_set():
            try:
                await done.wait()
            except anyio.get_cancelled_exc_class():
                caught += 1
                if on_trio:  # where it would spin by itself
                    with anyio.CancelScope(shield=True):
                        await done.wait()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await deaf()

    done = anyio.Event()
    peer = Peer()
    watch = Watch(app, grace=0.01)
    async with peer.calling(watch):
        await watched(peer)
        peer.hang_up()
        await until(lambda: any(r.levelno == logging.WARNING for r in caplog.records))
        await anyio.sleep(0.05)  # time in which it would be interrupted again, if anybody did
        done.set()
    assert caught == (1 if on_trio else 3)
    [warning] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "test_interrupt.py" in warning
    assert "in deaf, called from" in warning
    assert watch.outcome.unresponsive
    assert watch.outcome.state is State.CANCELED


async def test_signal_flips_the_token_and_interrupts_nobody() -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert await current_call().token.wait()
        await anyio.sleep(0.01)
        log.append("done")

    peer = Peer()
    watch = Watch(app, policy="signal")
    async with peer.calling(watch):
        await watched(peer)
        peer.hang_up()
    assert log == ["done"]
    assert watch.outcome.state is State.CANCELED


async def test_finish_carries_on_and_keeps_the_record() -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        for n in range(3):
            await send(chunk(b"%d" % n))
            if n == 0:
                await peer.wait_for(lambda: peer.left)
                await anyio.wait_all_tasks_blocked()
        await send(END)
        log.append("done")
        assert not current_call().token.canceled

    peer = Peer()
    watch = Watch(app, policy=Policy("finish"))
    async with peer.calling(watch):
        await watched(peer)
        peer.hang_up()
    assert peer.error is None
    assert log == ["done"]
    assert peer.body == b"0"
    assert watch.outcome.state is State.COMPLETED
    assert not watch.outcome.delivered
    assert watch.outcome.phase is Phase.DURING_RESPONSE


@pytest.mark.parametrize("latched", [True, False])
async def test_finish_keeps_the_disconnect_from_an_application_that_listens_until_it_has_answered(
    latched: bool,
) -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "http.request"
        async with anyio.create_task_group() as tasks:

            async def listen() -> None:
                log.append((await receive())["type"])

            tasks.start_soon(listen)  # Django and Quart do this, and cancel their own handler
            await until(lambda: peer.left and not peer.reading)
            await anyio.wait_all_tasks_blocked()
            with anyio.move_on_after(0):  # Starlette's `is_disconnected()`
                log.append((await receive())["type"])
            assert log == []
            await send(START)
            log.append("done")
            await send(END)

    peer = Peer(quirks=Quirks(latched=latched))
    watch = Watch(app, policy="finish")
    async with peer.calling(watch):
        await watched(peer)
        peer.hang_up()
    assert log == ["done", "http.disconnect"]
    assert (watch.outcome.state, watch.outcome.delivered) == (State.COMPLETED, False)
    assert peer.sent == []


async def test_finish_does_not_keep_the_disconnect_from_an_application_that_lacks_its_body() -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        log.extend([(await receive())["type"], (await receive())["type"]])

    peer = Peer(method="POST", body=[b"half"], body_ends=False)
    watch = Watch(app, policy="finish")
    async with peer.calling(watch):
        await peer.wait_for(lambda: peer.reads == 2 and peer.reading)
        peer.hang_up()
    assert log == ["http.request", "http.disconnect"]


@pytest.mark.parametrize("shutdown", [True, False])
async def test_an_application_that_is_to_finish_and_listens_can_be_stopped_all_the_same(shutdown: bool) -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        try:
            log.append((await receive())["type"])
        except anyio.get_cancelled_exc_class():
            log.append("interrupted")
            raise

    peer = Peer()
    watch = Watch(app, policy="finish")
    async with peer.calling(watch):
        await watched(peer)
        peer.hang_up()
        await until(lambda: peer.left and not peer.reading)
        await anyio.wait_all_tasks_blocked()
        assert log == []
        [call] = watch.app.calls_in_flight
        call.shut_down() if shutdown else call.cancel("enough")
    assert log == ["http.disconnect" if shutdown else "interrupted"]
    assert watch.outcome.state is State.CANCELED
    assert watch.outcome.cause is (Cause.SERVER_SHUTDOWN if shutdown else Cause.REQUESTED)


@pytest.mark.parametrize("kind", [b"text/event-stream; charset=utf-8", b"application/x-ndjson"])
async def test_a_stop_button_ends_an_event_stream_and_cuts_a_stream_that_has_an_end_of_its_own(kind: bytes) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({**START, "headers": [(b"Content-Type", kind)]})
        await send(chunk(b"data: 1\n\n"))
        await anyio.sleep(60)

    peer = Peer()
    watch = Watch(app)
    async with peer.calling(watch):
        await until(lambda: len(peer.sent) == 2)
        [call] = watch.app.calls_in_flight
        call.cancel("the user pressed Stop")
    assert peer.complete == kind.startswith(b"text/event-stream")
    outcome = watch.outcome
    assert (outcome.state, outcome.cause, outcome.delivered) == (State.CANCELED, Cause.REQUESTED, False)


async def test_policy_may_be_chosen_by_scope_and_changed_while_running() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert current_call().policy == Policy("finish")
        current_call().policy = Policy("cancel")
        await anyio.sleep(60)

    peer = Peer(path="/runs")
    watch = Watch(app, policy=lambda scope: Policy("finish" if scope["path"] == "/runs" else "cancel"))
    async with peer.calling(watch):
        await watched(peer)
        peer.hang_up()
    assert watch.outcome.state is State.CANCELED


@pytest.mark.parametrize("error", [None, OSError("gone")], ids=["silent", "raising"])
@pytest.mark.parametrize("blocked", [False, True], ids=["flowing", "blocked in send"])
async def test_the_interruption_finds_a_stream_in_its_generator_and_not_in_send(
    error: Exception | None, blocked: bool
) -> None:
    """Left suspended at its ``yield`` the generator would go to the garbage collector, its cleanup with it."""
    log: list[str] = []

    async def events() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"x"
                await anyio.sleep(0)
        except anyio.get_cancelled_exc_class():
            log.append("interrupted")
            raise
        finally:
            log.append("cleaned up")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        async for part in events():
            if blocked and len(peer.body) == 10:
                peer.stop_reading()
            await send(chunk(part))

    peer = Peer(quirks=Quirks(send_error=error, send_stays_blocked=blocked))
    watch = Watch(app)
    async with peer.calling(watch):
        await peer.wait_for_body(b"x" * 10)
        await watched(peer)
        peer.hang_up()
    assert log == ["interrupted", "cleaned up"]
    assert peer.error is None
    assert watch.outcome.state is State.CANCELED
    assert watch.outcome.phase is Phase.DURING_RESPONSE


async def test_a_send_on_a_transport_that_uvloop_has_closed_is_a_disconnect() -> None:
    """uvicorn with httptools and uvloop, when a second request is pipelined: ``receive`` never says so."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        peer.hang_up()
        await send(START)
        await anyio.sleep(60)

    closed = RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")
    peer = Peer(quirks=Quirks(send_error=closed))
    watch = Watch(app)
    await peer.run(watch)
    assert peer.error is None
    assert (watch.outcome.state, watch.outcome.cause) == (State.CANCELED, Cause.CLIENT_DISCONNECT)


async def test_a_stream_that_never_awaits_is_told_by_its_second_late_frame() -> None:
    sends: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        with anyio.CancelScope(shield=True):
            await until(lambda: current_call().cause)
        for _ in range(3):
            try:
                await send(chunk(b"x"))
                sends.append("returned")
            except OSError:
                sends.append("OSError")

    peer = Peer()
    watch = Watch(app)
    async with peer.calling(watch):
        await watched(peer)
        peer.hang_up()
    assert sends == ["returned", "OSError", "OSError"]
    assert watch.outcome.state is State.CANCELED


async def test_a_send_that_raises_is_how_a_hang_up_can_be_seen_first() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        peer.left = True  # nobody is told: the server notices at the next write
        await send(chunk(b"x"))

    peer = Peer(quirks=Quirks(send_error=OSError(113, "No route to host")))
    watch = Watch(app)
    async with peer.calling(watch):
        pass
    assert peer.error is None
    assert watch.outcome.state is State.CANCELED
    assert watch.outcome.cause is Cause.CLIENT_DISCONNECT


async def test_an_oserror_of_the_applications_own_is_a_failure() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise OSError(113, "the database host")

    peer = Peer()
    watch = Watch(app)
    await peer.run(watch)
    assert isinstance(peer.error, OSError)
    assert watch.outcome.state is State.FAILED


async def test_a_last_frame_the_server_refuses_ends_the_work_undelivered() -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        peer.left = True
        await send(END)
        log.append("background")

    peer = Peer(quirks=Quirks(send_error=OSError("gone")))
    watch = Watch(app)
    await peer.run(watch)
    assert peer.error is None
    assert log == ["background"]
    assert watch.outcome.state is State.COMPLETED
    assert not watch.outcome.delivered


@pytest.mark.parametrize(
    ("policy", "log"),
    [("cancel", ["returned", "interrupted"]), ("signal", ["OSError"]), ("finish", ["returned", "slept"])],
)
@pytest.mark.parametrize("shielded", [False, True])
async def test_a_blocked_send_is_released_when_the_client_leaves(policy: str, log: list[str], shielded: bool) -> None:
    """hypercorn with an unread upload, gunicorn under back-pressure: the server's ``send`` never returns."""
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        peer.stop_reading()
        try:
            with anyio.CancelScope(shield=shielded):
                await send(chunk(b"x"))
                seen.append("returned")
            await anyio.sleep(0.05 if policy == "finish" else 60)
            seen.append("slept")
        except OSError:
            seen.append("OSError")
        except anyio.get_cancelled_exc_class():
            seen.append("interrupted")
            raise

    peer = Peer(quirks=Quirks(send_stays_blocked=True))
    watch = Watch(app, policy=policy)
    async with peer.calling(watch):
        await watched(peer)
        peer.hang_up()
    assert seen == log
    assert peer.error is None


async def test_a_blocked_send_is_released_also_when_there_is_another_cause_already(on_trio: bool) -> None:
    """The handler was interrupted, and says so to its client, who has left meanwhile."""
    if on_trio:
        pytest.skip("trio cancels by level: whoever goes on is interrupted again at once")
    peer = Peer(quirks=Quirks(send_stays_blocked=True))
    heard: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        call = current_call()
        try:
            await anyio.sleep(60)
        except asyncio.CancelledError:
            await send(START)
            await until(lambda: peer.reading)
            peer.stop_reading()
            try:
                await send(chunk(b"canceled"))
            except OSError:
                heard.append("refused")
        assert call.cause is Cause.REQUESTED

    watch = Watch(app)
    async with peer.calling(watch):
        await watched(peer)
        current = watch.app.calls_in_flight[0]
        current.cancel()
        await peer.wait_for(lambda: peer._blocked)
        await until(lambda: current._writer._sender is not None)
        peer.hang_up()
    assert heard == ["refused"]
    assert watch.outcome.state is State.CANCELED


async def test_a_send_blocked_in_another_task_is_released_too() -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        peer.stop_reading()

        async def push() -> None:
            try:
                await send(chunk(b"x"))
            except OSError:
                log.append("OSError")

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(push)

    peer = Peer(quirks=Quirks(send_stays_blocked=True))
    async with peer.calling(Watch(app, policy="signal")):
        await watched(peer)
        peer.hang_up()
    assert log == ["OSError"] * 3


async def test_a_generator_that_never_awaits_does_not_freeze_the_loop() -> None:
    sends = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal sends
        await send(START)
        try:
            while True:
                await send(chunk(b"x"))
                sends += 1
        except OSError:
            while sends < 10_000:  # it does not even listen to that
                try:
                    await send(chunk(b"x"))
                except OSError:
                    sends += 1

    class Slow(Peer):
        async def send(self, message: Message) -> None:
            if not self.left and sends > 100:
                self.hang_up()  # and the server's send returns at once from now on, without letting the loop run
            await super().send(message)

    peer = Slow()
    ticks = 0
    async with peer.calling(Watch(app)):
        while not peer.ended:
            ticks += 1
            await checkpoint()
    assert ticks > 1
    assert peer.error is None


async def test_before_the_disconnect_send_adds_no_suspension(on_trio: bool) -> None:
    steps: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        for _ in range(10):
            await send(chunk(b"x"))
        await send(END)
        steps.append("app")

    async def other() -> None:
        steps.append("other")

    async def no_receive() -> Message:
        raise AssertionError

    async def no_send(message: Message) -> None:
        pass

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(other)
        if on_trio:
            await checkpoint()  # trio starts tasks in any order
        await Watch(app)(Peer().scope, no_receive, no_send)
    assert "app" in steps
    if not on_trio and steps[0] != "other":  # with eager tasks the other one ran at once
        assert steps == ["app", "other"]


async def test_cancel_from_inside_lands_at_the_next_await() -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert current_call().cancel("changed my mind")
        log.append("still here")
        await anyio.sleep(60)

    peer = Peer()
    watch = Watch(app)
    async with peer.calling(watch):
        pass
    assert log == ["still here"]
    assert watch.outcome.cause is Cause.REQUESTED
    assert watch.outcome.reason == "changed my mind"
    assert watch.outcome.state is State.CANCELED
    assert watch.outcome.status_code == 499
    assert peer.status == 499
    assert peer.complete


async def test_cancel_from_a_thread() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        call = current_call()
        thread = threading.Thread(target=call.cancel, args=("from a thread",))
        thread.start()
        try:
            await anyio.sleep(60)
        finally:
            thread.join()

    peer = Peer()
    watch = Watch(app)
    async with peer.calling(watch):
        pass
    assert watch.outcome.reason == "from a thread"


async def test_a_requested_cancel_lets_the_application_say_so_to_a_live_client() -> None:
    calls: list[Call] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        calls.append(current_call())
        await send(START)
        try:
            await anyio.sleep(60)
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                await send(chunk(b"event: canceled\n\n"))
                await send(END)
            raise

    peer = Peer()
    watch = Watch(app)
    async with peer.calling(watch):
        await peer.wait_for(lambda: peer.status)
        watch_call = peer  # the call is not reachable from here: the application cancels itself through a second task
        del watch_call
        calls[0].cancel("stop button")
    assert peer.body == b"event: canceled\n\n"
    assert peer.complete
    assert watch.outcome.state is State.CANCELED
    assert watch.outcome.delivered


async def test_a_scope_of_somebody_further_out_reaches_the_application_as_ever() -> None:
    """BaseHTTPMiddleware outside, TestClient, a timeout around the app."""
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await anyio.sleep(60)
        finally:
            log.append("cancelled")

    watch = Watch(app)

    async def outer(scope: Scope, receive: Receive, send: Send) -> None:
        with anyio.move_on_after(0.01):
            await watch(scope, receive, send)
        log.append("outer goes on")
        await answer(send, 504)

    peer = Peer()
    async with peer.calling(outer):
        pass
    assert log == ["cancelled", "outer goes on"]
    assert peer.status == 504
    assert watch.outcome.state is State.CANCELED
    assert watch.outcome.cause is Cause.UNKNOWN


async def test_who_waits_for_the_end_of_a_body_that_is_not_there_gets_the_message() -> None:
    """uvicorn loses the empty body of a GET when the client leaves."""
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        ready.set()
        await receive()
        await anyio.sleep(0.01)
        log.append("told by the message")

    ready = anyio.Event()
    peer = Peer(body=[])
    async with peer.calling(Watch(app)):
        await ready.wait()
        await watched(peer)
        peer.hang_up()
    assert log == ["told by the message"]


async def test_a_task_group_of_the_application_does_not_take_the_interruption_for_its_own() -> None:
    """anyio below 4.16 swallowed it at the end of the group, and the work went on."""
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep, 0)
            await anyio.sleep(60)
        log.append("went on")

    peer = Peer()
    watch = Watch(app)
    async with peer.calling(watch):
        await watched(peer)
        peer.hang_up()
    assert log == []
    assert watch.outcome.state is State.CANCELED


async def test_a_send_in_a_task_group_of_the_application_that_was_blocked() -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep, 0)
            while True:
                if len(peer.body) == 10:
                    peer.stop_reading()
                await send(chunk(b"x"))
                await anyio.sleep(0)
        log.append("went on")

    peer = Peer()
    watch = Watch(app)
    async with peer.calling(watch):
        await peer.wait_for_body(b"x" * 10)
        await watched(peer)
        peer.hang_up()
    assert log == []
    assert watch.outcome.state is State.CANCELED


async def test_who_looks_at_the_token_is_interrupted_in_its_own_code_all_the_same(on_trio: bool) -> None:
    """The host is about to go on when the client leaves: it cannot be reached before its next frame."""
    log: list[str] = []
    gates = [anyio.Event(), anyio.Event()]
    waiting = anyio.Event()

    async def parts() -> AsyncIterator[bytes]:
        try:
            for gate in gates:
                yield b"part"
                waiting.set()
                await gate.wait()
        except BaseException as exc:
            log.append("interrupted" if isinstance(exc, anyio.get_cancelled_exc_class()) else type(exc).__name__)
            raise

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        calls.append(call := current_call())
        call.token.add_callback(lambda: log.append(str(call.token.cause)))
        await receive()
        await send(START)
        async for part in parts():
            await send(chunk(part))

    calls: list[Call] = []
    peer = Peer()
    watch = Watch(app, grace=60)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(peer.run, watch)
        await waiting.wait()
        gates[0].set()
        calls[0].client_left()
    assert log == ["client_disconnect", "interrupted"]
    assert watch.outcome.state is State.CANCELED


# An eager task runs inside the task that has started it, which anyio takes for suspended: where the loop has an eager
# task factory a cancellation could land in the middle of what the application does.


async def test_a_disconnect_that_is_there_when_it_is_asked_for_arrives_as_a_message() -> None:
    heard: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        peer.hang_up()
        heard.append((await receive())["type"])
        await checkpoint()
        heard.append("cleaned up")

    peer = Peer()
    watch = Watch(app)
    await peer.run(watch)
    assert heard == ["http.disconnect", "cleaned up"]
    assert watch.outcome.state is State.CANCELED


async def test_a_hook_that_cancels_its_own_call_comes_too_late() -> None:
    log: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        call = current_call()

        @before_success
        async def hook() -> None:
            log.append(call.cancel())

        await answer(send)
        log.append("after")

    peer = Peer()
    watch = Watch(app)
    await peer.run(watch)
    assert (peer.status, peer.complete) == (200, True)
    assert watch.outcome.state is State.COMPLETED
    assert log == [True, "after"]


# ---------------------------------------------------------------------- what others cancel
#
# A server cancels the task itself: once, and through every shield. Those tests are for asyncio, which has that.


async def turns(count: int = 30) -> None:
    """Let the event loop turn."""
    for _ in range(count):
        await asyncio.sleep(0)


class Cleaner:
    """An application that is cancelled and takes some time to clean up. `log` says what it went through."""

    def __init__(self, log: list[str], shield: bool = False) -> None:
        self.log = log
        self.shield = shield

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with anyio.CancelScope(shield=self.shield):
                await anyio.sleep(60)
        except asyncio.CancelledError:
            self.log.append("cleaning")
            await turns()
            self.log.append("cleaned")
            raise


CAUSES: dict[str, Callable[[Peer, Call], object]] = {
    "client_disconnect": lambda peer, call: peer.hang_up(),
    "timeout": lambda peer, call: call._on_deadline(),
    "requested": lambda peer, call: call.cancel(),
    "server_shutdown": lambda peer, call: call.shut_down(),
}


@pytest.mark.parametrize("cause", CAUSES)
async def test_the_cleanup_of_who_was_cancelled_by_the_server_is_not_cut_off(cause: str, on_trio: bool) -> None:
    if on_trio:
        return
    log: list[str] = []
    peer = Peer()
    watch = Watch(Cleaner(log))
    task = asyncio.ensure_future(watch(peer.scope, peer.receive, peer.send))
    await watched(peer)
    [call] = watch.app.calls_in_flight
    task.cancel()
    await until(lambda: log)
    CAUSES[cause](peer, call)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert log == ["cleaning", "cleaned"]
    assert watch.outcome.cause == cause
    assert watch.outcome.state is (State.TIMED_OUT if cause == "timeout" else State.CANCELED)


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("first", ["ours", "theirs"])
async def test_who_is_cancelled_twice_in_one_turn_is_interrupted_once(cause: str, first: str, on_trio: bool) -> None:
    if on_trio:
        return
    log: list[str] = []
    peer = Peer()
    watch = Watch(Cleaner(log))
    task = asyncio.ensure_future(watch(peer.scope, peer.receive, peer.send))
    await watched(peer)
    [call] = watch.app.calls_in_flight
    if first == "theirs":
        task.cancel()
    CAUSES[cause](peer, call)
    if first == "ours":
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert log == ["cleaning", "cleaned"]
    assert watch.outcome.state is (State.TIMED_OUT if cause == "timeout" else State.CANCELED)


@pytest.fixture
def insistent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who cannot be reached is tried a hundred times a second, and not twenty."""
    monkeypatch.setattr("hangup._interrupt._LAST_PAUSE", 0.01)


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("where", ["shield", "protect", "thread"])
async def test_an_interruption_that_waits_does_not_follow_that_of_the_server(
    cause: str, where: str, on_trio: bool, insistent: None
) -> None:
    if on_trio:
        return
    log: list[str] = []
    may_end = threading.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if where == "thread":
                await anyio.to_thread.run_sync(may_end.wait)
            else:
                with anyio.CancelScope(shield=True) if where == "shield" else protect():
                    await anyio.sleep(60)
        except asyncio.CancelledError:
            log.append("cleaning")
            await anyio.sleep(0.05)  # the supervisor tries all the time
            log.append("cleaned")
            raise

    peer = Peer()
    watch = Watch(app)
    task = asyncio.ensure_future(watch(peer.scope, peer.receive, peer.send))
    await watched(peer)
    [call] = watch.app.calls_in_flight
    CAUSES[cause](peer, call)
    await until(lambda: call.cause is not None)
    await turns()
    assert log == []
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    may_end.set()
    assert log == ["cleaning", "cleaned"]
    assert watch.outcome.cause == cause
    assert watch.outcome.state is (State.TIMED_OUT if cause == "timeout" else State.CANCELED)


async def test_who_was_cancelled_by_the_server_and_goes_on_is_interrupted_after_its_grace(on_trio: bool) -> None:
    if on_trio:
        return
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for name in ("first", "second"):
            try:
                await anyio.sleep(60)
            except asyncio.CancelledError:
                log.append(name)

    peer = Peer()
    watch = Watch(app, grace=0.1)
    task = asyncio.ensure_future(watch(peer.scope, peer.receive, peer.send))
    await watched(peer)
    task.cancel()
    await until(lambda: log)
    began = time.perf_counter()
    peer.hang_up()
    await task
    assert log == ["first", "second"]
    assert time.perf_counter() - began >= 0.1
    assert watch.outcome.state is State.CANCELED
    assert not watch.outcome.unresponsive


async def own_timeout(log: list[str]) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0):
            await clean_up(log)


async def own_wait_for(log: list[str]) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(clean_up(log), 0.001)


async def own_task_group(log: list[str]) -> None:
    async def fail() -> None:
        raise ValueError("no")

    with contextlib.suppress(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            await clean_up(log)


async def own_scope(log: list[str]) -> None:
    with anyio.move_on_after(0.001):
        await clean_up(log, shield=True)


async def clean_up(log: list[str], *, shield: bool = False) -> None:
    try:
        await asyncio.sleep(60)
    finally:
        log.append("cleaning")
        with anyio.CancelScope(shield=shield):
            await asyncio.sleep(0.05)  # the supervisor tries all the time
        log.append("cleaned")


OWN = [own_timeout, own_task_group, own_scope]
if sys.version_info >= (3, 12):  # before, `wait_for` waits in its caller, for a task of its own
    OWN.append(own_wait_for)


@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("cause", CAUSES)
async def test_a_timeout_of_the_applications_own_is_not_taken_for_the_servers_cancellation(
    own: Callable[[list[str]], Awaitable[None]], cause: str, on_trio: bool, insistent: None
) -> None:
    if on_trio:
        return
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await own(log)
        try:
            await anyio.sleep(60)
        finally:
            log.append("interrupted")

    peer = Peer()
    watch = Watch(app, grace=60)
    async with peer.calling(watch):
        await watched(peer)
        await until(lambda: "cleaning" in log)
        [call] = watch.app.calls_in_flight
        CAUSES[cause](peer, call)
    assert log[-1] == "interrupted"
    assert peer.error is None
    assert watch.outcome.state is (State.TIMED_OUT if cause == "timeout" else State.CANCELED)


@pytest.mark.parametrize("own", OWN)
async def test_who_completes_after_a_timeout_of_its_own_was_not_told(
    own: Callable[[list[str]], Awaitable[None]], on_trio: bool, insistent: None
) -> None:
    if on_trio:
        return
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with protect():
            await own(log)
            await answer(send)

    peer = Peer()
    watch = Watch(app)
    async with peer.calling(watch):
        await until(lambda: "cleaning" in log)
        [call] = watch.app.calls_in_flight
        call.shut_down()
    assert (peer.status, peer.complete, peer.error) == (200, True, None)
    assert (watch.outcome.state, watch.outcome.cause) == (State.COMPLETED, Cause.SERVER_SHUTDOWN)


@pytest.mark.parametrize("answers", [False, True])
async def test_who_swallows_the_cancellation_of_the_server_knows_of_the_cause(answers: bool, on_trio: bool) -> None:
    if on_trio:
        return
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await anyio.sleep(60)
        except asyncio.CancelledError:
            log.append("cleaning")
            await turns()
        if answers:
            await answer(send, 200)
        else:
            raise ValueError("what follows from that")

    peer = Peer()
    watch = Watch(app)
    task = asyncio.ensure_future(watch(peer.scope, peer.receive, peer.send))
    await watched(peer)
    [call] = watch.app.calls_in_flight
    task.cancel()
    await until(lambda: log)
    call.cancel()
    await task
    assert watch.outcome.cause is Cause.REQUESTED
    assert watch.outcome.state is (State.COMPLETED if answers else State.CANCELED)
    assert peer.status == (200 if answers else 499)
