"""What a call costs, in process: microseconds over the same call without a middleware.

Nothing here waits, so it is CPU time that is measured: what else the machine does counts for less.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from .competitors import Competitor, load, span
from .harness import Exchange, Size, Table, apart, fitness, on_loop, request, turns

UPLOAD = [b"x" * 65536] * 16
ANSWER = json.dumps({"id": 42, "name": "run", "state": "completed", "steps": [1, 2, 3]}).encode()

PROVIDERS = ("no provider", "unsampled", "sampled")


async def answer() -> bytes:
    return json.dumps({"id": 42, "name": "run", "state": "completed", "steps": [1, 2, 3]}).encode()


async def respond(send: Send, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


# ---------------------------------------------------------------------- the applications


def plain(this: Competitor) -> ASGIApp | str:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, await this.guard(receive, answer))

    return this.mount(app)


def upload(this: Competitor) -> ASGIApp | str:
    """The body is read first and then the handler is called, as FastAPI does."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            size += len(message["body"])
            more = message["more_body"]
        assert size == sum(map(len, UPLOAD))
        await respond(send, await this.guard(receive, answer))

    return this.mount(app)


def finalizer(this: Competitor) -> ASGIApp | str:
    """Bare: a ``finally``, which is not the same thing, but as near as one gets."""

    async def clean_up() -> None:
        pass

    async def with_finally(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await respond(send, await answer())
        finally:
            await clean_up()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert this.add_finalizer is not None
        this.add_finalizer(clean_up)
        await respond(send, await answer())

    if this.name == "bare":
        return with_finally
    return this.mount(app) if this.add_finalizer is not None else "has no finalizers"


def two_steps(this: Competitor) -> ASGIApp:
    """In the span of a server, as in production. Others than hangup open plain spans."""
    step = this.step

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with step("plan"):
            body = await answer()
        with step("call tool"):
            await respond(send, body)

    mounted = this.mount(app)

    async def server(scope: Scope, receive: Receive, send: Send) -> None:
        with span("server"):
            await mounted(scope, receive, send)

    return server


CASES: dict[str, tuple[Callable[[Competitor], ASGIApp | str], Sequence[bytes], str]] = {
    "plain JSON": (plain, (b"",), "GET"),
    "upload of 1 MiB": (upload, UPLOAD, "POST"),
    "one finalizer": (finalizer, (b"",), "GET"),
}

# ---------------------------------------------------------------------- measuring


def run(names: Sequence[str], size: Size) -> list[Table]:
    tables = on_loop(size.loop, _calls(names, size))
    steps = Table(
        "Overhead of a call with two steps",
        "µs over bare",
        note="Bare, and all but hangup, open two plain spans. Each call runs in the span of a server.",
    )
    for kind in PROVIDERS:
        chosen = [name for name in names if name in {"bare", "floor", "hangup", "otel-asgi"}]
        for name, samples in apart(_steps, kind, chosen, size).items():
            steps.put(name, kind, samples)
    return [*tables, steps]


async def _calls(names: Sequence[str], size: Size) -> list[Table]:
    took = Table("A call", "µs of CPU")
    added = Table("Overhead of a call", "µs over bare", note="Each round against bare in the same round.")
    part = Table("Overhead of hangup, as a part of theirs", "x", note="Those that look for a client that leaves.")
    entrants = load(names)
    for case, (make, pieces, method) in CASES.items():
        apps: dict[str, ASGIApp] = {}
        for name, this in entrants.items():
            app = make(this)
            reason = app if isinstance(app, str) else None
            if not isinstance(app, str):
                reason = await fitness(app, partial(Exchange, pieces), partial(request, method), len(ANSWER))
                apps[name] = app
            if reason is not None:
                apps.pop(name, None)
                for table in (took, added):
                    table.put(name, case, reason)
        samples = await _measure(case, apps, size, pieces, method)
        for name, times in samples.items():
            took.put(name, case, times)
            added.put(name, case, _difference(times, samples["bare"]))
            if "hangup" in samples and entrants[name].detects and name != "hangup":
                ours, theirs = (_difference(samples[who], samples["bare"]) for who in ("hangup", name))
                part.put(name, case, [a / b for a, b in zip(ours, theirs, strict=True)])
    for table in (took, added):
        table.rows = {name: table.rows[name] for name in names}
    return [took, added, part]


def _difference(these: Sequence[float], those: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(these, those, strict=True)]


async def _measure(
    what: str, apps: dict[str, ASGIApp], size: Size, pieces: Sequence[bytes], method: str
) -> dict[str, list[float]]:
    """Microseconds of a call, one figure a round."""
    samples: dict[str, list[float]] = {name: [] for name in apps}
    for app in apps.values():
        await _once(app, size.calls, pieces, method)
    for name in turns(what, apps, size.rounds):
        gc.collect()
        samples[name].append(await _once(apps[name], size.calls, pieces, method))
    return samples


async def _once(app: ASGIApp, calls: int, pieces: Sequence[bytes], method: str) -> float:
    exchanges = [Exchange(pieces) for _ in range(calls)]
    scopes = [request(method) for _ in range(calls)]
    started = time.process_time()
    for exchange, scope in zip(exchanges, scopes, strict=True):
        await exchange.run(app, scope)
    took = time.process_time() - started
    for exchange in exchanges:
        exchange.check(len(ANSWER))
    return took / calls * 1e6


def _steps(kind: str, names: Sequence[str], size: Size) -> dict[str, list[float]]:
    """In a process of its own: a tracer provider is set once and for all."""
    _set_up(kind)
    entrants = load(names)
    if "hangup" in entrants:
        from hangup import HangupMiddleware

        name = "hangup, telemetry off"
        entrants[name] = replace(
            entrants["hangup"], name=name, mount=lambda app: HangupMiddleware(app, telemetry=False)
        )
    apps = {name: two_steps(this) for name, this in entrants.items()}
    samples = on_loop(size.loop, _measure(f"two steps, {kind}", apps, size, (b"",), "GET"))
    return {name: _difference(times, samples["bare"]) for name, times in samples.items()}


def _set_up(kind: str) -> None:
    if kind == "no provider":
        return
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
    from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased

    class Nowhere(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            return SpanExportResult.SUCCESS

    provider = TracerProvider(sampler=ParentBased(ALWAYS_ON if kind == "sampled" else ALWAYS_OFF))
    provider.add_span_processor(BatchSpanProcessor(Nowhere()))
    trace.set_tracer_provider(provider)
