"""Every suspension point of every scenario, with every fault at it. See `points`."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.to_thread
import pytest
from fastapi import Depends, FastAPI
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from hangup import (
    Cause,
    Outcome,
    State,
    add_finalizer,
    before_success,
    current_call,
    protect,
    step,
)

from ..helpers import answer, chunk
from .conftest import Tally
from .points import FAULTS, Log, Run, Scenario, SlowPeer, pause, run_once

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("watching_at_once")]

OK = {"type": "http.response.start", "status": 200, "headers": []}
LAST = {"type": "http.response.body", "body": b"", "more_body": False}


def finalizers(log: Log, *names: str) -> None:
    for name in names:
        add_finalizer(log.async_part(name))


@asynccontextmanager
async def cleaning_up(log: Log, name: str = "cleanup") -> AsyncIterator[None]:
    """A cleanup that awaits. On trio, whose tasks know that they have to, it is shielded."""
    try:
        yield
    except BaseException:
        with anyio.CancelScope(shield=on_trio()):
            await log.part(name)
        raise


def on_trio() -> bool:
    return anyio.get_cancelled_exc_class() is not asyncio.CancelledError


def plain(log: Log) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        finalizers(log, "first", "second")
        async with cleaning_up(log):
            with step("plan"):
                await log.part("plan")
            await send(OK)
            await send(LAST)
            log.note("answered")
            await pause()  # a background task
        log.note("done")

    return app


def bare_stream(log: Log) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        finalizers(log, "first")
        await send(OK)
        async with cleaning_up(log):
            for _ in range(3):
                await pause()
                await send(chunk(b"x"))
        await send(LAST)
        log.note("answered")
        await pause()
        log.note("done")

    return app


def upload(log: Log) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        finalizers(log, "first")
        async with cleaning_up(log):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    log.note("told")
                    return
                if not message["more_body"]:
                    break
                await pause()
        await answer(send)
        log.note("answered")
        log.note("done")

    return app


def hooks(log: Log) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        finalizers(log, "first")
        before_success(log.async_part("hook one"))
        before_success(log.async_part("hook two"))
        await pause()
        await answer(send)
        log.note("answered")
        log.note("done")

    return app


def stream_with_hook(log: Log) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        finalizers(log, "first")
        before_success(log.async_part("hook one"))
        await send(OK)
        await send(chunk(b"x"))
        await pause()
        await send(LAST)
        log.note("answered")
        await pause()
        log.note("done")

    return app


def effect(log: Log) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        finalizers(log, "first")
        async with step("pay", effect=True, cancel=log.async_part("cancel pay")):
            await log.part("pay")
        with step("book", effect=True):
            await log.part("book")
        await answer(send)
        log.note("answered")
        log.note("done")

    return app


def children(log: Log) -> ASGIApp:
    async def child(name: str) -> None:
        async with cleaning_up(log, f"cleanup of {name}"):
            await log.part(name, 3)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        finalizers(log, "first")
        current_call().start_soon(child, "one")
        current_call().start_soon(child, "two")
        await pause()
        await answer(send)
        log.note("answered")
        log.note("done")

    return app


def protected(log: Log) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        finalizers(log, "first")
        await pause()
        with protect():
            await log.part("transfer", 3)
        await pause()
        await answer(send)
        log.note("answered")
        log.note("done")

    return app


def swallowing(log: Log) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        finalizers(log, "first")
        for _ in range(3):
            try:
                await pause()
            except asyncio.CancelledError:
                log.note("swallowed")
        try:
            await answer(send)
        except OSError:
            log.note("refused")
        else:
            log.note("answered")
        log.note("done")

    return app


def listening(log: Log) -> ASGIApp:
    """As Starlette streams below ASGI 2.4: whoever ends first, the listener or the stream, cancels the other."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        finalizers(log, "first")
        await receive()
        async with anyio.create_task_group() as tasks:

            async def listen() -> None:
                while (await receive())["type"] != "http.disconnect":
                    pass
                log.note("told")
                tasks.cancel_scope.cancel()

            async def work() -> None:
                await send(OK)
                for _ in range(2):
                    await send(chunk(b"x"))
                    await pause()
                await send(LAST)
                log.note("answered")
                tasks.cancel_scope.cancel()

            tasks.start_soon(listen)
            tasks.start_soon(work)
        log.note("done")

    return app


