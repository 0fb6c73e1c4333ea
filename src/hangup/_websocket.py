"""WebSockets: the same call, with what is different about its messages.

A connection that was accepted has started; its last frame is the application's ``websocket.close``, or its return. The
client may end it in order, which is no hang-up, and what servers say about the ends of clients differs:

* 1000, 1001 and 3000 to 4999 come from the client's own close frame: it said goodbye.
* 1012 is how uvicorn tells that it shuts down.
* 1005 with a ``reason`` in the message is a close frame without a code, what a browser's ``close()`` sends (uvicorn).
  1005 without one is how uvicorn and granian report a connection that is gone.
* Everything else is a client that vanished. hypercorn says 1006 whatever happened.

The message comes first, always: Channels, Starlette, Falcon and Quart react to it, and are only interrupted when their
grace has passed.
"""

from __future__ import annotations

from typing import ClassVar, Final

from anyio.lowlevel import checkpoint
from starlette.types import Message

from ._answers import ANSWERS, response
from ._call import Call
from ._errors import contains
from ._lifecycle import Cause, Stage
from ._protect import Protect
from ._send import ClientDisconnected, Writer
from ._steps import AmbiguousOutcome
from ._success import HookFailure
from ._watch import OVERHEAD, Reader

DISCONNECT: Final = "websocket.disconnect"

#: Seconds to wait for the server's word on how the client left, when its ``send`` raises.
INQUIRY: Final = 0.1

#: The codes by which an application says that it failed: the 5xx of WebSockets.
FAILURES: Final = frozenset({1011, 1012, 1013, 1014})

#: What a live client is told when its call was stopped.
_CLOSES: Final[dict[Cause | None, tuple[int, str]]] = {
    Cause.TIMEOUT: (1013, "timeout"),
    Cause.SERVER_SHUTDOWN: (1012, "server shutdown"),
    Cause.REQUESTED: (1001, "canceled"),
}


class WebSocketReader(Reader):
    """Reads WebSocket messages. They have no end, so the application may always read for itself."""

    __slots__ = ()

    disconnect: ClassVar[str] = DISCONNECT

    @property
    def in_body(self) -> bool:
        """Never: there is none."""
        return False

    def _note(self, message: Message) -> None:
        if message["type"] == DISCONNECT:
            self._on_disconnect(message)

    def _size(self, message: Message) -> int:
        return len(message.get("bytes") or message.get("text") or "") + OVERHEAD


class WebSocketWriter(Writer):
    """What the application of one WebSocket sends."""

    __slots__ = ()

    def _note(self, message: Message) -> bool:
        kind, life = message["type"], self._life
        if life.stage is Stage.STOPPING:
            self._learn()
        if kind == "websocket.accept":
            life.start(101)
        elif kind == "websocket.http.response.start":
            life.start(message["status"])
        elif kind == "websocket.close" and not life.finished:
            code = message.get("code") or 1000
            if life.status is None:
                life.start(403)
            elif life.close_code is None:
                life.close_code = code
            if code in FAILURES:
                life.fail()
        return super()._note(message)

    def _is_last(self, message: Message) -> bool:
        kind = message["type"]
        if kind == "websocket.http.response.body":
            return not message.get("more_body", False)
        return bool(kind == "websocket.close")

    def _shows_success(self, last: Message) -> bool:
        return super()._shows_success(last) and last.get("code") not in FAILURES

    def _finished(self) -> None:
        super()._finished()
        self.over = True

    async def _send_late(self, message: Message) -> None:
        life = self._life
        closing = message["type"] == "websocket.close"
        self._learn()
        if closing and (self.over or life.finished or life.stage is Stage.TOLD):
            return
        if life.finished and not self.closed:
            await checkpoint()
            raise ClientDisconnected("the WebSocket is closed")
        if not closing and not self.closed:
            life.undeliver()
        await super()._send_late(message)

    def _let_back(self) -> bool:
        # No interruption is under way while the application has its grace.
        return self.cut and super()._let_back()

    async def commit_on_return(self) -> None:
        """The application returns without a close of its own: that is when its success becomes visible."""
        if self._hooks or self._last_hook is not None:
            await self._commit(None)

    async def refuse(self, error: BaseException) -> None:
        if self.started or self._life.left:
            await super().refuse(error)
            return
        self.cut_off()
        self._call.fail(error)
        self._life.start(error.status if isinstance(error, HookFailure) else 500)
        await self._call.send_quietly([{"type": "websocket.close", "code": 1013}])  # the server makes it a 403


class WebSocketCall(Call):
    """One WebSocket connection, from its handshake to its end."""

    __slots__ = ()

    _reader_class: ClassVar[type[Reader]] = WebSocketReader
    _writer_class: ClassVar[type[Writer]] = WebSocketWriter

    async def inquire(self) -> None:
        await (self._reader or self._make_reader()).look(INQUIRY)

    def leave_protected(self, section: Protect) -> None:
        """`protect` ends. An application that still has its grace is not interrupted for that."""
        if self.life.left and not self.life.interrupted and self._protected is not None:
            self._protected.remove(section)
        else:
            super().leave_protected(section)

    def _cause_of(self, message: Message | None) -> Cause:
        code: int = 1006 if message is None else message.get("code") or 1005
        self.life.close_code = code
        if code in {1000, 1001} or 3000 <= code <= 4999 or (code == 1005 and "reason" in (message or ())):
            self.life.part()
            return Cause.CLIENT_DISCONNECT
        return Cause.SERVER_SHUTDOWN if code == 1012 else super()._cause_of(message)

    def _hears(self, left: bool) -> bool:
        return super()._hears(left) or left  # the message first, whenever it receives it

    def _farewell(self) -> Message:
        return {"type": DISCONNECT, "code": self.life.close_code or 1006, "reason": ""}

    async def _returned(self) -> None:
        life, writer = self.life, self._writer
        assert isinstance(writer, WebSocketWriter)
        if life.status == 101 and not life.finished and self._failure is None:
            try:
                await writer.commit_on_return()
            except BaseException:
                if self._failure is None:
                    raise
            else:
                life.finish()

    def _excuses(self, exc: BaseException) -> bool:
        # One task closed the connection, another went on to send.
        if not self.life.finished or self.life.stage is Stage.TOLD or contains(exc, AmbiguousOutcome):
            return False
        return _follows_close(exc)

    def _last_words(self) -> list[Message]:
        life = self.life
        if life.finished or life.close_code is not None or self._answered is not None:
            return []
        code, reason = _CLOSES.get(life.cause, (1011, "")) if self._failure is None else (1011, "")
        close: Message = {"type": "websocket.close", "code": code, "reason": reason}
        if self._writer.started:
            if life.status != 101:
                return []  # in the middle of a denial
            life.close_code = code
            return [close]
        answer = ANSWERS.get(life.cause)
        if answer is None or "websocket.http.response" not in (self.scope.get("extensions") or ()):
            self._answered = (403, b"")
            return [close]
        self._answered = answer
        return [{**message, "type": f"websocket.{message['type']}"} for message in response(*answer)]

    def _quiet_end(self) -> list[Message]:
        # uvicorn's legacy implementation logs an error for a handshake that nobody has answered.
        return [] if self._writer.started else [{"type": "websocket.close", "code": 1006}]


def _follows_close(exc: BaseException | None) -> bool:
    if isinstance(exc, BaseExceptionGroup):
        return all(_follows_close(inner) for inner in exc.exceptions)
    while exc is not None and not isinstance(exc, ClientDisconnected):
        exc = exc.__cause__ or exc.__context__
    return exc is not None
