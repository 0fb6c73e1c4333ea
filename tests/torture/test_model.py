"""The whole middleware against the reference model. See `model`."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import anyio
import hypothesis
import pytest
import trio
import trio.testing
import uvloop
from anyio.lowlevel import checkpoint
from hypothesis import HealthCheck, given, settings
from starlette.types import Receive, Scope, Send

from hangup import (
    AmbiguousOutcome,
    Call,
    Cause,
    HangupMiddleware,
    Outcome,
    add_finalizer,
    before_success,
    current_call,
    protect,
    step,
)
from hangup._runtime import _jobs
from hangup.testing import Peer

from ..helpers import END, chunk
from .model import GATES, Event, Expected, Model, Script, scripts

#: Seconds that anything may take.
PATIENCE = 5.0


class _Return(Exception):
    """The application returns from where it is."""


class Play:
    """One script, performed."""

    def __init__(self, script: Script, expected: Expected, *, on_trio: bool) -> None:
        self.script = script
        self.expected = expected
        self.on_trio = on_trio
        self.peer = Peer(quirks=script.quirks)
        self.outcomes: list[Outcome] = []
        self.middleware = HangupMiddleware(self.app, observers=[self.outcomes.append], policy=script.policy, grace=60)
        self.call: Call
        self.host: asyncio.Task[object] | None = None
        self.gate = -1
        self.standing: anyio.Event | None = None
        self.interruptions = self.cleanups = self.hooks_run = 0
        self.interrupted_at: list[int] = []
        self.returned = self.ended = self.given_up = False
        self.child_may_end = anyio.Event()
        self.finalized: list[int] = []
        self.escaped: str | None = None

    # ------------------------------------------------------------------ the application

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.call = current_call()
        for succeeds in self.script.hooks:
            before_success(self._hook(succeeds))
        for number, ending in enumerate(self.script.finalizers):
            add_finalizer(self._finalizer(number, ending), timeout=0.01 if ending == "timed_out" else None)
        await receive()  # the body
        try:
            for op in self.script.ops:
                if op in GATES:
                    self.gate += 1
                    await self._react(self._stop, op, receive, send)
                elif op == "start":
                    await send({"type": "http.response.start", "status": self.script.status, "headers": []})
                elif op == "chunk":
                    await send(chunk(b"x"))
                elif op == "last":
                    await send(END)
                elif op == "look":
                    assert self.call.token.canceled == (self.call.cause is not None)
                elif op == "child":
                    self.call.start_soon(self._child)
            if self.script.ending != "return":
                raise AmbiguousOutcome("who knows") if self.script.ending == "ambiguous" else RuntimeError("broken")
        except _Return:
            pass
        finally:
            self.returned = True

    async def _react(self, fn: Callable[..., Awaitable[None]], *args: Any) -> None:
        try:
            await fn(*args)
        except anyio.get_cancelled_exc_class():
            self.interruptions += 1
            self.interrupted_at.append(self.gate)
            reaction = self.script.reaction
            if self.given_up:
                raise
            if reaction == "clean up":
                with anyio.CancelScope(shield=self.on_trio):
                    for _ in range(3):
                        await checkpoint()
                self.cleanups += 1
            elif reaction == "return":
                raise _Return from None
            elif reaction == "fail":
                raise ValueError("fails to clean up")  # noqa: B904 # as it happens
            if reaction in {"pass on", "clean up"}:
                raise
        finally:
            self.standing = None

    async def _stop(self, op: str, receive: Receive, send: Send) -> None:
        """A gate: stand until it is opened."""
        gate = self.standing = anyio.Event()
        if self.given_up:
            gate.set()
        if op == "gate":
            await gate.wait()
        elif op == "listen":
            assert (await receive())["type"] == "http.disconnect"
        elif op == "blocked":
            self.peer.stop_reading()
            try:
                await send(chunk(b"x"))
            finally:
                self.peer.read_on()
        elif op == "protect":
            with protect():
                await gate.wait()
        else:
            cancel = {"effect": None, "undoable": self._undo, "stuck": self._fail_to_undo}[op]
            async with step("pay", effect=True, cancel=cancel):
                await gate.wait()

    async def _undo(self) -> None:
        await checkpoint()

    async def _fail_to_undo(self) -> None:
        raise RuntimeError("cannot be undone")

    async def _child(self) -> None:
        await self.child_may_end.wait()
        if self.script.child_fails:
            raise RuntimeError("a child is broken")

    def _hook(self, succeeds: bool) -> Callable[[], Awaitable[None]]:
        async def hook() -> None:
            self.hooks_run += 1
            await checkpoint()
            if not succeeds:
                raise RuntimeError("a hook is broken")

        return hook

    def _finalizer(self, number: int, ending: str) -> Callable[[], Awaitable[None]]:
        async def finalize() -> None:
            self.finalized.append(number)
            await checkpoint()
            if ending == "failed":
                raise RuntimeError("a finalizer is broken")
            if ending == "timed_out":
                await anyio.sleep(60)

        return finalize

    # ------------------------------------------------------------------ the server, and what happens

    async def serve(self) -> None:
        self.host = None if self.on_trio else asyncio.current_task()
        try:
            await self.middleware(self.peer.scope, self.peer.receive, self.peer.send)
        except OSError:
            self.escaped = "OSError"
        except Exception as exc:
            self.escaped = type(exc).__name__
        except asyncio.CancelledError:
            self.escaped = "Cancelled"
            assert self.host is not None
            self.host.uncancel()
        finally:
            self.ended = True

    async def perform(self) -> None:
        jobs = set(_jobs)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.serve)
            try:
                await self.follow(tasks)
            except BaseException:
                self.give_up()
                raise
        await self.until(lambda: _jobs <= jobs, "the end of every job")

    def give_up(self) -> None:
        """It went wrong: let the application end, whatever it swallows and shields."""
        self.given_up = True
        self.child_may_end.set()
        if self.standing is not None:
            self.standing.set()

    async def follow(self, tasks: anyio.abc.TaskGroup) -> None:
        """Do what is planned, at each gate."""
        for gate, event, effect in self.expected.plan:
            where = f"gate {gate}: {event}: {effect}"
            if event is None and effect == "interrupts":  # perhaps on arrival
                await self.until(lambda gate=gate: gate in self.interrupted_at, where)  # type: ignore[misc]
                continue
            await self.until(lambda gate=gate: self.gate == gate and self.standing is not None, where)  # type: ignore[misc]
            before, standing = self.interruptions, self.standing
            if event is not None:
                await self.happen(event, tasks)
            if effect == "interrupts":
                await self.until(lambda before=before: self.interruptions > before, where)  # type: ignore[misc]
            elif effect == "moves on":
                await self.until(lambda standing=standing: self.standing is not standing, where)  # type: ignore[misc]
            else:
                for _ in range(10 if event else 0):
                    await checkpoint()
                assert self.standing is standing, where
                assert standing is not None
                if (gate, event, effect) != self.expected.plan[-1] and self.next_gate(gate, event) == gate:
                    continue  # it listens, and more is to come
                standing.set()
                self.peer.read_on()
        await self.until(lambda: self.returned, "the end of the application")
        self.child_may_end.set()
        await self.until(lambda: self.ended, "the end")

    def next_gate(self, gate: int, event: Event | None) -> int:
        plan = self.expected.plan
        at = next(i for i, item in enumerate(plan) if item[:2] == (gate, event))
        return plan[at + 1][0]

    async def happen(self, event: Event, tasks: anyio.abc.TaskGroup) -> None:
        call = self.call
        if event == "hang up":
            if not call.life.finished and not call.life.left and call.cause is not Cause.TIMEOUT:
                await self.until(lambda: self.peer.reading, "a watcher")
            self.peer.hang_up()
            if not call.life.finished and call.cause is not Cause.TIMEOUT:  # then it is cut off already
                await self.until(lambda: call.life.left, "the disconnect")
        elif event == "cancel":
            call.cancel()
        elif event == "time out":
            call.policy = replace(call.policy, timeout=1e-9)
        elif event == "shut down":
            tasks.start_soon(self.middleware.drain, 60)
        else:
            assert self.host is not None
            self.host.cancel()

    async def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"{what} did not come; {self.outcomes}")
            await (trio.testing.wait_all_tasks_blocked() if self.on_trio else asyncio.sleep(0))
            if self.on_trio:
                await trio.sleep(0.001)  # of the mock clock: it costs nothing

    # ------------------------------------------------------------------ the verdict

    def judge(self) -> None:
        expected = self.expected
        [outcome] = self.outcomes
        seen = {
            "state": outcome.state,
            "cause": outcome.cause,
            "phase": outcome.phase,
            "delivered": outcome.delivered,
            "hooks": self.hooks_run,
            "escapes": self.escaped,
            "finalizers": [record.state for record in outcome.finalizers],
            "finalized": self.finalized,
        }
        numbers = list(range(len(self.script.finalizers)))
        right = {
            "state": expected.state,
            "cause": expected.cause,
            "phase": expected.phase,
            "delivered": expected.delivered,
            "hooks": expected.hooks_run,
            "escapes": expected.escapes,
            "finalizers": list(reversed(self.script.finalizers)),
            "finalized": numbers[::-1],
        }
        if not self.peer.left:
            seen.update(status=self.peer.status, complete=self.peer.complete)
            right.update(status=expected.status, complete=expected.complete)
            if self.peer.status is not None:
                assert outcome.status_code == self.peer.status
        interrupted = [effect for _, _, effect in expected.plan].count("interrupts")
        assert self.interruptions == interrupted
        if self.script.reaction == "clean up":
            assert self.cleanups == interrupted
        wrong = {key: (seen[key], right[key]) for key in right if seen[key] != right[key]}
        assert not wrong, f"seen, and right: {wrong}"


def play(script: Script, *, on_trio: bool, loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None) -> None:
    expected = Model(script, trio=on_trio).walk()

    async def run() -> None:
        performance = Play(script, expected, on_trio=on_trio)
        await performance.perform()
        performance.judge()

    if on_trio:
        trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))
    else:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(run())


@pytest.fixture(autouse=True)
def _watch_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hangup.middleware.WATCH_AFTER", 0.0)


def _eager_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.set_task_factory(asyncio.eager_task_factory)
    return loop


#: How many scripts each event loop is given.
EXAMPLES = {"asyncio": 600, "uvloop": 150, "trio": 400, **({"eager": 150} if sys.version_info >= (3, 12) else {})}
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"uvloop": uvloop.new_event_loop, "eager": _eager_loop}


def check(backend: str, examples: int, seed: int | None = None) -> None:
    """Play ``examples`` scripts: always the same, or those of ``seed``."""
    on_trio = backend == "trio"

    @settings(
        max_examples=examples,
        derandomize=seed is None,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(scripts(trio=on_trio))
    def run(script: Script) -> None:
        play(script, on_trio=on_trio, loop_factory=LOOPS.get(backend))

    (run if seed is None else hypothesis.seed(seed)(run))()


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("backend", EXAMPLES)
def test_whatever_happens_ends_as_the_model_says(backend: str, long_run: bool, minutes: float) -> None:
    check(backend, EXAMPLES[backend])
    end = time.monotonic() + (max(minutes, 1) * 60 if long_run else 0)
    seed = int(time.time())
    while time.monotonic() < end:
        seed += 1
        print(f"seed {seed}", flush=True)
        check(backend, 1000, seed)
