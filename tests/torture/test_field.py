"""What people have reported, one test for each kind, with the value that would have been right. See `field`.

The numbers in the docstrings are those of our list of reports. Each case is also played without hangup, where it has to
come out wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
from opentelemetry import context as otel_context
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from hangup import Call, Outcome, add_finalizer, current_call
from hangup.starlette import closing_stream
from hangup.testing import Peer, Quirks, WebSocketPeer

from ..helpers import END, START, answer, chunk
from ..processes import Client, Server
from ..real import Serving, read_all, reset, serving, wait_for
from .chaos import _frame
from .field import LATE, SOON, Site, case

GONE = "canceled client_disconnect"


def app_of(closing: contextlib.AsyncExitStack | None = None, **endpoints: Any) -> Starlette:
    """An application of ``endpoints``. It closes ``closing`` at its end, if its server has a lifespan."""

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        async with closing or contextlib.AsyncExitStack():
            yield

    routes = [Route(f"/{name}", fn, methods=["GET", "POST"]) for name, fn in endpoints.items()]
    return Starlette(routes=routes, lifespan=lifespan)


def get(server: Serving, path: str) -> tuple[int, bytes]:
    """The status and the body of the answer."""
    head, _, body = read_all(server.get(path, "Connection: close")).partition(b"\r\n\r\n")
    return int(head[9:12]), body


def read_until(client: socket.socket, part: bytes) -> bytes:
    data = b""
    while part not in data:
        more = client.recv(65536)
        assert more, data
        data += more
    return data


def hang_up_at_work(site: Site, server: Serving, path: str = "/run") -> None:
    """A client that leaves while the handler works."""
    client = server.get(path)
    wait_for(lambda: "working" in site.events)
    client.close()


# ---------------------------------------------------------------------- A: not seen, or seen as a success


@case("B01", right={"state": GONE, "rows": ["canceled"]}, wrong={"state", "rows"})
def test_an_aborted_stream_is_no_success(site: Site) -> dict[str, Any]:
    """Outside of the response it looks like one that was finished, and so it is written down."""
    rows: list[str] = []

    async def run(request: Request) -> Response:
        def close(outcome: Outcome) -> None:
            rows.append(outcome.state)

        async def complete() -> None:
            rows.append("completed")

        async def parts() -> AsyncIterator[bytes]:
            for _ in range(200):
                yield b"part"
                await asyncio.sleep(0.02)

        if site.hangup:
            add_finalizer(close)
        return StreamingResponse(parts(), background=BackgroundTask(complete))

    with site.serving(app_of(run=run)) as server:
        client = server.get("/run")
        read_until(client, b"part")
        client.close()
        state = site.state
        site.happens(lambda: rows)
    return {"state": state, "rows": rows}


@case("B02", right={"noticed": True, "state": GONE}, wrong={"noticed", "state"})
def test_middlewares_in_between_hide_nothing(site: Site) -> dict[str, Any]:
    """One that does nothing, of Starlette's `BaseHTTPMiddleware`, and whoever polls polls for ever."""

    async def run(request: Request) -> Response:
        site.note("working")
        with site.interruptible():
            while not site.released.is_set():
                if await request.is_disconnected():
                    site.note("interrupted")
                    break
                await asyncio.sleep(0.01)
        return PlainTextResponse("done")

    async def nothing(request: Request, call_next: RequestResponseEndpoint) -> Response:
        return await call_next(request)

    app = Starlette(routes=[Route("/run", run)], middleware=[Middleware(BaseHTTPMiddleware, dispatch=nothing)] * 2)
    with site.serving(app) as server:
        hang_up_at_work(site, server)
        return {"noticed": site.has("interrupted"), "state": site.state}


@case("B03", right={"interrupted": True, "state": GONE}, wrong={"interrupted", "state"})
def test_a_plain_handler_does_not_work_for_nobody(site: Site) -> dict[str, Any]:
    async def run(request: Request) -> Response:
        await site.work()
        return PlainTextResponse("done")

    with site.serving(app_of(run=run)) as server:
        hang_up_at_work(site, server)
        return {"interrupted": site.has("interrupted"), "state": site.state}


