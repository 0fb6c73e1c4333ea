"""What telemetry costs: a step, and a call without steps. Microseconds, the best of many rounds.

python benchmarks/telemetry.py             no provider is set
python benchmarks/telemetry.py unsampled   the SDK, with a sampler that drops everything
python benchmarks/telemetry.py sampled     the SDK, with a batch processor and an exporter that does nothing
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
import timeit
from collections.abc import Callable
from typing import Any

from opentelemetry import trace
from starlette.types import Message, Receive, Scope, Send

from hangup import HangupMiddleware, step

SCOPE = {"type": "http", "asgi": {}, "method": "GET", "path": "/", "headers": []}


def set_up(kind: str) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
    from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased

    class Nowhere(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            return SpanExportResult.SUCCESS

    provider = TracerProvider(sampler=ParentBased(ALWAYS_ON if kind == "sampled" else ALWAYS_OFF))
    if kind == "sampled":
        provider.add_span_processor(BatchSpanProcessor(Nowhere()))
    trace.set_tracer_provider(provider)


def microseconds(fn: Callable[[], object], number: int = 2000, repeat: int = 100) -> float:
    return min(timeit.repeat(fn, number=number, repeat=repeat)) / number * 1e6


def steps(where: str) -> None:
    tracer = trace.get_tracer("benchmark")

    def ours() -> None:
        with step("x"):
            pass

    def plain() -> None:
        with tracer.start_as_current_span("x"):
            pass

    print(f"{where}: step {microseconds(ours):.2f}, start_as_current_span {microseconds(plain):.2f}")


async def noop(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def receive() -> Message:
    await asyncio.sleep(60)
    raise AssertionError


async def send(message: Message) -> None:
    pass


async def calls(rounds: int = 600, number: int = 200) -> None:
    """A call that does nothing, with telemetry and without, in turns."""
    apps = {"off": HangupMiddleware(noop, telemetry=False), "on": HangupMiddleware(noop)}
    took: dict[str, list[float]] = {name: [] for name in apps}
    for _ in range(rounds):
        for name, app in apps.items():
            started = time.perf_counter()
            for _ in range(number):
                await app(SCOPE, receive, send)
            took[name].append((time.perf_counter() - started) / number * 1e6)
    for name, times in took.items():
        print(f"a call without steps, telemetry {name}: best {min(times):.2f}, median {statistics.median(times):.2f}")


async def main() -> None:
    steps("outside a call")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        steps("inside a call")
        await noop(scope, receive, send)

    with trace.get_tracer("benchmark").start_as_current_span("server"):
        await HangupMiddleware(app)(SCOPE, receive, send)
    await calls()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        if sys.argv[1] not in {"sampled", "unsampled"}:
            sys.exit(__doc__)
        set_up(sys.argv[1])
    asyncio.run(main())
