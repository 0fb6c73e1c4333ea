from __future__ import annotations

from collections import Counter
from contextvars import copy_context
from functools import partial

import anyio
import pytest
from anyio.lowlevel import checkpoint
from starlette.types import Message

from hangup import HangupMiddleware, Outcome
from hangup._shutdown import AT_ONCE
from hangup._watch import Reader, Turnstile
from hangup.testing import Peer

pytestmark = pytest.mark.anyio


async def test_one_passes_at_once() -> None:
    passed: list[int] = []
    Turnstile(1).enter(lambda: passed.append(1))
    assert passed == [1]


async def test_a_crowd_passes_in_its_order_a_few_in_each_turn() -> None:
    turnstile = Turnstile(2)
    turn = 0
    passed: list[int] = []
    turns: Counter[int] = Counter()

    def enter(number: int) -> None:
        passed.append(number)
        turns[turn] += 1

    for number in range(20):
        turnstile.enter(partial(enter, number))
    assert passed == [0, 1]
    with anyio.fail_after(5):
        while len(passed) < 20:
            turn += 1
            await checkpoint()
    assert passed == list(range(20))
    assert max(turns.values()) <= 4  # trio may run a timer twice between two looks of ours


async def test_who_enters_while_others_pass_waits_for_the_next_turn() -> None:
    turnstile = Turnstile(1)
    passed: list[str] = []

    def again() -> None:
        passed.append("first")
        turnstile.enter(lambda: passed.append("second"))

    turnstile.enter(again)
    assert passed == ["first"]
    with anyio.fail_after(5):
        while len(passed) < 2:
            await checkpoint()


async def test_every_call_of_a_crowd_hears_that_its_client_left() -> None:
    outcomes: list[Outcome] = []

    async def app(scope: object, receive: object, send: object) -> None:
        await anyio.sleep_forever()

    mounted = HangupMiddleware(app, observers=[outcomes.append])
    peers = [Peer() for _ in range(AT_ONCE * 3)]
    async with anyio.create_task_group() as tasks:
        for peer in peers:
            tasks.start_soon(peer.run, mounted)
        for peer in peers:
            await peer.wait_for(lambda peer=peer: peer.reading)  # type: ignore[misc]
        for peer in peers:
            peer.hang_up()
    assert [outcome.cause for outcome in outcomes] == ["client_disconnect"] * len(peers)


async def test_a_call_that_ends_while_it_waits_for_its_turn_hears_nothing() -> None:
    turnstile = Turnstile(1)
    heard: list[Message] = []
    passed = anyio.Event()

    async def receive() -> Message:
        turnstile.enter(lambda: None)
        turnstile.enter(lambda: reader.close({"type": "http.disconnect"}))
        return {"type": "http.disconnect"}

    reader = Reader(receive, 0, heard.append, lambda: None, copy_context(), turnstile)
    reader.watch()
    await anyio.wait_all_tasks_blocked()
    turnstile.enter(passed.set)
    with anyio.fail_after(5):
        await passed.wait()
    assert heard == []
