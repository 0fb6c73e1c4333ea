"""What was seen, whether it is right, and the table that says so.

Nothing here is written beforehand: each cell is made from the marks of the server, the record of the middleware, and
the database as it was found in the end.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby, repeat
from statistics import median
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hangup import State

from .scenarios import Cleanup, Scenario
from .server import Mark

#: Milliseconds from the hang-up in which the work has to be told: far beyond what it takes, even on a busy machine.
TOLD_WITHIN: Final = 500.0
#: The same for work that ends by itself: later than this, and it ran on for nobody.
_SOON: Final = 250.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One run of a scenario on one server, as it was seen. Times are milliseconds since the hang-up."""

    told_by: str | None  #: the exception that the work was left by
    told_after: float | None
    worked_until: float | None  #: when the work came to its own end
    cleanup: Cleanup
    raised: str | None  #: what left the application
    errors: tuple[str, ...]  #: what was logged as an error, or escaped the application (the server logs that)
    registered: int  #: finalizers
    row: str | None  #: the state in the database, at the very end
    outcomes: tuple[dict[str, Any], ...]  #: the records of the middleware; without it there are none

    @classmethod
    def read(cls, marks: Iterable[Mark], hung_up_at: int, row: str | None) -> Seen:
        """Make it from the ``marks`` of the run."""
        marks = list(marks)

        def first(what: str) -> Mark | None:
            return next((mark for mark in marks if mark.what == what), None)

        def after(mark: Mark | None) -> float | None:
            return (mark.at - hung_up_at) / 1e6 if mark else None

        left, told, cleaned = first("left"), first("interrupted"), first("cleaned up")
        return cls(
            told_by=told.details["by"] if told else None,
            told_after=after(told),
            worked_until=after(first("worked")),
            cleanup=_judge_cleanup(cleaned, left),
            raised=left.details["raised"] if left else None,
            errors=tuple(
                mark.details["error"] or mark.details["text"]
                for mark in marks
                if mark.what == "logged" and mark.details["level"] in {"ERROR", "CRITICAL"}
            ),
            registered=sum(mark.what == "registered" for mark in marks),
            row=row,
            outcomes=tuple(mark.details["outcome"] for mark in marks if mark.what == "outcome"),
        )


