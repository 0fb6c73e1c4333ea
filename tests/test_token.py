from __future__ import annotations

import gc
import logging
import threading

import anyio
import anyio.to_thread
import pytest
from anyio.lowlevel import checkpoint

from hangup import Canceled, CancelToken, Cause
from hangup._runtime import clock

pytestmark = pytest.mark.anyio


async def test_a_fresh_token_is_live() -> None:
    token = CancelToken()
    assert not token.canceled
    assert token.cause is None
    assert token.reason is None
    assert not token.finished
    token.raise_if_canceled()
    assert repr(token) == "<CancelToken live>"


async def test_the_first_cause_wins() -> None:
    token = CancelToken()
    assert token.cancel("stop button")
    assert not token.cancel("again")
    assert token._cancel(Cause.TIMEOUT) is False
    assert (token.canceled, token.cause, token.reason) == (True, Cause.REQUESTED, "stop button")
    assert repr(token) == "<CancelToken requested>"


async def test_raise_if_canceled_says_why() -> None:
    token = CancelToken()
    token.cancel("stop button")
    with pytest.raises(Canceled, match=r"^requested: stop button$") as caught:
        token.raise_if_canceled()
    assert caught.value.cause is Cause.REQUESTED
    assert caught.value.reason == "stop button"
    assert str(Canceled(Cause.TIMEOUT)) == "timeout"


async def test_callbacks_run_once_in_order_and_one_that_raises_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    token = CancelToken()
    ran: list[str] = []

    def bad() -> None:
        ran.append("bad")
        raise ValueError("boom")

    token.add_callback(lambda: ran.append("first"))
    token.add_callback(bad)
    token.add_callback(lambda: ran.append("last"))
    assert token.cancel()
    token.cancel()
    assert ran == ["first", "bad", "last"]
    [record] = [r for r in caplog.records if r.name == "hangup"]
    assert record.levelno == logging.ERROR
    assert "boom" in caplog.text


async def test_a_callback_added_after_the_cancel_runs_at_once() -> None:
    token = CancelToken()
    token.cancel()
    ran: list[int] = []
    stop = token.add_callback(lambda: ran.append(1))
    assert ran == [1]
    assert stop() is False


async def test_stop_prevents_a_callback_and_says_so_once() -> None:
    token = CancelToken()
    ran: list[int] = []
    stop = token.add_callback(lambda: ran.append(1))
    assert stop() is True
    assert stop() is False
    token.cancel()
    assert ran == []


async def test_a_callback_must_be_callable() -> None:
    token = CancelToken()
    with pytest.raises(TypeError, match="add_callback"):
        token.add_callback(1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"takes a function without arguments, not .* requires 1"):
        token.add_callback(lambda cause: None)  # type: ignore[arg-type,misc]
    with pytest.raises(TypeError, match=r"not awaited, .* await token\.wait\(\) instead"):
        token.add_callback(token.wait)
    assert not token.canceled


async def test_a_callback_may_cancel_and_register_again() -> None:
    token = CancelToken()
    ran: list[str] = []

    def again() -> None:
        assert not token.cancel("inner")
        token.add_callback(lambda: ran.append("inner"))

    token.add_callback(again)
    token.cancel("outer")
    assert ran == ["inner"]
    assert token.reason == "outer"


async def test_a_finished_token_cannot_be_canceled() -> None:
    token = CancelToken()
    ran: list[int] = []
    token.add_callback(lambda: ran.append(1))
    token._finish()
    assert token.finished
    assert not token.cancel()
    assert not token.canceled
    token.add_callback(lambda: ran.append(2))
    assert ran == []
    assert repr(token) == "<CancelToken finished>"


async def test_wait_ends_with_the_cancel_for_every_waiter() -> None:
    token = CancelToken()
    answers: list[bool] = []

    async def wait() -> None:
        answers.append(await token.wait())

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            token.cancel()
    assert answers == [True, True, True]
    assert await token.wait()


async def test_wait_ends_when_the_call_does() -> None:
    token = CancelToken()
    answers: list[bool] = []

    async def wait() -> None:
        answers.append(await token.wait())

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            token._finish()
    assert answers == [False]
    assert await token.wait() is False


async def test_a_thread_wakes_the_loop() -> None:
    token = CancelToken()
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, lambda: token.cancel())
            assert await token.wait()


async def test_the_loop_wakes_a_thread() -> None:
    token = CancelToken()
    entered = threading.Event()

    def work() -> bool:
        entered.set()
        return token.wait_sync(5)

    answers: list[bool] = []

    async def run() -> None:
        answers.append(await anyio.to_thread.run_sync(work))

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            while not entered.is_set():
                await checkpoint()
            token.cancel()
    assert answers == [True]


def test_wait_sync_gives_up_after_its_timeout() -> None:
    assert CancelToken().wait_sync(0.001) is False


async def test_who_would_block_the_event_loop_for_ever_is_told_so() -> None:
    token = CancelToken()
    with pytest.raises(RuntimeError, match=r"on the event loop, .* there it is `await token\.wait\(\)`"):
        token.wait_sync()
    assert token.wait_sync(0.001) is False
    token.cancel()
    assert token.wait_sync() is True


def test_wait_sync_ends_when_the_call_does() -> None:
    token = CancelToken()
    token._finish()
    assert token.wait_sync(5) is False


async def test_a_waiter_that_gives_up_leaves_nothing_behind() -> None:
    token = CancelToken()
    with anyio.move_on_after(0.001):
        await token.wait()
    assert not token._callbacks


def test_one_of_many_threads_wins() -> None:
    for _ in range(50):
        token = CancelToken()
        start = threading.Barrier(4)
        won: list[int] = []

        def race(n: int, token: CancelToken = token, start: threading.Barrier = start, won: list[int] = won) -> None:
            start.wait()
            if token.cancel(str(n)):
                won.append(n)

        threads = [threading.Thread(target=race, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert token.reason == str(won[0])


def test_after_the_deadline_nothing_remains() -> None:
    token = CancelToken()
    assert token.remaining() is None
    token._deadline = clock() + 60
    assert 0 < (token.remaining() or 0) <= 60
    token._deadline = clock() - 1
    assert token.remaining() == 0.0


def test_a_grandchild_is_canceled_although_nobody_holds_the_token_between() -> None:
    token = CancelToken()
    grandchild = token.child().child()
    gc.collect()
    token.cancel("stop button")
    assert grandchild.canceled
    assert grandchild.reason == "stop button"
