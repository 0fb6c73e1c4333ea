"""The table, and the database's clock.

`metadata` is public: hand it to Alembic as ``target_metadata``, or let `Journal` create the table. No lease is ever
compared with a clock of ours: `clock` is an expression the database evaluates, so the clocks of the instances do not
matter.

The indexes keep lists and sweeps flat whatever the number of rows: a list reads one of the ``(…, opened_at, id)``
indexes, and what sweeps look for is in the one by state. Partial indexes hold the running rows of an owner, and those
that somebody wants canceled. ``lease_until`` is in no index on purpose: PostgreSQL then renews a lease without touching
any (a heap-only update).
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    Connection,
    DateTime,
    Dialect,
    Float,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    event,
    literal,
    text,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator

#: Longest values, in characters.
ID_LENGTH: Final = 128
NAME_LENGTH: Final = 200
OWNER_LENGTH: Final = 255
TEXT_LENGTH: Final = 2000  #: of ``reason`` and ``error``; what is longer is cut


class UTCDateTime(TypeDecorator[datetime]):
    """A point in time, aware, in UTC. SQLite keeps it as text without a zone."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """To the database."""
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """From the database."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class clock(FunctionElement[datetime]):
    """Now, by the clock of the database, plus ``offset`` seconds."""

    inherit_cache = True
    type = UTCDateTime()

    def __init__(self, offset: Any = 0.0) -> None:
        super().__init__(literal(offset, Float()) if isinstance(offset, (int, float)) else offset)


@compiles(clock, "postgresql")
def _clock_on_postgresql(element: clock, compiler: Any, **kw: Any) -> str:
    # Stable within a statement, unlike `clock_timestamp()`: fit for an index.
    return f"(statement_timestamp() + make_interval(secs => {compiler.process(element.clauses, **kw)}))"


@compiles(clock, "sqlite")
def _clock_on_sqlite(element: clock, compiler: Any, **kw: Any) -> str:
    # The text that SQLAlchemy itself writes, so that both compare as text. A subquery is evaluated once, not per row.
    offset = compiler.process(element.clauses, **kw)
    return f"(SELECT strftime('%Y-%m-%d %H:%M:%f', 'now', ({offset}) || ' seconds') || '000')"


metadata: Final = MetaData()

#: One row per run. ``state`` is ``running`` until the row is closed; then nothing of it changes any more.
runs: Final = Table(
    "hangup_runs",
    metadata,
    Column("id", String(ID_LENGTH), primary_key=True),
    Column("name", String(NAME_LENGTH), nullable=False),
    Column("owner", String(OWNER_LENGTH)),
    Column("state", String(16), nullable=False),
    Column("cause", String(32)),
    Column("phase", String(32)),
    Column("reason", Text),
    Column("opened_at", UTCDateTime, nullable=False),
    Column("closed_at", UTCDateTime),
    Column("lease_until", UTCDateTime, comment="a running row whose lease has expired belongs to nobody"),
    Column("instance", String(128), nullable=False, comment="the process that runs it"),
    Column("fence", String(32), nullable=False, comment="which opening of the id this is"),
    Column("closed_by", String(128), comment="the fence of the run, or the instance that swept it"),
    Column("effects", Text, comment="names of effects in flight: lost now, the run is ambiguous"),
    Column("http_status", Integer),
    Column("delivered", Boolean),
    Column("error", Text),
    Column("trace_id", String(32)),
    Column("attributes", JSON(none_as_null=True)),
    Column("result", JSON(none_as_null=True)),
    Column("cancel_at", UTCDateTime, comment="when somebody asked for the run to stop"),
    Column("cancel_reason", Text),
    Column("cancel_seen_at", UTCDateTime, comment="when the run was told"),
)


# Room on each page of PostgreSQL for the next version of its rows: else renewing a lease touches every index after all.
@event.listens_for(runs, "after_create")
def _make_room(table: Table, connection: Connection, **kw: Any) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(text("ALTER TABLE hangup_runs SET (fillfactor = 50)"))


_running = text("state = 'running'")
_cancel_wanted = text("state = 'running' AND cancel_at IS NOT NULL")

Index("hangup_runs_opened", runs.c.opened_at, runs.c.id)
Index("hangup_runs_state", runs.c.state, runs.c.opened_at, runs.c.id)
Index("hangup_runs_owner", runs.c.owner, runs.c.opened_at, runs.c.id)
Index("hangup_runs_name", runs.c.name, runs.c.opened_at, runs.c.id)
Index("hangup_runs_closed", runs.c.closed_at)
Index(
    "hangup_runs_running",
    # The state is the same in all of it; but SQLite, which has no statistics, takes the index that has more of a query.
    *(runs.c.owner, runs.c.state, runs.c.opened_at, runs.c.id),
    postgresql_where=_running,
    sqlite_where=_running,
)
Index("hangup_runs_cancel", runs.c.instance, postgresql_where=_cancel_wanted, sqlite_where=_cancel_wanted)
