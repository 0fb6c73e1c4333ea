"""The server as the demo sees it: a process that is started, listened to, and ended."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from hangup.cli import CannotRunError

#: Seconds that a server may take to start. Importing a web framework takes a while on a cold machine.
START_TIMEOUT: Final = 30.0
#: Seconds that it may take to stop by itself.
STOP_TIMEOUT: Final = 5.0


@dataclass(frozen=True, slots=True)
class Mark:
    """Something the server noted. ``at`` is nanoseconds of `time.monotonic_ns`."""

    run: str | None
    what: str
    at: int
    details: dict[str, Any]


class Server:
    """A server process, from ``with`` to the end of the block. ``mount`` is ``"bare"`` or ``"hangup"``.

    It has a process group of its own, so Ctrl-C reaches the demo first, which then ends it in order. Should the demo
    be killed, the server sees its standard input end and goes too.
    """

    def __init__(self, mount: str, directory: Path) -> None:
        self.marks: list[Mark] = []
        self._changed = threading.Condition()
        self._silent = False
        self._log = directory / f"{mount}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "hangup.cli._demo.child", mount, str(directory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def wait_until_ready(self) -> Mark:
        """Wait for the mark that says where it listens."""
        ready = self.wait_for(None, "ready", "refused", timeout=START_TIMEOUT)
        if ready.what == "refused":
            raise CannotRunError(f"no free port on 127.0.0.1: {ready.details['reason']}")
        return ready

    def wait_for(self, run: str | None, *whats: str, timeout: float) -> Mark:
        """Wait until one of ``whats`` is noted for ``run``.

        :raises CannotRunError: if that is not within ``timeout`` seconds.
        """
        found = self.look_for(run, *whats, timeout=timeout)
        if found is None:
            raise CannotRunError(self._explain(run, " or ".join(whats), timeout))
        return found

    def look_for(self, run: str | None, *whats: str, timeout: float) -> Mark | None:
        """The same, but None if nothing is noted in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._silent or self._find(run, whats), timeout)
            return self._find(run, whats)

    def stop(self) -> None:
        """End the process, and hear the last of it. A second call does nothing."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT)
        except BaseException as exc:
            self._process.kill()
            self._process.wait()
            if not isinstance(exc, subprocess.TimeoutExpired):
                raise
        finally:
            self._listener.join()
            self._process.stdout.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            details = json.loads(line)
            mark = Mark(details.pop("run"), details.pop("what"), details.pop("at"), details)
            with self._changed:
                self.marks.append(mark)
                self._changed.notify_all()
        with self._changed:
            self._silent = True
            self._changed.notify_all()

    def _find(self, run: str | None, whats: tuple[str, ...]) -> Mark | None:
        return next((mark for mark in self.marks if mark.run == run and mark.what in whats), None)

    def _explain(self, run: str | None, what: str, timeout: float) -> str:
        trouble = "ended" if self._silent else f"did not get as far within {timeout:g} s"
        text = f"the server was to say {what!r}{f' for {run}' if run else ''}, but {trouble}."
        log = self._log.read_text(errors="replace").strip() if self._log.exists() else ""
        return f"{text} Its last words:\n{log[-2000:]}" if log else text
