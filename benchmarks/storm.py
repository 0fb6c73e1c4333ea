"""A storm: thousands of streams, and every client closes, one after the other, as fast as one process can.

The server is a new one each time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from .competitors import load
from .harness import Size, Table, exponent, turns
from .server import Server, open_stream, raise_limit


def run(names: Sequence[str], size: Size) -> list[Table]:
    raise_limit(max(size.storms) + 500)
    names = ["raw", *(name for name, this in load(names).items() if this.guard_stream is not None)]
    largest = max(size.storms)
    over = Table(
        "A storm: from the first `close()` until the last of them is over",
        "ms",
        note="raw: the last `connection_lost`. hangup: the end of the last finalizer. Others: the last CancelledError.",
    )
    stall = Table("A storm: the longest gap of a 1 ms ticker", "ms")
    cpu = Table("A storm: CPU time of the server", "ms")
    kept = Table(f"A storm of {largest:,}: cleanups that were completed", "streams")
    growth = Table("How the time of a storm grows", "k of n^k", note="1 is linear.")
    last: dict[str, dict[int, float]] = {}
    for count in size.storms:
        column = f"{count:,} streams"
        times: dict[str, list[tuple[float, float, float]]] = {}
        cleaned: dict[str, list[float]] = {}
        for name in turns(f"storm of {count:,}", names, size.storm_rounds):
            end, gap, used, done = _storm(name, count, size)
            times.setdefault(name, []).append((end, gap, used))
            cleaned.setdefault(name, []).append(done)
        for name in names:
            for table, samples in zip((over, stall, cpu), zip(*times[name], strict=True), strict=True):
                table.put(name, column, samples)
            last.setdefault(name, {})[count] = over.rows[name][column]["median"]
            if count == largest and name != "raw":
                kept.put(name, "`finally: await`, or finalizer", cleaned[name])
    for name, points in last.items():
        k = exponent(points)
        if k is not None:
            growth.put(name, f"from {min(points):,} to {max(points):,}", [k])
    return [over, stall, cpu, kept, growth]


def _storm(name: str, count: int, size: Size) -> tuple[float, float, float, float]:
    """Milliseconds until all is over, of the longest gap, of CPU; and how many cleanups were completed."""
    final = {"raw": "token", "hangup": "finalizer"}.get(name, "canceled")
    with Server(name, loop=size.loop) as server:
        clients = [open_stream(server.port, "watched", stream) for stream in range(count)]
        time.sleep(size.settle)
        server.ask("reset")
        began = time.monotonic_ns()
        for client in clients:
            client.close()
        server.wait_for(final, count)
        time.sleep(size.settle)
        report = server.ask("report")
        stamps = report["stamps"].get(final, {})
        if len(stamps) != count:
            raise RuntimeError(f"{name}: {len(stamps)} of {count} streams noticed")
        end = (max(stamps.values()) - began) / 1e6
        done = max(len(report["stamps"].get(kind, {})) for kind in ("finally", "finalizer"))
        return end, report["longest_gap"] * 1e3, report["cpu"] * 1e3, done
