"""The server process of the demo: ``python -m hangup.cli._demo.child bare|hangup DIRECTORY``.

It listens on a free loopback port, says which in its first mark, and stops when its standard input ends: with the
demo, however that ended.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import sys
import threading
from pathlib import Path

import uvicorn

from hangup import HangupMiddleware, Outcome

from .app import make_app
from .witness import LogMarks, Witness, mark


def main() -> None:
    """Serve until standard input ends."""
    mount, directory = sys.argv[1:]
    try:
        listener = socket.create_server(("127.0.0.1", 0))
    except OSError as exc:
        mark("refused", reason=str(exc))
        sys.exit(1)
    app = make_app(Path(directory))
    if mount == "hangup":
        app.add_middleware(HangupMiddleware, observers=[mark_outcome])
    logging.basicConfig(handlers=[LogMarks()], level=logging.WARNING)
    config = uvicorn.Config(Witness(app), log_config=None, access_log=False)
    config.load()
    mark("ready", port=listener.getsockname()[1], server=_describe(config))
    server = uvicorn.Server(config)
    threading.Thread(target=stop_at_end_of_input, args=(server,), daemon=True).start()
    server.run(sockets=[listener])


def mark_outcome(outcome: Outcome) -> None:
    """The observer: hand the record over as it is, but for what JSON does not know."""
    record = {name: value for name, value in dataclasses.asdict(outcome).items() if name not in {"error", "finalizers"}}
    finalizers = [{"name": done.name, "state": done.state} for done in outcome.finalizers]
    mark("outcome", outcome={**record, "finalizers": finalizers, "in_flight": outcome.in_flight})


def stop_at_end_of_input(server: uvicorn.Server) -> None:
    """Wait for the end of standard input, then for nothing else."""
    while os.read(0, 4096):  # not `sys.stdin`: its lock, held by a daemon thread, breaks the interpreter's exit
        pass
    server.should_exit = server.force_exit = True


def _describe(config: uvicorn.Config) -> str:
    protocol = config.http_protocol_class.__module__.rpartition(".")[2].removesuffix("_impl")
    return f"uvicorn {uvicorn.__version__} ({protocol})"


if __name__ == "__main__":
    main()
