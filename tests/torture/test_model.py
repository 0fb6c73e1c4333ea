"""The whole middleware against the reference model, one event at a time. See `model`.

Hypothesis draws the events. Each rule is one of them: it happens to a real call, through the real middleware, and to
the `Model`; then the loop runs until the application is where the model says, and everything is compared. The
application is an actor that does what it is told and nothing else, so it is certain when what happens, and no clock is
needed.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any

import anyio
import hypothesis
import pytest
import trio
import trio.testing
import uvloop
from anyio.lowlevel import checkpoint
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from starlette.types import Message, Receive, Scope, Send

from hangup import (
    AmbiguousOutcome,
    Call,
    HangupMiddleware,
    Outcome,
    add_finalizer,
    before_success,
    current_call,
    protect,
    step,
)
from hangup._runtime import _jobs
from hangup.testing import Peer, Quirks

from .model import READ_AHEAD, REQUESTED, SHUTDOWN, TIMEOUT, Ending, Frame, Model

#: Seconds of CPU that anything may take.
PATIENCE = 2.0

#: How many turns of the event loop are waited for what must not happen.
TURNS = 8

PIECE, POISON = b"12345678", b"poison"
QUIRKS = st.builds(
    Quirks,
    latched=st.booleans(),
    disconnect_on_complete=st.booleans(),
    disconnect_before_final_returns=st.booleans(),
    send_error=st.sampled_from([None, OSError("gone"), RuntimeError("the handler is closed")]),  # as uvloop puts it
    send_stays_blocked=st.just(True),  # else it is open whether it returns before the disconnect is known
    body_lost=st.booleans(),
)
ENDINGS = st.lists(st.sampled_from(["completed", "completed", "failed", "waits"]), max_size=2)


# ---------------------------------------------------------------------- loops that stand still between two events


class AsyncioLoop:
    def __init__(self, factory: Callable[[], asyncio.AbstractEventLoop] | None = None) -> None:
        self._runner = asyncio.Runner(loop_factory=factory)

    def run(self, fn: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._runner.run(fn())

    def start(self, fn: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.task = self._runner.get_loop().create_task(fn())

    async def turn(self) -> None:
        await asyncio.sleep(0)

    def close(self) -> None:
        self._runner.close()


class TrioLoop:
    """trio as a guest of this thread, with a clock that moves only while something is waited for."""

    def __init__(self) -> None:
        self._due: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._ended: list[object] = []
        self._clock = trio.testing.MockClock()
        trio.lowlevel.start_guest_run(
            self._main, run_sync_soon_threadsafe=self._due.put, done_callback=self._ended.append, clock=self._clock
        )
        self._pump(lambda: hasattr(self, "_nursery"))

    async def _main(self) -> None:
        self._closed = trio.Event()
        self._token = trio.lowlevel.current_trio_token()
        async with trio.open_nursery() as self._nursery:
            await self._closed.wait()
            self._nursery.cancel_scope.cancel()

    def _pump(self, condition: Callable[[], object]) -> None:
        while not condition():
            self._due.get(timeout=10)()

    def run(self, fn: Callable[[], Coroutine[Any, Any, None]]) -> None:
        ended: list[Exception | None] = []

        async def run() -> None:
            try:
                await fn()
            except Exception as exc:
                ended.append(exc)
            ended.append(None)

        self.start(run)
        self._pump(lambda: ended)
        if ended[0] is not None:
            raise ended[0]

    def start(self, fn: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._token.run_sync_soon(self._nursery.start_soon, fn)

    async def turn(self) -> None:
        await trio.testing.wait_all_tasks_blocked()
        self._clock.jump(0.001)

    def close(self) -> None:
        self._token.run_sync_soon(self._closed.set)
        self._pump(lambda: self._ended)


def _eager_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.set_task_factory(asyncio.eager_task_factory)
    return loop


LOOPS: dict[str, Callable[[], AsyncioLoop | TrioLoop]] = {
    "asyncio": AsyncioLoop,
    "uvloop": lambda: AsyncioLoop(uvloop.new_event_loop),
    "eager": lambda: AsyncioLoop(_eager_loop),
    "trio": TrioLoop,
}


# ---------------------------------------------------------------------- the server and the application


class Server(Peer):
    """A peer whose client sends its body when it is told to, and whose `receive` can break."""

    def say(self, whole: bool) -> None:
        self._pieces.append(PIECE)
        self._body_ends = whole
        self.touch()

    def break_receive(self) -> None:
        self.quirks = replace(self.quirks, body_lost=False)
        self._pieces.append(POISON)
        self.touch()

    async def receive(self) -> Message:
        message = await super().receive()
        if message.get("body") is POISON:
            self._pieces.append(POISON)
            raise RuntimeError("the body is too large")
        return message


Action = Callable[[], Awaitable[object]]


def kind_of(exc: BaseException) -> str:
    if isinstance(exc, anyio.get_cancelled_exc_class()):
        return "Cancelled"
    return "OSError" if isinstance(exc, OSError) else type(exc).__name__


class Actor:
    """The application: it does what it is told. An action returns None, or how the innermost section is left."""

    def __init__(self, hooks: list[Ending], finalizers: list[Ending], *, on_trio: bool) -> None:
        self.hooks = hooks
        self.finalizers = finalizers
        self.on_trio = on_trio
        self.at = "starting"
        self.frames: list[str] = []  #: the sections it is in, and the errors it handles
        self.given_up = False  #: the test has failed: let everything end
        self.call: Call
        self.send: Send
        self.receive: Receive
        self.finalized: list[str] = []
        self.child_may_end = anyio.Event()
        self.child_fails = False
        self._wake = anyio.Event()
        self._action: Action

    @property
    def seen(self) -> tuple[str, list[str]]:
        return self.at, self.frames

    def do(self, action: Action) -> None:
        """From the test: do this next. It goes on where it stands."""
        self._action = action
        self._wake.set()

    async def stand(self, at: str) -> Action:
        """Wait for the test, here and nowhere else."""
        self.at, self._wake = at, anyio.Event()
        if not self.given_up:
            await self._wake.wait()
        self.at = "busy"
        return self._action

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.call, self.receive, self.send = current_call(), receive, send
        for ending in self.hooks:
            self.add_hook(ending)
        for ending in self.finalizers:
            self.add_finalizer(ending)
        try:
            await self.act()
        finally:
            self.at = "joining"

    async def act(self) -> object:
        while True:
            try:
                how = await (await self.stand("prompt"))()
            except (Exception, anyio.get_cancelled_exc_class()) as exc:
                if self.given_up:
                    raise
                how = await self.handle(exc)
                if how == "leave":
                    continue
                if how == "pass on":
                    raise
            if isinstance(how, Exception):
                raise how
            if how is not None:
                return how

    async def handle(self, exc: BaseException) -> object:
        self.frames.append(kind_of(exc))
        try:
            with anyio.CancelScope(shield=self.on_trio):
                how = await self.act()
        finally:
            self.frames.pop()
        return how

    # Actions.

    async def enter(self, section: str) -> object:
        self.frames.append(section)
        try:
            if section == "protect":
                with protect():
                    how = await self.act()
            else:
                cancel = {"effect": None, "undoable": self._undo, "stuck": self._fail_to_undo}[section]
                async with step("pay", effect=True, cancel=cancel):
                    how = await self.act()
        finally:
            self.frames.pop()
        return None if how == "leave" else how

    async def say(self, frame: Frame, status: int) -> None:
        messages: dict[str, Message] = {
            "start": {"type": "http.response.start", "status": status, "headers": [(b"x-application", b"yes")]},
            "chunk": {"type": "http.response.body", "body": b"application", "more_body": True},
            "last": {"type": "http.response.body", "body": b"application", "more_body": False},
        }
        self.at = "sending"
        await self.send(messages[frame])

    async def listen(self) -> None:
        self.at = "listening"
        error = None
        try:
            await self.receive()
        except RuntimeError as exc:
            error = str(exc)
        if error is not None:
            raise RuntimeError(error)  # a new one: what is raised twice loses what it followed

    async def look(self) -> None:
        assert self.call.token.canceled == (self.call.cause is not None)

    def add_finalizer(self, ending: Ending) -> None:
        @add_finalizer
        async def finalize() -> None:
            self.finalized.append(ending)
            await self.end(ending, "finalizing")

    def add_hook(self, ending: Ending) -> None:
        @before_success
        async def hook() -> None:
            await self.end(ending, "committing")

    async def start_child(self) -> None:
        async def child() -> None:
            await self.child_may_end.wait()
            if self.child_fails:
                raise RuntimeError("a child is broken")

        self.call.start_soon(child)

    async def end(self, ending: Ending, at: str) -> None:
        if ending == "waits":
            await (await self.stand(at))()
        await checkpoint()
        if ending == "failed":
            raise RuntimeError("broken")

    async def _undo(self) -> None:
        await checkpoint()

    async def _fail_to_undo(self) -> None:
        raise RuntimeError("cannot be undone")


# ---------------------------------------------------------------------- the events


class Events(RuleBasedStateMachine):
    """Everything that can happen to a call."""

    backend: str

    def __init__(self) -> None:
        super().__init__()
        self.on_trio = self.backend == "trio"
        self.loop = LOOPS[self.backend]()
        self.jobs = set(_jobs)
        self.sound = False  #: nothing has gone wrong so far
        self.outcomes: list[Outcome] = []
        self.escaped: str | None = None
        self.host: asyncio.Task[object] | None = None
        self.late: int | None = None  #: how many frames had come when the disconnect was known
        self.model: Model
        self.app_started = self.app_done = False

    @initialize(
        policy=st.sampled_from(["cancel", "cancel", "signal", "finish"]),
        upload=st.booleans(),
        quirks=QUIRKS,
        hooks=ENDINGS,
        finalizers=ENDINGS,
        answers=st.booleans(),
    )
    def begin(
        self,
        policy: Any,
        upload: bool,
        quirks: Quirks,
        hooks: list[Ending],
        finalizers: list[Ending],
        answers: bool,
    ) -> None:
        self.answers = answers  #: whether it sends the rest of its response in the end
        error = type(quirks.send_error).__name__ if quirks.send_error is not None else None
        self.model = Model(self.on_trio, policy, upload, error, quirks.body_lost, list(hooks), list(finalizers))

        async def start() -> None:
            self.actor = Actor(hooks, finalizers, on_trio=self.on_trio)
            method, body = ("POST", []) if upload else ("GET", [b""])
            self.server = Server(method=method, body=body, body_ends=not upload, quirks=quirks)
            observers, size = [self.outcomes.append], READ_AHEAD * len(PIECE)
            self.middleware = HangupMiddleware(
                self.actor, policy=policy, grace=60, read_ahead=size, observers=observers
            )
            self.loop.start(self.serve)

        self.sound = True
        self.happen(start)

    async def serve(self) -> None:
        self.host = None if self.on_trio else asyncio.current_task()
        try:
            await self.middleware(self.server.scope, self.server.receive, self.server.send)
        except (Exception, asyncio.CancelledError) as exc:
            self.escaped = kind_of(exc)
        finally:
            self.actor.at = "ended"

    def happen(self, event: Callable[[], object]) -> None:
        """Let it happen, and wait until the application is where the model says."""

        async def run() -> None:
            done = event()
            if isinstance(done, Awaitable):
                await done
            for _ in range(TURNS):
                await self.loop.turn()
            deadline = time.process_time() + PATIENCE
            while self.actor.seen != self.model.seen:
                if time.process_time() > deadline:
                    raise AssertionError(f"the application is {self.actor.seen}, the model {self.model.seen}")
                await self.loop.turn()
            if self.actor.at not in {"sending", "committing"}:
                self.server.read_on()  # it did not read that one frame

        try:
            self.loop.run(run)
        except BaseException:
            self.sound = False
            raise

    def act(self, action: Callable[..., Awaitable[object]], *args: object) -> None:
        """Have the application do this."""
        self.happen(lambda: self.actor.do(lambda: action(*args)))

    # ------------------------------------------------------------------ the client and the server

    def running(self) -> bool:
        return self.model.at != "ended"

    def uploads(self) -> bool:
        model = self.model
        over = model.whole or model.gone or model.broken or model.complete or model.cut
        return self.running() and model.upload and not over

    @precondition(uploads)
    @rule(whole=st.booleans())
    def the_client_sends_of_its_body(self, whole: bool) -> None:
        self.model.say(whole)
        self.happen(lambda: self.server.say(whole))

    @precondition(lambda self: self.running() and not self.model.gone)
    @rule()
    def the_client_leaves(self) -> None:
        self.model.hang_up()
        self.happen(self.server.hang_up)

    @precondition(lambda self: self.running() and not self.model.gone and not self.model.broken)
    @rule()
    def the_servers_receive_raises(self) -> None:
        self.model.break_receive()
        self.happen(self.server.break_receive)

    @precondition(lambda self: self.model.at == "sending")
    @rule()
    def the_client_reads_on(self) -> None:
        self.model.read_on()
        self.happen(self.server.read_on)

    @precondition(lambda self: self.running() and not self.on_trio)
    @rule()
    def the_server_cancels(self) -> None:
        self.model.server_cancels()
        self.happen(lambda: self.host.cancel() and None)  # type: ignore[union-attr]

    # ------------------------------------------------------------------ causes

    @precondition(lambda self: self.running())
    @rule(in_thread=st.booleans())
    def somebody_cancels(self, in_thread: bool) -> None:
        self.model.stop(REQUESTED)
        thread = threading.Thread(target=self.actor.call.cancel)

        def cancel() -> None:
            if in_thread:
                thread.start()
                thread.join()
            else:
                self.actor.call.cancel()

        self.happen(cancel)

    @precondition(lambda self: self.running() and not (self.model.at == "listening" and self.model.shielded))
    @rule()
    def the_deadline_passes(self) -> None:
        self.model.stop(TIMEOUT)

        def time_out() -> None:
            self.actor.call.policy = replace(self.actor.call.policy, timeout=1e-9)

        self.happen(time_out)

    def may_shut_down(self) -> bool:
        return self.running() and not (self.model.at == "joining" and self.model.canceled)

    @precondition(may_shut_down)
    @rule()
    def the_server_shuts_down(self) -> None:
        self.model.stop(SHUTDOWN)

        async def drain() -> None:
            await self.middleware.drain(60)

        self.happen(lambda: self.loop.start(drain))

    # ------------------------------------------------------------------ what the application does

    def prompted(self) -> bool:
        return self.model.at == "prompt"

    def may_send(self, frame: str) -> bool:
        return self.prompted() and not self.app_done and self.app_started == (frame != "start")

    def send(self, frame: Frame, status: int, blocks: bool) -> None:
        blocks = blocks and {"failed", "waits"}.isdisjoint(self.model.hooks)  # else it would be our 500 that does
        self.app_started, self.app_done = True, self.app_done or frame == "last"
        self.model.send(frame, status, blocks)
        if blocks:
            self.server.stop_reading()
        self.act(self.actor.say, frame, status)

    @precondition(lambda self: self.may_send("start"))
    @rule(status=st.sampled_from([200, 200, 404, 500]), blocks=st.booleans())
    def it_starts_its_response(self, status: int, blocks: bool) -> None:
        self.send("start", status, blocks)

    @precondition(lambda self: self.may_send("chunk"))
    @rule(blocks=st.booleans())
    def it_sends_a_chunk(self, blocks: bool) -> None:
        self.send("chunk", 0, blocks)

    @precondition(lambda self: self.may_send("last"))
    @rule(blocks=st.booleans())
    def it_sends_the_last_frame(self, blocks: bool) -> None:
        self.send("last", 0, blocks)

    def may_listen(self) -> bool:
        model = self.model
        over = model.complete or model.cut  # then servers differ in what they make of the rest of the body
        hears = model.unread or not (model.policy == "finish" and model.whole)  # else it would listen for ever
        silent = model.cause == TIMEOUT or (model.refused and not model.unread) or (over and model.blind)
        return self.prompted() and bool(hears) and not silent

    @precondition(may_listen)
    @rule()
    def it_reads(self) -> None:
        self.model.listen()
        self.act(self.actor.listen)

    @precondition(prompted)
    @rule()
    def it_looks_at_its_token(self) -> None:
        self.model.look()
        self.act(self.actor.look)

    @precondition(lambda self: self.model.at == "committing")
    @rule(ok=st.booleans())
    def a_hook_ends(self, ok: bool) -> None:
        self.model.hook_ends(ok)

        async def end() -> None:
            if not ok:
                raise RuntimeError("a hook is broken")

        self.act(end)

    @precondition(lambda self: self.prompted() and not self.model.child)
    @rule()
    def it_starts_a_child(self) -> None:
        self.model.start_child()
        self.act(self.actor.start_child)

    @precondition(lambda self: self.running() and self.model.child == "runs")
    @rule(ok=st.booleans())
    def the_child_ends(self, ok: bool) -> None:
        self.model.child_ends(ok)
        self.actor.child_fails = not ok
        self.happen(self.actor.child_may_end.set)

    # ------------------------------------------------------------------ sections, errors and the end

    @precondition(lambda self: self.prompted() and len(self.model.frames) < 5)
    @rule(section=st.sampled_from(["protect", "effect", "undoable", "stuck"]))
    def it_enters(self, section: str) -> None:
        self.model.enter(section)
        self.act(self.actor.enter, section)

    def may_leave(self) -> bool:
        handles = self.model.handles  # trio cancels by level: there who swallows it spins
        return (
            self.prompted()
            and bool(self.model.frames)
            and not (self.on_trio and handles is not None and handles.follows)
        )

    async def answer(self, how: object) -> object:
        return how

    @precondition(may_leave)
    @rule()
    def it_leaves_the_section_or_swallows_the_error(self) -> None:
        self.model.leave()
        self.act(self.answer, "leave")

    @precondition(lambda self: self.prompted() and self.model.handles is not None)
    @rule()
    def it_passes_the_error_on(self) -> None:
        assert self.model.handles is not None
        self.model.fail(self.model.handles.kind)
        self.act(self.answer, "pass on")

    @precondition(prompted)
    @rule(error=st.sampled_from([ValueError("its own"), AmbiguousOutcome("who knows")]))
    def it_raises(self, error: Exception) -> None:
        self.model.fail(type(error).__name__)
        self.act(self.answer, type(error)(*error.args))

    def outlives(self) -> bool:
        """Whether something happens after its return. Else that is left to `teardown`, and there is time for more."""
        return self.prompted() and (self.model.child == "runs" or "waits" in self.model.finalizers)

    @precondition(outlives)
    @rule()
    def it_returns(self) -> None:
        self.model.return_()
        self.act(self.answer, "return")

    @precondition(lambda self: self.model.at == "finalizing")
    @rule()
    def a_finalizer_ends(self) -> None:
        self.model.finalize()
        self.act(checkpoint)

    @precondition(lambda self: not self.running())
    @rule()
    def nothing_more_happens(self) -> None:
        """It has ended. Hypothesis asks for a rule all the same."""

    # ------------------------------------------------------------------ what holds

    @invariant()
    def everything_is_as_the_model_says(self) -> None:
        if not self.sound:
            return
        self.sound = False
        model, call, server = self.model, self.actor.call, self.server
        assert not self.outcomes or not self.running()
        assert call.cause == model.cause
        assert model.told or call.told_cause is None, "told too early"
        if model.left and self.late is None:
            self.late = len(server.late)
        late = server.late[self.late :] if model.left else []
        assert "application" not in str(late), "forwarded after the disconnect"
        got = server.status, server.complete
        right = model.client_status, model.client_complete
        assert model.gone or got == right, f"the client has got {got}, not {right}"
        self.sound = True

    def judge(self) -> None:
        """The call has ended."""
        model = self.model
        [outcome] = self.outcomes
        names = ("state", "cause", "phase", "status_code", "delivered")
        seen = {name: getattr(outcome, name) for name in names}
        seen |= {"escapes": self.escaped, "finalized": self.actor.finalized}
        seen |= {"finalizers": [record.state for record in outcome.finalizers]}
        right = {name: getattr(model, name) for name in (*names, "escapes", "finalized")}
        right |= {"finalizers": [ending.replace("waits", "completed") for ending in model.finalized]}
        wrong = {key: (seen[key], right[key]) for key in right if seen[key] != right[key]}
        assert not wrong, f"seen, and right: {wrong}"

    def teardown(self) -> None:
        try:
            if self.sound:
                self.wind_up()
                self.everything_is_as_the_model_says()
                self.judge()
                self.happen(self.no_job_is_left)
        finally:
            if not self.sound and hasattr(self, "actor"):
                self.give_up()
            self.loop.close()

    def wind_up(self) -> None:
        """Bring it to its end."""
        end: dict[str, Callable[[], None]] = {
            "sending": self.the_client_reads_on,
            "committing": lambda: self.a_hook_ends(True),
            "joining": lambda: self.the_child_ends(True),
            "finalizing": self.a_finalizer_ends,
        }
        while self.running():
            model = self.model
            if model.at == "listening":
                self.somebody_cancels(False) if model.gone or model.blind else self.the_client_leaves()
            elif model.at == "prompt" and model.handles is not None:
                self.it_passes_the_error_on()
            elif model.at == "prompt" and self.answers and not self.app_done:
                self.it_sends_the_last_frame(False) if self.app_started else self.it_starts_its_response(200, False)
            elif model.at == "prompt":
                self.it_returns()
            else:
                end[model.at]()

    async def no_job_is_left(self) -> None:
        deadline = time.process_time() + PATIENCE
        while not _jobs <= self.jobs:
            assert time.process_time() < deadline, _jobs - self.jobs
            await self.loop.turn()

    def give_up(self) -> None:
        """It went wrong: let everything end, whatever is shielded and swallowed."""

        async def end() -> None:
            actor = self.actor
            actor.given_up = True
            actor.do(lambda: self.answer("return"))
            actor.child_may_end.set()
            self.server.read_on()
            self.server.hang_up()
            actor.call.cancel()
            deadline = time.process_time() + PATIENCE
            while actor.at != "ended" and time.process_time() < deadline:
                await self.loop.turn()

        self.loop.run(end)


# ---------------------------------------------------------------------- the tests


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hangup.middleware.WATCH_AFTER", 0.0)
    monkeypatch.setattr("hangup._send.LAST_TIMEOUT", 0.01)
    monkeypatch.setattr("hangup._call.REACH", 0.01)
    monkeypatch.setattr("hangup._call.QUIET_TIMEOUT", 0.01)


#: How many calls each event loop is given.
EXAMPLES = {"asyncio": 700, "uvloop": 200, "trio": 500, **({"eager": 200} if sys.version_info >= (3, 12) else {})}


def check(backend: str, examples: int, seed: int | None = None) -> None:
    """Play ``examples`` calls: always the same, or those of ``seed``."""
    machine: Any = type("Events", (Events,), {"backend": backend})
    if seed is not None:
        machine = hypothesis.seed(seed)(machine)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=20,
            derandomize=seed is None,
            database=None,
            deadline=None,
            report_multiple_bugs=False,
            phases=(Phase.generate, Phase.shrink),  # the others trace, which hangup takes for a debugger
            suppress_health_check=list(HealthCheck),
        ),
    )


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


def begin(
    policy: str = "cancel", hooks: list[Ending] | None = None, error: Exception | None = None
) -> Callable[[Events], None]:
    quirks = Quirks(send_error=error, send_stays_blocked=True)
    return lambda e: e.begin(policy, upload=False, quirks=quirks, hooks=hooks or [], finalizers=[], answers=False)


SLOW = Quirks(disconnect_before_final_returns=True, send_stays_blocked=True)

#: What it has found, each cut down to what it takes.
FOUND: dict[str, list[Callable[[Events], None]]] = {
    "a held start refused is no cause": [
        begin(hooks=["completed"], error=OSError("gone")),
        lambda e: e.the_servers_receive_raises(),
        lambda e: e.the_client_leaves(),
        lambda e: e.it_starts_its_response(200, False),
        lambda e: e.it_sends_the_last_frame(False),
    ],
    "a held start blocked is released, and so is the last frame": [
        begin(hooks=["completed"]),
        lambda e: e.it_starts_its_response(200, False),
        lambda e: e.it_sends_the_last_frame(True),
        lambda e: e.the_client_leaves(),
    ],
    "a chunk behind a held start does not go out after the deadline": [
        begin(hooks=["completed"]),
        lambda e: e.it_starts_its_response(200, False),
        lambda e: e.it_enters("protect"),
        lambda e: e.it_sends_a_chunk(True),
        lambda e: e.the_deadline_passes(),
    ],
    "a held start that the server cancels is the end of the response": [
        begin(hooks=["completed"]),
        lambda e: e.it_reads(),
        lambda e: e.it_starts_its_response(200, False),
        lambda e: e.it_sends_the_last_frame(True),
        lambda e: e.the_server_cancels() if not e.on_trio else e.the_client_reads_on(),
        lambda e: e.it_reads(),
    ],
    "a failed hook is a 500 also for a client that has left": [
        begin(hooks=["waits"]),
        lambda e: e.it_starts_its_response(200, False),
        lambda e: e.it_sends_the_last_frame(False),
        lambda e: e.the_client_leaves(),
        lambda e: e.a_hook_ends(False),
    ],
    "the answer of a failed hook is not cut off by an interruption": [
        lambda e: e.begin("cancel", False, SLOW, ["waits"], [], answers=False),
        lambda e: e.it_starts_its_response(200, False),
        lambda e: e.it_sends_the_last_frame(False),
        lambda e: e.the_server_shuts_down(),
        lambda e: e.a_hook_ends(False),
    ],
    "what it answers after a look at its canceled token is no completion": [
        begin(),
        lambda e: e.it_enters("protect"),
        lambda e: e.somebody_cancels(False),
        lambda e: e.it_looks_at_its_token(),
        lambda e: e.it_starts_its_response(200, False),
        lambda e: e.it_sends_the_last_frame(False),
    ],
    "a child that was started in cleanup is interrupted": [
        begin(),
        lambda e: e.somebody_cancels(False),
        lambda e: e.it_starts_a_child(),
        lambda e: e.it_passes_the_error_on(),
    ],
    "the deadline ends a child that was only signaled": [
        begin("signal"),
        lambda e: e.it_starts_a_child(),
        lambda e: e.it_returns(),
        lambda e: e.the_client_leaves(),
        lambda e: e.the_deadline_passes(),
    ],
}


@pytest.mark.parametrize("found", FOUND)
@pytest.mark.parametrize("backend", EXAMPLES)
def test_it_was_found_once(backend: str, found: str) -> None:
    events = type("Events", (Events,), {"backend": backend})()
    try:
        for event in FOUND[found]:
            event(events)
            events.everything_is_as_the_model_says()
    finally:
        events.teardown()