def two_senders(log: Log) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        finalizers(log, "first")
        await send(OK)

        async def send_part(part: bytes) -> None:
            await send(chunk(part))

        async with anyio.create_task_group() as tasks:
            for part in (b"a", b"b", b"c"):
                tasks.start_soon(send_part, part)
        await send(LAST)
        log.note("answered")
        log.note("done")

    return app


def waits_for_token(log: Log) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        finalizers(log, "first")
        token = current_call().token
        token.add_callback(lambda: log.note("callback"))
        child = token.child()
        with anyio.move_on_after(0.002):
            await child.wait()
        if token.canceled:
            log.note("told")
            return
        await answer(send)
        log.note("answered")
        log.note("done")

    return app


def fails(log: Log) -> ASGIApp:
    async def bad_finalizer(outcome: Outcome) -> None:
        await log.part("bad")
        raise RuntimeError("the finalizer is broken")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        finalizers(log, "first")
        add_finalizer(bad_finalizer)
        await pause()
        raise RuntimeError("the application is broken")

    return app


def thread(log: Log) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        finalizers(log, "first")
        add_finalizer(lambda: log.note("plain finalizer"))

        def work() -> None:
            log.began["work"] += 1
            log.ended["work"] += 1

        await anyio.to_thread.run_sync(work)
        await answer(send)
        log.note("answered")
        log.note("done")

    return app


def starlette_stream(log: Log) -> ASGIApp:
    async def endpoint(request: Request) -> Response:
        finalizers(log, "first")

        async def parts() -> AsyncIterator[bytes]:
            try:  # no context manager: two generators collected at once close each other
                yield b"a"
                await pause()
                yield b"b"
            except BaseException:
                with anyio.CancelScope(shield=on_trio()):
                    await log.part("cleanup")
                raise

        async def background() -> None:
            log.note("answered")
            await pause()
            log.note("done")

        return StreamingResponse(parts(), background=BackgroundTask(background))

    return Starlette(routes=[Route("/", endpoint)])


def fastapi(log: Log) -> ASGIApp:
    app = FastAPI()

    async def session() -> AsyncIterator[str]:
        finalizers(log, "first")
        async with cleaning_up(log):
            yield "session"

    @app.get("/")
    async def endpoint(session: str = Depends(session)) -> str:
        with step("query"):
            await pause()
        log.note("worked")
        return session

    return app


def uploading() -> SlowPeer:
    return SlowPeer(method="POST", body=[b"a", b"b", b"c"])


SCENARIOS: dict[str, Scenario] = {
    "plain": Scenario(plain, finalizers=("first", "second"), cleanups=("cleanup",)),
    "plain, signal": Scenario(plain, options={"policy": "signal"}, finalizers=("first", "second")),
    "plain, finish": Scenario(plain, options={"policy": "finish"}, finalizers=("first", "second")),
    "stream": Scenario(bare_stream, finalizers=("first",), cleanups=("cleanup",)),
    "stream, finish": Scenario(bare_stream, options={"policy": "finish"}, finalizers=("first",)),
    "upload": Scenario(upload, uploading, finalizers=("first",), cleanups=("cleanup",)),
    "hooks": Scenario(hooks, finalizers=("first",), unbreakable=("hook one", "hook two")),
    "stream with hook": Scenario(stream_with_hook, finalizers=("first",), unbreakable=("hook one",)),
    "effect": Scenario(effect, finalizers=("first",), unbreakable=("cancel pay",)),
    "children": Scenario(children, finalizers=("first",), cleanups=("cleanup of one", "cleanup of two")),
    "protected": Scenario(protected, finalizers=("first",), cleanups=("transfer",)),
    "swallowing": Scenario(swallowing, finalizers=("first",), swallows=True),
    "listening": Scenario(listening, finalizers=("first",), swallows=True),
    "two senders": Scenario(two_senders, finalizers=("first",), swallows=True),
    "token": Scenario(waits_for_token, finalizers=("first",)),
    "fails": Scenario(fails, finalizers=("first", "bad"), may_fail=True),
    "thread": Scenario(thread, finalizers=("first",)),
    "Starlette stream": Scenario(starlette_stream, finalizers=("first",), cleanups=("cleanup",)),
    "FastAPI dependency": Scenario(fastapi, finalizers=("first",), cleanups=("cleanup",)),
}


