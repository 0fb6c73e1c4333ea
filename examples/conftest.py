from __future__ import annotations

from collections.abc import Callable

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    try:
        parser.addoption("--full", action="store_true", help="as many rounds as the figures ask for")
    except ValueError:
        pass  # the tests of the package have it too


@pytest.fixture
def rounds(request: pytest.FixtureRequest) -> Callable[[int, int], int]:
    """How many rounds to run: a few by default, all with ``--full``."""
    full = request.config.getoption("--full")
    return lambda few, all_: all_ if full else few
