"""Every server, started for real: a process of its own on a free loopback port."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Self

ROOT: Final = Path(__file__).parents[2]

#: Seconds that a server may take to start, and to stop. Imports take a while on a cold and busy machine.
START_TIMEOUT: Final = 40.0
STOP_TIMEOUT: Final = 6.0


@dataclass(frozen=True)
class Server:
    """One configuration of one server. ``command`` makes the command line from the application and the port."""

    name: str
    command: Callable[[str, int], list[str]]
    packages: tuple[str, ...]
    http2: bool = False
    #: Installed by the `everywhere` extra, and played with ``-m everywhere``.
    long_tail: bool = False
    #: What stands in front of it, by the port of both.
    proxy: Callable[[int, int], str] | None = None
    traits: frozenset[str] = field(default_factory=frozenset)

    def versions(self) -> str:
        """What is installed, for the table."""
        found = [f"{package} {version(package)}" for package in self.packages]
        if self.proxy is not None:
            found.insert(0, _nginx_version())
        return ", ".join(found)

    def installed(self) -> bool:
        """Whether all it needs is here."""
        try:
            for package in self.packages:
                version(package)
        except PackageNotFoundError:
            return False
        return self.proxy is None or _nginx() is not None


def _python(module: str, *args: str) -> list[str]:
    return [sys.executable, "-m", module, *args]


def _uvicorn(*args: str) -> Callable[[str, int], list[str]]:
    def command(app: str, port: int) -> list[str]:
        common = ("--host", "127.0.0.1", "--port", str(port), "--log-level", "warning", "--no-access-log")
        return _python("uvicorn", app, *common, *args)

    return command


def _hypercorn(worker: str) -> Callable[[str, int], list[str]]:
    return lambda app, port: _python("hypercorn", "-b", f"127.0.0.1:{port}", "-k", worker, app)


def _granian(interface: str, *args: str) -> Callable[[str, int], list[str]]:
    def command(app: str, port: int) -> list[str]:
        common = ("--host", "127.0.0.1", "--port", str(port), "--interface", interface, "--log-level", "warning")
        return _python("granian", app, *common, *args)

    return command


def _gunicorn(*args: str) -> Callable[[str, int], list[str]]:
    def command(app: str, port: int) -> list[str]:
        return _python(
            "gunicorn", app, "-b", f"127.0.0.1:{port}", "--log-level", "warning", "--no-control-socket", *args
        )

    return command


def _daphne(app: str, port: int) -> list[str]:
    return _python("daphne", "-b", "127.0.0.1", "-p", str(port), "-v", "0", app)


def _nginx() -> str | None:
    return shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def _nginx_version() -> str:
    out = subprocess.run([_nginx() or "nginx", "-v"], capture_output=True, text=True, check=True).stderr
    return out.strip().rpartition("/")[2].join(("nginx ", ""))


def _nginx_conf(ignore_abort: str, buffering: str) -> Callable[[int, int], str]:
    return lambda port, upstream: (
        f"""
