"""Plain Starlette and FastAPI applications with nothing changed but the mounted middleware."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import pytest
from fastapi import Depends, FastAPI, Request
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from hangup import Cause, HangupMiddleware, Outcome, State, current_call
from hangup.fastapi import CallDep, CancelTokenDep
from hangup.starlette import call_of
from hangup.testing import Peer

from .helpers import until, watched

pytestmark = pytest.mark.anyio


@pytest.fixture
def outcomes() -> list[Outcome]:
    return []


def mounted(outcomes: list[Outcome], *routes: Route, inside: Any = None) -> Starlette:
    middleware = [Middleware(HangupMiddleware, observers=[outcomes.append])]
    if inside is not None:
        middleware.append(Middleware(inside))
    return Starlette(routes=list(routes), middleware=middleware)


async def pause(on_trio: bool) -> None:
    """A cleanup that awaits. trio's tasks shield theirs."""
    with anyio.CancelScope(shield=on_trio):
        await anyio.sleep(0.01)


async def test_an_async_handler_is_interrupted_and_cleans_up(outcomes: list[Outcome], on_trio: bool) -> None:
    log: list[str] = []

    async def slow(request: Request) -> Response:
        try:
            await anyio.sleep(60)
        finally:
            await pause(on_trio)
            log.append("cleaned up")
        raise AssertionError

    peer = Peer()
    async with peer.calling(mounted(outcomes, Route("/", slow))):
        await watched(peer)
        peer.hang_up()
    assert log == ["cleaned up"]
    assert peer.error is None
    assert [o.state for o in outcomes] == [State.CANCELED]


async def test_a_streams_generator_cleans_up(outcomes: list[Outcome], on_trio: bool) -> None:
    log: list[str] = []

    async def stream(request: Request) -> Response:
        async def events() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"data: x\n\n"
                    await anyio.sleep(0.005)
            finally:
                await pause(on_trio)
                log.append("cleaned up")

        return StreamingResponse(events())

    peer = Peer()
    async with peer.calling(mounted(outcomes, Route("/", stream))):
        await peer.wait_for_body(b"data: x\n\n" * 3)
        peer.hang_up()
    assert log == ["cleaned up"]
    assert [(o.state, o.delivered) for o in outcomes] == [(State.CANCELED, False)]


# Starlette leaves the iterator it wraps around a sync generator to the garbage collector, of which trio warns.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_sync_generator_ends_at_its_next_chunk(outcomes: list[Outcome]) -> None:
    chunks = 0

    async def stream(request: Request) -> Response:
        def parts() -> Iterator[bytes]:
            nonlocal chunks
            while True:
                chunks += 1
                yield b"x"
                time.sleep(0.002)

        return StreamingResponse(parts())

    peer = Peer()
    async with peer.calling(mounted(outcomes, Route("/", stream))):
        await peer.wait_for_body(b"xxx")
        await watched(peer)
        peer.hang_up()
        seen = chunks
    assert chunks <= seen + 2
    assert [o.state for o in outcomes] == [State.CANCELED]


async def test_a_fastapi_yield_dependency_cleans_up(outcomes: list[Outcome], on_trio: bool) -> None:
    log: list[str] = []
    app = FastAPI()
    app.add_middleware(HangupMiddleware, observers=[outcomes.append])

    async def session() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            await pause(on_trio)
            log.append("session closed")

    @app.get("/")
    async def slow(session: int = Depends(session)) -> None:
        await anyio.sleep(60)

    peer = Peer()
    async with peer.calling(app):
        await watched(peer)
        peer.hang_up()
    assert log == ["session closed"]
    assert peer.error is None
    assert [o.state for o in outcomes] == [State.CANCELED]


