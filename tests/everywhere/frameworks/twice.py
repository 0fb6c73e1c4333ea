"""Starlette with us mounted twice: by `add_middleware`, and wrapped around the application."""

from __future__ import annotations

from starlette.applications import Starlette

from hangup import HangupMiddleware

from .starlette_app import ROUTES

app = Starlette(routes=ROUTES)
app.add_middleware(HangupMiddleware)  # the outer one has the say
