from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hangup._runtime import clock


def _eager_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.set_task_factory(asyncio.eager_task_factory)
    return loop


def _backends() -> list[Any]:
    backends = [
        pytest.param(("asyncio", {}), id="asyncio"),
        pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"),
        pytest.param(("trio", {}), id="trio"),
    ]
    if sys.version_info >= (3, 12):
        backends.append(pytest.param(("asyncio", {"loop_factory": _eager_loop}), id="eager"))
    return backends


@pytest.fixture(params=_backends())
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="the long runs: as many rounds as the figures ask for")
    parser.addoption("--minutes", type=float, default=0.1, help="how long each kind of chaos in tests/torture goes on")


@pytest.fixture(scope="module", autouse=True)
def _what_was_there_before() -> Iterator[None]:
    """Hundreds of tests have the garbage collected: of what their own file has made, and not of all that is loaded."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def rounds(request: pytest.FixtureRequest) -> Callable[[int, int], int]:
    """How many rounds to run: a few by default, all with ``--full``."""
    full = request.config.getoption("--full")
    return lambda few, all_: all_ if full else few


@pytest.fixture
def watching_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call is watched from its first suspension, and not only once it has lasted."""
    monkeypatch.setattr("hangup.middleware.WATCH_AFTER", 0.0)


@pytest.fixture
def beginning_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No deadline passes before the application has begun, however long the machine stands still: timers run on, but
    by the clock of the calls it is always now."""
    now = clock()
    for module in ("_call", "_token"):
        monkeypatch.setattr(f"hangup.{module}.clock", lambda: now)


@pytest.fixture
def on_trio(anyio_backend: Any) -> bool:
    return bool(anyio_backend[0] == "trio")
