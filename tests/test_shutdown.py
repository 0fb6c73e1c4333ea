"""Rule 18: the flag of its own, `shutdown_grace`, lifespan held back, `drain`."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from starlette.types import Message, Receive, Scope, Send

from hangup import Call, Cause, Policy, State, add_finalizer, before_success, current_call, protect, step
from hangup.testing import Peer, WebSocketPeer

from .helpers import START, Watch, answer, chunk, types, until, watched

pytestmark = pytest.mark.anyio

LIFESPAN = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}


class Server:
    """The lifespan of a server around an application, and its way of handling signals."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.log: list[str] = []
        self.sent: list[str] = []
        self._shutdown = anyio.Event()
        self._changed = anyio.Event()

    async def receive(self) -> Message:
        if not self.sent and "startup" not in self.log:
            self.log.append("startup")
            return {"type": "lifespan.startup"}
        await self._shutdown.wait()
        return {"type": "lifespan.shutdown"}

    async def send(self, message: Message) -> None:
        self.sent.append(message["type"])
        self._changed.set()

    async def run(self) -> None:
        await self.app(dict(LIFESPAN), self.receive, self.send)

    async def started(self) -> None:
        with anyio.fail_after(5):
            while "lifespan.startup.complete" not in self.sent:
                await self._changed.wait()

    def shut_down(self) -> None:
        self._shutdown.set()


@contextmanager
def handling(signum: int, handler: Callable[[int, Any], Any] | None) -> Iterator[list[int]]:
    """As if a server had installed ``handler``. Yields the signals that reached it."""
    heard: list[int] = []

    def note(signum: int, frame: Any) -> None:
        heard.append(signum)
        if handler is not None:
            handler(signum, frame)

    before = signal.signal(signum, note)
    try:
        yield heard
        assert signal.getsignal(signum) is note
    finally:
        signal.signal(signum, before)


def app_of(handler: Callable[[Scope, Receive, Send], Any], log: list[str]) -> Any:
    """An application with a lifespan."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await handler(scope, receive, send)
            return
        assert (await receive())["type"] == "lifespan.startup"
        await send({"type": "lifespan.startup.complete"})
        assert (await receive())["type"] == "lifespan.shutdown"
        log.append("teardown")
        await send({"type": "lifespan.shutdown.complete"})

    return app


async def sleeper(scope: Scope, receive: Receive, send: Send) -> None:
    await anyio.sleep(60)


# ---------------------------------------------------------------------- the flag


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_raises_the_flag_and_reaches_the_server(signum: int) -> None:
    seen: list[bool] = []

    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        call = current_call()
        seen.append(call.shutting_down)
        os.kill(os.getpid(), signum)
        await until(lambda: call.shutting_down)
        seen.append(call.token.canceled)
        await answer(send)

    log: list[str] = []
    watch = Watch(app_of(handler, log))
    server = Server(watch)
    with handling(signum, None) as heard:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.run)
            await server.started()
            peer = Peer()
            await peer.run(watch)
            server.shut_down()
    assert peer.error is None
    assert heard == [signum]
    assert seen == [False, False]  # without shutdown_grace nobody is canceled
    assert watch.outcome.state is State.COMPLETED
    assert log == ["teardown"]


async def test_a_handler_of_the_event_loop_still_hears(on_trio: bool) -> None:
    """hypercorn, granian and gunicorn use ``loop.add_signal_handler``."""
    if on_trio:
        return
    heard = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, heard.set)
    try:
        watch = Watch(app_of(sleeper, []), shutdown_grace=0)
        server = Server(watch)
        peer = Peer()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.run)
            await server.started()
            tasks.start_soon(peer.run, watch)
            await watched(peer)
            os.kill(os.getpid(), signal.SIGTERM)
            with anyio.fail_after(5):
                await heard.wait()
            server.shut_down()
        assert (watch.outcome.state, watch.outcome.cause) == (State.CANCELED, Cause.SERVER_SHUTDOWN)
        assert peer.status == 503
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


async def test_without_lifespan_the_first_call_listens() -> None:
    """daphne, granian's ``asginl``, and mounts below a router."""

    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await anyio.sleep(60)

    before = signal.getsignal(signal.SIGTERM)
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, frame: heard.append(signum))
    try:
        watch = Watch(handler, shutdown_grace=0.01)
        peer = Peer()
        await peer.run(watch)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]
    assert (watch.outcome.state, watch.outcome.cause) == (State.CANCELED, Cause.SERVER_SHUTDOWN)
    assert peer.status == 503


