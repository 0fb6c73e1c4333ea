"""The command line, and the examples of the README."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import anyio
import pytest

import hangup.cli
from hangup import HangupMiddleware, Outcome, State
from hangup.cli._demo import child, play
from hangup.cli._demo.report import Report, Row, Seen
from hangup.cli._demo.scenarios import SCENARIOS, WAYS, Cleanup, Moment
from hangup.cli._demo.server import Mark
from hangup.testing import Peer

EXAMPLES = Path(__file__).parent.parent / "examples"


def start_demo(directory: Path, *args: str) -> subprocess.Popen[str]:
    """`hangup demo` in a process of its own, with its temporary files in ``directory``."""
    return subprocess.Popen(
        [sys.executable, "-m", "hangup", "demo", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(directory)},
        # A shell ignores SIGINT for what it runs in the background, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


# ---------------------------------------------------------------------- the demo on real servers


@pytest.mark.timeout(60)
def test_the_demo_finds_every_row_with_hangup_right(tmp_path: Path) -> None:
    demo = start_demo(tmp_path, "--json")
    out, err = demo.communicate(timeout=50)
    assert demo.returncode == 0, out + err
    report = json.loads(out)
    assert report["ok"] is True
    assert report["seconds"] < 30
    assert [(row["scenario"], row["moment"], row["close"]) for row in report["rows"]] == [
        (scenario.name, scenario.moment, way) for scenario in SCENARIOS for way in WAYS
    ]
    for row in report["rows"]:
        assert row["hangup"]["problems"] == []
        assert len(row["hangup"]["outcomes"]) == 1
        assert row["bare"]["outcomes"] == []
    assert any(row["bare"]["faults"] for row in report["rows"])
    assert 0 < report["cancel_latency_ms"]["p50"] < 100
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.timeout(60)
def test_an_interrupted_demo_leaves_nothing_behind(tmp_path: Path) -> None:
    demo = start_demo(tmp_path)
    for _ in tries(30):
        if list(tmp_path.glob("hangup-demo-*/*/runs.sqlite")):  # the servers are starting
            break
    demo.send_signal(signal.SIGINT)
    out, err = demo.communicate(timeout=20)  # the servers hold no pipe of ours; the demo waits for them
    assert demo.returncode == 130, err
    assert "interrupted" in err
    assert "Traceback" not in err
    assert out == ""
    assert list(tmp_path.iterdir()) == []


def tries(seconds: float) -> Iterator[None]:
    """Come round twenty times a second, at most for ``seconds``; then fail."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield
        time.sleep(0.05)
    pytest.fail(f"nothing of it within {seconds} s")


# ---------------------------------------------------------------------- when it cannot run


def test_a_missing_extra_is_named_with_the_cure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hangup.cli, "find_spec", lambda name: None if name == "rich" else object())
    assert hangup.cli.main(["demo"]) == hangup.cli.CANNOT
    assert capsys.readouterr().err == "hangup: the demo needs rich. Try: pip install 'hangup[demo]'\n"


def test_without_a_free_port_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    marks: list[tuple[str, Any]] = []

    def no_port(*args: object) -> None:
        raise OSError("Address already in use")

    monkeypatch.setattr("hangup.cli._demo.child.socket.create_server", no_port)
    monkeypatch.setattr(child, "mark", lambda what, **details: marks.append((what, details)))
    monkeypatch.setattr(sys, "argv", ["child", "bare", str(tmp_path)])
    with pytest.raises(SystemExit):
        child.main()
    assert marks == [("refused", {"reason": "Address already in use"})]

    refused = Mark(None, "refused", 0, {"reason": "Address already in use"})
    monkeypatch.setattr("hangup.cli._demo.server.Server.look_for", lambda *args, **kwargs: refused)
    assert hangup.cli.main(["demo"]) == hangup.cli.CANNOT
    assert "no free port on 127.0.0.1: Address already in use" in capsys.readouterr().err


def test_a_server_that_dies_is_quoted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    assert hangup.cli.main(["demo"]) == hangup.cli.CANNOT
    assert "but ended" in capsys.readouterr().err


# ---------------------------------------------------------------------- judging

AGENT = SCENARIOS[0]


