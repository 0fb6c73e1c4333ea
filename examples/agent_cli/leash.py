#!/usr/bin/env python3
"""Runs the agent's CLI in a process group of its own, and ends the group when the SDK lets go of it.

The SDK starts its CLI in the server's process group and knows that one process only: what the CLI starts is out of its
reach, and a CLI that ignores a closed stdin is waited for five seconds. So the SDK is given this file as ``cli_path``,
and the real CLI's path in ``AGENT_CLI``. stdin and stdout are the CLI's own: nothing is read or copied here. When stdin
is closed (the SDK disconnects, or the server has died), on SIGTERM, or when the CLI ends by itself, the group gets
`FLUSH` seconds to write its transcript, then SIGTERM, and after `TERM` more SIGKILL.

For ``ClaudeSDKClient``, which keeps stdin open while it is connected. The one-shot ``query()`` closes it at once.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time

FLUSH = 0.5
TERM = 1.0


def main() -> int:
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: told.append(number))
    cli = subprocess.Popen([os.environ["AGENT_CLI"], *sys.argv[1:]], start_new_session=True)
    stdin = select.poll()
    stdin.register(0, 0)  # no reading: only whether the other end is gone
    while cli.poll() is None and not told and not stdin.poll(100):
        pass
    ended = time.monotonic() + FLUSH
    while cli.poll() is None and time.monotonic() < ended:
        time.sleep(0.02)
    for number in (signal.SIGTERM, signal.SIGKILL):
        ended = time.monotonic() + TERM
        while signaled(cli.pid, number) and time.monotonic() < ended:
            cli.poll()
            time.sleep(0.02)
    return cli.wait()


def signaled(group: int, number: int) -> bool:
    """Whether there was anybody left in the group to get the signal."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
