"""What the workers of `test_kill` serve."""

from __future__ import annotations

import os

import anyio
from starlette.types import Receive, Scope, Send

from hangup import HangupMiddleware, current_call, step
from hangup.journal import Journal

from ..helpers import answer
from ..lifespan import answer_lifespan

LEASE = 2.0
RENEW = 0.5

journal = Journal(os.environ.get("HANGUP_TEST_DATABASE", "sqlite:///unused.db"), lease=LEASE, renew_every=RENEW)


async def work(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] != "http":
        await answer_lifespan(receive, send)
        return
    if scope["path"] == "/pid":
        await answer(send, body=str(os.getpid()).encode())
        return
    seconds, _, effect = scope["query_string"].decode().partition("&")
    run = await current_call().open_run("killed", id=scope["path"][1:])
    async with step("the work", effect=bool(effect)):
        await anyio.sleep(float(seconds))
    run.result = os.getpid()
    await answer(send, body=run.id.encode())


app = HangupMiddleware(work, journal=journal)
