"""The reference model of a request: `world`, with a body that is read and a response in frames."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .world import ANSWERS, CLIENT, World

#: How many pieces of an unread body are read ahead.
READ_AHEAD = 2

Frame = Literal["start", "chunk", "last"]


@dataclass(kw_only=True)
class Request(World):
    upload: bool  #: a POST whose body is still to come; else a GET
    body_lost: bool  #: what a client that has gone had sent is lost
    sized: bool = False  #: the response says its length, and a client that counts has all of it with the chunk

    unread: int = 0  #: pieces of the body that the application has not read
    whole: bool = False  #: there are no more to come
    held: list[Frame] = field(default_factory=list)  #: what is held back for the hooks
    chosen: int = 0  #: the status of a start that is
    sending: list[Frame] = field(default_factory=list)  #: what the server has not taken yet

    def __post_init__(self) -> None:
        super().__post_init__()
        self.whole, self.unread = not self.upload, int(not self.upload)

    @property
    def blind(self) -> bool:
        """Nobody sees a client that leaves: there is too much of its body in between."""
        return self.broken or self.unread + (not self.whole) > READ_AHEAD

    # ------------------------------------------------------------------ the client and the server

    def say(self, whole: bool) -> None:
        self.whole = whole
        if self.at == "listening":
            self.at = "prompt"
        else:
            self.unread += 1

    def hang_up(self) -> None:
        self.gone = True
        if self.blind and self.body_lost and not self.broken:
            self.unread, self.whole = min(self.unread, READ_AHEAD), False
        self._notice()

    def _notice(self) -> None:
        if not self.gone or self.blind or self.left:
            return
        if self.complete and self.at == "sending":  # it is not believed to return
            self.delivered = False
            self._sent()
        elif not (self.complete or self.cut):
            self._leaves()
        elif self.at == "listening":
            self._hear()

    def _leaves(self, error: str = "OSError") -> None:
        self.left = True
        self._mark()
        self.stopping = not self.told
        if self.policy != "finish" and self.at != "committing":
            self.stop(CLIENT, leaving=True)
        if self.at == "sending":
            self._release(error)
        elif self.at == "listening" and not (self.policy == "finish" and self.whole):
            self._hear()

    def read_on(self) -> None:
        self._take()

    def _hear(self) -> None:
        """It gets the disconnect."""
        self.at = "prompt"
        in_body = self.upload and not self.whole
        if in_body and self.stopping and self.policy == "cancel" and not self.landed:
            self._pend()  # instead: some would take the message for the end of the body
        if self.pending and not self.shielded:
            self._settle()
        else:
            self._inform()

    # ------------------------------------------------------------------ what the application does

    def listen(self) -> None:
        if self.unread:
            self.unread -= 1
            self._notice()
        elif self.left or self.complete or (self.refused and self.gone):
            self._hear()
        elif self.broken:
            self._catch("RuntimeError")
        else:
            self.at = "listening"
        self._settle()

    def send(self, frame: Frame, status: int, blocks: bool) -> None:
        self.blocks = blocks
        if self.left or self.cut:
            knows = self.looked and self.stopping
            if knows:
                self._tell()
            if not (knows and self._lets_pass(self.policy == "cancel")):
                self._send_late(frame, status)
        elif self.hooked and frame == "start":
            self.held, self.chosen = [frame], status
        elif self.hooked and frame == "chunk" and self.sized and self._shows_success:
            self.held.append(frame)
        else:
            self.sending, self.held = [*self.held, frame], []
            if self._completes(frame):
                self._commit()
            else:
                self._hand_over(status)
        self._settle()

    def _hand_over(self, status: int) -> None:
        self.at, self.started = "sending", True
        self._count(self.sending[0], self.chosen or status)
        if not self.blocks:
            self._take()

    def _take(self) -> None:
        """The server takes what it was given, or raises for a client that nobody saw leave."""
        raises = self.send_error if self.gone else None
        if raises is not None and not self.complete:
            self._leaves(raises)
            return
        for frame in self.sending:
            self._count(frame, 0)
            if raises is not None:  # the application goes on, as it would had the client left later
                self.delivered = False
            elif not self.gone:
                self.client_status = self.status_code if frame == "start" else self.client_status
                self.client_complete = frame == "last"
        self._sent()

    def _sent(self) -> None:
        self.at, self.sending = "prompt", []
        self._settle()

    def _release(self, error: str) -> None:
        """The server's send raises, or does not return and the application is let out of it."""
        finishes = self.policy == "finish" and not self.cut
        late = self.policy == "signal" and not self.cut
        if finishes or not (late or self.let_pass or (self.landed and not self.trio)):
            if not finishes:
                self.let_pass = True
                self._pend()
            self.at, rest = "prompt", self.sending[1:]
            for frame in rest:  # behind a start that was held back
                self._send_late(frame, 0)
            self._settle()
        else:
            self._inform()
            self._catch(error)

    def _send_late(self, frame: Frame, status: int) -> None:
        """Nothing is forwarded. It counts until the application is told, and it is told by an error at the latest."""
        for held in self.held:
            self._count(held, self.chosen)
        self.held = []
        finishes = self.policy == "finish" and self.left and not self.told
        if (finishes or self.stopping) and self._completes(frame):
            self.sending = [frame]
            self._commit()
        elif finishes or self.stopping:
            self._count(frame, status)
            if finishes or frame != "chunk" or self._lets_pass(self.policy == "cancel"):
                return
            self._tell()
            self._refuse_late()
        elif not (self.complete or self._lets_pass(self.cut and not self.landed)):
            self._refuse_late()

    def _refuse_late(self) -> None:
        self._has_its_grace()
        self._catch("OSError")

    def _count(self, frame: Frame, status: int) -> None:
        if self.looked and frame != "chunk":
            self._tell()  # what it does from now on means nothing
        if self.told and self.left:
            return
        if frame == "start" and self.status_code is None:
            self.status_code = status
            self.failed = self.failed or (status >= 500 and not self.told)
        elif frame == "last" and not self.complete:
            self.complete, self.delivered = True, not self.left
            if not self.told:
                self.stopping = self.pending = False  # what comes after the response is not interrupted

    def _completes(self, frame: Frame) -> bool:
        """Whether that would be a success, which hooks come before."""
        return self.hooked and frame == "last" and self._shows_success and not (self.complete or self.cut)

    @property
    def _shows_success(self) -> bool:
        return (self.status_code or self.chosen) < 400

    def _commit(self) -> None:
        """Run the hooks: then the response is complete, or refused."""
        if not self._hooks_succeed():
            return
        self.committed = True
        for frame in self.sending:
            self._count(frame, self.chosen)
        if self.left:
            self.at = "prompt"
            self._send_late("last", 0)
        else:
            self._hand_over(0)
        self._give_back()

    def _hook_failed(self) -> None:
        self.cut = self.refused = True
        self.failed = self.failed or not self.told
        self.held = []
        if not (self.told and self.left):
            self._answer_with(500)
        self._inform()
        if not self._give_back():
            self._catch("RuntimeError")

    def _answer(self) -> None:
        if self.cause in ANSWERS and not self.refused:
            self._answer_with(ANSWERS[self.cause])

    def _answer_with(self, status: int) -> None:
        """In the application's stead, unless it has started to."""
        if not self.started:
            self.status_code = status
            self.started = not self.left
            if not self.gone:
                self.client_status, self.client_complete = status, True
