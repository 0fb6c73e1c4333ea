"""Thousands of streams: all dropped at once, and what they weigh while nothing happens.

A storm: every client closes, one after the other, as fast as one process can. The server is a new one each time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from socket import socket

from .competitors import load
from .harness import Size, Table, exponent, turns
from .server import Server, open_stream, raise_limit


def run(names: Sequence[str], size: Size) -> list[Table]:
    raise_limit()
    able = [name for name, this in load(names).items() if this.guard_stream is not None]
    return [*_storms(able, size), *_idle(able, size)]


def _storms(names: Sequence[str], size: Size) -> list[Table]:
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
        for name in turns(f"storm of {count:,}", ["raw", *names], size.storm_rounds):
            end, gap, used, done = _storm(name, count, size)
            times.setdefault(name, []).append((end, gap, used))
            cleaned.setdefault(name, []).append(done)
        for name in ["raw", *names]:
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


def _idle(names: Sequence[str], size: Size) -> list[Table]:
    weight = Table(
        "An idle stream: resident memory of the server",
        "KiB a stream",
        note="bare 2.4: Starlette without its task group, that is, without anybody who listens for the client.",
    )
    growth = Table("How the memory grows", "k of n^k", note="1 is linear.")
    span = f"{min(size.idle):,} to {max(size.idle):,}"
    per_stream: dict[str, list[float]] = {}
    exponents: dict[str, list[float]] = {}
    for name in turns("idle streams", ["bare 2.4", *names], size.storm_rounds):
        points = _weigh(name, size)
        few, many = min(points), max(points)
        per_stream.setdefault(name, []).append((points[many] - points[few]) / (many - few) / 1024)
        exponents.setdefault(name, []).append(exponent(points) or math.nan)
    for name in [*names, "bare 2.4"]:
        weight.put(name, "a stream", per_stream[name])
        for base in ("bare", "bare 2.4"):
            pairs = zip(per_stream[name], per_stream[base], strict=True)
            weight.put(name, f"over {base}", [mine - theirs for mine, theirs in pairs])
        growth.put(name, span, exponents[name])
    return [weight, growth]


def _weigh(name: str, size: Size) -> dict[int, float]:
    """Bytes over those of the server without streams, by how many there are."""
    found: dict[int, float] = {}
    with Server(name, loop=size.loop) as server:
        for client in [open_stream(server.port, "idle", stream) for stream in range(5)]:
            client.close()  # so that what is loaded and allocated once is
        time.sleep(size.settle)
        empty = server.ask("reset")["memory"]
        clients: list[socket] = []
        for count in sorted(size.idle):
            clients += [open_stream(server.port, "idle", stream) for stream in range(len(clients), count)]
            time.sleep(size.settle)
            found[count] = server.ask("reset")["memory"] - empty
        for client in clients:
            client.close()
    return found