def seen(**changes: Any) -> Seen:
    """An agent run as it should be with hangup, but for ``changes``."""
    outcome = {
        "state": "canceled",
        "cause": "client_disconnect",
        "phase": "before_response",
        "delivered": False,
        "in_flight": ["call tool"],
        "finalizers": [{"name": "close", "state": "completed"}],
        **changes.pop("outcome", {}),
    }
    right: dict[str, Any] = {
        "told_by": "CancelledError",
        "told_after": 1.0,
        "worked_until": None,
        "cleanup": Cleanup.FINISHED,
        "raised": None,
        "errors": (),
        "registered": 1,
        "row": "canceled",
        "outcomes": (outcome,),
    }
    return Seen(**{**right, **changes})


def test_what_is_right_has_no_problems() -> None:
    assert Row(scenario=AGENT, how="FIN", bare=seen(), hangup=seen()).problems == []


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"outcomes": ()}, id="no outcome"),
        pytest.param({"outcome": {"state": "completed"}}, id="state"),
        pytest.param({"outcome": {"cause": None}}, id="cause"),
        pytest.param({"outcome": {"phase": "during_response"}}, id="phase"),
        pytest.param({"outcome": {"delivered": True}}, id="delivered"),
        pytest.param({"outcome": {"in_flight": []}}, id="in flight"),
        pytest.param({"outcome": {"finalizers": []}}, id="finalizer not run"),
        pytest.param({"registered": 0}, id="finalizer not registered"),
        pytest.param({"told_by": None, "told_after": None, "worked_until": 1900.0}, id="ran on"),
        pytest.param({"told_by": "GeneratorExit"}, id="told otherwise"),
        pytest.param({"told_after": 5000.0}, id="told late"),
        pytest.param({"cleanup": Cleanup.LOST}, id="cleanup lost"),
        pytest.param({"cleanup": Cleanup.LATE}, id="cleanup late"),
        pytest.param({"row": "running"}, id="row open"),
        pytest.param({"row": "completed"}, id="row untrue"),
        pytest.param({"raised": "ClientDisconnect"}, id="escaped"),
        pytest.param({"errors": ("RuntimeError",)}, id="error logged"),
    ],
)
def test_what_is_wrong_is_found_and_fails_the_demo(changes: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    row = Row(scenario=AGENT, how="FIN", bare=seen(outcomes=()), hangup=seen(**changes))
    report = Report(rows=[row], server="a server", seconds=1.0)
    assert row.problems
    assert not report.ok
    assert report.to_json()["rows"][0]["hangup"]["problems"] == row.problems

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(play, "play_all", lambda advance: report)
        assert play.run(as_json=False) == 1
    out = capsys.readouterr().out
    assert "not right: agent run, before response, FIN" in out
    assert row.problems[0] in out


def test_the_moments_are_the_phases_of_the_record() -> None:
    assert [moment.phase for moment in Moment] == [
        "before_response",
        "before_response",
        "during_response",
        "after_response",
    ]


# ---------------------------------------------------------------------- the examples

needs_examples = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="the tests were copied without the examples")


def load(name: str) -> ModuleType:
    """The example ``name``."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@needs_examples
def test_example_run_closes_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    example = load("run")
    cleaned = []

    async def main() -> None:
        in_tool = anyio.Event()

        async def sleep(seconds: float) -> None:
            if seconds == 60:
                in_tool.set()
                await anyio.sleep(seconds)
            elif seconds == 0.1:
                await anyio.sleep(0.01)
                cleaned.append(True)

        monkeypatch.setattr(example, "asyncio", SimpleNamespace(sleep=sleep))
        peer = Peer(method="POST", path="/runs/7")
        async with peer.calling(example.app):
            await in_tool.wait()
            await peer.wait_for(lambda: peer.reading)
            peer.hang_up()
        assert peer.error is None

    anyio.run(main)
    assert cleaned
    assert example.rows == {"7": State.CANCELED}


@needs_examples
def test_example_thread_ends_when_it_looks() -> None:
    example = load("thread")
    outcomes: list[Outcome] = []

    async def main() -> None:
        peer = Peer(path="/report")
        async with peer.calling(HangupMiddleware(example.app, observers=[outcomes.append])):
            await peer.wait_for(lambda: peer.reading)
            peer.hang_up()
        assert peer.error is None

    anyio.run(main)
    assert [outcome.state for outcome in outcomes] == [State.CANCELED]


@needs_examples
def test_the_readme_quotes_the_example() -> None:
    readme = (EXAMPLES.parent / "README.md").read_text()
    _, _, code = (EXAMPLES / "run.py").read_text().split('"""', 2)
    assert code.strip() in readme
