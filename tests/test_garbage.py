"""A call that has ended is gone at once: nothing of it waits for the garbage collector, however many there are."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import anyio
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from hangup import HangupMiddleware, add_finalizer, before_success, current_call, step
from hangup._call import Call
from hangup.testing import Peer

from .helpers import answer

pytestmark = pytest.mark.anyio


async def plain(scope: Scope, receive: Receive, send: Send) -> None:
    await answer(send)


async def looks_at_its_token(scope: Scope, receive: Receive, send: Send) -> None:
    current_call().token.add_callback(lambda: None)
    await answer(send)


async def reads_its_body(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    await answer(send)


async def lasts(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    current_call().watch()
    await anyio.sleep(0)
    await answer(send)


async def has_steps(scope: Scope, receive: Receive, send: Send) -> None:
    async with step("outer"):
        with step("inner"):
            await answer(send)


async def has_a_finalizer_and_a_hook(scope: Scope, receive: Receive, send: Send) -> None:
    async def nothing() -> None: ...

    add_finalizer(nothing)
    before_success(nothing)
    await answer(send)


async def has_a_child(scope: Scope, receive: Receive, send: Send) -> None:
    current_call().start_soon(anyio.sleep, 0)
    await answer(send)


async def is_left(scope: Scope, receive: Receive, send: Send) -> None:
    peer = scope["peer"]
    await peer.wait_for(lambda: peer.reading)
    peer.hang_up()
    await anyio.sleep_forever()


async def is_canceled(scope: Scope, receive: Receive, send: Send) -> None:
    current_call().cancel()
    await anyio.sleep_forever()


@pytest.fixture
def garbage() -> Iterator[list[object]]:
    """What only the garbage collector would have freed, once it was asked."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize(
    "app",
    [
        plain,
        looks_at_its_token,
        reads_its_body,
        lasts,
        has_steps,
        has_a_finalizer_and_a_hook,
        has_a_child,
        is_left,
        is_canceled,
    ],
    ids=lambda app: app.__name__,
)
async def test_a_call_that_has_ended_is_no_garbage(app: ASGIApp, garbage: list[object]) -> None:
    middleware = HangupMiddleware(app)

    async def one() -> None:
        peer = Peer()
        peer.scope["peer"] = peer
        await peer.run(middleware)

    for _ in range(5):
        async with anyio.create_task_group() as group:
            group.start_soon(one)
    await anyio.wait_all_tasks_blocked()
    gc.collect()
    assert [found for found in garbage if isinstance(found, Call)] == []
