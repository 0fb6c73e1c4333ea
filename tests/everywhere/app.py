"""The application of the server matrix: plain ASGI, one path per phase, so that nothing but the server differs.

Every handler is wrapped in the same way: a token callback, two finalizers, a step, and a cleanup that awaits.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any
from urllib.parse import parse_qs

import anyio
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from hangup import Call, Canceled, HangupMiddleware, Outcome, current_call, step

from ..lifespan import answer_lifespan
from .witness import Witness, note, note_outcome, run

CHUNK = b"x" * 262_144
#: Bytes after which a server that has not blocked is taken never to.
UNBLOCKED = 24 * 2**20

Handler = Callable[[Scope, Receive, Send], Awaitable[None]]
PHASES: dict[str, Handler] = {}


def phase(fn: Handler) -> Handler:
    """Register a handler under its name."""
    PHASES[fn.__name__] = fn
    return fn


def work_time(scope: Scope) -> float:
    """How many seconds the work takes if nothing stops it."""
    return float(parse_qs(scope["query_string"].decode()).get("work", ["30"])[0])


async def respond(send: Send, body: bytes = b"done", status: int = 200) -> None:
    await start(send, status, body_size=len(body))
    await send({"type": "http.response.body", "body": body})


async def start(send: Send, status: int = 200, *, body_size: int | None = None) -> None:
    headers = [(b"content-type", b"text/plain")]
    if body_size is not None:
        headers.append((b"content-length", str(body_size).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def chunk(send: Send, body: bytes = b"chunk ") -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def read_body(receive: Receive) -> int | None:
    """How long the body is; None if the client left before its end."""
    size = 0
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            note("disconnect message")
            return None
        size += len(message.get("body", b""))
        if not message.get("more_body", False):
            return size


# ---------------------------------------------------------------------- the phases


@phase
async def plain(scope: Scope, receive: Receive, send: Send) -> None:
    await respond(send)


@phase
async def idle(scope: Scope, receive: Receive, send: Send) -> None:
    note("parked")
    await anyio.sleep(work_time(scope))
    await respond(send)


@phase
async def listening(scope: Scope, receive: Receive, send: Send) -> None:
    note("parked")
    while (message := await receive())["type"] != "http.disconnect":
        pass
    note("told by message", type=message["type"])


@phase
async def started(scope: Scope, receive: Receive, send: Send) -> None:
    await start(send)
    await chunk(send)
    note("parked")
    await anyio.sleep(work_time(scope))
    await send({"type": "http.response.body", "body": b""})


@phase
async def stream(scope: Scope, receive: Receive, send: Send) -> None:
    await start(send)
    note("parked")
    with anyio.move_on_after(work_time(scope)):
        while True:
            await chunk(send)
            await anyio.sleep(0.01)
    await send({"type": "http.response.body", "body": b""})


@phase
async def blocked(scope: Scope, receive: Receive, send: Send) -> None:
    """Send without end to a client that does not read. ``blocked`` is noted when a send takes long."""
    await start(send)
    sent = 0
    returned = anyio.Event()

    async def look() -> None:
        nonlocal returned
        while sent < UNBLOCKED:
            before = sent
            with anyio.move_on_after(0.15):
                await returned.wait()
            if sent == before:
                note("parked", sent=sent)
                return

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(look)
        while sent < UNBLOCKED:
            await chunk(send, CHUNK)
            sent += len(CHUNK)
            returned.set()
            returned = anyio.Event()
            await anyio.sleep(0)
        tasks.cancel_scope.cancel()
    note("parked", sent=sent, never_blocked=True)
    await anyio.sleep(work_time(scope))
    await send({"type": "http.response.body", "body": b""})


@phase
async def large(scope: Scope, receive: Receive, send: Send) -> None:
    """A large answer in one piece, whose last and only frame blocks."""
    note("parked")
    await respond(send, CHUNK * (UNBLOCKED // len(CHUNK)))


@phase
async def reading(scope: Scope, receive: Receive, send: Send) -> None:
    note("parked")
    size = await read_body(receive)
    note("body", size=size)
    if size is not None:
        await respond(send, str(size).encode())


@phase
async def short_body(scope: Scope, receive: Receive, send: Send) -> None:
    """What Falcon and Sanic do: the disconnect is taken for the end of the body, and answered."""
    note("parked")
    size = 0
    while True:
        message = await receive()
        size += len(message.get("body", b""))
        if not message.get("more_body", False):
            break
    note("body", size=size)
    await respond(send, str(size).encode())


@phase
async def generator(scope: Scope, receive: Receive, send: Send) -> None:
    """Starlette's streaming, with a generator that cleans up behind an ``await``."""

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            note("parked")
            while True:
                yield b"data: x\n\n"
                await anyio.sleep(0.01)
        finally:
            with anyio.CancelScope(shield=on_trio()):
                await anyio.sleep(0.01)
            note("generator cleaned up")

    async with aclosing(events()) as generator:
        await StreamingResponse(generator)(scope, receive, send)


