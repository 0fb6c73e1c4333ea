"""A minute of `chaos`, or as long as ``--minutes`` says, on each server; and the judge itself."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from ..real import read_all, wait_for
from .chaos import Chaos, Seen, _frame, growth


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("server", ["uvicorn", "hypercorn"])
def test_chaos_leaves_one_outcome_for_each_call_and_nothing_else(server: str, minutes: float) -> None:
    chaos = Chaos(random.randrange(2**32), server)
    chaos.run(minutes * 60)
    print(chaos)
    assert chaos.begun
    assert chaos.violations == [], f"seed {chaos.seed}"


@pytest.mark.parametrize("kind", ["error", "bad_hook"])
def test_the_last_call_that_was_judged_is_not_taken_for_a_leak(kind: str) -> None:
    """Its outcome holds its error, the error its traceback, and that the call."""
    chaos = Chaos(1, "uvicorn")
    with socket.create_server(("127.0.0.1", 0)) as listener, chaos._watching_the_log():
        with chaos.serving(listener), socket.create_connection(listener.getsockname()) as client:
            chaos.calls[1] = Seen(kind)
            client.sendall(f"GET /{kind}?n=1 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            assert b" 500 " in read_all(client)
        assert chaos.begun == 1
        chaos.judge()
    assert chaos.violations == []


@pytest.mark.parametrize("says", [b"", b"hello"])
def test_hypercorn_never_says_that_a_client_left_who_spoke_before_it_was_accepted(says: bytes) -> None:
    """So clients of `chaos` do not. It is answered 400; and the application, bare here, waits for ever."""
    heard: list[str] = []

    class Bare(Chaos):
        def app(self) -> ASGIApp:
            async def app(scope: Scope, receive: Receive, send: Send) -> None:
                if scope["type"] == "lifespan":
                    return
                heard.append((await receive())["type"])
                spoke.wait(10)  # so that it is read before the handshake is accepted
                await asyncio.sleep(0.1)
                await send({"type": "websocket.accept"})
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.5 if says else 10):
                        heard.append((await receive())["type"])

            return app

    spoke = threading.Event()
    chaos = Bare(1, "hypercorn")
    with socket.create_server(("127.0.0.1", 0)) as listener, chaos._watching_the_log(), chaos.serving(listener):
        client = socket.create_connection(listener.getsockname())
        client.sendall(
            b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        wait_for(lambda: heard)
        if says:
            client.sendall(_frame(1, says))
        spoke.set()
        assert (b" 400 " if says else b" 101 ") in client.recv(4096)
        client.close()
        wait_for(lambda: len(heard) == 2 or says)
    assert heard == ["websocket.connect", *([] if says else ["websocket.disconnect"])]


def test_memory_that_warms_up_has_not_grown_and_memory_that_leaks_has() -> None:
    dice = random.Random(1)
    warm = [min(60 + 10 * server, 130) + dice.randint(0, 60) for server in range(300)]
    assert abs(growth(warm)) < 10
    assert growth([size + server // 2 for server, size in enumerate(warm)]) > 50
