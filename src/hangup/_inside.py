"""What stands inside the telemetry when the middleware is mounted around it.

Whatever makes the server span wraps ``send`` and sees what passes through it. From outside nothing can be shown to it:
a hang-up leaves it without a status, and what it sees instead is an exception. So a piece of the middleware stands on
its other side. It tells the telemetry what became of the call while that can still be written down, shows it the end
that the client has got or would have got, which goes no further than our own ``send``, and lets the cancellation go on
to the middleware, which ends the call as ever.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable
from copy import copy
from typing import Any, Final

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from . import _hooks
from ._answers import response
from ._call import QUIET_TIMEOUT, Call
from ._errors import contains, may_swallow
from ._lifecycle import Lifecycle, Stage
from ._steps import AmbiguousOutcome
from ._success import failure_response

logger: Final = logging.getLogger("hangup")

#: The middleware that makes server spans, contrib's and Starlette's own, by name: neither is to be imported.
_TELEMETRY: Final = frozenset(
    {
        ("opentelemetry.instrumentation.asgi", "OpenTelemetryMiddleware"),
        ("starlette.middleware.opentelemetry", "OpenTelemetryMiddleware"),
    }
)

#: What makes them by itself, or is made to: outside of every middleware that was added to it.
_TELLING: Final = frozenset({("fastapi.applications", "FastAPI")})

#: What does the work of `Inside`.
_STANDING: Final = frozenset({(__name__, "Inside"), ("hangup.middleware", "HangupMiddleware")})

#: How many wrappers of an application are looked at.
MAX_CHAIN: Final = 100

_moving: Final = threading.Lock()


class Inside:
    """The piece. `move_in` puts it there; a `hangup.HangupMiddleware` inside another does the same."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application; and if this is inside a call, and telemetry between, tell it how that ends."""
        await run_inside(self.app, scope, receive, send)