@phase
async def thread(scope: Scope, receive: Receive, send: Send) -> None:
    call = current_call()

    def work() -> str:
        note("parked")
        call.token.wait_sync(work_time(scope))
        note("thread ended", canceled=call.token.canceled)
        return "done"

    await respond(send, (await anyio.to_thread.run_sync(work)).encode())


@phase
async def background(scope: Scope, receive: Receive, send: Send) -> None:
    await respond(send)
    note("parked")
    await anyio.sleep(0.25)
    note("background ended")


@phase
async def early(scope: Scope, receive: Receive, send: Send) -> None:
    """An answer before the body has come, and nothing after it."""
    await respond(send, b"no", 413)


@phase
async def fails(scope: Scope, receive: Receive, send: Send) -> None:
    raise ValueError("of the application itself")


@phase
async def polling(scope: Scope, receive: Receive, send: Send) -> None:
    """Starlette's ``is_disconnected()``, every 5 ms, with the middleware told only to signal."""
    request = Request(scope, receive)
    note("parked")
    with anyio.move_on_after(work_time(scope)):
        while not await request.is_disconnected():
            await anyio.sleep(0.005)
        note("told by poll")
    await respond(send)


@phase
async def reads_nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """For the memory of an upload: answers when it is told to, by a file."""
    note("parked")
    while not os.path.exists(os.environ["EVERYWHERE_RECORD"] + ".go"):
        await anyio.sleep(0.02)
    note("told to answer")
    await respond(send)


# ---------------------------------------------------------------------- what is around each


def on_trio() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return True
    return False


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        await answer_lifespan(receive, send)
        return
    call = current_call()
    _prepare(call)
    try:
        with step("work"):
            await PHASES[scope["path"].rpartition("/")[2]](scope, receive, send)
    except BaseException as exc:
        note("raised", type=type(exc).__name__, canceled=isinstance(exc, Canceled))
        raise
    finally:
        with anyio.CancelScope(shield=on_trio()):
            await anyio.sleep(0.005)
        note("cleaned up")


def _prepare(call: Call) -> None:
    async def close(outcome: Outcome) -> None:
        await anyio.sleep(0.001)
        note("finalizer", kind="async", state=str(outcome.state))

    def close_in_thread() -> None:
        note("finalizer", kind="sync")

    name = run.get()
    call.token.add_callback(lambda: note("token", of=name, cause=str(call.token.cause)))
    call.add_finalizer(close)
    call.add_finalizer(close_in_thread)


async def bare(scope: Scope, receive: Receive, send: Send) -> None:
    """The same handlers with nothing mounted, for comparison."""
    if scope["type"] == "lifespan":
        await answer_lifespan(receive, send)
    else:
        await PHASES[scope["path"].rpartition("/")[2]](scope, receive, send)


_default: Any = HangupMiddleware(app, observers=[note_outcome])
_MOUNTS: dict[str, Any] = {
    "ahead": HangupMiddleware(app, observers=[note_outcome], read_ahead=2**20),
    "limited": HangupMiddleware(app, observers=[note_outcome], timeout=0.4),
    "timed": HangupMiddleware(app, observers=[note_outcome], send_timeout=0.4),
    "signal": HangupMiddleware(app, observers=[note_outcome], policy="signal"),
    "finish": HangupMiddleware(app, observers=[note_outcome], policy="finish"),
    "bare": bare,
}


async def mounted(scope: Scope, receive: Receive, send: Send) -> None:
    """``/PHASE`` with the defaults, ``/OPTION/PHASE`` with one changed."""
    mount = _MOUNTS.get(scope["path"].split("/")[1], _default) if scope["type"] == "http" else _default
    await mount(scope, receive, send)


main = Witness(mounted)
