"""Leases: whose they are, who sweeps, and what a database that is away does."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import sqlite3
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import asyncpg  # type: ignore[import-untyped]
import pytest
from sqlalchemy import text

from hangup import step
from hangup.journal import Journal, JournalUnavailable, Run, metadata
from hangup.journal._database import Database
from hangup.testing import Peer

from .faults import KINDS, faults
from .helpers import Working, count_rewrites, eventually, expire, for_ever, lines, rewrites, running, sql
from .postgres import PostgresServer

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]


async def state_of(journal: Journal, id: str) -> Any:
    record = await journal.get(id)
    return record and (record.state, record.cause)


async def test_a_run_that_nobody_renews_is_swept_by_any_instance(url: str) -> None:
    async with Journal(url) as one, Journal(url) as other:
        app = Working(one, for_ever)
        async with running(app) as (peer, run):
            one.live.clear()  # as if the process had died
            await expire(one, run.id)
            await other.keeper.tick()
            assert await state_of(other, run.id) == ("canceled", "instance_lost")
            peer.hang_up()
        assert await state_of(other, run.id) == ("canceled", "instance_lost")


async def test_a_run_lost_with_an_effect_in_flight_is_ambiguous(url: str) -> None:
    async def work(run: Run) -> None:
        async with step("charge", effect=True):
            await anyio.sleep(60)

    async with Journal(url) as journal:
        app = Working(journal, work)
        async with running(app) as (peer, run):

            async def noted() -> bool:
                record = await journal.get(run.id)
                return record is not None and record.effects == ("charge",)

            await eventually(noted)
            journal.live.clear()
            await expire(journal, run.id)
            await journal.keeper.sweep()
            record = await journal.get(run.id)
            assert record is not None
            assert (record.state, record.cause, record.effects) == ("ambiguous", "instance_lost", ("charge",))
            peer.hang_up()


async def test_an_effect_entered_without_async_is_noted_soon_after(url: str) -> None:
    async def work(run: Run) -> None:
        with step("charge", effect=True):
            await anyio.sleep(60)

    async with Journal(url) as journal:
        app = Working(journal, work)
        async with running(app) as (peer, run):

            async def noted() -> bool:
                record = await journal.get(run.id)
                return record is not None and record.effects == ("charge",)

            await eventually(noted)
            peer.hang_up()
        assert await state_of(journal, run.id) == ("ambiguous", "client_disconnect")


async def test_renewing_keeps_every_run_of_this_instance_in_one_statement(url: str) -> None:
    statements: list[str] = []

    def choose(name: str, values: Any) -> str | None:
        statements.append(name)
        return None

    async with Journal(url) as journal:
        app = Working(journal, for_ever)
        async with running(app) as (first, a), running(app) as (second, b):
            await expire(journal, a.id, b.id)
            with faults(choose):
                await journal.keeper.tick()
            assert statements.count("renew") == 1
            records = [await journal.get(run.id) for run in (a, b)]
            assert all(r is not None and r.state == "running" and r.lease_until is not None for r in records)
            assert all(r.lease_until > r.opened_at for r in records if r is not None and r.lease_until is not None)
            first.hang_up()
            second.hang_up()


async def test_a_row_another_has_closed_is_not_resurrected_and_the_run_is_told(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with Journal(url) as one, Journal(url) as other:
        app = Working(one, for_ever)
        async with running(app) as (peer, run):
            await expire(one, run.id)
            await other.keeper.sweep()
            await one.keeper.tick()
            await peer.wait_for(lambda: peer.ended)
        assert peer.status == 499
        assert await state_of(one, run.id) == ("canceled", "instance_lost")
        assert any("was closed by another while it was running here" in line for line in lines(caplog, logging.ERROR))


async def test_a_run_that_was_swept_while_it_worked_cannot_report_success(url: str) -> None:
    go = asyncio.Event()

    async def work(run: Run) -> None:
        await go.wait()

    async with Journal(url) as one, Journal(url) as other:
        app = Working(one, work)
        async with running(app) as (peer, run):
            await expire(one, run.id)
            await other.keeper.sweep()
            go.set()
        assert peer.status == 503
        assert b"already says canceled (instance_lost)" in peer.body
        assert await state_of(one, run.id) == ("canceled", "instance_lost")


async def test_of_two_instances_that_close_one_run_at_once_one_wins_and_the_client_is_told_which(url: str) -> None:
    """The run succeeds while another sweeps it: again and again, in either order."""
    async with Journal(url) as one, Journal(url) as other:
        await count_rewrites(one)
        for number in range(45):
            go = asyncio.Event()
            app = Working(one, lambda run, go=go: go.wait())  # type: ignore[misc]
            async with running(app) as (peer, run):
                await expire(one, run.id)
                if number % 3 == 0:
                    await other.keeper.sweep()
                go.set()
                if number % 3 == 2:
                    await eventually(lambda: run.closing, pause=0)
                await other.keeper.sweep()
            told = (peer.status, *await state_of(other, run.id))
            swept = (503, "canceled", "instance_lost")
            assert told == swept or (number % 3 and told == (200, "completed", None)), number
        assert await rewrites(one) == 0


async def test_while_the_database_is_away_runs_go_on_and_it_is_said_once(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with Journal(url) as journal:
        app = Working(journal, for_ever)
        async with running(app) as (peer, run):
            with faults(lambda name, _: "raises"):
                await journal.keeper.tick()
                await journal.keeper.tick()
            assert [line for line in lines(caplog) if "1 runs go on" in line and "away" in line]
            assert sum("is away" in line for line in lines(caplog)) == 1
            assert not peer.ended
            assert not run.call.token.canceled
            await journal.keeper.tick()
            assert sum("is back" in line for line in lines(caplog)) == 1
            peer.hang_up()
        assert await state_of(journal, run.id) == ("canceled", "client_disconnect")


async def test_who_could_not_renew_does_not_sweep_before_the_others_had_time_to(url: str) -> None:
    async with Journal(url) as one, Journal(url) as other:
        app = Working(one, for_ever)
        async with running(app) as (peer, run):
            await expire(one, run.id)
            with faults(lambda name, _: "raises"):
                await other.keeper.tick()
            await other.keeper.tick()  # the first after the outage
            assert await state_of(one, run.id) == ("running", None)
            await one.keeper.tick()
            peer.hang_up()


async def test_after_a_machine_has_slept_nothing_is_swept_before_the_living_could_renew(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """All leases have ended at once by the clock of the database: it was put forward, or everybody was asleep."""
    async with Journal(url) as one, Journal(url) as other:
        app, dead = Working(one, for_ever), Working(one, for_ever)
        async with running(app) as (peer, run), running(dead) as (ghost, lost):
            await other.keeper.tick()
            other.keeper._looked = await other.store.now() - timedelta(hours=1)
            del one.live[lost.id]
            await expire(one, run.id, lost.id)
            await other.keeper.tick()
            assert await state_of(one, run.id) == await state_of(one, lost.id) == ("running", None)
            assert any("3600 s since the last renewal" in line for line in lines(caplog))
            await one.keeper.tick()
            other.keeper._sweep_from = 0.0  # as if that time had passed
            other.keeper._looked = await other.store.now() - timedelta(hours=1)  # it is late again: not for ever
            await other.keeper.tick()
            assert await state_of(one, run.id) == ("running", None)
            assert await state_of(one, lost.id) == ("canceled", "instance_lost")
            peer.hang_up()
            ghost.hang_up()


async def test_whoever_comes_first_and_is_interrupted_leaves_a_journal_that_works(url: str) -> None:
    go = asyncio.Event()
    journal = Journal(url)
    prepare = journal.database.prepare

    async def slowly(*, create: bool) -> None:
        await go.wait()
        await prepare(create=create)

    journal.database.prepare = slowly  # type: ignore[method-assign]
    app = Working(journal, for_ever)
    first, second = Peer(), Peer()
    try:
        async with first.calling(app):
            await eventually(lambda: len(journal.live) == 1)
            async with second.calling(app):
                await eventually(lambda: len(journal.live) == 2)
                first.hang_up()
                await first.wait_for(lambda: first.ended)
                go.set()
                await eventually(lambda: app.runs)
                assert sorted(journal._tasks) == ["cancels", "leases"]
                assert not any(task.done() for task in journal._tasks.values())
                second.hang_up()
    finally:
        await journal.close()


async def test_what_renews_leases_goes_on_although_somebody_has_cancelled_it(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with Journal(url) as journal:
        cancelled = list(journal._tasks.values())
        for task in cancelled:
            task.cancel()
        await asyncio.wait(cancelled)
        await Peer().run(Working(journal))
        assert not any(task.done() for task in journal._tasks.values())
        assert any("what looks after leases was cancelled, and is started again" in line for line in lines(caplog))


async def test_a_row_that_could_not_be_closed_in_time_is_closed_when_the_database_is_back(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with Journal(url, close_timeout=0.3) as journal:
        app = Working(journal, for_ever)
        with faults(lambda name, _: "raises" if name == "close" else None):
            async with running(app) as (peer, run):
                peer.hang_up()
        assert await state_of(journal, run.id) == ("running", None)
        assert any(f"run {run.id} could not be closed as canceled" in line for line in logged_errors(caplog))
        await journal.keeper.tick()
        assert await state_of(journal, run.id) == ("canceled", "client_disconnect")
        assert journal.unsettled == {}


async def test_a_row_that_can_never_be_written_keeps_no_other_from_being_settled_and_swept(url: str) -> None:
    async with Journal(url, close_timeout=0.2) as journal:
        app = Working(journal)
        with faults(lambda name, _: "raises" if name == "close" else None):
            for id in ("never", "later"):
                app.open_options = {"id": id}
                await Peer().run(app)
        with faults(lambda name, values: "raises" if name == "close" and values["run"] == "never" else None):
            await expire(journal, "never")
            await journal.keeper.tick()
            assert await state_of(journal, "later") == ("failed", None)
            assert await state_of(journal, "never") == ("canceled", "instance_lost")
        await journal.keeper.tick()
        assert journal.unsettled == {}


async def test_a_success_that_cannot_be_written_is_none(url: str) -> None:
    async with Journal(url, close_timeout=0.3) as journal:
        app = Working(journal)
        peer = Peer()
        with faults(lambda name, _: "raises" if name == "close" else None):
            await peer.run(app)
        assert peer.status == 503
        assert app.outcomes[0].state == "failed"
        await journal.keeper.tick()
        assert await state_of(journal, app.run.id) == ("failed", None)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_commit_whose_fate_cannot_be_looked_up_in_time_is_called_unknown_and_can_be_asked_for(
    url: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The database goes away with the closing commit, and stays away until it is too late to know what became of it."""
    tries: list[str] = []

    def choose(name: str, values: Any) -> str:
        tries.append(name)
        return kind if tries.count("close") == 1 and name == "close" else "raises"

    async with Journal(url, timeout=0.1, close_timeout=0.3, renew_every=10) as journal:
        go = asyncio.Event()
        app = Working(journal, lambda run: go.wait())
        async with running(app) as (peer, run):
            with faults(choose):
                go.set()
                await peer.wait_for(lambda: peer.ended)
        assert peer.status == 503
        assert peer.body.decode().startswith(f"It is not known whether run {run.id} has been recorded as completed")
        assert dict(peer.sent[0]["headers"])[b"retry-after"] == b"1"
        assert any(f"run {run.id} could not be closed as failed" in line for line in logged_errors(caplog))
        await eventually(lambda: _settled(journal))
        landed = kind in {"lost", "late"}
        assert await state_of(journal, run.id) == ("completed" if landed else "failed", None)
        said = f"the row of run {run.id} already says completed (no cause): the client was not told"
        assert any(said in line for line in lines(caplog, logging.ERROR)) is landed


