"""A scripted peer: an ASGI server and its client in one, in process, that hangs up exactly where you want it to.

No in-process transport can do that: Starlette's ``TestClient`` and httpx's ``ASGITransport`` never deliver a
disconnect in the middle of a response. Use it to test that your handlers clean up::

    peer = Peer()
    async with peer.calling(app):
        await peer.wait_for_body(b"first chunk")
        peer.hang_up()
    assert not peer.complete

`WebSocketPeer` is the same for a WebSocket.
Everything a real server is known to do differently is a knob; see `Quirks`. Nothing here knows hangup's internals.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import anyio
from starlette.types import ASGIApp, Message, Scope

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quirks:
    """How a server differs from the next. The defaults are uvicorn's."""

    #: Whether a disconnect is answered on every `receive` (uvicorn, granian, gunicorn) or once (hypercorn, daphne).
    latched: bool = True
    #: Whether `receive` says disconnect once the response is complete, with the client still there. gunicorn: not.
    disconnect_on_complete: bool = True
    #: Whether that comes before the ``send`` of the last frame returns (hypercorn on trio).
    disconnect_before_final_returns: bool = False
    #: What ``send`` raises for a client that has left; None: it returns as if nothing had happened.
    send_error: Exception | None = None
    #: Whether a ``send`` that blocks stays blocked when the client leaves (hypercorn, gunicorn under back-pressure).
    send_stays_blocked: bool = False
    #: Whether body messages that are there are lost when the client leaves (uvicorn) or delivered first (hypercorn).
    body_lost: bool = True
    #: How the server calls the end of a WebSocket whose client vanished: 1005 (uvicorn, granian) or 1006.
    vanished_code: int = 1005
    #: What it says of every WebSocket that was closed in order, if not the code it got. hypercorn: 1006.
    closed_code: int | None = None


