"""`Call`: one request, from the moment the middleware is entered until its finalizers have ended.

It binds the parts. `Reader` says when the client leaves, the token spreads the word, `Interruptible` stops the work,
`Lifecycle` keeps the score, `Finalizers` clean up; and at the end there is one `Outcome`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from contextvars import Token, copy_context
from dataclasses import replace
from typing import Any, Final, TypeVar

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ._current import current
from ._finalizers import Finalizer, Finalizers
from ._interrupt import Interruptible, insist, report_unresponsive
from ._lifecycle import Cause, Lifecycle, Outcome, Stage, State
from ._options import Options
from ._runtime import Timer, call_later, clock, endure, loop_runner, spawn
from ._send import Writer
from ._steps import Step, StepLog
from ._token import CancelToken
from ._watch import DISCONNECT, Reader, Sweeper

logger: Final = logging.getLogger("hangup")

F = TypeVar("F", bound=Callable[..., object])
Observer = Callable[[Outcome], object]

#: Seconds that the synthetic finish may take: hypercorn's HTTP/2 ``send`` never returns for a lost connection.
QUIET_TIMEOUT: Final = 0.1

#: What a live client is answered when its call was stopped before anything was sent. 499 is what gRPC's HTTP mapping
#: makes of CANCELLED, and what a client that has gone would have been told.
_ANSWERS: Final[dict[Cause | None, tuple[int, bytes]]] = {
    Cause.TIMEOUT: (504, b"Gateway Timeout"),
    Cause.SERVER_SHUTDOWN: (503, b"Service Unavailable"),
    Cause.REQUESTED: (499, b"Canceled"),
}

_COMPLETE: Final = Stage.COMPLETE


class Here:
    """What the calls of one event loop share: the sweeper, the way in from other threads, and who is in flight."""

    __slots__ = ("calls", "run_soon", "shutting_down", "sweeper", "thread")

    def __init__(self, watch_after: float) -> None:
        self.sweeper = Sweeper(watch_after)
        self.run_soon = loop_runner()
        self.thread = threading.get_ident()
        self.calls: set[Call] = set()
        self.shutting_down = False


class Call:
    """A request that is running, as a handler sees it: ``current_call()``.

    `token`, `add_finalizer` and `step` may be used from any thread, and by tasks that outlive the call.
    """

    __slots__ = (
        "_closed",
        "_cohort",
        "_context",
        "_ended",
        "_finalizers",
        "_here",
        "_options",
        "_outcome",
        "_reader",
        "_receive",
        "_steps",
        "_supervisor",
        "_token",
        "_unresponsive",
        "_writer",
        "life",
        "policy",
        "scope",
        "started",
        "work",
    )

    def __init__(self, options: Options, here: Here, scope: Scope, receive: Receive, send: Send) -> None:
        #: When the call began, by `hangup`'s monotonic clock. Seconds.
        self.started = clock()
        self._options = options
        self._here = here
        self._receive = receive
        self.life = Lifecycle()
        self.work = Interruptible()
        self._writer = Writer(send, self)
        self._reader: Reader | None = None
        self._token: CancelToken | None = None
        self._finalizers: Finalizers | None = None
        self._steps: StepLog | None = None
        self._supervisor: Timer | None = None
        self._unresponsive = self._closed = False
        self._ended: tuple[State, float] | None = None
        self._outcome: Outcome | None = None
        #: What a disconnect does to this call. May be replaced while it runs.
        self.policy = options.policy(scope)
        #: The scope as the server made it. The application sees a copy.
        self.scope = scope

    # ------------------------------------------------------------------ what handlers use

    @property
    def token(self) -> CancelToken:
        """The cancel token of this call. The same object every time."""
        if self._token is None:
            with _creating:
                if self._token is None:
                    token = CancelToken(self._on_token)
                    if self._closed:
                        token._finish()
                    self._token = token
        return self._token

    def cancel(self, reason: str | None = None) -> bool:
        """Stop this call: `CancelToken.cancel`, with the same answer."""
        return self.token.cancel(reason)

    def add_finalizer(self, fn: F, *, name: str | None = None, timeout: float | None = None) -> F:
        """Have ``fn`` run once when the call has ended, whatever the outcome. Returns ``fn``, so it can decorate.

        ``fn`` takes no argument or the `Outcome`. A coroutine function is awaited, a plain function runs in a worker
        thread. It runs in the context of this registration, under ``timeout`` seconds (the middleware's
        ``finalizer_timeout`` by default) and the budget of all. Last registered runs first. If it raises or is cut
        off that is logged and recorded, and changes nothing else.

        From any thread. Registered by a finalizer, it runs after that one. Registered after the end it runs at once.

        :raises TypeError: if ``fn`` cannot be called.
        :raises ValueError: if ``timeout`` is not more than 0.
        """
        finalizer = Finalizer(fn, name=name, timeout=timeout)
        with _creating:
            late = self.outcome if self._closed else None
            if late is None:
                if self._finalizers is None:
                    self._finalizers = Finalizers()
                self._finalizers.add(finalizer)
        if late is not None:
            self._on_loop(lambda: spawn(self._run_late, finalizer, late, name="hangup: late finalizer"))
        return fn

    def step(self, name: str, attributes: Mapping[str, Any] | None = None) -> Step:
        """A named unit of work, to be entered with ``with`` or ``async with``. See `hangup.step`."""
        return Step(name, attributes, self)

    @property
    def outcome(self) -> Outcome | None:
        """The record, once the application has returned; None before. It is whole once the finalizers have ended."""
        if self._outcome is None and self._ended is not None:
            self._outcome = self._make_outcome()
        return self._outcome

    @property
    def steps_in_flight(self) -> tuple[str, ...]:
        """The names of the steps that are open now, oldest first."""
        return tuple(step.name for step in list(self._steps.open)) if self._steps is not None else ()

    @property
    def cause(self) -> Cause | None:
        """Why the call was told to stop, if it was."""
        return self.life.cause

    @property
    def told_cause(self) -> Cause | None:
        """The cause, once the application has been told of it; else None."""
        return self.life.cause if self.life.stage is Stage.TOLD else None

    def __repr__(self) -> str:
        return f"<Call {self._who()} {self.outcome.state if self.outcome else self.life.stage.name.lower()}>"

    # ------------------------------------------------------------------ running

    async def run(self, app: ASGIApp) -> None:
        """Run ``app`` for this call. Raises what the application raised, unless that follows from our own doing."""
        mark = current.set(self)
        self._context = copy_context()
        here, work = self._here, self.work
        here.calls.add(self)
        self._cohort = here.sweeper.join(self)
        try:
            with work.outer, work.inner:
                await app(self._shown_scope(), self.receive, self._writer.send)
        except BaseException as exc:
            if not await self._end(exc):
                raise
        else:
            life = self.life
            if life.stage is _COMPLETE and not life.left and self._finalizers is None and not self._options.observers:
                self._judge(raised=False)
                self._close()
            else:
                await self._end(None)
        finally:
            here.calls.discard(self)
            del self._context  # it refers to this call: a cycle, and work for the garbage collector
            _reset(mark)

    def _shown_scope(self) -> Scope:
        """A copy of the scope with this call in it. Nothing of the server's is changed; some leave keys out."""
        scope = self.scope
        shown = dict(scope)
        if self._options.present_spec is not None:
            shown["asgi"] = {**(scope.get("asgi") or {}), "spec_version": self._options.present_spec}
        shown["extensions"] = {**(scope.get("extensions") or {}), "hangup": self}
        shown["state"] = {**(scope.get("state") or {}), "hangup": self}
        return shown

    async def receive(self) -> Message:
        """The application's ``receive``."""
        if self._closed:
            return {"type": DISCONNECT}
        message = await (self._reader or self._make_reader()).receive()
        if message["type"] == DISCONNECT:
            self.tell()
        return message

    def watch(self) -> None:
        """The sweeper: the call has lasted, see to it that somebody looks for the client. Part of `Sweeper`."""
        life = self.life
        if life.finished or life.left or life.stage is Stage.ENDED:
            return
        reader = self._reader
        if reader is None:
            reader = self._make_reader()
            if _expects_continue(self.scope):
                # Reading would ask the client for a body that the application may be about to refuse.
                reader.watch_wanted = reader.suspended = True
                return
        reader.watch()

    # ------------------------------------------------------------------ stopping

    def _on_disconnect(self, message: Message) -> None:
        """The reader: the server reports a disconnect. Before the application can know."""
        if not self.life.finished:
            self.client_left()
        elif self._writer.finishing:
            return  # hypercorn on trio says so before its send of the last frame returns; see `last_frame_sent`
        assert self._reader is not None
        self._reader.latch_disconnect(message)

    def client_left(self) -> None:
        """The client is known to have left: the reader says so, or the server's ``send`` does."""
        if self.life.leave():
            if self.policy.disconnect == "finish":
                self._writer.release()
            else:
                self.stop(Cause.CLIENT_DISCONNECT)
        if self._reader is not None and self.life.left:
            self._reader.latch_disconnect({"type": DISCONNECT})

    def last_frame_sent(self) -> None:
        """From now on ``receive`` says disconnect, as ASGI has it, on every server."""
        if self._reader is not None:
            self._reader.latch_disconnect({"type": DISCONNECT})

    def stop(self, cause: Cause, reason: str | None = None) -> bool:
        """Stop the call with ``cause``. On the event loop. True if it is the first cause and not too late."""
        life = self.life
        if life.stage is Stage.ENDED or (life.finished and cause in {Cause.CLIENT_DISCONNECT, Cause.TIMEOUT}):
            return False
        return self.token._cancel(cause, reason)

    def _on_token(self) -> None:
        """The token: it was canceled, in whichever thread."""
        self._on_loop(self._react)

    def _react(self) -> None:
        token, life = self._token, self.life
        assert token is not None
        assert token._cause is not None
        if not life.stop(token._cause, token._reason):
            return
        disconnect = life.cause is Cause.CLIENT_DISCONNECT
        if not (disconnect and self.policy.disconnect == "signal"):
            if disconnect and self._reader is not None and self._reader.listening:
                life.tell()  # it gets the message, and its time to clean up
                self._supervisor = call_later(self.policy.grace, self._insist)
            elif self.work.interrupt():
                self._on_landed()
                self._supervisor = call_later(self.policy.grace, self._insist)
            else:
                self._insist()
        if disconnect:
            self._writer.release()

    def _insist(self) -> None:
        self._supervisor = spawn(self._supervise, context=self._context.copy(), name="hangup: supervisor")

    async def _supervise(self) -> None:
        grace = self.policy.grace
        await insist(self.work, grace=grace, on_landed=self._on_landed)
        self._unresponsive = True
        report_unresponsive(self.work, self._who(), grace)

    def tell(self) -> None:
        """The application has been told by a message or an error: it gets its time before it is interrupted."""
        if self.life.stage is Stage.STOPPING:
            self.life.tell()
            if self._supervisor is not None:
                self._stand_down()
                self._supervisor = call_later(self.policy.grace, self._insist)

    def _on_landed(self) -> None:
        if self.work.native:
            self.life.tell()
        # On trio nobody can say yet: it shows when the application leaves, see `_end`.

    def let_go(self) -> None:
        """The work is done, although a cause is there: what comes after the response is not interrupted."""
        self._stand_down()
        self.work.let_go()

    @property
    def has_seen_token(self) -> bool:
        """Whether somebody looked at the token and saw it canceled."""
        return self._token is not None and self._token.seen

    def _stand_down(self) -> None:
        """No more interruptions, or not for now."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            self._supervisor = None

    # ------------------------------------------------------------------ ending

    async def _end(self, exc: BaseException | None) -> bool:
        """End the call. True if the caller may return, False if it has to raise ``exc`` again."""
        life, options, work = self.life, self._options, self.work
        cancels = work.cancels_since()
        self._stand_down()
        foreign = self._attribute(exc)
        if self._knew(exc):
            life.learn()
        told = life.stage is Stage.TOLD
        own_error = exc if not told and not foreign else None
        answer = self._choose_answer(told and not foreign)
        self._judge(raised=own_error is not None)
        self._outcome = outcome = self._make_outcome(own_error, answer)
        await self._answer(answer)
        while self._finalizers is not None and self._finalizers.pending:
            records = await self._finalizers.run(
                outcome, timeout=options.finalizer_timeout, budget=options.finalizer_budget, who=self._who()
            )
            self._outcome = outcome = replace(outcome, finalizers=records)
            with _creating:
                self._closed = not self._finalizers.pending
        self._close()
        self._report(outcome, exc if told else None)
        if exc is not None and (foreign or not told or not _may_swallow(exc)):
            return False
        if work.cancels_since() > cancels:  # endured while cleaning up, and given back
            raise asyncio.CancelledError
        return True

    def _attribute(self, exc: BaseException | None) -> bool:
        """Whether ``exc`` is a cancellation by somebody else; if so, enter it into the score."""
        if exc is None or not isinstance(exc, anyio.get_cancelled_exc_class()):
            return False
        life = self.life
        if self.work.native and life.stage is Stage.TOLD and self.work.cancels_since() <= 0:
            return False
        if life.cause is None:
            cause = Cause.SERVER_SHUTDOWN if self._here.shutting_down else Cause.UNKNOWN
            if life.left:
                cause = Cause.CLIENT_DISCONNECT  # gunicorn after 3 s, daphne after 10
            self.token._cancel(cause)  # too late to interrupt anything, but it is the cause
            life.stop(cause)
        life.tell()
        return True

    def _knew(self, exc: BaseException | None) -> bool:
        """Whether the application knew of the cause in a way that shows only now."""
        if self.has_seen_token and self.life.stage is Stage.STOPPING:
            return True
        return not self.work.native and (self.work.outer.cancelled_caught or _follows_cancellation(exc))

    def _judge(self, *, raised: bool) -> None:
        if self._steps is not None:
            for step in list(self._steps.open):
                step._end(State.TIMED_OUT if self.life.cause is Cause.TIMEOUT else State.CANCELED)
        self._ended = (self.life.judge(raised=raised), clock())

    def _make_outcome(self, error: BaseException | None = None, answer: tuple[int, bytes] | None = None) -> Outcome:
        life, steps = self.life, self._steps
        assert self._ended is not None
        state, ended = self._ended
        stopped_at = self._token._canceled_at if self._token is not None else None
        assert life.phase is not None
        return Outcome(
            state=state,
            cause=life.cause,
            reason=life.reason,
            phase=life.phase,
            status_code=answer[0] if answer is not None else life.status,
            delivered=life.delivered,
            duration=ended - self.started,
            stop_latency=ended - stopped_at if stopped_at is not None else None,
            steps=tuple(steps.done) if steps is not None else (),
            steps_omitted=steps.omitted if steps is not None else 0,
            error=error,
            unresponsive=self._unresponsive,
            detection_suspended=self._reader is not None and self._reader.suspended,
        )

    def _choose_answer(self, told: bool) -> tuple[int, bytes] | None:
        """The status and body for a live client whose call was stopped before anything was sent."""
        if told and not self._writer.started and not self.life.left:
            return _ANSWERS.get(self.life.cause)
        return None

    async def _answer(self, answer: tuple[int, bytes] | None) -> None:
        """What goes out when the application has been stopped: a true status, a quiet end, or nothing."""
        if answer is not None:
            messages, timeout = _response(*answer), self._options.finalizer_timeout
        elif self.life.left:
            # No server puts this on the wire. It lets the instrumentations and middlewares outside end cleanly.
            messages, timeout = _response(None if self._writer.started else 499, b""), QUIET_TIMEOUT
        else:
            return
        job = spawn(self._send_quietly, messages, context=self._context.copy(), name="hangup: answer")
        if not await endure(job, timeout):
            job.cancel()

    async def _send_quietly(self, messages: list[Message]) -> None:
        try:
            await self._writer.send_past_application(messages)
        except Exception as exc:
            logger.debug("%s: the server refused the end of the response: %r", self._who(), exc)

    def _close(self) -> None:
        self._closed = True
        self._writer.close()
        self._cohort.discard(self)
        if self._reader is not None:
            self._reader.close()
        if self._token is not None:
            self._token._finish()

    def _report(self, outcome: Outcome, swallowed: BaseException | None) -> None:
        for observe in self._options.observers:
            try:
                observe(outcome)
            except Exception:
                logger.exception("An observer raised: %r", observe)
        if swallowed is not None:
            logger.debug("%s: %s left the application after it was told to stop", self._who(), type(swallowed).__name__)
        if outcome.state is not State.COMPLETED:
            in_flight = outcome.in_flight
            logger.info(
                "%s %s: %s %s, %.3f s%s",
                self._who(),
                outcome.state,
                outcome.cause or (type(outcome.error).__name__ if outcome.error else "no cause"),
                outcome.phase,
                outcome.duration,
                f", in flight: {', '.join(in_flight)}" if in_flight else "",
            )

    # ------------------------------------------------------------------ small things

    def _make_reader(self) -> Reader:
        self._reader = reader = Reader(
            self._receive, self._options.read_ahead, self._on_disconnect, self._rejoin, self._context
        )
        if self.life.left or (self.life.finished and not self._writer.finishing):
            reader.latch_disconnect({"type": DISCONNECT})
        return reader

    def _rejoin(self) -> None:
        self._cohort.discard(self)
        if self.life.stage is not Stage.ENDED:
            self._cohort = self._here.sweeper.join(self)

    def _on_loop(self, fn: Callable[[], object]) -> None:
        if threading.get_ident() == self._here.thread:
            fn()
        else:
            self._here.run_soon(fn)

    async def _run_late(self, finalizer: Finalizer, outcome: Outcome) -> None:
        await finalizer.run(outcome, finalizer.timeout or self._options.finalizer_timeout, self._who())

    def _step_log(self) -> StepLog:
        if self._steps is None:
            with _creating:
                if self._steps is None:
                    self._steps = StepLog()
        return self._steps

    def _who(self) -> str:
        return f"{self.scope.get('method', '?')} {self.scope.get('path', '?')!r}"


_creating: Final = threading.RLock()


def _response(status: int | None, body: bytes) -> list[Message]:
    messages: list[Message] = []
    if status is not None:
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
        messages.append({"type": "http.response.start", "status": status, "headers": headers if body else []})
    messages.append({"type": "http.response.body", "body": body, "more_body": False})
    return messages


def _expects_continue(scope: Scope) -> bool:
    return any(name == b"expect" and value.lower() == b"100-continue" for name, value in scope.get("headers") or ())


def _may_swallow(exc: BaseException) -> bool:
    """Whether ``exc``, raised after the application was told to stop, ends with it."""
    if isinstance(exc, BaseExceptionGroup):
        return all(_may_swallow(inner) for inner in exc.exceptions)
    return isinstance(exc, (Exception, asyncio.CancelledError, GeneratorExit)) or type(exc).__name__ == "Cancelled"


def _follows_cancellation(exc: BaseException | None) -> bool:
    cancelled = anyio.get_cancelled_exc_class()
    while exc is not None and not isinstance(exc, cancelled):
        exc = exc.__context__
    return exc is not None


def _reset(mark: Token[Call | None]) -> None:
    try:
        current.reset(mark)
    except ValueError:
        pass  # a server that ends a call in another context than it began it in
