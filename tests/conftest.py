from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import pytest


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


@pytest.fixture
def on_trio(anyio_backend: Any) -> bool:
    return bool(anyio_backend[0] == "trio")


Outcomes = list[Any]


@pytest.fixture
def outcomes() -> list[Any]:
    return []


Handler = Callable[..., Any]
