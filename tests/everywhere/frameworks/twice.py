"""Starlette with us mounted twice: by `add_middleware`, and wrapped around the application."""

from __future__ import annotations

from starlette.applications import Starlette

from hangup import HangupMiddleware

from ..witness import note_outcome
from .starlette_app import ROUTES

app = Starlette(routes=ROUTES)
app.add_middleware(HangupMiddleware, observers=[note_outcome])
