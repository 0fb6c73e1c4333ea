"""What a live client is told when its call is stopped."""

from __future__ import annotations

from typing import Final

from starlette.types import Message

from ._lifecycle import Cause

#: What a live client is answered when its call was stopped before anything was sent. 499 is what gRPC's HTTP mapping
#: makes of CANCELLED, and what a client that has gone would have been told.
ANSWERS: Final[dict[Cause | None, tuple[int, bytes]]] = {
    Cause.TIMEOUT: (504, b"Gateway Timeout"),
    Cause.SERVER_SHUTDOWN: (503, b"Service Unavailable"),
    Cause.REQUESTED: (499, b"Canceled"),
}


def response(status: int | None, body: bytes) -> list[Message]:
    """A whole response in text, or, without a ``status``, the end of one."""
    messages: list[Message] = []
    if status is not None:
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
        messages.append({"type": "http.response.start", "status": status, "headers": headers if body else []})
    messages.append({"type": "http.response.body", "body": body, "more_body": False})
    return messages
