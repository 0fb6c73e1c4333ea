"""`before_success`: no way to show success before the hooks have succeeded, and no success without them."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import anyio
import anyio.to_thread
import pytest
from anyio.lowlevel import checkpoint
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from hangup import HangupMiddleware, HookFailure, Outcome, State, before_success, current_call, protect
from hangup.testing import Peer, Quirks

from .helpers import END, START, Watch, answer, chunk, types, until, watched
from .real import read_all, serving, wait_for

pytestmark = pytest.mark.anyio


def start(status: int = 200, *headers: tuple[bytes, bytes], **more: Any) -> Message:
    return {"type": "http.response.start", "status": status, "headers": list(headers), **more}


def sized(length: int) -> Message:
    return start(200, (b"Content-Length", str(length).encode()))


HINT = {"type": "http.response.early_hint", "links": [b"</style.css>; rel=preload"]}
PUSH = {"type": "http.response.push", "path": "/style.css", "headers": []}
FILE = {"type": "http.response.zerocopysend", "file": 1, "more_body": True}
TRAILERS = {"type": "http.response.trailers", "headers": [(b"x-sum", b"1")]}


class Client(Peer):
    """A client that looks at how much it was promised, as real ones do."""

    @property
    def satisfied(self) -> bool:
        """Whether it has seen a whole success."""
        if self.status is None or self.status >= 400:
            return False
        headers = {name.lower(): value for m in self.sent for name, value in m.get("headers", ())}
        bodiless = self.scope["method"] == "HEAD" or self.status in {204, 304}
        length = headers.get(b"content-length")
        files = sum(m.get("count", math.inf) for m in self.sent if m["type"] == "http.response.zerocopysend")
        return self.complete or bodiless or (length is not None and len(self.body) + files >= int(length))


# ---------------------------------------------------------------------- phantoms


class Plain(BaseHTTPMiddleware):
    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        return await call_next(request)


async def save(request: Request) -> Response:
    @before_success
    async def write_row() -> None:
        if "fails" in request.query_params:
            raise HookFailure("try again", status=503)

    if "streams" in request.query_params:

        async def pieces() -> AsyncIterator[bytes]:
            yield b"sa"
            yield b"ved"

        return StreamingResponse(pieces(), headers={"content-length": "5"})
    if "empty" in request.query_params:
        return Response(status_code=204)
    return Response(b"saved")


@pytest.mark.parametrize("http", ["h11", "httptools"])
@pytest.mark.parametrize("kind", ["", "streams", "empty"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_response_sent_in_pieces_is_no_phantom_success(method: str, kind: str, http: str) -> None:
    outcomes: list[Outcome] = []
    app = Starlette(
        routes=[Route("/", save)],
        middleware=[Middleware(HangupMiddleware, observers=[outcomes.append]), Middleware(Plain)],
    )
    with serving(app, http=http) as server:
        for query, status in (("", b"204" if kind == "empty" else b"200"), ("&fails", b"503")):
            with server.connect() as client:
                client.sendall(f"{method} /?{kind}{query} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
                head, _, body = read_all(client).partition(b"\r\n\r\n")
            cut = query and kind == "streams" and method == "GET"  # its first piece was on its way
            assert head.split()[1] == (b"200" if cut else status)
            if cut:
                assert body == b"sa"
            elif method == "GET":
                assert body == (b"try again" if query else b"" if kind == "empty" else b"saved")
    assert [o.state for o in outcomes] == [State.COMPLETED, State.FAILED]


COMPLETE_BEFORE_THE_LAST_FRAME: dict[str, tuple[str, list[Message]]] = {
    "all bytes": ("GET", [sized(2), chunk(b"ab"), END]),
    "all bytes, and nothing": ("GET", [sized(2), chunk(b"ab"), chunk(b""), END]),
    "no bytes": ("GET", [sized(0), chunk(b""), END]),
    "HEAD": ("HEAD", [sized(2), chunk(b"ab"), END]),
    "HEAD of a stream": ("HEAD", [START, chunk(b"ab"), chunk(b"c"), END]),
    "204": ("GET", [start(204), chunk(b""), END]),
    "304": ("GET", [start(304), chunk(b""), END]),
    "trailers": ("GET", [start(200, trailers=True), {**END, "body": b"ab"}, TRAILERS]),
    "bytes and trailers": ("GET", [{**sized(2), "trailers": True}, chunk(b"ab"), END, TRAILERS]),
    "a push": ("GET", [sized(2), PUSH, chunk(b"ab"), END]),
    "hints": ("GET", [HINT, HINT, start(), END]),
    "a file": ("GET", [start(), {"type": "http.response.pathsend", "path": "/x"}]),
    "an open file": ("GET", [start(), {"type": "http.response.zerocopysend", "file": 1}]),
    "all of an open file": ("GET", [sized(2), FILE, END]),
    "enough of an open file": ("GET", [sized(2), {**FILE, "count": 2}, END]),
    "enough of two": ("GET", [sized(3), {**FILE, "count": 1}, {**FILE, "count": 2}, END]),
    "a piece and a file": ("GET", [sized(3), chunk(b"a"), {**FILE, "count": 2}, END]),
    "HEAD of an open file": ("HEAD", [START, {**FILE, "count": 2}, END]),
    "an open file and trailers": ("GET", [{**sized(2), "trailers": True}, {**FILE, "count": 2}, END, TRAILERS]),
}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("case", COMPLETE_BEFORE_THE_LAST_FRAME)
async def test_nothing_that_a_client_takes_for_the_whole_goes_out_before_the_hooks(case: str, fails: bool) -> None:
    method, messages = COMPLETE_BEFORE_THE_LAST_FRAME[case]
    seen: list[bool] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        @before_success
        async def write_row() -> None:
            seen.append(client.satisfied)
            await checkpoint()
            seen.append(client.satisfied)
            if fails:
                raise ValueError

        for message in messages:
            await send(message)
        assert current_call().status_code == messages[-1 if case == "hints" else 0].get("status", 200)

    client = Client(method=method)
    watch = Watch(app)
    await client.run(watch)
    assert client.error is None
    assert seen == [False, False]
    if fails:
        status = 200 if case in {"enough of two", "a piece and a file"} else 500  # what could not be all was on its way
        assert (client.status, client.satisfied) == (status, False)
        assert (watch.outcome.state, watch.outcome.status_code) == (State.FAILED, status)
    else:
        dropped = [m for m in messages if m.get("more_body") and "body" in m and (not m["body"] or method == "HEAD")]
        assert client.sent == [m for m in messages if m not in dropped]
        assert (watch.outcome.state, watch.outcome.delivered) == (State.COMPLETED, True)


@pytest.mark.parametrize("held", [False, True])
async def test_the_start_of_an_event_stream_is_held_only_if_it_may_be_all_there_is(held: bool) -> None:
    """A browser waits for it, and a proxy counts the seconds: the first event of an agent may take a minute."""
    content_type = (b"Content-Type", b"text/event-stream; charset=utf-8")
    headers = [content_type, *([(b"content-length", b"1")] if held else [])]
    seen: list[int | None] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        @before_success
        async def write_row() -> None:
            seen.append(client.status)

        await send(start(200, *headers))
        seen.append(client.status)
        await send(chunk(b"a"))
        await send(END)

    client = Client()
    watch = Watch(app)
    await client.run(watch)
    assert seen == ([None, None] if held else [200, 200])
    assert client.sent == [start(200, *headers), chunk(b"a"), END]
    assert watch.outcome.state is State.COMPLETED


async def test_pieces_that_do_not_complete_the_promised_length_are_not_held() -> None:
    seen: list[bytes] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        before_success(lambda: seen.append(client.body))
        await send(sized(3))
        for piece in (b"a", b"b", b"c"):
            await send(chunk(piece))
            seen.append(client.body)
        await send(END)

    client = Client()
    await client.run(Watch(app))
    assert seen == [b"a", b"ab", b"ab", b"ab"]
    assert (client.body, client.complete) == (b"abc", True)


@pytest.mark.parametrize("length", [None, 3])
async def test_a_hook_that_is_registered_after_the_start_holds_what_may_be_the_last_piece(length: int | None) -> None:
    seen: list[bytes] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START if length is None else sized(length))
        await send(chunk(b"a"))
        before_success(lambda: 1 / 0)
        for piece in (b"b", b"", b"c"):
            await send(chunk(piece))
            seen.append(client.body)
        await send(END)

    client = Client()
    watch = Watch(app)
    await client.run(watch)
    assert seen == ([b"ab", b"ab", b"abc"] if length is None else [b"a", b"a", b"ab"])
    assert not client.satisfied
    assert watch.outcome.state is State.FAILED


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([sized(1), {**END, "body": b"ab"}], "longer"),
        ([sized(1), chunk(b"a"), chunk(b"b"), END], "longer"),
        ([sized(3), chunk(b"ab"), END], "shorter"),
        ([sized(1), chunk(b""), {**FILE, "count": 2}], "longer"),
    ],
)
@pytest.mark.parametrize("copes", [False, True])
async def test_a_body_that_is_not_as_long_as_was_promised_is_no_success(
    messages: list[Message], error: str, copes: bool
) -> None:
    """Servers refuse its last frame, or none of it, and what the hooks have made a fact would stay one."""
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        before_success(lambda: log.append("row"))
        try:
            for message in messages:
                await send(message)
        except RuntimeError:
            if not copes:
                raise

    client = Client()
    watch = Watch(app)
    await client.run(watch)
    assert not client.satisfied
    assert log == []
    assert watch.outcome.state is State.FAILED
    assert copes or f"the body is {error} than its content-length" in str(client.error)


@pytest.mark.parametrize("http", ["h11", "httptools"])
@pytest.mark.parametrize("length", [4, 6])
def test_a_server_has_no_success_to_refuse(length: int, http: str) -> None:
    log: list[str] = []
    outcomes: list[Outcome] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        before_success(lambda: log.append("row"))
        await send(sized(length))
        await send({**END, "body": b"saved"})

    with serving(HangupMiddleware(app, observers=[outcomes.append]), http=http) as server:
        with server.connect() as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert read_all(client).split()[1] == b"500"
    assert log == []
    assert [o.state for o in outcomes] == [State.FAILED]


@pytest.mark.parametrize("copes", [False, True])
async def test_a_last_frame_that_the_server_refuses_for_what_nobody_foresaw_was_a_success(copes: bool) -> None:
    """It cannot be taken back. The rest depends on what the application makes of it, as in a background task."""
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        before_success(lambda: log.append("row"))
        await send(START)
        try:
            await send(END)
        except TypeError:
            if not copes:
                raise

    class Strict(Client):
        async def send(self, message: Message) -> None:
            if message == END:
                raise TypeError("malformed")
            await super().send(message)

    client = Strict()
    watch = Watch(app)
    await client.run(watch)
    assert log == ["row"]
    assert (watch.outcome.state, watch.outcome.delivered) == (State.COMPLETED if copes else State.FAILED, False)
    assert (client.error is None) == copes


async def test_what_is_held_does_not_change_with_the_buffer_of_the_application() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        before_success(lambda: None)
        buffer = bytearray(b"ab")
        await send(start(200, (b"content-length", b"2")))
        await send({"type": "http.response.body", "body": memoryview(buffer), "more_body": True})
        buffer[:] = b"xx"
        await send(END)

    client = Client()
    await client.run(Watch(app))
    assert client.body == b"ab"


async def test_headers_that_can_be_read_once_reach_the_server() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        before_success(lambda: None)
        await send({**START, "headers": iter([(b"content-length", b"2")])})
        await send({**END, "body": b"ab"})

    client = Client()
    await client.run(Watch(app))
    assert client.sent[0]["headers"] == [(b"content-length", b"2")]


async def test_an_application_that_stops_before_its_last_frame_has_shown_nothing() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        before_success(lambda: None)
        await send(sized(2))
        await send(chunk(b"ab"))
        raise ValueError

    client = Client()
    watch = Watch(app)
    await client.run(watch)
    assert client.sent == []
    assert isinstance(client.error, ValueError)
    assert watch.outcome.state is State.FAILED


async def test_early_hints_are_no_start() -> None:
    """The answer to the deadline is a status all the same."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(HINT)
        call = current_call()
        call.policy = replace(call.policy, timeout=1e-9)
        await anyio.sleep(60)

    client = Client()
    await client.run(Watch(app))
    assert types(client.sent) == ["http.response.early_hint", "http.response.start", "http.response.body"]
    assert (client.status, client.complete) == (504, True)


