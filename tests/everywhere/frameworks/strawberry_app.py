"""Strawberry: queries over HTTP."""

from __future__ import annotations

import strawberry
from strawberry.asgi import GraphQL

from . import base


@strawberry.type
class Query:
    @strawberry.field
    async def plain(self) -> str:
        return base.plain()

    @strawberry.field
    async def idle(self) -> str:
        return await base.idle()

    @strawberry.field
    def thread(self) -> str:
        return base.blocking()

    @strawberry.field
    async def fails(self) -> str:
        base.fail()
        return ""


app: GraphQL[object, object] = GraphQL(strawberry.Schema(Query), graphql_ide=None)
