"""Rules 1 to 4: one reader, ready means no suspension, lazy, bounded."""

from __future__ import annotations

import asyncio
import contextlib
from contextvars import ContextVar
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from hangup import Cause, State, current_call
from hangup._runtime import call_later
from hangup.testing import Peer, Quirks

from .helpers import END, START, Watch, answer, chunk, until, watched

pytestmark = pytest.mark.anyio

ONCE = Quirks(latched=False, body_lost=False)


async def test_a_short_call_starts_nothing() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await checkpoint()
        await answer(send)

    peer = Peer()
    watch = Watch(app)
    await peer.run(watch)
    assert peer.reads == 0
    assert watch.outcome.state is State.COMPLETED


async def test_the_body_arrives_once_and_in_order_whoever_read_it() -> None:
    got: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        got.append(await receive())  # read by the application
        await peer.wait_for(lambda: peer.reads >= 3)  # and now ahead of it
        while got[-1].get("more_body"):
            got.append(await receive())
        await answer(send)

    peer = Peer(method="POST", body=[b"a", b"b", b"c", b"d"])
    async with peer.calling(Watch(app)):
        pass
    assert [m["body"] for m in got] == [b"a", b"b", b"c", b"d"]
    assert [m["more_body"] for m in got] == [True, True, True, False]


@pytest.mark.parametrize("quirks", [Quirks(), ONCE], ids=["latched", "once"])
async def test_a_disconnect_is_latched(quirks: Quirks) -> None:
    got: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        for _ in range(3):
            got.append((await receive())["type"])

    peer = Peer(quirks=quirks)
    async with peer.calling(Watch(app)):
        await watched(peer)
        peer.hang_up()
    assert got == ["http.disconnect"] * 3


async def test_two_tasks_in_receive_make_one_reader_of_the_server() -> None:
    most = 0
    got: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()

        async def listen() -> None:
            got.append((await receive())["type"])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listen)
            tasks.start_soon(listen)

    class Counting(Peer):
        async def receive(self) -> Message:
            nonlocal most
            most = max(most, self.reading + 1)
            return await super().receive()

    peer = Counting(quirks=ONCE)
    async with peer.calling(Watch(app)):
        await watched(peer)
        peer.hang_up()
    assert got == ["http.disconnect"] * 2
    assert most == 1


async def test_two_tasks_share_a_body_without_losing_any() -> None:
    got: list[bytes] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def read() -> None:
            while (message := await receive())["type"] == "http.request":
                got.append(message["body"])
                if not message["more_body"]:
                    return
                await checkpoint()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            tasks.start_soon(read)
            await until(lambda: len(got) == 4)
            await answer(send)

    peer = Peer(method="POST", body=[b"a", b"b", b"c", b"d"])
    async with peer.calling(Watch(app)):
        pass
    assert sorted(got) == [b"a", b"b", b"c", b"d"]


async def test_giving_up_a_wait_does_not_cancel_the_read() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        for _ in range(3):
            with anyio.move_on_after(0.001):
                await receive()
        await receive()  # gunicorn would answer this with a false disconnect, had the read been cancelled

    peer = Peer()
    async with peer.calling(Watch(app)):
        await watched(peer)
        await anyio.wait_all_tasks_blocked()
        assert peer.reads == 2
        peer.hang_up()
    assert peer.reads == 2


async def test_is_disconnected_sees_the_disconnect() -> None:
    seen: list[bool] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        seen.append(await request.is_disconnected())
        await peer.wait_for(lambda: peer.left)
        await until(lambda: current_call().cause)
        seen.append(await request.is_disconnected())

    peer = Peer()
    async with peer.calling(Watch(app, policy="signal")):
        await watched(peer)
        peer.hang_up()
    assert seen == [False, True]


@pytest.mark.parametrize("ahead", [False, True], ids=["unread", "read ahead"])
async def test_is_disconnected_does_not_eat_the_body(ahead: bool) -> None:
    bodies: list[bytes] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        if ahead:
            await watched(peer)
        assert not await request.is_disconnected()
        assert not await request.is_disconnected()
        bodies.append(await request.body())
        await answer(send)

    peer = Peer(method="POST", body=[b"hello ", b"world"])
    async with peer.calling(Watch(app)):
        pass
    assert bodies == [b"hello world"]


async def test_is_disconnected_sees_past_an_unread_body() -> None:
    seen: list[bool] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        await until(lambda: current_call().cause)
        seen.append(await request.is_disconnected())

    peer = Peer(method="POST", body=[b"unread"], body_ends=False)
    async with peer.calling(Watch(app, policy="signal")):
        await watched(peer)
        peer.hang_up()
    assert seen == [True]


