"""What the tests share. Helpers that read like prose."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import starlette.routing
from anyio.lowlevel import checkpoint
from starlette.types import Receive, Scope, Send

from hangup import HangupMiddleware, Outcome
from hangup.testing import Peer

#: Whether this Starlette says in the scope where it routed a request.
ROUTE_IN_SCOPE = 'scope["route"]' in inspect.getsource(starlette.routing)

START = {"type": "http.response.start", "status": 200, "headers": []}
END = {"type": "http.response.body", "body": b"", "more_body": False}


def chunk(body: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": True}


async def answer(send: Send, status: int = 200, body: bytes = b"") -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": body, "more_body": False})


class Watch:
    """Mounts the middleware around an application and keeps what it said."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Any], **options: Any) -> None:
        self.outcomes: list[Outcome] = []
        self.app = HangupMiddleware(app, observers=[self.outcomes.append], **options)

    @property
    def outcome(self) -> Outcome:
        [outcome] = self.outcomes
        return outcome

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


async def watched(peer: Peer) -> None:
    """Wait until somebody is reading the server's ``receive`` with the body behind them."""
    await peer.wait_for(lambda: peer.reading and not peer._pieces)


async def until(condition: Callable[[], object], timeout: float = 5) -> None:
    """Let the loop run until ``condition()`` holds."""
    with anyio.fail_after(timeout):
        while not condition():
            await checkpoint()


def types(messages: Sequence[Any]) -> list[str]:
    return [message["type"] for message in messages]