@pytest.mark.parametrize("hooked", [False, True])
async def test_messages_nobody_knows_pass_and_are_no_end(hooked: bool) -> None:
    messages = [HINT, start(200), {"type": "http.response.debug", "info": {}}, PUSH, chunk(b"a"), PUSH, END]

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if hooked:
            before_success(lambda: None)
        for message in messages:
            assert not current_call().life.finished
            await send(message)

    client = Client()
    watch = Watch(app)
    await client.run(watch)
    assert client.error is None
    assert client.sent == messages
    assert watch.outcome.state is State.COMPLETED


@pytest.mark.parametrize("hooked", [False, True])
async def test_a_zero_copy_send_may_be_the_last_frame(hooked: bool) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if hooked:
            before_success(lambda: None)
        await send(START)
        await send({"type": "http.response.zerocopysend", "file": 1, "more_body": True})
        await send({"type": "http.response.zerocopysend", "file": 1})

    client = Client()
    watch = Watch(app)
    await client.run(watch)
    assert len(client.sent) == 3
    assert watch.outcome.state is State.COMPLETED


# ---------------------------------------------------------------------- late successes


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("how", ["finish", "signal", "thread", "protect"])
@pytest.mark.parametrize("form", ["one piece", "pieces", "held before", "started before"])
async def test_work_that_ends_well_for_a_client_that_left_has_run_its_hooks(how: str, form: str, fails: bool) -> None:
    log: list[str] = []
    gone, ran_on = anyio.Event(), threading.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        @before_success
        async def write_row() -> None:
            await anyio.sleep(0.01)
            log.append("row")
            if fails:
                raise HookFailure(status=503)

        if form in {"held before", "started before"}:
            await send(START)
        if form == "started before":
            await send(chunk(b"a"))
        if how == "thread":
            await anyio.to_thread.run_sync(ran_on.wait, 5)  # it does not look at its token
        elif how == "protect":
            with protect():
                await gone.wait()
                await finish(send)
                return
        else:
            with anyio.CancelScope(shield=True):
                await gone.wait()
        await finish(send)

    async def finish(send: Send) -> None:
        if form in {"one piece", "pieces"}:
            await send(START)
        if form == "pieces" and how == "finish":
            await send(chunk(b"a"))
        await send(END)
        log.append("sent")

    client = Client()
    watch = Watch(app, policy=how if how in {"finish", "signal"} else "cancel")
    async with client.calling(watch):
        await watched(client)
        client.hang_up()
        await until(lambda: client.reading == 0)
        gone.set()
        ran_on.set()
    outcome = watch.outcome
    assert client.error is None
    assert log == (["row"] if fails else ["row", "sent"])
    assert (outcome.state, outcome.delivered) == (State.FAILED if fails else State.COMPLETED, False)
    assert outcome.status_code == (503 if fails and form != "started before" else 200)
    assert isinstance(outcome.error, HookFailure) == fails


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("policy", ["cancel", "signal", "finish"])
def test_a_def_handler_that_runs_on_in_its_thread_has_its_hooks_run(policy: str, fails: bool) -> None:
    log: list[str] = []
    outcomes: list[Outcome] = []
    stands = threading.Event()

    def save(request: Request) -> Response:
        @before_success
        def write_row() -> None:
            log.append("row")
            if fails:
                raise ValueError

        stands.set()
        wait_for(lambda: current_call().life.left)  # without a look at its token
        return Response(b"saved")

    app = Starlette(
        routes=[Route("/", save)],
        middleware=[Middleware(HangupMiddleware, policy=policy, observers=[outcomes.append])],
    )
    with serving(app) as server:
        client = server.get("/")
        assert stands.wait(10)
        client.close()
        wait_for(lambda: outcomes)
    assert log == ["row"]
    [outcome] = outcomes
    assert (outcome.state, outcome.delivered) == (State.FAILED if fails else State.COMPLETED, False)