async def test_the_client_is_seen_past_an_unread_body() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await anyio.sleep(60)

    peer = Peer(method="POST", body=[b"x" * 1000], body_ends=False)
    watch = Watch(app)
    async with peer.calling(watch):
        await watched(peer)
        peer.hang_up()
    assert watch.outcome.cause is Cause.CLIENT_DISCONNECT
    assert not watch.outcome.detection_suspended


async def test_a_receive_that_gives_the_body_back_again_and_again_does_not_hold_the_loop() -> None:
    """Of a middleware outside that has read the body and hands it on, or of a test."""
    reads = 0
    got: list[bytes] = []

    async def replay() -> Message:
        nonlocal reads
        reads += 1
        return {"type": "http.request", "body": b"again", "more_body": False}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await until(lambda: reads)  # the call has lasted, and is watched
        await anyio.wait_all_tasks_blocked()
        for _ in range(5):
            got.append((await receive())["body"])
        await answer(send)

    peer = Peer()
    watch = Watch(app)
    await watch(peer.scope, replay, peer.send)
    assert peer.status == 200
    assert got == [b"again"] * 5
    assert reads <= 7
    assert watch.outcome.state is State.COMPLETED
    assert watch.outcome.detection_suspended


@pytest.mark.parametrize(("piece", "reads"), [(b"x" * 1000, 3), (b"x", 47), (b"", 47)], ids=["large", "tiny", "empty"])
async def test_the_read_ahead_is_bounded_and_the_record_says_so(piece: bytes, reads: int) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await peer.wait_for(lambda: peer.reads == reads)
        await anyio.wait_all_tasks_blocked()
        await answer(send)

    peer = Peer(method="POST", body=[piece] * 100)
    watch = Watch(app, read_ahead=3000)
    async with peer.calling(watch):
        pass
    assert peer.reads == reads
    assert watch.outcome.detection_suspended


async def test_reading_goes_on_when_there_is_room_again() -> None:
    got: list[bytes] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await peer.wait_for(lambda: peer.reads == 2)
        await anyio.wait_all_tasks_blocked()
        for _ in range(2):
            got.append((await receive())["body"])
        await anyio.sleep(60)  # does not read on; somebody else has to

    peer = Peer(method="POST", body=[b"1" * 1000, b"2" * 1000, b"3"], body_ends=False)
    watch = Watch(app, read_ahead=2000)
    async with peer.calling(watch):
        await peer.wait_for(lambda: peer.reads >= 4)
        peer.hang_up()
    assert got == [b"1" * 1000, b"2" * 1000]
    assert watch.outcome.state is State.CANCELED


async def test_a_call_that_expects_100_continue_is_not_read_before_the_application_does() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await anyio.sleep(0.1)  # long past the sweeper
        assert peer.reads == 0
        await receive()
        await anyio.sleep(60)  # from now on the client is watched

    peer = Peer(method="POST", headers=[("Expect", "100-Continue")], body=[b"x"])
    watch = Watch(app)
    async with peer.calling(watch):
        await peer.wait_for(lambda: peer.reads == 2)
        peer.hang_up()
    assert watch.outcome.state is State.CANCELED
    assert watch.outcome.detection_suspended


async def test_an_application_that_waits_is_watched_at_once() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        assert (await receive())["type"] == "http.disconnect"

    peer = Peer()
    async with peer.calling(Watch(app)):
        await watched(peer)
        peer.hang_up()
    assert peer.error is None


@pytest.mark.parametrize("on_complete", [True, False], ids=["uvicorn", "gunicorn"])
async def test_receive_after_the_last_frame_says_disconnect_on_every_server(on_complete: bool) -> None:
    got: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()

        async def listen() -> None:
            got.append((await receive())["type"])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listen)
            await anyio.wait_all_tasks_blocked()
            await answer(send)
        got.append((await receive())["type"])

    peer = Peer(quirks=Quirks(disconnect_on_complete=on_complete))
    watch = Watch(app)
    async with peer.calling(watch):
        pass
    assert got == ["http.disconnect"] * 2
    assert watch.outcome.state is State.COMPLETED
    assert watch.outcome.cause is None


async def test_the_end_is_not_announced_before_the_last_frame_is_sent() -> None:
    order: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()

        async def listen() -> None:
            await receive()
            order.append("disconnect")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listen)
            await anyio.wait_all_tasks_blocked()
            await send(START)
            await send(END)
            order.append("sent")

    peer = Peer(quirks=Quirks(disconnect_before_final_returns=True))
    watch = Watch(app)
    async with peer.calling(watch):
        pass
    assert order == ["sent", "disconnect"]
    assert watch.outcome.state is State.COMPLETED


async def test_the_watcher_goes_with_the_call() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await watched(peer)
        await answer(send)

    peer = Peer(quirks=Quirks(disconnect_on_complete=False))
    async with peer.calling(Watch(app)):
        pass
    await until(lambda: peer.reading == 0)