async def test_where_nobody_handles_signals_nothing_is_installed() -> None:
    before = [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)]
    assert before[0] is signal.SIG_DFL

    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send)

    await Peer().run(Watch(handler))
    assert [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)] == before


async def test_a_handler_put_in_front_of_ours_is_left_alone() -> None:
    log: list[str] = []
    watch = Watch(app_of(sleeper, log))
    server = Server(watch)
    with handling(signal.SIGTERM, None) as heard:
        installed = signal.getsignal(signal.SIGTERM)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.run)
            await server.started()
            ours = signal.getsignal(signal.SIGTERM)
            assert callable(ours)
            theirs = signal.signal(signal.SIGTERM, lambda signum, frame: ours(signum, frame))
            assert theirs is ours
            server.shut_down()
        assert signal.getsignal(signal.SIGTERM) not in {ours, installed}
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: heard)  # through theirs and ours, which only passes on now
        signal.signal(signal.SIGTERM, installed)


async def test_two_middlewares_on_one_loop_share_one_handler() -> None:
    watches = [Watch(app_of(sleeper, [])) for _ in range(2)]
    servers = [Server(watch) for watch in watches]
    with handling(signal.SIGTERM, None) as heard:
        async with anyio.create_task_group() as tasks:
            handlers = []
            for server in servers:
                tasks.start_soon(server.run)
                await server.started()
                handlers.append(signal.getsignal(signal.SIGTERM))
            assert handlers[0] is handlers[1]
            os.kill(os.getpid(), signal.SIGTERM)
            await until(lambda: heard)
            for watch in watches:
                assert watch.app._find_here().shutting_down
            for server in servers:
                server.shut_down()
        assert heard == [signal.SIGTERM]


async def test_a_loop_in_another_thread_hears_too() -> None:
    """Only the main thread may install handlers; every loop with calls hears of the signal."""
    here_log: list[str] = []
    watch = Watch(app_of(sleeper, here_log), shutdown_grace=0)
    peers: list[Peer] = []
    running = threading.Event()

    async def elsewhere() -> None:
        peer = Peer()
        peers.append(peer)
        async with peer.calling(watch):
            await watched(peer)
            running.set()

    thread = threading.Thread(target=asyncio.run, args=(elsewhere(),))
    server = Server(watch)
    with handling(signal.SIGTERM, None):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.run)
            await server.started()
            thread.start()
            await until(running.is_set)
            os.kill(os.getpid(), signal.SIGTERM)
            await until(lambda: not thread.is_alive())
            server.shut_down()
    assert watch.outcome.cause is Cause.SERVER_SHUTDOWN
    assert peers[0].status == 503


# ---------------------------------------------------------------------- what is canceled, and what it is answered


