"""What the figures say: ``RESULTS.md``, with the goals and whether they were reached, and the plots."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .harness import Size, Table, number, show
from .plots import Panel, draw

COMMAND = "pip install -e '.[benchmarks]' && apt-get install wrk && python -m benchmarks all"


@dataclass(frozen=True, slots=True)
class Figures:
    """Everything that was measured, as it is in the file."""

    benchmarks: dict[str, dict[str, Any]]

    def tables(self, benchmark: str) -> list[Table]:
        """Its tables, if it was run."""
        return [Table(**table) for table in self.benchmarks.get(benchmark, {}).get("tables", [])]

    def table(self, benchmark: str, title: str) -> Table:
        """The table whose title begins so; an empty one if there is none."""
        return next((t for t in self.tables(benchmark) if t.title.startswith(title)), Table(title, ""))


@dataclass(frozen=True, slots=True)
class Goal:
    """Something that was to be reached."""

    what: str
    limit: str
    value: float | None
    reached: bool
    #: The limit lies between the quartiles: nobody can say.
    unclear: bool = False


def report(file: Path, place: Path) -> None:
    """Write ``RESULTS.md`` and the plots into ``place``."""
    figures = Figures(json.loads(file.read_text()))
    drawn = draw(_panels(figures), place / "plots")
    (place / "RESULTS.md").write_text("\n".join(_lines(figures, drawn)) + "\n")


# ---------------------------------------------------------------------- the goals


def goals(figures: Figures) -> list[Goal]:
    return [goal for part in (_cheap, _streams, _wire, _prompt, _storms) for goal in part(figures)]


def at_most(
    what: str, limit: float, value: float | None, unit: str, quartiles: tuple[float, float] | None = None
) -> Goal:
    unclear = quartiles is not None and quartiles[0] < limit < quartiles[1]
    return Goal(what, f"at most {limit:g} {unit}", value, value is not None and value <= limit, unclear)


def _cheap(figures: Figures) -> Iterator[Goal]:
    added = figures.table("overhead", "Overhead of a call").figure("hangup", "plain JSON")
    yield at_most("a plain call, over bare", 5, added, "µs")
    yield at_most("the bar: a plain call, over bare", 8, added, "µs")
    part = figures.table("overhead", "Overhead of hangup")
    ratios = [ratio for name in part.rows if (ratio := part.figure(name, "plain JSON")) is not None]
    value = max(ratios, default=None)
    yield at_most("the bar: a plain call, against the cheapest that detects disconnects", 0.125, value, "x")


def _streams(figures: Figures) -> Iterator[Goal]:
    older = figures.table("streams", "A stream, against bare at 2.3")
    for column in older.columns:
        figure, quartiles = older.figure("hangup", column), older.quartiles("hangup", column)
        yield at_most(f"a stream of {column}, against bare at 2.3", 1, figure, "x", quartiles)
    newer = figures.table("streams", "A stream, against bare at 2.4").figure("hangup", "10,000 chunks")
    yield at_most("a stream of 10,000 chunks, in process, against bare at 2.4", 1.03, newer, "x")
    newer = figures.table("wire", "On the wire, CPU time against").figure("hangup", "stream of 10,000 chunks")
    yield at_most("a stream of 10,000 chunks, on the wire, CPU time against bare at 2.4", 1.03, newer, "x")


def _wire(figures: Figures) -> Iterator[Goal]:
    table = figures.table("wire", "On the wire, against bare")
    share, quartiles = table.figure("hangup", "hello"), table.quartiles("hangup", "hello")
    yield Goal(
        "requests per second, FastAPI hello on uvicorn",
        "at least 97 % of bare",
        share,
        share is not None and share >= 97,
        quartiles is not None and quartiles[0] < 97 < quartiles[1],
    )


def _prompt(figures: Figures) -> Iterator[Goal]:
    for table in figures.tables("latency"):
        where = table.title.partition("with ")[2]
        for column, limit in (("token, p50", 1.5), ("token, p99", 2)):
            ours, floor = table.figure("hangup", column), table.figure("raw", column)
            value = ours / floor if ours is not None and floor else None
            yield at_most(f"{column} with {where}, against `connection_lost`", limit, value, "x")


def _storms(figures: Figures) -> Iterator[Goal]:
    stall = figures.table("storm", "A storm: the longest gap")
    for column in stall.columns[-1:]:
        yield at_most(f"no stall, in a storm of {column}", 50, stall.figure("hangup", column), "ms")
    weight = figures.table("idle", "An idle stream").figure("hangup", "over bare")
    yield at_most("memory of an idle stream, over bare", 3, weight, "KiB")
    for name, title in (("idle", "How the memory grows"), ("storm", "How the time of a storm grows")):
        growth = figures.table(name, title)
        for column in growth.columns:
            yield at_most(f"{title[4:]}, {column} streams: k of n^k", 1.1, growth.figure("hangup", column), "")


# ---------------------------------------------------------------------- the page


def _lines(figures: Figures, drawn: list[str]) -> Iterator[str]:
    yield "# Results"
    yield ""
    yield "Written by `python -m benchmarks`. Again, from nothing:"
    yield ""
    yield f"```\n{COMMAND}\n```"
    yield ""
    yield (
        "Everything was measured in turns, within one run: in each round every competitor once, in an order that is "
        "shuffled anew. A figure is the median of the rounds, and behind it are the quartiles. Compare within a table; "
        "across machines only the ratios mean something."
    )
    yield ""
    if any(
        found["size"] != json.loads(json.dumps(asdict(Size())))
        for found in figures.benchmarks.values()
        if "size" in found
    ):
        yield "**Not all of it was measured with as many rounds as it takes: this is a first look.**"
        yield ""
    yield "## Goals"
    yield ""
    yield "Unclear: the limit lies between the quartiles."
    yield ""
    yield "| | goal | measured | |\n|---|---|---|---|"
    for goal in goals(figures):
        if goal.value is None:
            yield f"| {goal.what} | {goal.limit} | not measured | |"
        else:
            verdict = "unclear" if goal.unclear else "reached" if goal.reached else "**not reached**"
            yield f"| {goal.what} | {goal.limit} | {number(goal.value)} | {verdict} |"
    yield ""
    yield "## Who"
    yield ""
    notes = {name: note for this in figures.benchmarks.values() for name, note in this["competitors"].items()}
    yield "| | |\n|---|---|"
    yield from (f"| {name} | {note} |" for name, note in notes.items())
    for name, found in figures.benchmarks.items():
        yield ""
        yield f"## {name.capitalize()}"
        yield ""
        if name in drawn:
            yield f"![{name}](plots/{name}.svg)"
        for table in figures.tables(name):
            yield ""
            yield from _markdown(table)
        yield ""
        yield _environment(found["environment"])


def _markdown(table: Table) -> Iterator[str]:
    yield f"**{table.title}**, {table.unit}"
    yield ""
    yield f"| | {' | '.join(table.columns)} |"
    yield f"|---{'|---:' * len(table.columns)}|"
    for name, row in table.rows.items():
        shown = f"**{name}**" if name.startswith("hangup") else name
        yield f"| {shown} | {' | '.join(show(row.get(column)) for column in table.columns)} |"
    if table.note:
        yield ""
        yield table.note


def _environment(where: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in where["packages"].items() if version)
    return (
        f"On {where['cpu']}, {where['cores']} cores, load {where['load before']} before; {where['python']}, "
        f"{where['loop']}, {where['system']}; {packages}."
    )


# ---------------------------------------------------------------------- the plots


def _panels(figures: Figures) -> dict[str, list[Panel]]:
    """What is drawn of each benchmark."""
    found: dict[str, list[Panel]] = {}
    added = figures.table("overhead", "Overhead of a call")
    found["overhead"] = [
        Panel(f"{case}: microseconds over bare", _column(added, case))
        for case in added.columns
        if case != "one finalizer"
    ]
    ratio = figures.table("streams", "A stream, against bare at 2.3")
    found["streams"] = [
        Panel(f"a stream of {case}: times bare", _column(ratio, case), reference=1.0) for case in ratio.columns
    ]
    share = figures.table("wire", "On the wire, against bare")
    found["wire"] = [
        Panel(f"{case}: requests per second, % of bare", _column(share, case), reference=100.0, better="more")
        for case in share.columns
    ]
    found["latency"] = [_latency_panel(table) for table in figures.tables("latency")]
    found["storm"] = []
    for title, what in (
        ("A storm: from", "until the last of {} is over, ms"),
        ("A storm: the longest", "the longest stall while {} are dropped, ms"),
    ):
        table = figures.table("storm", title)
        found["storm"] += [Panel(what.format(column), _column(table, column)) for column in table.columns[-1:]]
    weight = figures.table("idle", "An idle stream")
    found["idle"] = [Panel(f"KiB of the server: {column}", _column(weight, column)) for column in weight.columns[:1]]
    return {name: panels for name, panels in found.items() if panels}


def _column(table: Table, column: str) -> dict[str, dict[str, Any]]:
    return {name: row[column] for name, row in table.rows.items() if column in row}


#: What is not a token, but the first that is known.
TOLD = {"raw": "raw: connection_lost", "receive": "ASGI: receive()"}


def _latency_panel(table: Table) -> Panel:
    cells: dict[str, dict[str, Any]] = {}
    for name, row in table.rows.items():
        if "token, p50" in row:
            cells[TOLD.get(name, f"{name}: token")] = row["token, p50"]
        if "CancelledError, p50" in row:
            cells[f"{name}: CancelledError" if name == "hangup" else name] = row["CancelledError, p50"]
    return Panel(f"from close() to CancelledError, {table.title.partition('with ')[2]}: median, µs", cells)
