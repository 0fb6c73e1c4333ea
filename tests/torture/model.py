"""A small reference model of one HTTP call: what the design says must become of it, event by event.

It knows nothing of the middleware's own table. Each public method is one thing that happens, and `seen` is where the
application must be after it. `test_model` does the same to the real middleware and compares. The rules are those of the
design and of ``docs/lifecycle.md``, by their numbers:

* 5: frames decide, not exceptions. 6: a response is complete when its last frame is handed over.
* 7: the first cause wins. What the application does before it is *told* counts, what it does after that does not.
* 8: who listens gets the message instead of an interruption. 9: one interruption, and it respects shields.
* 11: after the disconnect nothing is forwarded. The first late frame passes while an interruption is under way.
* 13: the terminal state. 14: finalizers. 15: ``before_success`` hooks. 17: a foreign cancellation passes through.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

CLIENT, TIMEOUT, SHUTDOWN, REQUESTED = "client_disconnect", "timeout", "server_shutdown", "requested"
ANSWERS = {TIMEOUT: 504, SHUTDOWN: 503, REQUESTED: 499}

#: How many pieces of an unread body are read ahead.
READ_AHEAD = 2

Frame = Literal["start", "chunk", "last"]
Ending = Literal["completed", "failed", "waits"]


@dataclass(frozen=True)
class Error:
    """What the application has caught. On trio it is only at the end that an interruption shows, by what follows it."""

    kind: str
    follows: bool = False  #: an interruption, or raised while one was handled


@dataclass
class Model:
    trio: bool
    policy: Literal["cancel", "signal", "finish"]
    upload: bool  #: a POST whose body is still to come; else a GET
    send_error: str | None  #: the kind of error that the server's send raises for a client that has gone
    body_lost: bool  #: what such a client had sent is lost
    hooks: list[Ending]  #: those that have not run
    finalizers: list[Ending]

    # The record.
    state: str | None = None
    cause: str | None = None
    phase: str | None = None
    status_code: int | None = None
    delivered: bool = False
    escapes: str | None = None  #: what leaves the middleware
    finalized: list[Ending] = field(default_factory=list)
    # What a client that stays has got.
    client_status: int | None = None
    client_complete: bool = False
    # The client and the server.
    unread: int = 0  #: pieces of the body that the application has not read
    whole: bool = False  #: there are no more to come
    gone: bool = False
    left: bool = False  #: ... and it is known, and it was before the response was complete
    broken: bool = False  #: the server's receive raises
    canceled: bool = False  #: the server has cancelled the task
    given_back: bool = False  #: ... when it could only be endured
    # The response.
    committed: bool = False  #: the hooks have succeeded: what they made a fact is shown, too
    held: int | None = None  #: the status of a start that is held back for the hooks
    sending: list[Frame] = field(default_factory=list)  #: what the server has not taken yet
    blocks: bool = False  #: and will not, until the client reads
    started: bool = False  #: something was handed to the server
    complete: bool = False
    cut: bool = False  #: ended in the application's stead
    refused: bool = False  #: by a hook
    let_pass: bool = False  #: a late frame was
    # The call.
    stopping: bool = False  #: there is a cause that means something, and the application is not told
    told: bool = False
    looked: bool = False  #: at its canceled token
    failed: bool = False  #: before it was told
    unresolved: bool = False  #: an effect
    supervised: bool = False  #: somebody sees to it that it ends
    pending: bool = False  #: an interruption waits for the end of a shield
    landed: bool = False  #: one was delivered
    # The application.
    at: str = "prompt"
    frames: list[str | Error] = field(default_factory=list)  #: the sections it is in, and the errors it handles
    error: Error | None = None  #: what it has ended with
    child: Literal["", "runs", "ended", "failed"] = ""

    def __post_init__(self) -> None:
        self.hooked = bool(self.hooks)
        self.whole, self.unread = not self.upload, int(not self.upload)

    @property
    def seen(self) -> tuple[str, list[str]]:
        return self.at, [frame.kind if isinstance(frame, Error) else frame for frame in self.frames]

    @property
    def handles(self) -> Error | None:
        """The error it handles just now."""
        return self.frames[-1] if self.frames and isinstance(self.frames[-1], Error) else None

    @property
    def shielded(self) -> bool:
        """Out of reach of an interruption. trio cancels by level: there whoever cleans up has to shield that."""
        handling = any(isinstance(frame, Error) for frame in self.frames)
        commits = self.at == "committing" or (self.at == "sending" and self.committed)
        return "protect" in self.frames or (self.trio and handling) or commits

    @property
    def _is_told(self) -> bool:
        """Of a cause. An upload that ends too soon says so under `finish` too, and there it is none."""
        return self.told and self.cause is not None

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
            self.stop(CLIENT)
        if self.at == "sending":
            self._release(error)
        elif self.at == "listening" and not (self.policy == "finish" and self.whole):
            self._hear()

    def break_receive(self) -> None:
        self.broken = True
        if self.at == "listening":
            self._catch("RuntimeError")

    def read_on(self) -> None:
        self._take()

    def server_cancels(self) -> None:
        """`asyncio.Task.cancel`: it comes through every shield but those of hooks and finalizers."""
        self.canceled = True
        if self.at in {"committing", "joining", "finalizing"}:
            self.given_back = True
        else:
            if self.at == "sending" and self.committed:
                self.delivered = False
            self._catch("Cancelled")

    # ------------------------------------------------------------------ causes

    def stop(self, cause: str) -> None:
        late = (self.complete or self.at == "committing") and cause in {CLIENT, TIMEOUT}
        if late or self.state is not None:
            return
        insists = cause == TIMEOUT or (cause == SHUTDOWN and self.policy == "signal")
        if self.cause is None:
            self.cause = cause
            self._mark()
            self.stopping = not self.told
            if cause == TIMEOUT:
                self._cut_off()
            if self.policy == "signal" and cause == CLIENT:
                return
        elif self.supervised or not insists:
            return
        self.supervised = True
        if self.at != "joining" and not (cause == CLIENT and self.at in {"listening", "sending"}):  # see `_leaves`
            self._interrupt()
        self._stop_child()

    def _cut_off(self) -> None:
        self.cut = True
        self._tell()
        self._answer(ANSWERS[TIMEOUT])

    def _answer(self, status: int) -> None:
        """In the application's stead, unless it has started to."""
        if not self.started:
            self.status_code = status
            self.started = not self.left
            if not self.gone:
                self.client_status, self.client_complete = status, True

    def _interrupt(self) -> None:
        if self.cause == SHUTDOWN and self.canceled:
            self._tell()  # it has been interrupted already
        elif self.at == "sending" and self.cut:
            self._release("OSError")
        else:
            self.pending = True
            self.landed = self.landed or self.trio  # where nobody can tell
            self._settle()

    def _settle(self) -> None:
        if self.pending and self.at in {"prompt", "listening", "sending"} and not self.shielded:
            self.pending, self.landed = False, True
            if not self.trio:
                self._tell()
            self._catch("Cancelled")

    def _tell(self) -> None:
        if self.stopping:
            self.stopping, self.told = False, True

    def _hear(self) -> None:
        """It gets the disconnect."""
        self.at = "prompt"
        in_body = self.upload and not self.whole
        if in_body and self.stopping and self.policy == "cancel" and not self.landed:
            self.pending = True  # instead: some would take the message for the end of the body
            self.landed = self.trio
        if self.pending and not self.shielded:
            self._settle()
        else:
            self._inform()

    def _inform(self) -> None:
        """It hears by a message or an error."""
        if self.stopping:
            self._tell()
            self._has_its_grace()

    def _has_its_grace(self) -> None:
        self.pending = self.pending and self.trio

    def _mark(self) -> None:
        begun = "during_response" if self.status_code is not None else "before_response"
        self.phase = self.phase or ("after_response" if self.complete else begun)

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

    def look(self) -> None:
        self.looked = self.cause is not None

    def send(self, frame: Frame, status: int, blocks: bool) -> None:
        self.blocks = blocks
        if self.left or self.cut:
            knows = self.looked and self.stopping
            if knows:
                self._tell()
            if not (knows and self._lets_pass(self.policy == "cancel")):
                self._send_late(frame, status)
        elif self.hooked and frame == "start":
            self.held = status
        else:
            self.sending = ["start", frame] if self.held is not None else [frame]
            if self.hooked and frame == "last" and (self.status_code or self.held or 0) < 400:
                self.at = "committing"
                self._commit()
            else:
                self._hand_over(status)
        self._settle()

    def _hand_over(self, status: int) -> None:
        self.at, self.started = "sending", True
        self._count(self.sending[0], self.held or status)
        self.held = None
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
                self.let_pass = self.pending = True
            self.at, rest = "prompt", self.sending[1:]
            for frame in rest:  # behind a start that was held back
                self._send_late(frame, 0)
            self._settle()
        else:
            self._inform()
            self._catch(error)

    def _send_late(self, frame: Frame, status: int) -> None:
        """Nothing is forwarded. It counts until the application is told, and it is told by an error at the latest."""
        if self.held is not None:
            self._count("start", self.held)
            self.held = None
        finishes = self.policy == "finish" and self.left and not self.told
        if finishes or self.stopping:
            self._count(frame, status)
            if finishes or frame != "chunk" or self._lets_pass(self.policy == "cancel"):
                return
            self._tell()
        elif self.complete or self._lets_pass(self.cut and not self.landed):
            return
        self._has_its_grace()
        self._catch("OSError")

    def _lets_pass(self, interrupting: bool) -> bool:
        passes = interrupting and not self.let_pass
        self.let_pass = self.let_pass or passes
        return passes

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

    def _commit(self) -> None:
        """Run the hooks: then the response is complete, or refused."""
        while self.hooks:
            ending = self.hooks.pop(0)
            if ending == "waits":
                return
            if ending == "failed":
                self._hook_failed()
                return
        self.committed = True
        for frame in self.sending:
            self._count(frame, self.held or 0)
        if self.left:
            self.held = None
            self.at = "prompt"
            self._send_late("last", 0)
        else:
            self._hand_over(0)
        self._give_back()

    def hook_ends(self, ok: bool) -> None:
        if ok:
            self._commit()
        else:
            self._hook_failed()

    def _hook_failed(self) -> None:
        self.cut = self.refused = True
        self.failed = self.failed or not self.told
        self.held = None
        refuses = self.gone and not self.left and not self.started  # the server, our answer
        if not (self.told and self.left):
            self._answer(500)
        if refuses and self.send_error:
            self._catch(self.send_error)
        elif not self._give_back():
            self._catch("RuntimeError")

    def _give_back(self) -> bool:
        given, self.given_back = self.given_back and self.at != "sending", self.given_back and self.at == "sending"
        if given:
            self._catch("Cancelled")
        return given

    # ------------------------------------------------------------------ sections, errors and the end

    def enter(self, section: str) -> None:
        self.frames.append(section)

    def leave(self) -> None:
        """It leaves the section, or has handled the error."""
        self.frames.pop()
        self._settle()

    def _catch(self, kind: str) -> None:
        self.at, self.sending, self.given_back = "prompt", [], False
        self.frames.append(Error(kind, self._follows(kind)))
        self._settle()

    def _follows(self, kind: str) -> bool:
        return kind == "Cancelled" or any(isinstance(frame, Error) and frame.follows for frame in self.frames)

    def fail(self, kind: str) -> None:
        """It raises an error of its own, or passes on what it handles: out of its section, or of the application."""
        error = Error(kind, self._follows(kind))
        while self.handles is not None:
            self.frames.pop()
        if not self.frames:
            self._end(error)
            return
        section = self.frames.pop()
        cut_off = section in {"effect", "stuck"} and (kind == "Cancelled" or self._is_told)
        self.unresolved = self.unresolved or cut_off or (section != "protect" and kind == "AmbiguousOutcome")
        self.frames.append(error)
        self._settle()

    def return_(self) -> None:
        self.frames.clear()
        self._end(None)

    def _end(self, error: Error | None) -> None:
        self.at, self.pending, self.error = "joining", False, error
        if self._foreign():
            if self.cause is None and not (self.left and self.complete):
                self.cause = CLIENT if self.left else "unknown"
                self._mark()
                self.stopping = not self.told
            self._tell()
        if error is not None or self._is_told:
            self._stop_child()
        self._join()

    def _foreign(self) -> bool:
        return self.canceled and self.error is not None and self.error.kind == "Cancelled"

    def start_child(self) -> None:
        self.child = "ended" if self._is_told else "runs"

    def child_ends(self, ok: bool) -> None:
        self.child = "ended" if ok else "failed"
        if self.at == "joining":
            self._join()

    def _stop_child(self) -> None:
        if self.child == "runs":
            self.child_ends(True)

    def _join(self) -> None:
        if self.child != "runs" and self.state is None:
            self._judge()
            self.finalize()

    def _judge(self) -> None:
        error, foreign = self.error, self._foreign()
        if self.trio and error is not None and error.follows and self.cause is not None:
            self.told = True
        if self.looked:
            self._tell()
        self._mark()
        raised = error is not None and error.kind != "Cancelled"
        stopped = "timed_out" if self.cause == TIMEOUT else "canceled"
        if self.unresolved or (error is not None and error.kind == "AmbiguousOutcome"):
            self.state = "ambiguous"
        elif self.failed:
            self.state = "failed"
        elif self.told:
            self.cause = self.cause or CLIENT
            self.state = stopped
        elif raised or self.child == "failed":
            self.state = "failed"
        elif self.complete:
            self.state = "completed"
        else:
            self.cause = self.cause or (CLIENT if self.left else None)
            self.state = stopped if self.cause is not None else "failed"
        if error is not None and (foreign or (raised and not self.told and not self.refused)):
            self.escapes = error.kind
        if self.told and not foreign and not self.left and self.cause in ANSWERS:
            self._answer(ANSWERS[self.cause])

    def finalize(self) -> None:
        """The finalizers run, the last one first."""
        self.at = "finalizing"
        while self.finalizers:
            self.finalized.append(self.finalizers.pop())
            if self.finalized[-1] == "waits":
                return
        self.at = "ended"
        if self.given_back and self.escapes is None:
            self.escapes = "Cancelled"