async def test_after_the_grace_everything_is_canceled_and_answered_truly() -> None:
    ran: list[str] = []

    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        add_finalizer(lambda: ran.append(scope["path"]))
        kind = scope["path"]
        if kind in {"/sse", "/raw"}:
            content_type = b"text/event-stream; charset=utf-8" if kind == "/sse" else b"application/x-ndjson"
            await send({**START, "headers": [(b"Content-Type", content_type)]})
            await send(chunk(b"data: 1\n\n"))
        if kind == "/background":
            await answer(send)
        if kind in {"/ws", "/ws-listening"}:
            await receive()
            await send({"type": "websocket.accept"})
        if kind == "/ws-listening":
            await receive()
        await anyio.sleep(60)

    watch = Watch(handler, shutdown_grace=0.01)
    peers = [Peer(path=path) for path in ("/silent", "/sse", "/raw", "/background")]
    sockets = [WebSocketPeer(path=path) for path in ("/ws", "/ws-listening")]
    async with anyio.create_task_group() as tasks:
        for peer in (*peers, *sockets):
            tasks.start_soon(peer.run, watch)
        await until(lambda: all(peer.sent or peer.reading for peer in (*peers, *sockets)))
        watch.app._find_here().announce()
    assert [peer.error for peer in (*peers, *sockets)] == [None] * 6
    assert {(o.state, o.cause) for o in watch.outcomes} == {(State.CANCELED, Cause.SERVER_SHUTDOWN)}
    assert [peer.status for peer in peers] == [503, 200, 200, 200]
    assert [peer.complete for peer in peers] == [True, True, False, True]  # a stream that has an end of its own is cut
    assert [socket.close_code for socket in sockets] == [1012, 1012]
    assert sorted(ran) == ["/background", "/raw", "/silent", "/sse", "/ws", "/ws-listening"]


