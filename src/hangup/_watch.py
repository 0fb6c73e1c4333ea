"""Seeing the client: the one reader of the server's ``receive()``, and the sweeper that starts it when it is needed.

What servers do with ``receive()`` differs in every corner, so only one call is ever pending, and the application is
served from here:

* Two readers at once: uvicorn hands the second a bogus message, hypercorn and gunicorn let it hang.
* A pending read cancelled after the body is complete makes gunicorn answer the next one with a false disconnect. So
  such a read belongs to the watcher, and an application that gives up waiting gives up only its own wait.
* hypercorn and daphne deliver the disconnect once. It is latched here and answered again for ever.
* A message that is at hand is handed over without suspending: Starlette's ``is_disconnected()`` looks from inside an
  already cancelled scope. A *body* message is not spent on such a look.

Nothing is started for short requests. The sweeper, one timer per event loop, finds the calls that have outlived
`watch_after` and starts a watcher for each whose application is not reading itself.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import Any, ClassVar, Final, Protocol

import anyio
from anyio.lowlevel import checkpoint
from starlette.types import Message, Receive

from ._runtime import Job, call_later, spawn

DISCONNECT: Final = "http.disconnect"

#: What a message that waits to be read costs beside what is in it, in bytes: tiny ones must not fill the memory.
OVERHEAD: Final = 64


class Reader:
    """Reads the server's messages for one call, ahead of the application by at most ``limit`` bytes.

    ``on_disconnect(message)`` is called, on the event loop, when the server reports a disconnect, before anybody else
    learns of it; it latches the message when the application may know. ``on_idle()`` is called when the application
    has taken a message, or gives up its read, and nobody reads any more, once the call has outlived `watch_after`.
    """

    #: The message that says the client has left.
    disconnect: ClassVar[str] = DISCONNECT

    __slots__ = (
        "_arrival",
        "_buffer",
        "_buffered",
        "_closed",
        "_context",
        "_error",
        "_limit",
        "_on_disconnect",
        "_on_idle",
        "_reading",
        "_receive",
        "_turnstile",
        "_watcher",
        "body_complete",
        "held",
        "latch",
        "listening",
        "suspended",
        "watch_wanted",
    )

    def __init__(
        self,
        receive: Receive,
        limit: int,
        on_disconnect: Callable[[Message], object],
        on_idle: Callable[[], object],
        context: Context,
        turnstile: Turnstile,
    ) -> None:
        self._receive = receive
        self._turnstile = turnstile
        self._limit = limit
        self._on_disconnect = on_disconnect
        self._on_idle = on_idle
        self._context = context
        self._error: Exception | None = None
        self._buffer: deque[Message] = deque()
        self._buffered = 0
        self._arrival: anyio.Event | None = None
        self._reading = False
        self._watcher: Job | None = None
        self._closed = False
        self.body_complete = False
        self.latch: Message | None = None
        self.held: Message | None = None  #: the disconnect, while the application is not to know of it
        self.listening = 0  #: how many tasks of the application wait for a message
        self.suspended = False  #: at some time the read-ahead stopped, at its limit or because nothing new came
        self.watch_wanted = False  #: the call has outlived `watch_after`

    async def receive(self) -> Message:
        """The ``receive`` the application sees."""
        while True:
            if self._buffer or not self.body_complete:
                if anyio.current_effective_deadline() == -math.inf:
                    # A look from a cancelled scope. It may learn of the disconnect, but not take the body with it.
                    if self.latch is not None:
                        return dict(self.latch)
                    await checkpoint()
                if self._buffer:
                    return self._take()
            if self.latch is not None:
                return dict(self.latch)
            if self._error is not None:
                raise self._error
            if not self._reading:
                if not self.body_complete:
                    break
                self.watch()
            if self.latch is None and not self._buffer and self._error is None:
                await self._wait()
        self._reading = True
        self.listening += 1
        try:
            message = await self._receive()
            self._note(message)
        finally:
            self.listening -= 1
            self._reading = False
            self._wake()
            self._idle()  # also if it gives up
        return message

    def watch(self) -> None:
        """Start the watcher, unless somebody reads already, the client has left, or the buffer is full."""
        self.watch_wanted = True
        if self._reading or self._closed or self._error is not None or (self.latch or self.held) is not None:
            return
        if self._buffered >= self._limit:
            self.suspended = True
            return
        self._reading = True
        self._watcher = spawn(self._watch, context=self._context.copy(), name="hangup: watcher")

    async def look(self, timeout: float) -> None:
        """Read ahead, for at most ``timeout`` seconds, until it is known that the client has left."""
        with anyio.move_on_after(timeout):
            while self.latch is None and self._error is None:
                self.watch()
                if not self._reading:
                    return
                if self._arrival is None:
                    self._arrival = anyio.Event()
                await self._arrival.wait()

    @property
    def in_body(self) -> bool:
        """Whether the end of the request's body has not come yet."""
        return not self.body_complete

    def latch_disconnect(self, message: Message) -> None:
        """The client has left, or the call is complete: answer ``message`` from now on. The first one stays."""
        if self.latch is None:
            self.latch = message
            self._wake()

    def hold_disconnect(self, message: Message) -> None:
        """The client has left, and the application is to go on as if it had not, until `show_disconnect`."""
        self.held = message

    def show_disconnect(self) -> None:
        """Latch what was held."""
        if self.held is not None:
            self.latch_disconnect(self.held)

    def close(self, message: Message) -> None:
        """The call is over. The watcher is cancelled, not waited for; who still waits is answered ``message``.

        What refers to the call is let go: the two would be work for the garbage collector.
        """
        self._closed = True
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None
        self.latch_disconnect(message)
        self._on_disconnect = self._on_idle = _nobody
        del self._context

    async def _wait(self) -> None:
        if self._arrival is None:
            self._arrival = anyio.Event()
        self.listening += 1
        try:
            await self._arrival.wait()
        except BaseException:
            self._idle()  # it gave up, perhaps just as the watcher left the next read to it
            raise
        finally:
            self.listening -= 1

    async def _watch(self) -> None:
        hears = False
        try:
            while not self._closed:
                message = await self._receive()
                listening = self.listening
                if message["type"] == self.disconnect:
                    hears = True
                    self._turnstile.enter(functools.partial(self._context.copy().run, self._hear, message))
                    return
                ended = self.body_complete
                self._buffer.append(message)
                self._buffered += self._size(message)
                self._note(message)
                self._wake()
                if ended:
                    # No server says that. It is a middleware that gives a body back which it has read, or a `receive`
                    # made for a test: such know of no disconnect, and answer for ever without a pause.
                    self.suspended = True
                    return
                if not self.body_complete:
                    if listening:
                        return  # it reads for itself again
                    if self._buffered >= self._limit:
                        self.suspended = True
                        return
        except Exception as exc:
            self._break(exc)
        finally:
            if not hears:
                self._reading = False

    def _hear(self, message: Message) -> None:
        """The disconnect, when it is its turn. Until then somebody reads."""
        self._reading = False
        try:
            self._note(message)
        except Exception as exc:
            self._break(exc)

    def _break(self, error: Exception) -> None:
        """It came from a middleware outside, say one that bounds the size of a body. The application is to see it."""
        self._error = error
        self._wake()

    def _note(self, message: Message) -> None:
        if message["type"] == self.disconnect:
            self._on_disconnect(message)
        elif not message.get("more_body", False):
            self.body_complete = True

    def _size(self, message: Message) -> int:
        return len(message.get("body", b"")) + OVERHEAD

    def _take(self) -> Message:
        message = self._buffer.popleft()
        self._buffered -= self._size(message)
        self._idle()
        return message

    def _idle(self) -> None:
        if self.watch_wanted and not self._reading:
            self._on_idle()

    def _wake(self) -> None:
        if self._arrival is not None:
            self._arrival.set()
            self._arrival = None


