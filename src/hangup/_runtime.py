"""The two event loops, and what differs between them. Nothing here knows calls, ASGI or cancellation policy.

anyio offers no background task outside a task group, and a task group around a request would wrap the exceptions of
the application. So background work is a plain task on asyncio and a system task on trio; both are strongly held, both
run in a context of their own. asyncio is recognised by its current task, which a trio host (guest mode included)
never has.
"""

from __future__ import annotations

import asyncio
import functools
import math
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextvars import Context, ContextVar, copy_context
from typing import Any, Protocol

import anyio

#: Seconds, monotonic. One clock for every duration of a record, also off the event loop.
clock = time.perf_counter

#: An `asyncio.Task` or a `trio.lowlevel.Task`. Only this module looks inside.
NativeTask = Any

_jobs: set[Job] = set()


class Timer(Protocol):
    """Something that will happen."""

    def cancel(self) -> object: ...


class Job(Timer, Protocol):
    """A background task."""

    def done(self) -> bool: ...


class _TrioJob:
    __slots__ = ("_ended", "_scope", "ended")

    def __init__(self) -> None:
        self._scope = anyio.CancelScope()
        self._ended = False
        self.ended = anyio.Event()

    async def run(self, fn: Callable[..., Awaitable[object]], args: tuple[object, ...]) -> None:
        try:
            with self._scope:
                await fn(*args)
        finally:
            self._ended = True
            self.ended.set()
            _jobs.discard(self)

    def cancel(self) -> None:
        self._scope.cancel()

    def done(self) -> bool:
        return self._ended


def current_task() -> tuple[NativeTask, bool]:
    """The task that is running, and whether it is asyncio's."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    if task is None:
        return _trio().lowlevel.current_task(), False
    return task, True


def is_running(task: NativeTask) -> bool:
    """Whether ``task``, one of asyncio's, runs now: also while another that it has started eagerly runs within it.

    anyio takes only the current task for running, and would cancel this one in the middle of what it does.
    """
    return bool(getattr(task.get_coro(), "cr_running", False))


def spawn(
    fn: Callable[..., Coroutine[Any, Any, object]],
    *args: object,
    context: Context | None = None,
    name: str,
    eager: bool = False,
) -> Job:
    """Run ``fn(*args)`` in the background, held until it ends, in ``context`` (a copy of the current one by default).

    ``fn`` must not raise: there is nobody to raise to. Its first part runs before this returns if the loop has an eager
    task factory, or if ``eager``, on asyncio and Python 3.12: for what hardly ever suspends, and needs no turn of the
    loop then.
    """
    context = copy_context() if context is None else context  # an empty one is false
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        job = _TrioJob()
        _trio().lowlevel.spawn_system_task(job.run, fn, args, name=name, context=context)
        _jobs.add(job)
        return job
    task = _start_task(loop, fn(*args), name, context, eager)
    if not task.done():
        _jobs.add(task)
        task.add_done_callback(_jobs.discard)
    return task


def _start_task(
    loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, object], name: str, context: Context, eager: bool
) -> asyncio.Future[object]:
    try:
        if eager and sys.version_info >= (3, 12):
            return asyncio.eager_task_factory(loop, coro, name=name, context=context)
        return loop.create_task(coro, name=name, context=context)
    except (KeyboardInterrupt, SystemExit) as exc:
        # They are the loop's, as they would be had the loop run this task, and not of whoever happens to spawn it.
        loop.call_soon(_raise, exc)
        ended: asyncio.Future[object] = loop.create_future()
        ended.set_result(None)
        return ended


def _raise(exc: BaseException) -> None:
    raise exc


def call_later(delay: float, fn: Callable[[], object]) -> Timer:
    """Call ``fn`` on this loop in ``delay`` seconds, in an empty context. Cancel what is returned to prevent it.

    asyncio's timers keep their context until they would have been due, also when they were cancelled.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:

        async def wait() -> None:
            await anyio.sleep(delay)
            fn()

        return spawn(wait, name="hangup: timer", context=Context())
    return loop.call_later(delay, fn, context=Context())


