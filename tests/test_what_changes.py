"""Each line of docs/what-changes.md: first bare, then mounted."""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import pytest
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hangup import Call, HangupMiddleware, add_finalizer, current_call, protect
from hangup.testing import Peer

from .helpers import END, START, answer, chunk, until, watched

pytestmark = pytest.mark.anyio


def served(handler: Callable[[Request], Any], *, mounted: bool = False) -> ASGIApp:
    app = Starlette(routes=[Route("/", handler, methods=["GET", "POST"])])
    return HangupMiddleware(app) if mounted else app


async def pause(on_trio: bool) -> None:
    with anyio.CancelScope(shield=on_trio):
        await anyio.sleep(0.01)


@pytest.mark.parametrize("mounted", [False, True], ids=["bare", "mounted"])
async def test_a_handler_that_awaits(mounted: bool, on_trio: bool) -> None:
    log: list[str] = []
    go = anyio.Event()

    async def handler(request: Request) -> Response:
        log.append("in")
        try:
            await go.wait()
            log.append("ran to its end")
        finally:
            await pause(on_trio)
            log.append("cleaned up")
        return Response()

    app = served(handler, mounted=mounted)
    peer = Peer()
    async with peer.calling(app):
        await until(lambda: log)
        peer.hang_up()
        if not mounted:
            go.set()
    assert log == (["in", "cleaned up"] if mounted else ["in", "ran to its end", "cleaned up"])


@pytest.mark.parametrize("mounted", [False, True], ids=["bare", "mounted"])
async def test_a_handler_that_reads_its_upload(mounted: bool) -> None:
    seen: list[type[BaseException]] = []

    async def handler(request: Request) -> Response:
        try:
            await request.body()
        except BaseException as exc:
            seen.append(type(exc))
            raise
        return Response()

    app = served(handler, mounted=mounted)
    peer = Peer(method="POST", body=[b"5 of 10"], body_ends=False)
    async with peer.calling(app):
        await peer.wait_for(lambda: peer.reads == 2)
        peer.hang_up()
    assert seen == [anyio.get_cancelled_exc_class() if mounted else ClientDisconnect]


@pytest.mark.parametrize("mounted", [False, True], ids=["bare", "mounted"])
async def test_a_def_handler(mounted: bool) -> None:
    log: list[str] = []
    left = threading.Event()

    def handler(request: Request) -> Response:
        log.append("in")
        assert current_call().token.wait_sync(10) if mounted else left.wait(10)
        log.append("ran to its end")
        return Response()

    app = served(handler, mounted=mounted)
    peer = Peer()
    async with peer.calling(app):
        await until(lambda: log)
        peer.hang_up()
        left.set()
    assert log == ["in", "ran to its end"]


@pytest.mark.parametrize("mounted", [False, True], ids=["bare", "mounted"])
async def test_a_stream(mounted: bool, on_trio: bool) -> None:
    log: list[str] = []

    async def parts() -> AsyncIterator[bytes]:
        try:
            yield b"x"
            await anyio.sleep(60)
        finally:
            await pause(on_trio)
            log.append("cleaned up")

    async def handler(request: Request) -> Response:
        return StreamingResponse(parts())

    app = served(handler, mounted=mounted)
    peer = Peer()
    async with peer.calling(app):
        await peer.wait_for_body(b"x")
        await watched(peer)
        peer.hang_up()
    assert log == (["cleaned up"] if mounted or on_trio else [])  # there it was in a shield