@case("B04", right={"upstream told": True, "next": 200}, wrong={"upstream told", "next"})
def test_the_upstream_of_a_proxy_is_told_and_its_connection_free_again(site: Site) -> dict[str, Any]:
    async def upstream(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/slow":
            site.note("working")
            while (await receive())["type"] != "http.disconnect":
                pass
            site.note("upstream told")
        await answer(send)

    closing = contextlib.AsyncExitStack()
    clients: list[httpx.AsyncClient] = []

    async def run(request: Request) -> Response:
        if not clients:
            timeout = httpx.Timeout(60, pool=SOON if site.hangup else LATE)
            client = httpx.AsyncClient(limits=httpx.Limits(max_connections=1), timeout=timeout)
            clients.append(await closing.enter_async_context(client))
        try:
            got = await clients[0].get(f"{slow.url}/{request.query_params['path']}")
        except httpx.PoolTimeout:
            return PlainTextResponse("no connection is free", 503)
        return PlainTextResponse("done", got.status_code)

    app = app_of(closing, run=run)
    with serving(upstream, timeout_graceful_shutdown=1) as slow, site.serving(app, lifespan="on") as server:
        hang_up_at_work(site, server, "/run?path=slow")
        told = site.has("upstream told")
        status, _ = get(server, "/run?path=quick")
    return {"upstream told": told, "next": status}


@case("B07", right={"tasks": 0, "left": 0}, wrong={"tasks"}, against="recipe")
def test_a_short_request_starts_nothing(site: Site) -> dict[str, Any]:
    """A task group and a watcher for each request have cost a framework half of its throughput."""
    tasks: list[object] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send)

    async def run() -> tuple[int, int]:
        loop, mounted = asyncio.get_running_loop(), site.mounted(app)

        def factory(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
            tasks.append(coro.__qualname__)
            return asyncio.Task(coro, loop=loop, **options)

        loop.set_task_factory(factory)
        for _ in range(100):
            peer = Peer()
            await mounted(peer.scope, peer.receive, peer.send)
        return len(tasks), len(asyncio.all_tasks()) - 1

    started, left = asyncio.run(run())
    return {"tasks": started, "left": left}


# ---------------------------------------------------------------------- B: cleanup is cancelled again


def _play_row(site: Site, how: str) -> dict[str, Any]:
    rows = {"run": "running"}
    at_end: list[str] = []

    async def close() -> None:
        await asyncio.sleep(0.01)  # the database
        rows["run"] = "canceled" if rows["run"] == "running" else f"{rows['run']} twice"

    async def run(request: Request) -> Response:
        if site.hangup and how == "finalizer":
            add_finalizer(close)

        async def events() -> AsyncIterator[bytes]:
            try:
                yield b"data: hello\n\n"
                await site.work()
            finally:
                if how == "finally" or not site.hangup:
                    await close()

        return StreamingResponse(events(), media_type="text/event-stream")

    inner = app_of(run=run)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await mounted(scope, receive, send)
        finally:
            at_end.append(rows["run"])

    mounted = site.mounted(inner)
    with serving(app, timeout_graceful_shutdown=1) as server:
        hang_up_at_work(site, server)
        wait_for(lambda: at_end)
    return {"row": at_end[0]}


@case("B08", right={"row": "canceled"}, wrong={"row"})
def test_a_cleanup_that_awaits_has_ended_when_the_request_ends(site: Site) -> dict[str, Any]:
    return _play_row(site, "finally")


@case("B42", right={"row": "canceled"}, wrong={"row"})
def test_a_row_never_says_running_for_ever(site: Site) -> dict[str, Any]:
    return _play_row(site, "finalizer")


@case("B09", right={"events": ["cleaning", "lock released", "torn down"]}, wrong={"events"})
def test_a_shutdown_does_not_cut_a_cleanup_off(site: Site) -> dict[str, Any]:
    """anyio's shield holds against anyio. A server cancels the task."""

    async def clean_up() -> None:
        site.note("cleaning")
        with anyio.CancelScope(shield=True):
            await asyncio.sleep(0.3 if site.hangup else SOON)  # longer than the server waits
        site.note("lock released")

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        yield
        site.note("torn down")

    async def run(request: Request) -> Response:
        site.finally_(clean_up)

        async def parts() -> AsyncIterator[bytes]:
            try:
                yield b"part"
                await asyncio.sleep(60)
            finally:
                if not site.hangup:
                    await clean_up()

        return StreamingResponse(parts())

    app = Starlette(routes=[Route("/run", run)], lifespan=lifespan)
    with site.serving(app, lifespan="on", timeout_graceful_shutdown=0) as server:
        client = server.get("/run")
        read_until(client, b"part")
        client.close()
        wait_for(lambda: "cleaning" in site.events)
    return {"events": site.events}


@case(
    "B10",
    right={"swallowed few": True, "warnings": 1, "unresponsive": True, "state": GONE},
    wrong={"swallowed few", "warnings", "unresponsive"},
)
def test_a_generator_that_swallows_its_cancellation_costs_no_core(site: Site) -> dict[str, Any]:
    swallowed = 0

    async def run(request: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            nonlocal swallowed
            yield b"part"
            while not site.released.is_set():
                try:
                    await asyncio.sleep(0.02)
                except asyncio.CancelledError:
                    swallowed += 1

        return StreamingResponse(parts())

    with site.serving(app_of(run=run), options={"grace": 0.02}) as server:
        client = server.get("/run")
        read_until(client, b"part")
        client.close()
        site.happens(lambda: site.warnings)
        few = swallowed <= 3
        site.release()
        state = site.state
    unresponsive = any(outcome.unresponsive for outcome in site.outcomes)
    return {"swallowed few": few, "warnings": len(site.warnings), "unresponsive": unresponsive, "state": state}


@case("B11", right={"served": 6, "free": 2}, wrong={"served", "free"})
def test_a_connection_goes_back_to_its_pool(site: Site) -> dict[str, Any]:
    """It has to be rolled back first, which awaits."""
    free = 2

    @asynccontextmanager
    async def connection() -> AsyncIterator[None]:
        nonlocal free
        while free == 0:
            await asyncio.sleep(0.005)
        free -= 1
        try:
            yield
        finally:
            await asyncio.sleep(0.005)
            free += 1

    async def run(request: Request) -> Response:
        async def rows() -> AsyncIterator[bytes]:
            async with connection():
                yield b"row"
                await site.work()

        return StreamingResponse(rows())

    served = 0
    with site.serving(app_of(run=run)) as server:
        for _ in range(6):
            client = server.get("/run")
            client.settimeout(SOON if site.hangup else LATE)
            with client, contextlib.suppress(TimeoutError):
                read_until(client, b"row")
                served += 1
                continue
            break
        site.happens(lambda: free == 2)
        return {"served": served, "free": free}


# ---------------------------------------------------------------------- C: generators


def _play_slow_reader(site: Site, *, scope: bool) -> dict[str, Any]:
    """A client that does not read, until the time is up: its generator stands at its ``yield`` then."""
    own: list[bool] = []

    async def rows() -> AsyncIterator[bytes]:
        task = asyncio.current_task()
        token = otel_context.attach(otel_context.set_value("rows", "open"))
        async with contextlib.AsyncExitStack() as stack:
            if scope:
                await stack.enter_async_context(anyio.create_task_group())
            try:
                while not site.released.is_set():
                    yield b"x" * 262_144
            finally:
                own.append(asyncio.current_task() is task)
                otel_context.detach(token)

    async def run(request: Request) -> Response:
        return StreamingResponse(closing_stream(rows()) if site.hangup else rows())

    inner = app_of(run=run)

    async def timed(scope: Scope, receive: Receive, send: Send) -> None:
        async with asyncio.timeout(0.3):
            await inner(scope, receive, send)

    with site.serving(inner if site.hangup else timed, options={"timeout": 0.3}) as server:
        client = server.get("/run")
        state = site.state
        site.happens(lambda: own)
        gc.collect()
        client.close()
    # uvicorn says at ERROR that the response was not completed, which is true.
    errors = [error for error in site.errors if not error.startswith("uvicorn")]
    return {"own task": own, "errors": errors, "state": state}


SLOW_READER: dict[str, Any] = {"own task": [True], "errors": [], "state": "timed_out timeout"}


@case("B13", right=SLOW_READER, wrong={"own task", "errors"})
def test_a_span_around_a_yield_is_left_in_the_task_that_entered_it(site: Site) -> dict[str, Any]:
    return _play_slow_reader(site, scope=False)


@case("B32", right=SLOW_READER, wrong={"own task", "errors"})
def test_a_task_group_around_a_yield_is_left_in_the_task_that_entered_it(site: Site) -> dict[str, Any]:
    return _play_slow_reader(site, scope=True)


@case("B16", right={"produced": True, "errors": [], "state": GONE}, wrong={"produced"})
def test_a_generator_may_wait_for_its_producer_while_it_is_closed(site: Site) -> dict[str, Any]:
    async def run(request: Request) -> Response:
        async def produce() -> None:
            await asyncio.sleep(0.2)
            site.note("produced")

        async def parts() -> AsyncIterator[bytes]:
            producer = asyncio.create_task(produce())
            try:
                yield b"part"
                await site.work()
            finally:
                await producer

        return StreamingResponse(parts())

    with site.serving(app_of(run=run)) as server:
        hang_up_at_work(site, server)
        return {"produced": site.has("produced"), "errors": site.errors, "state": site.state}


# ---------------------------------------------------------------------- D: one channel, many readers


@case("B17", right={"status": 200, "body": b"hello world"}, wrong={"status", "body"})
def test_a_look_at_the_client_does_not_cost_the_body(site: Site) -> dict[str, Any]:
    async def run(request: Request) -> Response:
        await request.is_disconnected()
        try:
            async with asyncio.timeout(SOON if site.hangup else LATE):
                return Response(await request.body())
        except TimeoutError:
            return Response(b"no body", 400)

    with site.serving(app_of(run=run)) as server, server.connect() as client:
        head = b"POST /run HTTP/1.1\r\nHost: x\r\nContent-Length: 11\r\nConnection: close\r\n\r\n"
        client.sendall(head + b"hello world")
        head, _, body = read_all(client).partition(b"\r\n\r\n")
    return {"status": int(head[9:12]), "body": body}


@case("B17", right={"asked": False, "status": 401}, wrong={"asked"}, against="recipe")
def test_nobody_asks_for_a_body_that_the_application_refuses(site: Site) -> dict[str, Any]:
    """``Expect: 100-continue``: whoever reads first has the server ask for it."""

    async def run(request: Request) -> Response:
        await asyncio.sleep(0.1)  # five times as long as the watcher waits
        return PlainTextResponse("who are you?", 401)

    with site.serving(app_of(run=run)) as server, server.connect() as client:
        client.sendall(
            b"POST /run HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n"
        )
        data = read_all(client)
    return {"asked": b" 100 " in data, "status": int(data.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")[9:12])}


@case("B18", right={"says so": True}, wrong={"says so"})
def test_an_unread_body_hides_the_client_and_the_record_says_so(site: Site) -> dict[str, Any]:
    calls: list[Call] = []

    async def run(request: Request) -> Response:
        if site.hangup:
            calls.append(current_call())
        await site.work()
        return PlainTextResponse("done")

    def read_ahead() -> bool:
        return all(call._reader is not None and call._reader.suspended for call in calls)

    with site.serving(app_of(run=run)) as server:
        client = server.connect()
        client.settimeout(0.2)
        with client, contextlib.suppress(TimeoutError):
            client.sendall(b"POST /run HTTP/1.1\r\nHost: x\r\nContent-Length: 8000000\r\n\r\n" + b"x" * 8_000_000)
        wait_for(lambda: "working" in site.events and read_ahead())
        site.release()
        wait_for(lambda: site.states)
    return {"says so": any(outcome.detection_suspended for outcome in site.outcomes)}


@case("B20", right={"mailed": True, "state": "completed"}, wrong={"mailed"}, against="recipe")
def test_what_comes_after_the_response_is_not_interrupted(site: Site) -> dict[str, Any]:
    """Servers say disconnect on completion too, with the client still there."""

    async def run(request: Request) -> Response:
        async def mail() -> None:
            await asyncio.sleep(0.1)
            site.note("mailed")

        return JSONResponse({}, background=BackgroundTask(mail))

    with site.serving(app_of(run=run)) as server, server.get("/run") as client:
        read_until(client, b"{}")
        return {"mailed": site.has("mailed"), "state": site.state}


@case("B21", right={"came out": "TimeoutError", "state": "completed"}, wrong={"came out"})
def test_who_gives_up_waiting_for_a_message_is_not_told_that_the_client_left(site: Site) -> dict[str, Any]:
    """On a server whose ``receive`` makes a disconnect of its own cancellation."""

    class Liar(Peer):
        async def receive(self) -> Message:
            try:
                return await super().receive()
            except asyncio.CancelledError:
                return {"type": "http.disconnect"}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        try:
            site.note((await asyncio.wait_for(receive(), 0.05))["type"])
        except TimeoutError:
            site.note("TimeoutError")
        await answer(send)

    asyncio.run(Liar().run(site.mounted(app)))
    return {"came out": site.events[0], "state": site.state}


# ---------------------------------------------------------------------- E: transports


@case("B23", right={"state": GONE, "answer": b""}, wrong={"state"})
def test_a_half_closed_client_looks_as_if_it_had_left(site: Site) -> dict[str, Any]:
    """No server but hypercorn can tell it from one that has. The record says what was done, and so do the docs."""

    async def run(request: Request) -> Response:
        await site.work()
        return PlainTextResponse("done")

    with site.serving(app_of(run=run)) as server:
        client = server.get("/run")
        wait_for(lambda: "working" in site.events)
        client.shutdown(socket.SHUT_WR)
        return {"state": site.state, "answer": read_all(client)}


@case("B24", right={"ping": 200, "closed": True, "states": [GONE, "completed"]}, wrong={"ping", "states"})
def test_a_generator_that_never_awaits_does_not_freeze_its_worker(site: Site) -> dict[str, Any]:
    async def run(request: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            try:
                while not site.released.is_set():
                    yield b"x" * 1024
            finally:
                site.note("closed")

        return StreamingResponse(parts())

    async def ping(request: Request) -> Response:
        return PlainTextResponse("pong")

    with site.serving(app_of(run=run, ping=ping)) as server:
        client = server.get("/run")
        client.recv(1)
        reset(client)
        with server.get("/ping") as other:
            other.settimeout(SOON if site.hangup else LATE)
            try:
                status = int(read_until(other, b"\r\n")[9:12])
            except TimeoutError:
                status = 0
        if not site.hangup:
            site.release()
        wait_for(lambda: len(site.states) == 2)
        closed = site.has("closed")
    return {"ping": status, "closed": closed, "states": sorted(site.states)}


@case("B26", right={"of the server": GONE, "of its own": "failed", "escaped": None}, wrong={"of the server", "escaped"})
def test_an_oserror_is_a_disconnect_if_it_is_the_servers_and_a_failure_if_it_is_not(site: Site) -> dict[str, Any]:
    peer = Peer(quirks=Quirks(send_error=OSError(113, "No route to host"), latched=False))
    leaving = True

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if not leaving:
            raise OSError(28, "No space left on device")
        await send(START)
        await send(chunk(b"x"))
        peer.left = True  # and nobody is told
        for _ in range(5):
            await send(chunk(b"y"))
        await send(END)

    mounted = site.mounted(app)
    asyncio.run(peer.run(mounted))
    leaving = False
    asyncio.run(Peer().run(mounted))
    escaped = type(peer.error).__name__ if peer.error else None
    return {"of the server": site.states[0], "of its own": site.states[1], "escaped": escaped}


@case(
    "B28",
    right={f"{http} {loop}": (True, GONE) for http in ("h11", "httptools") for loop in ("asyncio", "uvloop")},
    wrong={"h11 asyncio", "httptools uvloop"},
)
def test_a_cleanup_runs_to_its_end_on_every_server(site: Site) -> dict[str, Any]:
    """Here on uvicorn; on the others it is one row of ``tests/everywhere``."""
    seen: dict[str, Any] = {}

    async def run(request: Request) -> Response:
        async def events() -> AsyncIterator[bytes]:
            try:
                yield b"data: hello\n\n"
                await site.work()
            finally:
                await asyncio.sleep(0.01)
                site.note("cleaned up")

        return StreamingResponse(events(), media_type="text/event-stream")

    for http in ("h11", "httptools"):
        for loop in ("asyncio", "uvloop"):
            with site.serving(app_of(run=run), http=http, loop=loop) as server:
                hang_up_at_work(site, server)
                state = site.state
                seen[f"{http} {loop}"] = ("cleaned up" in site.events, state)
            site.events.clear()
            site.states.clear()
    return seen


# ---------------------------------------------------------------------- F: what cancellation does not reach


@case(
    "B29",
    right={
        "early": [],
        "events": ["working", "committed"],
        "state": "completed client_disconnect",
        "delivered": [False],
    },
    wrong={"state", "delivered"},
)
def test_a_thread_is_waited_for_and_its_work_is_not_called_canceled(site: Site) -> dict[str, Any]:
    early: list[str] = []

    def run(request: Request) -> Response:
        site.note("working")
        site.released.wait(SOON)
        early.extend(site.states)
        site.note("committed")
        return PlainTextResponse("done")

    with site.serving(app_of(run=run)) as server:
        hang_up_at_work(site, server)
        time.sleep(0.2)  # it would be written by now
        site.release()
        state = site.state
    delivered = [outcome.delivered for outcome in site.outcomes]
    return {"early": early, "events": site.events, "state": state, "delivered": delivered}


@case("B31", right={"tree gone": True, "state": GONE}, wrong={"tree gone"})
def test_a_child_process_ends_with_its_children(site: Site) -> dict[str, Any]:
    command = ["sh", "-c", "echo $$; sleep 300 & echo $!; echo started; wait"]

    async def run(request: Request) -> Response:
        async def output() -> AsyncIterator[bytes]:
            if site.hangup:
                child = await current_call().open_process(command)
                assert child.stdout is not None
                async for part in child.stdout:
                    yield part
            else:
                process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
                assert process.stdout is not None
                async for part in process.stdout:
                    yield part

        return StreamingResponse(output())

    with site.serving(app_of(run=run)) as server:
        client = server.get("/run")
        text = read_until(client, b"started")
        pids = [int(line) for line in text.partition(b"\r\n\r\n")[2].split() if line.isdigit() and len(line) > 2]
        assert len(pids) == 2, text
        client.close()
        gone = site.happens(lambda: not any(_runs(pid) for pid in pids))
        for pid in pids:
            if _runs(pid):
                os.kill(pid, signal.SIGKILL)
        state = site.state
    return {"tree gone": gone, "state": state}


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# ---------------------------------------------------------------------- G: shutdown


def _play_shutdown(site: Site, *args: str) -> dict[str, Any]:
    target = "tests.torture.field_app:" + ("mounted" if site.hangup else "bare")
    with Server("uvicorn", target, "--fd", "{fd}", "--no-access-log", *args) as server:
        client = Client(server.port, "/sse")
        server.wait_for("running")
        stops = True
        if args:
            server.terminate()
        else:
            server.send_signal(signal.SIGTERM)
            stops = site.happens(lambda: server.count("torn down"))
        ended = stops and client.read_to_the_end().endswith(b"0\r\n\r\n")
        client.vanish()
        notes = [note for note in server.notes if note != "running"]
        return {"stops": stops, "clean end": ended, "notes": notes, "traceback": "Traceback" in server.errors}


@case(
    "B34",
    right={"stops": True, "clean end": True, "notes": ["canceled server_shutdown", "torn down"], "traceback": False},
    wrong={"stops", "clean end", "notes"},
)
def test_an_idle_stream_does_not_keep_its_server_from_stopping(site: Site) -> dict[str, Any]:
    seen = _play_shutdown(site)
    return {**seen, "notes": [note for note in seen["notes"] if note != "cleaned up"]}


@case(
    "B35",
    right={
        "stops": True,
        "clean end": True,
        "notes": ["cleaned up", "canceled server_shutdown", "torn down"],
        "traceback": False,
    },
    wrong={"notes", "clean end"},
)
def test_a_cleanup_does_not_find_its_pool_closed(site: Site) -> dict[str, Any]:
    """The server cancels when its limit is over, does not wait, and tears down."""
    return _play_shutdown(site, "--timeout-graceful-shutdown", "1")


# ---------------------------------------------------------------------- what handlers share


@case("B50", right={"then": 200}, wrong={"then"})
def test_clients_that_leave_give_back_what_they_have_of_a_pool(site: Site) -> dict[str, Any]:
    """Twenty handlers contend for two connections when their clients leave. The next request finds one.

    Those who wait leave first: a request that is handed its connection while it is cancelled loses it for httpx's
    pool, and that is so without us.
    """

    async def hang(request: Request) -> Response:
        site.note(f"upstream {request.query_params['of']}")
        await asyncio.to_thread(site.released.wait, SOON)
        return PlainTextResponse("late")

    async def quick(request: Request) -> Response:
        return PlainTextResponse("quick")

    async def run(request: Request) -> Response:
        site.note("working")
        path, query = request.query_params["path"], request.url.query
        try:
            answer = await pool.get(f"http://127.0.0.1:{upstream.port}/{path}?{query}")
        except httpx.PoolTimeout:
            return PlainTextResponse("the pool is exhausted", 503)
        return PlainTextResponse(answer.text, answer.status_code)

    timeout = httpx.Timeout(SOON, pool=SOON if site.hangup else LATE)
    pool = httpx.AsyncClient(limits=httpx.Limits(max_connections=2), timeout=timeout)
    closing = contextlib.AsyncExitStack()
    closing.push_async_callback(pool.aclose)
    with (
        serving(app_of(hang=hang, quick=quick)) as upstream,
        site.serving(app_of(closing, run=run), lifespan="on") as server,
    ):
        clients = {f"upstream {n}": server.get(f"/run?path=hang&of={n}") for n in range(20)}
        wait_for(lambda: site.events.count("working") == 20 and len(clients.keys() & set(site.events)) == 2)
        for waits in clients.keys() - set(site.events):
            clients[waits].close()
        site.happens(lambda: len(site.states) == 18)
        for connected in clients.keys() & set(site.events):
            clients[connected].close()
        site.happens(lambda: len(site.states) == 20)
        status, _ = get(server, "/run?path=quick")
        site.release()
    return {"then": status}


# ---------------------------------------------------------------------- H: the wrong word


@case("B39", right={"state": GONE, "errors": [], "next": 200}, wrong={"state", "errors"})
def test_an_upload_that_was_broken_off_is_no_server_error(site: Site) -> dict[str, Any]:
    async def run(request: Request) -> Response:
        site.note("working")
        return Response(await request.body())

    with site.serving(app_of(run=run)) as server:
        client = server.connect()
        client.sendall(b"POST /run HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nhello")
        wait_for(lambda: "working" in site.events)
        client.close()
        state = site.state
        if not site.hangup:
            wait_for(lambda: site.errors)
        status, _ = get(server, "/run")
    return {"state": state, "errors": site.errors, "next": status}


@case("B39", right={"states": [GONE, "failed"], "escaped": [None, "ExceptionGroup"]}, wrong={"states", "escaped"})
def test_a_group_of_exceptions_is_a_disconnect_if_that_is_why_it_was_raised(site: Site) -> dict[str, Any]:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        errors: list[Exception] = [ValueError("broken")]
        if scope["path"] == "/leave":
            peers[0].hang_up()
            assert (await receive())["type"] == "http.disconnect"
            errors = [ClientDisconnect(), OSError("closed")]
        raise ExceptionGroup("of a task group", errors)

    peers = [Peer(path="/leave"), Peer(path="/stay")]
    for peer in peers:
        asyncio.run(peer.run(site.mounted(app)))
    return {"states": site.states, "escaped": [type(peer.error).__name__ if peer.error else None for peer in peers]}


@case("B41", right={"ran on": True, "states": ["completed"], "delivered": [False]}, wrong={"ran on", "delivered"})
def test_a_durable_run_goes_on_without_its_viewer(site: Site) -> dict[str, Any]:
    """With policy ``finish``, which is a choice: the same hang-up is to stop other work."""

    async def run(request: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            site.note("working")
            for _ in range(10):
                yield b"part"
                await asyncio.sleep(0.02)
            site.note("ran on")

        return StreamingResponse(parts())

    with site.serving(app_of(run=run), options={"policy": "finish"}) as server:
        client = server.get("/run")
        read_until(client, b"part")
        client.close()
        ran_on = site.has("ran on")
        wait_for(lambda: site.states)
    return {"ran on": ran_on, "states": site.states, "delivered": [outcome.delivered for outcome in site.outcomes]}


@case("B45", right={"failures": 0, "aborts": 1, "booked": 3}, wrong={"aborts", "booked"})
def test_an_abort_is_booked_as_one_with_what_was_used_until_then(site: Site) -> dict[str, Any]:
    counts = {"failures": 0, "aborts": 0, "booked": 0}

    async def run(request: Request) -> Response:
        used = 0

        async def book(outcome: Outcome | None = None) -> None:
            await asyncio.sleep(0.001)
            counts["booked"] += used

        async def tokens() -> AsyncIterator[bytes]:
            nonlocal used
            try:
                for _ in range(3):
                    used += 1
                    yield b"token "
                await site.work()
            finally:
                if not site.hangup:
                    await book()

        site.finally_(book)
        return StreamingResponse(tokens())

    with site.serving(app_of(run=run)) as server:
        hang_up_at_work(site, server)
        state = site.state
        site.happens(lambda: counts["booked"])
    counts["failures"] = int(state.startswith("failed"))
    counts["aborts"] = int(state == GONE)
    return dict(counts)


# ---------------------------------------------------------------------- I: telemetry


@case(
    "B47",
    right={"ended": ["c", "b", "a"], "canceled": ["a", "b", "c"], "errors": [], "foreign parent": False},
    wrong={"canceled"},
)
def test_spans_in_flight_end_once_inner_first_and_say_that_they_were_canceled(site: Site) -> dict[str, Any]:
    """In a process of its own: there is one tracer provider in each."""
    command = [sys.executable, "-m", "tests.torture.field_app", site.mount]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


# ---------------------------------------------------------------------- J: shared clients, WebSockets


@case("B49", right={"wrong answers": 0}, wrong={"wrong answers"}, against="recipe")
def test_a_client_that_cannot_be_cancelled_is_not_with_policy_signal(site: Site) -> dict[str, Any]:
    """The reply to the one who left waits in the connection, and the next one gets it."""
    closing = contextlib.AsyncExitStack()
    connections: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    wrong = 0

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            await asyncio.sleep(0.05)
            writer.write(line)
        writer.close()

    async def run(request: Request) -> Response:
        if not connections:
            store = await asyncio.start_server(reply, "127.0.0.1", 0)
            connections.append(await asyncio.open_connection(*store.sockets[0].getsockname()))
            closing.callback(store.close)
            closing.callback(connections[0][1].close)
            request.app.state.lock = asyncio.Lock()
        async with request.app.state.lock:
            reader, writer = connections[0]
            writer.write(request.query_params["key"].encode() + b"\n")
            site.note("working")
            return Response((await reader.readline()).strip())

    with site.serving(app_of(closing, run=run), options={"policy": "signal"}, lifespan="on") as server:
        for number in range(5):
            site.events.clear()
            hang_up_at_work(site, server, f"/run?key=a{number}")
            wrong += get(server, f"/run?key=b{number}") != (200, f"b{number}".encode())
    return {"wrong answers": wrong}


@case("B53", right={"told": [True, True], "FIN": GONE, "goodbye": "completed client_disconnect"}, wrong={"told", "FIN"})
def test_a_websocket_that_only_sends_learns_how_its_client_left(site: Site) -> dict[str, Any]:
    async def run(ws: WebSocket) -> None:
        await ws.accept()
        await ws.send_text("tick")
        site.note("working")
        if site.hangup:
            await current_call().token.wait()
            site.note("told")
        else:
            await site.work()

    routes: list[BaseRoute] = [WebSocketRoute("/run", run)]
    told = []
    with site.serving(Starlette(routes=routes)) as server:
        for goodbye in (False, True):
            site.events.clear()
            client = server.connect()
            client.sendall(
                b"GET /run HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
            )
            wait_for(lambda: "working" in site.events)
            if goodbye:
                client.sendall(_frame(8, b"\x03\xe9"))
            client.close()
            told.append(site.has("told"))
        site.release()
        wait_for(lambda: len(site.states) == 2)
    return {"told": told, "FIN": site.states[0], "goodbye": site.states[1]}


@case(
    "B53",
    right={"stopped": "canceled server_shutdown", "before accept": GONE},
    wrong={"stopped", "before accept"},
)
def test_a_websocket_whose_server_stops_or_whose_client_never_was_accepted_is_canceled(site: Site) -> dict[str, Any]:
    async def run(peer: WebSocketPeer, *, accept: bool) -> str:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await receive()
            if accept:
                await send({"type": "websocket.accept"})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SOON if site.hangup else LATE):
                    await site.work()
            await send({"type": "websocket.close"})

        async with peer.calling(site.mounted(app, grace=0.02)):
            await peer.wait_for(lambda: peer.reads)
            while "working" not in site.events:
                await asyncio.sleep(0)
            if accept:
                peer.shut_down()
            else:
                peer.hang_up()
        site.events.clear()
        return site.states[-1]

    stopped = asyncio.run(run(WebSocketPeer(), accept=True))
    return {"stopped": stopped, "before accept": asyncio.run(run(WebSocketPeer(), accept=False))}
