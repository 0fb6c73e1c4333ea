"""SIGTERM on a real uvicorn, with work in flight."""

from __future__ import annotations

import signal

import pytest

from .processes import Client, Server

UVICORN = ("tests.serving:app", "--fd", "{fd}", "--no-access-log")
CANCELED = "outcome canceled server_shutdown"


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("http", ["h11", "httptools"])
def test_idle_streams_and_running_handlers_end_within_the_grace(loop: str, http: str) -> None:
    grace = 0.5
    args = (*UVICORN, "--loop", loop, "--http", http)
    with Server("uvicorn", *args, env={"SHUTDOWN_GRACE": str(grace)}) as server:
        streams = [Client(server.port, "/sse") for _ in range(20)]
        handlers = [Client(server.port, "/work") for _ in range(5)]
        server.wait_for("running", 25)
        took = server.terminate()
        assert took < grace + 1
        print(f"20 streams, 5 handlers: exited {took:.2f} s after SIGTERM, grace {grace} s")
        assert server.count(CANCELED) == server.count("outcome") == 25
        assert server.count("finalized") == 25
        assert server.notes[-1] == "teardown"
        for stream in streams:
            assert stream.read_to_the_end().endswith(b"data: hello\n\n\r\n0\r\n\r\n")
            stream.vanish()
        for handler in handlers:
            assert handler.read_to_the_end().startswith(b"HTTP/1.1 503 ")
            handler.vanish()
        assert "Traceback" not in server.errors
        assert "ERROR" not in server.errors


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_uvicorns_own_limit_cancels_and_the_application_is_torn_down_last(signum: int) -> None:
    """``--timeout-graceful-shutdown`` cancels without waiting, and without us the finalizers found the pool closed."""
    with Server("uvicorn", *UVICORN, "--timeout-graceful-shutdown", "1") as server:
        clients = [Client(server.port, path) for path in ["/sse"] * 10 + ["/work"] * 5]
        server.wait_for("running", 15)
        server.terminate(signum)
        assert server.count(CANCELED) == server.count("outcome") == 15
        assert server.count("finalized") == 15
        assert server.notes[-1] == "teardown"
        for client in clients:
            client.vanish()


@pytest.mark.parametrize("reset", [False, True], ids=["FIN", "RST"])
def test_a_client_that_leaves_by_itself_after_the_signal_is_counted_to_the_shutdown(reset: bool) -> None:
    """A disconnect has no sender: once a shutdown has begun it may be the server's doing. See `docs/shutdown.md`."""
    with Server("uvicorn", *UVICORN, env={"SHUTDOWN_GRACE": "60"}) as server:
        before, after = Client(server.port, "/work"), Client(server.port, "/work")
        server.wait_for("running", 2)
        before.vanish(reset=reset)
        server.wait_for("outcome canceled client_disconnect")
        server.send_signal(signal.SIGTERM)
        server.wait_for_error("Waiting for connections to close")
        after.vanish(reset=reset)
        server.wait_for(CANCELED)  # at once, and not when the grace is over
        assert server.count("outcome") == server.count("finalized") == 2


def test_a_second_interrupt_is_still_uvicorns_to_handle() -> None:
    """Ctrl-C twice: it forces the exit. Our handler is in front of uvicorn's, not in its place."""
    with Server("uvicorn", *UVICORN) as server:
        client = Client(server.port, "/sse")
        server.wait_for("running")
        server.send_signal(signal.SIGINT)
        server.wait_for_error("Waiting for connections to close")
        server.terminate(signal.SIGINT)
        assert server.count("teardown") == 0
        client.vanish()
