"""What the demo's application notes about itself: one JSON line per mark, on standard output.

Every mark carries the system-wide monotonic clock, which the client in the other process reads too.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

#: The request header that says which run of which scenario this is.
RUN_HEADER: Final = b"x-demo-run"

_run: ContextVar[str | None] = ContextVar("hangup_demo_run", default=None)


def mark(what: str, **details: object) -> None:
    """Note that ``what`` happened just now in the current run."""
    at = time.monotonic_ns()
    line = json.dumps({"run": _run.get(), "what": what, "at": at, **details})
    os.write(1, line.encode() + b"\n")  # one call, so that threads do not mix their lines


@contextmanager
def observed() -> Iterator[None]:
    """Note when the block is entered, and how it is left: by what exception, or because the work was done."""
    mark("began")
    try:
        yield
    except BaseException as exc:
        mark("interrupted", by=type(exc).__name__)
        raise
    mark("worked")


class Witness:
    """Outside everything: knows which run a request is, and notes when and how the application leaves it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        # Not reset: uvicorn gives each request a task, and what it logs after the request is to be told apart too.
        _run.set(dict(scope["headers"]).get(RUN_HEADER, b"?").decode())
        raised: str | None = None
        try:
            await self.app(scope, receive, send)
        except BaseException as exc:
            raised = type(exc).__name__
            raise
        finally:
            mark("left", raised=raised)


class LogMarks(logging.Handler):
    """Notes what is logged."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[0] if record.exc_info else None
        mark("logged", level=record.levelname, text=record.getMessage(), error=error.__name__ if error else None)
