"""A call that has ended is freed at once. In a cycle it would keep its task and its request for the collector."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable

import anyio
import pytest
import uvloop
from starlette.types import Receive, Scope, Send

from hangup import HangupMiddleware, current_call, step
from hangup._call import Call
from hangup.testing import Peer

App = Callable[[Scope, Receive, Send], Awaitable[None]]


async def answer(send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"x"})


async def plain(scope: Scope, receive: Receive, send: Send) -> None:
    await answer(send)


async def reads(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    await answer(send)


async def looks_at_token(scope: Scope, receive: Receive, send: Send) -> None:
    assert not current_call().token.canceled
    await answer(send)


async def has_step(scope: Scope, receive: Receive, send: Send) -> None:
    with step("work"):
        await answer(send)


async def lasts(scope: Scope, receive: Receive, send: Send) -> None:
    await PEERS[-1].wait_for(lambda: PEERS[-1].reading)
    await answer(send)


async def is_interrupted(scope: Scope, receive: Receive, send: Send) -> None:
    await PEERS[-1].wait_for(lambda: PEERS[-1].reading)
    PEERS[-1].hang_up()
    await anyio.sleep_forever()


PEERS: list[Peer] = []


async def freed(app: App) -> bool:
    """Whether a call of ``app``, in a task of its own, is freed without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        before = {id(call) for call in calls()}
        PEERS[:] = [Peer()]
        task = asyncio.create_task(PEERS[-1].run(HangupMiddleware(app)))
        await asyncio.wait([task])
        assert PEERS.pop().error is None
        del task
        with anyio.move_on_after(1):  # loops let go of a cancelled timer in their own time
            while {id(call) for call in calls()} - before:
                await asyncio.sleep(0.01)
            return True
        return False
    finally:
        gc.enable()


def calls() -> list[Call]:
    return [thing for thing in gc.get_objects() if isinstance(thing, Call)]


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("app", [plain, reads, looks_at_token, has_step, lasts, is_interrupted])
def test_a_call_that_has_ended_is_freed(app: App, new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(freed(app))