async def _settled(journal: Journal) -> bool:
    await journal.keeper.tick()
    return journal.unsettled == {}


def logged_errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged at ERROR: each with the exception it was logged for."""
    return [
        f"{record.getMessage()}: {record.exc_info[1]}" if record.exc_info else record.getMessage()
        for record in caplog.records
        if record.levelno == logging.ERROR
    ]


async def test_a_run_that_cannot_be_written_is_not_started(url: str, caplog: pytest.LogCaptureFixture) -> None:
    began: list[Run] = []

    async def work(run: Run) -> None:
        began.append(run)

    async with Journal(url, open_timeout=0.2) as journal:
        app = Working(journal, work)
        app.open_options = {"id": "nowhere"}
        peer = Peer(headers=[("accept", "application/json")])
        with faults(lambda name, _: "raises" if name == "open" else None):
            await peer.run(app)
        assert began == []
        assert isinstance(app.outcomes[0].error.__cause__, JournalUnavailable)
        assert peer.status == 503
        assert b"could not be recorded" in peer.body
        assert dict(peer.sent[0]["headers"])[b"retry-after"] == b"1"
        assert any("run nowhere (test) could not be opened" in line for line in lines(caplog, logging.ERROR))
        assert await journal.get("nowhere") is None


async def test_clocks_that_differ_do_not_matter(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every time in a row is the database's: ours may be an hour off."""
    import time

    async with Journal(sqlite_url) as journal:
        honest = time.time
        monkeypatch.setattr(time, "time", lambda: honest() - 3600)
        app = Working(journal, for_ever)
        async with running(app) as (peer, run):
            await journal.keeper.tick()
            await journal.keeper.sweep()
            assert await state_of(journal, run.id) == ("running", None)
            peer.hang_up()


