"""Starlette with a `BaseHTTPMiddleware` inside us."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import Response

from .starlette_app import ROUTES


class NoOp(BaseHTTPMiddleware):
    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        return await call_next(request)


app = Starlette(routes=ROUTES, middleware=[Middleware(NoOp)])