@pytest.mark.parametrize("policy", ["cancel", "signal", "finish"])
async def test_the_journals_hook_comes_last_and_only_after_success(policy: str) -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        call = current_call()

        async def commit() -> None:
            log.append("row")

        async def first() -> None:
            before_success(lambda: log.append("registered by a hook"))
            log.append("hook")

        call.add_last_hook(commit)
        before_success(first)
        if policy != "cancel":
            with anyio.CancelScope(shield=True):
                client.hang_up()
                await until(lambda: call.life.left)
        await answer(send)

    client = Client()
    watch = Watch(app, policy=policy)
    await client.run(watch)
    assert watch.outcome.state is State.COMPLETED
    assert log == ["hook", "registered by a hook", "row"]


async def test_who_was_told_that_the_client_left_has_no_success() -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        before_success(lambda: log.append("hook"))
        await receive()
        assert (await receive())["type"] == "http.disconnect"
        try:
            await answer(send)
        except OSError:
            log.append("refused")

    client = Client()
    watch = Watch(app, policy="signal")
    async with client.calling(watch):
        await client.wait_for(lambda: client.reading)
        client.hang_up()
    assert log == ["refused"]
    assert watch.outcome.state is State.CANCELED


async def test_the_application_has_its_grace_after_a_hook_that_failed_late(on_trio: bool) -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        before_success(lambda: 1 / 0)
        call = current_call()
        await watched(client)
        with protect():
            client.hang_up()
            await until(lambda: call.life.left)
            try:
                await answer(send)
            except ZeroDivisionError:
                log.append("heard")
        await checkpoint()
        log.append("cleaned up")

    client = Client()
    watch = Watch(app)
    await client.run(watch)
    assert log == (["heard"] if on_trio else ["heard", "cleaned up"])  # trio cancels by level
    assert watch.outcome.state is State.FAILED


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize("error", [OSError("gone"), RuntimeError("the handler is closed"), ValueError("a bug")])
async def test_the_application_hears_of_the_hook_although_the_server_takes_no_answer(error: Exception) -> None:
    heard: list[BaseException] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        before_success(lambda: 1 / 0)
        try:
            await answer(send)
        except Exception as exc:
            heard.append(exc)
            raise

    async def refuse(message: Message) -> None:
        raise error

    client = Client()
    watch = Watch(app)
    await watch(client.scope, client.receive, refuse)
    assert [type(exc) for exc in heard] == [ZeroDivisionError]
    assert watch.outcome.state is State.FAILED
    assert isinstance(watch.outcome.error, ZeroDivisionError)


