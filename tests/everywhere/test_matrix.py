"""The matrix under pytest. By default what installs quickly; ``-m everywhere`` plays the rest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from . import framework_phases, phases
from .blind import BLIND
from .framework_phases import FRAMEWORKS, Framework
from .measure import APP, FRAMEWORK_APP, FRAMEWORK_SERVER, memory_of_an_upload, p50
from .servers import BY_NAME, SERVERS, Process, Server, running

pytestmark = pytest.mark.timeout(90)

#: Servers on which every way to leave is played by default, and not only the first.
THOROUGH = {"uvicorn-h11"}

#: More than a disconnect takes on a machine that does other things too, and far less than the work would.
FIVE_MS = 0.005


class Stage:
    """The one server process that is running. The next one replaces it: the machine is small."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack = ExitStack()
        self._name = ""
        self._process: Process | None = None

    def server(self, server: Server) -> Process:
        """``server`` with the application of the server matrix."""
        return self._enter(server.name, server, APP, {})

    def framework(self, framework: Framework) -> Process:
        """uvicorn with the application of ``framework``."""
        return self._enter(framework.name, FRAMEWORK_SERVER, FRAMEWORK_APP, framework.environment())

    def close(self) -> None:
        self._stack.close()

    def _enter(self, name: str, server: Server, app: str, env: dict[str, str]) -> Process:
        if self._process is None or self._name != name:
            self._stack.close()
            self._process = self._stack.enter_context(running(server, app, self._directory / name, env))
            self._name = name
        return self._process


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("everywhere"))
    yield stage
    stage.close()


def server_cells() -> Iterator[Any]:
    for server in SERVERS:
        for phase, way in phases.cells_of(server):
            first = way == phase.ways_for(server)[0] or server.name in THOROUGH
            quick = first and server.name.startswith("uvicorn") and not server.long_tail
            marks = [] if quick else [pytest.mark.everywhere]
            yield pytest.param(server, phase, way, id=f"{server.name}-{phase.name}-{way or 'stays'}", marks=marks)


def framework_cells() -> Iterator[Any]:
    for framework in FRAMEWORKS:
        for phase, way in framework.cells():
            marks = [pytest.mark.everywhere] if framework.long_tail else []
            yield pytest.param(framework, phase, way, id=f"{framework.name}-{phase.name}-{way or 'stays'}", marks=marks)


@pytest.mark.parametrize(("server", "phase", "way"), list(server_cells()))
def test_server(stage: Stage, server: Server, phase: phases.Phase, way: str) -> None:
    cell = phases.play(stage.server(server), phase, way)
    assert cell.problems == []


@pytest.mark.parametrize(("framework", "phase", "way"), list(framework_cells()))
def test_framework(stage: Stage, framework: Framework, phase: framework_phases.Phase, way: str) -> None:
    cell = framework_phases.play(stage.framework(framework), framework, phase, way)
    assert cell.problems == []


SHORT = ["uvicorn-h11", "hypercorn-asyncio", "granian-asgi"]


@pytest.mark.parametrize("name", SHORT)
def test_the_token_knows_within_five_milliseconds(stage: Stage, name: str) -> None:
    process = stage.server(BY_NAME[name])
    cells = [phases.play(process, phases.BY_NAME["idle"], "FIN") for _ in range(15)]
    assert [cell.problems for cell in cells if cell.problems] == []
    latencies = [cell.latency_ms for cell in cells if cell.latency_ms is not None]
    assert len(latencies) == 15
    assert p50(latencies) < FIVE_MS * 1000


@pytest.mark.parametrize("name", SHORT)
def test_an_upload_that_nobody_reads_takes_no_memory(stage: Stage, name: str, pytestconfig: pytest.Config) -> None:
    """The server process may grow by what it grows bare, and 2 MB."""
    full = pytestconfig.getoption("--full")
    size, seconds = (2**30, 10.0) if full else (2**26, 1.0)
    process = stage.server(BY_NAME[name])
    for path in ("/bare/reads_nothing", "/reads_nothing"):  # what is imported and allocated only once
        memory_of_an_upload(process, path, f"warm-{path}", 2**22, 0.3)
    bare = memory_of_an_upload(process, "/bare/reads_nothing", "bare", size, seconds)
    ours = memory_of_an_upload(process, "/reads_nothing", "ours", size, seconds)
    print(f"{name}: {size // 2**20} MB offered, grown by {bare} kB bare, by {ours} kB with hangup")
    assert ours <= bare + 2048


def test_every_blind_spot_is_somewhere() -> None:
    """An entry that no cell needs is out of date."""
    from .blind import blind_spot

    needed = {id(blind_spot(server, phase, way)) for server in SERVERS for phase, way in phases.cells_of(server)}
    assert [spot.why for spot in BLIND if id(spot) not in needed] == []
