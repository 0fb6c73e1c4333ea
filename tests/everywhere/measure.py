"""Playing the matrix, and what is kept of it."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from . import framework_phases, phases
from .clients import Client
from .framework_phases import Framework
from .phases import Cell
from .servers import BY_NAME, Process, Server, running

APP: Final = "tests.everywhere.app:main"
FRAMEWORK_APP: Final = "tests.everywhere.frameworks.serve:main"
#: What the frameworks are served by.
FRAMEWORK_SERVER: Final = BY_NAME["uvicorn-httptools"]

MEASURED: Final = Path(__file__).parent / "measured"
#: How often the token's delay is measured.
SAMPLES: Final = 31


@dataclass
class Row:
    """What was found for one server or framework."""

    name: str
    versions: str
    cells: list[Cell] = field(default_factory=list)
    latencies_ms: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, str]:
        """What must be the same tomorrow."""
        return {f"{cell.phase} {cell.way or 'stays'}": cell.summary() for cell in self.cells}

    @property
    def problems(self) -> list[str]:
        """What was not as it has to be."""
        return [
            f"{cell.server}, {cell.phase}, {cell.way or 'stays'}: {problem}"
            for cell in self.cells
            for problem in cell.problems
        ]


def measure_server(server: Server, say: Callable[[str], object], *, samples: int = SAMPLES) -> Row:
    """Play every phase against ``server``, and measure the token's delay ``samples`` times."""
    row = Row(server.name, server.versions())
    with tempfile.TemporaryDirectory() as directory, running(server, APP, Path(directory)) as process:
        for phase, way in phases.cells_of(server):
            cell = phases.play(process, phase, way)
            say(_line(cell))
            row.cells.append(cell)
        idle = phases.BY_NAME["idle"]
        way = idle.ways_for(server)[0]
        if not any(cell.blind for cell in row.cells if cell.phase == "idle"):
            for _ in range(samples):
                cell = phases.play(process, idle, way)
                if cell.latency_ms is not None:
                    row.latencies_ms.append(cell.latency_ms)
    return row


def measure_framework(framework: Framework, say: Callable[[str], object]) -> Row:
    """Play every phase against ``framework``."""
    row = Row(framework.name, framework.versions())
    with (
        tempfile.TemporaryDirectory() as directory,
        running(FRAMEWORK_SERVER, FRAMEWORK_APP, Path(directory), framework.environment()) as process,
    ):
        for phase, way in framework.cells():
            cell = framework_phases.play(process, framework, phase, way)
            say(_line(cell))
            row.cells.append(cell)
    return row


def _line(cell: Cell) -> str:
    verdict = "; ".join(cell.problems) if cell.problems else "blind spot" if cell.blind else "right"
    return f"  {cell.server:26} {cell.phase:17} {cell.way:10} {cell.state or '-':10} {verdict}"


def p50(values: Iterable[float]) -> float:
    """The median."""
    return statistics.median(values)


# ---------------------------------------------------------------------- memory


def memory_of_an_upload(process: Process, path: str, run: str, size: int, seconds: float) -> int:
    """How many kB the server process has grown when ``size`` bytes have been offered to a handler that never reads.

    The client sends as fast as it may for ``seconds``; a server with back-pressure takes a few hundred kB and no more.
    """
    go = Path(f"{process.record}.go")
    go.unlink(missing_ok=True)
    with Client(process.port) as client:
        before: int = process.ask("/-/memory")
        client.ask(path, run, body_size=size)
        process.wait_for_event(run, "parked")
        sent, peak, deadline = 0, before, time.monotonic() + seconds
        piece = memoryview(bytes(2**20))
        client.set_blocking(False)
        while sent < size and time.monotonic() < deadline:
            try:
                sent += client.send_some(piece[: size - sent])
            except BlockingIOError:
                peak = max(peak, process.ask("/-/memory"))
                time.sleep(0.02)
        peak = max(peak, process.ask("/-/memory"))
        go.touch()
        process.wait_for_event(run, "told to answer")  # which on hypercorn it never can
    return int(peak - before)


# ---------------------------------------------------------------------- what is kept


def save(rows: Iterable[Row], name: str) -> None:
    """Keep the states of all cells, for `differences`."""
    MEASURED.mkdir(exist_ok=True)
    text = json.dumps({row.name: row.summary() for row in rows}, indent=1, sort_keys=True)
    (MEASURED / f"{name}.json").write_text(text + "\n")


def differences(row: Row, name: str) -> list[str]:
    """Where ``row`` is not what was kept. Versions and times do not count."""
    old, new = _kept(name).get(row.name), row.summary()
    if old is None:
        return [f"{row.name} is new"]
    return [
        f"{row.name}, {cell}: {old.get(cell)} before, {new.get(cell)} now"
        for cell in sorted(old.keys() | new.keys())
        if old.get(cell) != new.get(cell)
    ]


def missing(rows: Sequence[Row], name: str) -> list[str]:
    """What was kept and is not among ``rows``."""
    return [f"{gone} is gone" for gone in _kept(name).keys() - {row.name for row in rows}]


def _kept(name: str) -> dict[str, dict[str, Any]]:
    kept: dict[str, dict[str, Any]] = json.loads((MEASURED / f"{name}.json").read_text())
    return kept