async def test_a_refusal_that_nobody_reads_is_given_up() -> None:
    heard: list[BaseException] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        @before_success
        async def write_row() -> None:
            raise ZeroDivisionError

        client.stop_reading()
        try:
            await answer(send)
        except Exception as exc:
            heard.append(exc)
            raise

    client = Client()
    watch = Watch(app, finalizer_timeout=0.05)
    await client.run(watch)
    assert [type(exc) for exc in heard] == [ZeroDivisionError]
    assert watch.outcome.state is State.FAILED


@pytest.mark.parametrize("when", ["hook", "answer"])
@pytest.mark.parametrize("error", [None, OSError("gone")])
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_cancellation_by_the_server_is_not_hidden_by_what_its_send_raises(
    when: str, error: Exception | None
) -> None:
    stands = anyio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        @before_success
        async def write_row() -> None:
            if when == "hook":
                stands.set()
                await until(task.cancelling)
            raise ValueError

        await answer(send)

    async def refuse(message: Message) -> None:
        if when == "answer":
            stands.set()
            await anyio.sleep(60)
        if error is not None:
            raise error

    client = Client()
    watch = Watch(app)
    task = asyncio.ensure_future(watch(client.scope, client.receive, refuse))
    await stands.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert watch.outcome.state is State.FAILED


