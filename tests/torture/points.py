"""Runs a scenario once per suspension point, with a fault injected at that point, as SQLite does for allocations.

A point is a step of any task of the scenario after which it is suspended: the server's task with the middleware and
the application in it, and every task that was started meanwhile, so finalizers, hooks, ``cancel=`` callbacks, the
watcher and the supervisor too. At the point the fault is injected in one of two moments: while the task is suspended,
or when what it waited for has happened and it is about to resume, where an interruption cannot land.

On asyncio a task factory wraps each coroutine; on trio an instrument sees each step.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.lowlevel
import trio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hangup import Call, Cause, HangupMiddleware, Outcome, current_call
from hangup._runtime import _jobs, spawn
from hangup.testing import Peer


class Log:
    """What a scenario did, in order; and how often each part began and ended."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.began: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.raised: Counter[str] = Counter()

    def note(self, event: str) -> None:
        self.events.append(event)
        self.began[event] += 1

    async def part(self, name: str, steps: int = 2) -> None:
        """Work that suspends ``steps`` times."""
        self.began[name] += 1
        self.events.append(f"{name} begins")
        try:
            for _ in range(steps):
                await pause()
        except BaseException:
            self.raised[name] += 1
            self.events.append(f"{name} raised")
            raise
        self.ended[name] += 1
        self.events.append(f"{name} ended")

    def async_part(self, name: str, steps: int = 2) -> Callable[[], Awaitable[None]]:
        async def run() -> None:
            await self.part(name, steps)

        run.__qualname__ = name
        return run


async def pause() -> None:
    """Suspend until something has happened, as work does."""
    event = anyio.Event()
    job = spawn(_set, event, name="what happens")
    try:
        await event.wait()
    finally:
        job.cancel()


async def _set(event: anyio.Event) -> None:
    event.set()


