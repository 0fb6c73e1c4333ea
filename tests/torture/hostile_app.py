"""An application for hostile clients, mounted and bare. It notes each call that begins, and what became of it."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from hangup import HangupMiddleware, Outcome

from ..helpers import END, START, answer, chunk
from ..lifespan import answer_lifespan
from ..serving import note


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        await answer_lifespan(receive, send)
        return
    note("began")
    await _ENDPOINTS[scope["path"]](scope, receive, send)


async def read(scope: Scope, receive: Receive, send: Send) -> None:
    """Read the body in pieces, and say how long it was."""
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    await answer(send, body=str(size).encode())


async def ignore(scope: Scope, receive: Receive, send: Send) -> None:
    """Leave the body where it is, for a while."""
    await asyncio.sleep(0.5)
    await answer(send, body=b"ignored")


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """A WebSocket that counts what it receives, and says so when it hears ``stop``."""
    await receive()
    await send({"type": "websocket.accept"})
    count = 0
    while (message := await receive())["type"] == "websocket.receive":
        if message.get("text") == "stop":
            await send({"type": "websocket.send", "text": f"received {count}"})
        count += 1


async def deaf(scope: Scope, receive: Receive, send: Send) -> None:
    """A WebSocket that never listens."""
    await receive()
    await send({"type": "websocket.accept"})
    await asyncio.sleep(0.5)


async def ten(scope: Scope, receive: Receive, send: Send) -> None:
    """Ten tasks send at once."""
    await send(START)

    async def part(name: bytes) -> None:
        for _ in range(20):
            await send(chunk(name * 1000))
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        for number in range(10):
            tasks.create_task(part(b"%d" % number))
    await send(END)


async def forever(scope: Scope, receive: Receive, send: Send) -> None:
    """Ten tasks send until somebody stops them."""
    await send(START)

    async def part() -> None:
        while True:
            await send(chunk(b"x" * 1000))
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(10):
            tasks.create_task(part())


async def late(scope: Scope, receive: Receive, send: Send) -> None:
    """Send more after the last frame."""
    await answer(send, body=b"whole")
    await send(chunk(b"more"))
    await send(END)


_ENDPOINTS: dict[str, Any] = {
    "/read": read,
    "/ignore": ignore,
    "/echo": echo,
    "/deaf": deaf,
    "/ten": ten,
    "/forever": forever,
    "/late": late,
}


def observe(outcome: Outcome) -> None:
    note("ended", outcome.state, outcome.cause)


async def bare(scope: Scope, receive: Receive, send: Send) -> None:
    try:
        await app(scope, receive, send)
    finally:
        if scope["type"] != "lifespan":
            note("ended")


#: With a ``send_timeout``, because hypercorn's ``send`` never returns while a body is left unread.
mounted: ASGIApp = HangupMiddleware(app, grace=0.1, send_timeout=1, observers=[observe])
