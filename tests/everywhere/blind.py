"""What nobody can see, and why: the cells that cannot be as everywhere else.

Each entry names the servers (by trait), the phases and ways it holds for, the reason that goes into the documentation,
and what the record has to say instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .phases import BLIND_WORK, Phase, Want
from .servers import Server


@dataclass(frozen=True)
class Blind:
    """One blind spot."""

    traits: frozenset[str]
    phases: frozenset[str]
    ways: frozenset[str]
    why: str
    want: Want | None = None
    never_called: bool = False
    path: str | None = None
    #: What the server says of it in its log, and nobody can prevent.
    noise: str | None = None


def blind_spot(server: Server, phase: Phase, way: str) -> Blind | None:
    """The one that holds for a cell, if there is one."""
    for spot in BLIND:
        if (
            phase.name in spot.phases
            and (not spot.ways or way in spot.ways)
            and (not spot.traits or spot.traits & server.traits)
        ):
            return spot
    return None


def _spot(
    phases: str,
    why: str,
    *,
    traits: str = "",
    ways: str = "",
    want: Want | None = None,
    never_called: bool = False,
    path: str | None = None,
    noise: str | None = None,
) -> Blind:
    return Blind(
        frozenset(traits.split()),
        frozenset(phases.split()),
        frozenset(ways.split()),
        why,
        want,
        never_called,
        path,
        noise,
    )


#: The work ran to its end, since nobody could know; and the record believes that it was delivered.
_RAN_ON: Final = Want("completed", None, "after_response", delivered=True)
_SUSPENDED: Final = Want("completed", None, "after_response", delivered=True, suspended=True)
_SEEN_LATE: Final = Want("canceled", "client_disconnect", "during_response", delivered=False, suspended=True)
#: It ends, and its finalizers run; nothing else can be promised.
_BY_CHANCE: Final = Want(
    "*", "*", suspended=True, delivered=None, step=False, error="*", noise=("hypercorn", "asyncio")
)

BLIND: Final[tuple[Blind, ...]] = (
    _spot(
        "post-small post-320k post-320k-ahead post-320k-stream reading short-body early expect-unread",
        "Daphne calls the application when it has the whole body, so an aborted upload never reaches it",
        traits="daphne",
        never_called=True,
    ),
    _spot(
        "post-small post-320k post-320k-ahead post-320k-stream reading short-body early expect-unread",
        "with `proxy_request_buffering on` nginx holds uploads back, so an aborted one never reaches the application",
        traits="nginx-buffering",
        never_called=True,
    ),
    _spot(
        "post-small post-320k-ahead reading short-body",
        "in the middle of an upload gunicorn says nothing over HTTP/2 until its `--timeout` has passed (3 s here)",
        traits="gunicorn-h2",
        ways="FIN",
    ),
    _spot(
        "post-320k",
        "the disconnect stands behind more unread body than `read_ahead`; the next `send()` shows it",
        traits="gunicorn-h2",
        want=_SEEN_LATE,
        path="/idle?work=0.5",
    ),
    _spot(
        "post-320k-stream",
        "the disconnect stands behind more unread body than `read_ahead`; the next `send()` shows it",
        traits="gunicorn-h2",
        want=_SEEN_LATE,
    ),
    _spot(
        "blocked-last",
        "gunicorn raises an `HTTP2ConnectionError` out of a blocked last `send()`, which nothing marks as a disconnect"
        ": the call has `failed` then, or is `completed` if the disconnect was seen first",
        traits="gunicorn-h2",
        want=Want("*", None, "after_response", delivered=None, error="*"),
    ),
    _spot(
        "post-320k",
        "the disconnect stands behind more unread body than `read_ahead`, and then hypercorn's `send()` never returns: "
        "only `send_timeout` ends the call",
        traits="hypercorn-h2",
        want=Want("completed", None, "after_response", delivered=False, suspended=True),
        path="/timed/idle?work=0.5",
    ),
    _spot(
        "post-320k",
        "the disconnect stands behind more unread body than `read_ahead`; the record says `detection_suspended`",
        want=_SUSPENDED,
    ),
    _spot(
        "post-320k-stream",
        "as above; and with its queue of unread messages full, hypercorn's `send()` may never return, or fail with an "
        "error of its own. Only `send_timeout` ends such a call",
        traits="hypercorn hypercorn-h2",
        want=_BY_CHANCE,
        path="/timed/stream?work=0.5",
    ),
    _spot(
        "post-320k-stream",
        "as above: the stream runs on into the void, with no more than `timeout` to end it",
        want=_SUSPENDED,
    ),
    _spot(
        "expect-unread",
        "reading would ask for the body, so nobody reads before the application does; the record says "
        "`detection_suspended`",
        traits="uvicorn hypercorn granian gunicorn",
        want=_SUSPENDED,
    ),
    _spot(
        "idle started thread polling finish pipelined",
        "`proxy_ignore_client_abort on`: nginx stays, and takes an answer that nobody gets",
        traits="nginx-ignore-abort",
        want=_RAN_ON,
    ),
    _spot(
        "listening",
        "`proxy_ignore_client_abort on`: nginx stays; only `timeout` ends the call",
        traits="nginx-ignore-abort",
        want=Want("timed_out", "timeout", "before_response", delivered=False),
        path="/limited/listening",
    ),
    _spot(
        "pipelined",
        "the server does not read past a pipelined request while one is running; on uvloop the next `send()` shows it",
        traits="httptools-uvloop",
        want=Want("canceled", "client_disconnect", "during_response", delivered=False),
        path=f"/idle?work={BLIND_WORK}",
        noise="ASGI callable returned without completing response.",
    ),
    _spot(
        "pipelined",
        "the server does not read past a pipelined request while one is running",
        traits="httptools hypercorn granian",
        want=_RAN_ON,
    ),
)
