"""A real server, handlers of every kind, and two hundred clients that leave it at random. Judged from both sides.

From inside: each call begun has one outcome, each finalizer ran once, nothing is left when the server has stopped.
From outside: what a client that stayed has seen is what the record says. Run it on its own for as long as you like::

    python -m tests.torture.chaos --minutes 30 --server uvicorn --seed 7
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import random
import resource
import socket
import statistics
import struct
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import anyio
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from hangup import (
    Call,
    HangupMiddleware,
    Outcome,
    Policy,
    State,
    add_finalizer,
    before_success,
    current_call,
    protect,
    step,
)
from hangup._runtime import _jobs

from ..real import close_with_reset, wait_for

CLIENTS = 200

#: The states of calls whose client was told of an error.
ERRORS = {State.FAILED, State.TIMED_OUT, State.AMBIGUOUS}


@dataclass
class Seen:
    """What is known of one call, from both sides."""

    kind: str
    stays: bool = False  #: the client read to the end of the response
    began: bool = False
    registered: int = 0
    finalized: Counter[int] = field(default_factory=Counter)
    outcome: Outcome | None = None
    status: int | None = None
    complete: bool = False
    restarted: bool = False  #: a server stopped while the client waited
    request: str = ""  #: the request line
    way: str = ""  #: how the client was to leave
    head: bytes = b""  #: what a client that stayed received first
    size: int = 0  #: how much it received
    tail: bytes = b""  #: and last
    times: dict[str, float] = field(default_factory=dict)  #: seconds since the run began


class Server:
    """A server in a thread."""

    def __init__(self, thread: threading.Thread, stop: Callable[[], object], *, busy: Callable[[], object]) -> None:
        self.thread = thread
        self.stop = stop
        self.busy = busy


class Chaos:
    """One run. `violations` is what went wrong; each is printed as it comes.

    :param stop_at_first: end the run at the first.
    """

    def __init__(self, seed: int, server: str, *, stop_at_first: bool = False) -> None:
        self.seed = seed
        self.stop_at_first = stop_at_first
        self.started = time.monotonic()
        self.server = server
        self.dice = random.Random(seed)
        self.calls: dict[int, Seen] = {}
        self.begun = self.ended = self.observed = self.clients = self.restarts = 0
        self.states: Counter[str] = Counter()
        self.ways: Counter[str] = Counter()
        self.endings: Counter[str] = Counter()
        self.violations: list[str] = []
        self.number = 0
        self.generation = 0
        self.closing = False
        self.memory: list[int] = []

    # ------------------------------------------------------------------ the application

    def app(self) -> ASGIApp:
        kinds = [getattr(self, name) for name in dir(type(self)) if name.startswith("handle_")]
        routes: list[BaseRoute] = [
            Route("/" + fn.__name__[7:], self._endpoint(fn), methods=["GET", "POST"]) for fn in kinds
        ]
        routes += [WebSocketRoute("/echo", self.echo), WebSocketRoute("/ticker", self.ticker)]
        inner = Starlette(
            routes=routes,
            middleware=[
                Middleware(
                    HangupMiddleware,
                    policy=self._policy,
                    observers=[self._observe],
                    # Those that are to hang have a limit of their own; the others must not fail by a machine that
                    # stalls for seconds, as busy ones do.
                    finalizer_timeout=60,
                    finalizer_budget=120,
                )
            ],
        )

        async def counting(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                await inner(scope, receive, send)
                return
            self.begun += 1
            try:
                await inner(scope, receive, send)
            finally:
                self.ended += 1

        return counting

    def _policy(self, scope: Scope) -> Policy:
        query = dict(part.split("=") for part in scope["query_string"].decode().split("&") if "=" in part)
        timeout = int(query["t"]) / 1000 if "t" in query else None
        return Policy(query.get("p", "cancel"), grace=0.2, timeout=timeout)

    def _observe(self, outcome: Outcome) -> None:
        self.observed += 1
        self.states[f"{outcome.state} {outcome.cause or ''}".strip()] += 1

    def _endpoint(self, fn: Callable[..., Any]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            self._register(request)
            response: Response = await fn(request)
            return response

        def plain(request: Request) -> Response:
            self._register(request)
            response: Response = fn(request)
            return response

        return endpoint if asyncio.iscoroutinefunction(fn) else plain

    def _register(self, request: HTTPConnection) -> None:
        # A connection may have waited for a server through a restart, and its client be forgotten.
        seen = self.calls.setdefault(int(request.query_params["n"]), Seen("from before"))
        seen.began = True
        seen.times["began"] = self.now()
        dice = random.Random(f"{self.seed} {request.query_params['n']}")

        def record(outcome: Outcome) -> None:
            seen.outcome = outcome
            seen.times["finalized"] = self.now()
            seen.finalized[-1] += 1

        add_finalizer(self._async(record), name="record")
        seen.registered = dice.choice([0, 1, 1, 2, 3])
        for number in range(seen.registered):
            finalizer = self._finalizer(seen, number, dice.random())
            add_finalizer(finalizer, name="chaos", timeout=0.2 if finalizer.__name__ == "hang" else None)

    @staticmethod
    def _async(fn: Callable[[Outcome], None]) -> Callable[[Outcome], Any]:
        async def run(outcome: Outcome) -> None:
            fn(outcome)

        return run

    @staticmethod
    def _finalizer(seen: Seen, number: int, luck: float) -> Callable[[], Any]:
        async def work() -> None:
            seen.finalized[number] += 1
            await asyncio.sleep(0.001)

        async def fail() -> None:
            seen.finalized[number] += 1
            raise RuntimeError("a finalizer fails, at random")

        async def hang() -> None:
            seen.finalized[number] += 1
            await asyncio.sleep(60)

        def plain() -> None:
            seen.finalized[number] += 1

        return fail if luck < 0.03 else hang if luck < 0.05 else plain if luck < 0.2 else work

    async def handle_quick(self, request: Request) -> Response:
        return PlainTextResponse("quick")

    async def handle_slow(self, request: Request) -> Response:
        with step("slow"):
            await asyncio.sleep(0.1)
        return PlainTextResponse("slow")

    async def handle_stream(self, request: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            try:
                for _ in range(10):
                    yield b"x" * 1000
                    await asyncio.sleep(0.01)
            finally:
                await asyncio.sleep(0.001)

        return StreamingResponse(parts())

    async def handle_flood(self, request: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            for _ in range(50):
                yield b"x" * 65536

        return StreamingResponse(parts())

    async def handle_sync_stream(self, request: Request) -> Response:
        def parts() -> Iterator[bytes]:
            for _ in range(5):
                yield b"x" * 100
                time.sleep(0.01)

        return StreamingResponse(parts())

    def handle_thread(self, request: Request) -> Response:
        time.sleep(0.02)
        return PlainTextResponse("thread")

    async def handle_upload(self, request: Request) -> Response:
        return PlainTextResponse(str(len(await request.body())))

    async def handle_unread(self, request: Request) -> Response:
        await asyncio.sleep(0.05)
        return PlainTextResponse("unread")

    async def handle_hook(self, request: Request) -> Response:
        @before_success
        async def commit() -> None:
            await asyncio.sleep(0.005)

        return PlainTextResponse("saved")

    async def handle_bad_hook(self, request: Request) -> Response:
        @before_success
        async def bad_commit() -> None:
            raise RuntimeError("a hook fails, as it should")

        return PlainTextResponse("saved")

    async def handle_effect(self, request: Request) -> Response:
        async def undo() -> None:
            await asyncio.sleep(0.001)

        async with step("call tool", effect=True, cancel=undo):
            await asyncio.sleep(0.03)
        with step("pay", effect=True):
            await asyncio.sleep(0.03)
        return PlainTextResponse("paid")

    async def handle_children(self, request: Request) -> Response:
        current_call().start_soon(asyncio.sleep, 0.02)
        current_call().start_soon(asyncio.sleep, 0.04)
        return PlainTextResponse("children")

    async def handle_protected(self, request: Request) -> Response:
        with protect():
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.02)
        return PlainTextResponse("protected")

    async def handle_background(self, request: Request) -> Response:
        return PlainTextResponse("later", background=BackgroundTask(asyncio.sleep, 0.05))

    async def handle_swallow(self, request: Request) -> Response:
        for _ in range(3):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.03)
        return PlainTextResponse("swallowed")

    async def handle_error(self, request: Request) -> Response:
        await asyncio.sleep(0.01)
        raise RuntimeError("a handler fails, as it should")

    async def handle_token(self, request: Request) -> Response:
        with anyio.move_on_after(0.05):
            await current_call().token.wait()
        return PlainTextResponse("token")

    async def handle_suicide(self, request: Request) -> Response:
        current_call().cancel("stop button")
        await asyncio.sleep(60)
        raise AssertionError

    async def echo(self, socket: WebSocket) -> None:
        self._register(socket)
        await socket.accept()
        async for text in socket.iter_text():
            await socket.send_text(text)

    async def ticker(self, socket: WebSocket) -> None:
        self._register(socket)
        await socket.accept()
        for _ in range(10):
            await socket.send_text("tick")
            await asyncio.sleep(0.01)
        await socket.close()

    # ------------------------------------------------------------------ the clients

    async def client(self, port: int, until: float) -> None:
        kinds = [name[7:] for name in dir(type(self)) if name.startswith("handle_")]
        while time.monotonic() < until and not self.closing:
            if self.dice.random() < 0.15:
                await self.talk(port, self.dice.choice(["echo", "ticker"]))
            else:
                await self.visit(port, self.dice.choice(kinds))

    async def talk(self, port: int, kind: str) -> None:
        """A WebSocket: it says hello, perhaps something, and leaves, perhaps with a goodbye."""
        dice = self.dice
        way = dice.choice(["close frame", "FIN", "RST"])
        self.clients += 1
        self.ways[f"WebSocket, {way}"] += 1
        _, data = self.request(kind, dice, last=False)
        upgrade = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: "
        data = data[:-2] + upgrade + b"dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            # A client that says anything before it is accepted is answered 400 by hypercorn, whose application is never
            # told that it has gone: `WSStream.handle` drops the event. See `test_chaos`.
            accepted = self.server != "hypercorn"
            try:
                writer.write(data)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(dice.random() * 0.15):
                        accepted = bool(await reader.read(4096))
                        for _ in range(dice.randint(0, 5)):
                            writer.write(_frame(1, b"hello"))
                            await reader.read(4096)
                        while await reader.read(4096):
                            pass
                if way == "close frame" and accepted:
                    writer.write(_frame(8, struct.pack("!H", dice.choice([1000, 1001, 4000]))))
                    await writer.drain()
            finally:
                if way == "RST":
                    writer.transport.abort()
                writer.close()

    def request(self, kind: str, dice: random.Random, *, last: bool) -> tuple[Seen, bytes]:
        self.number += 1
        seen = self.calls[self.number] = Seen(kind)
        query = f"n={self.number}"
        if dice.random() < 0.15:
            query += f"&t={dice.choice([5, 20, 50, 200])}"
        if dice.random() < 0.2:
            query += "&p=" + dice.choice(["signal", "finish"])
        size = dice.choice([10, 1000, 100_000]) if kind in {"upload", "unread"} else 0
        head = f"{'POST' if size else 'GET'} /{kind}?{query} HTTP/1.1\r\nHost: x\r\n"
        seen.request = head.partition("\r\n")[0]
        head += f"Content-Length: {size}\r\n" if size else ""
        head += "Connection: close\r\n\r\n" if last else "\r\n"
        return seen, head.encode() + b"y" * size

    async def visit(self, port: int, kind: str) -> None:
        dice, loop = self.dice, asyncio.get_running_loop()
        way = dice.choice(["stay", "stay", "FIN", "RST", "half-close", "stall", "mid-upload", "pipeline", "at once"])
        if way == "mid-upload":
            kind = dice.choice(["upload", "unread"])
        sock = socket.socket()
        sock.setblocking(False)
        self.clients += 1
        self.ways[way] += 1
        generation = self.generation
        seen, data = self.request(kind, dice, last=way != "pipeline")
        seen.way = way
        if way == "pipeline":
            data += self.request("quick", dice, last=True)[1]
        elif way == "mid-upload":
            data = data[: -dice.randint(1, 9)]
        try:
            await loop.sock_connect(sock, ("127.0.0.1", port))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(10 if way == "stay" else dice.random() * 0.15):
                    await loop.sock_sendall(sock, data)
                    if way == "half-close":
                        sock.shutdown(socket.SHUT_WR)
                    if way == "stay":
                        await self.read(sock, seen)
                    elif way == "stall":
                        await asyncio.sleep(60)
                    elif way != "at once":
                        while await loop.sock_recv(sock, 65536):
                            pass
        except OSError:
            seen.stays = False
        finally:
            seen.times["left"] = self.now()
            seen.restarted = self.generation != generation or self.closing
            if way in {"RST", "stall"} or dice.random() < 0.1:
                close_with_reset(sock)
            sock.close()

    @staticmethod
    async def read(sock: socket.socket, seen: Seen) -> None:
        """Read a response to its end, and see whether it has one."""
        loop, data = asyncio.get_running_loop(), b""
        while part := await loop.sock_recv(sock, 65536):
            seen.size += len(part)
            data = data + part if len(data) < 4096 else data[:4096] + (data[4096:] + part)[-16:]
        seen.stays = True
        seen.head, seen.tail = data[:300], data[-16:]
        head, _, body = data.partition(b"\r\n\r\n")
        if head.startswith(b"HTTP/1.1 "):
            seen.status = int(head[9:12])
            length = next((int(h[15:]) for h in head.lower().split(b"\r\n") if h.startswith(b"content-length:")), None)
            seen.complete = len(body) == length if length is not None else body.endswith(b"0\r\n\r\n")

    # ------------------------------------------------------------------ the servers

    @contextlib.contextmanager
    def serving(self, listener: socket.socket) -> Iterator[Server]:
        """Serve until the block ends, or `Server.stop` is called."""
        run = self._uvicorn if self.server == "uvicorn" else self._hypercorn
        with run(listener.dup()) as server:
            yield server

    @contextlib.contextmanager
    def _uvicorn(self, listener: socket.socket) -> Iterator[Server]:
        config = uvicorn.Config(
            self.app(),
            log_config=None,
            access_log=False,
            http=self.dice.choice(["h11", "httptools"]),
            loop=self.dice.choice(["asyncio", "uvloop"]),
            timeout_graceful_shutdown=self.dice.choice([1, 5]),
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        wait_for(lambda: server.started or not thread.is_alive())

        def stop() -> None:
            server.should_exit = True

        try:
            yield Server(thread, stop, busy=lambda: server.server_state.tasks)
        finally:
            stop()
            thread.join(30)
            if thread.is_alive():
                self.violated("uvicorn did not stop")
            listener.close()

    @contextlib.contextmanager
    def _hypercorn(self, listener: socket.socket) -> Iterator[Server]:
        from hypercorn.asyncio import serve
        from hypercorn.config import Config

        config = Config()
        config.bind = [f"fd://{listener.detach()}"]
        config.errorlog = config.accesslog = None
        config.graceful_timeout = self.dice.choice([1, 5])
        stop = threading.Event()
        loops: list[asyncio.AbstractEventLoop] = []

        async def main() -> None:
            loops.append(asyncio.get_running_loop())
            await serve(self.app(), config, shutdown_trigger=lambda: asyncio.to_thread(stop.wait))  # type: ignore[arg-type]

        thread = threading.Thread(target=asyncio.run, args=(main(),))
        thread.start()
        wait_for(lambda: loops)
        try:
            yield Server(thread, stop.set, busy=lambda: self.begun > self.ended)
        finally:
            stop.set()
            thread.join(30)
            if thread.is_alive():
                self.violated("hypercorn did not stop")

    # ------------------------------------------------------------------ the run

    def run(self, seconds: float, report_every: float = 60) -> None:
        """Clients for ``seconds``, over as many servers as fit."""
        threads = files = 0  # as the first server leaves them
        uvloop.new_event_loop().close()  # libuv opens a pipe for the process, at the first loop of its own
        end = time.monotonic() + seconds
        report = time.monotonic() + report_every
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener, self._watching_the_log():
            port = listener.getsockname()[1]
            while time.monotonic() < end and not (self.stop_at_first and self.violations):
                ending = self.dice.choice(["idle", "at work", "under the clients"])
                life = min(self.dice.uniform(2, 6), max(end - time.monotonic(), 0.5))
                self.endings[ending] += 1
                with self.serving(listener) as server:
                    asyncio.run(self._visits(port, life, server, ending == "under the clients"))
                    if ending == "idle":
                        with contextlib.suppress(TimeoutError):
                            wait_for(lambda server=server: not server.busy(), timeout=15)  # type: ignore[misc]
                    self.closing = True
                self.generation += 1
                self.closing = False
                self.restarts += 1
                if not self.memory:
                    threads, files = threading.active_count(), _files()
                with contextlib.suppress(TimeoutError):
                    wait_for(lambda: threading.active_count() <= threads, timeout=15)  # noqa: B023 # called here
                self.judge()
                self.check(threading.active_count() <= threads, f"{threading.active_count() - threads} threads left")
                self.check(_files() <= files, f"{_files() - files} files left open")
                self.memory.append(_resident())
                if time.monotonic() > report:
                    report += report_every
                    print(self, flush=True)
        if len(self.memory) >= 12:
            grown = growth(self.memory)
            self.check(grown < 32 * 2**20, f"memory grew by {grown >> 20} MiB: {[size >> 20 for size in self.memory]}")

    async def _visits(self, port: int, seconds: float, server: Server, stop: bool) -> None:
        """Have the clients come for ``seconds``; if ``stop``, the server stops then, with all of them there."""
        until = time.monotonic() + (seconds + 60 if stop else seconds)
        async with asyncio.TaskGroup() as tasks:
            clients = [tasks.create_task(self.client(port, until)) for _ in range(CLIENTS)]
            if stop:
                await asyncio.sleep(seconds)
                self.closing = True
                server.stop()
                await asyncio.to_thread(server.thread.join, 30)
                for client in clients:  # those that wait for the next server
                    client.cancel()

    @contextlib.contextmanager
    def _watching_the_log(self) -> Iterator[None]:
        chaos = self

        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                finalizer, hook = getattr(record, "hangup_finalizer", None), getattr(record, "hangup_hook", None)
                if finalizer != "chaos" and (hook or "").rpartition(".")[2] != "bad_commit":
                    text = logging.Formatter().format(record)
                    chaos.violated(f"{record.levelname} of ours: {text}")

        handler = Handler(logging.WARNING)
        logger = logging.getLogger("hangup")
        logger.addHandler(handler)
        propagate, logger.propagate = logger.propagate, False
        others = [logging.getLogger(name) for name in ("uvicorn.error", "asyncio", "hypercorn.error")]
        levels = [other.level for other in others]
        for other in others:
            other.setLevel(logging.CRITICAL + 1)  # handlers that fail as they should, and servers that are stopped
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.propagate = propagate
            for other, level in zip(others, levels, strict=True):
                other.setLevel(level)

    def check(self, holds: object, text: str) -> None:
        if not holds:
            self.violated(text)

    def violated(self, text: str) -> None:
        """Something is wrong: say so now, whatever becomes of the run."""
        self.violations.append(text)
        if len(self.violations) <= 50:
            print(f"VIOLATION at {self.now():.3f} s, seed {self.seed}, {self.server}: {text}", flush=True)

    def now(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.started

    def judge(self) -> None:
        """The server has stopped: see what came of its calls."""
        self.check(self.begun == self.ended, f"{self.begun} calls begun, {self.ended} ended")
        self.check(self.begun == self.observed, f"{self.begun} calls begun, {self.observed} outcomes")
        self.check(not _jobs, f"{len(_jobs)} jobs left")
        while self.calls:
            self._judge_call(*self.calls.popitem())
        alive = _calls_alive()
        if alive:
            print(f"at {self.now():.3f} s {len(alive)} calls had to be collected again", flush=True)
            with contextlib.suppress(TimeoutError):
                wait_for(lambda: not _calls_alive(), timeout=15)
            alive = _calls_alive()
        self.check(not alive, f"{len(alive)} calls are still in memory: {alive[:3]}")

    def _judge_call(self, number: int, seen: Seen) -> None:
        # Of its own, because what was seen holds the outcome, its error, and with the traceback the call.
        for wrong in _wrong(seen):
            self.violated(f"call {number}, {seen.kind}: {wrong}; {seen}")

    def __str__(self) -> str:
        memory = f"{self.memory[0] >> 20} to {self.memory[-1] >> 20} MiB" if self.memory else "?"
        return (
            f"chaos on {self.server}, seed {self.seed}: {self.clients} clients {dict(self.ways)}, {self.begun} calls "
            f"{dict(self.states)}, {self.restarts} servers {dict(self.endings)}, memory {memory}, "
            f"{len(self.violations)} violations"
        )


def _frame(opcode: int, payload: bytes) -> bytes:
    """A WebSocket frame of a client. Its mask is zero, so the payload goes as it is."""
    return bytes([0x80 | opcode, 0x80 | len(payload)]) + b"\0\0\0\0" + payload


def _wrong(seen: Seen) -> Iterator[str]:
    """What is wrong with one call."""
    if not seen.began:
        return
    outcome = seen.outcome
    if outcome is None or seen.finalized.pop(-1) != 1:
        yield "no record, or more than one"
        return
    if seen.finalized != Counter(range(seen.registered)):
        yield f"finalizers ran {dict(seen.finalized)} times"
    if not seen.stays or seen.restarted:
        return
    if seen.complete and seen.status == 200 and outcome.state is not State.COMPLETED:
        # A request to stop means something also after the response: it may end a background task.
        yield "the client saw a whole response"
    if outcome.state is State.COMPLETED and outcome.delivered and not seen.complete:
        yield "the client saw no whole response"
    if seen.status is not None and seen.status >= 500 and outcome.state not in ERRORS:
        yield "the client saw an error"
    if outcome.status_code not in {seen.status, None if outcome.error else seen.status} and seen.complete:
        yield "the client saw another status"


def _calls_alive() -> list[Call]:
    """Our calls in memory. ``gc.collect()`` does nothing while a thread that winds up collects: look more than once."""
    gc.collect()
    calls = [thing for thing in gc.get_objects() if isinstance(thing, Call)]
    return [call for call in calls if call.scope["query_string"].startswith(b"n=")]  # and not those of other tests


def growth(sizes: list[int]) -> int:
    """By how much memory grew once it was warm: from the second quarter of ``sizes`` to the last, by their medians.

    Each server brings threads, and each thread an arena of the allocator's, so single sizes say little.
    """
    quarter = len(sizes) // 4
    return int(statistics.median(sizes[-quarter:]) - statistics.median(sizes[quarter : 2 * quarter]))


def _files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--server", choices=["uvicorn", "hypercorn"], default="uvicorn")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--stop-at-first", action="store_true", help="end at the first violation")
    options = parser.parse_args()
    chaos = Chaos(options.seed, options.server, stop_at_first=options.stop_at_first)
    print(f"chaos on {chaos.server}, seed {chaos.seed}, {options.minutes:g} minutes", flush=True)
    chaos.run(options.minutes * 60)
    print(chaos)
    raise SystemExit(bool(chaos.violations))


if __name__ == "__main__":
    main()
