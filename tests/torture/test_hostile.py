"""Clients and requests that mean harm: memory stays bounded, nothing crashes, and each call has its outcome.

Each attack is made on the same application mounted and bare; what hangup adds to the peak of the server's memory is
what is bounded. ``--full`` makes them as large as they come.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from hangup import State, add_finalizer, before_success, current_call, step
from hangup.testing import Peer

from ..helpers import Watch, answer, until, watched
from ..processes import Server
from ..real import close_with_reset, read_all, serving, wait_for
from .chaos import _frame

SERVERS = {
    "uvicorn-h11": ("uvicorn", ("tests.torture.hostile_app:{app}", "--fd", "{fd}", "--http", "h11")),
    "uvicorn-httptools": ("uvicorn", ("tests.torture.hostile_app:{app}", "--fd", "{fd}", "--http", "httptools")),
    "hypercorn": ("hypercorn", ("tests.torture.hostile_app:{app}", "--bind", "fd://{fd}", "--workers", "0")),
}

#: How much more memory the server may take at its peak than it does bare, in bytes.
MORE = 8 * 2**20


class Target:
    """A server under attack, and what it takes."""

    def __init__(self, server: Server, *, mounted: bool) -> None:
        self.server = server
        self.mounted = mounted
        self.process = Path(f"/proc/{server._process.pid}")

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=15)

    def post(self, path: str, size: int, *headers: str) -> socket.socket:
        client = self.connect()
        lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {size}", "Connection: close", *headers, "", ""]
        client.sendall("\r\n".join(lines).encode())
        return client

    def upgrade(self, path: str) -> socket.socket:
        client = self.connect()
        client.sendall(
            f"GET {path} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
        )
        assert b" 101 " in client.recv(4096)
        return client

    @contextlib.contextmanager
    def measuring(self) -> Iterator[Callable[[], int]]:
        """Yields what the peak of memory has grown by, in bytes."""
        (self.process / "clear_refs").write_text("5")
        before = self._status("VmRSS")
        yield lambda: self._status("VmHWM") - before

    def _status(self, key: str) -> int:
        status = (self.process / "status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith(key)).split()[1]) * 1024

    def check(self) -> None:
        """The server answers still. With hangup, wait until each call that began has ended, and has had one outcome."""
        if self.mounted:
            wait_for(lambda: self.server.count("began") <= self.server.count("ended"))
        with self.post("/read", 5) as client:
            client.sendall(b"hello")
            assert b"\r\n1\r\n5\r\n" in read_all(client)
        if self.mounted:
            wait_for(lambda: self.server.count("began") == self.server.count("ended"))


Attack = Callable[[Target], None]
Under = Callable[[Attack], None]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every server with ``--full``; else not the one that is the same with another parser."""
    if "targets" in metafunc.fixturenames:
        full = metafunc.config.getoption("--full")
        names = [name for name in SERVERS if full or name != "uvicorn-h11"]
        metafunc.parametrize("targets", names, indirect=True, scope="module")


@pytest.fixture(scope="module")
def targets(request: pytest.FixtureRequest) -> Iterator[dict[str, Target]]:
    module, args = SERVERS[request.param]
    with contextlib.ExitStack() as stack:
        found = {}
        for name in ("bare", "mounted"):
            formatted = [arg.replace("{app}", name) for arg in args]
            server = stack.enter_context(Server(module, *formatted))
            found[name] = Target(server, mounted=name == "mounted")
            found[name].check()  # it has imported what it needs
        yield found


@pytest.fixture
def under(targets: dict[str, Target]) -> Under:
    """Attack the bare server and the mounted one, and compare."""

    def attack_both(attack: Attack) -> None:
        grown = {}
        for name, target in targets.items():
            with target.measuring() as growth:
                attack(target)
                target.check()
                grown[name] = growth()
        print({name: f"{size / 2**20:.1f} MiB" for name, size in grown.items()})
        assert grown["mounted"] < grown["bare"] + MORE, grown

    return attack_both


def test_bodies_that_come_a_byte_at_a_time(under: Under) -> None:
    def attack(target: Target) -> None:
        clients = [target.post(path, 1000) for path in ("/read", "/ignore") for _ in range(50)]
        for _ in range(5):
            for client in clients:
                with contextlib.suppress(OSError):  # those that were answered
                    client.sendall(b"x")
            time.sleep(0.02)
        for client in clients:
            client.close()

    under(attack)


def test_floods_of_headers(under: Under) -> None:
    def attack(target: Target) -> None:
        for size in (10, 1000, 5000):
            headers = [f"X-Header-{number}: {'v' * 50}" for number in range(size)]
            for _ in range(10):
                with contextlib.suppress(OSError):  # refused by the server
                    client = target.post("/read", 2, *headers)
                    with client:
                        client.sendall(b"ok")
                        read_all(client)

    under(attack)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", ["/echo", "/deaf"])
def test_a_hundred_thousand_tiny_messages(under: Under, path: str, rounds: Callable[[int, int], int]) -> None:
    """Read by the application, or by nobody: then no more than ``read_ahead`` of them is held."""
    count = rounds(20_000, 100_000)

    def attack(target: Target) -> None:
        with target.upgrade(path) as client:
            client.settimeout(0.3)
            with contextlib.suppress(TimeoutError, ConnectionError):  # the server does not take them all
                client.sendall(_frame(1, b"x") * count)
            if path == "/echo":
                client.settimeout(60)
                client.sendall(_frame(1, b"stop"))
                assert f"received {count}".encode() in client.recv(4096)
            close_with_reset(client)

    under(attack)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", ["/read", "/ignore"])
