from __future__ import annotations

from collections import Counter

import anyio
import pytest
from anyio.lowlevel import checkpoint

from hangup import HangupMiddleware, Outcome
from hangup._shutdown import AT_ONCE
from hangup._watch import Turnstile
from hangup.testing import Peer

pytestmark = pytest.mark.anyio


async def test_one_passes_without_a_pause() -> None:
    with pytest.raises(StopIteration):
        Turnstile(1).enter().send(None)


async def test_a_crowd_passes_in_its_order_a_few_in_each_turn() -> None:
    turnstile = Turnstile(2)
    turn = 0
    came: list[int] = []
    passed: list[int] = []
    turns: Counter[int] = Counter()

    async def enter(number: int) -> None:
        came.append(number)
        await turnstile.enter()
        passed.append(number)
        turns[turn] += 1

    async with anyio.create_task_group() as tasks:
        for number in range(20):
            tasks.start_soon(enter, number)
        while len(passed) < 20:
            turn += 1
            await checkpoint()
    # trio wakes those who pass in the same turn in any order
    assert all(abs(came.index(number) - place) <= 2 for place, number in enumerate(passed))
    assert max(turns.values()) <= 4


async def test_one_who_gives_up_keeps_nobody_waiting() -> None:
    turnstile = Turnstile(1)
    await turnstile.enter()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await turnstile.enter()
    with anyio.fail_after(5):
        await turnstile.enter()


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
