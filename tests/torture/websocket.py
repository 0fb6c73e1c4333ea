"""The reference model of a WebSocket: `world`, with messages that are read, a handshake and a close.

The rules are those of ``docs/websocket.md``. What is different from a request: the message comes first, whatever the
application does; the application may end by returning; and the client may end it in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .world import ANSWERS, CLIENT, REQUESTED, SHUTDOWN, TIMEOUT, Error, World

#: How many messages are read ahead.
READ_AHEAD = 2

CLOSES = {TIMEOUT: 1013, SHUTDOWN: 1012, REQUESTED: 1001}
FAILURES = {1011, 1012, 1013, 1014}

Frame = Literal["accept", "text", "close", "deny", "chunk", "last"]


@dataclass(kw_only=True)
class Connection(World):
    denies: bool  #: the server can answer a handshake with a status
    vanished_code: int  #: what it says of a client that has vanished

    close_code: int | None = None
    client_code: int | None = None  #: that a client that stays was closed with
    client_texts: int = 0  #: how many messages it has got
    unread: int = 1  #: messages that the application has not read, and the one that it is there
    farewell: int = 1006  #: how the server calls the end
    in_order: bool = False
    sending: tuple[Frame, int] = ("text", 0)  #: what the server has not taken yet
    over: bool = False  #: nothing more of the application's goes out
    at_return: bool = False  #: the hooks run because it has returned

    @property
    def blind(self) -> bool:
        """Nobody sees a client that leaves: there are too many of its messages in between."""
        return self.broken or self.unread >= READ_AHEAD

    # ------------------------------------------------------------------ the client and the server

    def say(self) -> None:
        if self.at == "listening":
            self.at = "prompt"
        else:
            self.unread += 1

    def hang_up(self, code: int | None = None, *, in_order: bool = False) -> None:
        self.gone, self.in_order = True, in_order
        self.farewell = code or (self.vanished_code if self.client_status == 101 else 1006)
        self._notice()

    def _notice(self) -> None:
        if not self.gone or self.blind or self.left or self.state is not None:
            return
        if self.complete and self.at == "sending":  # it is not believed to return
            self.delivered = False
            self._sent()
        elif not (self.complete or self.cut):
            self._leaves(self.farewell, self.in_order)
        elif self.at == "listening":
            self._hear()

    def _leaves(self, code: int, in_order: bool = False, error: str = "OSError") -> None:
        self.left, self.close_code = True, code
        self._mark()
        self.stopping = not self.told
        self.parted = in_order and (code in {1000, 1001, 1005} or 3000 <= code <= 4999)
        self.delivered = self.delivered or self.parted
        if self.policy != "finish" and self.at != "committing":
            self.stop(SHUTDOWN if code == 1012 else CLIENT, leaving=True)
        if self.at == "sending":
            self._release(error)
        elif self.at == "listening":
            self._hear()

    def read_on(self) -> None:
        self._take()

    def _hears(self) -> bool:
        return self.left and self.cause in {CLIENT, SHUTDOWN} and self.policy != "signal"

    @property
    def _is_let_be(self) -> bool:
        return self.left

    def _hear(self) -> None:
        """It gets the disconnect."""
        self.at = "prompt"
        self._inform()

    # ------------------------------------------------------------------ what the application does

    def listen(self) -> None:
        if self.left or self.complete:
            self.unread = min(self.unread, READ_AHEAD)  # what the server has beside that is lost
        if self.unread:
            self.unread -= 1
            self._notice()
        elif self.left or self.complete or (self.refused and self.gone and not self.broken):
            self._hear()
        elif self.broken:
            self._catch("RuntimeError")
        else:
            self.at = "listening"
        self._settle()

    def send(self, frame: Frame, code: int = 0, blocks: bool = False) -> None:
        self.blocks = blocks
        if self.left or self.over or self.cut:
            self._send_late(frame, code)
        elif self._completes(frame, code):
            self.sending = frame, code
            self._commit()
        else:
            self._hand_over(frame, code)
        self._settle()

    def _completes(self, frame: Frame, code: int) -> bool:
        """Whether that would be a success, which hooks come before."""
        success = frame in {"close", "last"} and (self.status_code or 403) < 400 and code not in FAILURES
        return self.hooked and success and not (self.complete or self.cut)

    def _hand_over(self, frame: Frame, code: int) -> None:
        self.at, self.started, self.sending = "sending", True, (frame, code)
        self._count(frame, code)
        if not self.blocks:
            self._take()

    def _take(self) -> None:
        """The server takes what it was given, or raises for a client that nobody saw leave."""
        frame, code = self.sending
        raises = self.send_error if self.gone else None
        if raises is not None and not self.complete:
            self._leaves(1006, error=raises)
            return
        if raises is not None:  # the application goes on, as it would had the client left later
            self.delivered = False
        elif not self.gone:
            self._get(frame, code)
        self._sent()

    def _get(self, frame: Frame, code: int) -> None:
        """A client that stays gets it."""
        self.client_texts += frame == "text"
        if frame == "close":
            self.client_code = code
        if frame in {"accept", "deny", "close"}:
            self.client_status = self.client_status or {"accept": 101, "deny": code}.get(frame, 403)

    def _sent(self) -> None:
        self.at = "prompt"
        self.over = self.over or self.complete
        if not self._give_back():
            self._settle()

    def _catch(self, kind: str, *, closed: bool = False) -> None:
        self.over = self.over or (self.complete and self.at == "sending")
        super()._catch(kind, closed=closed)

    def _end(self, error: Error | None) -> None:
        """That it sends more after its close is no failure."""
        own = error is None or error.kind in {"Cancelled", "AmbiguousOutcome"}
        excused = error is not None and not own and error.closed and self.complete and not self.told
        super()._end(None if excused else error)

    def _release(self, error: str) -> None:
        if self.policy == "finish" and not self.cut:
            self._sent()
        elif self._lets_pass(self.cut and (self.trio or not self.landed)):
            self.at = "prompt"
            self._pend()
            self._settle()
        else:
            self._inform()
            self._catch(error)

    def _send_late(self, frame: Frame, code: int) -> None:
        """Nothing is forwarded. It counts until the application is told, and it is told by an error at the latest."""
        if self.looked and not self.committed:
            self._tell()
        if frame == "close" and (self.over or self.cut or self.complete or self.told):
            return
        if self.complete:
            self._catch("OSError", closed=True)
            return
        self.delivered = self.delivered and frame == "close"
        finishes = self.policy == "finish" and self.left and not self.told
        if (finishes or self.stopping) and self._completes(frame, code):
            self.sending = frame, code
            self._commit()
            return
        if finishes or self.stopping:
            self._count(frame, code)
            self.over = self.over or self.complete
            passes = frame in {"close", "deny", "last"}
            if finishes or passes or self._lets_pass(self.cut and self.policy == "cancel"):
                return
            self._tell()
        elif self._lets_pass(self.cut and not self.landed):
            return
        self._has_its_grace()
        self._catch("OSError", closed=True)

    def _count(self, frame: Frame, code: int) -> None:
        if self.looked and frame != "chunk":
            self._tell()  # what it does from now on means nothing
        if (self.told and self.left) or self.complete:
            return
        if frame == "close":
            if self.status_code is None:
                self.status_code = 403
            else:
                self.close_code = self.close_code or code
            self.failed = self.failed or (code in FAILURES and not self.told)
        elif frame in {"accept", "deny"} and self.status_code is None:
            self.status_code = 101 if frame == "accept" else code
            self.failed = self.failed or (self.status_code >= 500 and not self.told)
        if frame in {"close", "last"}:
            self._complete()

    def _complete(self) -> None:
        if self.told and self.left:
            return
        self.complete, self.delivered = True, self.delivered or not self.left
        if not self.told:
            self.stopping = self.pending = False  # what comes after that is not interrupted

    def _commit(self) -> None:
        if not self._hooks_succeed():
            return
        if self.at_return:
            self._complete()
            self.at = "joining"
            self._join()
            return
        self.committed = True
        self._count(*self.sending)
        if self.left:
            self._sent()
        else:
            self._hand_over(*self.sending)

    def _hook_failed(self) -> None:
        self.cut = self.refused = True
        self.failed = self.failed or not self.told or (self.parted and self.at_return)
        if not (self.started or self.told):
            self.status_code = 500
        self._inform()
        if self.at_return:
            self._stop_child()
            self.at = "joining"
            self._join()
        elif not self._give_back():
            self._catch("RuntimeError")

    def _returned(self) -> bool:
        """Its return is its close."""
        if self.status_code != 101 or self.complete or self.refused or self.at_return:
            return False
        if not self.hooked:
            self._complete()
            return False
        self.at_return = True
        self._commit()
        return True

    def _answer(self) -> None:
        if self.complete or self.close_code is not None or (self.started and self.status_code != 101):
            return
        code = 1011 if self.refused else CLOSES[self.cause or ""]
        if self.started:
            self.close_code = code
            self._tell_client("close", code)
        elif self.denies:
            self.status_code = ANSWERS[self.cause or ""]
            self._tell_client("deny", self.status_code)
        else:
            self.status_code = 403
            self._tell_client("close", code)
        self.started = True

    def _tell_client(self, frame: Frame, code: int) -> None:
        if not self.gone:
            self._get(frame, code)
