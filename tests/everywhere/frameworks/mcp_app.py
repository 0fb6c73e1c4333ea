"""The MCP SDK over Streamable HTTP: stateful, stateless, or with JSON responses."""

from __future__ import annotations

import os

from mcp.server import MCPServer
from mcp.server.transport_security import TransportSecuritySettings

from . import base

server = MCPServer("everywhere")


@server.tool()
async def plain() -> str:
    return base.plain()


@server.tool()
async def idle() -> str:
    return await base.idle()


@server.tool()
async def token() -> str:
    return await base.by_token()


@server.tool()
def thread() -> str:
    return base.in_thread()


@server.tool()
async def fails() -> str:
    base.fail()
    return ""


_variant = os.environ.get("EVERYWHERE_VARIANT", "")
app = server.streamable_http_app(
    json_response=_variant == "json",
    stateless_http=_variant == "stateless",
    transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
)