# ---------------------------------------------------------------------- two at once


async def test_a_second_last_frame_waits_for_the_hooks_of_the_first() -> None:
    log: list[Any] = []
    stands, goes_on = anyio.Event(), anyio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        @before_success
        async def write_row() -> None:
            stands.set()
            await goes_on.wait()
            raise ValueError

        async def say(message: Message) -> None:
            try:
                await send(message)
            except (ValueError, OSError) as exc:
                log.append(type(exc))

        await send(START)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(say, END)
            await stands.wait()
            tasks.start_soon(say, END)
            tasks.start_soon(say, chunk(b"more"))
            for _ in range(10):
                await checkpoint()
            assert client.sent == []
            goes_on.set()

    client = Client()
    watch = Watch(app)
    await client.run(watch)
    assert client.status == 500
    assert ValueError in log
    assert watch.outcome.state is State.FAILED


async def test_a_hook_may_send_a_last_word_of_a_stream() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        @before_success
        async def say() -> None:
            await send(chunk(b"saved"))

        await send(START)
        await send(chunk(b"a"))
        await send(END)

    client = Client()
    await client.run(Watch(app))
    assert (client.body, client.complete) == (b"asaved", True)


# ---------------------------------------------------------------------- `Call.refuse`


@pytest.mark.parametrize("form", ["one piece", "length", "stream"])
@pytest.mark.parametrize("by", ["hook", "other task"])
async def test_a_refusal_while_hooks_run_is_final(by: str, form: str) -> None:
    log: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        call = current_call()
        failure = HookFailure("no", status=409)

        @before_success
        async def write_row() -> None:
            if by == "hook":
                await call.refuse(failure)
            else:
                tasks.start_soon(call.refuse, failure)
                await until(lambda: call._writer.cut)

        async def commit() -> None:
            log.append("row")

        before_success(lambda: log.append("next"))
        call.add_last_hook(commit)
        async with anyio.create_task_group() as tasks:
            try:
                await send(START if form != "length" else sized(1))
                if form != "one piece":
                    await send(chunk(b"a"))
                await send(END)
            except HookFailure as exc:
                log.append(exc is failure)

    client = Client()
    watch = Watch(app)
    await client.run(watch)
    assert log == [True]
    assert not client.satisfied
    assert client.status == (200 if form == "stream" else 409)
    assert watch.outcome.state is State.FAILED
    assert watch.outcome.status_code == client.status


