"""Servers in processes of their own, and clients made of a socket."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from .real import close_with_reset

#: Seconds that anything may take on a loaded machine before a test gives up.
PATIENCE = 15.0


class Server:
    """``python -m uvicorn ...`` or another, listening on a socket of ours, from ``with`` to its end."""

    def __init__(self, module: str, *args: str, env: Mapping[str, str] | None = None) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._socket.getsockname()[1]
        listener = self._socket.fileno()
        inherited = [listener] if any("{fd}" in arg for arg in args) else []
        if not inherited:
            self._socket.close()  # it binds the port itself
        self.notes: list[str] = []
        self.errors = ""
        self._changed = threading.Condition()
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *(arg.format(fd=listener, port=self.port) for arg in args)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=inherited,
            start_new_session=True,  # so that its workers can be ended with it
            cwd=Path(__file__).parent.parent,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
        )
        self._threads = [threading.Thread(target=self._listen), threading.Thread(target=self._listen_to_errors)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        self._socket.close()
        for thread in self._threads:
            thread.join()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def wait_for(self, note: str, count: int = 1) -> None:
        """Wait until ``note`` was written ``count`` times."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.count(note) >= count, PATIENCE):
                raise AssertionError(f"no {count} x {note!r} in {self.notes}\n{self.errors}")

    def wait_for_error(self, text: str) -> None:
        """Wait until ``text`` was written to the standard error."""
        with self._changed:
            assert self._changed.wait_for(lambda: text in self.errors, PATIENCE), self.errors

    def send_signal(self, signum: int) -> None:
        self._process.send_signal(signum)

    def count(self, note: str) -> int:
        return sum(line.startswith(note) for line in self.notes)

    def terminate(self, signum: int = signal.SIGTERM) -> float:
        """Send ``signum`` and wait for the end. Seconds that it took."""
        started = time.perf_counter()
        self._process.send_signal(signum)
        self._process.wait(PATIENCE)
        took = time.perf_counter() - started
        for thread in self._threads:
            thread.join(PATIENCE)
        return took

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self.notes.append(line.strip())
                self._changed.notify_all()

    def _listen_to_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            with self._changed:
                self.errors += line
                self._changed.notify_all()


class Client:
    """A socket that speaks just enough HTTP and WebSocket."""

    def __init__(self, port: int, path: str, *, websocket: bool = False) -> None:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                self._socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
                break
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise
        upgrade = (
            "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        )
        request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{upgrade if websocket else ''}\r\n"
        self._socket.sendall(request.encode())
        self.received = b""

    def read_until(self, part: bytes) -> None:
        while part not in self.received:
            more = self._socket.recv(65536)
            assert more, (part, self.received)
            self.received += more

    def read_to_the_end(self) -> bytes:
        while True:
            try:
                more = self._socket.recv(65536)
            except ConnectionResetError:
                return self.received
            if not more:
                return self.received
            self.received += more

    def send_close(self, code: int | None) -> None:
        """A WebSocket close frame, masked as clients have to."""
        payload = b"" if code is None else struct.pack("!H", code)
        self._socket.sendall(bytes([0x88, 0x80 | len(payload)]) + bytes(4) + payload)

    def vanish(self, *, reset: bool = False) -> None:
        """Close the connection: with FIN, or with RST."""
        if reset:
            close_with_reset(self._socket)
        self._socket.close()