class Judge:
    """Says what is wrong with a run."""

    def __init__(self, scenario: Scenario, fault: str | None, run: Run) -> None:
        self.scenario = scenario
        self.fault = fault if run.injected else None
        self.run = run
        self.wrong: list[str] = []

    def check(self, holds: object, text: str) -> None:
        if not holds:
            self.wrong.append(text)

    def verdict(self) -> list[str]:
        self.check(len(self.run.outcomes) == 1, f"{len(self.run.outcomes)} outcomes")
        self.check(not self.run.left_tasks, f"tasks left: {self.run.left_tasks}")
        self.check(not self.run.left_jobs, f"{self.run.left_jobs} jobs left")
        if len(self.run.outcomes) == 1:
            self.finalizers()
            self.parts()
            self.what_left()
            self.state(self.run.outcomes[0])
            self.steps(self.run.outcomes[0])
        return self.wrong

    def finalizers(self) -> None:
        log = self.run.log
        registered = [name for name in self.scenario.finalizers if log.began[name]]
        records = [record for record in self.run.outcomes[0].finalizers if record.name in self.scenario.finalizers]
        for name in registered:
            self.check(
                log.began[name] == log.ended[name] == 1,
                f"finalizer {name} began {log.began[name]} times, ended {log.ended[name]}",
            )
        names = [record.name for record in records]
        expected = [name for name in reversed(self.scenario.finalizers) if name in registered or name in names]
        self.check(
            names == [n.replace("bad", "bad_finalizer") for n in expected] or "bad" in expected,
            f"finalizers ran as {names}",
        )

    def parts(self) -> None:
        log = self.run.log
        if self.fault != "both":
            for name in self.scenario.cleanups:
                if name == "transfer" and self.fault == "server cancel":
                    continue
                self.check(log.began[name] == log.ended[name], f"{name} was cut off")
        for name in self.scenario.unbreakable:
            self.check(log.began[name] == log.ended[name] <= 1, f"{name} was cut off")

    def what_left(self) -> None:
        run, state = self.run, self.run.outcomes[0].state
        cancelled = run.error is not None and not isinstance(run.error, Exception)
        if self.fault in {"server cancel", "both"}:
            swallows = self.scenario.swallows or isinstance(run.error, RuntimeError)
            if not on_trio() and not swallows:
                self.check(cancelled, f"the server's cancel was swallowed; out came {run.error!r}")
        else:
            expected = self.scenario.may_fail and state is State.FAILED
            self.check((run.error is not None) == expected, f"{run.error!r} left the middleware")
            self.check(run.cancelling == 0, f"the server's task is left with {run.cancelling} cancels")
        late = [m for m in run.peer.too_late if m.get("status") != 499 and m != LAST]
        self.check(not late, f"sent after the client was known to have left: {late}")

    def state(self, outcome: Outcome) -> None:
        run, log, fault = self.run, self.run.log, self.fault
        before = log.events[: run.events_before]
        causes: dict[str | None, set[Cause | None]] = {
            None: {None},
            "hang-up": {None, Cause.CLIENT_DISCONNECT},
            "server cancel": {None, Cause.UNKNOWN},
            "both": {None, Cause.UNKNOWN, Cause.CLIENT_DISCONNECT},
            "deadline": {None, Cause.TIMEOUT},
            "requested": {None, Cause.REQUESTED},
        }
        self.check(outcome.cause in causes[fault], f"cause {outcome.cause}")
        if outcome.state is State.CANCELED:
            policy = self.scenario.options.get("policy")
            left = fault in {"hang-up", "both"} and (outcome.cause is Cause.CLIENT_DISCONNECT or policy == "finish")
            self.check(left or outcome.cause in {Cause.UNKNOWN, Cause.REQUESTED}, f"canceled by {outcome.cause}")
        elif outcome.state is State.TIMED_OUT:
            self.check(outcome.cause is Cause.TIMEOUT, f"timed out by {outcome.cause}")
        elif outcome.state is State.COMPLETED:
            hooks = self.scenario.unbreakable
            committed = bool(hooks) and all(log.ended[hook] for hook in hooks)
            self.check(
                log.began["done"] or log.began["worked"] or run.peer.complete or committed,
                "completed, and the work was not done",
            )
            if fault not in {"hang-up", "both"}:
                self.check(run.peer.complete and outcome.delivered, "completed, and the client has no whole response")
        elif outcome.state is State.FAILED:
            self.check(self.scenario.may_fail, f"failed: {outcome.error!r}")
        else:
            self.check("pay" in log.began, "ambiguous")
        if fault is None and not run.ended_before:
            expected = State.FAILED if self.scenario.may_fail else State.COMPLETED
            self.check(outcome.state is expected, f"{outcome.state} without a fault")
        if outcome.delivered and not run.peer.left:
            self.check(run.peer.complete, "delivered, and the client has no whole response")
        if "answered" in before and fault in {"hang-up", "deadline"}:
            self.check(outcome.state is State.COMPLETED, f"{outcome.state} after the whole response")
            self.check(log.ended.keys() is not None and "done" in log.began, "the work after the response was cut off")
        if run.peer.complete and fault == "deadline" and "answered" in log.began:
            self.check(outcome.state is State.COMPLETED, f"{outcome.state}, and the client has a whole response")

    def steps(self, outcome: Outcome) -> None:
        log = self.run.log
        for record in outcome.steps:
            if record.state is State.COMPLETED:
                self.check(log.ended[record.name] == 1 or record.name == "query", f"step {record.name} completed")
            else:
                self.check(log.ended[record.name] == 0 or log.began["swallowed"], f"step {record.name} {record.state}")
            if record.name == "pay":
                told = log.began["cancel pay"]
                self.check(told == (record.state is not State.COMPLETED), f"cancel= ran {told} times: {record.state}")
                self.check(record.state is not State.AMBIGUOUS, "ambiguous, and it was canceled")
            if record.name == "book" and record.state is not State.COMPLETED:
                self.check(outcome.state is State.AMBIGUOUS, f"an effect was in flight: {outcome.state}")


