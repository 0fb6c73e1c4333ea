"""The way to the database: one engine, one statement per transaction, every statement bounded.

Nearly every statement here is a transaction of its own, sent in autocommit: one round trip, and either it has happened
or it has not. When a statement fails or takes too long nobody can know which; so whoever sends one that writes must be
able to send it again, or to look up what became of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from sqlalchemy import Executable, RowMapping, event, inspect
from sqlalchemy.engine import URL, Connection, make_url
from sqlalchemy.exc import ArgumentError, IntegrityError, NoSuchModuleError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from ._errors import DuplicateRun, JournalError, JournalUnavailable, SchemaError
from ._schema import metadata, runs
from ._tasks import start

_DRIVERS: Final = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg", "postgres": "postgresql+asyncpg"}

#: What the databases say when the table, or a column of it, is not there. SQLSTATE on PostgreSQL, words on SQLite.
_MISSING_STATES: Final = {"42P01", "42703"}
_MISSING_WORDS: Final = ("no such table", "no such column", "has no column named")

#: Likewise when there is a row of that id. Of all they can object to in a row, nothing else is about its id.
_DUPLICATE_STATE: Final = "23505"
_DUPLICATE_WORDS: Final = "UNIQUE constraint failed"

#: What to do about what SQLite says of its file.
_REMEDIES: Final = {
    "unable to open database file": "does its directory exist, and may this process write there?",
    "readonly database": "the journal has to write: the file and its directory have to be writable, for this process",
}

#: Seconds that creating the table and its indexes may take.
PREPARE_TIMEOUT: Final = 15.0

#: An advisory lock of PostgreSQL that nobody else should have: "hangup" as a number.
_CREATE_LOCK: Final = int.from_bytes(b"hangup", "big")

Statement = tuple[Executable, Mapping[str, Any]]


class Answer:
    """What a statement gave: its rows, and how many it matched."""

    __slots__ = ("count", "rows")

    def __init__(self, rows: Sequence[RowMapping], count: int) -> None:
        self.rows = rows
        self.count = count


class Database:
    """One database. ``timeout``: seconds that one statement may take, with the way there.

    On SQLite, where one may write at a time, the wait for one's turn comes on top.
    """

    def __init__(self, url: str | URL, *, timeout: float, pool_size: int, engine_options: Mapping[str, Any]) -> None:
        self.url: URL = checked_url(url)
        self.timeout = timeout
        self.is_sqlite: bool = self.url.get_backend_name() == "sqlite"
        self._pool_size = pool_size
        self._engine_options = engine_options
        # One writer at a time is all SQLite has. Who waits here is served in order, and does not poll for the lock.
        self._turn: asyncio.Lock | None = asyncio.Lock() if self.is_sqlite else None
        self._opening: set[asyncio.Task[Any]] = set()
        self.engine: AsyncEngine = self._create_engine()

    def _create_engine(self) -> AsyncEngine:
        options: dict[str, Any] = {
            "isolation_level": "AUTOCOMMIT",
            "skip_autocommit_rollback": True,
            "pool_size": self._pool_size,
            "max_overflow": 0,
            "pool_timeout": self.timeout,
        }
        if self.is_sqlite:
            # less than ours, so that the thread is free again when we try again
            options["connect_args"] = {"timeout": 0.75 * self.timeout}
        try:
            engine = create_async_engine(self.url, **{**options, **self._engine_options})
        except ModuleNotFoundError as exc:
            extra = "journal" if self.is_sqlite else "postgres"
            raise ImportError(f"{exc.name} is not installed: pip install 'hangup[{extra}]'") from exc
        if self.is_sqlite:
            event.listen(engine.sync_engine, "connect", _prepare_sqlite)
        return engine

    async def dispose(self) -> None:
        """Close every connection; those that a database does not let go of are dropped. It may be used again."""
        # A file always lets go, if slowly, and a thread is left behind if that is not waited for.
        while self._opening:
            await asyncio.wait(self._opening)
        deadline = None if self.is_sqlite else asyncio.get_running_loop().time() + self.timeout
        for _ in range(self._pool_size):  # the one whose time is over is aborted; the next has its own connection
            with suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await self.engine.dispose()
                break
        else:
            await self.engine.dispose(close=False)
        self._turn = asyncio.Lock() if self.is_sqlite else None

    async def execute(
        self, what: str, statement: Executable, values: Mapping[str, Any], *, timeout: float | None = None
    ) -> Answer:
        """Send one statement, which is a transaction. ``what`` names it in errors.

        :raises DuplicateRun: if it violates the primary key.
        :raises SchemaError: if the table is not as it should be.
        :raises JournalUnavailable: for everything else, and if it took too long: it may have happened or not.
        """
        turn = self._turn if not getattr(statement, "is_select", False) else None
        timeout = self.timeout if timeout is None else timeout
        if turn is not None:
            await self._take(turn, what)
        try:
            async with asyncio.timeout(timeout):
                connection = await self._connect()
                try:
                    answer = await _send(connection, statement, values)
                except BaseException:
                    await connection.__aexit__(None, None, None)  # whatever is done to this task meanwhile
                    raise
                await connection.close()  # in autocommit this only hands it back, and does not suspend
                return answer
        except Exception as exc:
            raise _translated(exc, what, timeout) from exc
        finally:
            if turn is not None:
                turn.release()

    async def execute_together(self, what: str, statements: Sequence[Statement]) -> list[Answer]:
        """Send several statements in one transaction; each has to match one row, or nothing happens. See `execute`."""
        async with self._writing(what), self._translating(what), self._connected() as connection:
            try:
                await connection.exec_driver_sql("BEGIN IMMEDIATE" if self.is_sqlite else "BEGIN")
                answers = [await _send(connection, *statement) for statement in statements]
                whole = all(answer.count == 1 for answer in answers)
                await connection.exec_driver_sql("COMMIT" if whole else "ROLLBACK")
            except BaseException:
                await connection.invalidate()  # whatever it is in the middle of
                raise
            return answers

    async def _connect(self) -> AsyncConnection:
        """A connection, from the pool or new.

        On SQLite one that has to be opened is opened to the end, whatever becomes of who waits for it, and handed back:
        aiosqlite does not close what is dropped half open.
        """
        if not self.is_sqlite:
            return await self.engine.connect()
        opening = start(self._open())
        if opening.done():
            return opening.result()
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(self._hand_back)
            raise

    async def _open(self) -> AsyncConnection:
        return await self.engine.connect()

    def _hand_back(self, opening: asyncio.Task[AsyncConnection]) -> None:
        if not opening.cancelled() and opening.exception() is None:
            closing = asyncio.ensure_future(opening.result().close())
            self._opening.add(closing)
            closing.add_done_callback(self._opening.discard)

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[AsyncConnection]:
        connection = await self._connect()
        try:
            yield connection
        finally:
            await connection.__aexit__(None, None, None)  # whatever is done to this task meanwhile

    @asynccontextmanager
    async def _writing(self, what: str) -> AsyncIterator[None]:
        """One's turn to write, where that has to be waited for."""
        turn = self._turn
        if turn is not None:
            await self._take(turn, what)
        try:
            yield
        finally:
            if turn is not None:
                turn.release()

    async def _take(self, turn: asyncio.Lock, what: str) -> None:
        """Wait for one's turn, as long as two statements may take at most."""
        if not turn.locked():
            await turn.acquire()
            return
        try:
            async with asyncio.timeout(2 * self.timeout):
                await turn.acquire()
        except TimeoutError:
            text = f"{what}: the database was busy with other writes for {2 * self.timeout:g} s"
            raise JournalUnavailable(text) from None

    async def prepare(self, *, create: bool) -> None:
        """Create the table if it is not there (and ``create``), and see that it is the one we know.

        :raises SchemaError: if not.
        :raises JournalUnavailable: if the database cannot be reached.
        """
        what = f"create the table in {self.url.render_as_string()}"
        translating = self._translating(what, PREPARE_TIMEOUT)
        async with self._writing(what), translating, self._connected() as connection:
            if create:
                await self._create(connection)
            missing = await connection.run_sync(_missing_columns)
        if missing is None:
            raise SchemaError(f"there is no table {runs.name}: run your migrations, or use Journal(create=True)")
        if missing:
            raise SchemaError(
                f"the table {runs.name} is of an older version: it lacks {', '.join(missing)}. Migrate it to "
                "hangup.journal.metadata, or rename it and have a new one made"
            )

    async def _create(self, connection: AsyncConnection) -> None:
        if await connection.run_sync(_missing_columns) is not None:
            return
        try:  # in a transaction, and one instance after the other: the table comes with its indexes or not at all
            await connection.exec_driver_sql("BEGIN IMMEDIATE" if self.is_sqlite else "BEGIN")
            if not self.is_sqlite:
                await connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_CREATE_LOCK})")
            await connection.run_sync(metadata.create_all)
            await connection.exec_driver_sql("COMMIT")
        except BaseException:
            await connection.invalidate()
            raise

    @asynccontextmanager
    async def _translating(self, what: str, timeout: float | None = None) -> AsyncIterator[None]:
        timeout = self.timeout if timeout is None else timeout
        try:
            async with asyncio.timeout(timeout):
                yield
        except Exception as exc:
            raise _translated(exc, what, timeout) from exc