def current_loop() -> object:
    """What identifies the running event loop: the asyncio loop, or trio's token. Can be weakly referenced."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return _trio().lowlevel.current_trio_token()


def loop_runner() -> Callable[[Callable[[], object]], object]:
    """A function that, from any thread, has this loop call something soon. It raises RuntimeError on a closed loop."""
    try:
        return asyncio.get_running_loop().call_soon_threadsafe
    except RuntimeError:
        trio = _trio()
        run_soon = trio.lowlevel.current_trio_token().run_sync_soon

        def run(fn: Callable[[], object]) -> None:
            try:
                run_soon(fn)
            except trio.RunFinishedError as exc:
                raise RuntimeError("the event loop is closed") from exc

        return run


async def endure(job: Job, timeout: float = math.inf) -> bool:
    """Wait for ``job`` to end, whatever is done to the waiting task meanwhile. False if ``timeout`` seconds passed.

    anyio's shield keeps its own cancellations out, but not the `Task.cancel` that servers use: those are swallowed
    here one by one, and the caller compares `Task.cancelling` with before, and raises again.
    """
    if job.done():
        return True
    if isinstance(job, _TrioJob):
        with anyio.CancelScope(shield=True), anyio.move_on_after(timeout):
            await job.ended.wait()
        return job.done()
    assert isinstance(job, asyncio.Task)
    return await _endure_task(job, timeout)


async def _endure_task(task: asyncio.Task[Any], timeout: float) -> bool:
    """What a loop around `asyncio.wait` does, with less to set up: every hook, finalizer and answer comes here."""
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()
    passed = False

    def wake(_: object) -> None:
        if not waiter.done():
            waiter.set_result(None)

    def give_up() -> None:
        nonlocal passed
        passed = True
        wake(None)

    timer = call_later(timeout, give_up) if timeout != math.inf else None
    task.add_done_callback(wake)
    try:
        with scope_class(True)(shield=True):
            while not task.done() and not passed:
                try:
                    await waiter
                except asyncio.CancelledError:
                    waiter = loop.create_future()
    finally:
        task.remove_done_callback(wake)
        if timer is not None:
            timer.cancel()
    return task.done()


@functools.cache
def scope_class(native: bool) -> type[anyio.CancelScope]:
    """The class of cancel scopes: asyncio's if ``native``, else trio's. Called where the one asked for is running.

    On each `CancelScope()` anyio looks its backend up, which costs more than the scope. The class is always the same.
    """
    return type(anyio.CancelScope())


def tasks_with(var: ContextVar[Any], value: object) -> int | None:
    """How many tasks, but for the current one and our own, run in a context where ``var`` is ``value``.

    None where that cannot be told: trio has no tasks outside nurseries, Python 3.11 does not show a task's context.
    """
    try:
        tasks = asyncio.all_tasks()
        current = asyncio.current_task()
    except RuntimeError:
        return None
    if sys.version_info < (3, 12):
        return None
    return sum(
        1 for task in tasks if task is not current and task not in _jobs and task.get_context().get(var) is value
    )


def where(task: NativeTask) -> str:
    """Where ``task`` is suspended, innermost frame first: ``file:line in function``. For a log line."""
    frames = [(frame, line) for frame, line in _frames(task) if not _is_plumbing(frame)][-3:]
    return ", called from ".join(
        f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}" for frame, line in reversed(frames)
    )


def _is_plumbing(frame: Any) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] in {"asyncio", "anyio", "trio", "hangup"}


def _frames(task: NativeTask) -> Iterator[tuple[Any, int]]:
    if not isinstance(task, asyncio.Task):
        yield from task.iter_await_frames()
        return
    step: Any = task.get_coro()
    while step is not None:
        frame = getattr(step, "cr_frame", None) or getattr(step, "gi_frame", None) or getattr(step, "ag_frame", None)
        if frame is not None:
            yield frame, frame.f_lineno
        step = getattr(step, "cr_await", None) or getattr(step, "gi_yieldfrom", None) or getattr(step, "ag_await", None)


def _trio() -> Any:
    trio = sys.modules.get("trio")
    if trio is None:
        raise RuntimeError("hangup needs a running asyncio or trio event loop")
    return trio
