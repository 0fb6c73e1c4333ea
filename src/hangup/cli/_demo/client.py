"""The client of the demo: a plain socket that asks, waits for its moment, and hangs up."""

from __future__ import annotations

import socket
import struct
import time
from typing import Final, Self

from hangup.cli import CannotRunError

from .scenarios import Moment, Scenario
from .server import Server
from .witness import RUN_HEADER

#: Seconds that anything the client waits for may take.
PATIENCE: Final = 10.0
#: Seconds that the client stays before it loses interest. One that leaves in the first 20 ms of a call is noticed when
#: hangup first looks, up to 40 ms after the start: that is how long nothing is started for a call.
STAY: Final = 0.125
#: Seconds after the end of a request in which a cleanup still counts as late, and not as lost.
LATE: Final = 1.0

_LINGER_0: Final = struct.pack("ii", 1, 0)


class Client:
    """One connection."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        self._received = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._socket.close()

    def ask(self, scenario: Scenario, run: str) -> None:
        """Send the request, and of its body as much as the scenario wants."""
        body = b"x" * scenario.body_sent
        head = (
            f"{scenario.method} {scenario.path.format(run=run)} HTTP/1.1\r\n"
            f"host: 127.0.0.1\r\n"
            f"{RUN_HEADER.decode()}: {run}\r\n"
            f"content-length: {scenario.body_size}\r\n\r\n"
        )
        self._socket.sendall(head.encode() + body)

    def read_until(self, part: bytes) -> None:
        """Wait until ``part`` has arrived.

        :raises ConnectionError: if the server closes first.
        """
        while part not in self._received:
            data = self._socket.recv(65536)
            if not data:
                raise ConnectionError(f"the server closed the connection before {part!r}; it sent {self._received!r}")
            self._received += data

    def hang_up(self, how: str) -> int:
        """Close the connection with a ``"FIN"`` or a ``"RST"``. Returns when: `time.monotonic_ns`."""
        if how == "RST":
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_0)
        else:
            self._drain()  # closed with data unread, a socket sends a RST of its own accord
        at = time.monotonic_ns()
        self._socket.close()
        return at

    def _drain(self) -> None:
        self._socket.setblocking(False)
        try:
            while self._socket.recv(65536):
                pass
        except BlockingIOError:
            pass


def hang_up_on(server: Server, port: int, scenario: Scenario, how: str, run: str) -> int:
    """Play ``scenario`` once as ``run``, and wait until the server has done with it. Returns when the client left."""
    try:
        with Client(port) as client:
            client.ask(scenario, run)
            server.wait_for(run, "began", timeout=PATIENCE)
            if scenario.moment in {Moment.DURING_RESPONSE, Moment.AFTER_RESPONSE}:
                client.read_until(scenario.awaited)
            time.sleep(STAY)
            at = client.hang_up(how)
    except OSError as exc:
        raise CannotRunError(f"the client of the {scenario.name!r} got no further: {exc}") from exc
    server.look_for(run, "left", timeout=PATIENCE)
    server.look_for(run, "cleaned up", timeout=LATE)
    return at