class Lines(logging.Handler):
    """Counts the log lines."""

    def __init__(self) -> None:
        super().__init__()
        self.levels: list[int] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.levels.append(record.levelno)

    def verdict(self, scenario: Scenario, run: Run) -> list[str]:
        """What is wrong with the lines of one run."""
        wrong = []
        expected = sum(outcome.state is not State.COMPLETED for outcome in run.outcomes)
        if self.levels.count(logging.INFO) != expected:
            wrong.append(f"{self.levels.count(logging.INFO)} INFO lines")
        if logging.ERROR in self.levels and not scenario.may_fail:
            wrong.append("an ERROR line")
        return wrong


@pytest.fixture
def lines() -> Iterator[Lines]:
    logger = logging.getLogger("hangup")
    handler = Lines()
    level, logger.propagate = logger.level, False
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)
    logger.propagate = True


@pytest.mark.parametrize("name", SCENARIOS)
async def test_a_fault_at_every_suspension_point(
    name: str, lines: Lines, anyio_backend: Any, long_run: bool, tally: Tally
) -> None:
    if on_trio() and name == "swallowing":
        pytest.skip("trio cancels by level: to swallow is to spin")
    if on_trio() and name == "Starlette stream":
        pytest.skip("Starlette leaves its generators to the garbage collector, where trio has none run")
    scenario = SCENARIOS[name]
    eager = "loop_factory" in anyio_backend[1]
    # Every point on asyncio; elsewhere every fifth, from a random one, unless all are asked for.
    stride = 1 if long_run or anyio_backend == ("asyncio", {}) else 5
    wrong: list[str] = []
    runs = most = 0
    for fault, inject in FAULTS.items():
        for resuming in (False, True):
            for at in itertools.count(random.randint(1, stride), stride):
                lines.levels.clear()
                run = await run_once(scenario, at=at, resuming=resuming, fault=inject, eager=eager)
                verdict = Judge(scenario, fault, run).verdict() + lines.verdict(scenario, run)
                if verdict:
                    moment = "as it resumes" if resuming else "while it is suspended"
                    wrong.append(f"{fault} at point {at} {moment}: {verdict}; {run.outcomes}; {run.log.events}")
                most = max(most, run.points)
                if run.points < at:
                    break
                runs += 1
    gc.collect()  # a call that was dropped with finalizers pending warns
    tally.points += most
    tally.runs += runs
    print(f"{name}: {most} suspension points, {runs} runs")
    assert not wrong, f"{len(wrong)} of {runs} runs are wrong:\n" + "\n".join(wrong)
