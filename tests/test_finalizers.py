"""Rule 14: in a task of their own, last registered first, bounded, exactly once, whatever happens."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import math
import subprocess
import sys
import threading
import warnings
from collections.abc import AsyncIterator, Iterator
from typing import Any
from unittest.mock import AsyncMock, Mock

import anyio
import pytest
from starlette.types import Receive, Scope, Send

from hangup import Outcome, State, add_finalizer, before_success, current_call, step
from hangup.testing import Peer

from .helpers import Watch, answer, until, watched

pytestmark = pytest.mark.anyio


async def run(app: Any, *, leave: bool = False, **options: Any) -> Outcome:
    peer = Peer()
    watch = Watch(app, **options)
    async with peer.calling(watch):
        if leave:
            await watched(peer)
            peer.hang_up()
    return watch.outcome


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]


@pytest.mark.parametrize("how", ["completed", "failed", "canceled"])
async def test_every_kind_runs_once_last_registered_first(how: str) -> None:
    ran: list[Any] = []
    loop_thread = threading.get_ident()

    class Callable:
        def __call__(self, outcome: Outcome) -> None:
            ran.append(("object", outcome.state))

        async def method(self, outcome: Outcome) -> None:
            ran.append(("method", outcome.state))

    async def coroutine() -> None:
        await anyio.sleep(0)
        ran.append("coroutine")

    def plain(outcome: Outcome, more: int = 1) -> None:
        assert threading.get_ident() != loop_thread
        ran.append(("plain", outcome.state))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        call = current_call()

        @add_finalizer
        async def decorated() -> None:
            ran.append("decorated")

        assert add_finalizer(coroutine) is coroutine
        call.add_finalizer(plain)
        call.add_finalizer(Callable())
        call.add_finalizer(Callable().method)
        call.add_finalizer(functools.partial(ran.append, "partial"))
        call.add_finalizer(lambda: coroutine())
        if how == "failed":
            raise ValueError
        if how == "canceled":
            await anyio.sleep(60)
        await answer(send)

    outcome = await run(app, leave=how == "canceled")
    state = State(how)
    assert outcome.state is state
    assert ran == [
        "coroutine",
        "partial",
        ("method", state),
        ("object", state),
        ("plain", state),
        "coroutine",
        "decorated",
    ]
    assert [f.state for f in outcome.finalizers] == [State.COMPLETED] * 7
    assert [f.name for f in outcome.finalizers] == [
        "<lambda>",
        "list.append",
        "Callable.method",
        "Callable",
        "plain",
        "coroutine",
        "decorated",
    ]


async def test_one_that_raises_is_logged_and_masks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    ran: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        add_finalizer(lambda: ran.append("first"))

        @add_finalizer
        async def bad() -> None:
            raise ValueError("boom")

        add_finalizer(lambda: ran.append("last"))
        await answer(send)

    outcome = await run(app)
    assert ran == ["last", "first"]
    assert outcome.state is State.COMPLETED
    assert [f.state for f in outcome.finalizers] == [State.COMPLETED, State.FAILED, State.COMPLETED]
    assert isinstance(outcome.finalizers[1].error, ValueError)
    assert errors(caplog) == ["finalizer bad of GET '/' failed"]
    assert "boom" in caplog.text


async def test_one_that_hangs_is_cut_off_and_gets_to_clean_up(caplog: pytest.LogCaptureFixture) -> None:
    ran: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        add_finalizer(lambda: ran.append("first"))

        async def hang() -> None:
            try:
                await anyio.sleep(60)
            finally:
                ran.append("cut")

        add_finalizer(hang, timeout=0.02)
        await answer(send)

    outcome = await run(app)
    assert ran == ["cut", "first"]
    assert [f.state for f in outcome.finalizers] == [State.TIMED_OUT, State.COMPLETED]
    assert errors(caplog) == ["finalizer hang of GET '/' was cut off after 0.02 s"]


async def test_one_that_will_not_stop_is_left_behind(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hangup._bounded.CUT_GRACE", 0.02)
    ran: list[str] = []
    release = anyio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        add_finalizer(lambda: ran.append("first"))

        async def deaf() -> None:
            with anyio.CancelScope(shield=True):
                await release.wait()
            ran.append("deaf")

        add_finalizer(deaf, timeout=0.02)
        await answer(send)

    outcome = await run(app)
    assert ran == ["first"]
    assert [f.state for f in outcome.finalizers] == [State.TIMED_OUT, State.COMPLETED]
    assert [e.endswith("and goes on regardless; it is left behind") for e in errors(caplog)] == [True]
    release.set()
    await until(lambda: "deaf" in ran)


async def test_a_thread_that_hangs_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        def block() -> None:
            release.wait(5)

        add_finalizer(block, timeout=0.02)
        await answer(send)

    outcome = await run(app)
    release.set()
    assert [f.state for f in outcome.finalizers] == [State.TIMED_OUT]
    assert len(errors(caplog)) == 1


async def test_all_share_one_budget(caplog: pytest.LogCaptureFixture) -> None:
    ran: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def slow() -> None:
            ran.append(1)
            await anyio.sleep(60)

        for _ in range(4):
            add_finalizer(slow)
        await answer(send)

    with anyio.fail_after(10):
        outcome = await run(app, finalizer_timeout=0.5, finalizer_budget=0.8)  # 0.5, 0.3 and twice 0.05
    assert len(ran) == 4, "each is tried, the budget spent or not"
    assert [f.state for f in outcome.finalizers] == [State.TIMED_OUT] * 4
    assert sum(f.duration for f in outcome.finalizers) < 1.9  # four times 0.5 it would be else


async def test_one_may_register_another() -> None:
    ran: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        @add_finalizer
        async def outer() -> None:
            ran.append("outer")
            add_finalizer(lambda: ran.append("inner"))

        await answer(send)

    outcome = await run(app)
    assert ran == ["outer", "inner"]
    assert len(outcome.finalizers) == 2


async def test_one_registered_after_the_end_runs_at_once() -> None:
    ran: list[Any] = []
    calls = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        calls.append(current_call())
        await answer(send)

    await run(app)
    calls[0].add_finalizer(lambda outcome: ran.append(outcome.state))
    await until(lambda: ran)
    thread = threading.Thread(target=lambda: calls[0].add_finalizer(lambda: ran.append("from a thread")))
    thread.start()
    await until(lambda: len(ran) == 2)
    thread.join()
    assert ran == [State.COMPLETED, "from a thread"]


async def test_they_run_in_the_context_they_were_registered_in() -> None:
    from contextvars import ContextVar

    var: ContextVar[str] = ContextVar("var")
    seen: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        var.set("the handler's")
        call = current_call()

        @add_finalizer
        async def look() -> None:
            seen.append((var.get(), current_call() is call))

        var.set("later")
        await answer(send)

    await run(app)
    assert seen == [("the handler's", True)]


@pytest.mark.parametrize("bad", [None, 1, "close", lambda call, outcome: None, functools.partial(lambda a, b: a)])
async def test_what_is_not_callable_is_refused(bad: Any) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with pytest.raises(TypeError, match="add_finalizer"):
            add_finalizer(bad)
        await answer(send)

    assert (await run(app)).state is State.COMPLETED


@pytest.mark.parametrize(
    ("bad", "error"),
    [(0, ValueError), (-1, ValueError), (math.nan, ValueError), ("3", TypeError), (True, TypeError), ([], TypeError)],
)
async def test_a_timeout_that_is_none_is_refused(bad: Any, error: type[Exception]) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with pytest.raises(error, match=r"add_finalizer\(timeout=\) takes"):
            add_finalizer(print, timeout=bad)
        await answer(send)

    outcome = await run(app)
    assert (outcome.state, outcome.finalizers) == (State.COMPLETED, ())


async def test_a_decorated_one_gets_the_outcome_if_what_is_decorated_requires_it() -> None:
    got: list[tuple[str, State]] = []

    def decorated(fn: Any) -> Any:
        @functools.wraps(fn)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return fn(*args, **kwargs)

        return wrapper

    def given(fn: Any) -> Any:
        @functools.wraps(fn)
        async def wrapper(*args: Any) -> Any:
            await fn("given", *args)

        return wrapper

    class Connection:
        @decorated
        async def close(self, outcome: Outcome) -> None:
            got.append(("method", outcome.state))

        @decorated
        def quit(self, code: int = 0) -> None:
            got.append(("method without", State.COMPLETED))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        @add_finalizer
        @step("close")
        async def close(outcome: Outcome) -> None:
            got.append(("step", outcome.state))

        @add_finalizer
        @given
        async def report(how: str, outcome: Outcome) -> None:
            got.append((how, outcome.state))

        add_finalizer(Connection().close)
        add_finalizer(Connection().quit)
        await answer(send)

    outcome = await run(app)
    assert got == [(kind, State.COMPLETED) for kind in ("method without", "method", "given", "step")]
    assert [f.name for f in outcome.finalizers] == ["Connection.quit", "Connection.close", "report", "close"]


async def test_mocks_are_functions_like_any() -> None:
    plain, coroutine, hook = Mock(), AsyncMock(), AsyncMock()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        add_finalizer(plain)
        add_finalizer(coroutine)
        before_success(hook)
        await answer(send)

    outcome = await run(app)
    plain.assert_called_once_with()
    coroutine.assert_awaited_once_with()
    hook.assert_awaited_once_with()
    assert [f.name for f in outcome.finalizers] == ["AsyncMock", "Mock"]


async def test_a_generator_function_of_which_nothing_would_run_has_failed(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        @add_finalizer
        async def close_later() -> AsyncIterator[None]:
            yield

        @add_finalizer
        def close() -> Iterator[None]:
            yield

        add_finalizer(lambda: (number for number in [1]))
        await answer(send)

    outcome = await run(app)
    assert [f.state for f in outcome.finalizers] == [State.FAILED] * 3
    raised = [f.error for f in outcome.finalizers]
    assert all("of which nothing has run: is there a yield in it?" in str(error) for error in raised)
    assert len(errors(caplog)) == 3


class OddError(BaseException):
    pass


@pytest.mark.parametrize(
    "error", [OddError(), asyncio.CancelledError(), GeneratorExit(), BaseExceptionGroup("odd", [OddError()])]
)
@pytest.mark.parametrize("plain", [False, True])
async def test_one_that_raises_what_is_no_exception_masks_nothing_either(
    plain: bool, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """trio would stop for it, and asyncio log it a second time."""
    ran: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        add_finalizer(lambda: ran.append("first"))

        def bad() -> None:
            raise error

        async def bad_coroutine() -> None:
            raise error

        add_finalizer(bad if plain else bad_coroutine)
        await answer(send)

    outcome = await run(app)
    assert ran == ["first"]
    assert [f.state for f in outcome.finalizers] == [State.FAILED, State.COMPLETED]
    assert outcome.finalizers[0].error is error
    gc.collect()
    await anyio.sleep(0)
    assert len(errors(caplog)) == 1


async def test_one_inside_a_shield_when_its_time_is_over_is_interrupted_after_it() -> None:
    ran: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        @functools.partial(add_finalizer, timeout=0.02)
        async def commit_and_idle() -> None:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.05)
                ran.append("committed")
            try:
                await anyio.sleep(60)
            finally:
                ran.append("interrupted")

        await answer(send)

    outcome = await run(app)
    assert ran == ["committed", "interrupted"]
    assert [f.state for f in outcome.finalizers] == [State.TIMED_OUT]


async def test_one_that_was_left_behind_in_a_shield_is_interrupted_when_it_comes_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hangup._bounded.CUT_GRACE", 0.02)
    ran: list[str] = []
    release = anyio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        @functools.partial(add_finalizer, timeout=0.02)
        async def idle() -> None:
            with anyio.CancelScope(shield=True):
                await release.wait()
            try:
                await anyio.sleep(60)
            finally:
                ran.append("interrupted")

        await answer(send)

    await run(app)
    assert ran == []
    release.set()
    await until(lambda: ran)


@pytest.mark.parametrize("timeout", [20, math.inf])
async def test_one_with_a_timeout_beyond_the_budget_keeps_to_the_budget(timeout: float) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        add_finalizer(functools.partial(anyio.sleep, 60), timeout=timeout)
        await answer(send)

    with anyio.fail_after(1.5):
        outcome = await run(app, finalizer_budget=0.05)
    assert [f.state for f in outcome.finalizers] == [State.TIMED_OUT]


async def test_one_that_takes_back_the_next_and_registers_another_stays_on_record() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        call = current_call()

        async def taken_back() -> None: ...

        async def another() -> None: ...

        call.add_finalizer(taken_back)

        @call.add_finalizer
        async def first() -> None:
            assert call.drop_finalizer(taken_back)
            call.add_finalizer(another)

        await answer(send)

    outcome = await run(app)
    assert [f.name for f in outcome.finalizers] == ["first", "another"]


async def test_one_that_begins_while_another_thread_takes_it_back_was_not_taken_back() -> None:
    from hangup._finalizers import Finalizer, Finalizers

    finalizers = Finalizers()

    class Begins:
        def __call__(self) -> None: ...

        def __eq__(self, other: object) -> bool:
            finalizers._pending.clear()
            return True

        __hash__ = object.__hash__

    finalizers.add(Finalizer(Begins(), name=None, timeout=None))
    assert not finalizers.drop(print)


@pytest.mark.parametrize("cancels", [1, 5])
async def test_the_servers_own_cancellation_does_not_reach_them_and_is_given_back(on_trio: bool, cancels: int) -> None:
    """gunicorn cancels after 3 s, daphne after 10 and again each second, uvicorn at the end of its patience."""
    if on_trio:
        return
    ran: list[str] = []
    entered = anyio.Event()
    go_on = anyio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        @add_finalizer
        async def slow() -> None:
            entered.set()
            await go_on.wait()
            ran.append("slow")

        await anyio.sleep(60)

    peer = Peer()
    watch = Watch(app)
    task = asyncio.ensure_future(watch(peer.scope, peer.receive, peer.send))
    await watched(peer)
    peer.hang_up()
    await entered.wait()
    for _ in range(cancels):
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ran == ["slow"]
    assert watch.outcome.state is State.CANCELED
    assert str(watch.outcome.cause) == "client_disconnect"


async def test_an_outer_scope_that_is_cancelled_does_not_reach_them() -> None:
    ran: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        @add_finalizer
        async def slow() -> None:
            await anyio.sleep(0.02)
            ran.append("slow")

        outer.cancel()
        await anyio.sleep(60)

    watch = Watch(app)
    peer = Peer()
    with anyio.CancelScope() as outer:
        await watch(peer.scope, peer.receive, peer.send)
    assert ran == ["slow"]
    assert outer.cancelled_caught
    assert watch.outcome.state is State.CANCELED


async def test_a_call_dropped_with_finalizers_pending_warns() -> None:
    from hangup._finalizers import Finalizer, Finalizers

    finalizers = Finalizers()
    finalizers.add(Finalizer(print, name=None, timeout=None))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del finalizers
        gc.collect()
    assert [str(w.message) for w in caught if w.category is ResourceWarning] == [
        "a call was dropped with finalizers pending: print"
    ]


async def test_a_finalizer_that_is_taken_back_does_not_run() -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        call = current_call()
        first = call.add_finalizer(lambda: log.append("first"))
        call.add_finalizer(lambda: log.append("second"))
        assert call.drop_finalizer(first)
        assert not call.drop_finalizer(first)
        await answer(send)

    await Peer().run(Watch(app))
    assert log == ["second"]


ENDS_THE_PROCESS = """
import asyncio, sys
from hangup import HangupMiddleware, add_finalizer
from hangup.testing import Peer

