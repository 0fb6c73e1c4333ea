"""What the journal costs, and how fast a cancel is: ``python benchmarks/journal.py cost|renew|cancel|rows [URL]``.

Without a URL it runs on SQLite, in a temporary directory.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import text

from hangup import HangupMiddleware, current_call
from hangup.journal import Journal, _store
from hangup.journal._ids import new_id
from hangup.journal._records import cursor_at
from hangup.testing import Peer

CALLS = 800


async def answer(send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"x"})


async def journaled(scope: Any, receive: Any, send: Any) -> None:
    run = await current_call().open_run("bench")
    run.result = {"ok": True}
    await answer(send)


async def bare(scope: Any, receive: Any, send: Any) -> None:
    await answer(send)


async def cost(url: str) -> None:
    """A journaled call, against the same application without middleware that makes the two commits by hand.

    By hand: the same row, INSERT and UPDATE, each committed, on the same engine, before the answer goes out.
    """
    async with Journal(url) as journal:
        engine = journal.database.engine

        async def by_hand(scope: Any, receive: Any, send: Any) -> None:
            id = new_id()
            opening: dict[str, Any] = {
                "id": id,
                "name": "bench",
                "owner": None,
                "instance": journal.instance,
                "fence": "x",
            }
            opening |= {"trace_id": None, "attributes": None, "seconds": 30.0}
            async with engine.connect() as connection:  # the engine is in autocommit: each statement is a commit
                await connection.execute(_store._OPEN, opening)
            closing: dict[str, Any] = {f"new_{name}": None for name in _store.CLOSING}
            closing |= {"new_state": "completed", "new_phase": "after_response", "new_http_status": 200}
            closing |= {"new_delivered": True, "new_result": {"ok": True}, "run": id, "by": "x"}
            async with engine.connect() as connection:
                await connection.execute(_store._CLOSE, closing)
            await answer(send)

        cases: dict[str, Any] = {
            "two commits by hand": by_hand,
            "journaled call": HangupMiddleware(journaled, journal=journal),
            "no commits": bare,
            "no commits, hangup": HangupMiddleware(bare),
        }
        found: dict[str, list[float]] = {name: [] for name in cases}
        for app in cases.values():
            for _ in range(50):
                await Peer().run(app)
        # One of each in turn, in any order: what else the machine does meets all alike.
        order = list(cases)
        for _ in range(CALLS):
            random.shuffle(order)
            for name in order:
                peer = Peer()
                started = time.perf_counter()
                await peer.run(cases[name])
                found[name].append((time.perf_counter() - started) * 1e6)
                assert peer.status == 200
        for name, times in found.items():
            first, middle, third = statistics.quantiles(times, n=4)
            print(f"{name:20} median {middle:5.0f} µs, quartiles {first:.0f} and {third:.0f} ({CALLS} calls)")
        median = {name: statistics.median(times) for name, times in found.items()}
        over = median["journaled call"] / median["two commits by hand"] - 1
        print(f"a journaled call costs {over:+.1%} over the two commits it needs, hangup itself included")


async def renew(url: str) -> None:
    """10,000 leases in one statement, among a hundred thousand rows that have ended."""
    async with Journal(url, timeout=60) as journal:
        await fill(journal, 1, 100_000, running=0)
        ids = [new_id() for _ in range(10_000)]
        for chunk in range(0, len(ids), 500):
            values: list[dict[str, Any]] = [
                {"id": id, "name": "b", "owner": None, "instance": journal.instance, "fence": "x", "trace_id": None}
                | {"attributes": None, "seconds": 3600.0}
                for id in ids[chunk : chunk + 500]
            ]
            async with journal.database.engine.connect() as connection:
                await connection.exec_driver_sql("BEGIN")
                await connection.execute(_store._OPEN, values)
                await connection.exec_driver_sql("COMMIT")
        times = []
        for _ in range(15):
            started = time.perf_counter()
            assert await journal.store.renew(ids, 3600.0) == len(ids)
            times.append(time.perf_counter() - started)
            await asyncio.sleep(0.2)
        middle, best = statistics.median(times) * 1e3, min(times) * 1e3
        print(f"renewing {len(ids)} leases: median {middle:.0f} ms, best {best:.0f} ms")
        print("ms:", *(f"{t * 1e3:.0f}" for t in times))


CHILD = """
import asyncio, sys, time
from hangup import HangupMiddleware, current_call
from hangup.journal import Journal
from hangup.testing import Peer

