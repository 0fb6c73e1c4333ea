"""Cancel by id, from another task, another instance and another process; and reading."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import anyio
import pytest
from starlette.types import Receive, Scope, Send

from hangup import HangupMiddleware, current_call
from hangup.journal import CancelStatus, Journal, Run, SchemaError
from hangup.testing import Peer

from ..helpers import answer
from .faults import faults
from .helpers import Working, eventually, expire, for_ever, lines, running, sql

pytestmark = pytest.mark.anyio


async def test_a_run_of_this_process_is_told_at_once(journal: Journal) -> None:
    app = Working(journal, for_ever)
    async with running(app) as (peer, run):
        reply = await journal.cancel(run.id, "enough")
        assert reply.status is CancelStatus.DELIVERED
        assert run.call.token.cause == "requested"
    record = await journal.get(run.id)
    assert record is not None
    assert (record.state, record.cause, record.reason) == ("canceled", "requested", "enough")
    assert peer.status == 499


async def test_a_run_of_another_instance_is_told(url: str) -> None:
    async with Journal(url) as one, Journal(url) as other:
        app = Working(one, for_ever)
        async with running(app) as (peer, run):
            reply = await other.cancel(run.id, "from afar", timeout=10)
            assert reply.status is CancelStatus.DELIVERED
        record = await other.get(run.id)
        assert record is not None
        assert (record.state, record.cause, record.reason) == ("canceled", "requested", "from afar")


async def test_polling_is_the_net_under_notifications(postgres_url: str) -> None:
    async with Journal(postgres_url, poll_every=0.05) as one, Journal(postgres_url) as other:
        one.mailbox._on_notification = lambda *_: None  # type: ignore[method-assign]
        await one.close()
        await one.start()
        app = Working(one, for_ever)
        async with running(app) as (peer, run):
            await eventually(lambda: one.mailbox.listening)
            reply = await other.cancel(run.id, timeout=10)
            assert reply.status is CancelStatus.DELIVERED


async def test_a_listener_whose_connection_is_killed_listens_again(postgres_url: str) -> None:
    async with Journal(postgres_url) as one, Journal(postgres_url, poll_every=60) as other:
        await eventually(lambda: other.mailbox.listening)
        await sql(one, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'")
        await eventually(lambda: not other.mailbox.listening)
        await eventually(lambda: other.mailbox.listening)
        app = Working(other, for_ever)
        async with running(app) as (peer, run):
            assert (await one.cancel(run.id, timeout=10)).status is CancelStatus.DELIVERED


async def test_what_was_asked_while_nobody_listened_is_heard(postgres_url: str) -> None:
    async with Journal(postgres_url) as journal:
        app = Working(journal, for_ever)
        async with running(app) as (peer, run):
            await sql(journal, f"UPDATE hangup_runs SET cancel_at = now(), cancel_reason = 'x' WHERE id = '{run.id}'")
            await peer.wait_for(lambda: peer.ended)
        assert run.call.token.reason == "x"


async def test_a_run_that_had_ended_stays_as_it_is(journal: Journal) -> None:
    app = Working(journal)
    await Peer().run(app)
    before = await journal.get(app.run.id)
    reply = await journal.cancel(app.run.id, "too late")
    assert (reply.status, reply.run) == (CancelStatus.ENDED, before)
    assert await journal.get(app.run.id) == before


async def test_a_run_that_nobody_knows_is_unknown(journal: Journal) -> None:
    reply = await journal.cancel("01a22b3b-4cc7-75d3-b837-a25f965a8829")
    assert (reply.status, reply.run) == (CancelStatus.UNKNOWN, None)


@pytest.mark.parametrize("id", ["", "x" * 129, "a b", "a\n", "\0"])
async def test_a_malformed_id_is_an_error(sqlite_url: str, id: str) -> None:
    async with Journal(sqlite_url) as journal:
        for ask in (journal.get, journal.cancel, journal.wait):
            with pytest.raises(ValueError, match="id takes"):
                await ask(id)


@pytest.mark.parametrize(
    "reason", ["\U0001f600" * 2000, "\x01" * 2000, "\0\ud800'\"\n"], ids=["wide", "control", "odd"]
)
async def test_a_reason_of_any_characters_reaches_another_instance(url: str, reason: str) -> None:
    async with Journal(url) as one, Journal(url) as other:
        app = Working(one, for_ever)
        async with running(app) as (peer, run):
            await other.cancel(run.id, reason)
            await peer.wait_for(lambda: peer.ended)
        record = await other.get(run.id)
        assert record is not None
        assert record.reason == record.cancel_reason == reason[:1000].replace("\0", "\ufffd").replace("\ud800", "?")


async def test_a_run_that_is_told_while_its_row_is_being_written_is_not_unknown(journal: Journal) -> None:
    app = Working(journal, for_ever)
    app.open_options = {"id": "opening"}
    replies: list[asyncio.Task[Any]] = []

    def choose(name: str, values: Any) -> str | None:
        if name == "open" and not replies:
            replies.append(asyncio.create_task(journal.cancel("opening", "at once")))
            return "raises"
        return None

    with faults(choose):
        await Peer().run(app)
        reply = await replies[0]
    assert (reply.status, reply.run, app.runs) == (CancelStatus.DELIVERED, None, [])
    assert app.outcomes[0].reason == "at once"


async def test_a_run_whose_instance_does_not_answer_is_pending_and_then_swept(url: str) -> None:
    async with Journal(url) as one, Journal(url) as other:
        app = Working(one, for_ever)
        async with running(app) as (peer, run):
            one.live.clear()  # it hears nothing any more
            reply = await other.cancel(run.id, timeout=0.3)
            assert reply.status is CancelStatus.PENDING
            assert reply.run is not None
            assert (reply.run.state, reply.run.cancel_seen_at) == ("running", None)
            await expire(one, run.id)
            await other.keeper.tick()
            assert (await other.cancel(run.id)).status is CancelStatus.ENDED
            peer.hang_up()


async def test_a_second_request_changes_nothing_of_the_first(journal: Journal) -> None:
    told = asyncio.Event()

    async def work(run: Run) -> None:
        try:
            await anyio.sleep(60)
        except asyncio.CancelledError:
            await told.wait()
            raise

    app = Working(journal, work)
    async with running(app) as (_, run):
        first = await journal.cancel(run.id, "first")
        second = await journal.cancel(run.id, "second")
        told.set()
    record = await journal.get(run.id)
    assert {first.status, second.status} == {CancelStatus.DELIVERED}
    assert record is not None
    assert (record.reason, record.cancel_reason) == ("first", "first")


async def test_a_run_of_this_process_is_told_though_the_database_is_away(sqlite_url: str) -> None:
    async with Journal(sqlite_url, open_timeout=0.2) as journal:
        app = Working(journal, for_ever)
        async with running(app) as (_, run):
            with faults(lambda name, _: "raises" if name in {"cancel", "seen"} else None):
                reply = await journal.cancel(run.id)
        assert (reply.status, reply.run) == (CancelStatus.DELIVERED, None)


async def test_a_background_task_after_the_response_is_not_reached_its_run_has_ended(journal: Journal) -> None:
    go = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await current_call().open_run("r", id="r")
        await answer(send)
        await go.wait()

    peer = Peer()
    async with peer.calling(HangupMiddleware(app, journal=journal)):
        await peer.wait_for(lambda: peer.complete)
        assert (await journal.cancel("r")).status is CancelStatus.ENDED
        go.set()


async def test_a_run_may_be_opened_after_the_response_and_is_closed_by_the_outcome(journal: Journal) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send)
        await current_call().open_run("r", id="background")

    await Peer().run(HangupMiddleware(app, journal=journal))
    record = await journal.get("background")
    assert record is not None
    assert (record.state, record.phase) == ("completed", "after_response")


# ---------------------------------------------------------------------- reading


async def test_pages_neither_skip_nor_repeat_while_runs_come(journal: Journal) -> None:
    app = Working(journal)
    for _ in range(7):
        await Peer().run(app)
    found, after = [], None
    while True:
        page = await journal.list(limit=3, after=after)
        found += [run.id for run in page.runs]
        await Peer().run(app)  # one more, in front
        after = page.next
        if after is None:
            break
    assert found == [run.id for run in reversed(app.runs[:7])]


async def test_filters_have_all_to_hold(journal: Journal) -> None:
    app = Working(journal)
    for owner in ("alice", "bob", "alice"):
        app.open_options = {"owner": owner}
        await Peer().run(app)
    page = await journal.list(owner="alice", state="completed", name="test")
    assert [run.id for run in page.runs] == [app.runs[2].id, app.runs[0].id]
    assert (await journal.list(owner="alice", state="failed")).runs == ()
    now = datetime.now(UTC)
    assert (
        len((await journal.list(opened_after=now - timedelta(hours=1), opened_before=now + timedelta(hours=1))).runs)
        == 3
    )
    assert (await journal.list(opened_before=now - timedelta(hours=1))).runs == ()


@pytest.mark.parametrize(
    "options",
    [
        {"limit": 0},
        {"limit": 1001},
        {"limit": True},
        {"state": "done"},
        {"after": "!"},
        {"after": "e30"},
        {"owner": ""},
    ],
    ids=str,
)
async def test_a_list_that_makes_no_sense_is_an_error(sqlite_url: str, options: dict[str, Any]) -> None:
    async with Journal(sqlite_url) as journal:
        with pytest.raises(ValueError, match=r"takes|is one of"):
            await journal.list(**options)


async def test_wait_returns_the_terminal_record(url: str) -> None:
    go = asyncio.Event()

    async def work(run: Run) -> None:
        await go.wait()

    async with Journal(url) as one, Journal(url) as other:
        app = Working(one, work)
        async with running(app) as (_, run):
            with pytest.raises(TimeoutError):
                await other.wait(run.id, 0.05)
            waiting = asyncio.ensure_future(other.wait(run.id, 10))
            go.set()
        assert (await waiting).state == "completed"
        with pytest.raises(LookupError, match="no run nobody"):
            await other.wait("nobody")


async def test_watch_sees_every_run_open_and_end_on_every_instance(url: str) -> None:
    seen: list[tuple[str, str]] = []

    async def follow(journal: Journal) -> None:
        async for record in journal.watch():
            seen.append((record.id, record.state))

    async with Journal(url) as one, Journal(url) as other:
        app = Working(one, for_ever)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follow, other)
            while not seen:  # until the watch is known to have begun
                await Peer().run(Working(one))
            async with running(app) as (peer, run):
                await eventually(lambda: (run.id, "running") in seen)
                peer.hang_up()
            await eventually(lambda: (run.id, "canceled") in seen)
            tasks.cancel_scope.cancel()
    assert [event for event in seen if event[0] == run.id] == [(run.id, "running"), (run.id, "canceled")]
    assert len(seen) == len(set(seen))


async def test_purge_deletes_what_ended_long_ago_and_nothing_that_runs(journal: Journal) -> None:
    app = Working(journal)
    for _ in range(5):
        await Peer().run(app)
    await sql(
        journal, f"UPDATE hangup_runs SET closed_at = '2020-01-01 00:00:00.000000' WHERE id <> '{app.runs[0].id}'"
    )
    waiting = Working(journal, for_ever)
    async with running(waiting) as (peer, run):
        assert await journal.purge(timedelta(days=30), batch=2) == 4
        assert {record.id for record in (await journal.list()).runs} == {app.runs[0].id, run.id}
        assert await journal.purge(0) == 1
        peer.hang_up()


# ---------------------------------------------------------------------- the object


async def test_closing_with_runs_going_on_is_said(sqlite_url: str, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(sqlite_url)
    app = Working(journal, for_ever)
    async with running(app) as (peer, run):
        await journal.close()
        await journal.close()
        assert any("1 runs going on" in line for line in lines(caplog, logging.WARNING))
        await journal.start()
        peer.hang_up()
    record = await journal.get(run.id)
    assert record is not None
    assert record.state == "canceled"
    await journal.close()


async def test_the_lifespan_starts_it_and_closes_it(sqlite_url: str) -> None:
    journal = Journal(sqlite_url)
    log: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for _ in range(2):
            message = await receive()
            log.append((message["type"], journal._loop is not None))
            await send({"type": f"{message['type']}.complete"})

    messages = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        log.append(message["type"])

    await HangupMiddleware(app, journal=journal)({"type": "lifespan", "asgi": {}}, receive, send)
    assert log == [
        ("lifespan.startup", True),
        "lifespan.startup.complete",
        ("lifespan.shutdown", True),
        "lifespan.shutdown.complete",
    ]
    assert journal._loop is None


async def test_it_is_closed_before_the_server_hears_that_the_shutdown_is_complete(sqlite_url: str) -> None:
    """A server stops its event loop once it has heard that: what is still open then is never closed."""
    journal = Journal(sqlite_url)
    running: list[bool] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})

    messages = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        running.append(journal._loop is not None)

    await HangupMiddleware(app, journal=journal)({"type": "lifespan", "asgi": {}}, receive, send)
    assert running == [True, False]


async def test_it_is_closed_with_the_last_of_the_applications_that_share_it(url: str) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for _ in range(2):
                await send({"type": f"{(await receive())['type']}.complete"})
        else:
            await current_call().open_run("shared", id="shared")
            await go.wait()
            await answer(send)

    go = asyncio.Event()
    journal = Journal(url)
    mounted = [HangupMiddleware(app, journal=journal) for _ in range(2)]
    async with lifespan(mounted[0]) as end_first, lifespan(mounted[1]) as end_second:
        peer = Peer()
        async with peer.calling(mounted[1]):
            await eventually(lambda: "shared" in journal.live)
            await end_first()
            assert not any(task.done() for task in journal._tasks.values())
            go.set()
        assert peer.status == 200
        assert journal._loop is not None
        await end_second()
        assert journal._loop is None


@asynccontextmanager
async def lifespan(app: Any) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """A server that has started ``app``. What is given shuts it down."""
    messages: asyncio.Queue[Any] = asyncio.Queue()
    sent: list[str] = []

    async def send(message: Any) -> None:
        sent.append(message["type"])

    async def tell(event: str) -> None:
        messages.put_nowait({"type": f"lifespan.{event}"})
        await eventually(lambda: f"lifespan.{event}.complete" in sent)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(app, {"type": "lifespan", "asgi": {}}, messages.get, send)
        await tell("startup")
        yield partial(tell, "shutdown")


async def test_a_table_it_cannot_use_fails_the_startup_where_a_server_hears_it(sqlite_url: str) -> None:
    """Servers take an exception for an application that has no lifespan, and serve it without its startup."""
    journal = Journal(sqlite_url, create=False)
    sent: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})

    async def receive() -> Any:
        return {"type": "lifespan.startup"}

    async def send(message: Any) -> None:
        sent.append(message)

    with pytest.raises(SchemaError):
        await HangupMiddleware(app, journal=journal)({"type": "lifespan", "asgi": {}}, receive, send)
    assert [message["type"] for message in sent] == ["lifespan.startup.failed"]
    assert "there is no table hangup_runs: run your migrations" in sent[0]["message"]


async def test_the_call_that_happens_to_start_it_is_not_held_or_counted_by_it(url: str) -> None:
    journal = Journal(url)
    try:
        app = Working(journal)
        await Peer().run(app)
        assert app.outcomes[0].left_running in {0, None}
    finally:
        await journal.close()


def test_one_journal_serves_one_loop_after_the_other_but_not_two_at_once(file_url: str) -> None:
    journal = Journal(file_url)

    async def start() -> None:
        await journal.start()
        assert await journal.get("x") is None

    first = asyncio.new_event_loop()
    first.run_until_complete(start())
    second = asyncio.new_event_loop()
    with pytest.raises(RuntimeError, match="in use on another event loop"):
        second.run_until_complete(start())
    first.run_until_complete(journal.close())
    second.run_until_complete(start())
    second.run_until_complete(journal.close())
    first.close()
    second.close()


def test_runs_of_a_loop_that_is_closed_are_left_to_their_leases(file_url: str) -> None:
    """Nothing runs there any more, and nobody is left to close their rows: they must not be renewed for ever."""
    journal = Journal(file_url)
    app = Working(journal)

    async def be_left_behind() -> None:
        await Peer().run(app)
        await sql(journal, "UPDATE hangup_runs SET state = 'running', closed_at = NULL, lease_until = '2020-01-01'")
        journal.live[app.run.id] = app.run
        tasks = list(journal._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await journal.database.dispose()

    async def go_on() -> None:
        async with journal:
            await journal.keeper.tick()
            record = await journal.get(app.run.id)
            assert record is not None
            assert (record.state, record.cause) == ("canceled", "instance_lost")

    asyncio.run(be_left_behind())
    asyncio.run(go_on())


def test_trio_is_told_that_sqlalchemy_does_not_run_there(file_url: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        journal = Journal(file_url)
        with pytest.raises(RuntimeError, match="needs asyncio"):
            await journal.start()
        peer = Peer()
        await peer.run(Working(journal))
        assert "needs asyncio" in str(peer.error)
        assert journal.live == {}
        assert lines(caplog) == []

    anyio.run(main, backend="trio")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("sqlite://", "needs a file"),
        ("sqlite:///:memory:", "needs a file"),
        ("sqlite:///file::memory:?uri=true", "needs a file"),
        ("sqlite:///file:runs?mode=memory&cache=shared&uri=true", "needs a file"),
        ("mysql://x/y", "not on mysql|such as"),
        ("runs.db", "such as 'sqlite:///runs.db'"),
        (None, "such as"),
        ("postgresql+psycopg2://x/y", "asyncpg, not|such as"),
        ("postgresql://host:port/x", "such as"),
        ("sqlite://runs.db", "'sqlite:///runs.db' names the file"),
    ],
)
def test_a_url_that_is_none_or_of_another_database_is_refused(url: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Journal(url)


@pytest.mark.parametrize(
    "options", [{"lease": float("inf")}, {"pool_size": 0}, {"pool_size": "5"}, {"timeout": 0}], ids=str
)
def test_numbers_that_make_no_sense_are_refused(options: Any) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} takes"):
        Journal("sqlite:///x.db", **options)


async def test_arguments_that_make_no_sense_are_named(journal: Journal) -> None:
    wrong: Any = "x"
    with pytest.raises(TypeError, match="engine_options takes a mapping"):
        Journal("sqlite:///x.db", engine_options=wrong)
    with pytest.raises(TypeError, match="create is True or False, not 'x'"):
        Journal("sqlite:///x.db", create=wrong)
    for ask in (journal.cancel, journal.wait):
        with pytest.raises(TypeError, match="timeout takes seconds, not 'x'"):
            await ask("nobody", timeout=wrong)
    with pytest.raises(TypeError, match="opened_after takes a datetime with a time zone, not 'x'"):
        await journal.list(opened_after=wrong)
    for wrong in ("x", 0):
        with pytest.raises(ValueError, match="batch takes a whole number, 1 or more"):
            await journal.purge(0, batch=wrong)


def test_a_lease_that_could_expire_between_renewals_is_refused() -> None:
    with pytest.raises(ValueError, match="renew_every takes at most half of lease"):
        Journal("sqlite:///x.db", lease=10, renew_every=6)


def test_the_middleware_takes_a_journal_and_nothing_else() -> None:
    with pytest.raises(TypeError, match=r"journal takes a hangup\.journal\.Journal"):
        HangupMiddleware(lambda *_: None, journal="sqlite:///runs.db")  # type: ignore[arg-type]
