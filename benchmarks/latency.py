"""How soon a stream learns that its client has left: from ``close()`` in the client to what happens in the server.

On real sockets, uvicorn with httptools. The floor is a raw `asyncio.Protocol` on the same kind of loop: its
``connection_lost`` is the first that anybody can know. Every server has so many streams open while one at a time is
closed, and opened anew. None is closed before it is `AGE` old: hangup does not look for the client in the first 20 ms,
and may need 40 to notice that it left in that time.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from socket import socket

from .competitors import load
from .harness import Size, Table, turns
from .server import Server, open_stream, raise_limit

#: Seconds.
AGE = 0.06

#: Servers without an application to speak of.
FLOORS = ("raw", "receive")

#: The events in a stream, in their order, and what they are called in the table.
EVENTS = {
    "token": "token",
    "canceled": "CancelledError",
    "finally": "`finally: await` done",
    "finalizer": "last finalizer",
}

#: A stream: its number, its client, and since when it is open.
Open = tuple[int, socket, float]


def run(names: Sequence[str], size: Size) -> list[Table]:
    """Bare, and those that look for a client that leaves: the others are as prompt as bare."""
    able = [
        name for name, this in load(names).items() if this.guard_stream is not None and (this.detects or name == "bare")
    ]
    return [_at(count, able, size) for count in size.open_streams]


def _at(count: int, names: Sequence[str], size: Size) -> Table:
    table = Table(
        f"From `close()` in the client, with {count:,} open stream{'s' if count > 1 else ''}",
        "µs",
        note="raw: `connection_lost` of an `asyncio.Protocol`. receive: an application that does nothing but listen.",
    )
    found: dict[str, dict[str, list[float]]] = {}
    closed: Counter[str] = Counter()
    # All at once if that many files may be open; else a few at a time, always beside the floor.
    together = (raise_limit(2 * count + 500) - 500) // count - 1
    others = ["receive", *names]
    for start in range(0, len(others), together):
        _measure(count, ["raw", *others[start : start + together]], size, found, closed)
    for name in ("raw", *others):
        for event, title in EVENTS.items():
            times = found[name][event]
            if len(times) >= closed[name] * 0.99:
                table.put(name, f"{title}, p50", times)
                table.put(name, f"{title}, p99", [percentile(times, 99)])
            elif times or (event == "finally" and name not in FLOORS):
                table.put(name, f"{title}, p50", f"in {len(times)} of {closed[name]}")
    return table


def _measure(
    count: int, names: Sequence[str], size: Size, found: dict[str, dict[str, list[float]]], closed: Counter[str]
) -> None:
    closes = size.closes if count * 0.003 > AGE else max(1, size.closes // 4)  # else there is much to wait for
    with ExitStack() as stack:
        servers = {name: stack.enter_context(Server(name, loop=size.loop)) for name in names}
        ids = itertools.count()
        clients: dict[str, list[Open]] = {name: [] for name in names}
        stack.callback(_close_all, clients)
        for name in turns(f"opening {count:,} streams", names, 1):
            clients[name] += [_open(servers[name], next(ids)) for _ in range(count)]
        for name in turns(f"latency at {count:,}", names, size.long_rounds):
            server, opened = servers[name], clients[name]
            server.ask("reset")
            left: dict[int, int] = {}
            for _ in range(closes):
                stream, client, since = opened.pop(0)
                time.sleep(max(0.002, since + AGE - time.monotonic()))
                left[stream] = time.monotonic_ns()
                client.close()
                opened.append(_open(server, next(ids)))
            closed[name] += len(left)
            server.wait_for("token" if name in FLOORS else "canceled", len(left), timeout=2)
            time.sleep(0.05)
            stamps = server.ask("report")["stamps"]
            for event in EVENTS:
                times = found.setdefault(name, {}).setdefault(event, [])
                times += [(at - left[int(stream)]) / 1e3 for stream, at in stamps.get(event, {}).items()]


def _close_all(clients: dict[str, list[Open]]) -> None:
    for opened in clients.values():
        for _, client, _ in opened:
            client.close()


def _open(server: Server, stream: int) -> Open:
    return stream, open_stream(server.port, "watched", stream), time.monotonic()


def percentile(values: Sequence[float], which: int) -> float:
    return statistics.quantiles([*values, *values], n=100, method="inclusive")[which - 1]  # one value will do
