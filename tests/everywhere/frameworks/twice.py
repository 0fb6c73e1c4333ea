"""Starlette with us mounted twice: by `add_middleware`, and wrapped around the application."""

from __future__ import annotations

from starlette.applications import Starlette

from hangup import HangupMiddleware

from ..witness import note_outcome, policy_by_header
from .starlette_app import ROUTES

app = Starlette(routes=ROUTES)
app.add_middleware(HangupMiddleware, policy=policy_by_header, observers=[note_outcome])
