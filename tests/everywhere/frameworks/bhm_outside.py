"""Starlette with `add_middleware`, and a `BaseHTTPMiddleware` that was added after us: outside."""

from __future__ import annotations

from starlette.applications import Starlette

from hangup import HangupMiddleware

from ..witness import note_outcome, policy_by_header
from .bhm_inside import NoOp
from .starlette_app import ROUTES

MOUNTS_ITSELF = True

app = Starlette(routes=ROUTES)
app.add_middleware(HangupMiddleware, policy=policy_by_header, observers=[note_outcome])
app.add_middleware(NoOp)