@pytest.mark.parametrize(
    ("begun", "complete"),
    [(None, True), (b"text/event-stream", True), (b"application/x-ndjson", False)],
    ids=["nothing", "event stream", "stream"],
)
async def test_an_application_that_gives_up_in_a_shutdown_has_not_failed(begun: bytes | None, complete: bool) -> None:
    """sse-starlette hears of the signal itself: it cancels its streams, and returns without a last frame."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if begun is not None:
            await send({**START, "headers": [(b"content-type", begun)]})
            await send(chunk(b"data: 1\n\n"))
        with anyio.CancelScope() as scope_of_its_own, step("agent"):
            watch.app._find_here().announce()
            scope_of_its_own.cancel()
            await anyio.sleep(60)

    watch = Watch(app)
    peer = Peer()
    await peer.run(watch)
    outcome = watch.outcome
    assert (outcome.state, outcome.cause, outcome.error) == (State.CANCELED, Cause.SERVER_SHUTDOWN, None)
    assert [record.state for record in outcome.steps] == [State.CANCELED]
    assert (peer.status, peer.complete) == (200 if begun else 503, complete)


async def test_a_call_that_was_only_signaled_is_interrupted_at_last() -> None:
    watch = Watch(sleeper, policy="signal", shutdown_grace=0)
    peer = Peer()
    async with peer.calling(watch):
        await watched(peer)
        peer.hang_up()
        await until(lambda: peer.left and not peer.reading)
        await anyio.wait_all_tasks_blocked()
        watch.app._find_here().announce()
    assert (watch.outcome.state, watch.outcome.cause) == (State.CANCELED, Cause.CLIENT_DISCONNECT)


async def test_a_call_that_was_to_finish_at_last_is_interrupted_all_the_same() -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with protect():
            await watched(peer)
            peer.hang_up()
            await until(lambda: current_call().life.left)
            current_call().policy = Policy("finish")
        log.append("goes on")
        try:
            await anyio.sleep(60)
        finally:
            log.append("interrupted")

    peer = Peer()
    watch = Watch(app)
    async with peer.calling(watch):
        await until(lambda: log)
        assert await watch.app.drain(10)
    assert log == ["goes on", "interrupted"]
    assert (watch.outcome.state, watch.outcome.cause) == (State.CANCELED, Cause.CLIENT_DISCONNECT)


async def test_a_call_whose_client_left_during_its_hooks_is_interrupted_at_last() -> None:
    """Hooks keep a disconnect from being a cause; so here the shutdown is the first, and nobody was signaled."""

    calls: list[Call] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        calls.append(current_call())

        @before_success
        async def hook() -> None:
            peer.hang_up()
            await until(lambda: calls[0].life.left)

        await answer(send)
        await anyio.sleep_forever()  # a background task

    peer = Peer()
    watch = Watch(app, policy="signal")
    with anyio.fail_after(5):
        async with peer.calling(watch):
            await until(lambda: bool(calls) and calls[0].life.finished)
            assert await watch.app.drain(5)
    assert watch.outcome.state is State.CANCELED
    assert watch.outcome.cause is Cause.SERVER_SHUTDOWN


@pytest.mark.parametrize("kind", [Peer, WebSocketPeer])
async def test_a_disconnect_during_a_shutdown_is_the_servers_doing(kind: type[Peer | WebSocketPeer]) -> None:
    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        if kind is WebSocketPeer:
            await receive()
            await send({"type": "websocket.accept"})
        while not (await receive())["type"].endswith("disconnect"):
            pass

    watch = Watch(handler)
    peer = kind()
    async with peer.calling(watch):
        await peer.wait_for(lambda: peer.reads == 2 and peer.reading)
        watch.app._find_here().announce()
        peer.hang_up()
    assert (watch.outcome.state, watch.outcome.cause) == (State.CANCELED, Cause.SERVER_SHUTDOWN)


async def test_the_servers_own_cancellation_is_a_shutdown_once_it_has_begun(on_trio: bool) -> None:
    if on_trio:
        return
    watch = Watch(sleeper)
    peer = Peer()
    task = asyncio.ensure_future(watch(peer.scope, peer.receive, peer.send))
    await watched(peer)
    watch.app._find_here().announce()
    task.cancel("Task cancelled, timeout graceful shutdown exceeded")
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (watch.outcome.state, watch.outcome.cause) == (State.CANCELED, Cause.SERVER_SHUTDOWN)


# ---------------------------------------------------------------------- lifespan


@pytest.mark.parametrize("late", [False, True], ids=["finalizer", "late finalizer"])
async def test_lifespan_is_held_back_until_calls_and_finalizers_have_ended(late: bool) -> None:
    log: list[str] = []
    go_on = anyio.Event()

    async def release() -> None:
        log.append("finalizing")
        await go_on.wait()
        log.append("finalized")

    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        call = current_call()
        if late:
            await answer(send)
            late_calls.append(call)
            return
        add_finalizer(release)
        await anyio.sleep(60)

    late_calls: list[Any] = []
    watch = Watch(app_of(handler, log))
    server = Server(watch)
    peer = Peer()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.run)
        await server.started()
        tasks.start_soon(peer.run, watch)
        if late:
            await until(lambda: peer.ended)
            late_calls[0].add_finalizer(release)
        else:
            await watched(peer)
        server.shut_down()  # which tells those who still run
        await until(lambda: log == ["finalizing"])
        await anyio.wait_all_tasks_blocked()
        assert log == ["finalizing"]
        go_on.set()
    assert log == ["finalizing", "finalized", "teardown"]
    assert server.sent[-1] == "lifespan.shutdown.complete"
    assert watch.outcome.cause is (None if late else Cause.SERVER_SHUTDOWN)


async def test_uvicorns_cancel_and_immediate_teardown(on_trio: bool) -> None:
    """It cancels its tasks and says ``lifespan.shutdown`` in the same tick. The cleanup must not be cut off by us."""
    if on_trio:
        return
    log: list[str] = []

    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        add_finalizer(lambda: log.append("finalizer"))
        try:
            await anyio.sleep(60)
        finally:
            await anyio.sleep(0.01)
            log.append("cleanup")

    watch = Watch(app_of(handler, log))
    server = Server(watch)
    peer = Peer()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.run)
        await server.started()
        task = asyncio.ensure_future(watch(peer.scope, peer.receive, peer.send))
        await watched(peer)
        watch.app._find_here().announce()
        task.cancel()
        server.shut_down()
    assert log == ["cleanup", "finalizer", "teardown"]
    assert task.cancelled()
    assert (watch.outcome.state, watch.outcome.cause) == (State.CANCELED, Cause.SERVER_SHUTDOWN)


async def test_the_hold_is_bounded_and_says_who_is_left(caplog: pytest.LogCaptureFixture) -> None:
    go_on = anyio.Event()

    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        with anyio.CancelScope(shield=True):
            await go_on.wait()

    log: list[str] = []
    watch = Watch(app_of(handler, log), grace=0.01, finalizer_budget=0.02)
    server = Server(watch)
    peer = Peer(path="/deaf")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.run)
        await server.started()
        tasks.start_soon(peer.run, watch)
        await watched(peer)
        server.shut_down()
        await until(lambda: log)
        go_on.set()
    [line] = [r.getMessage() for r in caplog.records if r.getMessage().startswith("shutdown")]
    assert line == "shutdown goes on after 0.03 s with 1 calls and 0 late finalizers unfinished: GET '/deaf'"


async def test_an_application_without_lifespan_is_as_it_was() -> None:
    error = ValueError("lifespan? never heard of it")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise error

    server = Server(Watch(app))
    with pytest.raises(ValueError) as caught:
        await server.run()
    assert caught.value is error


async def test_a_second_server_on_the_same_loop_starts_afresh() -> None:
    log: list[str] = []

    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        assert not current_call().shutting_down
        await answer(send)

    watch = Watch(app_of(handler, log))
    for _ in range(2):
        server = Server(watch)
        peer = Peer()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.run)
            await server.started()
            await peer.run(watch)
            server.shut_down()
        assert peer.status == 200
        peer = Peer()
        await peer.run(watch)  # a test that does without a lifespan
        assert peer.status == 200
    assert log == ["teardown"] * 2


# ---------------------------------------------------------------------- drain


async def test_drain_cancels_waits_and_answers() -> None:
    log: list[str] = []

    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        add_finalizer(lambda: log.append("finalizer"))
        await anyio.sleep(60)

    watch = Watch(handler)
    peers = [Peer() for _ in range(3)]
    async with anyio.create_task_group() as tasks:
        for peer in peers:
            tasks.start_soon(peer.run, watch)
        for peer in peers:
            await watched(peer)
        assert await watch.app.drain(5) is True
        assert log == ["finalizer"] * 3
    assert [peer.status for peer in peers] == [503] * 3
    assert {o.cause for o in watch.outcomes} == {Cause.SERVER_SHUTDOWN}
    assert await watch.app.drain(0) is True  # there is nobody


async def test_drain_gives_up_after_its_timeout() -> None:
    go_on = anyio.Event()

    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        with anyio.CancelScope(shield=True):
            await go_on.wait()

    watch = Watch(handler)
    peer = Peer()
    async with peer.calling(watch):
        await watched(peer)
        assert await watch.app.drain(0.01) is False
        go_on.set()
        assert await watch.app.drain(5) is True


async def test_two_drains_wait_for_the_same() -> None:
    watch = Watch(sleeper)
    peer = Peer()
    drained: list[bool] = []

    async def drain() -> None:
        drained.append(await watch.app.drain(5))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(peer.run, watch)
        await watched(peer)
        tasks.start_soon(drain)
        tasks.start_soon(drain)
    assert drained == [True, True]


@pytest.mark.parametrize("kind", [Peer, WebSocketPeer])
async def test_a_call_that_comes_later_is_answered_and_not_started(kind: type[Peer | WebSocketPeer]) -> None:
    started: list[str] = []

    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        started.append("started")
        await answer(send)

    watch = Watch(handler)
    await watch.app.drain(1)
    peer = kind()
    await peer.run(watch)
    assert peer.status == 503
    assert started == []
    assert peer.error is None
    assert (watch.outcome.state, watch.outcome.cause) == (State.CANCELED, Cause.SERVER_SHUTDOWN)
    assert len(types(peer.sent)) == 2


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"shutdown_grace": -1}, ValueError, "shutdown_grace takes 0 or more seconds, not -1"),
        ({"shutdown_grace": "1"}, TypeError, "shutdown_grace takes seconds, not '1'"),
    ],
)
def test_a_wrong_grace_is_named(options: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Watch(sleeper, **options)