class _Side:
    """What the two kinds of peer share: a client that leaves, a server that runs the application and keeps score."""

    def __init__(self, quirks: Quirks | None) -> None:
        self.quirks: Quirks = quirks or Quirks()
        self.scope: Scope
        self.sent: list[Message] = []  #: every message the server was given
        self.late: list[Message] = []  #: those given after the client left
        self.reads: int = 0  #: how often the server's ``receive`` was called
        self.reading: int = 0  #: how many calls of it are pending
        self.error: BaseException | None = None  #: what left the application
        self.ended: bool = False  #: whether the application has returned or raised
        self.left: bool = False
        self._blocked = False
        self._told = False
        self._changed = anyio.Event()

    # what the client does

    def hang_up(self) -> None:
        """The client leaves. The server knows at once."""
        self.left = True
        if not self.quirks.send_stays_blocked:
            self._blocked = False
        self._change()

    def stop_reading(self) -> None:
        """From now on ``send`` blocks, as under back-pressure."""
        self._blocked = True

    def read_on(self) -> None:
        """Whoever is blocked in ``send`` goes on."""
        self._blocked = False
        self._change()

    # running

    @asynccontextmanager
    async def calling(self, app: ASGIApp) -> AsyncIterator[Self]:
        """Run ``app`` beside the block, and wait for its end after it. What it raises is kept in `error`."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.run, app)
            yield self
            await self.wait_for(lambda: self.ended)

    async def run(self, app: ASGIApp) -> None:
        """Run ``app`` to its end. What it raises is kept in `error`, a cancellation of ours excepted."""
        try:
            await app(self.scope, self.receive, self.send)
        except BaseException as exc:
            self.error = exc
            if not isinstance(exc, Exception):
                raise
        finally:
            self.ended = True
            self._change()

    async def wait_for(self, condition: Callable[[], object], timeout: float = 10) -> None:
        """Wait until ``condition()`` holds; it is looked at whenever something happens here.

        :raises TimeoutError: after ``timeout`` seconds.
        """
        with anyio.fail_after(timeout):
            while not condition():
                await self._changed.wait()

    def touch(self) -> None:
        """Something happened in the test: have `wait_for` look again."""
        self._change()

    # what the server does

    async def receive(self) -> Message:
        """The server's ``receive``."""
        raise NotImplementedError

    async def send(self, message: Message) -> None:
        """The server's ``send``."""
        raise NotImplementedError

    @contextmanager
    def _pending_read(self) -> Iterator[None]:
        self.reads += 1
        self.reading += 1
        self._change()
        try:
            yield
        finally:
            self.reading -= 1

    async def _reaches_nobody(self, message: Message) -> bool:
        """Wait while the client does not read; then whether it has left."""
        while self._blocked:
            await self._changed.wait()
        if self.left:
            self.late.append(message)
            if self.quirks.send_error is not None:
                raise self.quirks.send_error
        return self.left

    def _change(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()


class Peer(_Side):
    """One request, and the client and server around it.

    :param body: the request body, in the pieces in which the server delivers it.
    :param body_ends: False for a client that does not send its whole body.
    :param quirks: how the server behaves.
    :param extra: more keys for the scope; ``None`` as a value removes one.
    """

    def __init__(
        self,
        *,
        method: str = "GET",
        path: str = "/",
        query: str = "",
        headers: Iterable[tuple[str, str]] = (),
        body: Iterable[bytes] = (b"",),
        body_ends: bool = True,
        quirks: Quirks | None = None,
        extra: MutableMapping[str, Any] | None = None,
    ) -> None:
        super().__init__(quirks)
        self._pieces = _parts("body", body)
        pairs = _parts("headers", headers)
        self._body_ends = body_ends
        self._wire_complete = False
        self._trailers = False
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(b"host", b"testserver"), *((k.lower().encode(), v.encode()) for k, v in pairs)],
            "client": ("127.0.0.1", 50000),
            "server": ("127.0.0.1", 80),
            "state": {},
        }
        _change_scope(self.scope, extra)

    # what the client saw

    @property
    def status(self) -> int | None:
        """The status the client got, if any."""
        return next((m["status"] for m in self.sent if m["type"] == "http.response.start"), None)

    @property
    def body(self) -> bytes:
        """The body the client got so far."""
        return b"".join(m.get("body", b"") for m in self.sent if m["type"] == "http.response.body")

    @property
    def complete(self) -> bool:
        """Whether the client got the end of the response."""
        return self._wire_complete

    async def wait_for_body(self, part: bytes) -> None:
        """Wait until ``part`` has been received."""
        await self.wait_for(lambda: part in self.body)

    # what the server does

    async def receive(self) -> Message:
        """The server's ``receive``."""
        with self._pending_read():
            while True:
                gone = self.left or (self._wire_complete and self.quirks.disconnect_on_complete)
                if self._pieces and not (gone and self.quirks.body_lost):
                    body = self._pieces.pop(0)
                    return {
                        "type": "http.request",
                        "body": body,
                        "more_body": bool(self._pieces) or not self._body_ends,
                    }
                if gone and (self.quirks.latched or not self._told):
                    self._told = True
                    return {"type": "http.disconnect"}
                await self._changed.wait()

    async def send(self, message: Message) -> None:
        """The server's ``send``."""
        if await self._reaches_nobody(message):
            return
        if self._wire_complete:
            raise RuntimeError(f"the response is complete; then came {message['type']!r}")
        final = self._is_last(message)
        if final and self.quirks.disconnect_before_final_returns:
            self._wire_complete = True
            self._change()
            await anyio.lowlevel.checkpoint()
        self.sent.append(message)
        self._wire_complete = final
        self._change()

    def _is_last(self, message: Message) -> bool:
        kind = message["type"]
        if kind == "http.response.start":
            self._trailers = message.get("trailers", False)
        if kind in {"http.response.body", "http.response.zerocopysend", "http.response.pathsend"}:
            return not message.get("more_body", False) and not self._trailers
        return kind == "http.response.trailers" and not message.get("more_trailers", False)