def run_inside(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
    """Run ``app``, perhaps in a call that began further out, and perhaps with telemetry between."""
    extensions = scope.get("extensions")
    call = extensions.get("hangup") if extensions else None
    if isinstance(call, Call):
        hook = call.hooks.call_inside
        # FastAPI may have metrics and no spans.
        if hook is None or _hooks.tell(hook, call) or scope.get("fastapi.telemetry") is not None:
            return _run(app, call, scope, receive, send)
    return app(scope, receive, send)


async def _run(app: ASGIApp, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
    life, writer = call.life, call._writer

    def send_inside(message: Message) -> Awaitable[None]:
        # What nobody is sent any more is not shown either: a 500, say, for the exception of a client that has left.
        return (writer.send if life.left or writer.over else send)(message)

    try:
        await app(scope, receive, send_inside)
    except BaseException as exc:
        if not await _leave(call, exc, send):
            raise
    else:
        if life.cause is not None or life.left or call._failure is not None or _ends_by_return(call):
            await _leave(call, None, send)


async def _leave(call: Call, exc: BaseException | None, send: Send) -> bool:
    """The application has ended. True if ``exc`` goes no further: an error that only follows from our own doing."""
    life, steps = call.life, call._steps
    excused = exc is not None and call._excuses(exc)
    if excused:
        logger.debug("%s: %s left the application after its last frame", call.who, type(exc).__name__)
        exc = None
    cancels = call.work.cancels_since()
    foreign = _is_foreign(call, exc)
    if not foreign:
        call.learn_of_cancels()
        if call._knew(exc):
            life.learn()
    told = life.stage is Stage.TOLD and not foreign
    stopped = told or call._failure is not None
    if (stopped or foreign) and steps is not None:
        await steps.cancels_ended()
    expected = _expect(call, exc, foreign=foreign)
    state = expected.judge(raised=call._failure is not None or (exc is not None and not told and not foreign))
    _hooks.tell(call.hooks.call_leaving, call, state, expected)
    words = _words(call, stopped)
    if words:
        try:
            with anyio.move_on_after(QUIET_TIMEOUT, shield=True):
                await call._writer.send_aside(send, words)
        except Exception as error:
            logger.debug("%s: what stands between refused the end of the response: %r", call.who, error)
    if call.work.cancels_since() > cancels:  # endured in here, and given back
        raise asyncio.CancelledError
    if not stopped or not isinstance(exc, Exception) or not may_swallow(exc):
        return excused
    life.unresolved = contains(exc, AmbiguousOutcome)
    logger.debug("%s: %s left the application after it was told to stop", call.who, type(exc).__name__)
    return True


def _ends_by_return(call: Call) -> bool:
    """Whether there is no other end to be seen: of a WebSocket. But `before_success` hooks have the last word."""
    return call.scope["type"] == "websocket" and call._writer._hooks is None


def _expect(call: Call, exc: BaseException | None, *, foreign: bool) -> Lifecycle:
    """What is known of the end, in a copy: whether a cancellation of somebody else gets any further is not known."""
    life = copy(call.life)
    if foreign:
        life.stop(call.cause_of_foreign())
        life.tell()
    elif exc is None and life.status == 101 and life.stage is not Stage.TOLD:  # the return from a WebSocket
        life.finish()
    life.unresolved = bool(
        call.effects_in_flight or call.unresolved or (exc is not None and contains(exc, AmbiguousOutcome))
    )
    return life


def _is_foreign(call: Call, exc: BaseException | None) -> bool:
    """Whether ``exc`` is a cancellation by somebody else. The scopes of the work are still open."""
    if exc is None or not isinstance(exc, anyio.get_cancelled_exc_class()):
        return False
    work = call.work
    if not work.native:
        return not work.outer.cancel_called
    return call.life.stage is not Stage.TOLD or work.cancels_since() > work.landed


def _words(call: Call, stopped: bool) -> list[Message]:
    """The end of the response as those between are to see it: what the client got, is about to get, or would have."""
    life = call.life
    if call.scope["type"] == "websocket":
        return []  # none that they look at
    if life.left:
        return call._quiet_end()
    if call._answered is not None:
        return response(*call._answered)
    if call._failure is not None:
        refusal = failure_response(call._failure, call.scope)
        return refusal if refusal[0]["status"] == life.status else []  # else the response had started, and was cut
    if not stopped:
        return []
    words = call._last_words()
    call._answered = None  # it is only shown: the client gets it when the call ends
    return words


# ---------------------------------------------------------------------- how it gets there


def move_in(app: Any) -> None:
    """Put an `Inside` on the other side of the telemetry that ``app`` begins with, if there is any. Idempotent.

    Followed is the chain of ``app`` attributes that middleware has, up to an application that has middleware of its
    own. One that has started already is left as it is.
    """
    with _moving:
        for _ in range(MAX_CHAIN):
            if app is None or _stands_inside(type(app)):
                return
            entries = getattr(app, "user_middleware", None)
            if isinstance(entries, list):
                _move_into(app, entries)
                return
            following = getattr(app, "app", None)
            if following is not None and _is_one_of(type(app), _TELEMETRY) and not _stands_inside(type(following)):
                app.app = Inside(following)
            app = following


def _move_into(app: Any, entries: list[Any]) -> None:
    """``entries`` are the middleware, outermost first, from which a Starlette application will build its stack."""
    if getattr(app, "middleware_stack", app) is not None:
        return
    place = max((n + 1 for n, entry in enumerate(entries) if _is_one_of(entry.cls, _TELEMETRY)), default=0)
    if any(_stands_inside(entry.cls) for entry in entries[place:]):
        return
    if place:
        entries.insert(place, type(entries[0])(Inside))
    elif _is_one_of(type(app), _TELLING):
        app.add_middleware(Inside)


def _stands_inside(cls: Any) -> bool:
    return _is_one_of(cls, _STANDING)


def _is_one_of(cls: Any, names: frozenset[tuple[str, str]]) -> bool:
    return any((base.__module__, base.__qualname__) in names for base in getattr(cls, "__mro__", ()))