def _translated(exc: Exception, what: str, timeout: float) -> JournalError:
    """What the callers know ``exc`` as."""
    orig = getattr(exc, "orig", None)
    if isinstance(exc, IntegrityError):
        if getattr(orig, "sqlstate", None) == _DUPLICATE_STATE or _DUPLICATE_WORDS in str(orig):
            return DuplicateRun(f"{what}: {orig}")
        return SchemaError(f"{what}: the table {runs.name} is of another version, and refuses the row: {orig}")
    if isinstance(exc, TimeoutError):
        return JournalUnavailable(f"{what}: the database took longer than {timeout:g} s")
    if _says_missing(exc):
        return SchemaError(f"{what}: the table {runs.name} is missing or of an older version: {orig or exc}")
    remedy = next((f" ({remedy})" for words, remedy in _REMEDIES.items() if words in str(orig)), "")
    return JournalUnavailable(f"{what}: {type(exc).__name__}: {orig or exc}{remedy}")


async def _send(connection: AsyncConnection, statement: Executable, values: Mapping[str, Any]) -> Answer:
    result = await connection.execute(statement, values)
    return Answer(result.mappings().all() if result.returns_rows else (), result.rowcount)


def _missing_columns(connection: Connection) -> list[str] | None:
    """The columns that are not there; None if the whole table is not."""
    inspector = inspect(connection)
    if not inspector.has_table(runs.name):
        return None
    there = {column["name"] for column in inspector.get_columns(runs.name)}
    return [column.name for column in runs.columns if column.name not in there]