def _judge_cleanup(cleaned: Mark | None, left: Mark | None) -> Cleanup:
    if cleaned is None or left is None:
        return Cleanup.LOST
    return Cleanup.FINISHED if cleaned.at <= left.at else Cleanup.LATE


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A scenario and a way to hang up, with what was seen bare and with hangup."""

    scenario: Scenario
    how: str
    bare: Seen
    hangup: Seen

    @property
    def faults(self) -> list[str]:
        """What went wrong bare."""
        return list(find_faults(self.scenario, self.bare))

    @property
    def problems(self) -> list[str]:
        """What is not right with hangup. Empty if all is."""
        return [*find_faults(self.scenario, self.hangup), *compare(self.scenario, self.hangup)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The whole demo."""

    rows: list[Row]
    server: str
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether everything with hangup is right."""
        return not any(row.problems for row in self.rows)

    @property
    def latencies(self) -> list[float]:
        """Milliseconds from each hang-up to the ``CancelledError`` in the handler, with hangup."""
        return [
            row.hangup.told_after
            for row in self.rows
            if row.hangup.told_by == "CancelledError" and row.hangup.told_after is not None
        ]

    @property
    def p50(self) -> float | None:
        """The median of `latencies`."""
        return median(self.latencies) if self.latencies else None

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "ok": self.ok,
            "server": self.server,
            "seconds": round(self.seconds, 2),
            "cancel_latency_ms": {"p50": self.p50, "max": max(self.latencies, default=None), "n": len(self.latencies)},
            "rows": [
                {
                    "scenario": row.scenario.name,
                    "moment": row.scenario.moment,
                    "close": row.how,
                    "bare": {**dataclasses.asdict(row.bare), "faults": row.faults},
                    "hangup": {**dataclasses.asdict(row.hangup), "problems": row.problems},
                }
                for row in self.rows
            ],
        }


# ---------------------------------------------------------------------- judging


def find_faults(scenario: Scenario, seen: Seen) -> Iterator[str]:
    """What nobody wants to see, with or without hangup."""
    ran_on = seen.worked_until is not None and seen.worked_until > _SOON
    if ran_on and scenario.told_by:
        yield "ran on for nobody"
    if seen.cleanup not in scenario.cleanups:
        yield f"cleanup {seen.cleanup}"
    if seen.row == "running":
        yield "row says running"
    if seen.errors or seen.raised:
        yield "error logged"


def compare(scenario: Scenario, seen: Seen) -> Iterator[str]:
    """Where ``seen`` differs from what the scenario expects of hangup."""
    if len(seen.outcomes) != 1:
        yield f"{len(seen.outcomes)} outcomes instead of 1"
        return
    [outcome] = seen.outcomes
    expected = {
        "cause": scenario.cause,
        "phase": scenario.moment.phase,
        "delivered": scenario.delivered,
        "in_flight": list(scenario.in_flight),
    }
    if outcome["state"] not in scenario.states:
        yield f"state is {outcome['state']!r} instead of {' or '.join(sorted(scenario.states))!r}"
    for name, value in expected.items():
        if outcome[name] != value:
            yield f"{name} is {outcome[name]!r} instead of {value!r}"
    told_by, may_tell = seen.told_by or "nothing", sorted(scenario.told_by) or ["nothing"]
    if told_by not in may_tell:
        yield f"the work was left by {told_by} instead of {' or '.join(may_tell)}"
    if seen.told_after is not None and not 0 <= seen.told_after <= TOLD_WITHIN:
        yield f"it was told after {seen.told_after:.1f} ms; {TOLD_WITHIN:g} are a lot"
    ran = [finalizer["state"] for finalizer in outcome["finalizers"]]
    if seen.registered != scenario.finalizers or ran != [State.COMPLETED] * scenario.finalizers:
        yield f"finalizers: {seen.registered} registered, {ran or 'none'} ran, {scenario.finalizers} expected"
    if scenario.keeps_row and seen.row != outcome["state"]:
        yield f"the row says {seen.row!r} instead of {outcome['state']!r}"


# ---------------------------------------------------------------------- showing


def show(report: Report, console: Console) -> None:
    """Print the table, what is not right, and the figures."""
    table = Table(
        "the client leaves",
        "by",
        "bare",
        "with hangup",
        "told after",
        "cleanup",
        "finalizers",
        "row",
        "in flight",
        "",
        title=f"hangup demo: {report.server}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for scenario, group in groupby(report.rows, key=lambda row: row.scenario):
        captions = chain([Text(scenario.name, "bold"), Text(f"  {scenario.moment}", "dim")], repeat(Text()))
        for row, caption in zip(group, captions, strict=False):
            verdict = Text("no", "bold red") if row.problems else Text("ok", "green")
            table.add_row(caption, row.how, _bare_cell(row), *_hangup_cells(row.hangup), verdict)
        table.add_section()
    console.print(table)
    for line in _closing_lines(report):
        console.print(line)


def _bare_cell(row: Row) -> Text:
    return Text(describe(row.bare), "red" if row.faults else "")


def describe(seen: Seen) -> str:
    """What happened, in a few words."""
    parts = []
    if seen.told_by is not None and seen.told_after is not None:
        parts.append(f"{seen.told_by} after {_duration(seen.told_after)}")
    elif seen.worked_until is not None:
        parts.append(f"ran on {_duration(seen.worked_until)}")
    else:
        parts.append("open until the server stopped")
    if seen.cleanup is not Cleanup.FINISHED:
        parts.append(f"cleanup {seen.cleanup}")
    if seen.row is not None:
        parts.append(f"row {seen.row}")
    if seen.raised or seen.errors:
        parts.append("error logged")
    return ", ".join(parts)


def _hangup_cells(seen: Seen) -> Iterator[str]:
    outcome = seen.outcomes[0] if seen.outcomes else {"state": "no record", "finalizers": [], "in_flight": []}
    undelivered = outcome["state"] == State.COMPLETED and not outcome["delivered"]
    yield f"{outcome['state']}{', undelivered' if undelivered else ''}"
    yield _duration(seen.told_after) if seen.told_after is not None else "-"
    yield seen.cleanup
    yield f"{len(outcome['finalizers'])}/{seen.registered}" if seen.registered else "-"
    yield seen.row or "-"
    yield ", ".join(outcome["in_flight"]) or "-"


def _closing_lines(report: Report) -> Iterator[str | Text]:
    faults = Counter(fault for row in report.rows for fault in row.faults)
    if faults:
        wrong = sum(bool(row.faults) for row in report.rows)
        details = ", ".join(f"{fault} {count}x" for fault, count in faults.items())
        yield f"bare: {wrong} of {len(report.rows)} went wrong ({details})"
    right = sum(not row.problems for row in report.rows)
    yield f"with hangup: {right} of {len(report.rows)} right"
    for row in report.rows:
        for problem in row.problems:
            yield Text(f"  not right: {row.scenario.name}, {row.scenario.moment}, {row.how}: {problem}", "bold red")
    if report.p50 is not None:
        latencies = report.latencies
        yield (
            f"hang-up to CancelledError in the handler: p50 {report.p50:.2f} ms, "
            f"max {max(latencies):.2f} ms, of {len(latencies)}"
        )
    yield f"took {report.seconds:.1f} s"


def _duration(milliseconds: float) -> str:
    return f"{milliseconds:.1f} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.1f} s"
