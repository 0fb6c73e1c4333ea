"""Connexion."""

from __future__ import annotations

from typing import Any

from connexion import AsyncApp, request

from . import base


async def plain() -> str:
    return base.plain()


async def idle() -> str:
    return await base.idle()


def thread() -> str:
    return base.in_thread()


async def body() -> str:
    return base.read(len(await request.body()))


async def fails() -> str:
    base.fail()
    return ""


def _operation(name: str) -> dict[str, Any]:
    return {
        "operationId": f"{__name__}.{name}",
        "responses": {"200": {"description": "", "content": {"text/plain": {}}}},
    }


_SPEC = {
    "openapi": "3.0.0",
    "info": {"title": "everywhere", "version": "1"},
    "paths": {
        **{f"/{name}": {"get": _operation(name)} for name in ("plain", "idle", "thread", "fails")},
        "/body": {
            "post": {**_operation("body"), "requestBody": {"content": {"application/octet-stream": {"schema": {}}}}}
        },
    },
}

app = AsyncApp(__name__)
app.add_api(_SPEC)
