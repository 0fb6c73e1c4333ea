"""What all benchmarks share: whose turn it is, what is made of the samples, and a server that is played.

Everything is compared within one run. In each round every competitor has its turn, in an order that is shuffled anew,
so what else the machine does meets all alike. What is reported is the median and the quartiles of the rounds.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import math
import multiprocessing
import os
import platform
import random
import statistics
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import rich.progress
from starlette.types import ASGIApp, Message, Scope

T = TypeVar("T")

#: Shuffles the turns. Anything will do; it is fixed so that a run can be repeated.
SEED = 8

PACKAGES = (
    "hangup",
    "anyio",
    "starlette",
    "fastapi",
    "uvicorn",
    "uvloop",
    "httptools",
    "opentelemetry-api",
    "opentelemetry-sdk",
    "opentelemetry-instrumentation-asgi",
    "fastapi-disconnect",
    "aiofence",
    "hother-cancelable",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much is measured. The defaults are what the published figures were made with."""

    rounds: int = 60
    calls: int = 200
    #: Rounds of what takes long: servers that are loaded, thousands of streams.
    long_rounds: int = 5
    #: And of storms and idle streams, which take longest.
    storm_rounds: int = 3
    idle_rounds: int = 2
    #: Seconds that a server is loaded in one turn.
    load_seconds: float = 3.0
    #: How many streams are open while the client hangs up.
    open_streams: tuple[int, ...] = (1, 100, 5000)
    #: How many of them are closed in one turn.
    closes: int = 100
    #: How many streams a storm drops.
    storms: tuple[int, ...] = (100, 1000, 5000)
    #: How many idle streams the memory is looked at with.
    idle: tuple[int, ...] = (100, 1000, 3000, 10_000)
    #: Seconds that a server is given to become quiet.
    settle: float = 0.3
    #: The event loop: uvloop, as uvicorn has it where it is installed, or asyncio.
    loop: str = "uvloop"


#: A first look.
QUICK = Size(rounds=20, calls=100, long_rounds=2, storm_rounds=1, idle_rounds=1, load_seconds=1, closes=60)

#: Enough to see that everything works.
SMOKE = Size(
    rounds=2,
    calls=5,
    long_rounds=1,
    storm_rounds=1,
    idle_rounds=1,
    load_seconds=1,
    open_streams=(1, 3),
    closes=5,
    storms=(5,),
    idle=(20, 40),
    settle=0.05,
)


# ---------------------------------------------------------------------- samples


@dataclass(slots=True)
class Table:
    """Figures of one kind: a row for each competitor, a column for each case."""

    title: str
    unit: str
    #: Row, column: ``{"median", "q1", "q3", "n"}``, or ``{"cannot": why}``.
    rows: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    note: str = ""

    def put(self, row: str, column: str, samples: Sequence[float] | str) -> None:
        """Enter ``samples``; or why there are none."""
        self.rows.setdefault(row, {})[column] = {"cannot": samples} if isinstance(samples, str) else spread(samples)

    def figure(self, row: str, column: str) -> float | None:
        """The median, if there is one."""
        median: float | None = self.rows.get(row, {}).get(column, {}).get("median")
        return median

    def quartiles(self, row: str, column: str) -> tuple[float, float] | None:
        """The quartiles, if there are any."""
        cell = self.rows.get(row, {}).get(column, {})
        return (cell["q1"], cell["q3"]) if "q1" in cell else None

    @property
    def columns(self) -> list[str]:
        """Every column, in the order in which they came up."""
        return list(dict.fromkeys(column for row in self.rows.values() for column in row))


def spread(samples: Sequence[float]) -> dict[str, Any]:
    """The median and the quartiles."""
    q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else [samples[0]] * 3
    return {"median": median, "q1": q1, "q3": q3, "n": len(samples)}


def show(cell: Mapping[str, Any] | None) -> str:
    """A cell as text: the median, and the quartiles behind it."""
    if cell is None:
        return "-"
    if "cannot" in cell:
        return str(cell["cannot"])
    middle, q1, q3 = (number(cell[key]) for key in ("median", "q1", "q3"))
    return f"{middle} [{q1}, {q3}]" if cell["n"] > 1 else middle