def _says_missing(exc: Exception) -> bool:
    orig = getattr(exc, "orig", None)
    return getattr(orig, "sqlstate", None) in _MISSING_STATES or (
        orig is not None and any(words in str(orig) for words in _MISSING_WORDS)
    )


def _prepare_sqlite(connection: Any, record: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode = WAL")
    # In WAL mode the default, NORMAL, may lose the last commits when the power fails. A row must not say less than
    # what the client was told.
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.close()


def checked_url(url: str | URL) -> URL:
    """The URL with an asyncio driver, or an error that says what is expected."""
    try:
        parsed = make_url(url)
        driver = _DRIVERS.get(parsed.drivername)
        if driver is not None:
            parsed = parsed.set(drivername=driver)
        backend = parsed.get_backend_name()
        parsed.get_dialect()
    except (ArgumentError, NoSuchModuleError, AttributeError, ValueError) as exc:
        raise ValueError(f"Journal takes a database URL such as 'sqlite:///runs.db', not {url!r}") from exc
    if backend not in {"sqlite", "postgresql"}:
        raise ValueError(f"Journal works on SQLite and PostgreSQL, not on {backend}")
    if parsed.drivername not in set(_DRIVERS.values()):
        raise ValueError(f"Journal uses aiosqlite and asyncpg, not {parsed.drivername}")
    in_memory = ":memory:" in (parsed.database or ":memory:") or parsed.query.get("mode") == "memory"
    if backend == "sqlite" and in_memory:
        slashes = f"; 'sqlite:///{parsed.host}' names the file (three slashes)" if parsed.host else ""
        raise ValueError(
            f"Journal needs a file: a database in memory dies with its process, and the runs with it{slashes}"
        )
    return parsed