# ---------------------------------------------------------------------- databases that really fail


@pytest.fixture
async def own_server() -> Any:
    server = PostgresServer()
    try:
        await asyncio.to_thread(server.start)
        yield server
    finally:
        await asyncio.to_thread(server.remove)


async def test_postgresql_that_dies_and_comes_back_loses_no_run(own_server: PostgresServer) -> None:
    go = asyncio.Event()

    async def work(run: Run) -> None:
        await go.wait()

    async with Journal(own_server.url(), timeout=1, open_timeout=1, renew_every=0.3) as journal:
        app = Working(journal, work)
        async with running(app) as (peer, run):
            await asyncio.to_thread(own_server.stop, signal.SIGQUIT)
            refused = Peer()
            await refused.run(app)
            assert refused.status == 503  # down at open
            await asyncio.to_thread(own_server.start)
            await eventually(lambda: journal.mailbox.listening)
            await journal.keeper.tick()
            go.set()
        assert peer.status == 200
        assert await state_of(journal, run.id) == ("completed", None)


async def test_postgresql_that_is_down_at_the_close_gives_no_success(own_server: PostgresServer) -> None:
    async def work(run: Run) -> None:
        await asyncio.to_thread(own_server.stop, signal.SIGQUIT)

    async with Journal(own_server.url(), timeout=0.5, close_timeout=1) as journal:
        app = Working(journal, work)
        peer = Peer()
        await peer.run(app)
        assert peer.status == 503
        await asyncio.to_thread(own_server.start)
        await eventually(lambda: journal.mailbox.listening)
        await journal.keeper.tick()
        assert await state_of(journal, app.run.id) == ("failed", None)


