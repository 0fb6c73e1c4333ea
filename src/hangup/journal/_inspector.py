"""The inspector: one page that shows what runs here, what ran lately, and stops it. No build, nothing from elsewhere.

The page holds no data. It follows a stream of events, and whatever comes is put in as text, never as markup; should a
browser be talked into something all the same, the policy below lets it run this one script and talk to this one host.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route, Router

from .._lifecycle import Phase
from .._runtime import clock
from ._records import CancelStatus
from ._web import (
    HEADERS,
    asked,
    changes,
    checked_authorize,
    event_stream,
    guarded,
    json_response,
    reason_of,
    refuse_forgery,
    scope_of,
    visible,
)

if TYPE_CHECKING:
    from .._call import Call
    from ._journal import Authorize, Journal

#: Seconds between looks.
LOOK_EVERY: Final = 0.5

#: How many runs, and how many calls, are shown.
SHOWN: Final = 50

_PAGE: Final = files(__package__).joinpath("inspector.html").read_text("utf-8")


def make_inspector(journal: Journal, authorize: Authorize) -> Router:
    """See `Journal.inspector`."""
    may = checked_authorize(authorize)

    async def page(request: Request) -> Response:
        await scope_of(may, request)
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; "
            "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        headers = {**HEADERS, "content-security-policy": policy, "referrer-policy": "no-referrer"}
        return HTMLResponse(_PAGE.replace("{{nonce}}", nonce), headers=headers)

    async def events(request: Request) -> Response:
        owner = await scope_of(may, request)
        own = request.scope["extensions"].get("hangup") if request.scope.get("extensions") else None

        async def look() -> dict[str, Any]:
            runs = (await journal.list(owner=owner, limit=SHOWN)).runs
            running = (await journal.list(owner=owner, state="running", limit=SHOWN)).runs
            records = {run.id: run for run in (*runs, *running)}
            calls = [_describe(call) for call in _shown(journal, own)] if owner is None else []
            return {
                "instance": journal.instance,
                "calls": calls,
                "runs": [_without(record.as_json()) for record in records.values()],
            }

        async def states() -> AsyncIterator[tuple[str, Any]]:
            yield "clock", {"now": time.time()}  # for ages: the browser's clock may be another
            async for state in changes(look, event="state", every=LOOK_EVERY):
                yield state

        return event_stream(states())

    async def cancel_run(request: Request) -> Response:
        refuse_forgery(request)
        owner = await scope_of(may, request)
        reason = await reason_of(request)
        id = request.path_params["id"]
        visible(await asked(journal.get(id)), owner)
        reply = await journal.cancel(id, reason or "canceled in the inspector")
        return json_response({"status": reply.status}, 404 if reply.status is CancelStatus.UNKNOWN else 200)

    async def cancel_call(request: Request) -> Response:
        refuse_forgery(request)
        if await scope_of(may, request) is not None:
            raise HTTPException(403)
        reason = await reason_of(request)
        for call in journal.calls_in_flight:
            if _key_of(call) == request.path_params["key"]:
                told = call.cancel(reason or "canceled in the inspector")
                return json_response({"status": CancelStatus.DELIVERED if told else CancelStatus.ENDED})
        raise HTTPException(404, "there is no such call in flight")

    return Router(
        [
            Route("/", guarded(page), methods=["GET"]),
            Route("/events", guarded(events), methods=["GET"]),
            Route("/runs/{id}/cancel", guarded(cancel_run), methods=["POST"]),
            Route("/calls/{key}/cancel", guarded(cancel_call), methods=["POST"]),
        ]
    )


def _shown(journal: Journal, own: object) -> list[Call]:
    """The oldest calls in flight, without the one that shows them."""
    calls = [call for call in journal.calls_in_flight if call is not own]
    return sorted(calls, key=lambda call: call.started)[:SHOWN]


def _key_of(call: Call) -> str:
    """What names a call while it is in flight: an id is used again by another object, but not at the same time."""
    return f"{id(call):x}-{int(call.started * 1e6):x}"


def _describe(call: Call) -> dict[str, Any]:
    phase = call.life.phase  # where it stood when the cause arrived, if one has
    if phase is None:
        phase = Phase.DURING_RESPONSE if call.life.status is not None else Phase.BEFORE_RESPONSE
        if call.life.finished:
            phase = Phase.AFTER_RESPONSE
    # When it started, not how long it has lasted: what has not changed is not sent again
    return {
        "key": _key_of(call),
        "who": f"{call.scope.get('method', 'WS')} {call.scope.get('path', '?')}",
        "state": str(call.outcome.state) if call.outcome is not None else "running",
        "cause": None if call.cause is None else str(call.cause),
        "phase": str(phase),
        "started": round(_EPOCH + call.started, 3),
        "steps": list(call.steps_in_flight),
    }


def _without(run: dict[str, Any]) -> dict[str, Any]:
    """What the page shows. Attributes and results may be large, or nobody's business."""
    keep = ("id", "name", "owner", "state", "cause", "phase", "reason", "opened_at", "closed_at", "instance")
    more = ("effects", "http_status", "error", "cancel_at", "cancel_seen_at")
    return {key: run[key] for key in (*keep, *more)}


#: The time of day when the monotonic clock was 0, as of when this module was loaded: good enough for ages.
_EPOCH: Final = time.time() - clock()
