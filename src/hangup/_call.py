"""`Call`: one request, from the moment the middleware is entered until its finalizers have ended.

It binds the parts. `Reader` says when the client leaves, the token spreads the word, `Interruptible` stops the work,
`Lifecycle` keeps the score, `Finalizers` clean up; and at the end there is one `Outcome`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from contextvars import Context, ContextVar, Token, copy_context
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import anyio
from anyio.lowlevel import checkpoint
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ._finalizers import Finalizer, Finalizers
from ._interrupt import Interruptible, insist, report_unresponsive
from ._lifecycle import Cause, Lifecycle, Outcome, Stage, State
from ._policy import Policy
from ._runtime import Job, Timer, call_later, clock, endure, loop_runner, spawn
from ._steps import Step, StepLog
from ._token import CancelToken
from ._watch import DISCONNECT, Reader, Sweeper

logger: Final = logging.getLogger("hangup")

F = TypeVar("F", bound=Callable[..., object])
Observer = Callable[[Outcome], object]

#: Seconds that the synthetic finish may take: hypercorn's HTTP/2 ``send`` never returns for a lost connection.
QUIET_TIMEOUT: Final = 0.1

#: One ``send`` in this many lets the event loop run. A generator that never awaits, on a server whose ``send`` does not
#: suspend for a dead client, would otherwise keep the loop from ever learning that the client has left.
YIELD_EVERY: Final = 64

#: What a live client is answered when its call was stopped before anything was sent. 499 is what gRPC's HTTP mapping
#: makes of CANCELLED, and what a client that has gone would have been told.
_ANSWERS: Final[dict[Cause | None, tuple[int, bytes]]] = {
    Cause.TIMEOUT: (504, b"Gateway Timeout"),
    Cause.SERVER_SHUTDOWN: (503, b"Service Unavailable"),
    Cause.REQUESTED: (499, b"Canceled"),
}

_COMPLETE: Final = Stage.COMPLETE

_current: ContextVar[Call | None] = ContextVar("hangup_call", default=None)


class ClientDisconnected(OSError):
    """What ``send()`` raises once the client has left, as ASGI 2.4 asks. Frameworks know what to do with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of the middleware, validated. Times are seconds, sizes bytes."""

    policy: Callable[[Scope], Policy]
    finalizer_timeout: float
    finalizer_budget: float
    read_ahead: int
    present_spec: str | None
    observers: tuple[Observer, ...]


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
        "_finishing",
        "_frames",
        "_here",
        "_life",
        "_options",
        "_outcome",
        "_reader",
        "_receive",
        "_released",
        "_send",
        "_sender",
        "_senders",
        "_steps",
        "_supervisor",
        "_token",
        "_trailers",
        "_unresponsive",
        "_wire",
        "_work",
        "policy",
        "scope",
        "started",
    )

    def __init__(self, options: Options, here: Here, scope: Scope, receive: Receive, send: Send) -> None:
        #: When the call began, by `hangup`'s monotonic clock. Seconds.
        self.started = clock()
        self._options = options
        self._here = here
        self._receive = receive
        self._send = send
        self._life = Lifecycle()
        self._work = Interruptible()
        self._reader: Reader | None = None
        self._token: CancelToken | None = None
        self._finalizers: Finalizers | None = None
        self._steps: StepLog | None = None
        self._frames = 0
        self._sender: Any = None
        self._senders: dict[Any, None] | None = None
        self._released: dict[Any, int] | None = None
        self._supervisor: Timer | None = None
        self._trailers = self._wire = self._finishing = self._unresponsive = self._closed = False
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
        return self._life.cause

    @property
    def told_cause(self) -> Cause | None:
        """The cause, once the application has been told of it; else None."""
        return self._life.cause if self._life.stage is Stage.TOLD else None

    def __repr__(self) -> str:
        return f"<Call {self._who()} {self.outcome.state if self.outcome else self._life.stage.name.lower()}>"

    # ------------------------------------------------------------------ running

    async def run(self, app: ASGIApp) -> None:
        """Run ``app`` for this call. Raises what the application raised, unless that follows from our own doing."""
        mark = _current.set(self)
        self._context = copy_context()
        here, work = self._here, self._work
        here.calls.add(self)
        self._cohort = here.sweeper.join(self)
        try:
            with work.outer, work.inner:
                await app(self._shown_scope(), self.receive, self.send)
        except BaseException as exc:
            if not await self._end(exc):
                raise
        else:
            life = self._life
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
            self._tell()
        return message

    async def send(self, message: Message) -> None:
        """The application's ``send``. While the client is there it adds no suspension but one in `YIELD_EVERY`."""
        life = self._life
        if life.left or self._closed:
            return await self._send_late(message)
        final = self._note(message)
        self._wire = True
        self._frames += 1
        if not self._frames % YIELD_EVERY:
            await checkpoint()
        if not self._work.native:
            return await self._send_in_scope(message, final)
        task = asyncio.current_task()
        if self._sender is None:
            self._sender = task
        else:  # two tasks of the application send at once
            self._senders = {**(self._senders or {}), task: None}
        try:
            await self._send(message)
        except asyncio.CancelledError:
            if not self._was_released(task):
                raise
            self._refused(None, final)
        except (OSError, RuntimeError) as exc:
            self._refused(exc, final)
        finally:
            if self._sender is task:
                self._sender = None
            elif self._senders is not None:
                self._senders.pop(task, None)
            if final:
                self._on_final_sent()

    def watch(self) -> None:
        """The sweeper: the call has lasted, see to it that somebody looks for the client. Part of `Sweeper`."""
        life = self._life
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

    # ------------------------------------------------------------------ sending

    def _note(self, message: Message) -> bool:
        """Enter a message of the application into the score. True if it is the last."""
        kind = message["type"]
        if kind == "http.response.body":
            final = not message.get("more_body", False) and not self._trailers
        elif kind == "http.response.start":
            self._life.start(message["status"])
            self._trailers = bool(message.get("trailers", False))
            return False
        else:
            final = kind == "http.response.pathsend" or (
                kind == "http.response.trailers" and not message.get("more_trailers", False)
            )
        if final and not self._life.finished:
            self._life.finish()
            self._finishing = True
            if self._life.stage is Stage.COMPLETE:
                self._stand_down()
                self._work.let_go()
        return final

    async def _send_in_scope(self, message: Message, final: bool) -> None:
        with anyio.CancelScope() as scope:
            senders = self._senders = self._senders or {}
            senders[scope] = None
            try:
                await self._send(message)
            except (OSError, RuntimeError) as exc:
                self._refused(exc, final)
            finally:
                senders.pop(scope, None)
                if final:
                    self._on_final_sent()
        if scope.cancelled_caught:
            self._refused(None, final)

    async def _send_late(self, message: Message) -> None:
        """A message for a client that has left, or after the end. Nothing of it is forwarded."""
        life = self._life
        if self._closed:
            raise ClientDisconnected("the call has ended")
        if self._token is not None and self._token._seen:
            self._tell()
        if self.policy.disconnect == "finish" and life.stage is not Stage.TOLD:
            self._note(message)
            await checkpoint()
            return
        if life.stage is Stage.STOPPING:
            # It does not know yet, so what it has done counts: a `def` handler that ran on in its thread, work that
            # ended just now. No suspension, or the interruption lands in the middle of an answer that is there.
            if message["type"] == "http.response.start":
                self._note(message)
                return
            if self._note(message):
                return
            self._tell()
        elif life.finished:
            return
        await checkpoint()
        raise ClientDisconnected("the client has disconnected")

    def _refused(self, exc: Exception | None, final: bool) -> None:
        """The server's send failed, or was released because the client has left."""
        if isinstance(exc, RuntimeError) and not isinstance(exc, OSError) and not self._life.left:
            raise exc  # the application broke the protocol
        if final:
            # The work is done and the application does not know: it goes on, as it would had the client left later.
            self._life.undeliver()
            return
        self._client_left()
        if self._reader is not None:
            self._reader.latch_disconnect({"type": DISCONNECT})
        if self.policy.disconnect != "finish":
            self._tell()
            raise exc or ClientDisconnected("the client has disconnected")

    def _on_final_sent(self) -> None:
        self._finishing = False
        if self._reader is not None:
            self._reader.latch_disconnect({"type": DISCONNECT})

    # ------------------------------------------------------------------ stopping

    def _on_disconnect(self, message: Message) -> None:
        """The reader: the server reports a disconnect. Before the application can know."""
        if not self._life.finished:
            self._client_left()
        elif self._finishing:
            return  # hypercorn on trio says so before its send of the last frame returns; see `_on_final_sent`
        assert self._reader is not None
        self._reader.latch_disconnect(message)

    def _client_left(self) -> None:
        if self._life.leave():
            if self.policy.disconnect == "finish":
                self._release_senders()
            else:
                self.stop(Cause.CLIENT_DISCONNECT)

    def stop(self, cause: Cause, reason: str | None = None) -> bool:
        """Stop the call with ``cause``. On the event loop. True if it is the first cause and not too late."""
        life = self._life
        if life.stage is Stage.ENDED or (life.finished and cause in {Cause.CLIENT_DISCONNECT, Cause.TIMEOUT}):
            return False
        return self.token._cancel(cause, reason)

    def _on_token(self) -> None:
        """The token: it was canceled, in whichever thread."""
        self._on_loop(self._react)

    def _react(self) -> None:
        token, life = self._token, self._life
        assert token is not None and token._cause is not None
        if not life.stop(token._cause, token._reason):
            return
        disconnect = life.cause is Cause.CLIENT_DISCONNECT
        if not (disconnect and self.policy.disconnect == "signal"):
            if disconnect and self._reader is not None and self._reader.listening:
                life.tell()  # it gets the message, and its time to clean up
                self._supervisor = call_later(self.policy.grace, self._insist)
            elif self._work.interrupt():
                self._on_landed()
                self._supervisor = call_later(self.policy.grace, self._insist)
            else:
                self._insist()
        if disconnect:
            self._release_senders()

    def _insist(self) -> None:
        self._supervisor = spawn(self._supervise, context=self._context.copy(), name="hangup: supervisor")

    async def _supervise(self) -> None:
        grace = self.policy.grace
        await insist(self._work, grace=grace, on_landed=self._on_landed)
        self._unresponsive = True
        report_unresponsive(self._work, self._who(), grace)

    def _tell(self) -> None:
        """The application has been told by a message or an error: it gets its time before it is interrupted."""
        if self._life.stage is Stage.STOPPING:
            self._life.tell()
            if self._supervisor is not None:
                self._stand_down()
                self._supervisor = call_later(self.policy.grace, self._insist)

    def _on_landed(self) -> None:
        if self._work.native:
            self._life.tell()
        # On trio nobody can say yet: it shows when the application leaves, see `_end`.

    def _stand_down(self) -> None:
        """No more interruptions, or not for now."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            self._supervisor = None

    def _release_senders(self) -> None:
        """Let go whoever is blocked in the server's send: it may never return."""
        for sender in (self._sender, *(self._senders or ())):
            if sender is None or (sender is self._work.host and self._life.stage is Stage.TOLD):
                continue  # nobody, or the interruption has it
            if self._work.native:
                if self._released is None:
                    self._released = {}
                self._released.setdefault(sender, sender.cancelling())
            sender.cancel()

    def _was_released(self, task: Any) -> bool:
        """Whether the cancellation that just left the server's send was `_release_senders`, and nothing else too."""
        before = self._released.pop(task, None) if self._released is not None else None
        return before is not None and task.uncancel() <= before

    # ------------------------------------------------------------------ ending

    async def _end(self, exc: BaseException | None) -> bool:
        """End the call. True if the caller may return, False if it has to raise ``exc`` again."""
        life, options, work = self._life, self._options, self._work
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
        life = self._life
        if self._work.native and life.stage is Stage.TOLD and self._work.cancels_since() <= 0:
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
        if self._token is not None and self._token._seen and self._life.stage is Stage.STOPPING:
            return True
        return not self._work.native and (self._work.outer.cancelled_caught or _follows_cancellation(exc))

    def _judge(self, *, raised: bool) -> None:
        if self._steps is not None:
            for step in list(self._steps.open):
                step._end(State.TIMED_OUT if self._life.cause is Cause.TIMEOUT else State.CANCELED)
        self._ended = (self._life.judge(raised=raised), clock())

    def _make_outcome(self, error: BaseException | None = None, answer: tuple[int, bytes] | None = None) -> Outcome:
        life, steps = self._life, self._steps
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
        if told and not self._wire and not self._life.left:
            return _ANSWERS.get(self._life.cause)
        return None

    async def _answer(self, answer: tuple[int, bytes] | None) -> None:
        """What goes out when the application has been stopped: a true status, a quiet end, or nothing."""
        if answer is not None:
            messages, timeout = _response(*answer), self._options.finalizer_timeout
        elif self._life.left:
            # No server puts this on the wire. It lets the instrumentations and middlewares outside end cleanly.
            messages, timeout = _response(None if self._wire else 499, b""), QUIET_TIMEOUT
        else:
            return
        job = spawn(self._send_quietly, messages, context=self._context.copy(), name="hangup: answer")
        if not await endure(job, timeout):
            job.cancel()

    async def _send_quietly(self, messages: list[Message]) -> None:
        try:
            for message in messages:
                await self._send(message)
        except Exception as exc:
            logger.debug("%s: the server refused the end of the response: %r", self._who(), exc)

    def _close(self) -> None:
        self._closed = True
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
        if self._life.left or (self._life.finished and not self._finishing):
            reader.latch_disconnect({"type": DISCONNECT})
        return reader

    def _rejoin(self) -> None:
        self._cohort.discard(self)
        if self._life.stage is not Stage.ENDED:
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
        _current.reset(mark)
    except ValueError:
        pass  # a server that ends a call in another context than it began it in


def current_call() -> Call:
    """The call that is running in this context: in its handler, its tasks, its threads.

    :raises LookupError: outside a call.
    """
    call = _current.get()
    if call is None:
        raise LookupError(
            "current_call() outside a call: is HangupMiddleware mounted, and outermost? Where a framework drops "
            'context variables, use scope["extensions"]["hangup"].'
        )
    return call


def add_finalizer(fn: F, *, name: str | None = None, timeout: float | None = None) -> F:
    """`Call.add_finalizer` of the current call.

    :raises LookupError: outside a call.
    """
    return current_call().add_finalizer(fn, name=name, timeout=timeout)


def step(name: str, attributes: Mapping[str, Any] | None = None) -> Step:
    """A named unit of work: ``with step("call the model"): ...``, ``async with``, or a decorator.

    Outside a call it times the work and nothing more.
    """
    return Step(name, attributes, _current.get())
