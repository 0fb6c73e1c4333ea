"""Every statement fails in every way it can, and what clients were told still agrees with the rows.

A few runs each by default. The full count: ``HANGUP_JOURNAL_RUNS=1000 pytest tests/journal/test_faults.py``.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from typing import Any

import anyio
import pytest
from starlette.types import Receive, Scope, Send

from hangup import HangupMiddleware, current_call
from hangup.journal import CancelStatus, Journal
from hangup.testing import Peer

from ..helpers import answer
from .faults import KINDS, Every, Once, faults
from .helpers import count_rewrites, rewrites

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(1200)]

RUNS = int(os.environ.get("HANGUP_JOURNAL_RUNS", "6"))

#: Runs at a time.
WIDTH = 6

LEASE = 2.0


#: Seconds after which a statement is given up. On SQLite one that hangs holds up all others.
PATIENCE = 0.1

#: Seconds for all the tries of a run: more than a fault takes, so that every one of them is repaired.
BUDGET = 60.0


def quick_journal(url: str) -> Journal:
    """One that soon gives a statement up, and does not soon give a run up."""
    return Journal(url, lease=LEASE, renew_every=0.3, timeout=PATIENCE, open_timeout=BUDGET, close_timeout=BUDGET)


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    run = await current_call().open_run("faulty", id=scope["path"][1:])
    behaviour = scope["query_string"].decode()
    if behaviour == "checkpoints":
        await run.checkpoint({"half": True})
    if behaviour == "fails":
        raise RuntimeError("the work failed")
    if behaviour in {"waits", "leaves"}:
        await anyio.sleep(60)
    if behaviour == "works":
        await anyio.sleep(0.5)
    run.result = {"done": True}
    await answer(send, body=b"done")


async def rows(journal: Journal) -> dict[str, Any]:
    found: dict[str, Any] = {}
    after = None
    while True:
        page = await journal.list(limit=1000, after=after)
        found |= {run.id: run for run in page.runs}
        after = page.next
        if after is None:
            return found


async def all_terminal(journal: Journal) -> dict[str, Any]:
    """The rows, once none is running: at the latest when leases have expired and been swept."""
    with anyio.fail_after(LEASE + 10):
        while (await journal.list(state="running", limit=1)).runs:
            await asyncio.sleep(0.05)
    return await rows(journal)


def disagrees(status: int | None, complete: bool, row: Any) -> bool:
    """Whether what the client was told and what the row says cannot both be true."""
    told_success = status is not None and status < 400 and complete
    return told_success != (row is not None and row.state == "completed")


async def run_all(
    journal: Journal, behaviour: str, *, cancel: bool = False, count: int = RUNS
) -> tuple[dict[str, Peer], dict[str, Any]]:
    app = HangupMiddleware(application, journal=journal, finalizer_timeout=BUDGET, finalizer_budget=BUDGET)
    peers: dict[str, Peer] = {}
    replies: dict[str, Any] = {}
    numbers = iter(range(count))

    async def stop(peer: Peer, id: str) -> None:
        with anyio.fail_after(BUDGET):
            while id not in journal.live or not journal.live[id].opened:
                if peer.ended:
                    return
                await asyncio.sleep(0.005)
        if behaviour == "leaves":
            peer.hang_up()
        else:
            replies[id] = await journal.cancel(id, "the test says so", timeout=5)

    async def one_after_the_other() -> None:
        for number in numbers:
            id = f"run-{number}"
            peer = peers[id] = Peer(path=f"/{id}", query=behaviour)
            async with anyio.create_task_group() as call:  # `Peer.calling` waits ten seconds and no longer
                call.start_soon(peer.run, app)
                if cancel or behaviour == "leaves":
                    await stop(peer, id)

    async with anyio.create_task_group() as tasks:
        for _ in range(WIDTH):
            tasks.start_soon(one_after_the_other)
    return peers, replies


async def judge(journal: Journal, peers: dict[str, Peer]) -> Counter[tuple[int | None, str | None]]:
    async with Journal(str(journal.database.url)) as patient:
        return await judge_with(patient, peers)


async def judge_with(journal: Journal, peers: dict[str, Peer]) -> Counter[tuple[int | None, str | None]]:
    found = await all_terminal(journal)
    wrong = [
        (id, peer.status, found.get(id))
        for id, peer in peers.items()
        if disagrees(peer.status, peer.complete, found.get(id))
    ]
    assert wrong == []
    assert await rewrites(journal) == 0
    return Counter((peer.status, found[id].state if id in found else None) for id, peer in peers.items())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["open", "close"])
async def test_a_fault_at_opening_or_closing_is_repaired(url: str, name: str, kind: str) -> None:
    async with quick_journal(url) as journal:
        await count_rewrites(journal)
        once = Once(name, kind)
        with faults(once):
            peers, _ = await run_all(journal, "")
        tally = await judge(journal, peers)
    assert once.count == RUNS
    assert tally == {(200, "completed"): RUNS}


@pytest.mark.parametrize("behaviour", ["fails", "leaves"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_fault_at_closing_what_did_not_succeed_is_repaired(url: str, behaviour: str, kind: str) -> None:
    async with quick_journal(url) as journal:
        await count_rewrites(journal)
        once = Once("close", kind)
        with faults(once):
            peers, _ = await run_all(journal, behaviour)
        tally = await judge(journal, peers)
    assert once.count == RUNS
    assert tally == {(None, "failed" if behaviour == "fails" else "canceled"): RUNS}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_fault_at_renewing_costs_no_run(url: str, kind: str) -> None:
    async with quick_journal(url) as journal:
        await count_rewrites(journal)
        every = Every("renew", kind, 2)
        with faults(every):
            peers, _ = await run_all(journal, "works")
            await journal.keeper.tick()
        tally = await judge(journal, peers)
    assert every.count
    assert tally == {(200, "completed"): RUNS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["cancel", "seen", "look up"])
async def test_a_fault_at_canceling_is_repaired(url: str, name: str, kind: str) -> None:
    async with quick_journal(url) as journal:
        await count_rewrites(journal)
        once = Once(name, kind)
        with faults(once):
            peers, replies = await run_all(journal, "waits", cancel=True)
        tally = await judge(journal, peers)
    assert once.count == RUNS
    assert tally == {(499, "canceled"): RUNS}
    assert Counter(reply.status for reply in replies.values()) == {CancelStatus.DELIVERED: RUNS}


async def test_faults_everywhere_at_random_leave_no_lie(url: str) -> None:
    """Any statement, any fault, several in a row."""
    dice = random.Random(7)
    kinds = ("raises", "raises", "lost", "lost", "hangs", "late")

    def choose(name: str, values: Any) -> str | None:
        return dice.choice(kinds) if dice.random() < 0.2 else None

    async with quick_journal(url) as journal:
        await count_rewrites(journal)
        with faults(choose):
            peers, _ = await run_all(journal, "checkpoints", count=3 * RUNS)
        tally = await judge(journal, peers)
    assert tally == {(200, "completed"): 3 * RUNS}


async def test_without_the_time_to_repair_them_faults_are_answered_503_and_leave_no_lie(url: str) -> None:
    """Of each run one statement is refused, again and again until its time is over."""
    dice = random.Random(7)
    fates: dict[str, str] = {}

    def choose(name: str, values: Any) -> str | None:
        run = values.get("id") or values.get("run")
        if run is None:
            return None
        fates.setdefault(run, dice.choice(["open", "close"]))
        return "raises" if name == fates[run] else None

    async with Journal(url, lease=LEASE, renew_every=0.3, timeout=5, open_timeout=0.2, close_timeout=0.2) as journal:
        await count_rewrites(journal)
        with faults(choose):
            peers, _ = await run_all(journal, "")
        tally = await judge(journal, peers)
    refused = sum(fate == "open" for fate in fates.values())
    assert tally.keys() <= {(503, None), (503, "failed"), (503, "canceled")}  # canceled: the lease took over
    assert tally[503, None] == refused
    assert tally.total() == RUNS
