"""Falcon: the call as ``req.context.hangup``, since `falcon.util.sync_to_async` does not carry context variables.

::

    app = HangupMiddleware(falcon.asgi.App(middleware=[CallMiddleware()]))

An upload that the client cut short needs no guard: Falcon takes the disconnect for the end of the body, and hangup
interrupts whoever reads it before Falcon can.
"""

from __future__ import annotations

from typing import Any

__all__ = ["CallMiddleware"]


class CallMiddleware:
    """Sets ``req.context.hangup``: the `Call`, or None where `HangupMiddleware` is not mounted."""

    async def process_request(self, req: Any, resp: Any) -> None:
        """Before routing, as Falcon has it."""
        req.context.hangup = (req.scope.get("extensions") or {}).get("hangup")

    async def process_request_ws(self, req: Any, ws: Any) -> None:
        """The same for a WebSocket."""
        await self.process_request(req, ws)
