"""Browsers leave in the middle of an answer, the server goes down in the middle of many. What is left is counted."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.real import read_all, reset, wait_for

#: Seconds: as in `bot.py`, which takes its time to import.
BOUND = 8.0

pytestmark = pytest.mark.timeout(120)
WAYS = pytest.mark.parametrize("path", ["/ask", "/agui"])


def alive(pid: int) -> bool:
    """Whether the process is there. A zombie counts, unless only init can reap it."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            _, _, stat = file.read().rpartition(")")
    except (FileNotFoundError, ProcessLookupError):
        return False
    state, parent = stat.split()[:2]
    return state != "Z" or parent != "1"


class Bot:
    """The bot in a process of its own, and its agents' processes: each CLI leaves a note."""

    def __init__(self, notes: Path, *, mended: bool) -> None:
        self.notes = notes
        self._before: set[Path] = set()
        env = {**os.environ, "AGENT_PIDS": str(notes), **({} if mended else {"BARE": "1"})}
        command = [sys.executable, str(Path(__file__).with_name("bot.py"))]
        with (notes / "log.txt").open("w") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=env)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def ask(self, path: str, prompt: str = "go on", thread: str = "") -> socket.socket:
        """A browser that reads its answer."""
        body = prompt
        if path == "/agui":
            run = {"threadId": thread or str(uuid.uuid4()), "runId": str(uuid.uuid4()), "tools": [], "context": []}
            message = {"id": str(uuid.uuid4()), "role": "user", "content": prompt}
            body = json.dumps({**run, "messages": [message], "state": None, "forwardedProps": None})
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        client = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        return client

    def begin(self) -> Bot:
        """From here on only new sessions count."""
        self._before = set(self.notes.iterdir())
        return self

    def sessions(self) -> list[list[int]]:
        """For each session its CLI and the CLI's child."""
        return [json.loads(note.read_text()) for note in self._new() if not note.suffix]

    def interrupted(self) -> int:
        """How many sessions were interrupted."""
        return sum(note.suffix == ".interrupted" for note in self._new())

    def _new(self) -> set[Path]:
        return set(self.notes.iterdir()) - self._before

    def left(self) -> list[int]:
        return [pid for pids in self.sessions() for pid in pids if alive(pid)]

    @property
    def log(self) -> str:
        return (self.notes / "log.txt").read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._before.clear()
        for pid in self.left():
            os.kill(pid, signal.SIGKILL)


def until(client: socket.socket, mark: bytes) -> None:
    data = b""
    while mark not in data:
        part = client.recv(4096)
        assert part, data
        data += part


def until_a_word(client: socket.socket) -> None:
    until(client, b"word 3")


def at_hand(client: socket.socket) -> bytes:
    """What has arrived, of an answer that has not ended."""
    data = b""
    client.setblocking(False)
    while True:
        try:
            part = client.recv(4096)
        except BlockingIOError:
            return data
        assert part, data
        data += part


def running(tmp_path_factory: pytest.TempPathFactory, *, mended: bool) -> Iterator[Bot]:
    bot = Bot(tmp_path_factory.mktemp("notes"), mended=mended)
    yield bot
    bot.kill()


@pytest.fixture(scope="module")
def mended_bot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bot]:
    yield from running(tmp_path_factory, mended=True)


@pytest.fixture(scope="module")
def bare_bot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bot]:
    yield from running(tmp_path_factory, mended=False)


@pytest.fixture
def mended(mended_bot: Bot) -> Bot:
    return mended_bot.begin()


@pytest.fixture
def bare(bare_bot: Bot) -> Bot:
    return bare_bot.begin()


def leave_many(bot: Bot, path: str, count: int) -> None:
    """As many browsers, five at a time, each leaving in the middle of its answer: by FIN, by RST, and so on."""
    for first in range(0, count, 5):
        clients = [bot.ask(path) for _ in range(first, min(first + 5, count))]
        for n, client in enumerate(clients):
            until_a_word(client)
            reset(client) if n % 2 else client.close()


@WAYS
def test_nothing_is_left_of_an_answer_nobody_reads(mended: Bot, path: str) -> None:
    count = 50
    leave_many(mended, path, count)
    started = time.monotonic()
    wait_for(lambda: not mended.left(), timeout=60)
    took = time.monotonic() - started
    assert len(mended.sessions()) == count
    print(f"{path}: 0 of {count} sessions left {took:.1f} s after the last browser; all were interrupted first")
    assert mended.interrupted() == count
    assert took < BOUND
    assert mended.log == ""


