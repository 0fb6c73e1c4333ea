"""The routes and the inspector."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

from hangup import HangupMiddleware, current_call, step
from hangup.journal import Journal
from hangup.testing import Peer

from .browser import Browser, browser_program
from .helpers import Working, eventually, for_ever, running, sql

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

JSON = [("content-type", "application/json")]


def by_header(request: Request) -> Any:
    who = request.headers.get("who")
    if who is None:
        raise HTTPException(401, "who are you?")
    return True if who == "root" else who if who != "nobody" else None


@pytest.fixture
def routes(journal: Journal) -> Starlette:
    return Starlette(
        routes=[
            Mount("/api", journal.router(authorize=by_header)),
            Mount("/inspector", journal.inspector(authorize=by_header)),
        ]
    )


async def ask(
    app: Any, path: str, *, method: str = "GET", who: str | None = "root", body: bytes = b"", headers: Any = ()
) -> tuple[int | None, Any]:
    path, _, query = path.partition("?")
    given = [*headers, *([("who", who)] if who else [])]
    peer = Peer(method=method, path=path, query=query, body=[body], headers=given)
    await peer.run(app)
    assert peer.error is None
    return peer.status, json.loads(peer.body) if peer.body.startswith(b"{") else peer.body


def test_there_are_no_routes_without_authorize(file_url: str) -> None:
    journal = Journal(file_url)
    for make in (journal.router, journal.inspector):
        with pytest.raises(TypeError, match="authorize"):
            make()  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="authorize takes a function"):
            make(authorize=None)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="authorize takes a function"):
            make(authorize=lambda: True)  # type: ignore[arg-type,misc]


async def test_whoever_may_see_nothing_sees_nothing(journal: Journal, routes: Starlette) -> None:
    await Peer().run(app := Working(journal))
    run = f"/api/runs/{app.run.id}"
    for path in ("/api/runs", run, f"{run}/events", "/inspector/", "/inspector/events"):
        assert await ask(routes, path, who=None) == (401, {"detail": "who are you?"})
        assert (await ask(routes, path, who="nobody"))[0] == 403
    for path in (f"{run}/cancel", f"/inspector/runs/{app.run.id}/cancel", "/inspector/calls/x/cancel"):
        assert (await ask(routes, path, method="POST", who=None, headers=JSON))[0] == 401
        assert (await ask(routes, path, method="POST", who="nobody", headers=JSON))[0] == 403


async def test_an_owner_sees_and_stops_its_own_runs_and_no_others(journal: Journal, routes: Starlette) -> None:
    app = Working(journal, for_ever)
    app.open_options = {"owner": "alice"}
    async with running(app) as (peer, run):
        path = f"/api/runs/{run.id}"
        assert (await ask(routes, path, who="alice"))[1]["state"] == "running"
        assert (await ask(routes, path, who="bob"))[0] == 404
        assert (await ask(routes, f"{path}/events", who="bob"))[0] == 404
        assert (await ask(routes, f"{path}/cancel", method="POST", who="bob", headers=JSON))[0] == 404
        assert (await ask(routes, "/api/runs", who="bob"))[1] == {"runs": [], "next": None}
        assert (await ask(routes, "/api/runs?owner=alice", who="bob"))[1] == {"runs": [], "next": None}
        assert (await ask(routes, "/inspector/calls/x/cancel", method="POST", who="alice", headers=JSON))[0] == 403
        assert not run.call.token.canceled
        assert (await ask(routes, f"{path}/cancel", method="POST", who="alice", headers=JSON))[0] == 200


async def test_the_answer_of_a_cancel_and_of_a_later_get_match_the_row(journal: Journal, routes: Starlette) -> None:
    app = Working(journal, for_ever)
    async with running(app) as (_, run):
        path = f"/api/runs/{run.id}"
        status, said = await ask(routes, f"{path}/cancel", method="POST", body=b'{"reason": "why not"}', headers=JSON)
        assert (status, said["status"]) == (200, "delivered")
        assert said["run"]["state"] in {"running", "canceled"}
    row = await journal.get(run.id)
    assert row is not None
    _, later = await ask(routes, path)
    assert later == row.as_json()
    assert (later["state"], later["reason"]) == ("canceled", "why not")
    assert await ask(routes, f"{path}/cancel", method="POST", headers=JSON) == (200, {"status": "ended", "run": later})


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("content-type", "text/plain")], 415),
        ([("content-type", "application/x-www-form-urlencoded")], 415),
        ([], 415),
        ([*JSON, ("sec-fetch-site", "cross-site")], 403),
        ([*JSON, ("sec-fetch-site", "same-site")], 403),
        ([*JSON, ("origin", "http://evil.example")], 403),
        ([*JSON, ("origin", "null")], 403),
        ([*JSON, ("origin", "http://[")], 403),
        ([*JSON, ("origin", "http://testserver")], 404),
        ([*JSON, ("sec-fetch-site", "same-origin")], 404),
        (JSON, 404),
    ],
    ids=str,
)
async def test_a_request_that_another_site_may_have_made_is_refused(sqlite_url: str, headers: Any, status: int) -> None:
    async with Journal(sqlite_url) as journal:
        for app, path in (
            (journal.router(authorize=lambda _: True), "/runs/x/cancel"),
            (journal.inspector(authorize=lambda _: True), "/runs/x/cancel"),
            (journal.inspector(authorize=lambda _: True), "/calls/x/cancel"),
        ):
            assert (await ask(app, path, method="POST", headers=headers))[0] == status


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/runs?limit=x", 400),
        ("/api/runs?limit=0", 400),
        ("/api/runs?state=done", 400),
        ("/api/runs?after=!", 400),
        ("/api/runs?opened_after=yesterday", 400),
        ("/api/runs?opened_after=2026-01-01", 400),
        ("/api/runs?limit=" + "9" * 5000, 400),
        ("/api/runs?limit=1_0", 400),
        ("/api/runs?opened_after=0001-01-01T00:00:00%2B23:59", 400),
        ("/api/runs?opened_before=9999-12-31T23:59:59-23:59", 400),
        ("/api/runs?after=MDAwMS0wMS0wMVQwMDowMDowMCsyMzo1OXxh", 400),
        ("/api/runs?owner=%00", 400),
        ("/api/runs?whatever=1", 400),
        ("/api/runs/" + "x" * 129, 400),
        ("/api/runs/nobody", 404),
        ("/api/runs/nobody/events", 404),
    ],
)
async def test_what_is_malformed_is_answered_with_what_is_wrong(sqlite_url: str, path: str, status: int) -> None:
    async with Journal(sqlite_url) as journal:
        app = Starlette(routes=[Mount("/api", journal.router(authorize=lambda _: True))])
        answered, said = await ask(app, path)
        assert answered == status
        assert said["detail"]
        assert not re.search(r"int\(|isoformat|digits|codec", said["detail"])  # Python's own words explain nothing


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"x", 400), (b"[]", 400), (b'{"reason": 1}', 400), (b"[" * 8000, 400), (b"x" * 9000, 413)],
    ids=[*"abcde"],
)
async def test_a_body_that_is_none_is_refused(sqlite_url: str, body: bytes, status: int) -> None:
    async with Journal(sqlite_url) as journal:
        router = journal.router(authorize=lambda _: True)
        assert (await ask(router, "/runs/x/cancel", method="POST", body=body, headers=JSON))[0] == status


async def test_a_database_that_is_away_is_503(sqlite_url: str, tmp_path: Path) -> None:
    async with Journal(f"sqlite:///{tmp_path}/no/runs.db", open_timeout=0.1) as journal:
        assert await ask(journal.router(authorize=lambda _: True), "/runs") == (503, {"detail": "the journal is away"})


@pytest.mark.parametrize("answer", [1, "", "a\nb", "x" * 256], ids=["number", "empty", "broken", "long"])
async def test_authorize_that_answers_nonsense_is_an_error_and_no_permission(sqlite_url: str, answer: Any) -> None:
    async with Journal(sqlite_url) as journal:
        peer = Peer(path="/runs")
        await peer.run(journal.router(authorize=lambda _: answer))
        assert isinstance(peer.error, (TypeError, ValueError))
        assert peer.body == b""


async def test_what_utf_8_cannot_hold_is_shown_all_the_same(journal: Journal, routes: Starlette) -> None:
    app = Working(journal)
    app.open_options = {"attributes": {"half": "\ud800"}}
    await Peer().run(app)
    for path in ("/api/runs", f"/api/runs/{app.run.id}"):
        status, said = await ask(routes, path)
        assert status == 200
        assert "\\ud800" in repr(said)


async def test_the_events_of_a_run_end_with_its_end(journal: Journal, routes: Starlette) -> None:
    app = Working(journal, for_ever)
    follower = Peer(path="", headers=[("who", "root")])
    async with running(app) as (peer, run):
        follower.scope["path"] = f"/api/runs/{run.id}/events"
        async with follower.calling(routes):
            await follower.wait_for_body(b'"state": "running"')
            peer.hang_up()
    assert follower.complete
    states = [json.loads(line[6:])["state"] for line in follower.body.decode().split("\n") if line.startswith("data: ")]
    assert states == ["running", "canceled"]


async def test_who_follows_a_run_is_not_shown_another_of_that_id(journal: Journal, routes: Starlette) -> None:
    app = Working(journal, for_ever)
    app.open_options = {"id": "again", "owner": "alice"}
    follower = Peer(path="/api/runs/again/events", headers=[("who", "alice")])
    async with running(app) as (peer, _), follower.calling(routes):
        await follower.wait_for_body(b'"state": "running"')
        await sql(journal, "UPDATE hangup_runs SET owner = 'bob', attributes = '\"secret\"'")
        await follower.wait_for(lambda: follower.complete)
        peer.hang_up()
    assert b'data: {"id": "again", "state": "deleted"}' in follower.body
    assert b"secret" not in follower.body


async def test_the_page_carries_its_policy_and_no_data(journal: Journal, routes: Starlette) -> None:
    peer = Peer(path="/inspector/", headers=[("who", "root")])
    await peer.run(routes)
    headers = dict(peer.sent[0]["headers"])
    policy = headers[b"content-security-policy"].decode()
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert headers[b"cache-control"] == b"no-store"
    nonce = policy.partition("'nonce-")[2].partition("'")[0]
    page = peer.body.decode()
    assert page.count(f'nonce="{nonce}"') == 2
    assert "{{" not in page
    assert "http://" not in page
    assert "https://" not in page
    again = Peer(path="/inspector/", headers=[("who", "root")])
    await again.run(routes)
    assert nonce not in again.body.decode()


# ---------------------------------------------------------------------- in a browser

NASTY = "<img src=x onerror=alert(1)>'\"&<script>alert(2)</script>"


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
        task = asyncio.create_task(server.serve([listener]))
        await eventually(lambda: server.started)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    browser = await asyncio.to_thread(Browser, await asyncio.to_thread(browser_program))
    yield browser
    await asyncio.to_thread(browser.__exit__)


@pytest.mark.timeout(400)  # a machine without a browser gets one first
@pytest.mark.parametrize("width", [390, 1280])
async def test_the_inspector_in_a_browser(sqlite_url: str, browser: Browser, width: int, tmp_path: Path) -> None:
    async with Journal(sqlite_url) as journal:

        async def work(request: Request) -> JSONResponse:
            run = await current_call().open_run(NASTY, id=NASTY.replace(" ", "_").replace("/", "|"), owner="alice")
            with step(NASTY):
                await anyio.sleep(60)
            return JSONResponse({"run": run.id})

        async def plain(request: Request) -> JSONResponse:
            await anyio.sleep(60)
            return JSONResponse({})

        app = HangupMiddleware(
            Starlette(
                routes=[
                    Route("/work", work),
                    Route("/plain", plain),
                    Mount("/inspector", journal.inspector(authorize=lambda _: True)),
                ]
            ),
            journal=journal,
        )

        def look(base: str) -> dict[str, Any]:
            browser.resize(width, 900)
            browser.open(f"{base}/inspector/")
            browser.wait_for("document.querySelectorAll('#calls button').length === 2")
            browser.wait_for("document.querySelectorAll('#runs button').length === 1")
            found = {
                "wider than the window": browser.evaluate(
                    "document.documentElement.scrollWidth > document.documentElement.clientWidth"
                ),
                "smallest button": browser.evaluate(
                    "Math.min(...[...document.querySelectorAll('button')].map(b => b.getBoundingClientRect().height))"
                ),
                "names": browser.evaluate("[...document.querySelectorAll('#runs .what div')].map(n => n.textContent)"),
                "images": browser.evaluate("document.images.length"),
                "labels": browser.evaluate("[...document.querySelectorAll('button')].map(b => b.ariaLabel)"),
            }
            browser.evaluate("document.querySelector('#runs button').click()")
            browser.wait_for("document.querySelector('#runs .canceled')")
            browser.wait_for("document.querySelector('#said').textContent.includes('delivered')")
            browser.wait_for("document.querySelectorAll('#calls button').length === 1")
            browser.evaluate("document.querySelector('#calls button').click()")
            browser.wait_for("document.querySelector('#calls .empty')")
            browser.screenshot(tmp_path / "page.png")
            found["complaints"] = browser.complaints()
            return found

        peers = [Peer(path="/work"), Peer(path="/plain")]
        async with serving(app) as base, peers[0].calling(app), peers[1].calling(app):
            found = await asyncio.to_thread(look, base)
        assert found["wider than the window"] is False
        assert found["smallest button"] >= (44 if width == 390 else 36)
        assert found["names"][0] == NASTY
        assert found["images"] == 0
        assert all(label.startswith("Cancel ") for label in found["labels"])
        assert found["complaints"] == []
        assert [peer.status for peer in peers] == [499, 499]
