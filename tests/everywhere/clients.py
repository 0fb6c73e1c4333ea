"""Clients that hang up: plain sockets, over HTTP/1.1 and HTTP/2."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from typing import Final, Self

from ..real import close_with_reset

#: Seconds that anything a client waits for may take.
PATIENCE: Final = 10.0


class Closed(ConnectionError):
    """The server closed first."""


class Client:
    """One HTTP/1.1 connection."""

    ways: Final = ("FIN", "RST", "HALF")

    def __init__(self, port: int, *, small_buffer: bool = False) -> None:
        self._socket = socket.socket()
        if small_buffer:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.settimeout(PATIENCE)
        self._socket.connect(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.received = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._socket.close()

    def ask(
        self,
        path: str,
        run: str = "",
        *,
        body_size: int | None = None,
        body: bytes = b"",
        headers: Iterable[tuple[str, str]] = (),
        then: bytes = b"",
    ) -> None:
        """Send a request: a POST if it has a body, of which ``body`` goes out now; ``then`` follows at once."""
        self._socket.sendall(self.request(path, run, body_size=body_size, headers=headers) + body + then)

    @staticmethod
    def request(path: str, run: str, *, body_size: int | None = None, headers: Iterable[tuple[str, str]] = ()) -> bytes:
        """The head of a request."""
        method = "GET" if body_size is None else "POST"
        lines = [f"{method} {path} HTTP/1.1", "host: 127.0.0.1", f"x-run: {run}"]
        if body_size is not None:
            lines.append(f"content-length: {body_size}")
        lines.extend(f"{name}: {value}" for name, value in headers)
        return "\r\n".join((*lines, "", "")).encode()

    def send(self, data: bytes) -> None:
        """Send more of the body."""
        self._socket.sendall(data)

    def send_some(self, data: memoryview) -> int:
        """Send what fits now. Returns how much that was."""
        return self._socket.send(data)

    def set_blocking(self, blocking: bool) -> None:
        """As of the socket."""
        self._socket.setblocking(blocking)

    def read_until(self, part: bytes) -> None:
        """Wait until ``part`` has arrived.

        :raises Closed: if the server closes first.
        """
        while part not in self.received:
            self._read()

    def read_response(self) -> tuple[int, bytes]:
        """The next response on this connection: its status and body. 1xx ones are skipped."""
        while True:
            self.read_until(b"\r\n\r\n")
            head, _, rest = self.received.partition(b"\r\n\r\n")
            status = int(head.split(b" ", 2)[1])
            if status >= 200:
                break
            self.received = rest
        fields = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:])
        if b"content-length" in fields:
            size = int(fields[b"content-length"])
            while len(rest) < size:
                self._read()
                rest = self.received.partition(b"\r\n\r\n")[2]
            self.received = rest[size:]
            return status, rest[:size]
        if b"chunked" in fields.get(b"transfer-encoding", b""):
            self.read_until(b"\r\n0\r\n\r\n")
            rest, _, self.received = self.received.partition(b"\r\n\r\n")[2].partition(b"\r\n0\r\n\r\n")
        else:
            self.read_to_end()
            rest, self.received = self.received.partition(b"\r\n\r\n")[2], b""
        return status, rest

    def read_to_end(self) -> bytes:
        """All that comes until the server closes."""
        try:
            while True:
                self._read()
        except (Closed, ConnectionResetError):
            return self.received

    def _read(self) -> None:
        data = self._socket.recv(65536)
        if not data:
            raise Closed(f"the server closed the connection; it sent {self.received[-500:]!r}")
        self.received += data

    def leave(self, how: str) -> int:
        """Hang up: ``"FIN"``, ``"RST"``, or ``"HALF"`` (close for writing, go on reading). Returns `monotonic_ns`."""
        if how == "HALF":
            at = time.monotonic_ns()
            self._socket.shutdown(socket.SHUT_WR)
            return at
        if how == "RST":
            close_with_reset(self._socket)
        else:
            self._drain()  # closed with data unread, a socket sends a RST of its own accord
        at = time.monotonic_ns()
        self._socket.close()
        return at

    def _drain(self) -> None:
        self._socket.setblocking(False)
        try:
            for _ in range(64):
                if not self._socket.recv(65536):
                    return
        except BlockingIOError:
            pass


class H2Client:
    """One HTTP/2 connection, cleartext, with prior knowledge."""

    ways: Final = ("RST_STREAM", "FIN", "RST")

    def __init__(self, port: int, *, window: int | None = None) -> None:
        from h2.config import H2Configuration
        from h2.connection import H2Connection

        self._socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._h2 = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self._paused: set[int] = set()
        self.bodies: dict[int, bytes] = {}
        self.statuses: dict[int, int] = {}
        self.ended: set[int] = set()
        self.reset: set[int] = set()
        self._h2.initiate_connection()
        self._flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._socket.close()

    def ask(
        self, path: str, run: str = "", *, body_size: int | None = None, body: bytes = b"", read: bool = True
    ) -> int:
        """Open a stream, and return its number. ``read=False``: its flow window is not opened again."""
        stream: int = self._h2.get_next_available_stream_id()
        headers = [
            (":method", "GET" if body_size is None else "POST"),
            (":scheme", "http"),
            (":authority", "127.0.0.1"),
            (":path", path),
            ("x-run", run),
        ]
        if body_size is not None:
            headers.append(("content-length", str(body_size)))
        if not read:
            self._paused.add(stream)
        self.bodies[stream] = b""
        self._h2.send_headers(stream, headers, end_stream=body_size is None)
        self._flush()
        self._send_body(stream, body, body_size)
        return stream

    def _send_body(self, stream: int, body: bytes, body_size: int | None) -> None:
        """Send as much of ``body`` as the server's flow window takes: one that nobody reads stays shut."""
        waited = 0
        while body and waited < 30 and stream not in self.ended | self.reset:
            room = min(self._h2.local_flow_control_window(stream), self._h2.max_outbound_frame_size)
            if not room:
                self.pump(0.01)
                waited += 1
                continue
            self._h2.send_data(stream, body[:room], end_stream=len(body) <= room and len(body) == body_size)
            body = body[room:]
            self._flush()

    def read_until(self, part: bytes, stream: int) -> None:
        """Wait until ``part`` has arrived on ``stream``."""
        while part not in self.bodies[stream]:
            self._read()

    def finish(self, stream: int) -> bytes:
        """Wait for the end of ``stream``, and return its body."""
        while stream not in self.ended:
            if stream in self.reset:
                raise Closed(f"the server reset stream {stream}")
            self._read()
        return self.bodies[stream]

    def leave(self, how: str, stream: int = 1) -> int:
        """Hang up: ``"RST_STREAM"``, or the whole connection with ``"FIN"`` or ``"RST"``. Returns `monotonic_ns`."""
        if how == "RST_STREAM":
            self._h2.reset_stream(stream, error_code=8)  # CANCEL
            at = time.monotonic_ns()
            self._flush()
            return at
        if how == "RST":
            close_with_reset(self._socket)
        else:
            self._socket.settimeout(0.001)
            try:
                for _ in range(64):
                    if not self._socket.recv(65536):
                        break
            except (TimeoutError, BlockingIOError):
                pass
        at = time.monotonic_ns()
        self._socket.close()
        return at

    def pump(self, seconds: float = 0.001) -> None:
        """Take what has arrived, and answer it."""
        self._socket.settimeout(seconds)
        try:
            self._read()
        except TimeoutError:
            pass
        finally:
            self._socket.settimeout(PATIENCE)

    def _flush(self) -> None:
        self._socket.sendall(self._h2.data_to_send())

    def _read(self) -> None:
        from h2 import events

        data = self._socket.recv(65536)
        if not data:
            raise Closed("the server closed the connection")
        for event in self._h2.receive_data(data):
            if isinstance(event, events.ResponseReceived):
                status = next(value for name, value in event.headers if name in {":status", b":status"})
                self.statuses[event.stream_id] = int(status)
            elif isinstance(event, events.DataReceived):
                self.bodies[event.stream_id] += event.data
                if event.stream_id not in self._paused and event.flow_controlled_length:
                    self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, events.StreamEnded):
                self.ended.add(event.stream_id)
            elif isinstance(event, events.StreamReset):
                self.reset.add(event.stream_id)
        self._flush()