@pytest.mark.parametrize("form", ["nothing", "held", "length", "stream", "complete", "twice", "timed out", "finalizer"])
async def test_a_refusal_by_the_handler(form: str) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        call = current_call()
        before_success(lambda: None)
        failure = HookFailure("no", status=409)
        if form == "finalizer":
            call.add_finalizer(lambda: None)

            @call.add_finalizer
            async def refuse() -> None:
                await call.refuse(failure)

            raise ValueError
        if form in {"held", "length", "stream", "complete"}:
            await send(START if form != "length" else sized(1))
        if form in {"length", "stream"}:
            await send(chunk(b"a"))
        if form == "complete":
            await send(END)
        if form == "timed out":
            with anyio.CancelScope(shield=True):
                await until(lambda: call.life.cause)
        await call.refuse(failure)
        if form == "twice":
            await call.refuse(HookFailure("never", status=410))
        if form not in {"complete", "stream"}:
            assert call.status_code == (504 if form == "timed out" else 409) or form == "timed out"

    client = Client()
    watch = Watch(app, timeout=0.02 if form == "timed out" else None)
    await client.run(watch)
    status = {"stream": 200, "complete": 200, "timed out": 504, "finalizer": None}.get(form, 409)
    assert client.status == status
    states = {"complete": State.COMPLETED, "timed out": State.TIMED_OUT}
    assert watch.outcome.state is states.get(form, State.FAILED)
    assert client.complete == (form not in {"stream", "finalizer"})


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("policy", ["cancel", "signal", "finish"])
async def test_who_is_blocked_in_a_send_is_let_go_by_a_refusal(policy: str, leaves: bool) -> None:
    log: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        call = current_call()

        async def refuse() -> None:
            await watched(client)
            await call.refuse(HookFailure())
            if leaves:
                client.hang_up()

        await send(START)
        client.stop_reading()
        call.start_soon(refuse)
        try:
            await send(chunk(b"a"))
        except OSError as exc:
            log.append(str(exc))
        await checkpoint()
        log.append("cleaned up")

    client = Client(quirks=Quirks(send_stays_blocked=True))
    watch = Watch(app, policy=policy)
    await client.run(watch)
    assert log == ["the response was cut", "cleaned up"]
    assert client.error is None
    assert (watch.outcome.state, watch.outcome.cause) == (State.FAILED, None)


