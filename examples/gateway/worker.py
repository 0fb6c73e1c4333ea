"""A model worker: its own process, reached over a socket, one link a turn. Start it: python worker.py [port]

Frames are JSON behind four bytes of length. A turn is asked for by ``submit`` and answered by ``chunk``, ``tool_call``
(a fragment), ``suspended`` (it waits for ``resume``) and, last, ``outcome``: ``completed`` or ``interrupted``.
``cancel`` interrupts it. A turn whose link is lost works on: it cannot know whether the gateway will be back.

What a turn does is said by its prompt, one word after the other: the first names the turn, then ``say``, ``tool``,
``hold`` (until told to ``go``), ``suspend``, ``drop`` (the link is lost), ``deaf`` (it is lost when ``cancel`` comes),
``interrupted`` (by the worker itself). The worker keeps a ledger, which anybody may ask for: how often each turn was
submitted, resumed and canceled.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import anyio
from anyio.abc import SocketAttribute, SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream

Frame = dict[str, Any]


class Wire:
    """Frames over one socket. `receive` may be cancelled at any time and loses nothing."""

    def __init__(self, stream: SocketStream) -> None:
        self.stream = stream
        self._buffer = BufferedByteReceiveStream(stream)
        self._size: int | None = None

    async def send(self, **frame: Any) -> None:
        data = json.dumps(frame).encode()
        await self.stream.send(len(data).to_bytes(4, "big") + data)

    async def receive(self) -> Frame:
        if self._size is None:
            self._size = int.from_bytes(await self._buffer.receive_exactly(4), "big")
        data = await self._buffer.receive_exactly(self._size)
        self._size = None
        frame: Frame = json.loads(data)
        return frame


#: What `Wire` raises when the other side is not there any more.
LOST = (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError, anyio.ClosedResourceError)

ledger: dict[str, Frame] = {}
turns: dict[str, Turn] = {}


class Turn:
    """One turn, from submit to outcome."""

    def __init__(self, wire: Wire, prompt: str) -> None:
        self.name, *self.words = prompt.split()
        self.wire = wire
        self.fragments = ['{"place": ', '"harbour"}']
        self.scope = anyio.CancelScope()
        self.go = anyio.Event()
        self.resumed = anyio.Event()
        self.entry = ledger.setdefault(
            self.name, {"submitted": 0, "resumed": 0, "canceled": 0, "late": 0, "said": 0, "state": ""}
        )
        self.entry["submitted"] += 1
        turns[self.name] = self

    async def run(self) -> None:
        end = "completed"
        with self.scope:
            for word in self.words:
                self.entry["state"] = {"hold": "held", "suspend": "suspended"}.get(word, "running")
                if word in {"interrupted", "drop"}:
                    end = word
                    break
                await self.do(word)
        if self.scope.cancelled_caught:
            end = "drop" if "deaf" in self.words else "interrupted"
        elif self.scope.cancel_called:  # it had just said its last word
            self.entry["canceled"] -= 1
            self.entry["late"] += 1
        self.entry["state"] = end
        if end == "drop":
            await self.wire.stream.aclose()
        else:
            await self.tell(op="outcome", state=end)

    async def do(self, word: str) -> None:
        if word == "say":
            self.entry["said"] += 1
            await self.tell(op="chunk", text=f"word {self.entry['said']} ")
            await anyio.sleep(0.002)
        elif word == "tool":
            fragment, self.fragments = self.fragments[0], self.fragments[1:]
            await self.tell(op="tool_call", name="look_up", arguments=fragment)
        elif word == "hold":
            await self.go.wait()
            self.go = anyio.Event()
        elif word == "suspend":
            await self.tell(op="suspended")
            await self.resumed.wait()

    async def tell(self, **frame: Any) -> None:
        try:
            await self.wire.send(**frame)
        except LOST:
            pass

    def resume(self) -> None:
        self.entry["resumed"] += 1
        self.resumed.set()

    def cancel(self) -> None:
        ended = self.entry["state"] in {"completed", "interrupted", "drop"}
        self.entry["late" if ended else "canceled"] += 1
        self.scope.cancel()


async def serve(stream: SocketStream) -> None:
    """One link: a turn, or somebody who asks for the ledger."""
    wire = Wire(stream)
    turn: Turn | None = None
    async with stream, anyio.create_task_group() as tasks:
        while True:
            try:
                frame = await wire.receive()
            except LOST:
                break
            op = frame["op"]
            if op == "submit":
                turn = Turn(wire, frame["prompt"])
                tasks.start_soon(turn.run)
            elif op == "resume" and turn is not None:
                turn.resume()
            elif op == "cancel" and turn is not None:
                turn.cancel()
            elif op == "go":
                turns[frame["turn"]].go.set()
                await wire.send(op="gone")
            elif op == "drop":
                await turns[frame["turn"]].wire.stream.aclose()
                await wire.send(op="dropped")
            elif op == "ledger":
                await wire.send(op="ledger", ledger=ledger)


def start_worker() -> tuple[subprocess.Popen[str], int]:
    """A worker in a process of its own, and its port."""
    process = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


async def main(port: int) -> None:
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=port)
    print(listener.extra(SocketAttribute.local_port), flush=True)
    await listener.serve(serve)


if __name__ == "__main__":
    anyio.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 0)
