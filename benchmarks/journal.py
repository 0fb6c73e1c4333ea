"""What the journal costs, and how fast a cancel is: ``python benchmarks/journal.py cost|renew|cancel [URL]``.

Without a URL it runs on SQLite, in a temporary directory.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from hangup import HangupMiddleware, current_call
from hangup.journal import Journal, _store
from hangup.journal._ids import new_id
from hangup.testing import Peer

ROUNDS = 8
CALLS = 100


async def handler(scope: Any, receive: Any, send: Any) -> None:
    run = await current_call().open_run("bench")
    run.result = {"ok": True}
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"x"})


async def bare_handler(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"x"})


async def cost(url: str) -> None:
    """A journaled call, against the same call without a journal and the two statements alone."""
    async with Journal(url) as journal:
        with_journal = HangupMiddleware(handler, journal=journal)
        without = HangupMiddleware(bare_handler)

        async def two_commits() -> None:
            id = new_id()
            values = {"id": id, "name": "bench", "owner": None, "instance": journal.instance, "fence": "x"}
            values |= {"trace_id": None, "attributes": None, "seconds": 30.0}
            closing: dict[str, Any] = {f"new_{name}": None for name in _store.CLOSING}
            closing |= {"new_state": "completed", "new_http_status": 200, "new_delivered": True}
            closing |= {"new_result": {"ok": True}, "run": id, "by": "x"}
            for statement, given in ((_store._OPEN, values), (_store._CLOSE, closing)):
                async with journal.database.engine.connect() as connection:
                    await connection.execute(statement, given)

        async def call(app: Any) -> None:
            await Peer().run(app)

        cases: dict[str, Any] = {
            "two commits": two_commits,
            "journaled call": lambda: call(with_journal),
            "bare call": lambda: call(without),
        }
        found: dict[str, list[float]] = {name: [] for name in cases}
        for run in cases.values():
            for _ in range(20):
                await run()
        # One of each in turn: what else the machine does meets all alike.
        for _ in range(ROUNDS * CALLS):
            for name, run in cases.items():
                started = time.perf_counter()
                await run()
                found[name].append(time.perf_counter() - started)
        medians = {name: statistics.median(times) for name, times in found.items()}
        for name, median in medians.items():
            print(f"{name}: {median * 1e6:.0f} µs (median of {ROUNDS * CALLS})")
        added = medians["journaled call"] - medians["bare call"]
        print(f"the journal adds {added * 1e6:.0f} µs, {added / medians['two commits'] - 1:+.1%} over the two commits")


async def renew(url: str) -> None:
    """10,000 leases in one statement, among a hundred thousand rows that have ended."""
    async with Journal(url) as journal:
        ids = [new_id() for _ in range(10_000)]
        for chunk in range(0, len(ids), 500):
            values = [
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


def main() -> None:
    what = {"cost": cost, "renew": renew, "cancel": cancel}[sys.argv[1]]
    if len(sys.argv) > 2:
        asyncio.run(what(sys.argv[2]))
        return
    with tempfile.TemporaryDirectory() as place:
        asyncio.run(what(f"sqlite:///{place}/runs.db"))


if __name__ == "__main__":
    main()
