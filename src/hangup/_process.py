"""Child processes that end with their call, and take their own children with them."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
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

#: Seconds to read what nobody has read of its output: asyncio closes a pipe only at its end.
PIPE_WAIT: Final = 0.1


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
    _check(command)
    process = await anyio.open_process(
        command, stdin=stdin, stdout=stdout, stderr=stderr, cwd=cwd, env=env, start_new_session=True
    )
    _end_with(call, process)
    return process


def _check(command: object) -> None:
    if not command or not isinstance(command, (str, bytes, Sequence, os.PathLike)):
        raise TypeError(f"open_process() and run_process() take a command, ['ls', '-l'] or 'ls -l', not {command!r}")


def _end_with(call: Call, process: Process) -> Callable[[], Awaitable[None]]:
    async def stop() -> None:
        await stop_process(process)

    # Not by its number: the name is a metric label.
    return call.add_finalizer(stop, name="process", timeout=STDIN_WAIT + TERM_WAIT + KILL_WAIT + PIPE_WAIT + 1)


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
    if input is not None and not isinstance(input, (bytes, bytearray, memoryview)):
        raise TypeError(f"run_process(input=) takes bytes, not {input!r}")
    _check(command)
    stdin = subprocess.PIPE if input is not None else subprocess.DEVNULL
    process = await anyio.open_process(command, stdin=stdin, cwd=cwd, env=env, start_new_session=True)
    stop = _end_with(call, process)
    output: dict[str, bytes] = {}

    async def collect(name: str, stream: ByteReceiveStream | None) -> None:
        if stream is not None:
            output[name] = b"".join([chunk async for chunk in stream])

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(collect, "stdout", process.stdout)
            tasks.start_soon(collect, "stderr", process.stderr)
            if input is not None and process.stdin is not None:
                with suppress(*_CLOSED):  # it does not want all of it, as in `subprocess.run`
                    await process.stdin.send(input)
                await _close_stdin(process)
            await process.wait()
    except BaseException:
        # Begin now: the handler may have more to clean up than this. The finalizer sees to the end.
        with anyio.move_on_after(STDIN_WAIT + TERM_WAIT + KILL_WAIT, shield=True):
            await stop_process(process)
        raise
    if not _group_lives(process.pid):
        call.drop_finalizer(stop)  # from now on its number may be that of another process
    returncode = process.returncode
    assert returncode is not None
    if check and returncode != 0:
        raise subprocess.CalledProcessError(returncode, command, output.get("stdout"), output.get("stderr"))
    return subprocess.CompletedProcess(command, returncode, output.get("stdout", b""), output.get("stderr", b""))


async def stop_process(process: Process) -> None:
    """End ``process`` and whatever is left of its group: stdin closed, SIGTERM, SIGKILL, each after a bounded wait.

    SIGKILL is not waited for if this is cut off. Does nothing to a process that has ended and left nobody. Never
    signals the group of this process.
    """
    ended = False
    try:
        await _close_stdin(process)
        ended = await _ended(process, STDIN_WAIT)
        if not ended:
            _signal_group(process, signal.SIGTERM)
            ended = await _ended(process, TERM_WAIT)
    finally:
        if not ended:
            _signal_group(process, _KILL)
            if not await _ended(process, KILL_WAIT, shield=True):
                logger.error("process %d did not end within %.3g s of SIGKILL", process.pid, KILL_WAIT)
    await _drain(process)


async def _close_stdin(process: Process) -> None:
    if process.stdin is not None:
        with suppress(*_CLOSED):
            await process.stdin.aclose()


async def _drain(process: Process) -> None:
    """Read the output that nobody has read, to its end."""
    with anyio.move_on_after(PIPE_WAIT):
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                with suppress(*_CLOSED, anyio.BusyResourceError, RuntimeError):  # somebody does read it
                    async for _ in stream:
                        pass


async def _ended(process: Process, wait: float, *, shield: bool = False) -> bool:
    """Whether the process, and its group, have ended within ``wait`` seconds."""
    with anyio.move_on_after(wait, shield=shield):
        await process.wait()
        while _group_lives(process.pid):  # noqa: ASYNC110 # the leader has been reaped; of the others no event speaks
            await anyio.sleep(0.01)
        return True
    return False


_CLOSED: Final = (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError)
_KILL: Final = signal.SIGKILL if sys.platform != "win32" else signal.SIGTERM


def _signal_group(process: Process, number: signal.Signals) -> None:
    if sys.platform == "win32":
        process.terminate()
        return
    if process.pid == os.getpgrp():
        raise RuntimeError(f"process {process.pid} leads our own group: it was not started by open_process()")
    if process.returncode is None or _group_lives(process.pid):
        _reached(os.killpg, process.pid, number)


def _group_lives(pid: int) -> bool:
    """Whether anybody is left of the group whose leader, ``pid``, has been reaped.

    As long as somebody is, no process gets that number: if one has it, it is another's, and so is the group. Orphans
    are reaped here if they have come to us, as they do to the first process of a container.
    """
    if sys.platform == "win32" or _reached(os.kill, pid, 0):
        return False
    try:
        while os.waitpid(-pid, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
    return _reached(os.killpg, pid, 0)


def _reached(kill: Callable[[int, int], None], pid: int, number: int) -> bool:
    """Send the signal. False if there is nobody to get it."""
    try:
        kill(pid, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