class SlowPeer(Peer):
    """A server whose ``send`` suspends, as under a little back-pressure. Says what was sent to one known to be gone."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.run_: Run | None = None
        self.too_late: list[Message] = []

    async def send(self, message: Message) -> None:
        if self.run_ is not None and any(call.life.left for call in self.run_.calls):
            self.too_late.append(message)
        await super().send(message)
        await anyio.lowlevel.checkpoint()


@dataclass
class Scenario:
    """An application and its peer. ``app(log)`` is the ASGI application."""

    app: Callable[[Log], ASGIApp]
    peer: Callable[[], SlowPeer] = SlowPeer
    options: dict[str, Any] = field(default_factory=dict)
    finalizers: tuple[str, ...] = ()  #: in the order of registration
    #: Parts that must end if they began, whatever hits the call but the server's own cancel.
    cleanups: tuple[str, ...] = ()
    #: Parts that must end if they began, whatever hits the call.
    unbreakable: tuple[str, ...] = ()
    may_fail: bool = False
    #: Whether it keeps a server's cancel from coming out: on purpose, or as anyio's task groups do that end meanwhile.
    swallows: bool = False


@dataclass
class Run:
    """One run of a scenario, and what came of it."""

    peer: SlowPeer
    log: Log
    points: int = 0
    injected: bool = False
    events_before: int = 0  #: how many events the log had when the fault came
    ended_before: bool = False  #: the middleware had returned when the fault came
    outcomes: list[Outcome] = field(default_factory=list)
    error: BaseException | None = None
    calls: list[Call] = field(default_factory=list)
    left_tasks: list[str] = field(default_factory=list)
    left_jobs: int = 0
    cancelling: int = 0


Fault = Callable[[Run, Callable[[], object]], None]


def hang_up(run: Run, cancel: Callable[[], object]) -> None:
    run.peer.hang_up()


def server_cancel(run: Run, cancel: Callable[[], object]) -> None:
    cancel()


def both(run: Run, cancel: Callable[[], object]) -> None:
    run.peer.hang_up()
    cancel()


def deadline(run: Run, cancel: Callable[[], object]) -> None:
    for call in run.calls:
        if not call.life.finished:
            call.stop(Cause.TIMEOUT)


def requested(run: Run, cancel: Callable[[], object]) -> None:
    for call in run.calls:
        call.cancel("stop button")


FAULTS: dict[str, Fault] = {
    "hang-up": hang_up,
    "server cancel": server_cancel,
    "both": both,
    "deadline": deadline,
    "requested": requested,
}


class Injector:
    """Counts points, and injects the fault at the ``at``-th."""

    def __init__(self, run: Run, at: int, resuming: bool, fault: Fault | None) -> None:
        self.run = run
        self.at = at
        self.resuming = resuming
        self.fault = fault
        self.on = False
        self.cancel: Callable[[], object] = lambda: None

    def point(self) -> bool:
        """A task is suspended. True if the fault is to come here."""
        if not self.on:
            return False
        self.run.points += 1
        return self.run.points == self.at and self.fault is not None

    def inject(self) -> None:
        if not self.on:
            self.run.ended_before = True
            return
        self.run.injected = True
        self.run.events_before = len(self.run.log.events)
        assert self.fault is not None
        self.fault(self.run, self.cancel)


class Counted(Coroutine[Any, Any, Any]):
    """A coroutine each of whose suspensions is a point."""

    def __init__(self, coro: Coroutine[Any, Any, Any], injector: Injector) -> None:
        self._coro = coro
        self._injector = injector

    def send(self, value: Any) -> Any:
        return self._suspended(self._coro.send(value))

    def throw(self, *exc: Any) -> Any:
        return self._suspended(self._coro.throw(*exc))

    def close(self) -> None:
        self._coro.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coro, name)  # cr_frame and the like

    def _suspended(self, waits_for: Any) -> Any:
        injector = self._injector
        if injector.point():
            if injector.resuming and asyncio.isfuture(waits_for):
                # Before the task's own callback, so in the same turn of the loop: the task cannot be reached.
                waits_for.add_done_callback(lambda _: injector.inject())
            else:
                asyncio.get_running_loop().call_soon(injector.inject)
        return waits_for


def counting_factory(injector: Injector, eager: bool) -> Any:
    def task(coro: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:
        return asyncio.Task(Counted(coro, injector), **options)

    if eager:
        return asyncio.create_eager_task_factory(task)  # made here, because anyio knows it by its code
    return lambda loop, coro, **options: task(coro, loop=loop, **options)


class Instrument(trio.abc.Instrument):
    """The same on trio."""

    def __init__(self, injector: Injector, ignored: trio.lowlevel.Task) -> None:
        self.injector = injector
        self.ignored = ignored
        self.armed: trio.lowlevel.Task | None = None

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self.armed:
            self.armed = None
            self.injector.inject()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self.ignored or not self.injector.point():
            return
        if self.injector.resuming:
            self.armed = task
        else:
            self.injector.inject()


async def _call(scenario: Scenario, run: Run, injector: Injector) -> None:
    """The server: one call, from its beginning to its end."""
    inner = scenario.app(run.log)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        run.calls.append(current_call())
        await inner(scope, receive, send)

    middleware = HangupMiddleware(app, observers=[run.outcomes.append], **scenario.options)
    injector.on = True
    try:
        await middleware(run.peer.scope, run.peer.receive, run.peer.send)
    except BaseException as exc:
        run.error = exc
        if not isinstance(exc, Exception):
            raise
    finally:
        injector.on = False
        run.peer.ended = True


async def run_once(scenario: Scenario, *, at: int, resuming: bool, fault: Fault | None, eager: bool = False) -> Run:
    """Run ``scenario`` on the running loop, with ``fault`` at point ``at``."""
    run = Run(scenario.peer(), Log())
    run.peer.run_ = run
    jobs = set(_jobs)
    injector = Injector(run, at, resuming, fault)
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        await _run_on_trio(scenario, run, injector)
        await _settle(lambda: _jobs <= jobs)
        run.left_jobs = len(_jobs - jobs)
        return run
    before = asyncio.all_tasks()
    known = loop.get_task_factory()
    loop.set_task_factory(counting_factory(injector, eager))
    try:
        host = loop.create_task(_call(scenario, run, injector), name="the server")
        injector.cancel = host.cancel
        await asyncio.wait([host])
        run.cancelling = host.cancelling()
    finally:
        loop.set_task_factory(known)
    await _settle(lambda: asyncio.all_tasks() <= before and _jobs <= jobs)
    run.left_tasks = [repr(task) for task in asyncio.all_tasks() - before]
    run.left_jobs = len(_jobs - jobs)
    return run


async def _settle(settled: Callable[[], bool]) -> None:
    """Give what is winding up a few turns of the loop."""
    for _ in range(20):
        if settled():
            break
        await anyio.lowlevel.checkpoint()


async def _run_on_trio(scenario: Scenario, run: Run, injector: Injector) -> None:
    instrument = Instrument(injector, trio.lowlevel.current_task())
    trio.lowlevel.add_instrument(instrument)
    try:
        async with trio.open_nursery() as nursery:
            scope = trio.CancelScope()
            injector.cancel = scope.cancel

            async def server() -> None:
                with scope:
                    await _call(scenario, run, injector)

            nursery.start_soon(server)
    finally:
        trio.lowlevel.remove_instrument(instrument)
