"""What an application of ours says to its server at startup and shutdown, where it has nothing to do then."""

from __future__ import annotations

from starlette.types import Receive, Send


async def answer_lifespan(receive: Receive, send: Send) -> None:
    """Answer until the shutdown."""
    while True:
        message = await receive()
        await send({"type": message["type"] + ".complete"})
        if message["type"] == "lifespan.shutdown":
            return
