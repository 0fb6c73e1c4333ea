"""No framework at all."""

from __future__ import annotations

import anyio
from starlette.types import Receive, Scope, Send

from . import base


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        return
    kind = scope["path"].strip("/")
    if kind in {"stream", "sse"}:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        async for part in base.chunks():
            await send({"type": "http.response.body", "body": part, "more_body": True})
        return
    if kind == "plain":
        text = base.plain()
    elif kind == "idle":
        text = await base.idle()
    elif kind == "thread":
        text = await anyio.to_thread.run_sync(base.in_thread)
    elif kind == "body":
        base.prepare()
        base.note("parked")
        size, more = 0, True
        while more:
            message = await receive()
            size += len(message.get("body", b""))
            more = message.get("more_body", False)
        text = base.read(size)
    elif kind == "fails":
        base.fail()
    else:
        base.prepare()
        text = "done"
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(len(text)).encode())]}
    )
    await send({"type": "http.response.body", "body": text.encode()})
    if kind == "background":
        await base.after()
