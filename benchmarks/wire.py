"""Requests a second: FastAPI on uvicorn with httptools and uvloop, and wrk (``apt-get install wrk``).

Every competitor has a server process of its own, on one core; wrk has another. They have their turns.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack

from .competitors import load
from .harness import Size, Table, turns
from .server import CHUNK, Server

#: The path, what it answers, how many connections ask for it, and for how many seconds at least.
CASES = {
    "hello": ("/", b'{"message":"hello, world"}', 32, 1),
    "stream of 100 chunks": ("/stream/100", CHUNK * 100, 32, 1),
    "stream of 10,000 chunks": ("/stream/10000", CHUNK * 10_000, 1, 3),
}


def run(names: Sequence[str], size: Size) -> list[Table]:
    wrk = shutil.which("wrk")
    if wrk is None:
        raise SystemExit("wire needs wrk: apt-get install wrk")
    names = ["bare", "bare 2.4", *(name for name in names if name != "bare")]
    rate = Table("On the wire", "requests/s")
    share = Table("On the wire, against bare", "% of bare", note="Each round against bare in the same round.")
    cpu = Table("On the wire, CPU time of the server", "µs a request")
    newer = Table(
        "On the wire, CPU time against bare at 2.4", "x", note="Each round against bare 2.4 in the same round."
    )
    tables = (rate, share, cpu, newer)
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        servers = {name: stack.enter_context(Server(name, core=cores[0])) for name in load(names)}
        for case, (path, expected, connections, least) in CASES.items():
            seconds = max(least, round(size.load_seconds))  # wrk counts in whole ones
            able = []
            for name, server in servers.items():
                reason = fitness(server, path, expected)
                if reason is None:
                    able.append(name)
                else:
                    for table in tables:
                        table.put(name, case, reason)
            samples: dict[str, list[float]] = {name: [] for name in able}
            used: dict[str, list[float]] = {name: [] for name in able}
            for name in able:
                _load(wrk, servers[name], path, connections, least, cores[-1])
            for name in turns(f"wire: {case}", able, size.long_rounds):
                per_second, microseconds = _load(wrk, servers[name], path, connections, seconds, cores[-1])
                samples[name].append(per_second)
                used[name].append(microseconds)
            for name, rates in samples.items():
                rate.put(name, case, rates)
                cpu.put(name, case, used[name])
                newer.put(name, case, [a / b for a, b in zip(used[name], used["bare 2.4"], strict=True)])
                share.put(name, case, [100 * a / b for a, b in zip(rates, samples["bare"], strict=True)])
    for table in tables:
        table.rows = {name: table.rows[name] for name in names}
    return list(tables)


def fitness(server: Server, path: str, expected: bytes) -> str | None:
    """Why it cannot do this, if it cannot."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=5) as response:
            body = response.read()
    except urllib.error.HTTPError as exc:
        return "does not cover streams" if exc.code == 404 else f"answers {exc.code}"
    return None if body == expected else "wrong response"


def _load(wrk: str, server: Server, path: str, connections: int, seconds: int, core: int) -> tuple[float, float]:
    """Requests a second, and the microseconds of CPU that each took the server."""
    url = f"http://127.0.0.1:{server.port}{path}"
    command = [wrk, "-t1", f"-c{connections}", f"-d{seconds}s", url]
    before = server.ask("report")["cpu"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, preexec_fn=lambda: os.sched_setaffinity(0, {core})
    )
    count, per_second = counts_of(done.stdout)
    return per_second, (server.ask("report")["cpu"] - before) / count * 1e6


def counts_of(printed: str) -> tuple[int, float]:
    """The requests, and those a second, in what wrk printed.

    :raises RuntimeError: if one of them went wrong.
    """
    found = re.search(r"(\d+) requests in .*Requests/sec:\s+([\d.]+)", printed, re.DOTALL)
    if found is None or found[1] == "0" or "Non-2xx" in printed or "Socket errors" in printed:
        raise RuntimeError(printed)
    return int(found[1]), float(found[2])