async def test_an_error_of_an_outer_receive_reaches_the_application() -> None:
    class TooLarge(Exception):
        pass

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await until(lambda: raised)
        with pytest.raises(TooLarge):
            await receive()
        await answer(send, 413)

    raised: list[int] = []

    class Bounded(Peer):
        async def receive(self) -> Message:
            raised.append(1)
            raise TooLarge

    peer = Bounded()
    watch = Watch(app)
    async with peer.calling(watch):
        pass
    assert peer.status == 413
    assert watch.outcome.state is State.COMPLETED


async def test_receive_after_the_call_has_ended_says_disconnect() -> None:
    kept: list[Receive] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        kept.append(receive)
        await answer(send)

    await Peer().run(Watch(app))
    assert (await kept[0]())["type"] == "http.disconnect"


async def test_a_cancelled_receive_raises_and_is_no_disconnect() -> None:
    """A receive that turns its own cancellation into a disconnect message leaves request_finished unfired."""
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()

        async def listen() -> None:
            try:
                await receive()
            except anyio.get_cancelled_exc_class():
                seen.append("cancelled")
                raise

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listen)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        assert current_call().cause is None
        await answer(send)

    peer = Peer()
    watch = Watch(app)
    async with peer.calling(watch):
        pass
    assert seen == ["cancelled"]
    assert watch.outcome.state is State.COMPLETED


async def test_a_stream_that_listens_by_itself_is_served_by_one_watcher() -> None:
    """The shape of Starlette below ASGI 2.4, Quart and Django: a receive is always pending."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()

        async def listen() -> None:
            assert (await receive())["type"] == "http.disconnect"
            tasks.cancel_scope.cancel()

        await send(START)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listen)
            while True:
                await send(chunk(b"x"))
                await anyio.sleep(0.001)

    peer = Peer()
    watch = Watch(app, present_spec="server")
    async with peer.calling(watch):
        await peer.wait_for_body(b"xxx")
        peer.hang_up()
    assert watch.outcome.state is State.CANCELED
    assert peer.error is None


def test_the_scope_of_a_server_that_leaves_keys_out() -> None:
    scopes: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scopes.append(scope)
        await answer(send)

    peer = Peer(extra={"asgi": None, "extensions": None, "state": None})
    anyio.run(peer.run, Watch(app))
    [scope] = scopes
    assert scope["asgi"]["spec_version"] == "2.4"
    assert scope["state"]["hangup"] is scope["extensions"]["hangup"]
    assert "state" not in peer.scope
    assert "extensions" not in peer.scope


async def test_the_sweepers_timer_does_not_keep_the_context_of_the_call_that_started_it() -> None:
    mine: ContextVar[object] = ContextVar("mine")
    mine.set(object())
    seen: list[object] = []
    call_later(0.001, lambda: seen.append(mine.get(None)))
    await until(lambda: seen)
    assert seen == [None]


@pytest.mark.parametrize("how", ["scope", "wait_for", "task"])
async def test_an_application_that_gives_up_its_read_is_watched_again(how: str, on_trio: bool) -> None:
    if on_trio and how != "scope":
        return
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "http.request"
        if how == "scope":
            with anyio.move_on_after(0.1):
                await receive()
        elif how == "wait_for":
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(receive(), 0.1)
        else:
            task = asyncio.ensure_future(receive())
            await anyio.sleep(0.1)
            task.cancel()
        log.append("gave up")
        try:
            await anyio.sleep(60)
        except anyio.get_cancelled_exc_class():
            log.append("interrupted")
            raise

    peer = Peer(method="POST", body=[b"part"], body_ends=False)
    watch = Watch(app)
    async with peer.calling(watch):
        await until(lambda: log)
        await watched(peer)
        assert peer.reading == 1
        peer.hang_up()
    assert log == ["gave up", "interrupted"]
    assert watch.outcome.state is State.CANCELED


async def test_who_gives_up_just_as_its_message_arrives_is_watched_again(on_trio: bool) -> None:
    """The watcher has left the next read to it."""
    if on_trio:
        return  # no such order there
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await watched(peer)
        reads = asyncio.ensure_future(receive())
        await anyio.wait_all_tasks_blocked()
        peer._pieces.append(b"part")
        peer.touch()
        reads.cancel()
        await asyncio.wait([reads])
        assert reads.cancelled()
        try:
            await anyio.sleep(60)
        except asyncio.CancelledError:
            log.append("interrupted")
            raise

    peer = Peer(method="POST", body=[], body_ends=False)
    async with peer.calling(Watch(app)):
        await peer.wait_for(lambda: peer.reads == 2 and peer.reading)
        peer.hang_up()
    assert log == ["interrupted"]
