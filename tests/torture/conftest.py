from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest


@dataclass
class Tally:
    """How much was injected, over all tests."""

    points: int = 0
    runs: int = 0


TALLY: pytest.StashKey[Tally] = pytest.StashKey()


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Tally:
    return request.config.stash.setdefault(TALLY, Tally())


@pytest.fixture
def minutes(request: pytest.FixtureRequest) -> float:
    """How long each kind of chaos goes on."""
    return float(request.config.getoption("--minutes"))


@pytest.fixture
def long_run(request: pytest.FixtureRequest, minutes: float) -> bool:
    return bool(request.config.getoption("--full")) or minutes >= 1


@pytest.hookimpl(wrapper=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    yield
    tally = terminalreporter.config.stash.get(TALLY, None)
    if tally is not None:
        terminalreporter.write_line(
            f"torture: {tally.points} suspension points, {tally.runs} runs with a fault at one of them"
        )


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch, watching_at_once: None) -> None:
    """What is waited for comes soon."""
    monkeypatch.setattr("hangup._send.LAST_TIMEOUT", 0.01)
    monkeypatch.setattr("hangup._call.REACH", 0.1)  # a machine may be busy for longer than 0.01
    monkeypatch.setattr("hangup._call.QUIET_TIMEOUT", 0.01)