async def app(scope, receive, send):
    @add_finalizer
    async def second():
        print("second")

    @add_finalizer
    async def first():
        print("first")
        raise {error}

    await send({{"type": "http.response.start", "status": 200}})
    await send({{"type": "http.response.body"}})

try:
    asyncio.run(Peer().run(HangupMiddleware(app)))
except {error}:
    print("the end")
"""


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "SystemExit"])
def test_one_that_ends_the_process_does_not_keep_the_others_from_running(error: str) -> None:
    # In a process of its own: CPython 3.11 loses count of its recursion when a task raises one of these.
    code = ENDS_THE_PROCESS.format(error=error)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert ended.stdout.split("\n") == ["first", "second", "the end", ""]


async def test_a_finalizer_that_cleans_up_after_a_timeout_of_its_own_is_cut_off_as_well(on_trio: bool) -> None:
    if on_trio:
        return
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        @add_finalizer
        async def finalize() -> None:
            try:
                async with asyncio.timeout(0):
                    try:
                        await anyio.sleep(60)
                    finally:
                        log.append("timeout")
                        await anyio.sleep(60)
            except asyncio.CancelledError:
                log.append("cut off")
                raise

        await answer(send)

    peer = Peer()
    watch = Watch(app, finalizer_timeout=0.3)
    await peer.run(watch)
    assert log == ["timeout", "cut off"]
    assert [record.state for record in watch.outcome.finalizers] == [State.TIMED_OUT]
