"""The demo from start to end: two servers, all scenarios, one report."""

from __future__ import annotations

import json
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from .app import Runs
from .client import hang_up_on
from .report import Report, Row, Seen, show
from .scenarios import SCENARIOS, WAYS, Scenario
from .server import Server

#: How many clients are busy at once. Bare handlers run on, and one by one that would take a minute.
_BARE_CLIENTS: Final = 20
#: With hangup one at a time, so that nothing else is in the way of what is measured.
_HANGUP_CLIENTS: Final = 1

#: Columns, where there is no terminal to ask.
_WIDTH: Final = 160


@dataclass(frozen=True, slots=True)
class Play:
    """One scenario with one way to hang up."""

    scenario: Scenario
    how: str

    @property
    def run(self) -> str:
        """Its name on the wire, in the marks and in the database."""
        return f"{self.scenario.name}-{self.how}".replace(" ", "-").replace(",", "")


PLAYS: Final = [Play(scenario, how) for scenario in SCENARIOS for how in WAYS]


def run(*, as_json: bool) -> int:
    """Play everything, print what was seen, and return the exit status: 1 if anything with hangup is not right.

    :raises CannotRunError: if there is no port, or a server does not do its part.
    """
    with _progress() as advance:
        report = play_all(advance)
    if as_json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        console = Console()
        show(report, console if console.is_terminal else Console(width=_WIDTH))
    return 0 if report.ok else 1


def play_all(advance: Callable[[str], object]) -> Report:
    """Run both servers and all clients. Nothing of them is left when this returns or raises."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hangup-demo-") as temporary:
        directories = {mount: Path(temporary, mount) for mount in ("bare", "hangup")}
        for directory in directories.values():
            directory.mkdir()
        with Server("bare", directories["bare"]) as bare, Server("hangup", directories["hangup"]) as hangup:
            description = f"{bare.wait_until_ready().details['server']} on Python {platform.python_version()}"
            bare_hang_ups = _play(bare, "bare", _BARE_CLIENTS, advance)
            hangup_hang_ups = _play(hangup, "with hangup", _HANGUP_CLIENTS, advance)
        # Both have stopped: every mark is in, and what the databases say now they will say for ever.
        seen_bare = _read(bare, directories["bare"], bare_hang_ups)
        seen_hangup = _read(hangup, directories["hangup"], hangup_hang_ups)
    rows = [Row(scenario=play.scenario, how=play.how, bare=seen_bare[play], hangup=seen_hangup[play]) for play in PLAYS]
    return Report(rows=rows, server=description, seconds=time.monotonic() - started)


def _play(server: Server, label: str, clients: int, advance: Callable[[str], object]) -> dict[Play, int]:
    """Play everything on one server. Returns when each client left."""
    port = server.wait_until_ready().details["port"]
    hang_ups = {}
    with ThreadPoolExecutor(clients, thread_name_prefix="hangup-demo") as pool:
        pending = {pool.submit(hang_up_on, server, port, play.scenario, play.how, play.run): play for play in PLAYS}
        try:
            for future in as_completed(pending):
                play = pending[future]
                hang_ups[play] = future.result()
                advance(f"{label}: {play.scenario.name} ({play.how})")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            server.stop()  # whoever still waits for it is let go
            raise
    return hang_ups


def _read(server: Server, directory: Path, hang_ups: dict[Play, int]) -> dict[Play, Seen]:
    runs = Runs(directory / "runs.sqlite")
    return {
        play: Seen.read([mark for mark in server.marks if mark.run == play.run], at, runs.state(play.run))
        for play, at in hang_ups.items()
    }


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A bar on standard error: standard output is for the result."""
    columns = (TextColumn("hanging up"), BarColumn(), TextColumn("{task.completed}/{task.total} {task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting the servers", total=2 * len(PLAYS))

        def advance(what: str) -> None:
            progress.update(task, advance=1, description=what)

        yield advance
