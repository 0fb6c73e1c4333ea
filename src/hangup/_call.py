"""`Call`: one request, from the moment the middleware is entered until its finalizers have ended.

It binds the parts. `Reader` says when the client leaves, the token spreads the word, `Interruptible` stops the work,
`Lifecycle` keeps the score, `Finalizers` clean up; and at the end there is one `Outcome`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextvars import copy_context
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from . import _hooks
from ._answers import ANSWERS, response
from ._bounded import name_of
from ._children import Child
from ._current import current
from ._deadline import debugging, remaining_of
from ._errors import contains, follows_cancellation, may_swallow
from ._finalizers import Finalizer, Finalizers
from ._interrupt import Interruptible, Supervisor
from ._lifecycle import Cause, Lifecycle, Outcome, Stage, State
from ._options import NAMES, Options, Policy, policy_by_name
from ._protect import Protect
from ._route import MARK
from ._runtime import Job, Timer, call_later, clock, endure, spawn, tasks_with
from ._scope import expects_continue, has_body, present, printable, show, show_rest
from ._send import Writer
from ._shutdown import Here
from ._steps import AmbiguousOutcome, Step, StepLog
from ._stream import CLOSE_TIMEOUT, Closing
from ._success import Commit, Hook, HookFailure
from ._token import CancelToken
from ._watch import DISCONNECT, Reader

if TYPE_CHECKING:
    from subprocess import CompletedProcess

    from anyio.abc import Process

    from ._process import Command
    from .journal import Run

T = TypeVar("T")

logger: Final = logging.getLogger("hangup")

F = TypeVar("F", bound=Callable[..., object])
Observer = Callable[[Outcome], object]

#: With more calls in flight than this, tasks that outlive a call are not counted: it takes a look at every task. Nor
#: are they without an observer, whom the count is for.
COUNT_TASKS_BELOW: Final = 50

#: A deadline this near, in seconds, gets its timer at once; others when the call has lasted.
NEAR: Final = 0.05

#: Seconds that the synthetic finish may take: hypercorn's HTTP/2 ``send`` never returns for a lost connection.
QUIET_TIMEOUT: Final = 0.1

#: Seconds within which an application that reads its body is interrupted, or given the message after all.
REACH: Final = 1.0

_COMPLETE: Final = Stage.COMPLETE


#: The causes of a client that leaves; the second when it was the server that closed the connection.
_LEAVING: Final = frozenset({Cause.CLIENT_DISCONNECT, Cause.SERVER_SHUTDOWN})

#: The causes that end an event stream for a client that is there. A deadline cuts it.
_ENDING: Final = frozenset({Cause.REQUESTED, Cause.SERVER_SHUTDOWN})


class Call:
    """A request that is running, as a handler sees it: ``current_call()``.

    `token`, `add_finalizer` and `step` may be used from any thread, and by tasks that outlive the call.
    """

    # What is different for a WebSocket is in `_websocket`.
    _reader_class: ClassVar[type[Reader]] = Reader
    _writer_class: ClassVar[type[Writer]] = Writer

    __slots__ = (
        "_answered",
        "_answering",
        "_children",
        "_closed",
        "_cohort",
        "_context",
        "_deadline",
        "_ended",
        "_failure",
        "_finalizers",
        "_here",
        "_left_by",
        "_limit",
        "_options",
        "_outcome",
        "_policy",
        "_protected",
        "_reader",
        "_receive",
        "_routed",
        "_shown",
        "_steps",
        "_supervisor",
        "_token",
        "_watched",
        "_writer",
        "effect_guards",
        "hooks",
        "life",
        "scope",
        "started",
        "streams",
        "trace",
        "work",
    )

    def __init__(self, options: Options, here: Here, scope: Scope, receive: Receive, send: Send) -> None:
        #: When the call began, by `hangup`'s monotonic clock. Seconds.
        self.started: float = clock()
        self._options = options
        self._here = here
        self._receive = receive
        self.life: Lifecycle = Lifecycle()
        self.work: Interruptible = Interruptible()
        self._writer = self._writer_class(send, self)
        self._reader: Reader | None = None
        self._token: CancelToken | None = None
        self._finalizers: Finalizers | None = None
        self._steps: StepLog | None = None
        self._supervisor: Supervisor | None = None
        self._children: list[Child] | None = None
        self._protected: list[Protect] | None = None
        self._deadline: Timer | None = None
        self._limit: float | None = None
        self._left_by: Cause | None = None
        self._failure: BaseException | None = None
        self._answered: tuple[int, bytes] | None = None
        self._answering: Job | None = None
        self._shown: Scope | None = None
        self._closed = self._watched = self._routed = False
        self._ended: tuple[State, float] | None = None
        self._outcome: Outcome | None = None
        self._policy = options.policies["cancel"]  # until its own is found: `run`
        self.hooks: _hooks.Hooks = options.hooks
        #: What a listener keeps with the call.
        self.trace: Any = None
        #: Streams to be closed in the task of the application, if it leaves them behind.
        self.streams: Sequence[Closing[Any]] = ()
        #: Awaited when a step with ``effect=True`` has been entered or left; before the effect, where it can be.
        self.effect_guards: list[Callable[[], Coroutine[Any, Any, object]]] = []
        #: The scope of the server. The application sees a copy; what it writes into that is here once it answers.
        self.scope: Scope = scope

    # ------------------------------------------------------------------ what handlers use

    @property
    def token(self) -> CancelToken:
        """The cancel token of this call. The same object every time."""
        if self._token is None:
            with _creating:
                if self._token is None:
                    token = CancelToken(self._on_token)
                    token._deadline = self._deadline_at()
                    if self._closed:
                        token._finish()
                    self._token = token
        return self._token

    def cancel(self, reason: str | None = None) -> bool:
        """Stop this call: `CancelToken.cancel`, with the same answer."""
        return self.token.cancel(reason)

    def add_finalizer(self, fn: F, *, name: str | None = None, timeout: float | None = None) -> F:
        """Have ``fn`` run once when the call has ended, whatever the outcome.

        Returns ``fn``, so it can decorate. With options it is called: ``add_finalizer(fn, name="x")``.
        ``fn`` takes no argument; if it requires one, it gets the `Outcome`. A coroutine function is awaited, a plain
        function runs in a worker thread. It runs in the context of this registration, under ``timeout`` seconds (the
        middleware's ``finalizer_timeout`` by default) and the budget of all. Last registered runs first. If it raises
        or is cut off that is logged and recorded, and changes nothing else.

        From any thread. Registered by a finalizer, it runs after that one. Registered after the end it runs at once.

        :raises TypeError: if ``fn`` cannot be called so, or ``timeout`` is no number.
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
            self.on_loop(lambda: self._start_late(finalizer, late))
        return fn

    def drop_finalizer(self, fn: Callable[..., object]) -> bool:
        """Take back what `add_finalizer` registered. True if that keeps it from running; False if it ran, or runs."""
        with _creating:
            dropped = self._finalizers is not None and self._finalizers.drop(fn)
            if dropped and self._finalizers is not None and not self._finalizers.pending and not self._finalizers.begun:
                self._finalizers = None  # as if there had been none: the end of the call is cheaper so
            return dropped

    def add_before_success(self, fn: F) -> F:
        """Have ``fn()`` run when success is about to become visible, and only then. Returns ``fn``.

        For a response in one piece that is before its start is forwarded, for a stream before what completes it: its
        last frame, or the last byte of its ``content-length``. If the client has left, it is before the call has
        completed. An answer of 400 or more is no success: its hooks do not run. Hooks run in the order of
        registration, each under ``finalizer_timeout``; a coroutine function is awaited, a plain function runs in a
        worker thread. While they run neither a disconnect nor the deadline stops the call: they decide.

        If one raises or takes too long, the client gets a 500, or what a `HookFailure` says, or a stream that is cut
        without a clean end; the application's ``send()`` raises; the state is ``failed``.

        :raises TypeError: if ``fn`` cannot be called without arguments.
        :raises RuntimeError: if the response is complete already, or the application has ended.
        """
        self._writer.add_hook(Hook(fn))
        return fn

    async def refuse(self, failure: HookFailure) -> None:
        """Answer ``failure`` now, whatever the application does next; it is the end of the call, and it has ``failed``.

        If the response has started it is cut without a clean end. What the application sends later is discarded. On
        the event loop. After a complete response, or the end of the application, this changes nothing. What the server
        raises meanwhile goes no further.

        :raises TypeError: for anything else than a `HookFailure`.
        """
        if not isinstance(failure, HookFailure):
            raise TypeError(f"refuse() takes a HookFailure, HookFailure('try again', status=503) say, not {failure!r}")
        if not self.life.finished and self._ended is None and not self._writer.cut:
            await self._writer.refuse(failure)

    async def open_run(
        self,
        name: str,
        *,
        id: str | None = None,  # noqa: A002 - what the table and its users call it
        owner: str | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> Run:
        """Open a durable run in the journal of the middleware. Its row says ``running`` when this returns.

        The row is closed by the outcome of this call: before the client can see success, or when the call has ended
        otherwise. Several runs may be open in one call; those that succeed are closed together.

        :param name: what kind of run it is. Few values.
        :param id: the id, up to 128 printable characters but space and slash; by default a new UUIDv7.
        :param owner: whose run it is, a user or a session: up to 255 characters.
        :param attributes: what else is to be known of it: anything JSON can hold, up to 64 KiB.
        :raises hangup.journal.DuplicateRun: if there is a run of that ``id``.
        :raises hangup.journal.JournalUnavailable: if the row could not be written. The client has been answered 503.
        :raises TypeError: for an argument of the wrong kind.
        :raises ValueError: for one that is malformed or too long.
        :raises RuntimeError: if the middleware has no journal, or the call has ended.
        """
        if self._options.journal is None:
            raise RuntimeError(
                "open_run() needs a journal: HangupMiddleware(app, journal=hangup.journal.Journal('sqlite:///runs.db'))"
            )
        run: Run = await self._options.journal.open_run(self, name, id=id, owner=owner, attributes=attributes)
        return run

    def start_soon(self, fn: Callable[..., Awaitable[object]], *args: object) -> None:
        """Start ``fn(*args)`` in a task of this call, in a copy of the current context. On the event loop.

        It is interrupted once when the call is told to stop, or when the handler raises, and the call waits for its
        end before its state is written: also after a complete response, like a background task. If it raises, that is
        logged at ERROR, and a call that nobody had told to stop has ``failed``.

        :raises TypeError: if ``fn`` cannot be called.
        :raises RuntimeError: once the call has ended, and in a thread.
        """
        if not callable(fn):
            raise TypeError(f"start_soon() takes a coroutine function and its arguments, not {fn!r}: do not call it")
        if self._ended is not None:
            raise RuntimeError(f"start_soon({name_of(fn)}): the call has ended")
        if threading.get_ident() != self._here.thread:
            raise RuntimeError(
                f"start_soon({name_of(fn)}) in a thread: there it is anyio.from_thread.run_sync(call.start_soon, ...)"
            )
        context = copy_context()
        context.run(current.set, self)  # it may be another call that starts it
        child = Child(functools.partial(fn, *args), grace=self._policy.grace, who=self.who, context=context)
        if self._children is None:
            self._children = []
        self._children.append(child)
        if self.told_cause is not None:
            child.interrupt()

    async def open_process(self, command: Command, **options: Any) -> Process:
        """`anyio.open_process`, in a process group of its own that ends with the call.

        When the call has ended, its stdin is closed; what is left of the group gets SIGTERM and then SIGKILL, each
        after a bounded wait, and the process is reaped. Takes ``stdin``, ``stdout``, ``stderr``, ``cwd``, ``env``.

        :raises OSError: if it cannot be started.
        """
        from ._process import open_process  # only here: `import hangup` is to be quick

        return await open_process(self, command, **options)

    async def run_process(self, command: Command, **options: Any) -> CompletedProcess[bytes]:
        """Run ``command`` to its end: `open_process`, and its output. Takes ``input``, ``check``, ``cwd``, ``env``.

        If the call is interrupted meanwhile, the whole process group is ended at once.

        :raises subprocess.CalledProcessError: if it ends with another code than 0 and ``check`` is true.
        """
        from ._process import run_process

        return await run_process(self, command, **options)

    def step(
        self,
        name: str,
        attributes: Mapping[str, Any] | None = None,
        *,
        cancel: Callable[[], object] | None = None,
        effect: bool = False,
    ) -> Step:
        """A named unit of work, to be entered with ``with`` or ``async with``. See `hangup.step`."""
        return Step(name, attributes, self, cancel, effect)

    @property
    def policy(self) -> Policy:
        """What a disconnect does to this call, and how long it may take. May be replaced while it runs."""
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        if not isinstance(policy, Policy):
            raise TypeError(f"policy takes a Policy, Policy('finish') for example, not {policy!r}")
        self._routed = True
        self._change_policy(policy)

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
    def effects_in_flight(self) -> tuple[str, ...]:
        """The names of the steps declared to change the world of which it is open whether they have."""
        if self._steps is None:
            return ()
        return tuple(step.name for step in (*self._steps.open, *self._steps.unresolved) if step.effect)

    @property
    def unresolved(self) -> bool:
        """Whether the outcome is ambiguous, unless somebody says what became of an effect that was cut off."""
        return self._steps is not None and bool(self._steps.unresolved)

    @property
    def status_code(self) -> int | None:
        """The status the application has chosen for its response; None before it has."""
        return self._writer.status

    @property
    def cause(self) -> Cause | None:
        """Why the call was told to stop, if it was."""
        return self.life.cause

    @property
    def shutting_down(self) -> bool:
        """Whether the server has been told to stop, by SIGTERM, SIGINT or `HangupMiddleware.drain`.

        True before anything is canceled: a long stream can look at it and end in its own way.
        """
        return self._here.shutting_down

    @property
    def told_cause(self) -> Cause | None:
        """The cause, once the application has been told of it; else None."""
        return self.life.cause if self.life.stage is Stage.TOLD else None

    def __repr__(self) -> str:
        return f"<Call {self.who} {self.outcome.state if self.outcome else self.life.stage.name.lower()}>"

    # ------------------------------------------------------------------ what a journal uses

    def add_last_hook(self, fn: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Have ``await fn()`` run after every ``before_success`` hook has succeeded: it makes the success a fact."""
        self._writer.add_hook(Commit(fn), last=True)

    # ------------------------------------------------------------------ running

    async def run(self, app: ASGIApp) -> None:
        """Run ``app`` for this call. Raises what the application raised, unless that follows from our own doing."""
        mark = current.set(self)
        self._context = copy_context()
        here, work = self._here, self.work
        here.calls.add(self)
        self._cohort = here.sweeper.join(self)
        started = self.hooks.call_started
        if started is not None:
            try:  # and not `tell`: every call comes through here
                started(self)
            except Exception as exc:
                _hooks.report(started, exc)
        try:
            with work.outer, work.inner:
                try:
                    self._policy = policy = self._options.policy(self.scope)  # the user's, perhaps: it may raise
                    if self._options.deadline_header is not None:
                        self._limit = remaining_of(self.scope, self._options.deadline_header)
                    if policy.timeout is not None or policy.send_timeout is not None or self._limit is not None:
                        self._apply_policy()
                    if here.stopping:
                        self.shut_down()
                        self.life.tell()  # not started at all
                    if self.life.cause is None:
                        self._shown = shown = present(self.scope, self, self._options.present_spec)
                        await app(shown, self.receive, self._writer.send)
                finally:
                    if self.streams:
                        await self._close_streams()
        except BaseException as exc:
            if not await self._end(exc):
                raise
        else:
            if self.life.stage is _COMPLETE and self._is_plain() and self._close_unless_pending():
                self._judge(raised=False)
                ended = self.hooks.call_ended
                if ended is not None:
                    try:
                        ended(self)
                    except Exception as exc:
                        _hooks.report(ended, exc)
                self._close()
            else:
                await self._end(None)
        finally:
            here.leave(self)
            del self._context  # it refers to this call: a cycle, and work for the garbage collector
            try:
                current.reset(mark)
            except ValueError:
                pass  # a server that ends a call in another context than it began it in

    async def _close_streams(self) -> None:
        """Close what the application left behind. In its task, and in the scopes of the work: theirs are inside."""
        work = self.work

        work.let_go()
        timer = call_later(CLOSE_TIMEOUT, work.interrupt)
        try:
            for stream in self.streams:
                await stream.close_left_behind()
        finally:
            timer.cancel()

    def _is_plain(self) -> bool:
        """Whether a completed call has nothing to do at its end."""
        return (
            self._finalizers is None
            and self._steps is None
            and self._children is None
            and not self.life.left
            and not self._options.observers
        )

    async def receive(self) -> Message:
        """The application's ``receive``."""
        if self._closed:
            return self._farewell()
        reader = self._reader or self._make_reader()
        message = await reader.receive()
        if message["type"] == reader.disconnect:
            if reader.in_body and has_body(self.scope):
                await self._be_interrupted()
            self.tell()
        return message

    async def _be_interrupted(self) -> None:
        """The client left in the middle of its upload, and the application reads it: the interruption finds it here.

        Some frameworks take the disconnect message for the end of the body, and hand the handler a short one.
        """
        looks = anyio.current_effective_deadline() == -math.inf  # `is_disconnected()`: it wants to know, and no more
        stopping = self.life.stage is Stage.STOPPING and self._policy.disconnect == "cancel"
        hears = self.work.has_heard() or bool(self._writer.committing)
        if stopping and not looks and not self.work.landed and not hears:
            self._supervise().interrupt()
            with anyio.move_on_after(REACH):  # else it is out of reach, in somebody's shield, and gets the message
                await anyio.sleep_forever()

    def watch(self) -> None:
        """The sweeper: the call has lasted, see to it that somebody looks for the client. Part of `Sweeper`."""
        life = self.life
        if (life.finished and not self._writer.finishing) or life.left or life.stage is Stage.ENDED:
            return
        if not self._watched:
            self._watched = True
            self._look_up_route()
            self._apply_policy()
        reader = self._reader
        if reader is None:
            reader = self._make_reader()
            if expects_continue(self.scope):
                # Reading would ask the client for a body that the application may be about to refuse.
                reader.watch_wanted = reader.suspended = True
                return
        reader.watch()

    # ------------------------------------------------------------------ policy and deadline

    def apply_route(self, name: str | None, changes: Mapping[str, Any]) -> None:
        """`on_disconnect`: what the route wants to be different. Once; later the running call has its own say."""
        if not self._routed:
            policy = self._policy
            if name is not None:
                named = policy_by_name(self._options.policies, name)
                policy = replace(policy, disconnect=named.disconnect) if name in NAMES else named
            self._routed = True
            self._change_policy(replace(policy, **changes))

    def _look_up_route(self) -> None:
        """Find the mark of `on_disconnect` before the endpoint is entered, where the framework shows the endpoint."""
        endpoint = self._shown.get("endpoint") if self._shown is not None else None
        mark = getattr(endpoint, MARK, None)
        if mark is not None and (mark[0] is None or mark[0] in self._options.policies):
            self.apply_route(*mark)  # else that is an error of the endpoint, once it is entered

    def _change_policy(self, policy: Policy) -> None:
        changed = policy.disconnect != self._policy.disconnect
        self._policy = policy
        self.on_loop(self._apply_policy)
        if changed:
            self.on_loop(self._catch_up)

    def _catch_up(self) -> None:
        """The policy has changed. If the client has left already, what the new one says is done now."""
        life, cancel = self.life, self._policy.disconnect == "cancel"
        if self._left_by is None or life.finished or self._ended is not None:
            return
        if life.cause is None:
            self._obey_policy()
            if self._policy.disconnect != "finish" and self._reader is not None:
                self._reader.show_disconnect()
        elif life.cause is self._left_by and cancel and self._supervisor is None:
            self._interrupt_children()
            if life.stage is Stage.TOLD:
                self._supervise().interrupt_later()
            else:
                self._interrupt_application(left=True)
        elif life.cause is self._left_by and not cancel and life.stage is Stage.STOPPING:
            self.let_go()
            self._supervisor = None  # the next may insist

    def _apply_policy(self) -> None:
        """Arm the deadline, if it is near enough or the call has lasted."""
        if self._ended is not None:
            return
        self._writer.send_timeout = self._policy.send_timeout
        for supervised in (self._supervisor, *(self._children or ())):
            if supervised is not None:
                supervised.change_grace(self._policy.grace)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        deadline = self._deadline_at()
        if self._token is not None:
            self._token._deadline = deadline
        if deadline is not None:
            left = deadline - clock()
            if left <= 0 and not self._watched:
                self._on_deadline()  # not started at all
            elif self._watched or left < NEAR:
                self._deadline = call_later(max(left, 0.0), self._on_deadline)

    def _deadline_at(self) -> float | None:
        limits = [seconds for seconds in (self._policy.timeout, self._limit) if seconds is not None]
        return self.started + min(limits) if limits else None

    def _on_deadline(self) -> None:
        if self.life.finished or self._ended is not None:
            return
        if debugging():
            self._deadline = call_later(1.0, self._on_deadline)
        elif self.life.cause is None:
            self.stop(Cause.TIMEOUT)
        elif self._supervisor is None and not self._writer.committing:
            # An application that was only signaled; else it has its grace to clean up. While hooks run they decide.
            self._insist()

    def send_timed_out(self) -> None:
        """One ``send`` took longer than ``send_timeout``."""
        if debugging():
            return
        if self._writer.finishing:
            self._writer.release()  # the work is done, and only its delivery in doubt
        else:
            self.stop(Cause.TIMEOUT, "send_timeout")

    @property
    def over(self) -> bool:
        """Whether the state of the call has been written."""
        return self._ended is not None

    @property
    def end(self) -> tuple[State, float]:
        """The state of a call that is over, and when its application returned, by the clock of `started`."""
        assert self._ended is not None
        return self._ended

    @property
    def stopped_at(self) -> float | None:
        """When the cause arrived, by the clock of `started`."""
        return self._token._canceled_at if self._token is not None else None

    @property
    def step_states(self) -> list[State]:
        """The states of the steps that have ended."""
        return [step.state for step in list(self._steps.done) if step.state is not None] if self._steps else []

    @property
    def shown_scope(self) -> Scope | None:
        """The scope the application sees, while there is one."""
        return self._shown

    def show_scope(self) -> None:
        """A response is about to be handed over, or the end has come without one."""
        if self._shown is not None:
            show(self._shown, self.scope)

    @property
    def hook_timeout(self) -> float:
        """Seconds that a hook, or the ``cancel=`` of a step, may take."""
        return self._options.finalizer_timeout

    # ------------------------------------------------------------------ stopping

    def _on_disconnect(self, message: Message) -> None:
        """The reader: the server reports a disconnect. Before the application can know."""
        if self._writer.cut and self.life.cause is Cause.TIMEOUT:
            return  # what servers say of a response that is complete, our 504. Django would cancel its view once more
        if self._failure is not None:  # the same of our 500: the call has failed, and the client has not left
            if self._writer.finishing:
                self._writer.give_up_soon()  # or it has, and this will never be sent
        elif not self.life.finished:
            self.client_left(message)
        elif self._writer.finishing:
            # hypercorn on trio says so before its send of the last frame returns; see `last_frame_sent`. For a client
            # that has gone, its HTTP/2 send never returns.
            self._writer.give_up_soon()
            return
        self._show_disconnect(message)

    def client_left(self, message: Message | None = None) -> None:
        """The client is known to have left: the reader says so (``message``), or the server's ``send`` does."""
        if self.life.leave():
            self._look_up_route()
            self._left_by = self._cause_of(message)
            self._obey_policy()
        if self._reader is not None and self.life.left:
            self._show_disconnect(message or self._farewell())

    def _obey_policy(self) -> None:
        """The client has left: do what the policy says."""
        assert self._left_by is not None
        if self._policy.disconnect == "finish":
            self._writer.release()
        elif not self._writer.committing and not self.stop(self._left_by):
            self._writer.release()  # it has a cause already; who is blocked in `send` is let go all the same

    def _show_disconnect(self, message: Message) -> None:
        """Let the application see it; but not one that has its whole request, and is to finish its work.

        Django and Quart listen by themselves, and cancel their own handler.
        """
        reader, life = self._reader, self.life
        assert reader is not None
        if self._policy.disconnect == "finish" and reader.body_complete and life.cause is None and not life.finished:
            reader.hold_disconnect(message)
        else:
            reader.latch_disconnect(message)

    async def inquire(self) -> None:
        """The server's ``send`` raised: find out what the server knows, where it can say more than that."""

    def _farewell(self) -> Message:
        """The disconnect message when the server has not given us one."""
        return {"type": DISCONNECT}

    def _cause_of(self, message: Message | None) -> Cause:
        """Why the client has left. Once a shutdown has begun, it is the server that closes connections."""
        return Cause.SERVER_SHUTDOWN if self._here.shutting_down else Cause.CLIENT_DISCONNECT

    def last_frame_sent(self) -> None:
        """From now on ``receive`` says disconnect, as ASGI has it, on every server."""
        if self._reader is not None:
            self._reader.latch_disconnect(self._farewell())

    def shut_down(self) -> None:
        """The server stops, and this call has to."""
        self.stop(Cause.SERVER_SHUTDOWN)
        if self._supervisor is None and self._ended is None:
            self._insist()  # it was only signaled, or is to finish

    def _insist(self) -> None:
        """Interrupt what was only signaled."""
        self._supervise().interrupt()
        self._interrupt_children()

    def _interrupt_children(self) -> None:
        for child in self._children or ():
            child.interrupt()

    def fail(self, error: BaseException) -> None:
        """A ``before_success`` hook failed. It has been logged."""
        self._failure = error
        self.life.fail()
        self.response_ending()

    def response_ending(self) -> None:
        """The last frame, or an answer in its stead, is about to be handed over."""
        if self.trace is not None:
            _hooks.tell(self.hooks.response_ending, self)

    def stop(self, cause: Cause, reason: str | None = None) -> bool:
        """Stop the call with ``cause``. On the event loop. True if it is the first cause and not too late."""
        life = self.life
        too_late = life.finished or self._writer.committing
        if life.stage is Stage.ENDED or (too_late and cause in {Cause.CLIENT_DISCONNECT, Cause.TIMEOUT}):
            return False
        return self.token._cancel(cause, reason)

    def _on_token(self) -> None:
        """The token: it was canceled, in whichever thread."""
        self.on_loop(self._react)

    def _react(self) -> None:
        token, life = self._token, self.life
        assert token is not None
        assert token._cause is not None
        if not life.stop(token._cause, token._reason):
            return
        _hooks.tell(self.hooks.call_stopped, self)
        for section in self._protected or ():
            section.bound(self._options.max_protect)
        if life.cause is Cause.TIMEOUT:
            self._cut()
        left = life.left and life.cause in _LEAVING
        if not (left and self._policy.disconnect == "signal"):
            self._interrupt_children()
            if self._ended is None:
                self._interrupt_application(left)
        elif left:
            self._writer.release()

    def _interrupt_application(self, left: bool) -> None:
        supervisor = self._supervise()
        if self._hears(left):
            supervisor.interrupt_later()
            if left:
                self._writer.release()
        elif (left or self._writer.cut) and self._writer.release():
            supervisor.interrupt_later()  # should the server not let go; else see `interrupt_soon`
        else:
            supervisor.interrupt()

    def interrupt_soon(self) -> None:
        """The application is back from a ``send`` that was released: interrupt it in its own code."""
        self._supervise().interrupt()

    def _hears(self, left: bool) -> bool:
        """Whether the application hears of the cause in another way than by being interrupted: it gets its grace."""
        if left and self._reader is not None and self._reader.listening:
            self._reader.show_disconnect()
            if not (self._writer.committing or (self._reader.in_body and has_body(self.scope))):  # `_be_interrupted`
                self.life.tell()  # it gets the message, and its time to clean up
            return True
        return False

    def _cut(self) -> None:
        """The deadline has passed: the client hears so now, however long the application takes to end."""
        self._writer.cut_off()
        self.life.tell()
        messages = self._last_words()
        if messages:
            self._answering = self._answer_soon(messages)

    def _supervise(self) -> Supervisor:
        if self._supervisor is None:
            self._supervisor = Supervisor(
                self.work,
                grace=self._policy.grace,
                who=self.who,
                context=self._context,
                on_landed=self._on_landed,
                foreign=True,
            )
        return self._supervisor

    def tell(self) -> None:
        """The application has been told by a message or an error: it gets its time before it is interrupted.

        Not while its hooks run: it is too late, unless they fail.
        """
        if self.life.stage is Stage.STOPPING and not self._writer.committing:
            self.know()
            if self._supervisor is not None:
                self._supervisor.interrupt_later()

    def know(self) -> None:
        """The application knows of the cause. So do its children, those included that have started since."""
        self.life.tell()
        if self._supervisor is not None:
            self._interrupt_children()

    def refused(self) -> None:
        """A ``send`` of the application raises now: what it does next is clean up."""
        if self._supervisor is not None:
            self._supervisor.hold_off()

    def _on_landed(self) -> None:
        if self.work.native:
            self.life.interrupt()
        # On trio nobody can say yet: it shows when the application leaves, see `_end`.
        if not self._writer.committing:
            self._interrupt_children()

    def let_go(self) -> None:
        """The work is done, although a cause is there: what comes after the response is not interrupted."""
        if self._supervisor is not None:
            self._supervisor.stand_down()
        self.work.let_go()

    def enter_protected(self, section: Protect) -> None:
        """`protect` begins. A cause that is there already bounds it from the start."""
        if self._protected is None:
            self._protected = []
        self._protected.append(section)
        if self.life.cause is not None:
            section.bound(self._options.max_protect)

    def leave_protected(self, section: Protect) -> None:
        """`protect` ends, or is opened: what was held off is delivered at the next opportunity."""
        if self._protected is not None and section in self._protected:
            self._protected.remove(section)
        if self.life.stage is Stage.STOPPING and self._supervisor is not None:
            self._supervisor.interrupt()

    @property
    def has_looked(self) -> bool:
        """Whether somebody looked at the token and saw it canceled: the application knows, although nobody told it."""
        return self.life.stage is Stage.STOPPING and self._token is not None and self._token.seen

    # ------------------------------------------------------------------ ending

    async def _end(self, exc: BaseException | None) -> bool:
        """End the call. True if the caller may return, False if it has to raise ``exc`` again."""
        life, work = self.life, self.work
        if exc is not None and self._excuses(exc):
            logger.debug("%s: %s left the application after its last frame", self.who, type(exc).__name__)
            exc = None
        cancels = work.cancels_since()
        foreign = self._attribute(exc)
        interrupt = exc is not None or work.outer.cancelled_caught
        await self._join(interrupt=interrupt)
        self._stand_down()
        if self._knew(exc):
            life.learn()
        if life.parted_well if life.stage is Stage.TOLD else exc is None:
            await self._returned()
        await self._resolve_steps(exc, interrupt=interrupt or self._failure is not None)
        told = life.stage is Stage.TOLD
        failure = self._failure or (exc if not told and not foreign else None) or self._child_error(told)
        stopped = (told and not foreign) or self._failure is not None
        answer = self._last_words() if stopped and not life.left else []
        self._judge(raised=failure is not None)
        self._outcome = outcome = self._make_outcome(failure)
        _hooks.tell(self.hooks.call_finishing, self)
        await self._answer(answer)
        while not self._close_unless_pending():
            assert self._finalizers is not None
            records = await self._finalizers.run(
                outcome,
                timeout=self._options.finalizer_timeout,
                budget=self._options.finalizer_budget,
                who=self.who,
                observe=self._observe_finalizer,
            )
            self._outcome = outcome = replace(outcome, finalizers=records)
        if self._options.observers and len(self._here.calls) <= COUNT_TASKS_BELOW:
            self._outcome = outcome = replace(outcome, left_running=tasks_with(current, self))
        _hooks.tell(self.hooks.call_ended, self)
        self._close()
        swallow = told or self._failure is not None
        self._report(outcome, exc if swallow else None)
        if exc is not None and (foreign or not swallow or not may_swallow(exc)):
            return False
        if work.cancels_since() > cancels:  # endured while cleaning up, and given back
            raise asyncio.CancelledError
        return True

    async def _join(self, *, interrupt: bool) -> None:
        """Wait for the children, new ones included. They end at once if the handler raised or was told to stop."""
        joined = 0
        while self._children is not None and joined < len(self._children):
            child = self._children[joined]
            if interrupt or self.told_cause is not None:
                child.interrupt()
            await child.join()
            joined += 1

    def _child_error(self, told: bool) -> BaseException | None:
        if told:
            return None
        return next((child.error for child in self._children or () if child.error is not None), None)

    async def _resolve_steps(self, exc: BaseException | None, *, interrupt: bool) -> None:
        """End the steps and children left open, and find out what is ambiguous."""
        joined = -1
        while joined != len(self._children or ()):  # also those that a hook or a ``cancel=`` starts
            await self._join(interrupt=interrupt)
            joined = len(self._children or ())
            if self._steps is not None:
                for step in list(self._steps.open):
                    step.sweep()
                await self._steps.cancels_ended()
        if self._steps is not None:
            for step in list(self._steps.unresolved):
                step.settle()
            self.life.unresolved = self.life.unresolved or bool(self._steps.unresolved)
        if exc is not None and contains(exc, AmbiguousOutcome):
            self.life.unresolved = True

    def _stand_down(self) -> None:
        if self._supervisor is not None:
            self._supervisor.stand_down()
        if self._deadline is not None:
            self._deadline.cancel()

    def _attribute(self, exc: BaseException | None) -> bool:
        """Whether ``exc`` is a cancellation by somebody else; if so, enter it into the score."""
        self.learn_of_cancels()
        if exc is None or not isinstance(exc, anyio.get_cancelled_exc_class()):
            return False
        life = self.life
        if self.work.native and life.stage is Stage.TOLD and self.work.cancels_since() <= 0:
            return False
        if life.cause is None:
            self._was_stopped(self.cause_of_foreign())
        life.interrupt()
        return True

    def _was_stopped(self, cause: Cause) -> None:
        """The application ends because of ``cause``: too late to interrupt anything."""
        self.token._cancel(cause)
        self.life.stop(cause)
        self._stand_down()

    def learn_of_cancels(self) -> None:
        """The application ends. A cancellation by somebody else that it carries told it of the cause, if there is one.

        Not before: as long as it runs that may be a timeout of its own.
        """
        if self.life.cause is not None and self.work.cancels_since() > 0:
            self.life.tell()

    def cause_of_foreign(self) -> Cause:
        """What a cancellation by somebody else means, if it is the first cause."""
        if self.life.left:
            return Cause.CLIENT_DISCONNECT  # gunicorn after 3 s, daphne after 10
        return Cause.SERVER_SHUTDOWN if self._here.shutting_down else Cause.UNKNOWN

    def _knew(self, exc: BaseException | None) -> bool:
        """Whether the application knew of the cause in a way that shows only now."""
        if not self.work.native and (self.work.outer.cancelled_caught or follows_cancellation(exc)):
            self.life.interrupted = True
            return True
        return self.has_looked

    def _judge(self, *, raised: bool) -> None:
        self._ended = (self.life.judge(raised=raised), clock())

    def _make_outcome(self, error: BaseException | None = None) -> Outcome:
        life, steps = self.life, self._steps
        assert self._ended is not None
        state, ended = self._ended
        stopped_at = self.stopped_at
        assert life.phase is not None
        return Outcome(
            state=state,
            cause=life.cause,
            reason=life.reason,
            phase=life.phase,
            status_code=self._answered[0] if self._answered is not None else life.status,
            close_code=life.close_code,
            delivered=life.delivered,
            duration=ended - self.started,
            stop_latency=ended - stopped_at if stopped_at is not None else None,
            steps=tuple(step.record(self.started) for step in steps.done) if steps is not None else (),
            steps_omitted=steps.omitted if steps is not None else 0,
            error=error,
            unresponsive=self._supervisor is not None and self._supervisor.unresponsive,
            detection_suspended=self._reader is not None and self._reader.suspended,
        )

    def _excuses(self, exc: BaseException) -> bool:
        """Whether ``exc`` only says that the application sent more after its own last frame."""
        return False

    async def _returned(self) -> None:
        """The application has returned without having been told anything.

        If it owes the client an answer it has failed; but not in a shutdown, of which it may hear in its own way, as
        sse-starlette does, and give up.
        """
        if self._here.shutting_down and self.life.cause is None and not (self.life.finished or self.life.left):
            self._was_stopped(Cause.SERVER_SHUTDOWN)
            self.life.tell()

    def _last_words(self) -> list[Message]:
        """What a live client is sent whose call is stopped: a status, if nothing was sent yet; or else nothing."""
        if self._answered is not None or self._failure is not None:
            return []
        if not self._writer.started:
            self._answered = ANSWERS.get(self.life.cause)
            return response(*self._answered) if self._answered is not None else []
        if self.life.cause in _ENDING and self._writer.is_event_stream and not self.life.finished:
            return response(None, b"")  # it has no end of its own, so to cut it would say nothing, but in the log
        return []

    def _quiet_end(self) -> list[Message]:
        """What goes out for a client that has left. No server puts it on the wire; it lets those outside end well."""
        return response(None if self._writer.started else 499, b"")

    async def _answer(self, answer: list[Message]) -> None:
        """What goes out when the application has been stopped: a true status, a quiet end, or nothing."""
        timeout = self._options.finalizer_timeout
        if not answer and self.life.left:
            answer, timeout = self._quiet_end(), QUIET_TIMEOUT
        if answer:
            self._answering = self._answer_soon(answer, eager=True)
        if self._answering is not None and not await endure(self._answering, timeout):
            self._answering.cancel()

    def _answer_soon(self, messages: list[Message], *, eager: bool = False) -> Job:
        return spawn(self.send_quietly, messages, context=self._context.copy(), name="hangup: answer", eager=eager)

    async def send_quietly(self, messages: list[Message]) -> None:
        try:
            await self._writer.send_past_application(messages)
        except Exception as exc:
            logger.debug("%s: the server refused the end of the response: %r", self.who, exc)

    def _close_unless_pending(self) -> bool:
        """From now on a finalizer that is registered runs at once: unless one is waiting for its turn."""
        with _creating:
            self._closed = self._finalizers is None or not self._finalizers.pending
            return self._closed

    def _close(self) -> None:
        if self._shown is not None:
            if not self._writer.started:
                self.show_scope()
            show_rest(self._shown, self.scope)
            self._shown = None
        if self._supervisor is not None or self._deadline is not None:
            self._stand_down()
        self._writer.close()
        self._cohort.discard(self)
        if self._reader is not None:
            self._reader.close(self._farewell())
        if self._token is not None:
            self._token._finish()
        if self._steps is not None:
            self._steps.close()
        # What refers to this call is let go of. In a cycle it would have to wait for the garbage collector.
        self._children = self._supervisor = self._answering = self._deadline = None

    def _report(self, outcome: Outcome, swallowed: BaseException | None) -> None:
        for observe in self._options.observers:
            try:
                observe(outcome)
            except Exception:
                logger.exception("An observer raised: %r", observe)
        if swallowed is not None:
            logger.debug("%s: %s left the application after it was told to stop", self.who, type(swallowed).__name__)
        if outcome.state is not State.COMPLETED:
            in_flight = outcome.in_flight
            logger.info(
                "%s %s: %s %s, %.3f s%s",
                self.who,
                outcome.state,
                outcome.cause or (type(outcome.error).__name__ if outcome.error else "no cause"),
                outcome.phase,
                outcome.duration,
                f", in flight: {', '.join(map(printable, in_flight))}" if in_flight else "",
                extra=_hooks.tell(self.hooks.log_fields, self),
            )

    # ------------------------------------------------------------------ small things

    def _make_reader(self) -> Reader:
        self._reader = reader = self._reader_class(
            self._receive,
            self._options.read_ahead,
            self._on_disconnect,
            self._rejoin,
            self._context,
            self._here.turnstile,
        )
        if self.life.left or (self.life.finished and not self._writer.finishing):
            reader.latch_disconnect(self._farewell())
        return reader

    def _rejoin(self) -> None:
        self._cohort.discard(self)
        if self.life.stage is not Stage.ENDED:
            self._cohort = self._here.sweeper.join(self)

    def on_loop(self, fn: Callable[[], T]) -> T | None:
        """Call ``fn`` on the event loop of this call: now, or, in a thread, soon (and return None)."""
        if threading.get_ident() == self._here.thread:
            return fn()
        self._here.run_soon(fn)
        return None

    def _start_late(self, finalizer: Finalizer, outcome: Outcome) -> None:
        self._here.late.add(finalizer)
        spawn(self._run_late, finalizer, outcome, name="hangup: late finalizer")

    async def _run_late(self, finalizer: Finalizer, outcome: Outcome) -> None:
        timeout = min(finalizer.timeout or self._options.finalizer_timeout, self._options.finalizer_budget)
        try:
            await finalizer.run(outcome, timeout, self.who, self._observe_finalizer)
        finally:
            self._here.ended(finalizer)

    def _observe_finalizer(self, finalizer: Finalizer) -> _hooks.FinalizerMark | None:
        return _hooks.tell(self.hooks.finalizer_started, self, finalizer)

    def step_log(self) -> StepLog:
        """The steps of this call. Created at the first."""
        if self._steps is None:
            with _creating:
                if self._steps is None:
                    self._steps = StepLog()
        return self._steps

    @property
    def who(self) -> str:
        """The identity of the call in log lines: its method and path, quoted."""
        return f"{printable(self.scope.get('method') or self.scope['type'].upper())} {self.scope.get('path', '?')!r}"


_creating: Final = threading.RLock()
