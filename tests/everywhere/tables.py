"""``docs/servers.md`` and ``docs/frameworks.md``, from what was measured."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from . import framework_phases, phases
from .framework_phases import FRAMEWORK
from .measure import SAMPLES, Row, p50
from .phases import Cell
from .servers import BY_NAME

COMMAND: Final = "python -m tests.everywhere"

_SERVERS: Final = """# Every server

<!-- Written by `{command}`. Do not edit. -->

What becomes of a call when its client leaves, measured on real server processes and real sockets. The clients close
the connection (FIN), reset it (RST), half-close it (HALF: `shutdown(SHUT_WR)`, still reading), or reset one HTTP/2
stream (RST_STREAM). Each cell is judged by the record of the server process: the terminal state, cause and phase, the
finalizers (each exactly once), the handler's own `finally: await`, the step in flight, what was logged, and which tasks
were left behind.

**✓** all is as it has to be, for every way to leave · **a number** the server keeps something from everybody: see
[What nobody can see](#what-nobody-can-see), where the record is right about what could be known · **-** does not apply

Reproduce it with `pip install -e '.[test,everywhere]' && {command} servers`; `--check` compares. Measured on
{platform}, over loopback.
"""

_FRAMEWORKS: Final = """# Every framework

<!-- Written by `{command}`. Do not edit. -->

The same handlers in every framework, on {server}. Each cell is judged by the record of the server process: the
terminal state, cause and phase, the finalizers (each exactly once), the handler's own `finally: await`, the step in
flight, what was logged, and which tasks were left behind.

**✓** all is as it has to be · **a number** the framework has semantics of its own, which stay its own: see
[What is the framework's own](#what-is-the-frameworks-own) · **-** does not apply

Reproduce it with `pip install -e '.[test,everywhere]' && {command} frameworks`; `--check` compares. Measured on
{platform}.
"""


def servers(rows: Sequence[Row]) -> str:
    """The page."""
    notes = _Notes()
    parts = [_SERVERS.format(command=COMMAND, platform=_platform())]
    for title, http2 in (("HTTP/1.1", False), ("HTTP/2", True)):
        some = [row for row in rows if BY_NAME[row.name].http2 is http2]
        titles = {phase.name: phase.title for phase in phases.PHASES}
        parts.append(f"## {title}\n\n{_table(some, titles, notes)}")
    parts.append(f"## What nobody can see\n\n{notes.text()}\n{_ALWAYS}")
    parts.append(f"## How soon the token knows\n\n{_latencies(rows)}")
    parts.append(f"## Versions\n\n{_versions(rows)}")
    return "\n".join(parts)


def frameworks(rows: Sequence[Row]) -> str:
    """The page."""
    from .measure import FRAMEWORK_SERVER

    notes = _Notes()
    titles = {phase.name: phase.title for phase in framework_phases.PHASES}
    names = {row.name: FRAMEWORK[row.name].title for row in rows}
    head = _FRAMEWORKS.format(command=COMMAND, platform=_platform(), server=FRAMEWORK_SERVER.versions())
    table = _turned(rows, titles, names, notes)
    return "\n".join(
        (head, table, f"## What is the framework's own\n\n{notes.text()}", f"## Versions\n\n{_versions(rows, names)}")
    )


#: What holds on every server, and is not a cell.
_ALWAYS: Final = """
On every server:

- A half-closed client looks gone. Nothing in ASGI tells the two apart, and most servers close the connection.
- A client that vanishes without FIN or RST (a cable, a sleeping laptop) is seen at the next write that fails, and an
  idle call never sees it.
- An upload that a proxy holds back, or a disconnect that it keeps to itself, never reaches the application.
- gunicorn says disconnect when an upload stalls for its `--timeout` (30 s), with the client still there.

The cures: `timeout`, `send_timeout` for a client that stays but does not read, a larger `read_ahead`, reading the body
before long work, and heartbeat writes in streams.
"""


class _Notes:
    """Footnotes, numbered as they come."""

    def __init__(self) -> None:
        self._texts: dict[str, list[Cell]] = {}

    def number(self, cell: Cell) -> str:
        assert cell.blind is not None
        self._texts.setdefault(cell.blind, []).append(cell)
        return str(list(self._texts).index(cell.blind) + 1)

    def text(self) -> str:
        lines = []
        for number, (why, cells) in enumerate(self._texts.items(), 1):
            said = sorted({_said(cell) for cell in cells})
            lines.append(f"{number}. {why[0].upper()}{why[1:]}. The record: {'; or '.join(said)}.")
        return "\n".join(lines) + "\n"


def _said(cell: Cell) -> str:
    if cell.state is None:
        return "none, the application was not called"
    if cell.varies:
        return "varies, with `detection_suspended`" if cell.suspended else "varies"
    words = [f"`{cell.state}`", *([f"`{cell.cause}`"] if cell.cause else []), f"`{cell.stood}`"]
    if cell.suspended:
        words.append("`detection_suspended`")
    if cell.state == "completed" and cell.delivered is not None:
        words.append("delivered" if cell.delivered else "not delivered")
    return " ".join(words)


def _table(rows: Sequence[Row], titles: Mapping[str, str], notes: _Notes) -> str:
    """Rows are phases, columns are servers."""
    lines = [f"| | {' | '.join(row.name for row in rows)} |", f"|---|{':-:|' * len(rows)}"]
    for phase, title in titles.items():
        cells = [[cell for cell in row.cells if cell.phase == phase] for row in rows]
        if any(cells):
            ways = ", ".join(dict.fromkeys(cell.way for some in cells for cell in some if cell.way))
            marks = " | ".join(_mark(some, notes) for some in cells)
            lines.append(f"| {title}{f': {ways}' if ways else ''} | {marks} |")
    return "\n".join(lines) + "\n"


def _turned(rows: Sequence[Row], titles: Mapping[str, str], names: Mapping[str, str], notes: _Notes) -> str:
    """Rows are frameworks, columns are phases."""
    lines = [f"| | {' | '.join(titles.values())} |", f"|---|{':-:|' * len(titles)}"]
    for row in rows:
        marks = [_mark([cell for cell in row.cells if cell.phase == phase], notes) for phase in titles]
        lines.append(f"| {names[row.name]} | {' | '.join(marks)} |")
    return "\n".join(lines) + "\n"


def _mark(cells: Iterable[Cell], notes: _Notes) -> str:
    marks: dict[str, list[str]] = {}
    for cell in cells:
        mark = "**✗**" if cell.problems else notes.number(cell) if cell.blind else "✓"
        marks.setdefault(mark, []).append(cell.way)
    if not marks:
        return "-"
    if len(marks) == 1:
        return next(iter(marks))
    return ", ".join(mark if mark == "✓" else f"{mark} ({', '.join(ways)})" for mark, ways in marks.items())


def _latencies(rows: Sequence[Row]) -> str:
    lines = [
        f"Milliseconds from the client's `close()` to the token's callback, idle handler, {SAMPLES} times each.",
        "",
        "| server | p50 | max |",
        "|---|--:|--:|",
    ]
    for row in rows:
        if row.latencies_ms:
            lines.append(f"| {row.name} | {p50(row.latencies_ms):.1f} | {max(row.latencies_ms):.1f} |")
    return "\n".join(lines) + "\n"


def _versions(rows: Sequence[Row], names: Mapping[str, str] | None = None) -> str:
    lines = ["| | |", "|---|---|"]
    lines.extend(f"| {(names or {}).get(row.name, row.name)} | {row.versions} |" for row in rows)
    return "\n".join(lines) + "\n"


def _platform() -> str:
    return f"{platform.system()}, CPython {platform.python_version()}"
