"""A scripted peer: an ASGI server and its client in one, in process, that hangs up exactly where you want it to.

No in-process transport can do that: Starlette's ``TestClient`` and httpx's ``ASGITransport`` never deliver a
disconnect in the middle of a response. Use it to test that your handlers clean up::

    peer = Peer()
    async with peer.calling(app):
        await peer.wait_for_body(b"first chunk")
        peer.hang_up()
    assert peer.closed_cleanly is False

Everything a real server is known to do differently is a knob; see `Quirks`. Nothing here knows hangup's internals.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
from starlette.types import ASGIApp, Message, Scope


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


class Peer:
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
        self.quirks = quirks or Quirks()
        self.sent: list[Message] = []  #: every message the server was given
        self.late: list[Message] = []  #: those given after the client left
        self.reads = 0  #: how often the server's ``receive`` was called
        self.reading = 0  #: how many calls of it are pending
        self.error: BaseException | None = None  #: what left the application
        self.ended = False  #: whether the application has returned or raised
        self.left = False
        self._pieces = list(body)
        self._body_ends = body_ends
        self._blocked = False
        self._told = False
        self._changed = anyio.Event()
        self._wire_complete = False
        self.scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(b"host", b"testserver"), *((k.lower().encode(), v.encode()) for k, v in headers)],
            "client": ("127.0.0.1", 50000),
            "server": ("127.0.0.1", 80),
            "state": {},
        }
        for key, value in (extra or {}).items():
            if value is None:
                self.scope.pop(key, None)
            else:
                self.scope[key] = value

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

    # running

    @asynccontextmanager
    async def calling(self, app: ASGIApp) -> AsyncIterator[Peer]:
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

    async def wait_for_body(self, part: bytes) -> None:
        """Wait until ``part`` has been received."""
        await self.wait_for(lambda: part in self.body)

    def touch(self) -> None:
        """Something happened in the test: have `wait_for` look again."""
        self._change()

    # what the server does

    async def receive(self) -> Message:
        """The server's ``receive``."""
        self.reads += 1
        self.reading += 1
        self._change()
        try:
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
        finally:
            self.reading -= 1

    async def send(self, message: Message) -> None:
        """The server's ``send``."""
        while self._blocked:
            await self._changed.wait()
        if self.left:
            self.late.append(message)
            if self.quirks.send_error is not None:
                raise self.quirks.send_error
            return
        if self._wire_complete:
            raise RuntimeError(f"the response is complete; then came {message['type']!r}")
        final = message["type"] == "http.response.body" and not message.get("more_body", False)
        if final and self.quirks.disconnect_before_final_returns:
            self._wire_complete = True
            self._change()
            await anyio.lowlevel.checkpoint()
        self.sent.append(message)
        self._wire_complete = final
        self._change()

    def _change(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
