"""Opening and closing: what the row says, and when."""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import threading
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from sqlalchemy import text
from starlette.types import Message, Receive, Scope, Send

from hangup import HangupMiddleware, HookFailure, add_finalizer, before_success, current_call, step
from hangup.journal import DuplicateRun, Journal, JournalUnavailable, Run, RunEnded
from hangup.journal._database import Database
from hangup.testing import Peer, WebSocketPeer

from ..helpers import END, START, answer, chunk, watched
from .faults import KINDS, faults
from .helpers import Working, eventually, expire, for_ever, lines, running, sql

pytestmark = pytest.mark.anyio


async def test_the_state_of_a_run_follows_from_its_call_and_is_not_for_the_handler_to_set(journal: Journal) -> None:
    async def work(run: Run) -> None:
        with pytest.raises(AttributeError, match="state"):
            setattr(run, "state", "failed")  # noqa: B010 - the type checker would not have it

    app = Working(journal, work)
    await Peer().run(app)
    row = await journal.get(app.run.id)
    assert row is not None
    assert app.run.state == row.state == "completed"


async def test_the_row_says_running_before_the_work_begins_and_completed_before_the_client_sees_success(
    journal: Journal,
) -> None:
    seen: dict[str, Any] = {}

    async def work(run: Run) -> None:
        seen["at work"] = await journal.get(run.id)
        run.result = {"answer": 42}

    app = Working(journal, work)
    app.open_options = {"owner": "alice", "attributes": {"question": "?"}}

    class Client(Peer):
        async def send(self, message: Message) -> None:
            if message["type"] == "http.response.start":
                seen["at the answer"] = await journal.get(app.run.id)
            await super().send(message)

    peer = Client()
    await peer.run(app)
    assert (peer.status, peer.body) == (200, b"done")
    before, after = seen["at work"], seen["at the answer"]
    assert (before.state, before.ended, before.owner, before.attributes) == (
        "running",
        False,
        "alice",
        {"question": "?"},
    )
    assert before.lease_until > before.opened_at
    assert (after.state, after.cause, after.http_status, after.result) == ("completed", None, 200, {"answer": 42})
    assert (after.phase, after.delivered, after.lease_until) == ("after_response", True, None)
    assert after.closed_at >= after.opened_at
    assert await journal.get(app.run.id) == after
    assert journal.live == {}
    assert uuid.UUID(after.id).version == 7


async def test_a_stream_is_completed_before_its_last_frame(journal: Journal) -> None:
    states: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await current_call().open_run("stream", id="the-stream")
        await send(START)
        await send(chunk(b"a"))
        await send(END)

    class Client(Peer):
        async def send(self, message: Message) -> None:
            record = await journal.get("the-stream")
            states.append(record.state if record else None)
            await super().send(message)

    await Client().run(HangupMiddleware(app, journal=journal))
    assert states == ["running", "running", "completed"]


async def test_a_hang_up_closes_the_row_as_canceled_with_what_was_reached(journal: Journal) -> None:
    async def work(run: Run) -> None:
        await run.checkpoint({"tokens": 17})
        await anyio.sleep(60)

    app = Working(journal, work)
    async with running(app) as (peer, run):
        await eventually(lambda: _result_is(journal, run, {"tokens": 17}))
        peer.hang_up()
    record = await journal.get(run.id)
    assert record is not None
    assert (record.state, record.cause, record.phase) == ("canceled", "client_disconnect", "before_response")
    assert (record.http_status, record.delivered, record.result) == (None, False, {"tokens": 17})


async def _result_is(journal: Journal, run: Run, value: Any) -> bool:
    record = await journal.get(run.id)
    return record is not None and bool(record.result == value)


async def test_a_failure_is_written_with_its_error(journal: Journal) -> None:
    async def work(run: Run) -> None:
        raise ValueError("no \0 such \ud800 model" + "x" * 5000)

    app = Working(journal, work)
    await Peer().run(app)
    record = await journal.get(app.run.id)
    assert record is not None
    assert (record.state, record.cause) == ("failed", None)
    assert record.error is not None
    assert record.error.startswith("ValueError: no \ufffd such ? model")
    assert len(record.error) == 2000


