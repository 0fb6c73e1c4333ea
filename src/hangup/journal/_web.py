"""What the routes and the inspector share: who may do what, requests that are not what they seem, streams of events."""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from .._options import takes
from ._errors import JournalError
from ._records import RunRecord, checked_owner

if TYPE_CHECKING:
    from ._journal import Authorize

#: Bytes that the body of a request may have: a reason, and no more.
BODY_LIMIT: Final = 8192

#: Seconds of silence after which a comment goes out, so that a client that has left is noticed.
KEEP_ALIVE: Final = 15.0

#: No answer here may be kept, guessed at, or framed by another site.
HEADERS: Final = {"cache-control": "no-store", "x-content-type-options": "nosniff", "x-frame-options": "DENY"}

Endpoint = Callable[[Request], Awaitable[Response]]


def checked_authorize(authorize: object) -> Authorize:
    """A function that says who may do what."""
    if not callable(authorize) or not takes(authorize, 1):
        raise TypeError(f"authorize takes a function of the request, not {authorize!r}")
    return cast("Authorize", authorize)


async def scope_of(authorize: Authorize, request: Request) -> str | None:
    """The owner whose runs the request is about; None for those of all.

    :raises HTTPException: 403 for a request that may see nothing.
    """
    answer: Any = authorize(request)
    if inspect.isawaitable(answer):
        answer = await answer
    if answer is True:
        return None
    if isinstance(answer, str) and answer:
        return checked_owner(answer)  # an error of the application's if it is none, and not of the client's
    if answer is False or answer is None:
        raise HTTPException(403)
    raise TypeError(f"authorize() returns True, an owner, False or None, not {answer!r}")


def refuse_forgery(request: Request) -> None:
    """Refuse a request that changes something if another site may have made the browser send it.

    Browsers say where a request comes from (``Sec-Fetch-Site``, or ``Origin`` in old ones), and no page can change
    that. JSON is required beside: a form cannot send it, and a script of another site not without being asked first.

    :raises HTTPException: 403, or 415 for another type.
    """
    site = request.headers.get("sec-fetch-site")
    origin = request.headers.get("origin")
    if site is not None:
        if site not in {"same-origin", "none"}:
            raise HTTPException(403, "cross-site request")
    elif origin is not None and _host_of(origin) != request.headers.get("host"):
        raise HTTPException(403, "cross-site request")
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "send application/json")


def _host_of(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


async def reason_of(request: Request) -> str | None:
    """The ``reason`` in the body, if any.

    :raises HTTPException: 400 for another body, 413 for one that is too long.
    """
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > BODY_LIMIT:
            raise HTTPException(413)
    try:
        asked = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        raise HTTPException(400, "the body is not JSON") from None
    if not isinstance(asked, dict) or not isinstance(asked.get("reason"), (str, type(None))):
        raise HTTPException(400, 'the body is {"reason": a text}, or {}')
    return asked.get("reason")


def guarded(endpoint: Endpoint) -> Endpoint:
    """``endpoint`` with its errors as JSON: what is wrong with the request, and 503 while the database is away."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except HTTPException as exc:
            return json_response({"detail": exc.detail}, exc.status_code, headers=dict(exc.headers or {}))
        except (ValueError, TypeError) as exc:
            if not isinstance(exc, _BadRequest):
                raise
            return json_response({"detail": str(exc)}, 400)
        except JournalError:
            return json_response({"detail": "the journal is away"}, 503, headers={"retry-after": "1"})

    return answer


class _BadRequest(ValueError):
    """What a client asked for is malformed."""


async def asked(work: Awaitable[Any]) -> Any:
    """``work`` with arguments from the request: a ValueError of it is the fault of the client."""
    try:
        return await work
    except ValueError as exc:
        raise _BadRequest(str(exc)) from exc


def json_response(content: Any, status: int = 200, *, headers: dict[str, str] | None = None) -> Response:
    """JSON that is not to be kept. Escaped: JSON can hold, and rows do, what UTF-8 cannot."""
    text = json.dumps(content, separators=(",", ":"))
    return Response(text, status, headers={**HEADERS, **(headers or {})}, media_type="application/json")


def visible(record: RunRecord | None, owner: str | None) -> RunRecord:
    """``record``, if there is one and it is ``owner``'s. Another's looks as if it did not exist.

    :raises HTTPException: 404.
    """
    if record is None or (owner is not None and record.owner != owner):
        raise HTTPException(404, "there is no such run")
    return record


def event_stream(states: AsyncIterator[tuple[str, Any]]) -> StreamingResponse:
    """Server-sent events: the ``(event, data)`` of ``states``, and a comment when nothing has come for a while."""
    headers = {**HEADERS, "x-accel-buffering": "no"}
    return StreamingResponse(_encode(states), media_type="text/event-stream", headers=headers)


async def _encode(states: AsyncIterator[tuple[str, Any]]) -> AsyncIterator[str]:
    yield "retry: 1000\n\n"
    async for event, data in states:
        # JSON has no line break of its own: one line is one event
        yield f"event: {event}\ndata: {json.dumps(data)}\n\n" if event else ": still there\n\n"


async def changes(
    look: Callable[[], Awaitable[Any]], *, event: str, every: float, ended: Callable[[Any], bool] = lambda _: False
) -> AsyncIterator[tuple[str, Any]]:
    """What ``look()`` gives whenever it is another than before, until it has ``ended``. Looks ``every`` seconds."""
    before: Any = None
    spoke = time.monotonic()
    while True:
        try:
            now = await look()
        except JournalError:
            now = before  # the database is away: say nothing, and look again
        if now != before:
            before, spoke = now, time.monotonic()
            yield event, now
            if ended(now):
                return
        elif time.monotonic() - spoke > KEEP_ALIVE:
            spoke = time.monotonic()
            yield "", None
        await asyncio.sleep(every)
