"""The routes: reading and canceling runs over HTTP. Off unless mounted, and never without ``authorize``."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from ._records import CancelStatus
from ._web import (
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
    from ._journal import Authorize, Journal

#: Seconds between looks at a run that somebody follows.
LOOK_EVERY: Final = 0.25

_ANSWERS: Final = {CancelStatus.DELIVERED: 200, CancelStatus.ENDED: 200, CancelStatus.PENDING: 202}


def make_router(journal: Journal, authorize: Authorize) -> Router:
    """See `Journal.router`."""
    may = checked_authorize(authorize)

    async def list_runs(request: Request) -> Response:
        owner = await scope_of(may, request)
        page = await asked(_list(journal, request, owner))
        return json_response({"runs": [run.as_json() for run in page.runs], "next": page.next})

    async def get_run(request: Request) -> Response:
        owner = await scope_of(may, request)
        record = visible(await asked(journal.get(request.path_params["id"])), owner)
        return json_response(record.as_json())

    async def cancel_run(request: Request) -> Response:
        refuse_forgery(request)
        owner = await scope_of(may, request)
        id = request.path_params["id"]
        reason = await reason_of(request)
        visible(await asked(journal.get(id)), owner)
        reply = await journal.cancel(id, reason)
        if reply.status is CancelStatus.UNKNOWN:
            visible(None, owner)
        record = reply.run.as_json() if reply.run is not None else None
        return json_response({"status": reply.status, "run": record}, _ANSWERS[reply.status])

    async def follow_run(request: Request) -> Response:
        owner = await scope_of(may, request)
        id = request.path_params["id"]
        visible(await asked(journal.get(id)), owner)

        async def look() -> dict[str, Any]:
            try:
                return visible(await journal.get(id), owner).as_json()
            except HTTPException:
                return {"id": id, "state": "deleted"}

        return event_stream(
            changes(_without_lease(look), event="run", every=LOOK_EVERY, ended=lambda run: run["state"] != "running")
        )

    return Router(
        [
            Route("/runs", guarded(list_runs), methods=["GET"]),
            Route("/runs/{id}", guarded(get_run), methods=["GET"]),
            Route("/runs/{id}/cancel", guarded(cancel_run), methods=["POST"]),
            Route("/runs/{id}/events", guarded(follow_run), methods=["GET"]),
        ]
    )


def _without_lease(look: Any) -> Any:
    """A renewed lease is no news."""

    async def look_again() -> dict[str, Any]:
        return {key: value for key, value in (await look()).items() if key != "lease_until"}

    return look_again


async def _list(journal: Journal, request: Request, owner: str | None) -> Any:
    query = request.query_params
    known = {"state", "name", "owner", "opened_after", "opened_before", "limit", "after"}
    if unknown := set(query) - known:
        raise ValueError(
            f"unknown parameters: {', '.join(sorted(unknown))[:200]}; there are {', '.join(sorted(known))}"
        )
    moments = {key: _moment(key, query[key]) for key in ("opened_after", "opened_before") if key in query}
    return await journal.list(
        state=query.get("state"),
        name=query.get("name"),
        owner=owner if owner is not None else query.get("owner"),
        limit=_number("limit", query.get("limit", "50")),
        after=query.get("after"),
        **moments,
    )


def _number(key: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ValueError(f"{key} takes a number, not {text[:80]!r}")
    return int(text)


def _moment(key: str, text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{key} takes a time in ISO 8601, with its zone, not {text[:80]!r}") from None