async def test_an_answer_of_400_or_more_closes_the_row_with_its_status(journal: Journal) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await current_call().open_run("refused", id="refused")
        await answer(send, status=409)

    peer = Peer()
    await peer.run(HangupMiddleware(app, journal=journal))
    record = await journal.get("refused")
    assert record is not None
    assert (peer.status, record.state, record.http_status) == (409, "completed", 409)


async def test_the_row_is_written_after_every_other_hook_has_succeeded(journal: Journal) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await current_call().open_run("hooked", id="hooked")

        @before_success
        async def late() -> None:
            raise HookFailure("no", status=502)

        await answer(send)

    peer = Peer()
    await peer.run(HangupMiddleware(app, journal=journal))
    record = await journal.get("hooked")
    assert record is not None
    assert (peer.status, record.state, record.http_status) == (502, "failed", 502)


async def test_a_run_that_a_hook_opens_is_completed_before_success_is_visible_too(journal: Journal) -> None:
    states: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        @before_success
        async def save() -> None:
            await current_call().open_run("hook", id="hook")

        await answer(send)

    class Client(Peer):
        async def send(self, message: Message) -> None:
            record = await journal.get("hook")
            states.append(record and record.state)
            await super().send(message)

    await Client().run(HangupMiddleware(app, journal=journal))
    assert states == ["completed", "completed"]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("fault", "state"), [(None, "completed"), ("raises", "failed")])
async def test_a_success_that_nobody_waits_for_any_more_is_written_like_any(
    url: str, streaming: bool, fault: str | None, state: str
) -> None:
    """Policy finish: the client has left, and the work goes on to its end."""
    peer = Peer()
    outcomes: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await current_call().open_run("late", id="late")
        if streaming:
            await send(START)
        await watched(peer)
        peer.hang_up()
        await eventually(lambda: current_call().life.left)
        await (send(END) if streaming else answer(send))

    def choose(name: str, values: Any) -> str | None:
        return fault if name == "close" and values["new_state"] == "completed" else None

    async with Journal(url, close_timeout=0.3) as journal:
        with faults(choose):
            await peer.run(HangupMiddleware(app, policy="finish", journal=journal, observers=[outcomes.append]))
        record = await journal.get("late")
        assert record is not None
        assert (record.state, record.delivered, outcomes[0].state) == (state, False, state)
        assert (journal.live, journal._together) == ({}, {})


async def test_a_stop_while_success_is_being_written_comes_too_late(journal: Journal) -> None:
    """The row decides: once it says completed so does the response."""
    app = Working(journal)
    tokens: list[bool] = []

    def choose(name: str, values: Any) -> str | None:
        if name == "close":
            tokens.append(app.run.call.cancel("too late"))
        return None

    peer = Peer()
    with faults(choose):
        await peer.run(app)
    record = await journal.get(app.run.id)
    assert record is not None
    assert tokens == [True]
    assert (peer.status, peer.complete, record.state) == (200, True, "completed")
    assert app.outcomes[0].state == "completed"


async def test_a_client_that_leaves_while_success_is_being_written_leaves_a_completed_run(journal: Journal) -> None:
    peer = Peer()

    async def work(run: Run) -> None:
        await watched(peer)

    app = Working(journal, work)

    def choose(name: str, values: Any) -> str | None:
        if name == "close":
            peer.hang_up()
        return None

    with faults(choose):
        await peer.run(app)
    record = await journal.get(app.run.id)
    assert record is not None
    assert record.state == app.outcomes[0].state == "completed"
    assert not app.outcomes[0].delivered


