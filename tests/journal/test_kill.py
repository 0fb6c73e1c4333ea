"""``kill -9`` of one of three uvicorn workers, under load. Ten times: ``HANGUP_JOURNAL_KILLS=10``."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import pytest

from hangup.journal import Journal

from .helpers import eventually
from .killed_app import LEASE, RENEW

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(1200)]

KILLS = int(os.environ.get("HANGUP_JOURNAL_KILLS", "1"))
CLIENTS = 24


async def get(port: int, path: str) -> tuple[int, str] | None:
    """Status and body; None if the connection was lost."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(f"GET {path} HTTP/1.0\r\nhost: x\r\n\r\n".encode())
            said = await reader.read()
        finally:
            writer.close()
    except OSError:
        return None
    head, _, body = said.decode().partition("\r\n\r\n")
    if "chunked" in head:
        body = body.split("\r\n")[1]
    return (int(head.split()[1]), body) if head else None


@asynccontextmanager
async def workers(url: str) -> AsyncIterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "tests.journal.killed_app:app", "--workers", "3", "--port", str(port)],
        env={**os.environ, "HANGUP_TEST_DATABASE": url},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        await eventually(lambda: get(port, "/pid"), 60)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.to_thread(process.wait, 30)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)


async def pids(port: int) -> set[int]:
    """Of the workers, as far as they answer."""
    answers = await asyncio.gather(*(get(port, "/pid") for _ in range(40)))
    return {int(answer[1]) for answer in answers if answer is not None and answer[1]}


async def test_every_row_is_terminal_soon_after_a_worker_was_killed_and_no_living_run_is_touched(
    postgres_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answers: dict[str, Any] = {}
    killed: set[int] = set()
    stop = asyncio.Event()
    dice = random.Random(11)

    async def client(port: int, number: int) -> None:
        count = 0
        while not stop.is_set():
            count += 1
            id = f"run-{number}-{count}"
            effect = "&effect" if dice.random() < 0.2 else ""
            answers[id] = await get(port, f"/{id}?{dice.uniform(0, 1):.3f}{effect}")

    async with workers(postgres_url) as port, Journal(postgres_url) as journal:
        await eventually(lambda: _has(port, 3), 60)
        async with anyio.create_task_group() as tasks:
            for number in range(CLIENTS):
                tasks.start_soon(client, port, number)
            for _ in range(KILLS):
                await eventually(lambda: _has(port, 3 if KILLS == 1 else 2), 60)
                victim = dice.choice(sorted(await pids(port) - killed))
                await eventually(partial(_is_under_load, answers, len(answers)))
                os.kill(victim, signal.SIGKILL)
                killed.add(victim)
            await eventually(lambda: _has(port, 1), 30)
            stop.set()
        ended = time.monotonic()
        await eventually(lambda: _none_running(journal), LEASE + RENEW + 15)
        took = time.monotonic() - ended
        rows: dict[str, Any] = {}
        after = None
        while True:
            page = await journal.list(limit=1000, after=after)
            rows |= {run.id: run for run in page.runs}
            after = page.next
            if after is None:
                break

    assert {
        id: row.instance for id, row in rows.items() if row.cause == "instance_lost" and _pid(row) not in killed
    } == {}
    for id, answer in answers.items():
        told = answer is not None and answer[0] == 200
        if told:
            assert rows[id].state == "completed", (id, answer, rows[id])
        elif id in rows and _pid(rows[id]) not in killed:
            assert rows[id].state != "completed", (id, answer, rows[id])
    lost = [row for row in rows.values() if row.cause == "instance_lost"]
    assert lost
    tally = Counter(f"{row.state} ({row.cause})" if row.cause else row.state for row in rows.values())
    with capsys.disabled():
        print(f"\n{KILLS} kills: {len(rows)} runs, {dict(tally)}; none running {took:.1f} s after the load ended")


def _is_under_load(answers: dict[str, Any], before: int) -> bool:
    return len(answers) > before + CLIENTS


async def _has(port: int, count: int) -> bool:
    return len(await pids(port)) >= count


async def _none_running(journal: Journal) -> bool:
    return not (await journal.list(state="running", limit=1)).runs


def _pid(row: Any) -> int:
    return int(row.instance.split("-")[-2])
