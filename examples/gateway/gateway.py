"""An OpenAI-compatible gateway in front of a model worker that is another process. Start both: python gateway.py

``/v1/chat/completions`` and ``/v1/responses``, streaming or not. A turn in which the model calls a tool is suspended:
the answer ends, the worker holds on to the turn, and a later request with the tool's result resumes it.

What must hold whenever a client hangs up: the worker is told exactly once of every turn that nobody waits for, and of
no other; a suspended turn is released; and a turn whose link was lost may have happened, so nobody may ask again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from hangup import AmbiguousOutcome, HangupMiddleware, Outcome, State, add_finalizer, before_success, protect, step
from worker import LOST, Frame, Wire

#: A lost turn may have happened. The official clients retry a 5xx by themselves unless they are told not to.
DO_NOT_RETRY = {"x-should-retry": "false"}


class Refused(Exception):
    """What the client is told instead of an answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Link:
    """The gateway's end of one turn."""

    def __init__(self, turn: str, wire: Wire) -> None:
        self.turn = turn
        self.wire = wire
        self.parked_at = 0.0
        self.ended = False

    async def receive(self) -> Frame:
        try:
            frame = await self.wire.receive()
            self.ended = frame["op"] == "outcome"
            return frame
        except LOST:
            await self.wire.stream.aclose()
            raise AmbiguousOutcome(f"the link of turn {self.turn} was lost") from None

    async def send(self, **frame: Any) -> None:
        try:
            await self.wire.send(**frame)
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
                raise Refused(404, f"no turn is waiting for the result of {call}")
            return link, {"op": "resume", "result": result}
        try:
            wire = Wire(await anyio.connect_tcp("127.0.0.1", self.port))
        except OSError:
            raise Refused(503, "the worker is not there") from None
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
                    self.park(link)
                yield frame
        except AmbiguousOutcome:
            raise
        except BaseException:  # the client has left
            await link.cancel()
            raise

    def hold(self, link: Link) -> None:
        """Park the turn just before the client can know of it, and release it if the client never got to know."""
        handed_over = False

        @before_success
        async def hand_over() -> None:
            nonlocal handed_over
            handed_over = True
            self.park(link)

        @add_finalizer
        async def release(outcome: Outcome) -> None:
            if outcome.state is State.COMPLETED and outcome.delivered:
                return
            if not handed_over or self.parked.pop(call_id(link), None) is link:
                await link.cancel()

    def park(self, link: Link) -> None:
        link.parked_at = time.monotonic()
        self.parked[call_id(link)] = link

    async def expire(self) -> None:
        """Release the suspended turns to which nobody came back. Whoever takes a link out of `parked` has it."""
        while True:
            await anyio.sleep(self.patience / 4)
            for call, link in list(self.parked.items()):
                if time.monotonic() - link.parked_at > self.patience and self.parked.pop(call, None) is link:
                    await link.cancel()

    async def answer(self, request: Request, form: Form) -> Response:
        body = await request.json()
        link, first = await self.open(body)
        frames = (self.turn if self.mended else self.bare_turn)(link, first)
        events = form(link, frames)
        if not body.get("stream"):
            async with aclosing(events):
                async for event in events:
                    whole = event
            return JSONResponse(whole["whole"])
        start = await anext(events)  # the client gets its 200 when the worker has begun

        async def stream() -> AsyncIterator[bytes]:
            try:
                yield sse(start)
                async with aclosing(events):
                    async for event in events:
                        yield sse(event)
            except (AmbiguousOutcome, Refused) as exc:  # it is too late for a status
                yield sse({"type": "error", "error": {"message": str(exc), "type": "server_error"}})
                return
            if form is chat:
                yield b"data: [DONE]\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")


async def listen(link: Link) -> AsyncIterator[Frame]:
    """The worker's frames, until the turn ends or is suspended."""
    while True:
        frame = await link.receive()
        if frame["op"] == "outcome":
            await link.wire.stream.aclose()
            if frame["state"] != "completed":
                raise Refused(502, f"the worker has {frame['state']} the turn")
            return
        yield frame
        if frame["op"] == "suspended":
            return


# ---------------------------------------------------------------------- the two APIs

Form = Callable[[Link, AsyncIterator[Frame]], AsyncIterator[Frame]]


def call_id(link: Link) -> str:
    return link.turn.replace("turn", "call")


def read(body: Frame) -> tuple[str, str | None, str]:
    """The prompt, and the id and result of the tool call that is answered, if one is. Of either API."""
    messages = body.get("messages") or body["input"]
    if isinstance(messages, str):
        return messages, None, ""
    last = messages[-1]
    if last.get("role") == "tool":
        return "", last["tool_call_id"], last["content"]
    if last.get("type") == "function_call_output":
        return "", last["call_id"], last["output"]
    return last["content"], None, ""