def test_bare_the_sdk_leaves_the_child_of_its_cli(bare: Bot, rounds: Callable[[int, int], int]) -> None:
    count = rounds(3, 50)
    leave_many(bare, "/ask", count)
    # the SDK terminates it after five seconds
    wait_for(lambda: not any(alive(cli) for cli, _ in bare.sessions()), timeout=60)
    print(f"/ask, bare: {len(bare.left())} processes of {count} sessions are left, {bare.interrupted()} interrupted")
    assert len(bare.left()) == count
    assert bare.interrupted() == 0


def test_bare_the_adapter_leaves_everything_running(bare: Bot, rounds: Callable[[int, int], int]) -> None:
    count = rounds(3, 50)
    leave_many(bare, "/agui", count)
    read_all(bare.ask("/agui", "3"))  # a whole answer later
    print(f"/agui, bare: {len(bare.left())} processes of {count + 1} sessions are left, none interrupted")
    assert len(bare.left()) == 2 * (count + 1)  # that of the answer included: its session is kept
    assert bare.interrupted() == 0


@WAYS
def test_a_page_reloaded_at_once_has_its_answer_and_nothing_is_left_of_the_old_one(mended: Bot, path: str) -> None:
    thread = str(uuid.uuid4())
    with mended.ask(path, thread=thread) as client:
        until_a_word(client)
    again = read_all(mended.ask(path, "4", thread=thread))
    assert b"word 4" in again
    assert again.endswith(b"0\r\n\r\n")
    assert (len(mended.sessions()), mended.interrupted()) == (2, 1)
    kept = 2 if path == "/agui" else 0  # the adapter keeps the new session for the next question
    wait_for(lambda: len(mended.left()) == kept, timeout=BOUND)


def test_bare_a_reloaded_page_leaves_processes_behind(bare: Bot) -> None:
    with bare.ask("/ask") as client:
        until_a_word(client)
    assert b"word 4" in read_all(bare.ask("/ask", "4"))
    wait_for(lambda: not any(alive(cli) for cli, _ in bare.sessions()), timeout=60)
    assert (len(bare.left()), len(bare.sessions()), bare.interrupted()) == (2, 2, 0)


def test_bare_a_reloaded_page_waits_behind_the_answer_nobody_reads(bare: Bot) -> None:
    thread = str(uuid.uuid4())
    with bare.ask("/agui", thread=thread) as client:
        until_a_word(client)
    with bare.ask("/agui", "4", thread=thread) as reloaded:
        until(reloaded, b"RUN_STARTED")
        assert b"RUN_FINISHED" in read_all(bare.ask("/agui", "4"))  # another page, which asked later
        assert b"word" not in at_hand(reloaded)
    assert (len(bare.sessions()), bare.interrupted()) == (2, 0)  # it has got none of its own
    assert len(bare.left()) == 4


def bring_down(bot: Bot, number: signal.Signals) -> None:
    """Stop or kill the server in the middle of four answers."""
    clients = [bot.ask(path) for path in ("/ask", "/agui") * 2]
    for client in clients:
        until_a_word(client)
    bot.process.send_signal(number)
    wait_for(lambda: bot.process.poll() is not None, timeout=40)
    for client in clients:
        client.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_nothing_is_left_of_a_server_that_went_down(
    tmp_path_factory: pytest.TempPathFactory, number: signal.Signals
) -> None:
    for bot in running(tmp_path_factory, mended=True):
        bring_down(bot, number)
        wait_for(lambda bot=bot: not bot.left(), timeout=BOUND)  # type: ignore[misc]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_bare_a_server_that_went_down_leaves_processes(
    tmp_path_factory: pytest.TempPathFactory, number: signal.Signals
) -> None:
    for bot in running(tmp_path_factory, mended=False):
        bring_down(bot, number)
        with pytest.raises(TimeoutError):
            wait_for(lambda bot=bot: len(bot.left()) < 8, timeout=BOUND)  # type: ignore[misc]
        print(f"{number.name}, bare: {len(bot.left())} processes of 4 sessions are left")


@WAYS
def test_an_answer_that_is_read_to_its_end_is_whole(mended: Bot, path: str) -> None:
    answer = read_all(mended.ask(path, "12"))
    assert b"word 12" in answer
    assert answer.endswith(b"0\r\n\r\n")
    assert mended.interrupted() == 0
    if path == "/ask":
        wait_for(lambda: not mended.left())  # the adapter keeps its session for the next question
    assert mended.log == ""


def test_a_session_goes_on_after_an_answer(mended: Bot) -> None:
    read_all(mended.ask("/agui", "3", thread="t"))
    read_all(mended.ask("/agui", "3", thread="t"))
    assert len(mended.sessions()) == 1
    assert len(mended.left()) == 2
