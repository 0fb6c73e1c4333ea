"""The service of ``agent_runs`` on a database that fails, hangs, or commits and loses the reply, at each of its writes.

Bare, with the errors of persistence suppressed, it answers success for what was never written. Mended, what it answered
and what it is asked later are always the same.
"""

from __future__ import annotations

import logging
import sys
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from tests.journal.postgres import PostgresServer
from tests.real import Serving, serving, wait_for

sys.path.insert(0, str(Path(__file__).parent.parent / "agent_runs"))

from proxy import Proxy
from runs import Journal, Message, Store, make_app

pytestmark = pytest.mark.timeout(60)
#: Seconds after which a client gives up: mended, it has its answer long before.
PATIENCE = 10.0
HOW = pytest.mark.parametrize("how", ["fails", "hangs", "loses"])


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    server = PostgresServer()
    try:
        server.start()
        with Proxy(f"{server.data}/.s.PGSQL.5432").running() as proxy:
            yield proxy
    finally:
        server.remove()


class System:
    def __init__(self, server: Serving, proxy: Proxy) -> None:
        self.server = server
        self.proxy = proxy
        self.session = uuid.uuid4().hex

    def post(self, patience: float = 30) -> httpx.Response:
        body = {"session": self.session, "prompt": "look_up"}
        return httpx.post(f"{self.server.url}/runs", json=body, timeout=patience)

    def get(self, run: str) -> httpx.Response:
        return httpx.get(f"{self.server.url}/runs/{run}", timeout=30)

    def bare_states(self) -> list[str]:
        """What the rows of the session say that the bare half has written."""
        select = "SELECT state FROM bare_runs WHERE session = :session"
        return [row["state"] for row in self._look(lambda store: store.execute(select, session=self.session))]

    def history(self) -> list[Message]:
        return self._look(lambda store: store.load_messages(self.session))

    def _look(self, read: Callable[[Store], Awaitable[list[Any]]]) -> list[Any]:
        async def look() -> list[Any]:
            store = Store(url(self.proxy))
            try:
                return await read(store)
            finally:
                await store.engine.dispose()

        return anyio.run(look)


def url(proxy: Proxy) -> str:
    return f"postgresql://hangup@127.0.0.1:{proxy.port}/postgres?ssl=disable"


@pytest.fixture(scope="module")
def mended(proxy: Proxy) -> Iterator[System]:
    journal = Journal(url(proxy), timeout=0.3, open_timeout=1.0, close_timeout=1.5, lease=3.0)
    app = make_app(url(proxy), mended=True, journal=journal, finalizer_timeout=2.0)
    with serving(app, lifespan="on") as server:
        yield System(server, proxy)


@pytest.fixture(scope="module")
def bare(proxy: Proxy) -> Iterator[System]:
    with serving(make_app(url(proxy), mended=False), lifespan="on") as server:
        yield System(server, proxy)


def logged(caplog: pytest.LogCaptureFixture, session: str) -> str:
    """The id of the run that an ERROR names together with its session."""

    def lines() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR and session in r.getMessage()]

    wait_for(lines)
    [line] = lines()
    run: str = line.split()[1]
    return run


def test_what_was_answered_is_what_is_asked_later(mended: System) -> None:
    answer = mended.post()
    assert answer.status_code == 201
    assert mended.get(answer.json()["id"]).json() == answer.json()
    assert mended.get(uuid.uuid4().hex).status_code == 404


@pytest.mark.parametrize("how", ["fails", "hangs"])
@pytest.mark.parametrize("write", ["INSERT INTO hangup_runs", "UPDATE hangup_runs SET state"], ids=["open", "close"])
def test_a_run_that_cannot_be_recorded_is_no_success(
    mended: System, write: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    mended.session = uuid.uuid4().hex
    with mended.proxy.fault(write, how):
        answer = mended.post(patience=PATIENCE)
    assert mended.proxy.hits
    assert answer.status_code == 503
    run = logged(caplog, mended.session)
    wait_for(lambda: is_settled(mended.get(run)), timeout=30)  # failed, or swept when its lease ends, or not there
    assert (mended.get(run).status_code == 404) is ("INSERT" in write)


@pytest.mark.parametrize("write", ["INSERT INTO hangup_runs", "UPDATE hangup_runs SET state"], ids=["open", "close"])
def test_a_lost_reply_is_looked_up_and_not_guessed(mended: System, write: str) -> None:
    with mended.proxy.fault(write, "loses"):
        answer = mended.post()
    assert mended.proxy.hits == 1
    assert answer.status_code == 201
    assert mended.get(answer.json()["id"]).json() == answer.json()


@HOW
def test_a_history_that_cannot_be_saved_is_no_success(
    mended: System, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    mended.session = uuid.uuid4().hex
    with mended.proxy.fault("INSERT INTO sessions", how):
        answer = mended.post(patience=PATIENCE)
    assert mended.proxy.hits
    assert answer.status_code in {500, 503}
    run = logged(caplog, mended.session)
    wait_for(lambda: mended.get(run).json()["state"] == "failed")
    assert mended.post().status_code == 201  # and the session goes on


def is_settled(answer: httpx.Response) -> Any:
    """Never ``running``: not there, or final."""
    return answer.status_code == 404 or (answer.is_success and answer.json()["state"] in {"failed", "canceled"})


def test_bare_success_without_a_row(bare: System) -> None:
    with bare.proxy.fault("INSERT INTO bare_runs", "fails"):
        answer = bare.post()
    assert answer.status_code == 201
    assert bare.get(answer.json()["id"]).status_code == 404


def test_bare_a_row_that_is_stale_for_ever(bare: System) -> None:
    with bare.proxy.fault("UPDATE bare_runs", "fails"):
        answer = bare.post()
    assert answer.status_code == 201
    assert answer.json()["state"] == "completed"
    assert bare.get(answer.json()["id"]).json()["state"] == "running"


def test_bare_success_without_a_history(bare: System) -> None:
    bare.session = uuid.uuid4().hex
    with bare.proxy.fault("INSERT INTO sessions", "fails"):
        assert bare.post().status_code == 201
    assert bare.history() == []


@pytest.mark.parametrize(
    ("write", "states"),
    [("INSERT INTO bare_runs", []), ("INSERT INTO sessions", ["running"]), ("UPDATE bare_runs", ["running"])],
)
def test_bare_a_database_that_hangs_is_waited_for_as_long_as_it_likes(
    bare: System, write: str, states: list[str]
) -> None:
    bare.session = uuid.uuid4().hex
    with bare.proxy.fault(write, "hangs"):
        with pytest.raises(httpx.ReadTimeout):
            bare.post(patience=3)
        assert bare.bare_states() == states