async def handler(scope, receive, send):
    run = await current_call().open_run("bench")
    print(run.id, flush=True)
    current_call().token.add_callback(lambda: print(time.monotonic(), flush=True))
    await asyncio.sleep(60)

async def main():
    async with Journal(sys.argv[1]) as journal:
        app = HangupMiddleware(handler, journal=journal)
        while True:
            await Peer().run(app)

asyncio.run(main())
"""


async def cancel(url: str) -> None:
    """From `journal.cancel` here to the token of a run in another process. One clock: CLOCK_MONOTONIC."""
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", CHILD, url, stdout=subprocess.PIPE)
    assert child.stdout is not None
    times, replies = [], []
    async with Journal(url) as journal:
        for _ in range(100):
            id = (await child.stdout.readline()).decode().strip()
            await asyncio.sleep(0.05)
            started = time.monotonic()
            reply = await journal.cancel(id, timeout=10)
            replies.append(time.monotonic() - started)
            assert reply.status == "delivered", reply
            times.append(float(await child.stdout.readline()) - started)
    child.kill()
    await child.wait()
    for what, seconds in (("token fired", times), ("reply", replies)):
        ms = sorted(t * 1e3 for t in seconds)
        print(f"{what}: p50 {ms[49]:.1f} ms, p95 {ms[94]:.1f} ms, max {ms[-1]:.1f} ms (100 cancels)")


FILL = {
    "sqlite": """
        WITH RECURSIVE numbers(n) AS (SELECT :first UNION ALL SELECT n + 1 FROM numbers WHERE n < :last)
        INSERT INTO hangup_runs (id, name, owner, state, cause, opened_at, closed_at, lease_until, instance, fence)
        SELECT printf('run-%08d', n), 'name-' || (n % 20), 'owner-' || (n % 100), {state}, {cause},
               strftime('%Y-%m-%d %H:%M:%f000', '2020-01-01', n || ' seconds'),
               CASE WHEN NOT {running}
                    THEN strftime('%Y-%m-%d %H:%M:%f000', '2020-01-01', (n + 9) || ' seconds') END,
               CASE WHEN {running} THEN '2999-01-01 00:00:00.000000' END, 'instance-' || (n % 3), 'x'
        FROM numbers""",
    "postgresql": """
        INSERT INTO hangup_runs (id, name, owner, state, cause, opened_at, closed_at, lease_until, instance, fence)
        SELECT 'run-' || lpad(n::text, 8, '0'), 'name-' || (n % 20), 'owner-' || (n % 100), {state}, {cause},
               timestamptz '2020-01-01' + n * interval '1 second',
               CASE WHEN NOT {running} THEN timestamptz '2020-01-01' + (n + 9) * interval '1 second' END,
               CASE WHEN {running} THEN timestamptz '2999-01-01' END, 'instance-' || (n % 3), 'x'
        FROM generate_series(CAST(:first AS bigint), CAST(:last AS bigint)) AS n""",
}


async def fill(journal: Journal, first: int, last: int, *, running: int) -> None:
    """Rows number ``first`` to ``last``, a second apart: nine of ten completed, and the newest ``running`` running."""
    here = {"running": f"(n > {last - running})"}
    ended = "CASE n % 40 WHEN 0 THEN 'failed' WHEN 1 THEN 'canceled' WHEN 2 THEN 'timed_out' ELSE 'completed' END"
    here["state"] = f"CASE WHEN {here['running']} THEN 'running' ELSE {ended} END"
    here["cause"] = f"CASE WHEN {here['running']} THEN NULL WHEN n % 40 = 2 THEN 'timeout' END"
    statement = FILL[journal.database.url.get_backend_name()].format(**here)
    async with journal.database.engine.connect() as connection:
        await connection.execute(text(statement), {"first": first, "last": last})
        if not journal.database.is_sqlite:  # what autovacuum does by itself soon after
            await connection.exec_driver_sql("VACUUM ANALYZE hangup_runs")


def questions(journal: Journal, count: int) -> dict[str, Callable[[], Awaitable[Any]]]:
    """What is asked of a table that `fill` gave ``count`` rows. Changes nothing, but for the purge."""
    store = journal.store
    epoch = datetime(2020, 1, 1, tzinfo=UTC)
    middle, end = epoch + timedelta(seconds=count // 2), epoch + timedelta(seconds=count)
    deep = cursor_at(middle, f"run-{count // 2:08d}")
    owner, name = f"owner-{count // 2 % 100}", f"name-{count // 2 % 20}"

    def list_(after: str | None = None, **filters: Any) -> Callable[[], Awaitable[Any]]:
        return lambda: journal.list(limit=50, after=after, **filters)

    ids = [f"run-{n:08d}" for n in range(count - 49, count + 1)]
    return {
        "get": lambda: journal.get(f"run-{count // 2:08d}"),
        "sweep": lambda: store.sweep("nobody"),
        "renew 50": lambda: store.renew(ids, 1e9),
        "look for cancels": lambda: store.wanted("instance-0"),
        "watch": lambda: store.changed(end - timedelta(seconds=30)),
        "list": list_(),
        "list, deep": list_(deep),
        "list running": list_(state="running"),
        "list failed": list_(state="failed"),
        "list failed, deep": list_(deep, state="failed"),
        "list owner": list_(owner=owner),
        "list owner, deep": list_(deep, owner=owner),
        "list name": list_(name=name),
        "list name, deep": list_(deep, name=name),
        "list times": list_(opened_after=middle, opened_before=middle + timedelta(hours=1)),
        "list owner and running": list_(owner=owner, state="running"),
        "list owner and state": list_(owner=owner, state="completed"),
        "list owner and name": list_(owner=owner, name=name),
        "list all filters": list_(deep, owner=owner, name=name, state="completed", opened_after=epoch),
        "purge 100": lambda: store.purge(1.0, 100),
    }


async def rows(url: str) -> None:
    """Everything that is asked of the table: with ten thousand rows, and with a million."""
    found: dict[str, list[float]] = {}
    async with Journal(url, timeout=600, poll_every=3600, renew_every=3600, lease=7200) as journal:
        if (await journal.list(limit=1)).runs:
            sys.exit("the table is not empty: give it a database of its own")
        filled = 0
        for count in (10_000, 1_000_000):
            await fill(journal, filled + 1, count, running=100)
            filled = count
            for name, ask in questions(journal, count).items():
                times = []
                for _ in range(15):
                    started = time.perf_counter()
                    await ask()
                    times.append((time.perf_counter() - started) * 1e3)
                found.setdefault(name, []).append(statistics.median(times))
    print(f"{'median of 15, in ms':24}{'10,000 rows':>14}{'1,000,000 rows':>16}")
    for name, (few, many) in found.items():
        print(f"{name:24}{few:14.2f}{many:16.2f}")


def main() -> None:
    what = {"cost": cost, "renew": renew, "cancel": cancel, "rows": rows}.get("".join(sys.argv[1:2]))
    if what is None:
        sys.exit(__doc__)
    if len(sys.argv) > 2:
        asyncio.run(what(sys.argv[2]))
        return
    with tempfile.TemporaryDirectory() as place:
        asyncio.run(what(f"sqlite:///{place}/runs.db"))


if __name__ == "__main__":
    main()
