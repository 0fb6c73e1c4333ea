"""A real uvicorn in a thread of this process, and raw sockets to hang up on it."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp


class Serving:
    """A server that runs: where it listens."""

    def __init__(self, port: int, server: uvicorn.Server) -> None:
        self.port = port
        self.server = server
        self.url = f"http://127.0.0.1:{port}"

    def connect(self) -> socket.socket:
        """A connected client."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def get(self, path: str, *headers: str) -> socket.socket:
        """A client that has sent a request and waits."""
        client = self.connect()
        lines = [f"GET {path} HTTP/1.1", "Host: x", *headers, "", ""]
        client.sendall("\r\n".join(lines).encode())
        return client


@contextlib.contextmanager
def serving(app: ASGIApp, **config: Any) -> Iterator[Serving]:
    """Serve ``app`` on a free loopback port until the block ends."""
    options = {"log_config": None, "access_log": False, "lifespan": "off", "timeout_graceful_shutdown": 5, **config}
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        server = uvicorn.Server(uvicorn.Config(app, **options))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_for(lambda: server.started or not thread.is_alive())
            assert server.started, "uvicorn did not start"
            yield Serving(listener.getsockname()[1], server)
        finally:
            server.should_exit = True
            thread.join(15)
            assert not thread.is_alive(), "uvicorn did not stop"


def wait_for(condition: Callable[[], object], timeout: float = 15) -> None:
    """Wait in a thread until ``condition()`` holds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{condition} did not come true in {timeout} s")
        time.sleep(0.001)


def close_with_reset(client: socket.socket) -> None:
    """From now on ``client.close()`` sends RST instead of FIN."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def reset(client: socket.socket) -> None:
    """Hang up with RST instead of FIN."""
    close_with_reset(client)
    client.close()


def read_all(client: socket.socket) -> bytes:
    """Everything until the server closes; a reset ends it too. Closes the client."""
    data = b""
    with client, contextlib.suppress(ConnectionResetError):
        while part := client.recv(65536):
            data += part
    return data