daemon off; master_process off; worker_processes 1; error_log stderr crit; pid nginx.pid;
events {{ worker_connections 256; }}
http {{
  access_log off;
  client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path f; uwsgi_temp_path u; scgi_temp_path s;
  server {{
    listen 127.0.0.1:{port};
    client_max_body_size 0;
    location / {{
      proxy_pass http://127.0.0.1:{upstream};
      proxy_http_version 1.1;
      proxy_ignore_client_abort {ignore_abort};
      proxy_buffering {buffering};
      proxy_request_buffering {buffering};
    }}
  }}
}}
"""
    )


def _t(*traits: str) -> frozenset[str]:
    return frozenset(traits)


_UV: Final = ("uvicorn",)

SERVERS: Final[tuple[Server, ...]] = (
    Server("uvicorn-h11", _uvicorn("--http", "h11", "--loop", "asyncio"), (*_UV, "h11"), traits=_t("uvicorn")),
    Server(
        "uvicorn-httptools",
        _uvicorn("--http", "httptools", "--loop", "asyncio"),
        (*_UV, "httptools"),
        traits=_t("uvicorn", "httptools"),
    ),
    Server(
        "uvicorn-httptools-uvloop",
        _uvicorn("--http", "httptools", "--loop", "uvloop"),
        (*_UV, "httptools", "uvloop"),
        traits=_t("uvicorn", "httptools", "httptools-uvloop"),
    ),
    Server("hypercorn-asyncio", _hypercorn("asyncio"), ("hypercorn",), traits=_t("hypercorn")),
    Server("hypercorn-trio", _hypercorn("trio"), ("hypercorn", "trio"), traits=_t("hypercorn", "trio")),
    Server("granian-asgi", _granian("asgi", "--loop", "asyncio"), ("granian",), traits=_t("granian")),
    Server("gunicorn-asgi", _gunicorn("-k", "asgi", "--asgi-loop", "asyncio"), ("gunicorn",), traits=_t("gunicorn")),
    Server(
        "uvicorn-h11-uvloop",
        _uvicorn("--http", "h11", "--loop", "uvloop"),
        (*_UV, "h11", "uvloop"),
        long_tail=True,
        traits=_t("uvicorn"),
    ),
    Server(
        "hypercorn-uvloop",
        _hypercorn("uvloop"),
        ("hypercorn", "uvloop"),
        long_tail=True,
        traits=_t("hypercorn"),
    ),
    Server(
        "granian-asginl-uvloop",
        _granian("asginl", "--loop", "uvloop"),
        ("granian", "uvloop"),
        long_tail=True,
        traits=_t("granian"),
    ),
    Server(
        "granian-task-rust",
        _granian("asgi", "--loop", "asyncio", "--task-impl", "rust"),
        ("granian",),
        long_tail=True,
        traits=_t("granian"),
    ),
    Server("daphne", _daphne, ("daphne", "twisted"), long_tail=True, traits=_t("daphne")),
    Server(
        "gunicorn-asgi-uvloop",
        _gunicorn("-k", "asgi", "--asgi-loop", "uvloop"),
        ("gunicorn", "uvloop"),
        long_tail=True,
        traits=_t("gunicorn"),
    ),
    Server(
        "gunicorn-uvicorn-worker",
        _gunicorn("-k", "uvicorn_worker.UvicornWorker"),
        ("gunicorn", "uvicorn-worker", "uvicorn", "httptools", "uvloop"),
        long_tail=True,
        traits=_t("uvicorn", "httptools", "httptools-uvloop"),
    ),
    Server(
        "nginx",
        _uvicorn("--http", "h11", "--loop", "asyncio"),
        (*_UV, "h11"),
        long_tail=True,
        proxy=_nginx_conf("off", "off"),
        traits=_t("nginx"),
    ),
    Server(
        "nginx-buffering",
        _uvicorn("--http", "h11", "--loop", "asyncio"),
        (*_UV, "h11"),
        long_tail=True,
        proxy=_nginx_conf("off", "on"),
        traits=_t("nginx", "nginx-buffering"),
    ),
    Server(
        "nginx-ignore-abort",
        _uvicorn("--http", "h11", "--loop", "asyncio"),
        (*_UV, "h11"),
        long_tail=True,
        proxy=_nginx_conf("on", "off"),
        traits=_t("nginx", "nginx-ignore-abort"),
    ),
    Server(
        "uvicorn-zttp-h2",
        _uvicorn("--http", "zttp", "--http2"),
        (*_UV, "zttp"),
        http2=True,
        long_tail=True,
        traits=_t("uvicorn-h2"),
    ),
    Server("hypercorn-asyncio-h2", _hypercorn("asyncio"), ("hypercorn", "h2"), http2=True, traits=_t("hypercorn-h2")),
    Server(
        "hypercorn-trio-h2",
        _hypercorn("trio"),
        ("hypercorn", "trio", "h2"),
        http2=True,
        traits=_t("hypercorn-h2", "trio"),
        long_tail=True,
    ),
    Server(
        "granian-asgi-h2",
        _granian("asgi", "--loop", "asyncio", "--http", "2"),
        ("granian",),
        http2=True,
        traits=_t("granian-h2"),
    ),
    Server(
        "gunicorn-asgi-h2",
        _gunicorn("-k", "asgi", "--timeout", "3", "--http-protocols", "h2,h1", "--http2-cleartext", "prior-knowledge"),
        ("gunicorn", "h2"),
        http2=True,
        long_tail=True,
        traits=_t("gunicorn-h2"),
    ),
)

BY_NAME: Final = {server.name: server for server in SERVERS}


# ---------------------------------------------------------------------- a running one


class ServerDiedError(Exception):
    """The server ended, or never answered."""


class Process:
    """A server that runs ``app``, from ``with`` to the end of the block, and its record."""

    def __init__(self, server: Server, app: str, directory: Path, env: Mapping[str, str] | None = None) -> None:
        self.server = server
        self._env = dict(env or {})
        self.events: list[dict[str, Any]] = []
        self._app = app
        self._directory = directory
        self.record = directory / "record.jsonl"
        self.record.touch()
        self._reading = self.record.open("rb")
        self._rest = b""
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        for attempt in range(3):  # somebody else may take the free port first
            try:
                self._start()
            except ServerDiedError:
                self.stop()
                if attempt == 2:
                    raise
            else:
                return self
        raise AssertionError

    def __exit__(self, *exc_info: object) -> None:
        self.stop()
        self._reading.close()

    @property
    def pid(self) -> int:
        """The process that was started. The application may run in a child of it."""
        return self._processes[0].pid

    @property
    def stderr(self) -> str:
        """What the server has said so far."""
        return (self._directory / "stderr").read_text(errors="replace")

    def _start(self) -> None:
        self.upstream = free_port()
        self.port = free_port() if self.server.proxy is not None else self.upstream
        self._spawn(self.server.command(self._app, self.upstream))
        if self.server.proxy is not None:
            conf = self._directory / "nginx.conf"
            conf.write_text(self.server.proxy(self.port, self.upstream))
            self._spawn([_nginx() or "nginx", "-p", str(self._directory), "-c", str(conf), "-e", "stderr"])
        deadline = time.monotonic() + START_TIMEOUT
        while True:
            try:
                self.census()
                return
            except (OSError, ValueError):
                if any(process.poll() is not None for process in self._processes) or time.monotonic() > deadline:
                    raise ServerDiedError(f"{self.server.name} does not answer:\n{self.stderr[-3000:]}") from None
                time.sleep(0.02)

    def _spawn(self, command: list[str]) -> None:
        env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("COV", "PYTEST"))},
            "EVERYWHERE_RECORD": str(self.record),
            "EVERYWHERE_PARENT": str(os.getpid()),
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            **self._env,
        }
        with (self._directory / "stderr").open("ab") as log:
            self._processes.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def stop(self, sig: signal.Signals = signal.SIGTERM) -> None:
        """End it, politely first. A second call does nothing."""
        for process in reversed(self._processes):
            if process.poll() is None:
                process.send_signal(sig)
            try:
                process.wait(STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                pass
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its own session: nobody else is in it
            process.wait()
        self._processes.clear()

    # what it says

    def ask(self, path: str) -> Any:
        """What one of the witness' own pages says, over a connection of its own, past any proxy."""
        url = f"http://127.0.0.1:{self.upstream}{path}"
        if self.server.http2:
            from .clients import H2Client

            with H2Client(self.upstream) as client:
                stream = client.ask(path)
                return json.loads(client.finish(stream))
        with urllib.request.urlopen(url, timeout=5) as response:
            return json.load(response)

    def census(self) -> list[str]:
        """The tasks that have outlived their call."""
        orphans: list[str] = self.ask("/-/census")
        return orphans

    def look(self) -> list[dict[str, Any]]:
        """Every event so far."""
        self._rest += self._reading.read()
        *lines, self._rest = self._rest.split(b"\n")
        self.events.extend(json.loads(line) for line in lines)
        return self.events

    def of(self, run: str) -> list[dict[str, Any]]:
        """The events of one run so far."""
        return [event for event in self.look() if event["run"] == run]

    def find(self, run: str, what: str) -> dict[str, Any] | None:
        """The first such event of a run, if there is one."""
        return next((event for event in self.of(run) if event["what"] == what), None)

    def wait_for(self, condition: Callable[[], object], timeout: float) -> bool:
        """Look at the record until ``condition()`` holds. False if ``timeout`` seconds passed first."""
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.004)
        return True

    def wait_for_event(self, run: str, what: str, timeout: float = 10) -> bool:
        """Wait for one kind of event of a run."""
        return self.wait_for(lambda: self.find(run, what), timeout)

    def wait_until_quiet(self, run: str, seconds: float = 0.06, timeout: float = 5) -> None:
        """Wait until nothing has happened in a run for so long: the reader, if there is one, is where it stays."""

        def quiet() -> bool:
            events = self.of(run)
            return bool(events) and time.monotonic_ns() - events[-1]["at"] > seconds * 1e9

        self.wait_for(quiet, timeout)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextlib.contextmanager
def running(server: Server, app: str, directory: Path, env: Mapping[str, str] | None = None) -> Iterator[Process]:
    """`Process`, with its files in ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    with Process(server, app, directory, env) as process:
        yield process