async def test_an_application_that_answers_after_it_was_told_to_stop_is_canceled_in_the_row_too(
    journal: Journal,
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await current_call().open_run("stubborn", id="stubborn")
        current_call().cancel("stop")
        try:
            await anyio.sleep(60)
        except asyncio.CancelledError:
            await answer(send, body=b"partial")

    outcomes: list[Any] = []
    await Peer().run(HangupMiddleware(app, journal=journal, observers=[outcomes.append]))
    record = await journal.get("stubborn")
    assert record is not None
    assert record.state == outcomes[0].state == "canceled"
    assert (record.cause, record.reason, record.http_status) == ("requested", "stop", 200)


async def test_several_runs_of_a_call_succeed_together(journal: Journal) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for n in range(3):
            run = await current_call().open_run("many", id=f"many-{n}")
            run.result = n
        await answer(send)

    await Peer().run(HangupMiddleware(app, journal=journal))
    page = await journal.list(name="many")
    assert [(run.id, run.state, run.result) for run in page.runs] == [(f"many-{n}", "completed", n) for n in (2, 1, 0)]


async def test_if_one_of_several_was_closed_by_another_none_succeeds(journal: Journal) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for n in range(2):
            await current_call().open_run("many", id=f"many-{n}")
        await sql(journal, "UPDATE hangup_runs SET state = 'canceled', closed_by = 'x' WHERE id = 'many-1'")
        await answer(send)

    peer = Peer()
    await peer.run(HangupMiddleware(app, journal=journal))
    states = {run.id: run.state for run in (await journal.list()).runs}
    assert peer.status == 503
    assert states == {"many-0": "failed", "many-1": "canceled"}


async def test_a_second_terminal_write_changes_nothing_and_is_reported(
    journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(run: Run) -> None:
        await sql(journal, "UPDATE hangup_runs SET state = 'canceled', cause = 'instance_lost', closed_by = 'other'")

    app = Working(journal, work)
    peer = Peer()
    await peer.run(app)
    record = await journal.get(app.run.id)
    assert record is not None
    assert (peer.status, record.state, record.cause) == (503, "canceled", "instance_lost")
    assert any("already says canceled (instance_lost)" in line for line in lines(caplog, logging.ERROR))


async def test_the_result_may_be_set_by_a_finalizer(journal: Journal) -> None:
    async def work(run: Run) -> None:
        @add_finalizer
        async def last_word() -> None:
            run.result = "from the finalizer"

        raise RuntimeError("no")

    app = Working(journal, work)
    await Peer().run(app)
    record = await journal.get(app.run.id)
    assert record is not None
    assert (record.state, record.result) == ("failed", "from the finalizer")


async def test_a_result_is_copied_when_it_is_assigned(journal: Journal) -> None:
    async def work(run: Run) -> None:
        value = {"n": 1}
        run.result = value
        value["n"] = 2

    app = Working(journal, work)
    await Peer().run(app)
    record = await journal.get(app.run.id)
    assert record is not None
    assert record.result == {"n": 1}


async def test_a_run_that_has_ended_takes_nothing_more(journal: Journal) -> None:
    app = Working(journal)
    await Peer().run(app)
    with pytest.raises(RunEnded):
        app.run.result = 1
    with pytest.raises(RunEnded):
        await app.run.checkpoint(1)
    record = await journal.get(app.run.id)
    assert record is not None
    assert record.result is None


async def test_a_checkpoint_of_a_run_that_another_has_closed_says_so(journal: Journal) -> None:
    errors: list[Exception] = []

    async def work(run: Run) -> None:
        await sql(journal, "UPDATE hangup_runs SET state = 'canceled', closed_by = 'other'")
        try:
            await run.checkpoint(1)
        except RunEnded as exc:
            errors.append(exc)

    await Peer().run(Working(journal, work))
    assert len(errors) == 1


async def test_an_id_that_is_taken_is_refused_and_the_other_run_is_left_alone(journal: Journal) -> None:
    first = Working(journal, for_ever)
    first.open_options = {"id": "mine"}
    second = Working(journal)
    second.open_options = {"id": "mine"}
    async with running(first) as (peer, _):
        other = Peer()
        await other.run(second)
        assert isinstance(other.error, DuplicateRun)
        record = await journal.get("mine")
        assert record is not None
        assert record.state == "running"
        peer.hang_up()
    third = Peer()
    await third.run(second)
    assert isinstance(third.error, DuplicateRun)
    record = await journal.get("mine")
    assert record is not None
    assert record.state == "canceled"


async def test_an_id_that_is_taken_on_another_instance_is_refused_and_its_run_is_left_alone(url: str) -> None:
    async with Journal(url) as one, Journal(url) as other:
        first, second = Working(one, for_ever), Working(other)
        first.open_options = second.open_options = {"id": "mine"}
        async with running(first) as (peer, run):
            refused = Peer()
            await refused.run(second)
            assert isinstance(refused.error, DuplicateRun)
            record = await other.get("mine")
            assert record is not None
            assert record.state == "running"
            peer.hang_up()
        assert run.state == "canceled"


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


async def test_a_run_whose_row_was_swept_before_its_opening_was_known_does_not_start(url: str) -> None:
    """The row is written, the reply is lost, and the next try takes longer than the lease."""
    async with Journal(url) as journal:
        app = Working(journal)
        app.open_options = {"id": "slow"}
        lost = iter(["lost"])
        swept: list[bool] = []

        def choose(name: str, values: Any) -> str | None:
            if name == "open":
                return next(lost, None)
            if name == "look up" and not swept:
                swept.append(True)
                return "raises"
            return None

        async def sweep() -> None:
            await eventually(lambda: swept)
            await sql(journal, "UPDATE hangup_runs SET state = 'canceled', cause = 'instance_lost', closed_by = 'x'")

        peer = Peer()
        with faults(choose):
            await asyncio.gather(peer.run(app), sweep())
        assert peer.status == 503
        assert app.runs == []


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"id": ""}, ValueError, "id takes 1 to 128"),
        ({"id": "x" * 129}, ValueError, "id takes 1 to 128 characters, not 129"),
        ({"id": "a b"}, ValueError, "printable characters but ' ' and '/'"),
        ({"id": "a/b"}, ValueError, "printable characters but ' ' and '/'"),
        ({"id": "a\0"}, ValueError, "printable"),
        ({"id": "\ud800"}, ValueError, "printable"),
        ({"id": 7}, TypeError, "id takes a text"),
        ({"owner": "x" * 256}, ValueError, "owner takes 1 to 255 characters, not 256"),
        ({"attributes": {"x": object()}}, TypeError, "attributes takes what JSON can hold"),
        ({"attributes": {"x": float("nan")}}, ValueError, "attributes takes what JSON can hold"),
        ({"attributes": {"x": "y" * 70000}}, ValueError, "up to 65536 bytes"),
        ({"attributes": [1]}, TypeError, "attributes takes a mapping"),
        ({"attributes": {"x": nested(100_000)}}, ValueError, "attributes takes what JSON can hold"),
    ],
)
async def test_what_is_malformed_is_refused_before_anything_is_written(
    sqlite_url: str, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    async with Journal(sqlite_url) as journal:
        app = Working(journal)
        app.open_options = options
        peer = Peer()
        await peer.run(app)
        assert isinstance(peer.error, error)
        assert says in str(peer.error)
        assert (await journal.list()).runs == ()


async def test_odd_but_legal_values_come_back_as_they_were(journal: Journal) -> None:
    app = Working(journal)
    attributes = {"nul": "\0", "surrogate": "\ud800", "text": "ü€😀'\";--", "deep": [[{"a": None}]]}
    app.open_options = {
        "id": "ünï'; DROP TABLE hangup_runs;--".replace(" ", "_"),
        "owner": "o'Brien",
        "attributes": attributes,
    }
    await Peer().run(app)
    record = await journal.get(app.run.id)
    assert record is not None
    assert (record.owner, json.dumps(record.attributes)) == ("o'Brien", json.dumps(attributes))


async def test_without_a_journal_open_run_names_what_is_missing() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await current_call().open_run("x")

    peer = Peer()
    await peer.run(HangupMiddleware(app))
    assert isinstance(peer.error, RuntimeError)
    assert "journal=" in str(peer.error)


async def test_a_disconnect_while_the_row_is_being_written_leaves_a_terminal_row(journal: Journal) -> None:
    peer = Peer()
    app = Working(journal, for_ever)
    app.open_options = {"id": "half"}

    def choose(name: str, values: Any) -> str | None:
        if name == "open":
            peer.hang_up()
        return None

    with faults(choose):
        await peer.run(app)
    record = await journal.get("half")
    assert record is not None
    assert (record.state, record.cause) == ("canceled", "client_disconnect")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_row_that_is_still_being_written_when_the_time_to_close_it_is_over_does_not_run_for_ever(
    url: str, kind: str
) -> None:
    async with Journal(url, timeout=0.5, close_timeout=0.1) as journal:
        peer = Peer()
        app = Working(journal, for_ever)
        app.open_options = {"id": "slow"}
        tries: list[str] = []

        def choose(name: str, values: Any) -> str | None:
            if name != "open":
                return None
            peer.hang_up()
            tries.append(name)
            return kind if len(tries) == 1 else "raises"

        with faults(choose):
            await peer.run(app)
            await eventually(lambda: not journal._held)
        assert journal.live == {}
        await expire(journal, "slow")

        async def has_ended() -> bool:
            await journal.keeper.tick()
            record = await journal.get("slow")
            return record is None or record.state == "canceled"

        await eventually(has_ended)
        assert journal.unsettled == {}


async def test_a_run_that_is_opened_by_a_task_that_outlives_the_call_is_refused(url: str) -> None:
    """The call ends before the journal has even begun to write the row."""
    go = asyncio.Event()
    tasks: list[asyncio.Task[Run]] = []
    runs: list[Run] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        tasks.append(asyncio.create_task(current_call().open_run("late", id="late")))
        await eventually(lambda: "late" in journal.live)
        runs.append(journal.live["late"])
        await answer(send)

    journal = Journal(url)
    prepare = journal.database.prepare

    async def slowly(*, create: bool) -> None:
        await go.wait()
        await prepare(create=create)

    journal.database.prepare = slowly  # type: ignore[method-assign]
    async with journal_closed_at_the_end(journal), anyio.create_task_group() as calls:
        calls.start_soon(Peer().run, HangupMiddleware(app, journal=journal))
        await eventually(lambda: runs and runs[0].closing)
        go.set()
        with pytest.raises(RunEnded, match="was not opened: its call has ended"):
            await tasks[0]
        assert await journal.get("late") is None
        assert journal.live == {}


@asynccontextmanager
async def journal_closed_at_the_end(journal: Journal) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await journal.close()


async def test_whatever_an_error_or_a_reason_is_made_of_the_row_is_closed(journal: Journal) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    async def fail(run: Run) -> None:
        raise Mute

    async def stop(run: Run) -> None:
        run.call.cancel(Mute())  # type: ignore[arg-type]
        await anyio.sleep(60)

    await Peer().run(failing := Working(journal, fail))
    await Peer().run(stopping := Working(journal, stop))
    failed, canceled = await journal.get(failing.run.id), await journal.get(stopping.run.id)
    assert failed is not None
    assert canceled is not None
    assert (failed.state, failed.error) == ("failed", "Mute: (Mute, whose text raised RuntimeError)")
    assert (canceled.state, canceled.reason) == ("canceled", "(Mute, whose text raised RuntimeError)")
    assert (journal.live, journal.unsettled) == ({}, {})


async def test_a_success_that_was_asked_to_stop_too_late_says_why_it_was(journal: Journal) -> None:
    async def work(run: Run) -> None:
        @before_success
        async def meanwhile() -> None:
            run.call.cancel("too late")

    await Peer().run(app := Working(journal, work))
    record = await journal.get(app.run.id)
    assert record is not None
    assert (record.state, record.cause, record.reason) == ("completed", "requested", "too late")


async def test_a_refusal_that_the_server_does_not_take_is_still_the_journals(sqlite_url: str) -> None:
    errors: list[Exception] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await current_call().open_run("x")
        except Exception as exc:
            errors.append(exc)

    class Gone(Peer):
        async def send(self, message: Message) -> None:
            raise OSError("the client has left")

    async with Journal(sqlite_url, open_timeout=0.1) as journal:
        with faults(lambda name, _: "raises" if name == "open" else None):
            await Gone().run(HangupMiddleware(app, journal=journal))
    assert [type(error) for error in errors] == [JournalUnavailable]


async def test_an_effect_is_in_the_row_before_it_begins_and_out_of_it_when_it_is_over(journal: Journal) -> None:
    seen: list[Any] = []

    async def look(run: Run) -> None:
        record = await journal.get(run.id)
        seen.append(record and record.effects)

    async def work(run: Run) -> None:
        async with step("charge the card", effect=True):
            await look(run)
        await look(run)

    await Peer().run(Working(journal, work))
    assert seen == [("charge the card",), ()]


async def test_an_effect_that_cannot_be_noted_does_not_begin(sqlite_url: str) -> None:
    began: list[bool] = []

    async def work(run: Run) -> None:
        async with step("charge the card", effect=True):
            began.append(True)

    async with Journal(sqlite_url, open_timeout=0.2) as journal:
        app = Working(journal, work)
        peer = Peer()
        with faults(lambda name, _: "raises" if name == "effects" else None):
            await peer.run(app)
        record = await journal.get(app.run.id)
    assert began == []
    assert isinstance(peer.error, JournalUnavailable)
    assert record is not None
    assert record.state == "failed"


@pytest.mark.parametrize(("confirmed", "state"), [(False, "ambiguous"), (True, "completed")])
async def test_an_answer_after_an_effect_that_was_cut_off_is_no_success_in_the_row(
    journal: Journal, confirmed: bool, state: str
) -> None:
    async def work(run: Run) -> None:
        charge = step("charge the card", effect=True)
        with anyio.CancelScope() as scope:
            async with charge:
                scope.cancel()
                await anyio.sleep(60)
        if confirmed:
            charge.confirm()

    peer = Peer()
    await peer.run(app := Working(journal, work))
    record = await journal.get(app.run.id)
    assert record is not None
    assert (peer.status, record.state, app.outcomes[0].state) == (200, state, state)
    assert record.effects == (() if confirmed else ("charge the card",))


async def test_a_hang_up_during_an_effect_is_ambiguous_and_says_which(journal: Journal) -> None:
    began = asyncio.Event()

    async def work(run: Run) -> None:
        async with step("charge the card", effect=True):
            began.set()
            await anyio.sleep(60)

    app = Working(journal, work)
    async with running(app) as (peer, run):
        await began.wait()
        await watched(peer)
        peer.hang_up()
    record = await journal.get(run.id)
    assert record is not None
    assert (record.state, record.cause, record.effects) == ("ambiguous", "client_disconnect", ("charge the card",))


async def test_a_websocket_that_ends_in_order_is_completed_and_one_that_vanishes_is_canceled(journal: Journal) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        run = await current_call().open_run("chat", id=scope["path"][1:])
        await send({"type": "websocket.accept"})
        await run.checkpoint({"messages": 1})
        while (await receive())["type"] != "websocket.disconnect":
            pass

    mounted = HangupMiddleware(app, journal=journal)
    for path, leave in (("/goodbye", WebSocketPeer.close), ("/gone", WebSocketPeer.hang_up)):
        peer = WebSocketPeer(path=path)
        async with peer.calling(mounted):
            await eventually(lambda path=path: _result_is_of(journal, path[1:], {"messages": 1}))  # type: ignore[misc]
            leave(peer)
    states = {run.id: (run.state, run.cause) for run in (await journal.list()).runs}
    assert states == {"goodbye": ("completed", "client_disconnect"), "gone": ("canceled", "client_disconnect")}


async def test_the_success_of_a_websocket_is_written_before_its_close(journal: Journal) -> None:
    states: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await current_call().open_run("chat", id="chat")
        await send({"type": "websocket.close"})

    class Client(WebSocketPeer):
        async def send(self, message: Message) -> None:
            record = await journal.get("chat")
            states.append((message["type"], record and record.state))
            await super().send(message)

    await Client().run(HangupMiddleware(app, journal=journal))
    assert states == [("websocket.accept", None), ("websocket.close", "completed")]


async def test_a_websocket_whose_run_cannot_be_written_is_refused(sqlite_url: str) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await current_call().open_run("chat")
        await send({"type": "websocket.accept"})

    async with Journal(sqlite_url, open_timeout=0.1) as journal:
        peer = WebSocketPeer()
        outcomes: list[Any] = []
        with faults(lambda name, _: "raises" if name == "open" else None):
            await peer.run(HangupMiddleware(app, journal=journal, observers=[outcomes.append]))
    assert [message["type"] for message in peer.sent] == ["websocket.close"]
    assert outcomes[0].state == "failed"


async def _result_is_of(journal: Journal, id: str, value: Any) -> bool:
    record = await journal.get(id)
    return record is not None and bool(record.result == value)


async def test_a_file_that_is_opened_slowly_is_closed_with_its_journal(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However short the time of its statements is: a connection that came later would be nobody's."""
    connect: Callable[..., sqlite3.Connection] = sqlite3.connect
    asked, may_open = threading.Event(), threading.Event()

    def slow(*args: Any, **options: Any) -> sqlite3.Connection:
        asked.set()
        assert may_open.wait(10)
        return connect(*args, **options)

    monkeypatch.setattr("sqlite3.connect", slow)
    database = Database(sqlite_url, timeout=0.01, pool_size=1, engine_options={})
    with pytest.raises(JournalUnavailable):
        await database.execute("look", text("SELECT 1"), {})
    await eventually(asked.is_set)
    disposing = asyncio.create_task(database.dispose())
    await asyncio.wait({disposing}, timeout=0.2)  # longer than a statement may take
    assert not disposing.done()
    may_open.set()
    await disposing
