"""Every statement of the journal. Built once; SQLAlchemy caches what it compiles.

All that write to a run say ``WHERE state = 'running'``: a terminal row is final, whoever comes second.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from sqlalchemy import (
    ARRAY,
    Float,
    Select,
    String,
    and_,
    any_,
    bindparam,
    case,
    delete,
    func,
    insert,
    literal,
    literal_column,
    select,
    tuple_,
    union_all,
    update,
)
from sqlalchemy.sql import ColumnElement

from ._database import Database, Statement
from ._records import COLUMNS, Page, RunRecord, cursor_of, place_of, record_of
from ._schema import clock, runs

RUNNING: Final = "running"
INSTANCE_LOST: Final = "instance_lost"

#: The channel on which PostgreSQL carries cancels.
CHANNEL: Final = "hangup_runs"

_c = runs.c
#: For what looks for running rows: in the text of the statement. With a parameter PostgreSQL may make a plan for any
#: state, which cannot use an index of running rows. Those that look for an id have a parameter: it keeps them from it.
_is_running: Final = _c.state == literal_column(f"'{RUNNING}'", String())
_seconds: Final = bindparam("seconds", type_=Float())
_this_run: Final = and_(_c.id == bindparam("run"), _c.state == RUNNING)
_record: Final = tuple(_c[name] for name in COLUMNS)

#: What a terminal row says beside its state.
CLOSING: Final = ("state", "cause", "phase", "reason", "http_status", "delivered", "error", "result", "effects")

_OPEN: Final = insert(runs).values(
    {
        **{n: bindparam(n) for n in ("id", "name", "owner", "instance", "fence", "trace_id", "attributes")},
        "state": RUNNING,
        "opened_at": clock(),
        "lease_until": clock(_seconds),
    }
)
_CLOSE: Final = (
    update(runs)
    .where(_this_run, _c.fence == bindparam("by"))
    .values(
        {
            **{name: bindparam(f"new_{name}", type_=_c[name].type) for name in CLOSING},
            "closed_at": clock(),
            "closed_by": bindparam("by"),
            "lease_until": None,
        }
    )
)
_CHECKPOINT: Final = (
    update(runs)
    .where(_this_run, _c.fence == bindparam("by"))
    .values(result=bindparam("new_result", type_=_c.result.type))
)
_EFFECTS: Final = update(runs).where(_this_run, _c.fence == bindparam("by")).values(effects=bindparam("new_effects"))
_SWEEP: Final = (
    update(runs)
    .where(_is_running, _c.lease_until < clock())
    .values(
        state=case((_c.effects.is_(None), "canceled"), else_="ambiguous"),
        cause=INSTANCE_LOST,
        closed_at=clock(),
        closed_by=bindparam("by"),
        lease_until=None,
    )
    .returning(_c.id, _c.instance, _c.state)
)
_GET: Final = select(*_record, _c.fence, _c.closed_by).where(_c.id == bindparam("run"))
_ASK: Final = (
    update(runs)
    .where(_this_run, _c.cancel_at.is_(None))
    .values(cancel_at=clock(), cancel_reason=bindparam("why"))
    .returning(_c.id)
)
_ASK_LOUDLY: Final = select(
    func.pg_notify(CHANNEL, bindparam("payload", type_=String())).label("notified")
).select_from(_ASK.cte("asked"))
_SEEN: Final = update(runs).where(_this_run).values(cancel_seen_at=clock())
_WANTED: Final = select(_c.id, _c.cancel_reason).where(
    _c.instance == bindparam("by"), _is_running, _c.cancel_at.is_not(None), _c.cancel_seen_at.is_(None)
)
# Each half has its index; `or_` may make a planner read the table in the order of the result instead.
_CHANGED: Final = (
    select(*_record)
    .where(
        _c.id.in_(
            union_all(
                select(_c.id).where(_c.opened_at > bindparam("since")),
                select(_c.id).where(_c.closed_at > bindparam("since")),
            )
        )
    )
    .order_by(_c.opened_at)
    .limit(10_000)
)
_PURGE: Final = delete(runs).where(
    _c.id.in_(
        select(_c.id)
        .where(_c.closed_at < clock(_seconds), _c.state != RUNNING)
        .order_by(_c.closed_at)
        .limit(bindparam("batch"))
    )
)
_NOW: Final = select(clock().label("now"))


class Store:
    """The statements, sent to one database. Each method is one of them, and one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database
        among: ColumnElement[bool]
        if database.is_sqlite:
            each = func.json_each(bindparam("ids", type_=String())).table_valued("value")
            among = _c.id.in_(select(each.c.value))
        else:
            among = _c.id == any_(bindparam("ids", type_=ARRAY(String())))
        self._renew = update(runs).where(among, _c.state == RUNNING).values(lease_until=clock(_seconds))
        self._still = select(_c.id).where(among, _c.state == RUNNING)

    async def open(self, values: Mapping[str, Any], lease: float) -> None:
        """Insert a running row."""
        await self._database.execute("open", _OPEN, {**values, "seconds": lease})

    async def close(self, *closings: Mapping[str, Any]) -> list[bool]:
        """Close running rows, all or none. Which of them were there to be closed."""
        if len(closings) == 1:
            answers = [await self._database.execute("close", _CLOSE, closings[0])]
        else:
            statements: list[Statement] = [(_CLOSE, closing) for closing in closings]
            answers = await self._database.execute_together("close", statements)
        return [answer.count == 1 for answer in answers]

    async def checkpoint(self, run: str, fence: str, result: Any) -> bool:
        """Write a partial result. False if the row is not running."""
        values = {"run": run, "by": fence, "new_result": result}
        return (await self._database.execute("checkpoint", _CHECKPOINT, values)).count == 1

    async def note_effects(self, run: str, fence: str, effects: str | None) -> bool:
        """Write which effects are in flight. False if the row is not running."""
        values = {"run": run, "by": fence, "new_effects": effects}
        return (await self._database.execute("note effects", _EFFECTS, values)).count == 1

    async def renew(self, ids: Sequence[str], lease: float) -> int:
        """Renew the leases of all ``ids`` that are running; how many are. They may be many, so it may take longer."""
        values = {"ids": self._pack(ids), "seconds": lease}
        timeout = max(self._database.timeout, lease / 6)
        return (await self._database.execute("renew", self._renew, values, timeout=timeout)).count

    async def still_running(self, ids: Sequence[str]) -> set[str]:
        """Those of ``ids`` whose rows say so."""
        answer = await self._database.execute("look up", self._still, {"ids": self._pack(ids)})
        return {row["id"] for row in answer.rows}

    async def sweep(self, by: str) -> Sequence[Mapping[str, Any]]:
        """Close the rows whose lease has expired. What was closed: id, instance, state."""
        answer = await self._database.execute("sweep", _SWEEP, {"by": by})
        return [dict(row) for row in answer.rows]

    async def look_up(self, run: str) -> tuple[RunRecord, str, str | None] | None:
        """The row, its fence, and who closed it."""
        rows = (await self._database.execute("get", _GET, {"run": run})).rows
        return (record_of(rows[0]), rows[0]["fence"], rows[0]["closed_by"]) if rows else None

    async def get(self, run: str) -> RunRecord | None:
        """The row."""
        found = await self.look_up(run)
        return found[0] if found is not None else None

    async def ask(self, run: str, reason: str | None) -> bool:
        """Write down that the run is to stop, and on PostgreSQL say so to whoever listens.

        False if it is not running, or was asked before.
        """
        values = {"run": run, "why": reason}
        if self._database.is_sqlite:
            return bool((await self._database.execute("cancel", _ASK, values)).rows)
        payload = json.dumps({"id": run, "reason": reason}, ensure_ascii=False)  # escaped, it might not fit
        return bool((await self._database.execute("cancel", _ASK_LOUDLY, {**values, "payload": payload})).rows)

    async def seen(self, run: str) -> None:
        """Write down that the run has been told."""
        await self._database.execute("acknowledge", _SEEN, {"run": run})

    async def wanted(self, instance: str) -> Sequence[tuple[str, str | None]]:
        """The running rows of ``instance`` that are to stop and have not been told, with the reason."""
        answer = await self._database.execute("look for cancels", _WANTED, {"by": instance})
        return [(row["id"], row["cancel_reason"]) for row in answer.rows]

    async def changed(self, since: datetime) -> list[RunRecord]:
        """The rows that were opened or closed since then."""
        answer = await self._database.execute("watch", _CHANGED, {"since": since})
        return [record_of(row) for row in answer.rows]

    async def now(self) -> datetime:
        """The database's clock."""
        moment: datetime = (await self._database.execute("watch", _NOW, {})).rows[0]["now"]
        return moment

    async def list(self, filters: Mapping[str, Any], *, limit: int, after: str | None) -> Page:
        """A page of rows, newest first."""
        statement: Select[Any] = select(*_record).order_by(_c.opened_at.desc(), _c.id.desc()).limit(limit + 1)
        for name, value in filters.items():
            if value is None:
                continue
            if name == "opened_after":
                statement = statement.where(_c.opened_at > value)
            elif name == "opened_before":
                statement = statement.where(_c.opened_at < value)
            else:
                statement = statement.where(_is_running if value == RUNNING and name == "state" else _c[name] == value)
        if after is not None:
            moment, id = place_of(after)
            place = tuple_(literal(moment, _c.opened_at.type), literal(id))
            statement = statement.where(tuple_(_c.opened_at, _c.id) < place)
        records = [record_of(row) for row in (await self._database.execute("list", statement, {})).rows]
        more = len(records) > limit
        return Page(tuple(records[:limit]), cursor_of(records[limit - 1]) if more else None)

    async def purge(self, older_than: float, batch: int) -> int:
        """Delete up to ``batch`` terminal rows that were closed more than ``older_than`` seconds ago; how many."""
        return (await self._database.execute("purge", _PURGE, {"seconds": -older_than, "batch": batch})).count

    def _pack(self, ids: Sequence[str]) -> Any:
        if self._database.is_sqlite:
            return json.dumps(list(ids))
        return list(ids)
