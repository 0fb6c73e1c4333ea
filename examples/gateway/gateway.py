"""An OpenAI-compatible gateway in front of a model worker that is another process. Start both: python gateway.py

``/v1/chat/completions`` and ``/v1/responses``, streaming or not. A turn in which the model calls a tool is suspended:
the answer ends, the worker holds on to the turn, and a later request with the tool's result resumes it.

What must hold whenever a client hangs up: the worker is told exactly once of every turn that nobody waits for, and of
no other; a suspended turn is released; and a turn whose link was lost may have happened, so nobody may ask again.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import AsyncIterator, Awaitable
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from typing import Any

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from apis import Form, call_id, chat, read, responses, sse
from hangup import AmbiguousOutcome, HangupMiddleware, Outcome, State, add_finalizer, before_success, protect, step
from worker import LOST, Frame, Wire, start_worker

#: What was lost or broken off may have had its effect. The official clients retry a 5xx unless they are told not to.
DO_NOT_RETRY = {"x-should-retry": "false"}


class Link:
    """The gateway's end of one turn."""

    def __init__(self, turn: str, wire: Wire) -> None:
        self.turn = turn
        self.wire = wire
        self.parked_at = 0.0
        self.ended = False

    async def receive(self) -> Frame:
        frame: Frame = await self.unless_lost(self.wire.receive())
        self.ended = frame["op"] == "outcome"
        return frame

    async def send(self, **frame: Any) -> None:
        await self.unless_lost(self.wire.send(**frame))

    async def unless_lost(self, doing: Awaitable[Any]) -> Any:
        try:
            return await doing
        except LOST:
            await self.wire.stream.aclose()
            raise AmbiguousOutcome(f"the link of turn {self.turn} was lost") from None

    async def cancel(self) -> None:
        """Tell the worker, unless it has said already what became of the turn, and wait until it says so."""
        async with self.wire.stream:
            if not self.ended:
                await self.send(op="cancel")
            while not self.ended:
                await self.receive()


class Gateway:
    """The links to one worker. ``mended`` is what the two halves of this example differ in."""

    def __init__(self, port: int, *, mended: bool, patience: float) -> None:
        self.port = port
        self.mended = mended
        self.patience = patience  #: seconds a suspended turn is held for its tool result
        self.parked: dict[str, Link] = {}

    async def open(self, body: Frame) -> tuple[Link, Frame]:
        """A link and the first frame for it: of a suspended turn if there is a tool result in ``body``."""
        prompt, call, result = read(body)
        if call is not None:
            link = self.parked.pop(call, None)
            if link is None:
                raise HTTPException(404, f"no turn is waiting for the result of {call}")
            return link, {"op": "resume", "result": result}
        try:
            wire = Wire(await anyio.connect_tcp("127.0.0.1", self.port))
        except OSError:
            raise HTTPException(503, "the worker is not there") from None
        return Link(f"turn_{uuid.uuid4().hex}", wire), {"op": "submit", "prompt": prompt}

    async def turn(self, link: Link, first: Frame) -> AsyncIterator[Frame]:
        """What the worker says, until its outcome or a suspension. Here a turn is made safe to hang up on."""
        async with step("worker turn", cancel=link.cancel, effect=True):
            with protect():  # either it was submitted or it was not
                await link.send(**first)
            async for frame in listen(link):
                if frame["op"] == "suspended":
                    self.hold(link)
                yield frame

    async def bare_turn(self, link: Link, first: Frame) -> AsyncIterator[Frame]:
        """The same, as one writes it first."""
        try:
            await link.send(**first)
            async for frame in listen(link):
                if frame["op"] == "suspended":
                    await self.park(link)
                yield frame
        except BaseException:  # the client has left
            await link.cancel()
            raise

    def hold(self, link: Link) -> None:
        """Park the turn just before the client can know of it, and release it if the client never got to know."""
        link.parked_at = 0.0  # nobody can know of it yet
        before_success(partial(self.park, link))

        @add_finalizer
        async def release(outcome: Outcome) -> None:
            known = outcome.state is State.COMPLETED and outcome.delivered
            if not known and (not link.parked_at or self.parked.pop(call_id(link.turn), None) is link):
                await link.cancel()

    async def park(self, link: Link) -> None:
        link.parked_at = time.monotonic()
        self.parked[call_id(link.turn)] = link

    async def expire(self) -> None:
        """Release the suspended turns to which nobody came back. Whoever takes a link out of `parked` has it."""
        while True:
            await anyio.sleep(self.patience / 4)
            for call, link in list(self.parked.items()):
                if time.monotonic() - link.parked_at > self.patience and self.parked.pop(call, None) is link:
                    with suppress(AmbiguousOutcome):  # its link may be lost: the others are released all the same
                        await link.cancel()

    async def answer(self, request: Request, form: Form) -> Response:
        body = await request.json()
        link, first = await self.open(body)
        events = form(link.turn, (self.turn if self.mended else self.bare_turn)(link, first))
        if not body.get("stream"):
            async with aclosing(events):
                *_, last = [event async for event in events]
            return JSONResponse(last["whole"])
        start = await anext(events)  # the client gets its 200 when the worker has begun

        async def stream() -> AsyncIterator[bytes]:
            try:
                yield sse(start)
                async with aclosing(events):
                    async for event in events:
                        yield sse(event)
                if form is chat:
                    yield b"data: [DONE]\n\n"
            except (AmbiguousOutcome, HTTPException) as exc:  # it is too late for a status
                yield sse({"type": "error", "error": {"message": str(exc), "type": "server_error"}})

        return StreamingResponse(stream(), media_type="text/event-stream")


async def listen(link: Link) -> AsyncIterator[Frame]:
    """The worker's frames, until the turn ends or is suspended."""
    while True:
        frame = await link.receive()
        if frame["op"] == "outcome":
            await link.wire.stream.aclose()
            if frame["state"] != "completed":
                raise HTTPException(502, f"the worker has {frame['state']} the turn")
            return
        yield frame
        if frame["op"] == "suspended":
            return


def make_app(port: int, *, mended: bool, patience: float = 60, observers: Any = ()) -> Starlette:
    gateway = Gateway(port, mended=mended, patience=patience)

    async def refuse(request: Request, exc: Exception) -> Response:
        status, message = (exc.status_code, exc.detail) if isinstance(exc, HTTPException) else (502, str(exc))
        headers = DO_NOT_RETRY if mended and status == 502 else None
        return JSONResponse({"error": {"message": message, "type": "server_error"}}, status, headers)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            if mended:
                tasks.start_soon(gateway.expire)
            yield
            tasks.cancel_scope.cancel()
        for link in gateway.parked.values():
            with suppress(AmbiguousOutcome):
                await (link.cancel() if mended else link.wire.stream.aclose())

    return Starlette(
        routes=[
            Route("/v1/chat/completions", partial(gateway.answer, form=chat), methods=["POST"]),
            Route("/v1/responses", partial(gateway.answer, form=responses), methods=["POST"]),
        ],
        exception_handlers={HTTPException: refuse, AmbiguousOutcome: refuse},
        middleware=[Middleware(HangupMiddleware, observers=observers)] if mended else [],
        lifespan=lifespan,
    )


if __name__ == "__main__":
    worker, port = start_worker()
    try:
        uvicorn.run(make_app(port, mended=os.environ.get("BARE") is None), port=8000)
    finally:
        worker.terminate()
