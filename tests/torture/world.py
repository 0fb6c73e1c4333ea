"""A small reference model of one call: what the design says must become of it, event by event.

It knows nothing of the middleware's own table. Each public method is one thing that happens, and `seen` is where the
application must be after it. `play` does the same to the real middleware and compares. Here is what every kind of call
has in common. The rules are those of the design and of ``docs/lifecycle.md``, by their numbers:

* 5: frames decide, not exceptions. 6: a response is complete when its last frame is handed over.
* 7: the first cause wins. What the application does before it is *told* counts, what it does after that does not.
* 8: who listens gets the message instead of an interruption. 9: one interruption, and it respects shields.
* 11: after the disconnect nothing is forwarded. The first late frame passes while an interruption is under way.
* 13: the terminal state. A client that says goodbye has ended the conversation, and not cut it off.
* 14: finalizers. 15: ``before_success`` hooks. 17: a foreign cancellation passes through.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

CLIENT, TIMEOUT, SHUTDOWN, REQUESTED = "client_disconnect", "timeout", "server_shutdown", "requested"
ANSWERS = {TIMEOUT: 504, SHUTDOWN: 503, REQUESTED: 499}

Ending = Literal["completed", "failed", "waits"]


@dataclass(frozen=True)
class Error:
    """What the application has caught. On trio it is only at the end that an interruption shows, by what follows it."""

    kind: str
    follows: bool = False  #: an interruption, or raised while one was handled
    closed: bool = False  #: it was refused to send, or raised while that was handled


@dataclass
class World:
    trio: bool
    policy: Literal["cancel", "signal", "finish"]
    send_error: str | None  #: the kind of error that the server's send raises for a client that has gone
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
    broken: bool = False  #: the server's receive raises
    gone: bool = False
    left: bool = False  #: ... and it is known, and it was before the response was complete
    parted: bool = False  #: ... and it said goodbye
    canceled: bool = False  #: the server has cancelled the task
    given_back: bool = False  #: ... when it could only be endured
    # The response.
    committed: bool = False  #: the hooks have succeeded: what they made a fact is shown, too
    blocks: bool = False  #: the server does not take what it is given, until the client reads
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

    # ------------------------------------------------------------------ what differs

    def hang_up(self) -> None:
        """The client leaves."""
        raise NotImplementedError

    def read_on(self) -> None:
        """The client goes on to read."""
        raise NotImplementedError

    def break_receive(self) -> None:
        """The server's receive raises from now on, where the client's next word would be."""
        self.broken = True
        if self.at == "listening":
            self._catch("RuntimeError")

    def _release(self, error: str) -> None:
        """The server's send raises, or does not return and the application is let out of it."""
        raise NotImplementedError

    def _commit(self) -> None:
        """Run the hooks: then the response is complete, or refused."""
        raise NotImplementedError

    def _hook_failed(self) -> None:
        raise NotImplementedError

    def _answer(self) -> None:
        """A client that stays is told of the cause, or of the failure, if it can be."""
        raise NotImplementedError

    def _returned(self) -> bool:
        """It has returned and was told nothing. True if that is not the end yet."""
        return False

    # ------------------------------------------------------------------ causes

    def server_cancels(self) -> None:
        """`asyncio.Task.cancel`: it comes through every shield but those of hooks and finalizers."""
        self.canceled, self.pending = True, False  # it cleans up, and has its grace
        if self.at in {"committing", "joining", "finalizing"}:
            self.given_back = True
        else:
            if self.at == "sending" and self.committed:
                self.delivered = False
            self._catch("Cancelled")

    def stop(self, cause: str, *, leaving: bool = False) -> None:
        late = (self.complete or self.at == "committing") and cause in {CLIENT, TIMEOUT}
        if late or self.state is not None:
            return
        insists = cause == TIMEOUT or (cause == SHUTDOWN and self.policy == "signal")
        first = self.cause is None
        if first:
            self.cause = cause
            self._mark()
            self.stopping = not self.told
            if cause == TIMEOUT:
                self._cut_off()
            if self.policy == "signal" and leaving:
                return
        elif self.supervised or not insists:
            return
        self.supervised = True
        if self.at != "joining" and not (first and self._hears()):
            self._interrupt()
        self._stop_child()

    def _hears(self) -> bool:
        """Whether it hears of the cause in another way than by being interrupted. See `_leaves`."""
        return self.cause == CLIENT and self.at in {"listening", "sending"}

    def _cut_off(self) -> None:
        self.cut = True
        self._tell()
        self._answer()

    def _interrupt(self) -> None:
        if self.at == "sending" and self.cut:
            self._release("OSError")
        else:
            self._pend()
            self._settle()

    def _pend(self) -> None:
        """It is to be interrupted; after its grace if the server has cancelled it already."""
        self.pending = not self.canceled
        if self.trio:  # where nobody can tell, it is said to have landed when it is asked for
            self.landed = True
            self._stop_child()

    def _settle(self) -> None:
        if self.pending and self.at in {"prompt", "listening", "sending"} and not self.shielded:
            self.pending, self.landed = False, True
            if not self.trio:
                self._tell()
            self._catch("Cancelled")

    def _tell(self) -> None:
        if self.stopping:
            self.stopping, self.told = False, True
            if self.supervised:
                self._stop_child()  # it has started since the cause arrived

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

    def look(self) -> None:
        self.looked = self.cause is not None

    def _lets_pass(self, interrupting: bool) -> bool:
        """Whether a late frame passes as if sent: the first does, while an interruption is under way."""
        passes = interrupting and not self.let_pass
        self.let_pass = self.let_pass or passes
        return passes

    def _hooks_succeed(self) -> bool:
        """Run the hooks, up to one that waits. Whether all have succeeded."""
        self.at = "committing"
        if self.looked:
            self._tell()
        while self.hooks:
            ending = self.hooks.pop(0)
            if ending == "failed":
                self._hook_failed()
            if ending != "completed":
                return False
        return True

    def hook_ends(self, ok: bool) -> None:
        if ok:
            self._commit()
        else:
            self._hook_failed()

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
        self._pop()
        self._settle()

    def _pop(self) -> str | Error:
        frame = self.frames.pop()
        if frame == "protect" and self.trio and self.stopping and self.supervised and not self._is_let_be:
            self._stop_child()  # as in `_pend`
        return frame

    @property
    def _is_let_be(self) -> bool:
        """Not interrupted when it leaves `protect`, for it has its time."""
        return False

    def _catch(self, kind: str, *, closed: bool = False) -> None:
        self.at, self.given_back = "prompt", False
        self.frames.append(self._error(kind, closed=closed))
        self._settle()

    def _error(self, kind: str, *, closed: bool = False) -> Error:
        handled = [frame for frame in self.frames if isinstance(frame, Error)]
        follows = kind == "Cancelled" or any(error.follows for error in handled)
        # What asyncio throws into a coroutine does not say what was being handled there.
        chained = bool(handled) and handled[-1].closed and (self.trio or kind != "Cancelled")
        return Error(kind, follows, closed or chained)

    def fail(self, kind: str) -> None:
        """It raises an error of its own, or passes on what it handles: out of its section, or of the application."""
        error = self._error(kind)
        while self.handles is not None:
            self.frames.pop()
        if not self.frames:
            self._end(error)
            return
        section = self._pop()
        cut_off = section in {"effect", "stuck"} and (kind == "Cancelled" or self._is_told)
        self.unresolved = self.unresolved or cut_off or (section != "protect" and kind == "AmbiguousOutcome")
        self.frames.append(error)
        self._settle()

    def return_(self) -> None:
        while self.frames:
            self._pop()
        self._end(None)

    def _end(self, error: Error | None) -> None:
        self.at, self.pending, self.error = "joining", False, error
        if self.canceled and self.cause is not None:
            self._tell()  # whether it passes that on or not
        if self._foreign():
            if self.cause is None:
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
        if self.at != "joining" or self.child == "runs" or self.state is not None:
            return
        follows = self.error is not None and self.error.follows
        if self.trio and follows and self.cause is not None:
            self.told = True
        if self.looked:
            self._tell()
        interrupted = follows if self.trio else self.landed or self._foreign()
        self.parted = self.parted and not interrupted and self.cause in {None, CLIENT}
        if (self.parted if self.told else self.error is None) and self._returned():
            return
        self._judge()
        self.finalize()

    def _judge(self) -> None:
        error, foreign = self.error, self._foreign()
        self._mark()
        raised = error is not None and error.kind != "Cancelled"
        fails = self.refused or (not self.told and (raised or self.child == "failed"))
        stopped = "timed_out" if self.cause == TIMEOUT else "canceled"
        if self.unresolved or (error is not None and error.kind == "AmbiguousOutcome"):
            self.state = "ambiguous"
        elif self.failed:
            self.state = "failed"
        elif self.parted and not fails:
            self.state = "completed"
        elif self.told:
            self.cause = self.cause or CLIENT
            self.state = stopped
        elif fails:
            self.state = "failed"
        elif self.complete:
            self.state = "completed"
        else:
            self.cause = self.cause or (CLIENT if self.left else None)
            self.state = stopped if self.cause is not None else "failed"
        if error is not None and (foreign or (raised and not self.told and not self.refused)):
            self.escapes = error.kind
        if not self.left and (self.refused or (self.told and not foreign)):
            self._answer()

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
