"""Who is compared. Everybody is mounted the way its documentation says, with its defaults.

A competitor is a middleware (`mount`), something that a handler is wrapped in (`guard`), or both. What it needs is
imported when it is asked for, so that a missing package stops only those who name it.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from opentelemetry import trace
from starlette.types import ASGIApp, Message, Receive, Scope, Send

Work = Callable[[], Awaitable[bytes]]
Guard = Callable[[Receive, Work], Awaitable[bytes]]
Chunks = AsyncIterator[bytes]


async def unguarded(receive: Receive, work: Work) -> bytes:
    return await work()


def unguarded_stream(chunks: Chunks) -> Chunks:
    return chunks


def span(name: str) -> AbstractContextManager[object]:
    return _tracer.start_as_current_span(name)


_tracer = trace.get_tracer("benchmarks")


@dataclass(frozen=True, kw_only=True, slots=True)
class Competitor:
    """One way to serve an application."""

    name: str
    #: Wraps the application.
    mount: Callable[[ASGIApp], ASGIApp]
    #: What the author of a handler puts around its work.
    guard: Guard = unguarded
    #: And around the chunks of a stream; None if it cannot do streams.
    guard_stream: Callable[[Chunks], Chunks] | None = unguarded_stream
    #: Whether somebody in it looks for a client that leaves, in a handler that does not look itself.
    detects: bool = False
    #: Registers an async function to run at the end of the call, whatever happens; None if there is no such thing.
    add_finalizer: Callable[[Callable[[], Awaitable[None]]], object] | None = None
    #: A named piece of work, as a ``with`` block.
    step: Callable[[str], AbstractContextManager[object]] = span
    #: What it is, for the table.
    note: str = ""


def bare() -> Competitor:
    return Competitor(name="bare", mount=lambda app: app, note="no middleware")


def bare_newer() -> Competitor:
    """Nothing but a scope that says 2.4."""

    def mount(app: ASGIApp) -> ASGIApp:
        async def middleware(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                scope["asgi"] = {**scope["asgi"], "spec_version": "2.4"}
            await app(scope, receive, send)

        return middleware

    return Competitor(name="bare 2.4", mount=mount, note="bare, and told that the server speaks ASGI 2.4")


def floor() -> Competitor:
    """What a middleware costs that wraps `send` and does nothing."""

    def mount(app: ASGIApp) -> ASGIApp:
        async def middleware(scope: Scope, receive: Receive, send: Send) -> None:
            async def wrapped(message: Message) -> None:
                await send(message)

            await app(scope, receive, wrapped)

        return middleware

    return Competitor(name="floor", mount=mount, note="a middleware that wraps `send` in a closure and does nothing")


def hangup() -> Competitor:
    from hangup import HangupMiddleware, add_finalizer, step

    return Competitor(
        name="hangup",
        mount=HangupMiddleware,
        detects=True,
        add_finalizer=add_finalizer,
        step=step,
        note="`HangupMiddleware`, its defaults",
    )


def mounted(name: str, path: str, note: str) -> Callable[[], Competitor]:
    """One that looks for the client once its middleware, ``package.module:Class``, is mounted, and needs no more."""

    def make() -> Competitor:
        module, _, middleware = path.partition(":")
        mount = getattr(importlib.import_module(module), middleware)
        return Competitor(name=name, mount=mount, detects=True, note=f"`{middleware}`{note}")

    return make


def aiofence_fenced() -> Competitor:
    from aiofence import get_current_fencing
    from aiofence.contrib.starlette import DisconnectMiddleware

    async def guard(receive: Receive, work: Work) -> bytes:
        with get_current_fencing().move_on_cancel():
            return await work()
        return b""

    async def guard_stream(chunks: Chunks) -> Chunks:
        with get_current_fencing().move_on_cancel():
            async for chunk in chunks:
                yield chunk

    return Competitor(
        name="aiofence + fence",
        mount=DisconnectMiddleware,
        guard=guard,
        guard_stream=guard_stream,
        detects=True,
        note="and `move_on_cancel()` in the handler",
    )


def with_cancellation() -> Competitor:
    """The shape of vLLM's decorator: the handler and a listener, each in a task, and whoever is first."""

    async def listen(receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def run(work: Work) -> bytes:
        return await work()

    async def guard(receive: Receive, work: Work) -> bytes:
        handler = asyncio.create_task(run(work))
        listener = asyncio.create_task(listen(receive))
        done, pending = await asyncio.wait([handler, listener], return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        return handler.result() if handler in done else b""

    return Competitor(
        name="with_cancellation",
        mount=lambda app: app,
        guard=guard,
        guard_stream=None,
        detects=True,
        note="our copy of the shape of vLLM's decorator: two tasks per call; it does not cover streams",
    )


def base_http() -> Competitor:
    from starlette.middleware.base import BaseHTTPMiddleware

    async def dispatch(request: Any, call_next: Any) -> Any:
        return await call_next(request)

    return Competitor(
        name="BaseHTTPMiddleware",
        mount=lambda app: BaseHTTPMiddleware(app, dispatch),
        note="Starlette's, with a dispatch that does nothing",
    )


def otel_asgi() -> Competitor:
    from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware

    return Competitor(name="otel-asgi", mount=OpenTelemetryMiddleware, note="`OpenTelemetryMiddleware`")


#: Everybody, by name, in the order of the tables.
COMPETITORS: dict[str, Callable[[], Competitor]] = {
    "bare": bare,
    "bare 2.4": bare_newer,
    "floor": floor,
    "hangup": hangup,
    "with_cancellation": with_cancellation,
    "aiofence": mounted(
        "aiofence",
        "aiofence.contrib.starlette:DisconnectMiddleware",
        " alone: an event is set, nothing is canceled",
    ),
    "aiofence + fence": aiofence_fenced,
    "fastapi-disconnect": mounted("fastapi-disconnect", "fastapi_disconnect:CancelOnDisconnectMiddleware", ""),
    "hother-cancelable": mounted(
        "hother-cancelable",
        "hother.cancelable.integrations.fastapi:RequestCancelationMiddleware",
        " alone: a token is set, nothing is canceled",
    ),
    "otel-asgi": otel_asgi,
    "BaseHTTPMiddleware": base_http,
}

#: Who takes part if nobody is named. The newer bare has its place in some tables only.
EVERYBODY = tuple(name for name in COMPETITORS if name != "bare 2.4")


def load(names: Iterable[str]) -> dict[str, Competitor]:
    """The competitors of these names.

    :raises SystemExit: if the package of one is not installed.
    """
    try:
        return {name: COMPETITORS[name]() for name in names}
    except ImportError as exc:
        raise SystemExit(f"{exc}: pip install -e '.[benchmarks]'") from exc
