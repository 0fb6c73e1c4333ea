"""However many rows there are, what is asked of the table reads a few of them: the plans say so.

With a million rows: ``python benchmarks/journal.py rows``.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from benchmarks.journal import fill, questions
from sqlalchemy import event

from hangup.journal import Journal

pytestmark = pytest.mark.anyio

#: Enough for PostgreSQL to prefer an index to reading all of it.
ROWS = 20_000

#: What sorts what indexes have found: what changed lately, and of one owner what other filters leave.
SORTED_AFTERWARDS = {"watch", "list owner and name", "list all filters"}


async def plan_of(journal: Journal, ask: Any) -> str:
    """How the database executes the statement that ``ask`` sends."""
    sent: list[tuple[str, Any]] = []

    def note(connection: Any, cursor: Any, statement: str, parameters: Any, *rest: Any) -> None:
        sent.append((statement, parameters))

    engine = journal.database.engine
    event.listen(engine.sync_engine, "before_cursor_execute", note)
    try:
        await ask()
    finally:
        event.remove(engine.sync_engine, "before_cursor_execute", note)
    [(statement, parameters)] = sent
    explain = "EXPLAIN QUERY PLAN" if journal.database.is_sqlite else "EXPLAIN (COSTS OFF)"
    async with engine.connect() as connection:
        found = (await connection.exec_driver_sql(f"{explain} {statement}", parameters)).all()
    return "\n".join(str(row[-1]) for row in found)


async def test_no_statement_reads_the_whole_table_or_sorts_it(url: str) -> None:
    async with Journal(url, poll_every=60, renew_every=60, lease=120) as journal:
        await fill(journal, 1, ROWS, running=50)
        plans = {name: await plan_of(journal, ask) for name, ask in questions(journal, ROWS).items()}
    assert len(plans) > 15
    for name, plan in plans.items():
        whole = r"SCAN hangup_runs(?! USING)|Seq Scan on hangup_runs"
        assert not re.search(whole, plan), f"{name}\n{plan}"
        assert "hangup_runs_" in plan, f"{name}\n{plan}"
        if name not in SORTED_AFTERWARDS:
            assert not re.search(r"TEMP B-TREE|\bSort\b", plan), f"{name}\n{plan}"
    assert re.search(r"hangup_runs_(state|running)\b", plans["sweep"]), plans["sweep"]
    assert re.search(r"hangup_runs_(state|running)\b", plans["list running"]), plans["list running"]
    assert re.search(r"hangup_runs_(state|running)\b", plans["list owner and running"]), plans["list owner and running"]
    assert "hangup_runs_cancel" in plans["look for cancels"]
    assert "hangup_runs_closed" in plans["purge 100"]