def number(value: float) -> str:
    """Three digits that mean something."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def turns(what: str, names: Iterable[str], rounds: int) -> Iterator[str]:
    """Whose turn it is: every name once in each round, in an order of its own."""
    shuffle = random.Random(SEED).shuffle
    order = []
    for _ in range(rounds):
        names = list(names)
        shuffle(names)
        order += names
    yield from rich.progress.track(order, description=f"{what:32}", transient=True)


def exponent(points: Mapping[int, float]) -> float | None:
    """The k of the n^k that fits best: 1 is linear growth. None for fewer than two points."""
    if len(points) < 2:
        return None
    sizes, values = zip(*((math.log(n), math.log(max(value, 1e-9))) for n, value in points.items()), strict=True)
    return statistics.linear_regression(sizes, values).slope


def on_loop(kind: str, main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` on an event loop of that kind."""
    factory = None
    if kind == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


def apart(fn: Callable[..., T], *args: Any) -> T:
    """Call ``fn(*args)`` in a new process: for what can be set up only once in each."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(fn, *args).result()


# ---------------------------------------------------------------------- the machine


def environment(size: Size) -> dict[str, Any]:
    """Where the figures come from."""
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": platform.platform(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "loop": size.loop,
        "load before": round(os.getloadavg()[0], 2),
        "packages": versions,
    }


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


# ---------------------------------------------------------------------- a server that is played


class Exchange:
    """One request to a server that behaves as uvicorn does, without sockets.

    ``receive`` gives the body, then blocks until the response is complete, then says ``http.disconnect``, every time.
    The application runs in a task of its own. What it sent is kept, to be checked.
    """

    __slots__ = ("_complete", "_pieces", "body", "status")

    def __init__(self, pieces: Sequence[bytes] = (b"",)) -> None:
        self._pieces = list(reversed(pieces))
        self._complete = asyncio.Event()
        self.status: int | None = None
        self.body: list[bytes] = []

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        await asyncio.get_running_loop().create_task(app(scope, self.receive, self.send))  # type: ignore[arg-type]

    async def receive(self) -> Message:
        if not self._complete.is_set():
            if self._pieces:
                body = self._pieces.pop()
                return {"type": "http.request", "body": body, "more_body": bool(self._pieces)}
            await self._complete.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self._complete.is_set():
            raise RuntimeError(f"the response is complete; then came {message['type']!r}")
        if self.status is None:
            self.status = message["status"]
            return
        body = message.get("body")
        if body:
            self.body.append(body)
        if not message.get("more_body", False):
            self._complete.set()

    def check(self, length: int) -> None:
        """See that the client got a whole and true answer.

        :raises Wrong: if it did not.
        """
        if not self._complete.is_set():
            raise Wrong("no complete response")
        if self.status != 200 or sum(map(len, self.body)) != length:
            raise Wrong(f"wrong response: {self.status}, {sum(map(len, self.body))} bytes of {length}")


class Wrong(Exception):
    """A competitor that did not do its job: it does not count as fast."""


def request(method: str = "GET", spec_version: str = "2.3") -> Scope:
    """The scope of a request as uvicorn makes it for a browser."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": spec_version},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": "/",
        "raw_path": b"/",
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"host", b"localhost:8000"),
            (b"user-agent", b"Mozilla/5.0 (X11; Linux x86_64; rv:142.0) Gecko/20100101 Firefox/142.0"),
            (b"accept", b"application/json"),
            (b"accept-encoding", b"gzip, deflate, br"),
            (b"connection", b"keep-alive"),
        ],
        "client": ("127.0.0.1", 50000),
        "server": ("127.0.0.1", 8000),
        "state": {},
    }


async def fitness(app: ASGIApp, make: Callable[[], Exchange], scope: Callable[[], Scope], length: int) -> str | None:
    """Why ``app`` cannot do this at all, if it cannot: tried before anything is measured."""
    for _ in range(3):
        exchange = make()
        try:
            async with asyncio.timeout(2):
                await exchange.run(app, scope())
            exchange.check(length)
        except TimeoutError:
            return "hangs"
        except Wrong as exc:
            return str(exc)
    return None
