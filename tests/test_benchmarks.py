"""The benchmarks run, and a competitor that does not do its job is found out. Nobody is judged by speed here."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
from benchmarks import idle, latency, overhead, storm, streams, wire
from benchmarks.__main__ import main
from benchmarks.harness import SMOKE, Exchange, Table, Wrong, exponent, fitness, request, spread, turns
from benchmarks.results import Figures, goals, report
from benchmarks.server import CHUNK, Server
from starlette.types import ASGIApp, Message, Receive, Scope, Send

NAMES = ("bare", "hangup")


def row(table: Table, name: str) -> list[float]:
    """The figures of ``name``, every one of which was measured."""
    return [table.rows[name][column]["median"] for column in table.columns]


def test_overhead() -> None:
    took, added, part, steps = overhead.run(["bare", "floor", "hangup", "with_cancellation"], SMOKE)
    assert all(figure > 0 for figure in row(took, "hangup"))
    assert len(row(added, "hangup")) == len(overhead.CASES)
    assert added.rows["floor"]["one finalizer"] == {"cannot": "has no finalizers"}
    assert list(part.rows) == ["with_cancellation"]
    assert len(row(steps, "hangup")) == len(overhead.PROVIDERS)


def test_streams() -> None:
    took, older, newer = streams.run(["bare", "hangup", "with_cancellation"], SMOKE)
    assert all(figure > 0 for figure in row(took, "hangup"))
    assert row(older, "bare") == row(newer, "bare 2.4") == [1, 1, 1]
    assert {cell["cannot"] for cell in took.rows["with_cancellation"].values()} == {"does not cover streams"}


def test_latency() -> None:
    (table,) = latency.run(NAMES, replace(SMOKE, open_streams=(2,)))
    assert table.rows["raw"]["token, p50"]["n"] == table.rows["receive"]["token, p50"]["n"] == 1
    for event in latency.EVENTS.values():
        assert 0 < table.rows["hangup"][f"{event}, p50"]["median"] < 10e6
    assert table.rows["bare"]["`finally: await` done, p50"] == {"cannot": "in 0 of 1"}


def test_storm() -> None:
    over, stall, cpu, kept, _ = storm.run(NAMES, SMOKE)
    for table in (over, stall, cpu):
        assert all(figure > 0 for figure in row(table, "hangup") + row(table, "raw"))
    assert row(kept, "hangup") == [5]
    assert row(kept, "bare") == [0]


def test_idle() -> None:
    weight, growth = idle.run(NAMES, SMOKE)
    assert row(weight, "bare")[0] > 0
    assert len(row(weight, "hangup")) == 3
    assert len(row(growth, "hangup")) == 1


def test_what_is_loaded_on_the_wire() -> None:
    with Server("bare") as server:
        for path, expected, _, _ in wire.CASES.values():
            assert wire.fitness(server, path, expected) is None
        assert wire.fitness(server, "/", b"something else") == "wrong response"
    printed = "  81234 requests in 3.00s, 1.00MB read\nRequests/sec:  27078.12\nTransfer/sec: 1MB\n"
    assert wire.counts_of(printed) == (81234, 27078.12)
    with pytest.raises(RuntimeError, match="Non-2xx"):
        wire.counts_of("  Non-2xx or 3xx responses: 3\n" + printed)


def test_what_is_served_with_hangup() -> None:
    with Server("hangup", loop="asyncio") as server:
        assert wire.fitness(server, "/stream/100", CHUNK * 100) is None
        assert server.ask("report")["memory"] > 0


# ---------------------------------------------------------------------- the harness


def app_that(says: Callable[[Send], object]) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await says(send)  # type: ignore[misc]

    return app


async def short(send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"123"})


async def failing(send: Send) -> None:
    await send({"type": "http.response.start", "status": 500, "headers": []})
    await send({"type": "http.response.body", "body": b"1234"})


async def endless(send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})


@pytest.mark.parametrize(
    ("says", "why"),
    [
        (short, "wrong response: 200, 3 bytes of 4"),
        (failing, "wrong response: 500, 4 bytes of 4"),
        (endless, "no complete response"),
    ],
)
def test_a_competitor_that_does_not_answer_is_found_out(says: Callable[[Send], object], why: str) -> None:
    assert asyncio.run(fitness(app_that(says), Exchange, request, 4)) == why


def test_a_competitor_that_breaks_while_it_is_measured_is_found_out() -> None:
    with pytest.raises(Wrong):
        asyncio.run(overhead._once(app_that(short), 2, (b"",), "GET"))


def test_the_played_server_reads_as_uvicorn_does() -> None:
    seen: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend([await receive(), await receive()])
        waiting = asyncio.ensure_future(receive())
        await asyncio.sleep(0)
        assert not waiting.done()
        await short(send)
        seen.extend([await waiting, await receive()])

    async def exchange() -> None:
        exchange = Exchange([b"a", b"b"])
        await exchange.run(app, request())
        exchange.check(3)

    asyncio.run(exchange())
    assert seen == [
        {"type": "http.request", "body": b"a", "more_body": True},
        {"type": "http.request", "body": b"b", "more_body": False},
        {"type": "http.disconnect"},
        {"type": "http.disconnect"},
    ]


def test_everybody_has_a_turn_in_each_round() -> None:
    order = list(turns("", "abcd", 50))
    rounds = [order[i : i + 4] for i in range(0, 200, 4)]
    assert all(sorted(each) == list("abcd") for each in rounds)
    assert len({tuple(each) for each in rounds}) > 10


def test_the_sums() -> None:
    assert spread([1, 2, 3, 4, 5]) == {"median": 3, "q1": 2, "q3": 4, "n": 5}
    assert exponent({10: 20, 100: 200, 1000: 2000}) == pytest.approx(1)
    assert exponent({10: 100, 100: 10_000}) == pytest.approx(2)


# ---------------------------------------------------------------------- the page


def test_the_page_says_which_goals_were_missed(tmp_path: Path) -> None:
    table = Table("On the wire, against bare", "% of bare")
    table.put("hangup", "hello", [96.0, 96.0])
    slow = {"wire": {"environment": ENVIRONMENT, "competitors": {"hangup": "ours"}, "tables": [asdict(table)]}}
    (tmp_path / "results.json").write_text(json.dumps(slow))
    report(tmp_path / "results.json", tmp_path)
    page = (tmp_path / "RESULTS.md").read_text()
    assert "at least 97 % of bare | 96.0 | **not reached**" in page
    assert "a plain call, over bare | at most 5 µs | not measured" in page
    assert "prefers-color-scheme: dark" in (tmp_path / "plots" / "wire.svg").read_text()
    table.put("hangup", "hello", [97.5, 97.5])
    reached = [goal.what for goal in goals(Figures({"wire": {"tables": [asdict(table)]}})) if goal.reached]
    assert reached == ["requests per second, FastAPI hello on uvicorn"]


ENVIRONMENT = {
    "cpu": "a",
    "cores": 2,
    "load before": 0,
    "python": "b",
    "system": "c",
    "loop": "uvloop",
    "packages": {"d": "1", "e": None},
}


def test_the_command_keeps_what_was_measured_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    file.write_text('{"wire": {}}')
    run = partial(main, ["streams", "--smoke", "--only", "hangup", "--json", str(file)])
    run()
    known = json.loads(file.read_text())
    assert list(known) == ["wire", "streams"]
    assert known["streams"]["environment"]["packages"]["hangup"]
    assert "A stream" in capsys.readouterr().out
