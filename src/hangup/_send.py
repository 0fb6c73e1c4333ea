"""The application's ``send``: what goes to the server, what counts, and what happens once the client has left.

Neither the server's raising nor its returning is believed. Over HTTP/1 no server raises for a client that has gone, and
on some a ``send`` never returns. So nothing is forwarded after the disconnect, and whoever is blocked in the server's
``send`` when it comes is released.
"""

from __future__ import annotations

import asyncio
import math
from asyncio import current_task
from collections.abc import Coroutine, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import anyio
from anyio.lowlevel import cancel_shielded_checkpoint, checkpoint
from starlette.types import Message, Send

from ._lifecycle import Stage
from ._runtime import Timer, call_later, clock
from ._success import Hook, failure_response, run_hooks

if TYPE_CHECKING:
    from ._call import Call

#: The messages that are a body, or a piece of it.
_BODIES: Final = frozenset({"http.response.body", "http.response.zerocopysend", "http.response.pathsend"})

#: How often ``send`` lets the event loop run: after so many seconds, which are looked at once in so many frames. A
#: generator that never awaits, on a server whose ``send`` does not suspend for a dead client, would otherwise keep the
#: loop from ever learning that the client has left.
YIELD_AFTER: Final = 0.001
LOOK_EVERY: Final = 64

#: Seconds that the server's ``send`` of the last frame may take once ``receive`` has said disconnect. Every server says
#: so on completion too, but not before the frame is written.
LAST_TIMEOUT: Final = 0.5

#: The messages by which a response begins. Others may come before: early hints, a push, what a test client asks for.
_STARTS: Final = frozenset(
    {"http.response.start", "websocket.accept", "websocket.close", "websocket.http.response.start"}
)


#: What no write to a client raises: a middleware outside does something else in its ``send``, saves a session, say.
_OF_NO_WRITE: Final = (ConnectionRefusedError, FileExistsError, FileNotFoundError, IsADirectoryError, PermissionError)


class ClientDisconnected(OSError):
    """What ``send()`` raises once the client has left, as ASGI 2.4 asks. Frameworks know what to do with it."""