def test_a_body_of_a_gigabyte(under: Under, path: str, rounds: Callable[[int, int], int]) -> None:
    size = rounds(64, 1024) * 2**20

    def attack(target: Target) -> None:
        with target.post(path, size) as client:
            client.settimeout(0.5 if path == "/ignore" else 60)
            part = b"x" * 2**20
            with contextlib.suppress(TimeoutError, ConnectionError):  # what is not read is not taken
                for _ in range(size // len(part)):
                    client.sendall(part)
            if path == "/read":
                assert f"\r\n{size}\r\n".encode() in read_all(client)
            else:
                close_with_reset(client)

    under(attack)


def test_frames_after_the_last_one(under: Under) -> None:
    def attack(target: Target) -> None:
        for _ in range(20):
            with target.post("/late", 0) as client:
                data = read_all(client)
            assert data.startswith(b"HTTP/1.1 200 ")
            assert b"more" not in data

    under(attack)


def test_ten_tasks_that_send_at_once(under: Under) -> None:
    """To a client that stays every frame arrives once; one that leaves ends them all."""

    def attack(target: Target) -> None:
        with target.post("/ten", 0) as client:
            data = read_all(client)
        for number in range(10):
            assert data.count(b"%d" % number * 1000) >= 20
        if target.mounted:  # bare, nobody ends them
            clients = [target.post("/forever", 0) for _ in range(5)]
            for client in clients:
                client.recv(1000)
                client.close()

    under(attack)


# ---------------------------------------------------------------------- what a request cannot do


HOSTILE_HEADERS = [
    ("hangup", "finish"),
    ("hangup-policy", "finish"),
    ("x-hangup-policy", "finish"),
    ("x-hangup-timeout", "0"),
    ("x-hangup-grace", "0"),
    ("x-request-timeout-ms", "1"),
    ("grpc-timeout", "1m"),
    ("x-deadline", "0"),
    ("timeout", "0"),
    ("extensions", "hangup"),
]


@pytest.mark.anyio
async def test_no_request_sets_an_option() -> None:
    """Not by its headers, its query or its path."""
    peer = Peer(path="/hangup/policy/finish", query="policy=finish&timeout=0&hangup=1", headers=HOSTILE_HEADERS)
    policies: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        call = current_call()
        await watched(peer)
        policies.append(call.policy)
        peer.hang_up()
        await until(lambda: call.token.canceled)
        await answer(send)

    watch = Watch(app, policy="signal", grace=7.0)
    await peer.run(watch)
    [policy] = policies
    assert (policy.disconnect, policy.grace, policy.timeout, policy.send_timeout) == ("signal", 7.0, None, None)
    assert watch.outcome.state is State.CANCELED


@pytest.mark.anyio
async def test_a_callers_deadline_is_only_ever_shortened_and_only_if_asked_for() -> None:
    deadlines: list[float | None] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        deadlines.append(current_call().token.remaining())
        await answer(send)

    for options in ({}, {"deadline_header": "x-time", "timeout": 5.0}):
        await Peer(headers=[("x-time", "999999999")]).run(Watch(app, **options))
    assert deadlines[0] is None
    assert deadlines[1] is not None
    assert deadlines[1] <= 5


EVIL = "\nERROR:root:forged\r\x1b[31m\x00\u202e\u2028"


@pytest.mark.anyio
async def test_nothing_of_a_request_breaks_a_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Every line that names a call, in one run."""
    caplog.set_level(logging.DEBUG, "hangup")

    async def bad_finalizer() -> None:
        raise RuntimeError("broken")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        call = current_call()
        add_finalizer(bad_finalizer)
        before_success(bad_finalizer)
        call.start_soon(bad_finalizer)
        if scope["path"].startswith("/hook"):
            await answer(send)
        call.cancel(EVIL)
        step(f"tool {EVIL}").__enter__()
        raise RuntimeError("broken")

    for path in ("/hook", "/step"):
        peer = Peer(method=f"GET{EVIL}", path=path + EVIL)
        await peer.run(Watch(app, grace=0.01))
    lines = [record.getMessage() for record in caplog.records if record.name == "hangup"]
    assert any("tool" in line for line in lines)
    assert sum("forged" in line for line in lines) >= 6
    for line in lines:
        assert line.isprintable(), line


@pytest.mark.parametrize("accept", ["*/*", "application/json", "application/problem+json", "text/html"])
def test_no_text_of_an_exception_goes_to_a_client(accept: str) -> None:
    """The answers of ours on a real socket, for everything that can raise."""
    outcomes: list[Any] = []

    async def secret(*args: Any) -> None:
        raise RuntimeError("secret")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["path"]
        if kind == "/hook":
            before_success(secret)
            await answer(send)
        elif kind == "/child":
            current_call().start_soon(secret)
        elif kind == "/finalizer":
            add_finalizer(secret)
            await answer(send)
        elif kind == "/cancel":
            current_call().cancel("secret")
            async with step("secret", cancel=secret, effect=True):
                await until(lambda: False)
        raise RuntimeError("secret")

    watch = Watch(app)
    watch.outcomes = outcomes
    with serving(watch) as server:
        for kind in ("hook", "child", "finalizer", "cancel", "handler"):
            data = read_all(server.get(f"/{kind}", f"Accept: {accept}", "Connection: close"))
            assert data.startswith(b"HTTP/1.1 "), kind
            assert b"secret" not in data