async def test_postgresql_that_stands_still_does_not_hold_up_the_end(own_server: PostgresServer) -> None:
    journal = Journal(own_server.url(), timeout=0.5, close_timeout=0.5)
    await Peer().run(Working(journal))
    await eventually(lambda: journal.mailbox.listening)
    with own_server.standing_still(), anyio.fail_after(15):
        await journal.close()


async def test_a_connection_killed_mid_commit_is_looked_up_not_guessed(postgres_url: str) -> None:
    """The server commits, and the connection is gone before it can say so."""
    async with Journal(postgres_url) as journal:
        await sql(
            journal,
            "CREATE FUNCTION die() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN IF OLD.state = 'running' AND NEW.state = 'completed' AND NOT EXISTS (SELECT FROM died) THEN "
            "PERFORM pg_terminate_backend(pg_backend_pid()); END IF; RETURN NULL; END $$",
        )
        await sql(journal, "CREATE TABLE died (id TEXT)")
        await sql(
            journal,
            "CREATE CONSTRAINT TRIGGER dying AFTER UPDATE ON hangup_runs DEFERRABLE INITIALLY DEFERRED "
            "FOR EACH ROW EXECUTE FUNCTION die()",
        )
        tries: list[str] = []

        def choose(name: str, values: Any) -> str | None:
            tries.append(name)
            return None

        async def work(run: Run) -> None:
            asyncio.get_running_loop().call_later(
                0.3, lambda: journal.hold_quietly(sql(journal, "DROP TRIGGER dying ON hangup_runs"))
            )

        app = Working(journal, work)
        peer = Peer()
        with faults(choose):
            await peer.run(app)
        assert tries.count("close") >= 2
        assert peer.status == 200
        assert await state_of(journal, app.run.id) == ("completed", None)


async def test_a_full_disk_refuses_the_run_and_spoils_nothing(sqlite_url: str) -> None:
    async with Journal(sqlite_url, open_timeout=0.5, pool_size=1) as journal:
        app = Working(journal)
        await Peer().run(app)
        async with journal.database.engine.connect() as connection:
            pages = (await connection.exec_driver_sql("PRAGMA page_count")).scalar_one()
        from sqlalchemy import event

        @event.listens_for(journal.database.engine.sync_engine, "checkout")
        def fill(connection: Any, record: Any, proxy: Any) -> None:
            connection.cursor().execute(f"PRAGMA max_page_count = {pages}")

        app.open_options = {"attributes": {"large": "x" * 60000}}
        peer = Peer()
        await peer.run(app)
        assert peer.status == 503
        assert "disk is full" in str(app.outcomes[1].error.__cause__)
        assert [run.state for run in (await journal.list()).runs] == ["completed"]


async def test_a_table_that_was_dropped_is_named(url: str) -> None:
    async with Journal(url) as journal:
        await sql(journal, "DROP TABLE hangup_runs")
        app = Working(journal)
        peer = Peer()
        await peer.run(app)
        assert peer.status == 503
        assert "hangup_runs is missing or of an older version" in str(app.outcomes[0].error.__cause__)


