"""``python -m benchmarks all --json out.json``, or one of them: ``python -m benchmarks overhead``."""

from __future__ import annotations

import argparse
import importlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import rich
import rich.table

from .competitors import EVERYBODY, load
from .harness import QUICK, SMOKE, Size, Table, environment, show
from .results import report

HERE = Path(__file__).parent

BENCHMARKS = ("overhead", "streams", "wire", "latency", "storm", "idle")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("what", choices=[*BENCHMARKS, "plots", "all"], help="all: everything, and then the plots")
    parser.add_argument("--json", type=Path, metavar="FILE", default=HERE / "results.json", help="default: %(default)s")
    parser.add_argument("--only", nargs="+", choices=EVERYBODY, default=EVERYBODY, metavar="COMPETITOR")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--quick", action="store_const", dest="size", const=QUICK, help="fewer rounds: a first look")
    sizes.add_argument("--smoke", action="store_const", dest="size", const=SMOKE, help="only to see that it works")
    parser.add_argument("--loop", choices=["uvloop", "asyncio"], default="uvloop", help="default: %(default)s")
    given = parser.parse_args(arguments)
    names = list(dict.fromkeys(["bare", *given.only]))
    for name in BENCHMARKS if given.what == "all" else [given.what]:
        if name != "plots":
            measure(name, names, replace(given.size or Size(), loop=given.loop), given.json)
    if given.what in {"plots", "all"}:
        report(given.json, HERE if given.json == HERE / "results.json" else given.json.parent)


def measure(name: str, names: list[str], size: Size, file: Path) -> list[Table]:
    """Run one benchmark, show its tables, and keep them in ``file`` beside those that are there."""
    where = environment(size)
    tables: list[Table] = importlib.import_module(f".{name}", __package__).run(names, size)
    for table in tables:
        print_table(table)
    known: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    known[name] = {
        "environment": where,
        "size": asdict(size),
        "competitors": {this.name: this.note for this in load(names).values()},
        "tables": [asdict(table) for table in tables],
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