async def test_a_refusal_for_a_client_that_leaves_is_given_up() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def leave() -> None:
            await watched(client)
            client.hang_up()

        before_success(lambda: 1 / 0)
        client.stop_reading()
        current_call().start_soon(leave)
        await answer(send)

    client = Client(quirks=Quirks(send_stays_blocked=True))
    watch = Watch(app, finalizer_timeout=60)
    with anyio.fail_after(10):
        await client.run(watch)
    assert watch.outcome.state is State.FAILED


async def test_a_hook_that_would_never_run_is_not_taken() -> None:
    tried: list[bool] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        @current_call().add_finalizer
        async def register() -> None:
            with pytest.raises(RuntimeError, match="too late"):
                before_success(lambda: None)
            tried.append(True)

        raise ValueError

    await Client().run(Watch(app))
    assert tried == [True]


# ---------------------------------------------------------------------- what comes while hooks run


@pytest.mark.parametrize("late", [False, True])
async def test_a_hook_may_look_at_the_token(late: bool) -> None:
    """Its success is one of a call that did not know, and the journal has written it down."""
    log: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        call = current_call()

        @before_success
        async def write_row() -> None:
            if not late:
                call.cancel()
            log.append(call.token.canceled)

        async def commit() -> None:
            log.append(call.told_cause)

        call.add_last_hook(commit)
        if late:
            await watched(client)
            with protect():
                client.hang_up()
                await until(lambda: call.life.left)
                await answer(send)
        else:
            await answer(send)

    client = Client()
    watch = Watch(app)
    await client.run(watch)
    assert log == [True, None]
    assert watch.outcome.state is State.COMPLETED


async def test_who_looked_at_its_canceled_token_has_no_success_to_write_down() -> None:
    log: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        call = current_call()

        async def commit() -> None:
            log.append(call.told_cause)

        call.add_last_hook(commit)
        with protect():
            call.cancel()
            assert call.token.canceled
            await answer(send)

    client = Client()
    watch = Watch(app)
    await client.run(watch)
    assert log == ["requested"]
    assert watch.outcome.state is State.CANCELED


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_shutdown_that_cancels_while_hooks_run_is_too_late(fails: bool) -> None:
    stands = anyio.Event()
    log: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        call = current_call()

        @before_success
        async def write_row() -> None:
            stands.set()
            await until(lambda: call.cause)
            if fails:
                raise ValueError

        async def commit() -> None:
            log.append(call.told_cause)

        call.add_last_hook(commit)
        await answer(send)

    client = Client()
    watch = Watch(app)
    task = asyncio.ensure_future(watch(client.scope, client.receive, client.send))
    await stands.wait()
    task.cancel()
    await checkpoint()
    await watch.app.drain(5)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert client.status == (500 if fails else 200)
    assert log == ([] if fails else [None])
    assert watch.outcome.state is (State.FAILED if fails else State.COMPLETED)


async def test_what_a_hook_starts_is_not_interrupted_for_those_whom_the_hook_serves() -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        call = current_call()

        async def notify() -> None:
            for _ in range(9):
                await checkpoint()
            log.append("notified")

        @before_success
        async def write_row() -> None:
            call.start_soon(notify)
            await checkpoint()
            with protect():
                await checkpoint()
            await until(lambda: log)

        await watched(client)
        with protect():
            client.hang_up()
            await until(lambda: call.cause)
            await answer(send)

    client = Client()
    watch = Watch(app)
    async with client.calling(watch):
        pass
    assert log == ["notified"]
    assert watch.outcome.state is State.COMPLETED


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("policy", ["cancel", "signal"])
async def test_a_listener_that_hears_of_the_disconnect_while_hooks_run_hears_too_late(policy: str, fails: bool) -> None:
    """Django, Quart, and what streams under ASGI 2.3 listen in a task of their own."""
    log: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        call = current_call()

        @before_success
        async def write_row() -> None:
            client.hang_up()
            await until(lambda: "http.disconnect" in log)
            log.append(call.told_cause)
            if fails:
                raise ValueError

        async def listen() -> None:
            while "http.disconnect" not in log:
                log.append((await receive())["type"])

        await watched(client)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listen)
            await answer(send)

    client = Client()
    watch = Watch(app, policy=policy)
    await client.run(watch)
    assert log == ["http.request", "http.disconnect", None]
    assert watch.outcome.state is (State.FAILED if fails else State.COMPLETED)