class WebSocketPeer(_Side):
    """One WebSocket, and the client and server around it.

    :param messages: what the client has sent by the time it is accepted; `say` sends more.
    :param quirks: how the server behaves.
    :param extra: more keys for the scope; ``None`` as a value removes one.
    """

    def __init__(
        self,
        *,
        path: str = "/",
        messages: Iterable[str | bytes] = (),
        quirks: Quirks | None = None,
        extra: MutableMapping[str, Any] | None = None,
    ) -> None:
        super().__init__(quirks)
        self._queue: list[Message] = [{"type": "websocket.connect"}]
        self._goodbye: Message | None = None
        self.scope = {
            "type": "websocket",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "scheme": "ws",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"host", b"testserver")],
            "client": ("127.0.0.1", 50000),
            "server": ("127.0.0.1", 80),
            "subprotocols": [],
            "state": {},
            "extensions": {"websocket.http.response": {}},
        }
        _change_scope(self.scope, extra)
        for message in _parts("messages", messages):
            self.say(message)

    # what the client does

    def say(self, message: str | bytes) -> None:
        """Send a message."""
        self._queue.append({"type": "websocket.receive", "text" if isinstance(message, str) else "bytes": message})
        self._change()

    def hang_up(self) -> None:
        """The client vanishes, without a close frame."""
        code = self.quirks.vanished_code if self.accepted else 1006
        self._leave({"type": "websocket.disconnect", "code": code})

    def close(self, code: int = 1000, reason: str = "") -> None:
        """The client closes in order. With 1005: without a code, as a browser's ``close()`` does."""
        code = self.quirks.closed_code or code
        self._leave({"type": "websocket.disconnect", "code": code, "reason": reason})

    def shut_down(self) -> None:
        """The server stops, and says so the way uvicorn does."""
        self._leave({"type": "websocket.disconnect", "code": 1012})

    # what the client saw

    @property
    def accepted(self) -> bool:
        """Whether the handshake was accepted."""
        return any(m["type"] == "websocket.accept" for m in self.sent)

    @property
    def status(self) -> int | None:
        """The HTTP status of the handshake, if any: 101, 403 or what a denial response said."""
        if self.accepted:
            return 101
        denials = (m["status"] for m in self.sent if m["type"] == "websocket.http.response.start")
        return next(denials, 403 if self.close_code is not None else None)

    @property
    def received(self) -> list[str | bytes]:
        """What the client received so far."""
        messages = (m for m in self.sent if m["type"] == "websocket.send")
        return [m["text"] if m.get("text") is not None else m["bytes"] for m in messages]

    @property
    def close_code(self) -> int | None:
        """The code the application closed with, if it did."""
        return next((m.get("code", 1000) for m in self.sent if m["type"] == "websocket.close"), None)

    @property
    def unread(self) -> int:
        """How many messages of the client still wait at the server."""
        return len(self._queue)

    # what the server does

    async def receive(self) -> Message:
        """The server's ``receive``."""
        with self._pending_read():
            while True:
                if self._queue:
                    return self._queue.pop(0)
                if self._goodbye is not None and (self.quirks.latched or not self._told):
                    self._told = True
                    return self._goodbye
                await self._changed.wait()

    async def send(self, message: Message) -> None:
        """The server's ``send``."""
        if await self._reaches_nobody(message):
            return
        if self._goodbye is not None:
            raise RuntimeError(f"the WebSocket is closed; then came {message['type']!r}")
        self.sent.append(message)
        kind = message["type"]
        if kind == "websocket.close" or (kind == "websocket.http.response.body" and not message.get("more_body")):
            code = message.get("code", 1000) if self.accepted else 1006
            self._goodbye = {"type": "websocket.disconnect", "code": code}
        self._change()

    def _leave(self, goodbye: Message) -> None:
        self._goodbye = self._goodbye or goodbye
        super().hang_up()


def _parts(option: str, value: Iterable[T]) -> list[T]:
    if isinstance(value, (str, bytes)):
        raise TypeError(f"{option} takes a list, [{value!r}] for one, not {value!r}")
    if isinstance(value, Mapping):
        raise TypeError(f"{option} takes a list of pairs, not {value!r}")
    return list(value)


def _change_scope(scope: Scope, extra: MutableMapping[str, Any] | None) -> None:
    for key, value in (extra or {}).items():
        if value is None:
            scope.pop(key, None)
        else:
            scope[key] = value
