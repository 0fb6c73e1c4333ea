"""What every handler of the framework matrix does, whatever the framework around it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

from hangup import Call, Outcome, current_call, step

from ..witness import note, work_time


def prepare(call: Call | None = None) -> Call:
    """Register a token callback and two finalizers, as every handler does first."""
    call = call or current_call()

    async def close(outcome: Outcome) -> None:
        await asyncio.sleep(0.001)
        note("finalizer", of=name, kind="async", state=str(outcome.state))

    def close_in_thread() -> None:
        note("finalizer", of=name, kind="sync")

    name = run_of(call)
    call.token.add_callback(lambda: note("token", of=name, cause=str(call.token.cause)))
    call.add_finalizer(close)
    call.add_finalizer(close_in_thread)
    return call


def plain() -> str:
    """An answer at once."""
    prepare()
    with step("work"):
        return "done"


async def idle() -> str:
    """Work that awaits, with a cleanup that awaits."""
    prepare()
    try:
        with step("work"):
            note("parked")
            await asyncio.sleep(work_time.get())
    except BaseException as exc:
        note("raised", type=type(exc).__name__)
        raise
    finally:
        await asyncio.sleep(0.005)
        note("cleaned up")
    return "done"


def in_thread(call: Call | None = None) -> str:
    """Work of a ``def`` handler, which looks at the token."""
    call = prepare(call)
    with call.step("work"):
        note("parked", of=run_of(call))
        canceled = call.token.wait_sync(work_time.get())
        note("thread ended", of=run_of(call), canceled=canceled)
    return "done"


async def by_token() -> str:
    """The recipe for a tool of a stateful MCP session: it looks at the token itself."""
    call = prepare()
    note("parked")
    work = asyncio.create_task(asyncio.sleep(work_time.get()))
    stop = asyncio.create_task(call.token.wait())
    await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
    work.cancel()
    stop.cancel()
    note("tool ended", of=run_of(call), canceled=call.token.canceled)
    return "done"


def blocking() -> str:
    """A ``def`` handler that a framework runs on the event loop: nothing can be seen meanwhile."""
    prepare()
    with step("work"):
        note("parked")
        time.sleep(0.3)
        note("thread ended", canceled=False)
    return "done"


async def chunks() -> AsyncIterator[bytes]:
    """A stream, with a cleanup that awaits."""
    name = run_of(prepare())
    try:
        with step("work"):
            note("parked")
            while True:
                yield b"data: x\n\n"
                await asyncio.sleep(0.01)
    except BaseException as exc:
        note("raised", of=name, type=type(exc).__name__)
        raise
    finally:
        await asyncio.sleep(0.005)
        note("cleaned up", of=name)


def sync_chunks() -> Iterator[bytes]:
    """A stream of a sync generator."""
    name = run_of(prepare())  # it may end anywhere, and in any context
    try:
        note("parked")
        while True:
            yield b"data: x\n\n"
            time.sleep(0.01)
    finally:
        note("cleaned up", of=name)


async def after() -> None:
    """A background task."""
    note("parked")
    await asyncio.sleep(0.25)
    note("background ended")


async def dependency() -> AsyncIterator[int]:
    """Something opened before the handler and closed after it, with an ``await``."""
    try:
        yield 1
    finally:
        await asyncio.sleep(0.005)
        note("dependency closed")


def read(size: int) -> str:
    """The handler has its body, and believes that it is whole."""
    note("body", size=size)
    return str(size)


def fail() -> None:
    """An error of the application's own."""
    prepare()
    with step("work"):
        raise ValueError("of the application itself")


def run_of(call: Call) -> str:
    """The run of a call, where no context variable reaches."""
    return dict(call.scope["headers"])[b"x-run"].decode()