def _nobody(*_: object) -> None:
    """Who is told once the call is over."""


class Turnstile:
    """Lets so many pass in one turn of the event loop; the others wait, in their order.

    When thousands of clients leave at once, what follows for each would otherwise all happen in the same turn, and the
    loop would do nothing else for as long. One client that leaves passes without a pause.
    """

    __slots__ = ("_armed", "_left", "_limit", "_waiting")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._left = limit
        self._armed = False
        self._waiting: deque[Callable[[], object]] = deque()

    def enter(self, fn: Callable[[], object]) -> None:
        """Call ``fn`` when it is its turn: at once, but in a crowd. It must not raise."""
        if not self._armed:
            self._armed = True
            call_later(0, self._turn)
        if self._left and not self._waiting:
            self._left -= 1
            fn()
        else:
            self._waiting.append(fn)

    def _turn(self) -> None:
        if not self._waiting and self._left == self._limit:
            self._armed = False
            return
        call_later(0, self._turn)
        self._left = self._limit
        while self._waiting and self._left:
            self._left -= 1
            self._waiting.popleft()()


class Watched(Protocol):
    """What the sweeper knows of a call."""

    def watch(self) -> object: ...


class Sweeper:
    """Calls `Watched.watch` of everything that has been in its hands for ``after`` to ``2 * after`` seconds.

    One per event loop. Joining and leaving cost a set operation each; the timer runs only while somebody is in hand.
    """

    __slots__ = ("_after", "_armed", "_older", "_young")

    def __init__(self, after: float) -> None:
        self._after = after
        self._armed = False
        self._young: set[Any] = set()
        self._older: set[Any] = set()

    def join(self, watched: Watched) -> set[Any]:
        """Take ``watched`` in hand. To leave early, discard it from the set that is returned."""
        if not self._armed:
            self._armed = True
            call_later(self._after, self._sweep)
        self._young.add(watched)
        return self._young

    def _sweep(self) -> None:
        due, self._older, self._young = self._older, self._young, set()
        if self._older:
            call_later(self._after, self._sweep)
        else:
            self._armed = False
        for watched in due:
            watched.watch()
