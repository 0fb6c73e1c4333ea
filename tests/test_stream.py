"""`closing_stream`, and what the framework helpers give."""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from typing import Any

import anyio
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from hangup import HangupMiddleware, Outcome, State, current_call, step
from hangup.falcon import CallMiddleware
from hangup.starlette import closing_stream
from hangup.testing import Peer

from .helpers import watched

pytestmark = pytest.mark.anyio


def streaming(parts: Any, **options: Any) -> HangupMiddleware:
    async def stream(request: Request) -> Response:
        return StreamingResponse(closing_stream(parts))

    return HangupMiddleware(Starlette(routes=[Route("/", stream)]), **options)


def numbers(log: list[str], release: threading.Event) -> Iterator[bytes]:
    try:
        while True:
            yield b"x"
            release.wait(0.002)
    finally:
        log.append("closed")


@pytest.mark.parametrize("policy", ["cancel", "signal"])
async def test_a_sync_generator_is_closed_before_the_call_has_ended(policy: str) -> None:
    log: list[str] = []
    outcomes: list[Outcome] = []

    def observe(outcome: Outcome) -> None:
        outcomes.append(outcome)
        log.append("outcome")

    parts = numbers(log, threading.Event())  # held here, so that no garbage collector does it
    peer = Peer()
    async with peer.calling(streaming(parts, policy=policy, observers=[observe])):
        await peer.wait_for_body(b"xxx")
        await watched(peer)
        peer.hang_up()
    assert log == ["closed", "outcome"]
    assert [outcome.state for outcome in outcomes] == [State.CANCELED]


async def test_an_async_generator_is_closed_in_the_task_that_iterates_it(on_trio: bool) -> None:
    log: list[bool] = []

    async def parts() -> AsyncIterator[bytes]:
        task = anyio.get_current_task().id
        try:
            while True:
                yield b"x"
                await anyio.sleep(0.001)
        finally:
            with anyio.CancelScope(shield=on_trio):
                await anyio.sleep(0.005)
            log.append(anyio.get_current_task().id == task)

    peer = Peer()
    async with peer.calling(streaming(parts())):
        await peer.wait_for_body(b"xxx")
        await watched(peer)
        peer.hang_up()
    assert log == [True]


@pytest.mark.parametrize("ending", ["hang-up", "timeout"])
@pytest.mark.usefixtures("beginning_in_time")
async def test_a_stream_that_was_left_at_its_yield_is_closed_in_the_task_that_iterated_it(
    ending: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The client does not read, so ``send`` is where the stream ends. Variables and scopes are left in order."""
    log: list[Any] = []
    var: ContextVar[str] = ContextVar("var", default="outside")

    async def parts() -> AsyncIterator[bytes]:
        task, token = anyio.get_current_task().id, var.set("inside")
        with step("rows"), anyio.CancelScope():  # one that is left in another task complains
            try:
                while True:
                    yield b"x"
            except GeneratorExit:
                await anyio.sleep(0.005)
                log.append(anyio.get_current_task().id == task)
                var.reset(token)  # raises in another context
                raise

    peer = Peer()
    outcomes: list[Outcome] = []
    stream = parts()  # held here, so that no garbage collector does it
    options = {"timeout": 0.05} if ending == "timeout" else {}
    async with peer.calling(streaming(stream, observers=[outcomes.append], **options)):
        await peer.wait_for_body(b"x")
        peer.stop_reading()
        if ending == "hang-up":
            await watched(peer)
            peer.hang_up()
    assert log == [True]
    [outcome] = outcomes
    assert outcome.state is (State.CANCELED if ending == "hang-up" else State.TIMED_OUT)
    assert [record.state for record in outcome.finalizers] == [State.COMPLETED]
    assert [record.state for record in outcome.steps] == [outcome.state]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("error", ["raises", "hangs"])
async def test_a_stream_left_at_its_yield_that_cannot_be_closed_fails_its_finalizer(
    error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hangup._call.CLOSE_TIMEOUT", 0.02)

    async def parts() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"x"
        finally:
            if error == "hangs":
                await anyio.sleep(60)
            raise RuntimeError("broken")

    peer = Peer()
    outcomes: list[Outcome] = []
    stream = parts()
    async with peer.calling(streaming(stream, observers=[outcomes.append])):
        await peer.wait_for_body(b"x")
        peer.stop_reading()
        await watched(peer)
        peer.hang_up()
    [outcome] = outcomes
    assert outcome.state is State.CANCELED
    assert [record.state for record in outcome.finalizers] == [State.FAILED]


async def test_a_stream_that_was_dropped_is_closed_by_a_finalizer() -> None:
    log: list[str] = []

    async def parts() -> AsyncIterator[bytes]:
        try:
            yield b"x"
        finally:
            log.append("closed")

    held: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        held.append(closing_stream(parts()))
        assert await anext(held[0]) == b"x"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    await Peer().run(HangupMiddleware(app))
    assert log == ["closed"]


async def test_a_stream_that_ends_by_itself_is_exhausted_as_ever() -> None:
    peer = Peer()
    await peer.run(streaming([b"a", b"b"]))
    assert peer.body == b"ab"
    assert peer.complete


async def test_an_error_of_the_generator_comes_out_and_one_while_closing_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def parts() -> Iterator[bytes]:
        yield b"x"
        raise ValueError("mine")

    peer = Peer()
    await peer.run(streaming(parts()))
    assert isinstance(peer.error, ValueError)


async def test_outside_a_call_it_only_iterates() -> None:
    assert [part async for part in closing_stream(iter([1, 2]))] == [1, 2]
    with pytest.raises(TypeError, match="closing_stream"):
        closing_stream(5)  # type: ignore[arg-type]


async def test_falcons_middleware_shows_the_call_where_context_variables_do_not_reach() -> None:
    seen: list[bool] = []

    class Thing:
        context: Any = None

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request: Any = Thing()
        request.context = Thing()
        request.scope = scope
        await CallMiddleware().process_request(request, None)
        seen.append(request.context.hangup is current_call())
        del scope["extensions"]
        await CallMiddleware().process_request_ws(request, None)
        seen.append(request.context.hangup is None)
        raise ValueError

    peer = Peer()
    await peer.run(HangupMiddleware(app))
    assert seen == [True, True]
