"""Ariadne: queries over HTTP."""

from __future__ import annotations

from typing import Any

from ariadne import QueryType, make_executable_schema
from ariadne.asgi import GraphQL

from . import base

query = QueryType()


@query.field("plain")
async def plain(*_: Any) -> str:
    return base.plain()


@query.field("idle")
async def idle(*_: Any) -> str:
    return await base.idle()


@query.field("thread")
def thread(*_: Any) -> str:
    return base.blocking()


@query.field("fails")
async def fails(*_: Any) -> str:
    base.fail()
    return ""


_TYPES = "type Query { plain: String! idle: String! thread: String! fails: String! }"
app = GraphQL(make_executable_schema(_TYPES, query), execute_get_queries=True)
