"""Child processes that end with their call, and take their own children with them."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import anyio
from anyio.abc import ByteReceiveStream, Process

if TYPE_CHECKING:
    from ._call import Call

logger: Final = logging.getLogger("hangup")

Command = str | bytes | Sequence[str | bytes]

#: Seconds a process gets to end after its stdin was closed, after SIGTERM, and after SIGKILL.
STDIN_WAIT: Final = 0.5
TERM_WAIT: Final = 1.5
KILL_WAIT: Final = 1.0


async def open_process(
    call: Call,
    command: Command,
    *,
    stdin: int | IO[Any] | None = subprocess.PIPE,
    stdout: int | IO[Any] | None = subprocess.PIPE,
    stderr: int | IO[Any] | None = subprocess.PIPE,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Process:
    """Start ``command`` in a process group of its own, and register the finalizer that ends it."""
    process = await anyio.open_process(
        command, stdin=stdin, stdout=stdout, stderr=stderr, cwd=cwd, env=env, start_new_session=True
    )

    async def stop() -> None:
        await stop_process(process)

    call.add_finalizer(stop, name=f"process {process.pid}", timeout=STDIN_WAIT + TERM_WAIT + KILL_WAIT + 1)
    return process


async def run_process(
    call: Call,
    command: Command,
    *,
    input: bytes | None = None,  # noqa: A002 # as in `subprocess.run` and anyio
    check: bool = True,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Run ``command`` to its end and collect what it says."""
    process = await open_process(
        call, command, stdin=subprocess.PIPE if input is not None else subprocess.DEVNULL, cwd=cwd, env=env
    )
    output: dict[str, bytes] = {}

    async def collect(name: str, stream: ByteReceiveStream | None) -> None:
        if stream is not None:
            output[name] = b"".join([chunk async for chunk in stream])

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(collect, "stdout", process.stdout)
            tasks.start_soon(collect, "stderr", process.stderr)
            if input is not None and process.stdin is not None:
                await process.stdin.send(input)
                await process.stdin.aclose()
            await process.wait()
    except BaseException:
        # Begin now: the handler may have more to clean up than this. The finalizer sees to the end.
        with anyio.move_on_after(STDIN_WAIT + TERM_WAIT + KILL_WAIT, shield=True):
            await stop_process(process)
        raise
    returncode = process.returncode
    assert returncode is not None
    if check and returncode != 0:
        raise subprocess.CalledProcessError(returncode, command, output.get("stdout"), output.get("stderr"))
    return subprocess.CompletedProcess(command, returncode, output.get("stdout", b""), output.get("stderr", b""))


async def stop_process(process: Process) -> None:
    """End ``process`` and whatever is left of its group: stdin closed, SIGTERM, SIGKILL, each after a bounded wait.

    Does nothing to a process that has ended and left nobody. Never signals the group of this process.
    """
    if process.stdin is not None:
        try:
            await process.stdin.aclose()
        except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass
    steps = ((None, STDIN_WAIT), (signal.SIGTERM, TERM_WAIT), (_KILL, KILL_WAIT))
    for number, wait in steps:
        if number is not None:
            _signal_group(process, number)
        if await _ended(process, wait):
            return
    logger.error("process %d did not end within %.3g s of SIGKILL", process.pid, KILL_WAIT)


async def _ended(process: Process, wait: float) -> bool:
    """Whether the process, and its group, have ended within ``wait`` seconds."""
    with anyio.move_on_after(wait):
        await process.wait()
        while _group_lives(process.pid):  # noqa: ASYNC110 # the leader has been reaped; of the others no event speaks
            await anyio.sleep(0.01)
        return True
    return False


_KILL: Final = signal.SIGKILL if sys.platform != "win32" else signal.SIGTERM


def _signal_group(process: Process, number: signal.Signals) -> None:
    if sys.platform == "win32":
        process.terminate()
        return
    if process.pid == os.getpgrp():
        raise RuntimeError(f"process {process.pid} leads our own group: it was not started by open_process()")
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def _group_lives(pid: int) -> bool:
    if sys.platform == "win32":
        return False
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
