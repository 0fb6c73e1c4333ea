"""Chat Completions and Responses: what they make of the frames of a turn. Nothing here knows of links or hang-ups."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

from worker import Frame

#: From the name of a turn and its frames to events. The last has the ``whole`` answer beside it.
Form = Callable[[str, AsyncIterator[Frame]], AsyncIterator[Frame]]


def call_id(turn: str) -> str:
    """The id of the tool call that a turn is suspended with."""
    return turn.replace("turn", "call")


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


async def chat(turn: str, frames: AsyncIterator[Frame]) -> AsyncIterator[Frame]:
    """Chat Completions: chunks."""
    head = {"id": f"chatcmpl-{turn}", "created": int(time.time()), "model": "worker"}
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
                delta["tool_calls"] = [{"index": 0, "id": call_id(turn), "type": "function", "function": function}]
            choice = {"index": 0, "delta": delta, "finish_reason": None}
            yield {**head, "object": "chat.completion.chunk", "choices": [choice]}
    message: Frame = {"role": "assistant", "content": text or None}
    if name:
        function = {"name": name, "arguments": arguments}
        message["tool_calls"] = [{"id": call_id(turn), "type": "function", "function": function}]
    reason = "tool_calls" if name else "stop"
    end: Frame = {"index": 0, "finish_reason": reason}
    whole = {**head, "object": "chat.completion", "choices": [{**end, "message": message}]}
    yield {**head, "object": "chat.completion.chunk", "choices": [{**end, "delta": {}}], "whole": whole}


async def responses(turn: str, frames: AsyncIterator[Frame]) -> AsyncIterator[Frame]:
    """Responses: events."""
    head = {"id": turn.replace("turn", "resp"), "object": "response", "created_at": time.time(), "model": "worker"}
    text, arguments, name = "", "", ""
    item, number = {"item_id": f"item_{turn}", "output_index": 0}, 0
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
        output = {"type": "function_call", "call_id": call_id(turn), "name": name, "arguments": arguments}
    whole = {**head, "status": "completed", "output": [output], "tools": [], "tool_choice": "auto"}
    yield {"type": "response.completed", "sequence_number": number + 1, "response": whole, "whole": whole}