async def test_who_reads_a_body_that_ends_too_soon_while_hooks_run_is_not_interrupted() -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()

        @before_success
        async def write_row() -> None:
            await client.wait_for(lambda: client.reading)
            client.hang_up()
            await until(lambda: log)

        async def read() -> None:
            log.append((await receive())["type"])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            await answer(send)
        await anyio.sleep(0.05)
        log.append("background")

    client = Client(method="POST", headers=[("Content-Length", "9")], body=[b"a"], body_ends=False)
    watch = Watch(app)
    await client.run(watch)
    assert log == ["http.disconnect", "background"]
    assert watch.outcome.state is State.COMPLETED


@pytest.mark.parametrize("policy", ["signal", "finish"])
@pytest.mark.parametrize("other", [END, chunk(b"more")])
async def test_what_another_task_sends_while_the_hooks_of_a_late_success_run(other: Message, policy: str) -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        stands, goes_on = anyio.Event(), anyio.Event()

        @before_success
        async def write_row() -> None:
            stands.set()
            await goes_on.wait()
            log.append("row")

        async def say(message: Message) -> None:
            await send(message)
            if message is END:
                log.append("sent")

        await watched(client)
        client.hang_up()
        await until(lambda: current_call().life.left)
        await send(START)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(say, END)
            await stands.wait()
            tasks.start_soon(say, other)
            for _ in range(10):
                await checkpoint()
            goes_on.set()

    client = Client()
    watch = Watch(app, policy=policy)
    await client.run(watch)
    assert client.error is None
    assert log[0] == "row"
    assert watch.outcome.state is State.COMPLETED


@pytest.mark.parametrize("policy", ["cancel", "signal", "finish"])
async def test_a_hook_may_go_on_to_send_to_a_client_that_has_left(policy: str) -> None:
    log: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        @before_success
        async def write_row() -> None:
            client.hang_up()
            await until(lambda: current_call().life.left)
            for _ in range(3):
                await send(chunk(b"saved"))
            log.append("row")

        await watched(client)
        await send(START)
        await send(chunk(b"a"))
        await send(END)

    client = Client()
    watch = Watch(app, policy=policy)
    await client.run(watch)
    assert log == ["row"]
    assert watch.outcome.state is State.COMPLETED


async def test_an_event_stream_whose_hook_fails_is_cut_also_in_a_shutdown() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        @before_success
        async def write_row() -> None:
            tasks.start_soon(watch.app.drain, 5)
            await until(lambda: current_call().cause)
            raise ValueError

        async with anyio.create_task_group() as tasks:
            await send(start(200, (b"content-type", b"text/event-stream")))
            await send(chunk(b"a"))
            await send(END)

    client = Client()
    watch = Watch(app)
    await client.run(watch)
    assert not client.complete
    assert watch.outcome.state is State.FAILED


async def test_what_comes_after_the_end_is_left_to_the_server() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        before_success(lambda: None)
        for message in (sized(1), chunk(b"a"), END):
            await send(message)
        with pytest.raises(RuntimeError, match="the response is complete"):
            await send(chunk(b"b"))

    client = Client()
    await client.run(Watch(app))
    assert client.error is None


async def test_a_failure_may_say_anything() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        @before_success
        async def write_row() -> None:
            raise HookFailure(
                "\ud800",
                status=409,
                headers={
                    "X-Price": "1 €",
                    "Content-Type": "application/problem+json",
                    "Retry-After": 5,  # type: ignore[dict-item] # as it is often written
                    "X-Why": "a\r\nSet-Cookie: b",
                },
            )

        await answer(send)

    client = Client()
    watch = Watch(app)
    await client.run(watch)
    assert (client.status, client.complete) == (409, True)
    assert sorted(client.sent[0]["headers"]) == [
        (b"content-length", b"1"),
        (b"content-type", b"application/problem+json"),
        (b"retry-after", b"5"),
        (b"x-price", b"1 ?"),
        (b"x-why", b"a??Set-Cookie: b"),
    ]
    assert isinstance(watch.outcome.error, HookFailure)
