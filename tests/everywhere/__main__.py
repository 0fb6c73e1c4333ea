"""``python -m tests.everywhere [servers] [frameworks] [--only NAME,...] [--check]``.

Plays the matrix against everything installed, and writes the pages in ``docs``. With ``--check`` nothing is written: it
fails if a cell is not as it was, if one is wrong, or if something is not installed. What fails is played once more, and
said: a machine may be too busy once.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from . import tables
from .framework_phases import FRAMEWORKS
from .measure import Row, differences, measure_framework, measure_server, missing, save
from .servers import ROOT, SERVERS, ServerDiedError


def main() -> int:
    """Play, and write or compare."""
    parser = argparse.ArgumentParser(prog="python -m tests.everywhere", description=__doc__)
    parser.add_argument("what", nargs="*", choices=["servers", "frameworks", []], help="by default both")
    parser.add_argument(
        "--only", default="", metavar="NAMES", help="names of servers or frameworks; nothing is written"
    )
    parser.add_argument("--check", action="store_true", help="compare with what was measured before")
    options = parser.parse_args()
    what = options.what or ["servers", "frameworks"]
    only = frozenset(options.only.split(",")) - {""}
    wrong: list[str] = []
    sums: list[str] = []
    if "servers" in what:
        measure = partial(measure_server, samples=0) if options.check else measure_server  # times are not compared
        wrong += _play("servers", SERVERS, measure, tables.servers, only, sums, check=options.check)
    if "frameworks" in what:
        wrong += _play("frameworks", FRAMEWORKS, measure_framework, tables.frameworks, only, sums, check=options.check)
    for line in wrong:
        print(f"WRONG: {line}", file=sys.stderr)
    print(*sums, sep="\n")
    return 1 if wrong else 0


class Playable(Protocol):
    """A server or a framework."""

    @property
    def name(self) -> str: ...
    def installed(self) -> bool: ...
    def versions(self) -> str: ...


P = TypeVar("P", bound=Playable)


def _play(
    name: str,
    all_of_them: Sequence[P],
    measure: Callable[[P, Callable[[str], object]], Row],
    render: Callable[[Sequence[Row]], str],
    only: frozenset[str],
    sums: list[str],
    *,
    check: bool,
) -> list[str]:
    rows: list[Row] = []
    wrong: list[str] = []
    started = time.monotonic()
    for one in all_of_them:
        if only and one.name not in only:
            continue
        if not one.installed():
            print(f"{one.name} is not installed")
            if check:
                wrong.append(f"{one.name} is not installed")
            continue
        print(f"{one.name} ({one.versions()})", flush=True)
        for last_try in (False, True) if check else (True,):
            found, problems = _attempt(one, measure)
            if found is not None and check:
                problems += differences(found, name)
            if not problems or last_try:
                rows += [found] if found is not None else []
                wrong += problems
                break
            print(*(f"ONCE MORE: {problem}" for problem in problems), sep="\n", flush=True)
    if check and not only:
        wrong += missing(rows, name)
    cells = sum(len(row.cells) for row in rows)
    sums.append(f"{name}: {len(rows)}, cells: {cells}, wrong: {len(wrong)}, {time.monotonic() - started:.0f} s")
    if not only and not check:
        save(rows, name)
        (ROOT / "docs" / f"{name}.md").write_text(render(rows))
    return wrong


def _attempt(one: P, measure: Callable[[P, Callable[[str], object]], Row]) -> tuple[Row | None, list[str]]:
    """The row of ``one``, and what is wrong with it."""
    try:
        row = measure(one, lambda line: print(line, flush=True))
    except ServerDiedError as exc:
        return None, [f"{one.name}: {exc}"]
    return row, list(row.problems)


if __name__ == "__main__":
    sys.exit(main())