def sse(event: Frame) -> bytes:
    shown = {key: value for key, value in event.items() if key != "whole"}
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {json.dumps(shown)}\n\n".encode()


async def chat(link: Link, frames: AsyncIterator[Frame]) -> AsyncIterator[Frame]:
    """Chat Completions: chunks. The last has the whole answer beside it, for those who did not ask for a stream."""
    head = {"id": f"chatcmpl-{link.turn}", "created": int(time.time()), "model": "worker"}
    text, arguments, name = "", "", ""
    async with aclosing(frames):
        async for frame in frames:
            delta: Frame = {"role": "assistant"}
            if frame["op"] == "chunk":
                text += frame["text"]
                delta["content"] = frame["text"]
            elif frame["op"] == "tool_call":
                name, arguments = frame["name"], arguments + frame["arguments"]
                function = {"name": name, "arguments": frame["arguments"]}
                delta["tool_calls"] = [{"index": 0, "id": call_id(link), "type": "function", "function": function}]
            choice = {"index": 0, "delta": delta, "finish_reason": None}
            yield {**head, "object": "chat.completion.chunk", "choices": [choice]}
    message: Frame = {"role": "assistant", "content": text or None}
    if name:
        function = {"name": name, "arguments": arguments}
        message["tool_calls"] = [{"id": call_id(link), "type": "function", "function": function}]
    reason = "tool_calls" if name else "stop"
    last = {**head, "object": "chat.completion.chunk"}
    last["choices"] = [{"index": 0, "delta": {}, "finish_reason": reason}]
    whole = {**head, "object": "chat.completion"}
    whole["choices"] = [{"index": 0, "message": message, "finish_reason": reason}]
    yield {**last, "whole": whole}


async def responses(link: Link, frames: AsyncIterator[Frame]) -> AsyncIterator[Frame]:
    """Responses: events. The last carries the whole answer."""
    head = {"id": link.turn.replace("turn", "resp"), "object": "response", "created_at": time.time(), "model": "worker"}
    text, arguments, name = "", "", ""
    item, number = {"item_id": f"item_{link.turn}", "output_index": 0}, 0
    async with aclosing(frames):
        async for frame in frames:
            number += 1
            if frame["op"] == "chunk":
                text += frame["text"]
                delta = {"type": "response.output_text.delta", "content_index": 0, "delta": frame["text"]}
                yield {**delta, **item, "logprobs": [], "sequence_number": number}
            elif frame["op"] == "tool_call":
                name, arguments = frame["name"], arguments + frame["arguments"]
                delta = {"type": "response.function_call_arguments.delta", "delta": frame["arguments"]}
                yield {**delta, **item, "sequence_number": number}
    output: Frame = {"type": "message", "id": item["item_id"], "role": "assistant", "status": "completed"}
    output["content"] = [{"type": "output_text", "text": text, "annotations": []}]
    if name:
        output = {"type": "function_call", "call_id": call_id(link), "name": name, "arguments": arguments}
    whole = {**head, "status": "completed", "output": [output], "tools": [], "tool_choice": "auto"}
    yield {"type": "response.completed", "sequence_number": number + 1, "response": whole, "whole": whole}


def make_app(port: int, *, mended: bool, patience: float = 60, observers: Any = ()) -> Starlette:
    """The gateway to the worker at ``port``, bare or mended."""
    gateway = Gateway(port, mended=mended, patience=patience)

    async def refuse(request: Request, exc: Exception) -> Response:
        status = exc.status if isinstance(exc, Refused) else 502
        error = {"message": str(exc), "type": "server_error"}
        headers = DO_NOT_RETRY if mended and isinstance(exc, AmbiguousOutcome) else None
        return JSONResponse({"error": error}, status, headers)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            if mended:
                tasks.start_soon(gateway.expire)
            yield
            tasks.cancel_scope.cancel()
        for link in gateway.parked.values():
            await (link.cancel() if mended else link.wire.stream.aclose())

    async def chat_completions(request: Request) -> Response:
        return await gateway.answer(request, chat)

    async def create_response(request: Request) -> Response:
        return await gateway.answer(request, responses)

    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/v1/responses", create_response, methods=["POST"]),
        ],
        exception_handlers={Refused: refuse, AmbiguousOutcome: refuse},
        middleware=[Middleware(HangupMiddleware, observers=observers)] if mended else [],
        lifespan=lifespan,
    )


def start_worker() -> tuple[subprocess.Popen[str], int]:
    """A worker in a process of its own, and its port."""
    command = [sys.executable, str(Path(__file__).with_name("worker.py"))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


if __name__ == "__main__":
    import uvicorn

    worker, port = start_worker()
    try:
        uvicorn.run(make_app(port, mended=os.environ.get("BARE") is None), port=8000)
    finally:
        worker.terminate()
