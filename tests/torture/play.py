"""The whole middleware against the reference model, one event at a time. See `world`.

Hypothesis draws the events. Each rule is one of them: it happens to a real call, through the real middleware, and to
the model; then the loop runs until the application is where the model says, and everything is compared. The
application is an actor that does what it is told and nothing else, so it is certain when what happens, and no clock is
needed.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any

import anyio
import hypothesis
import trio
import trio.testing
import uvloop
from anyio.lowlevel import checkpoint
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
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
from hangup.testing import Quirks, _Side

from .world import REQUESTED, SHUTDOWN, TIMEOUT, Ending, World

#: Seconds of CPU that anything may take.
PATIENCE = 2.0

#: How many turns of the event loop are waited for what must not happen.
TURNS = 8

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

POISON = b"poison"


class Breaks(_Side):
    """A server whose `receive` can break."""

    def put(self, message: Message) -> None:
        """Have the client say this next."""
        raise NotImplementedError

    def break_receive(self) -> None:
        self.put({"type": "websocket.receive", "bytes": POISON, "body": POISON})
        self.touch()

    async def receive(self) -> Message:
        message = await super().receive()
        if POISON in {message.get("bytes"), message.get("body")}:
            self.put(message)
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
        self.child_fails = self.child_runs = False
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

    async def say(self, message: Message) -> None:
        self.at = "sending"
        await self.send(message)

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

    async def start_child(self, then: object = None) -> object:
        async def child() -> None:
            self.child_runs = True
            try:
                await self.child_may_end.wait()
            finally:
                self.child_runs = False
            if self.child_fails:
                raise RuntimeError("a child is broken")

        self.call.start_soon(child)
        return then

    async def end(self, ending: Ending, at: str) -> None:
        if ending == "waits":
            before = self.at
            while await (await self.stand(at))() == "stay":
                pass
            self.at = before
        await checkpoint()
        if ending == "failed":
            raise RuntimeError("broken")

    async def _undo(self) -> None:
        await checkpoint()

    async def _fail_to_undo(self) -> None:
        raise RuntimeError("cannot be undone")


# ---------------------------------------------------------------------- the events


class Play(RuleBasedStateMachine):
    """What can happen to any call."""

    backend: str
    peer: type[Any]  #: the client and the server
    model: World

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

    def start(
        self, model: World, quirks: Quirks, hooks: list[Ending], finalizers: list[Ending], read_ahead: int, **peer: Any
    ) -> None:
        """Begin a call, as ``model`` says."""
        self.model = model

        async def start() -> None:
            self.actor = Actor(hooks, finalizers, on_trio=self.on_trio)
            self.server = self.peer(quirks=quirks, **peer)
            self.middleware = HangupMiddleware(
                self.actor, policy=model.policy, grace=60, read_ahead=read_ahead, observers=[self.outcomes.append]
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
                await self.loop.turn()

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

    def may_time_out(self) -> bool:
        waits = self.model.shielded or self.model.canceled  # and hears of nothing until its grace is over
        return self.running() and not (self.model.at == "listening" and waits)

    @precondition(may_time_out)
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

    @precondition(lambda self: self.model.at == "committing" and not self.model.child)
    @rule()
    def a_hook_starts_a_child(self) -> None:
        self.model.start_child()
        self.act(self.actor.start_child, "stay")

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
        assert self.actor.child_runs == (model.child == "runs")
        if model.left and self.late is None:
            self.late = len(server.late)
        late = server.late[self.late :] if model.left else []
        assert "application" not in str(late), "forwarded after the disconnect"
        got, right = self.got()
        assert model.gone or got == right, f"the client has got {got}, not {right}"
        self.sound = True

    def got(self) -> tuple[object, object]:
        """What the client has got, and should have."""
        raise NotImplementedError

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
            "prompt": self.go_on,
            "listening": self.stop_listening,
            "sending": self.the_client_reads_on,
            "committing": lambda: self.a_hook_ends(True),
            "joining": lambda: self.the_child_ends(True),
            "finalizing": self.a_finalizer_ends,
        }
        while self.running():
            if self.prompted() and self.model.handles is not None:
                self.it_passes_the_error_on()
            else:
                end[self.model.at]()

    def go_on(self) -> None:
        """Bring the application to its end."""
        self.it_returns()

    def stop_listening(self) -> None:
        """Have it hear of something."""
        raise NotImplementedError

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


def check(events: type[Play], backend: str, examples: int, seed: int | None = None) -> None:
    """Play ``examples`` calls: always the same, or those of ``seed``."""
    machine: Any = type("Events", (events,), {"backend": backend})
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


def check_for(minutes: float, events: type[Play], backend: str) -> None:
    """Play other calls than those that are always played, for so long."""
    end = time.monotonic() + minutes * 60
    seed = int(time.time())
    while time.monotonic() < end:
        seed += 1
        print(f"seed {seed}", flush=True)
        check(events, backend, 1000, seed)


def replay(events: type[Play], backend: str, found: list[Callable[[Any], None]]) -> None:
    """Play one call, event by event."""
    machine = type("Events", (events,), {"backend": backend})()
    try:
        for event in found:
            event(machine)
            machine.everything_is_as_the_model_says()
    finally:
        machine.teardown()