class Writer:
    """What the application of one call sends. It refers to the call and is referred to: `close` parts them."""

    __slots__ = (
        "_call",
        "_committed",
        "_counts",
        "_giving_up",
        "_held",
        "_hooks",
        "_last_hook",
        "_late",
        "_life",
        "_missing",
        "_native",
        "_released",
        "_sender",
        "_senders",
        "_server_send",
        "_trailers",
        "_until_look",
        "_yielded",
        "closed",
        "committing",
        "cut",
        "finishing",
        "headers",
        "muted",
        "over",
        "send_timeout",
        "started",
    )

    def __init__(self, send: Send, call: Call) -> None:
        self._server_send = send
        self._call = call
        self._life = call.life
        self._native = call.work.native
        self._until_look = LOOK_EVERY
        self._yielded = call.started
        self._sender: Any = None
        self._senders: dict[Any, None] | None = None
        self._released: set[Any] | None = None
        self._trailers = False
        self._late = False
        self._giving_up: Timer | None = None
        self.started = False  #: something was handed to the server
        self.finishing = False  #: the last frame is on its way
        self.headers: Iterable[tuple[bytes, bytes]] = ()  #: of the response
        self.over = False  #: nothing more of the application's goes out
        self.closed = False
        self.muted = False  #: what comes through is only shown to what stands between
        self.cut = False  #: the response was ended from here
        #: Is there while `before_success` hooks are running: it is too late to leave.
        self.committing: anyio.Event | None = None
        self.send_timeout: float | None = None  #: seconds one ``send`` may take
        self._hooks: list[Hook] | None = None
        self._last_hook: Hook | None = None
        self._committed = False  #: they have succeeded
        self._held: list[Message] = []
        self._missing: float = math.inf  #: bytes until a client has all it waits for; infinite: the last frame says so
        self._counts = False  #: ... of all that is sent

    def close(self) -> None:
        """The call is over: whoever still sends is told so."""
        self.closed = self.over = True
        del self._call

    def cut_off(self) -> None:
        """The response is ended from here: nothing of the application's goes out any more."""
        self.cut = self.over = True

    @property
    def is_event_stream(self) -> bool:
        """Whether the response has no other end than that the connection closes (``text/event-stream``)."""
        return _is_event_stream(self.headers)

    def add_hook(self, hook: Hook, *, last: bool = False) -> None:
        """Have ``hook`` run before success becomes visible; if it is to be the ``last``, after all the others."""
        if self._life.finished or self._life.stage is Stage.ENDED or self.closed:
            raise RuntimeError(f"before_success({hook.name}): too late, the response is complete, or the call is over")
        if self._hooks is None:
            self._hooks = []
            if self.started and self._awaits(self._life.status or 0, self.headers) < math.inf:
                self._missing = 0  # what has been sent nobody counted: each piece may be the last
        if last:
            self._last_hook = hook
        else:
            self._hooks.append(hook)

    @property
    def status(self) -> int | None:
        """The status the application has chosen, also while its start is held back; None before."""
        return self._held[0]["status"] if self._held and self._life.status is None else self._life.status

    def send(self, message: Message) -> Coroutine[Any, Any, None]:
        """The ``send`` the application sees. Before a disconnect it hardly ever suspends by itself: see `YIELD_AFTER`.

        It returns the coroutine that does the work, and is none itself: a coroutine less for each frame.
        """
        if self._life.left or self.over:
            return self._send_late(message)
        if self._hooks is not None:
            return self._send_with_hooks(message)
        if self.send_timeout is not None:
            return self._send_in_time(message, self.send_timeout)
        return self._forward(message)

    async def _forward(self, message: Message) -> None:
        # Of a frame that others follow, most of them, there is nothing to note.
        final = False if message.get("more_body", False) else self._note(message)
        if not self.started:
            self._call.show_scope()
            self.started = message["type"] in _STARTS
        self._until_look -= 1
        if not self._until_look:
            self._until_look = LOOK_EVERY
            if clock() - self._yielded > YIELD_AFTER:
                await cancel_shielded_checkpoint()
                self._yielded = clock()
        if not self._native:
            await self._forward_in_scope(message, final)
            return
        task: asyncio.Task[object] = current_task()  # type: ignore[assignment]
        cancels = task.cancelling()
        alone = self._sender is None
        if alone:
            self._sender = task
        else:  # two tasks of the application send at once
            self._senders = {**(self._senders or {}), task: None}
        error: Exception | None = None
        refused = False
        try:
            try:
                await self._server_send(message)
            finally:
                if alone:
                    self._sender = None
                elif self._senders is not None:
                    self._senders.pop(task, None)
        except asyncio.CancelledError:
            if not self._was_released(task, cancels):
                raise
            refused = True
        except (OSError, RuntimeError) as exc:
            refused, error = True, exc
        finally:
            if final:
                self._finished()
        if refused:
            await self._refused(error, final)

    async def _send_in_time(self, message: Message, timeout: float) -> None:
        timer = call_later(timeout, self._call.send_timed_out)
        try:
            await self._forward(message)
        finally:
            timer.cancel()

    async def _send_with_hooks(self, message: Message) -> None:
        """Hold what shows success until the hooks have succeeded: a response in one piece, or the end of a stream."""
        if self._missing < math.inf and not self._life.finished:
            self._count(message)
        while self.committing is not None and (self._held or self._is_last(message)):
            await self.committing.wait()  # another task of the application has sent the last frame
        if self._life.left or self.over:
            await self._send_late(message)
            return
        if self._is_held(message):
            await self._hold(message)
            return
        if not self._completes(message):
            await self._send_held(message)
            return
        canceled = await self._commit(message)
        try:
            # What has been made a fact is shown, too. A client that leaves or does not read ends this all the same.
            with anyio.CancelScope(shield=True):
                await self._send_held(message)
        except BaseException:
            self._life.undeliver()
            self._finished()  # the last frame may not have had its turn
            raise
        if canceled:
            raise asyncio.CancelledError  # now that it can do no harm

    def _is_held(self, message: Message) -> bool:
        """Whether ``message`` may be all a client waits for, although others follow. Clients count."""
        kind = message["type"]
        if kind == "http.response.start":
            return not (self.started or self._held)
        if self._is_last(message) or self._life.finished or kind == "http.response.zerocopysend":
            return False
        if kind != "http.response.body":
            return bool(self._held)  # in its place
        return self._missing <= 0 or not message.get("more_body", False)  # before trailers

    def _count(self, message: Message) -> None:
        """A client counts ``message``. So do servers: they would refuse it when the hooks have made it a success."""
        missing = self._missing - _size(message)
        wrong = missing < 0 or (missing > 0 and self._is_last(message))
        if self._counts and wrong and math.isfinite(missing):
            raise RuntimeError(f"the body is {'longer' if missing < 0 else 'shorter'} than its content-length")
        self._missing = missing

    async def _hold(self, message: Message) -> None:
        """Keep ``message`` back until the hooks have succeeded, or until more follows than a client would wait for."""
        kind = message["type"]
        if kind == "http.response.start":
            headers = list(message.get("headers") or ())
            self._missing, self._counts = self._awaits(message["status"], headers), True
            self._trailers = bool(message.get("trailers", False))
            self._held.append({**message, "headers": headers})
            if self._missing == math.inf and _is_event_stream(headers):
                await self._send_held()  # more follows, but who knows when, and the client waits to hear it is open
            return
        if kind == "http.response.body":
            body = message.get("body", b"")
            if message.get("more_body", False) and (not body or self._missing == -math.inf):
                await cancel_shielded_checkpoint()  # a generator that never awaits must not keep the loop
                return  # nothing of it would be on the wire
            if body and self._held and self._held[-1]["type"] == kind:
                await self._send_held()  # that was not the last piece
            message = {**message, "body": bytes(body)}  # the application may use its buffer again
        self._held.append(message)

    def _awaits(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> float:
        """How many bytes of a body a client waits for: infinite if it waits for the last frame, or for no success."""
        if status >= 400:
            return math.inf
        if status in {204, 304} or self._call.scope.get("method") == "HEAD":
            return -math.inf
        lengths = (value for name, value in headers if name.lower() == b"content-length" and value.isdigit())
        return min(map(int, lengths), default=math.inf)

    async def _send_held(self, message: Message | None = None) -> None:
        """Send what was held back, and ``message``."""
        parts, self._held = self._held, []
        if message is not None:
            parts.append(message)
        for part in parts:
            if self._life.left or self.over:
                await self._send_late(part)
            elif self.send_timeout is not None:
                await self._send_in_time(part, self.send_timeout)
            else:
                await self._forward(part)

    def _completes(self, message: Message) -> bool:
        """Whether ``message`` makes the call a success that hooks come before: nobody has seen it complete yet."""
        return (
            self._hooks is not None
            and not self._life.finished
            and not self.cut
            and self._is_last(message)
            and self._shows_success(message)
        )

    def _shows_success(self, last: Message) -> bool:
        status = self.status
        return status is not None and status < 400

    async def _commit(self, message: Message | None) -> bool:
        """Run the hooks. Once they have succeeded so has the call: what comes while ``message`` is sent is too late.

        True if the server cancelled this task meanwhile, which they are kept from.
        """
        call = self._call
        self._learn()
        task = asyncio.current_task() if self._native else None
        cancels = task.cancelling() if task is not None else 0
        self.committing = anyio.Event()
        try:
            error = await run_hooks(self._due_hooks(), call)
        finally:
            self.committing.set()
            self.committing = None
        canceled = task is not None and task.cancelling() > cancels
        if error is not None and not self.cut:
            await self.refuse(error)
        if self.cut:  # by a hook, perhaps
            call.tell()
            if canceled:
                raise asyncio.CancelledError
            failure = error or call._failure
            assert failure is not None
            raise failure
        self._committed = True
        for part in (*self._held, message):
            if part is not None:
                self._note(part)
        return canceled

    def _due_hooks(self) -> Iterator[Hook]:
        """The hooks in their order, those that the others register included."""
        assert self._hooks is not None
        while not self.cut:
            if self._hooks:
                yield self._hooks.pop(0)
            elif self._last_hook is not None:
                last, self._last_hook = self._last_hook, None
                yield last
            else:
                return

    async def refuse(self, error: BaseException) -> None:
        """Answer ``error`` in the application's stead, or cut what has started. Nothing else goes out any more."""
        self.cut_off()
        self._call.fail(error)
        self._held.clear()
        if self.started:
            self.release()
            return
        response = failure_response(error, self._call.scope)
        self._life.answer(response[0]["status"])
        if not self._life.left:
            with anyio.move_on_after(self._call.hook_timeout, shield=True) as scope:  # the failure is shown, too
                self._senders = {**(self._senders or {}), scope: None}
                self.finishing = True
                try:
                    await self._call.send_quietly(response)
                finally:
                    self.finishing = False
                    self._senders.pop(scope, None)

    async def send_past_application(self, messages: list[Message]) -> None:
        """Send ``messages`` of our own. Raises what the server raises."""
        if not self.started:
            self._call.show_scope()
        for message in messages:
            self.started = True
            await self._server_send(message)

    async def send_aside(self, send: Send, messages: list[Message]) -> None:
        """Show ``messages`` to what stands between the application and here, through its ``send``. They go no further.

        Once the application is done.
        """
        over, self.over, self.muted = self.over, True, True
        try:
            for message in messages:
                await send(message)
        finally:
            self.over, self.muted = over, False

    def release(self) -> bool:
        """Let go whoever is blocked in the server's ``send``. True if the host task is among them."""
        host_is_here = False
        for sender in (self._sender, *(self._senders or ())):
            if sender is None:
                continue
            if self._native:
                host_is_here = host_is_here or sender is self._call.work.host
                if self._released is None:
                    self._released = set()
                elif sender in self._released:
                    continue
                self._released.add(sender)
            else:
                host_is_here = True
            sender.cancel()
        return host_is_here

    def give_up_soon(self) -> None:
        """The server says disconnect while the last frame is on its way: let its ``send`` go if it does not return."""

        def give_up() -> None:
            if self.finishing and not self.closed:
                self.release()
                self.give_up_soon()  # once more, should that have been a start that was held back

        self._giving_up = call_later(LAST_TIMEOUT, give_up)

    async def _forward_in_scope(self, message: Message, final: bool) -> None:
        """`_forward` on trio, where a task is not cancelled, a scope is."""
        scope = anyio.CancelScope()
        senders = self._senders = self._senders or {}
        senders[scope] = None
        error: Exception | None = None
        try:
            with scope:
                await self._server_send(message)
        except (OSError, RuntimeError) as exc:
            error = exc
        finally:
            senders.pop(scope, None)
            if final:
                self._finished()
        if error is not None or scope.cancelled_caught:
            await self._refused(error, final)

    async def _send_late(self, message: Message) -> None:
        """A message for a client that has left, or after the end. Nothing of it is forwarded."""
        if self.muted:
            return
        if self.closed:
            raise ClientDisconnected("the call has ended")
        if self.committing is not None:
            if not self._is_last(message):
                return  # of a hook, perhaps
            await self.committing.wait()
        life, call = self._life, self._call
        policy = call.policy.disconnect
        if call.has_looked:
            if policy == "cancel" and self._let_back():
                call.know()
                return
            call.tell()
        for part in self._held:  # what was chosen counts, although nobody is going to see it
            self._note(part)
        self._held.clear()
        finishes = policy == "finish" and life.left and life.stage is not Stage.TOLD
        if finishes or life.stage is Stage.STOPPING:
            # It does not know yet, so what it has done counts: a `def` handler that ran on in its thread, work that
            # ended just now. No suspension but for hooks, which nothing interrupts, or the interruption lands in the
            # middle of an answer that is there.
            canceled = self._completes(message) and await self._commit(message)
            final = self._note(message)
            if final:
                self._finished()
            if canceled:
                raise asyncio.CancelledError
            if finishes:
                await checkpoint()
            starts = message["type"].endswith("http.response.start")
            if finishes or final or starts or (policy == "cancel" and self._let_back()):
                return
            call.tell()
        elif life.finished or (self.cut and not call.work.landed and self._let_back()):
            return
        call.refused()
        await cancel_shielded_checkpoint()
        raise ClientDisconnected("the response was cut" if self.cut else "the client has disconnected")

    def _let_back(self) -> bool:
        """Whether this late frame is the first, and is let pass as if sent, because an interruption is under way.

        It should find the application in its own code, where its cleanup is, and not here: the generator behind a
        stream is suspended at its ``yield`` then, and would be left to the garbage collector.
        """
        first, self._late = not self._late, True
        return first

    def _is_last(self, message: Message) -> bool:
        kind = message["type"]
        if kind == "http.response.trailers":
            return not message.get("more_trailers", False)
        if kind == "http.response.zerocopysend" and self._missing <= 0:
            return True  # it cannot be held, its file will not stay open; what comes behind it nobody waits for
        # A `pathsend` has nothing that says of more.
        return kind in _BODIES and not message.get("more_body", False) and not self._trailers

    def _note(self, message: Message) -> bool:
        """Enter a message of the application into the score. True if it is the last."""
        kind = message["type"]
        if self._life.stage is Stage.STOPPING:
            self._learn()
        if kind == "http.response.start":
            self._life.start(message["status"])
            self.headers = message.get("headers", ())
            if "trailers" in message:
                self._trailers = bool(message["trailers"])
            return False
        if not self._is_last(message):
            return False
        life = self._life
        if not life.finished:
            life.finish()
            self.finishing = True
            if self._call.trace is not None:
                self._call.response_ending()
            if life.cause is not None and life.stage is Stage.COMPLETE:
                self._call.let_go()
        return True

    def _learn(self) -> None:
        """An application that looked at its canceled token knew, and what it does from then on does not count."""
        if not (self.closed or self._committed) and self._call.has_looked:
            self._call.know()

    async def _refused(self, exc: Exception | None, final: bool) -> None:
        """The server's ``send`` failed, or was released because the client has left or the response was cut."""
        if exc is not None and not final:
            await self._call.inquire()
        if exc is not None and not (self._life.left or _is_of_client(exc)):
            raise exc  # the application broke the protocol, or a middleware outside failed
        if final:
            # The work is done and the application does not know: it goes on, as it would had the client left later.
            self._life.undeliver()
            return
        if self._life.finished:
            return  # the start that hooks had held back: the last frame is right behind it
        call = self._call
        if exc is not None:
            call.client_left()
        if call.policy.disconnect == "finish" and not self.cut:
            return
        interrupted = self._native and call.work.landed  # it hears by an error then, and keeps its grace
        stopped = call.cause is not None and (call.policy.disconnect == "cancel" or self.cut)
        if stopped and not interrupted and self._let_back():
            call.interrupt_soon()
            return
        call.tell()
        raise exc or ClientDisconnected("the response was cut" if self.cut else "the client has disconnected")

    def _was_released(self, task: asyncio.Task[object], cancels: int) -> bool:
        """Whether the cancellation that just left the server's ``send`` was `release`, and nothing else too.

        ``cancels``: how many the task carried when it went in. The server's own may have been on its way already.
        """
        if self._released is None or task not in self._released:
            return False
        self._released.discard(task)
        return task.uncancel() <= cancels

    def _finished(self) -> None:
        self.finishing = False
        if self._giving_up is not None:
            self._giving_up.cancel()
        self._call.last_frame_sent()


def _is_event_stream(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(
        name.lower() == b"content-type" and value.lower().startswith(b"text/event-stream") for name, value in headers
    )


def _size(message: Message) -> float:
    """How many bytes of a body ``message`` is. Of a file that is sent to its end nobody knows: it may be all."""
    if message["type"] in {"http.response.zerocopysend", "http.response.pathsend"}:
        count = message.get("count")
        return math.inf if count is None else count
    return len(message.get("body", b""))


def _is_of_client(exc: Exception) -> bool:
    """Whether it is what a server's ``send`` may raise for a client that has gone."""
    if isinstance(exc, TimeoutError):
        return exc.errno is not None  # the socket's; one without is of some other wait
    if isinstance(exc, OSError):
        return not isinstance(exc, _OF_NO_WRITE)
    return "the handler is closed" in str(exc)  # uvloop: what uvicorn lets out behind a pipelined request
