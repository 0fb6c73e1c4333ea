"""What the field cases share: one application, mounted or not, and what is seen of it.

A case is a function that plays a scenario on a `Site` and returns what it saw. It is played three ways at most: with
hangup, where what was seen has to be `right`; and in the same way *without* it, where at least the parts named in
`wrong` have to come out wrong: that is the proof that the case can fail. "Without" is bare, under nothing but a
middleware that records what it can see; or, where the report is about the popular cure, under that cure.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import anyio
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hangup import HangupMiddleware, Outcome, add_finalizer

from ..real import Serving, serving, wait_for

Mount = Literal["hangup", "bare", "recipe"]

#: Seconds in which something has to happen, with hangup, on a loaded machine.
SOON = 10.0

#: Seconds after which something that has not happened without hangup is taken not to happen. The reports ask for 0.1.
LATE = 0.5


class Site:
    """An application in one of the mounts, and what became of its requests."""

    def __init__(self, mount: Mount) -> None:
        self.mount = mount
        self.hangup = mount == "hangup"
        self.outcomes: list[Outcome] = []
        self.states: list[str] = []  #: what is known of each request: with hangup the state and its cause
        self.errors: list[str] = []  #: lines of ERROR, of anybody
        self.warnings: list[str] = []  #: and of WARNING, of ours
        self.events: list[str] = []
        self._late = False
        self._held: list[Callable[[], object]] = []
        self.released = threading.Event()

    # ------------------------------------------------------------------ the application's side

    def mounted(self, app: ASGIApp, **options: Any) -> ASGIApp:
        if self.hangup:
            return HangupMiddleware(app, observers=[self._observe], **options)
        return self._recording(_watching(app) if self.mount == "recipe" else app)

    def _observe(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.states.append(f"{outcome.state} {outcome.cause or ''}".strip())

    def _recording(self, app: ASGIApp) -> ASGIApp:
        """All that a middleware can say who only sees how the application ends."""

        async def record(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                await app(scope, receive, send)
                return
            try:
                await app(scope, receive, send)
            except Exception:
                self.states.append("failed")
                raise
            except asyncio.CancelledError:
                self.states.append("canceled")
                raise
            else:
                self.states.append("completed")

        return record

    def note(self, event: str) -> None:
        self.events.append(event)

    async def work(self) -> None:
        """Work for as long as the test wants."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        self._held.append(lambda: loop.call_soon_threadsafe(ended.set))
        self.note("working")
        try:
            await ended.wait()
        except asyncio.CancelledError:
            self.note("interrupted")
            raise
        self.note("worked to its end")

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Note whether what happens inside is interrupted."""
        try:
            yield
        except asyncio.CancelledError:
            self.note("interrupted")
            raise

    def finally_(self, fn: Callable[[], Any]) -> None:
        """Have ``fn`` run at the end, where somebody offers that."""
        if self.hangup:
            add_finalizer(fn)

    # ------------------------------------------------------------------ the test's side

    @contextlib.contextmanager
    def serving(self, app: ASGIApp, *, options: Mapping[str, Any] | None = None, **config: Any) -> Iterator[Serving]:
        """``app`` on a real uvicorn."""
        config = {"timeout_graceful_shutdown": 1, **config}
        with serving(self.mounted(app, **(options or {})), **config) as server:
            try:
                yield server
            finally:
                self.release()

    def release(self) -> None:
        """All work ends now."""
        self.released.set()
        for end in self._held:
            with contextlib.suppress(RuntimeError):  # that loop has ended
                end()

    def happens(self, condition: Callable[[], object]) -> bool:
        """Whether ``condition()`` comes true soon."""
        try:
            wait_for(condition, timeout=SOON if self.hangup else LATE if not self._late else 0.05)
        except TimeoutError:
            self._late = True  # what else does not happen, has not happened by now
            return False
        return True

    def has(self, event: str) -> bool:
        """Whether ``event`` is noted, soon."""
        return self.happens(lambda: event in self.events)

    @property
    def state(self) -> str:
        """What became of the first request; waits for it, releasing all work if need be."""
        if not self.happens(lambda: self.states):
            self.release()
            wait_for(lambda: self.states)
        return self.states[0]

    @contextlib.contextmanager
    def reading_the_log(self) -> Iterator[None]:
        site = self

        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                if record.levelno >= logging.ERROR:
                    site.errors.append(f"{record.name}: {record.getMessage()}")
                elif record.levelno == logging.WARNING and record.name == "hangup":
                    site.warnings.append(record.getMessage())

        handler = Handler()
        logging.getLogger().addHandler(handler)
        try:
            yield
        finally:
            logging.getLogger().removeHandler(handler)


def _watching(app: ASGIApp) -> ASGIApp:
    """The popular cure: a second task reads ``receive`` from the start, and cancels the work at a disconnect."""

    async def watch(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        queue: asyncio.Queue[Message] = asyncio.Queue()

        async def read(tasks: anyio.abc.TaskGroup) -> None:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    tasks.cancel_scope.cancel()
                    return
                await queue.put(message)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read, tasks)
            await app(scope, queue.get, send)
            tasks.cancel_scope.cancel()

    return watch


Case = Callable[[Site], dict[str, Any]]


def case(
    *reports: str, right: dict[str, Any], wrong: set[str], against: Mount = "bare"
) -> Callable[[Case], Callable[..., None]]:
    """Make a test of a case: see the top. ``reports`` are the numbers of the reports it is made from."""

    def decorate(play: Case) -> Callable[..., None]:
        unmounted = pytest.param(against, id=against, marks=pytest.mark.filterwarnings("ignore"))

        @pytest.mark.parametrize("mount", ["hangup", unmounted])
        def test(mount: Mount) -> None:
            site = Site(mount)
            with site.reading_the_log():
                seen = play(site)
            assert seen.keys() == right.keys()
            came_out_wrong = {key: (seen[key], right[key]) for key in right if seen[key] != right[key]}
            if site.hangup:
                assert not came_out_wrong, f"seen, and right: {came_out_wrong}; errors: {site.errors}"
            else:
                assert came_out_wrong.keys() >= wrong, f"{seen}: it holds without hangup, so it proves nothing"

        test.__name__ = test.__qualname__ = play.__name__
        test.__doc__ = f"{', '.join(reports)}. {play.__doc__ or ''}"
        test.__module__ = play.__module__
        return test

    return decorate
