"""Starlette: the call of a request, and streams that are closed on time."""

from __future__ import annotations

from starlette.requests import HTTPConnection

from ._call import Call
from ._stream import closing_stream

__all__ = ["call_of", "closing_stream"]


def call_of(conn: HTTPConnection) -> Call:
    """The `Call` of a request or WebSocket, from its scope: also where a context variable does not reach.

    :raises LookupError: if HangupMiddleware is not mounted around the application.
    """
    call = (conn.scope.get("extensions") or {}).get("hangup")
    if not isinstance(call, Call):
        raise LookupError(f"no call for {conn.url.path!r}: is HangupMiddleware mounted?")
    return call
