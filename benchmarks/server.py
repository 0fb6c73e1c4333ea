"""A server in a process of its own, with its probes: ``python -m benchmarks.server COMPETITOR``.

The application has a plain answer, a short stream, and streams that never end: idle ones, and watched ones. What
happens to the watched is stamped with the clock that all processes share. The benchmark asks in lines on stdin, and is
answered in lines of JSON.

Instead of a competitor, ``raw`` is a bare `asyncio.Protocol` that answers as the stream does: what it sees in its
``connection_lost`` is the first anybody can know. ``receive`` is an ASGI application that does nothing but await the
disconnect: the first that uvicorn says.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import IO, Any, Self

import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from .competitors import load, unguarded
from .harness import on_loop

CHUNK = b"data: a token\n\n"


def raise_limit(needed: int = 0) -> int:
    """Let this process open as many files as it may. Returns how many those are.

    :raises SystemExit: if they are fewer than ``needed``.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < needed:
        raise SystemExit(f"{needed:,} open files are needed, and {hard:,} allowed: see ulimit -Hn")
    return hard


# ---------------------------------------------------------------------- the benchmark's side


class Server:
    """The process. Use as a context manager."""

    def __init__(self, name: str, *, loop: str = "uvloop", core: int | None = None) -> None:
        command = [sys.executable, "-m", "benchmarks.server", name, "--loop", loop]
        if core is not None:
            command += ["--core", str(core)]
        self.name = name
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            self.port: int = self._answer()["port"]
        except BaseException:
            self.__exit__()
            raise

    def ask(self, what: str) -> dict[str, Any]:
        """``reset``: forget what was seen, look at the clocks. ``report``: what was seen since."""
        stdin: IO[str] | None = self._process.stdin
        assert stdin is not None
        stdin.write(what + "\n")
        stdin.flush()
        return self._answer()

    def wait_for(self, kind: str, count: int, timeout: float = 20) -> dict[str, Any]:
        """The report, once ``count`` streams have come to ``kind``, or ``timeout`` seconds have passed."""
        deadline = time.monotonic() + timeout
        while True:
            if self.ask("count")["seen"].get(kind, 0) >= count or time.monotonic() > deadline:
                return self.ask("report")
            time.sleep(0.02)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server of {self.name} has died: {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def open_stream(port: int, path: str, stream: int) -> socket.socket:
    """A client with a stream of events, of which it has read the first."""
    client = socket.create_connection(("127.0.0.1", port))
    client.settimeout(20)
    client.sendall(b"GET /%s/%d HTTP/1.1\r\nhost: localhost\r\n\r\n" % (path.encode(), stream))
    seen = b""
    while CHUNK.rstrip() not in seen:
        got = client.recv(4096)
        if not got:
            raise RuntimeError(f"no stream: {seen!r}")
        seen += got
    return client


# ---------------------------------------------------------------------- the server's side


class Probe:
    """What is seen in the server."""

    def __init__(self) -> None:
        self.stamps: dict[str, dict[int, int]] = {}
        self.longest_gap = 0.0
        self._cpu = 0.0

    def stamp(self, kind: str, stream: int) -> None:
        self.stamps.setdefault(kind, {})[stream] = time.monotonic_ns()

    def answer(self, question: str) -> dict[str, Any]:
        if question == "count":
            return {"seen": {kind: len(stamps) for kind, stamps in self.stamps.items()}}
        found = {
            "stamps": self.stamps,
            "longest_gap": self.longest_gap,
            "cpu": time.process_time() - self._cpu,
            "memory": _memory(),
        }
        if question == "reset":
            gc.collect()
            found["memory"] = _memory()
            self.stamps, self.longest_gap, self._cpu = {}, 0.0, time.process_time()
        return found

    async def tick(self) -> None:
        """A ticker of 1 ms: its longest gap is how long the loop did nothing else."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(0.001)
            now = time.monotonic()
            self.longest_gap = max(self.longest_gap, now - before)
            before = now

    async def serve(self) -> None:
        """Answer the questions on stdin."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        ticker: asyncio.Task[None] | None = None
        while line := await reader.readline():
            question = line.decode().strip()
            answer = self.answer(question)
            if question == "reset" and ticker is None:
                ticker = asyncio.create_task(self.tick())
            print(json.dumps(answer), flush=True)


def _memory() -> int:
    """Bytes that are resident."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def application(name: str, probe: Probe) -> ASGIApp:
    """FastAPI, with what is measured."""
    this = load([name])[name]
    app = FastAPI()

    async def hello_world() -> bytes:
        return b"hello, world"

    if this.guard is unguarded:

        @app.get("/")
        async def hello() -> dict[str, str]:
            return {"message": (await hello_world()).decode()}
    else:

        @app.get("/")
        async def guarded_hello(request: Request) -> dict[str, str]:
            return {"message": (await this.guard(request.receive, hello_world)).decode()}

    async def chunks(count: int) -> AsyncIterator[bytes]:
        for _ in range(count):
            yield CHUNK

    async def idle() -> AsyncIterator[bytes]:
        yield CHUNK
        await asyncio.Event().wait()

    async def watched(stream: int) -> AsyncIterator[bytes]:
        if this.add_finalizer is not None:
            from hangup import current_call

            async def finalize() -> None:
                await asyncio.sleep(0)
                probe.stamp("finalizer", stream)

            this.add_finalizer(finalize)
            current_call().token.add_callback(lambda: probe.stamp("token", stream))
        try:
            yield CHUNK
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            probe.stamp("canceled", stream)
            raise
        finally:
            await asyncio.sleep(0)
            probe.stamp("finally", stream)

    if this.guard_stream is not None:
        guard_stream = this.guard_stream

        @app.get("/stream/{count}")
        async def stream(count: int) -> StreamingResponse:
            return StreamingResponse(guard_stream(chunks(count)), media_type="text/event-stream")

        @app.get("/idle/{stream}")
        async def idle_stream(stream: int) -> StreamingResponse:
            return StreamingResponse(guard_stream(idle()), media_type="text/event-stream")

        @app.get("/watched/{stream}")
        async def watched_stream(stream: int) -> StreamingResponse:
            return StreamingResponse(guard_stream(watched(stream)), media_type="text/event-stream")

    return this.mount(app)


class Raw(asyncio.Protocol):
    """What can be known, and when: nothing between the event loop and the stamp."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._stream = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport  # uvloop's is no asyncio.Transport

    def data_received(self, data: bytes) -> None:
        self._stream = int(data.split(b" ", 2)[1].rpartition(b"/")[2])
        self._transport.write(b"HTTP/1.1 200 OK\r\n\r\n" + CHUNK)

    def connection_lost(self, exc: Exception | None) -> None:
        self._probe.stamp("token", self._stream)


def listening(probe: Probe) -> ASGIApp:
    """The stream as an application that listens for the client, and no more."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        probe.stamp("token", int(scope["path"].rpartition("/")[2]))

    return app


async def serve(name: str, listener: socket.socket) -> None:
    probe = Probe()
    questions = asyncio.create_task(probe.serve())
    if name == "raw":
        server = await asyncio.get_running_loop().create_server(lambda: Raw(probe), sock=listener, backlog=4096)
        print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
        await server.serve_forever()
    else:
        config = uvicorn.Config(
            listening(probe) if name == "receive" else application(name, probe),
            http="httptools",
            log_level="critical",
            access_log=False,
            lifespan="off" if name == "receive" else "on",
        )
        print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
        await uvicorn.Server(config).serve(sockets=[listener])
    questions.cancel()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--loop", choices=["asyncio", "uvloop"], default="uvloop")
    parser.add_argument("--core", type=int)
    given = parser.parse_args()
    raise_limit()
    if given.core is not None:
        os.sched_setaffinity(0, {given.core})
    on_loop(given.loop, serve(given.name, socket.create_server(("127.0.0.1", 0), backlog=4096)))


if __name__ == "__main__":
    main()