async def stream_with_background(app_of: Callable[[ASGIApp], ASGIApp]) -> list[str]:
    log: list[str] = []

    async def note(text: str) -> None:
        log.append(text)

    async def handler(request: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            while True:
                yield b"x"
                await anyio.sleep(0.005)

        if (request.scope.get("extensions") or {}).get("hangup") is not None:
            add_finalizer(lambda: log.append("finalizer"))
        return StreamingResponse(parts(), background=BackgroundTask(note, "background"))

    peer = Peer()
    async with peer.calling(app_of(served(handler))):
        await peer.wait_for_body(b"xxx")
        await watched(peer)
        peer.hang_up()
    return log


async def test_the_background_task_of_an_aborted_stream() -> None:
    assert await stream_with_background(lambda app: app) == ["background"]
    assert await stream_with_background(HangupMiddleware) == ["finalizer"]
    kept = await stream_with_background(lambda app: HangupMiddleware(app, present_spec="server"))
    assert kept[-1] == "finalizer"


@pytest.mark.parametrize("mounted", [False, True], ids=["bare", "mounted"])
async def test_the_background_task_of_a_complete_response(mounted: bool) -> None:
    log: list[str] = []

    async def later() -> None:
        await anyio.sleep(0.05)
        log.append("background")

    async def handler(request: Request) -> Response:
        return PlainTextResponse("done", background=BackgroundTask(later))

    app = served(handler, mounted=mounted)
    peer = Peer()
    async with peer.calling(app):
        await peer.wait_for(lambda: peer.complete)
        peer.hang_up()
    assert log == ["background"]


@pytest.mark.parametrize("mounted", [False, True], ids=["bare", "mounted"])
async def test_send_afterwards(mounted: bool) -> None:
    raised: list[type[BaseException]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        while (await receive())["type"] != "http.disconnect":
            pass
        for _ in range(3):
            try:
                await send(chunk(b"x"))
            except OSError as exc:
                raised.append(type(exc))

    peer = Peer()
    async with peer.calling(HangupMiddleware(app) if mounted else app):
        await watched(peer)
        peer.hang_up()
    assert bool(raised) is mounted


@pytest.mark.parametrize("mounted", [False, True], ids=["bare", "mounted"])
async def test_what_leaves_the_application(mounted: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def handler(request: Request) -> Response:
        return PlainTextResponse(str(len(await request.body())))

    app = served(handler, mounted=mounted)
    peer = Peer(method="POST", body=[b"5 of 10"], body_ends=False)
    async with peer.calling(app):
        await peer.wait_for(lambda: peer.reads == 2)
        peer.hang_up()
    assert (peer.error is None) is mounted
    lines = [record.getMessage() for record in caplog.records if record.name == "hangup"]
    assert [line.partition(", ")[0] for line in lines] == (
        ["POST '/' canceled: client_disconnect before_response"] if mounted else []
    )


@pytest.mark.parametrize("mounted", [False, True], ids=["bare", "mounted"])
async def test_metrics_and_middlewares_outside(mounted: bool) -> None:
    statuses: list[int] = []
    begun, go = anyio.Event(), anyio.Event()

    async def handler(request: Request) -> Response:
        begun.set()
        await go.wait()
        return PlainTextResponse("done")

    inside = served(handler, mounted=mounted)

    async def metrics(scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            await send(message)

        await inside(scope, receive, counted)

    peer = Peer()
    async with peer.calling(metrics):
        await begun.wait()
        peer.hang_up()
        if not mounted:
            go.set()
    assert statuses == ([499] if mounted else [200])


@pytest.mark.parametrize("mounted", [False, True], ids=["bare", "mounted"])
async def test_the_log(mounted: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    begun, go = anyio.Event(), anyio.Event()

    async def handler(request: Request) -> Response:
        begun.set()
        await go.wait()
        return Response()

    app = served(handler, mounted=mounted)
    peer = Peer()
    async with peer.calling(app):
        await begun.wait()
        peer.hang_up()
        if not mounted:
            go.set()
    logged = [(record.name, record.levelname) for record in caplog.records if record.name != "asyncio"]
    assert logged == ([("hangup", "INFO")] if mounted else [])


@pytest.mark.usefixtures("beginning_in_time")
async def test_timeout_if_you_set_one() -> None:
    log: list[str] = []

    async def later() -> None:
        await anyio.sleep(0.2)
        log.append("background")

    async def handler(request: Request) -> Response:
        if request.method == "GET":
            await anyio.sleep(60)
        return PlainTextResponse("done", background=BackgroundTask(later))

    app = HangupMiddleware(served(handler), timeout=0.1)
    slow, quick = Peer(), Peer(method="POST")
    await slow.run(app)
    assert (slow.status, slow.complete) == (504, True)
    await quick.run(app)
    assert (quick.status, log) == (200, ["background"])


async def test_the_scope() -> None:
    seen: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)
        await answer(send)

    peer = Peer()
    before = dict(peer.scope)
    await peer.run(HangupMiddleware(app))
    [scope] = seen
    assert peer.scope == before
    changed = {key for key in scope if scope[key] != before.get(key)}
    assert changed == {"asgi", "state", "extensions"}
    assert scope["asgi"] == {"version": "3.0", "spec_version": "2.4"}


@pytest.mark.parametrize("mounted", [False, True], ids=["bare", "mounted"])
async def test_what_the_application_writes_into_its_scope(mounted: bool) -> None:
    seen: list[tuple[str, Any, Any, bool]] = []

    async def handler(request: Request) -> Response:
        request.state.user = "ada"

        async def parts() -> AsyncIterator[str]:
            yield "x"
            request.state.tokens = 7

        return StreamingResponse(parts())

    async def behind_a_proxy(scope: Scope, receive: Receive, send: Send) -> None:
        scope["client"] = ("192.0.2.1", 80)  # as `ProxyHeadersMiddleware` does
        await routed(scope, receive, send)

    async def access_log(scope: Scope, receive: Receive, send: Send) -> None:
        def note(when: str) -> None:
            state = scope.get("state") or {}
            seen.append((when, scope["client"], {**state}, "endpoint" in scope and "router" in scope))

        async def logged(message: Message) -> None:
            if message["type"] == "http.response.start":
                note("started")
            await send(message)

        await inside(scope, receive, logged)
        note("ended")

    routed: ASGIApp = Starlette(routes=[Mount("/of/{tenant}", routes=[Route("/", handler)])])
    inside: ASGIApp = HangupMiddleware(behind_a_proxy) if mounted else behind_a_proxy
    client, pool = ("192.0.2.1", 80), {"pool": 1}
    for state in (None, pool):
        peer = Peer(path="/of/ada/")
        if state is None:
            del peer.scope["state"]  # as of a server without lifespan
        else:
            peer.scope["state"] = {**state}
        await peer.run(access_log)
        assert peer.error is None
        assert seen == [
            ("started", client, {**(state or {}), "user": "ada"}, True),
            ("ended", client, {**(state or {}), "user": "ada", "tokens": 7}, True),
        ]
        assert peer.scope["root_path"] == "/of/ada"
        assert "hangup" not in (peer.scope.get("extensions") or {})
        seen.clear()


async def test_what_an_application_that_is_interrupted_has_written_into_its_scope_is_seen_outside() -> None:
    seen: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["endpoint"] = "the endpoint"
        scope["state"]["user"] = "ada"
        await anyio.sleep(60)

    async def access_log(scope: Scope, receive: Receive, send: Send) -> None:
        async def logged(message: Message) -> None:
            seen.append((message["type"], scope.get("endpoint"), dict(scope["state"])))
            await send(message)

        await HangupMiddleware(app)(scope, receive, logged)

    peer = Peer()
    async with peer.calling(access_log):
        await watched(peer)
        peer.hang_up()
    kinds = ["http.response.start", "http.response.body"]
    assert seen == [(kind, "the endpoint", {"user": "ada"}) for kind in kinds]


@pytest.mark.parametrize("mounted", [False, True], ids=["bare", "mounted"])
async def test_a_stream_that_reads_its_own_request(mounted: bool) -> None:
    async def echo(request: Request) -> Response:
        return StreamingResponse(request.stream())

    app = served(echo, mounted=mounted)
    pieces = [b"a", b"b", b"c", b"d"]
    peer = Peer(method="POST", body=pieces)
    async with peer.calling(app):
        await peer.wait_for(lambda: peer.complete or peer.reads > len(pieces))
        peer.hang_up()
    assert (peer.body == b"abcd") is mounted


async def test_an_exception_of_the_application() -> None:
    error = ValueError("mine")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise error

    peer = Peer()
    await peer.run(HangupMiddleware(app))
    assert peer.error is error


async def test_a_disconnect_after_the_response_is_complete() -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send(START)
        await send(END)
        seen.append((await receive())["type"])

    peer = Peer()
    await peer.run(HangupMiddleware(app))
    assert seen == ["http.disconnect"]


@pytest.mark.parametrize("protected", [False, True], ids=["shared", "protected"])
async def test_shared_clients_under_cancellation(protected: bool) -> None:
    """A pipe with one answer per question: who is cancelled between the two leaves his answer to the next."""
    questions, asked = anyio.create_memory_object_stream[str](1)
    answers, answered = anyio.create_memory_object_stream[str](1)

    async def database() -> None:
        async for question in asked:
            await release.wait()
            await answers.send(f"answer to {question}")

    async def ask(question: str) -> str:
        await questions.send(question)
        return await answered.receive()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        calls.append(current_call())
        if protected:
            with protect():
                await ask("first")
            await anyio.sleep(60)
        await ask("first")

    calls: list[Call] = []
    release = anyio.Event()
    peer = Peer()
    async with anyio.create_task_group() as tasks, questions, asked, answers, answered:
        tasks.start_soon(database)
        async with peer.calling(HangupMiddleware(app)):
            await watched(peer)
            peer.hang_up()
            await until(lambda: calls[0].token.canceled and (protected or peer.ended))
            release.set()
        assert await ask("second") == ("answer to second" if protected else "answer to first")
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("mounted", [False, True], ids=["bare", "mounted"])
async def test_is_disconnected(mounted: bool) -> None:
    polls: list[bool] = []

    async def handler(request: Request) -> Response:
        polls.append(await request.is_disconnected())
        with anyio.CancelScope(shield=True):
            if mounted:
                await until(lambda: current_call().token.canceled)
            else:
                await until(lambda: peer.left)
            polls.append(await request.is_disconnected())
        return Response()

    app = served(handler, mounted=mounted)
    peer = Peer()
    async with peer.calling(app):
        await until(lambda: polls)
        peer.hang_up()
    assert polls == [False, True]
