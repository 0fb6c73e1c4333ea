"""A minute of `chaos`, or as long as ``--minutes`` says, on each server; and the judge itself."""

from __future__ import annotations

import random
import socket

import pytest

from ..real import read_all
from .chaos import Chaos, Seen, growth


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


def test_memory_that_warms_up_has_not_grown_and_memory_that_leaks_has() -> None:
    dice = random.Random(1)
    warm = [min(60 + 10 * server, 130) + dice.randint(0, 60) for server in range(300)]
    assert abs(growth(warm)) < 10
    assert growth([size + server // 2 for server, size in enumerate(warm)]) > 50