async def test_a_def_handler_is_waited_for_and_completes_undelivered(outcomes: list[Outcome]) -> None:
    app = FastAPI()
    app.add_middleware(HangupMiddleware, observers=[outcomes.append])
    gone = threading.Event()
    ended: list[int] = []

    @app.get("/")
    def work() -> Response:  # a plain value would be serialized in a second thread, with a checkpoint on the way
        assert gone.wait(5)
        assert outcomes == []
        ended.append(1)
        return Response("done")

    peer = Peer()
    async with peer.calling(app):
        await watched(peer)
        peer.hang_up()
        await until(lambda: peer.reading == 0)
        gone.set()
    assert ended == [1]
    assert [(o.state, o.delivered, o.cause) for o in outcomes] == [(State.COMPLETED, False, Cause.CLIENT_DISCONNECT)]


async def test_the_dependencies_give_call_and_token(outcomes: list[Outcome]) -> None:
    app = FastAPI()
    app.add_middleware(HangupMiddleware, observers=[outcomes.append])

    @app.get("/")
    async def look(request: Request, call: CallDep, token: CancelTokenDep) -> bool:
        return (
            call is current_call() and call is request.state.hangup and call is call_of(request) and token is call.token
        )

    peer = Peer()
    await peer.run(app)
    assert peer.body == b"true"


async def test_without_the_middleware_the_helpers_say_so() -> None:
    errors: list[str] = []

    async def look(request: Request) -> Response:
        with pytest.raises(LookupError, match="is HangupMiddleware mounted") as caught:
            call_of(request)
        errors.append(str(caught.value))
        return Response()

    peer = Peer()
    await peer.run(Starlette(routes=[Route("/", look)]))
    assert errors == ["no call for '/': is HangupMiddleware mounted?"]


async def test_a_background_task_after_a_complete_response_runs_to_its_end(outcomes: list[Outcome]) -> None:
    log: list[str] = []

    async def mail() -> None:
        await anyio.sleep(0.05)
        log.append("sent")

    async def order(request: Request) -> Response:
        return JSONResponse({}, background=BackgroundTask(mail))

    peer = Peer()
    async with peer.calling(mounted(outcomes, Route("/", order))):
        await peer.wait_for(lambda: peer.complete)
        peer.hang_up()
    assert log == ["sent"]
    assert [(o.state, o.delivered) for o in outcomes] == [(State.COMPLETED, True)]


async def test_an_aborted_upload_is_no_server_error(outcomes: list[Outcome], caplog: pytest.LogCaptureFixture) -> None:
    async def upload(request: Request) -> Response:
        return JSONResponse(len(await request.body()))

    peer = Peer(method="POST", body=[b"12345"], body_ends=False)
    async with peer.calling(mounted(outcomes, Route("/", upload, methods=["POST"]))):
        await peer.wait_for(lambda: peer.reads == 2)
        peer.hang_up()
    assert peer.error is None
    assert peer.late[0]["status"] == 499
    assert [(o.state, o.status_code) for o in outcomes] == [(State.CANCELED, None)]
    assert caplog.text == ""


class NoOp(BaseHTTPMiddleware):
    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        return await call_next(request)


@pytest.mark.parametrize("where", ["inside", "outside"])
async def test_base_http_middleware(outcomes: list[Outcome], where: str, caplog: pytest.LogCaptureFixture) -> None:
    async def slow(request: Request) -> Response:
        await anyio.sleep(60)
        raise AssertionError

    if where == "inside":
        app: Any = mounted(outcomes, Route("/", slow), inside=NoOp)
    else:
        app = NoOp(mounted(outcomes, Route("/", slow)))
    peer = Peer()
    async with peer.calling(app):
        await watched(peer)
        peer.hang_up()
    assert peer.error is None
    assert [(o.state, o.cause) for o in outcomes] == [(State.CANCELED, Cause.CLIENT_DISCONNECT)]
    assert "RuntimeError" not in caplog.text


async def test_the_token_fires_at_any_depth_below_base_http_middleware(outcomes: list[Outcome]) -> None:
    causes: list[Any] = []

    async def slow(request: Request) -> Response:
        current_call().token.add_callback(lambda: causes.append(call_of(request).token.cause))
        await anyio.sleep(60)
        raise AssertionError

    peer = Peer()
    async with peer.calling(mounted(outcomes, Route("/", slow), inside=NoOp)):
        await watched(peer)
        peer.hang_up()
    assert causes == [Cause.CLIENT_DISCONNECT]
