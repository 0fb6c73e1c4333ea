"""``python -m benchmarks all --json out.json``, or one of them: ``python -m benchmarks overhead``."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import rich
import rich.table

from .competitors import EVERYBODY
from .harness import SMOKE, Size, Table, environment, show

BENCHMARKS = ("overhead", "streams", "wire", "latency", "storm")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("what", choices=[*BENCHMARKS, "plots", "all"], help="all: everything, and then the plots")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures go, beside those that are there")
    parser.add_argument("--only", nargs="+", choices=EVERYBODY, default=EVERYBODY, metavar="COMPETITOR")
    parser.add_argument("--smoke", action="store_true", help="the least that shows that everything works")
    parser.add_argument(
        "--loop", choices=["uvloop", "asyncio"], default="uvloop", help="of the servers in latency, storm"
    )
    given = parser.parse_args(arguments)
    names = list(dict.fromkeys(["bare", *given.only]))
    chosen = BENCHMARKS if given.what == "all" else [given.what]
    for name in chosen:
        if name != "plots":
            measure(name, names, replace(SMOKE if given.smoke else Size(), loop=given.loop), given.json)
    if given.what in {"plots", "all"} and given.json is not None:
        from . import plots

        plots.draw(given.json)


def measure(name: str, names: list[str], size: Size, file: Path | None) -> list[Table]:
    """Run one benchmark, show its tables, and keep them in ``file``."""
    where = environment()
    tables: list[Table] = importlib.import_module(f".{name}", __package__).run(names, size)
    for table in tables:
        print_table(table)
    if file is not None:
        known: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        known[name] = {
            "environment": where,
            "command": f"python -m benchmarks {' '.join(sys.argv[1:])}",
            "tables": [table.plain() for table in tables],
        }
        file.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n")
    return tables


def print_table(table: Table) -> None:
    shown = rich.table.Table(title=f"{table.title}, {table.unit}", title_justify="left", caption=table.note)
    shown.add_column()
    for column in table.columns:
        shown.add_column(column, justify="right")
    for name, row in table.rows.items():
        shown.add_row(name, *(show(row.get(column)) for column in table.columns))
    rich.print(shown)


if __name__ == "__main__":
    main()
