"""What a stream costs, in process: Starlette's `StreamingResponse` on a server that says ASGI 2.3, or 2.4.

At 2.3 Starlette starts a task group for every stream, to listen for the client. At 2.4 it does not, and relies on
``send`` to raise: which no server's does, over HTTP/1. hangup shows the application 2.4 on every server.
The chunks are there at once: nothing but the machinery is measured, and that in CPU time.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from functools import partial

from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from .competitors import Chunks, Competitor, load
from .harness import Exchange, Size, Table, fitness, on_loop, request, turns

CHUNK = b"data: a token\n\n"
COUNTS = (1, 100, 10_000)


async def chunks(count: int) -> Chunks:
    for _ in range(count):
        yield CHUNK


def stream(this: Competitor, count: int) -> ASGIApp | None:
    guard = this.guard_stream
    if guard is None:
        return None

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await StreamingResponse(guard(chunks(count)), media_type="text/event-stream")(scope, receive, send)

    return this.mount(app)


def run(names: Sequence[str], size: Size) -> list[Table]:
    return on_loop(size.loop, _run(names, size))


async def _run(names: Sequence[str], size: Size) -> list[Table]:
    took = Table("A stream", "µs of CPU", note="The server says ASGI 2.3, as uvicorn does, but for bare 2.4.")
    ratio = Table(
        "A stream, against bare at 2.3", "x", note="Each round against bare in the same round. Below 1: faster."
    )
    newer = Table("A stream, against bare at 2.4", "x", note="Each round against bare in the same round.")
    entrants = [(name, this, "2.3") for name, this in load(names).items()]
    entrants.insert(1, ("bare 2.4", entrants[0][1], "2.4"))
    for count in COUNTS:
        column = f"{count:,} chunk{'s' if count > 1 else ''}"
        cases: dict[str, tuple[ASGIApp, str]] = {}
        for name, this, version in entrants:
            app = stream(this, count)
            reason = "does not cover streams"
            if app is not None:
                found = await fitness(app, Exchange, partial(request, spec_version=version), count * len(CHUNK))
                if found is None:
                    cases[name] = app, version
                    continue
                reason = found
            for table in (took, ratio, newer):
                table.put(name, column, reason)
        rounds, calls = _effort(count, size)
        samples: dict[str, list[float]] = {name: [] for name in cases}
        for app, version in cases.values():
            await _once(app, version, max(1, calls // 4), count)
        for name in turns(f"streams of {column}", cases, rounds):
            gc.collect()
            samples[name].append(await _once(*cases[name], calls, count))
        for name, times in samples.items():
            took.put(name, column, times)
            ratio.put(name, column, [t / bare for t, bare in zip(times, samples["bare"], strict=True)])
            newer.put(name, column, [t / bare for t, bare in zip(times, samples["bare 2.4"], strict=True)])
    for table in (took, ratio, newer):
        table.rows = {name: table.rows[name] for name, *_ in entrants}
    return [took, ratio, newer]


def _effort(count: int, size: Size) -> tuple[int, int]:
    """Rounds, and calls a round: about as many chunks for short streams as for long ones."""
    if count >= 1000:
        return max(2, size.rounds // 2), 1
    return size.rounds, max(1, size.calls // (1 if count == 1 else 10))


async def _once(app: ASGIApp, version: str, calls: int, count: int) -> float:
    """Microseconds of a stream."""
    exchanges = [Exchange() for _ in range(calls)]
    scopes = [request(spec_version=version) for _ in range(calls)]
    started = time.process_time()
    for exchange, scope in zip(exchanges, scopes, strict=True):
        await exchange.run(app, scope)
    took = time.process_time() - started
    for exchange in exchanges:
        exchange.check(count * len(CHUNK))
    return took / calls * 1e6
