"""sse-starlette in Starlette."""

from __future__ import annotations

from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from . import base
from .starlette_app import ROUTES


async def sse(request: Request) -> Response:
    return EventSourceResponse(base.chunks())


app = Starlette(routes=[*ROUTES, Route("/sse", sse)])
