"""What a stream weighs while nothing happens in it, up to ten thousand of them."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from socket import socket

from .competitors import load
from .harness import Size, Table, exponent, turns
from .server import Server, open_stream, raise_limit


def run(names: Sequence[str], size: Size) -> list[Table]:
    raise_limit(max(size.idle) + 500)
    names = [name for name, this in load(names).items() if this.guard_stream is not None]
    weight = Table(
        "An idle stream: resident memory of the server",
        "KiB a stream",
        note="bare 2.4: Starlette without its task group, that is, without anybody who listens for the client.",
    )
    growth = Table("How the memory grows", "k of n^k", note="1 is linear.")
    span = f"{min(size.idle):,} to {max(size.idle):,}"
    per_stream: dict[str, list[float]] = {}
    exponents: dict[str, list[float]] = {}
    for name in turns("idle streams", ["bare 2.4", *names], size.idle_rounds):
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