async def test_a_table_of_an_older_version_is_refused_at_the_start_and_the_columns_are_named(url: str) -> None:
    async with Journal(url) as journal:
        for index in ("hangup_runs_cancel",):
            await sql(journal, f"DROP INDEX {index}")
        await sql(journal, "ALTER TABLE hangup_runs DROP COLUMN cancel_reason")
    with pytest.raises(Exception, match=r"of an older version: it lacks cancel_reason\. Migrate"):
        await Journal(url).start()


async def test_a_table_of_a_newer_version_that_wants_more_is_named(url: str) -> None:
    async with Journal(url) as journal:
        newer = "shiny TEXT NOT NULL"
        if journal.database.is_sqlite:  # it adds no such column
            await sql(journal, "DROP TABLE hangup_runs")
            await sql(
                journal, f"CREATE TABLE hangup_runs ({', '.join(metadata.tables['hangup_runs'].c.keys())}, {newer})"
            )
        else:
            await sql(journal, f"ALTER TABLE hangup_runs ADD COLUMN {newer}")
        app = Working(journal)
        peer = Peer()
        await peer.run(app)
        assert peer.status == 503
        assert re.search(r"hangup_runs is of another version, .*shiny", str(app.outcomes[0].error.__cause__))


@pytest.mark.usefixtures("sqlite_url")
@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("/no/runs.db", r"/no/runs\.db: .*does its directory exist"),
        ("/here.db?mode=ro&uri=true", r"/here\.db\?mode=ro&uri=true: .*the journal has to write"),
    ],
)
async def test_a_file_that_cannot_be_opened_is_named_and_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str, says: str
) -> None:
    with sqlite3.connect(tmp_path / "here.db") as there:
        there.execute("CREATE TABLE x (y)")
    there.close()
    async with Journal(f"sqlite:///file:{tmp_path}{place}"):
        [line] = lines(caplog, logging.ERROR)
    assert re.search(says, line)


async def test_without_create_a_missing_table_is_refused_at_the_start(url: str) -> None:
    journal = Journal(url, create=False)
    with pytest.raises(Exception, match="there is no table hangup_runs: run your migrations"):
        await journal.start()
    await journal.database.dispose()


async def test_without_create_the_table_that_a_migration_has_made_will_do(url: str) -> None:
    async with Journal(url) as journal:
        await sql(journal, "DROP TABLE hangup_runs")
        async with journal.database.engine.connect() as connection:  # as Alembic does, given the metadata
            await connection.run_sync(metadata.create_all)
    async with Journal(url, create=False) as journal:
        app = Working(journal)
        peer = Peer()
        await peer.run(app)
        assert peer.status == 200
        assert await state_of(journal, app.run.id) == ("completed", None)


@pytest.mark.usefixtures("sqlite_url")
async def test_a_database_that_is_away_at_the_start_is_no_reason_not_to_start(tmp_path: Path) -> None:
    place = tmp_path / "later"
    async with Journal(f"sqlite:///{place}/runs.db", open_timeout=0.2) as journal:
        app = Working(journal)
        peer = Peer()
        await peer.run(app)
        assert peer.status == 503
        place.mkdir()
        peer = Peer()
        await peer.run(app)
        assert peer.status == 200


async def test_many_instances_starting_at_once_make_one_table(url: str) -> None:
    journals = [Journal(url) for _ in range(6)]
    await asyncio.gather(*(journal.start() for journal in journals))
    await asyncio.gather(*(journal.close() for journal in journals))


async def test_every_connection_is_let_go_of_though_there_is_no_time_to_say_goodbye(
    postgres_url: str, postgres_server: PostgresServer
) -> None:
    """A machine that stands still meanwhile, or a server that does not answer."""
    database = Database(postgres_url, timeout=10, pool_size=4, engine_options={})
    sleep = text("SELECT pg_sleep(0.05)")
    await asyncio.gather(*(database.execute("sleep", sleep, {}) for _ in range(4)))
    assert await _clients(postgres_server) == 4
    database.timeout = 0.01
    disposing = asyncio.create_task(database.dispose())
    await asyncio.sleep(0)
    time.sleep(0.02)
    await disposing
    await eventually(lambda: _no_clients(postgres_server), timeout=2)


async def _no_clients(server: PostgresServer) -> bool:
    return await _clients(server) == 0


async def _clients(server: PostgresServer) -> int:
    """How many clients the server has, but for the one that asks."""
    connection = await asyncpg.connect(**server.dsn())
    try:
        count: int = await connection.fetchval(
            "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
        )
    finally:
        await connection.close()
    return count
