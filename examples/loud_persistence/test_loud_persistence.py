"""The service of ``agent_runs`` on a database that fails, hangs, or commits and loses the reply, at each of its writes.

Bare, with the errors of persistence suppressed, it answers success for what was never written; with them let through,
it answers an error for what was. Mended, what it answered and what it is asked later are always the same.
"""

from __future__ import annotations

import json
import logging
import sys
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
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
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
#: `create_run`, `save_messages`, `update_run`, as the bare half writes.
BARE_WRITES = pytest.mark.parametrize("write", ["INSERT INTO bare_runs", "INSERT INTO sessions", "UPDATE bare_runs"])


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

    def post(self, patience: float = 30, *, stream: bool = False) -> httpx.Response:
        body = {"session": self.session, "prompt": "look_up", "stream": stream}
        return httpx.post(f"{self.server.url}/runs", json=body, timeout=patience)

    def status(self, *, stream: bool) -> int | None:
        """The status of an answer; None if it was a success that broke off."""
        try:
            return self.post(PATIENCE, stream=stream).status_code
        except httpx.RemoteProtocolError:
            return None

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


@STREAM
@pytest.mark.parametrize("how", ["fails", "hangs"])
@pytest.mark.parametrize("write", ["INSERT INTO hangup_runs", "UPDATE hangup_runs SET state"], ids=["open", "close"])
def test_a_run_that_cannot_be_recorded_is_no_success(
    mended: System, write: str, how: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    mended.session = uuid.uuid4().hex
    with mended.proxy.fault(write, how):
        status = mended.status(stream=stream)
    assert mended.proxy.hits
    assert status == (None if stream and "UPDATE" in write else 503)  # never a 2xx without its row
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


@STREAM
@HOW
def test_a_history_that_cannot_be_saved_is_no_success(
    mended: System, how: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    mended.session = uuid.uuid4().hex
    with mended.proxy.fault("INSERT INTO sessions", how):
        status = mended.status(stream=stream)
    assert mended.proxy.hits
    assert status in ({None} if stream else {500, 503})
    run = logged(caplog, mended.session)
    wait_for(lambda: mended.get(run).json()["state"] == "failed")
    assert mended.post().status_code == 201  # and the session goes on


def is_settled(answer: httpx.Response) -> Any:
    """Never ``running``: not there, or final."""
    return answer.status_code == 404 or (answer.is_success and answer.json()["state"] in {"failed", "canceled"})


@STREAM
def test_bare_success_without_a_row(bare: System, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    with bare.proxy.fault("INSERT INTO bare_runs", "fails"):
        answer = bare.post(stream=stream)
    assert bare.proxy.hits == 1
    assert answer.status_code == (200 if stream else 201)
    first = answer.text.splitlines()[0].removeprefix("data: ")
    assert bare.get(json.loads(first)["id"]).status_code == 404
    assert errors(caplog) == []


def test_bare_a_row_that_is_stale_for_ever(bare: System, caplog: pytest.LogCaptureFixture) -> None:
    with bare.proxy.fault("UPDATE bare_runs", "fails"):
        answer = bare.post()
    assert bare.proxy.hits == 1
    assert answer.status_code == 201
    assert answer.json()["state"] == "completed"
    assert bare.get(answer.json()["id"]).json()["state"] == "running"
    assert errors(caplog) == []


def test_bare_success_without_a_history(bare: System, caplog: pytest.LogCaptureFixture) -> None:
    bare.session = uuid.uuid4().hex
    with bare.proxy.fault("INSERT INTO sessions", "fails"):
        assert bare.post().status_code == 201
    assert bare.proxy.hits
    assert bare.history() == []
    assert errors(caplog) == []


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


@BARE_WRITES
def test_bare_a_lost_reply_does_no_harm_to_a_service_that_does_not_look(bare: System, write: str) -> None:
    """Nothing to mend: the row is there, and so is the history."""
    bare.session = uuid.uuid4().hex
    with bare.proxy.fault(write, "loses"):
        answer = bare.post()
    assert bare.proxy.hits == 1
    assert answer.status_code == 201
    assert bare.get(answer.json()["id"]).json() == answer.json()
    assert [message["role"] for message in bare.history()] == ["user", "assistant", "tool", "assistant"]


@BARE_WRITES
def test_bare_a_lost_reply_is_an_error_for_what_was_written_where_errors_are_let_through(
    bare: System, write: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other thing one writes first: nothing is suppressed. Then a client is told of a failure that was none."""

    def let_through(*exceptions: type[BaseException]) -> AbstractContextManager[None]:
        return nullcontext()

    monkeypatch.setattr("runs.suppress", let_through)
    bare.session = uuid.uuid4().hex
    with bare.proxy.fault(write, "loses"):
        assert bare.post().status_code == 500
    assert bare.proxy.hits == 1
    states, roles = bare.bare_states(), [message["role"] for message in bare.history()]
    if "INSERT INTO bare_runs" in write:
        assert (states, roles) == (["running"], [])  # and it will say so for ever
    elif "UPDATE" in write:
        assert (states, roles) == (["completed"], ["user", "assistant", "tool", "assistant"])  # and whole
    else:
        assert (states, roles) == (["failed"], ["user", "assistant"])  # a tool call that has no result
        assert bare.post().status_code == 500  # so that the session is lost


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
