"""What a server process under test says of itself: one JSON line per event, appended to a file.

It knows the run of each event by a header that the client sends. `Witness` stands outside everything of ours and sees
what the server sees; the census names the tasks that have outlived the call they were started for.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextvars import Context, ContextVar
from typing import Any
from urllib.parse import parse_qs

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hangup import Outcome, Policy

RUN_HEADER = b"x-run"
CENSUS = "/-/census"
MEMORY = "/-/memory"

#: Tasks that are started from the context of a call and outlive it on purpose: of connections, watchers of the whole
#: process, and MCP's sessions.
_OF_THE_SERVER = (
    "TCPServer._idle_timeout",
    "_shutdown_watcher",
    "StreamableHTTPServerTransport.connect",
    "StreamableHTTPSessionManager._serve_opening_request",
)

run: ContextVar[str | None] = ContextVar("run", default=None)
#: Seconds that the work takes if nothing stops it, from ``?work=``.
work_time: ContextVar[float] = ContextVar("work_time", default=30.0)

_record = os.open(os.environ["EVERYWHERE_RECORD"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
_running: set[str] = set()


def note(what: str, of: str | None = None, **details: Any) -> None:
    """Append one event to the record. From any thread, and from every process of the server."""
    event = {"run": of or run.get(), "what": what, "at": time.monotonic_ns(), **details}
    os.write(_record, json.dumps(event, default=str).encode() + b"\n")


def note_outcome(outcome: Outcome) -> None:
    """The observer."""
    values = {field.name: getattr(outcome, field.name) for field in dataclasses.fields(outcome)}
    values["error"] = type(outcome.error).__name__ if outcome.error is not None else None
    values["finalizers"] = [str(done.state) for done in outcome.finalizers]
    values["steps"] = {step.name: str(step.state) for step in outcome.steps}
    note("outcome", outcome=values)


def policy_by_header(scope: Scope) -> Policy:
    """What the client of the test wants: ``x-policy: finish``, ``x-timeout: 0.3``."""
    headers = dict(scope["headers"])
    timeout = headers.get(b"x-timeout")
    return Policy(headers.get(b"x-policy", b"cancel").decode(), timeout=float(timeout) if timeout else None)


class Witness:
    """Wraps an application, outside the middleware, and notes what goes in and comes out of it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["path"] in {CENSUS, MEMORY}:
            report = orphans() if scope["path"] == CENSUS else memory()
            await _answer(send, json.dumps(report).encode())
            return
        name = dict(scope["headers"]).get(RUN_HEADER, b"").decode() or None
        mark = run.set(name)
        work_time.set(float(parse_qs(scope["query_string"].decode()).get("work", ["30"])[0]))
        _running.add(name or "")
        note("began", path=scope["path"])
        statuses: list[int] = []

        async def noted_receive() -> Message:
            note("receive")
            message = await receive()
            note("received", type=message["type"], more=message.get("more_body", False))
            return message

        async def noted_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            await send(message)

        left: str | None = None
        try:
            await self.app(scope, noted_receive, noted_send)
        except BaseException as exc:
            left = type(exc).__name__
            raise
        finally:
            _running.discard(name or "")
            note("left", of=name, error=left, statuses=statuses)
            try:
                run.reset(mark)
            except ValueError:  # a server that ends a call in another context than it began it in
                pass


def memory() -> int:
    """The resident memory of this process, and the most it has been, in kB."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def orphans() -> list[str]:
    """The tasks that live on although the call in whose context they were started has ended."""
    found = []
    for name, context in _tasks():
        if any(own in name for own in _OF_THE_SERVER):
            continue
        whose = context.get(run) if context is not None else None
        if (whose is not None and whose not in _running) or (name.startswith("hangup: ") and not _running):
            found.append(f"{name} of {whose}")
    return found


def _tasks() -> Iterator[tuple[str, Context | None]]:
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:
        yield from _trio_tasks()
        return
    me = asyncio.current_task()
    for task in tasks:
        if task is not me:
            context = task.get_context() if sys.version_info >= (3, 12) else None
            yield f"{task.get_name()} {getattr(task.get_coro(), '__qualname__', '')}".removeprefix("Task-"), context


def _trio_tasks() -> Iterator[tuple[str, Context | None]]:
    import trio

    todo = [trio.lowlevel.current_root_task()]
    while todo:
        task = todo.pop()
        if task is None or task is trio.lowlevel.current_task():
            continue
        yield task.name, task.context
        for nursery in task.child_nurseries:
            todo.extend(nursery.child_tasks)


async def _answer(send: Send, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


# ---------------------------------------------------------------------- what is said past us


def _listen_to_logs() -> None:
    make = logging.getLogRecordFactory()

    def noting(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        if record.levelno >= logging.WARNING:
            raised = record.exc_info[0] if record.exc_info else None
            note(
                "log",
                logger=record.name,
                level=record.levelname,
                text=str(record.msg)[:200],
                raised=raised.__name__ if raised else None,
            )
        return record

    logging.setLogRecordFactory(noting)  # every logger, whatever the server does to handlers and propagation


def _listen_to_the_interpreter() -> None:
    def unraisable(args: Any) -> None:
        note("log", logger="sys", level="UNRAISABLE", text=str(args.err_msg or args.object)[:200], raised=args.exc_type)

    def warned(message: Any, category: type[Warning], *args: Any, **kwargs: Any) -> None:
        if issubclass(category, (RuntimeWarning, ResourceWarning)):
            note("log", logger="warnings", level="WARNING", text=str(message)[:200], raised=category.__name__)

    sys.unraisablehook = unraisable
    warnings.showwarning = warned


def _leave_with(parent: int) -> None:
    """End this process group if the one that started it is gone. The servers are real, and would run for ever."""

    def look() -> None:
        while True:
            time.sleep(2)
            try:
                os.kill(parent, 0)
            except OSError:
                os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=look, daemon=True).start()


_listen_to_logs()
_listen_to_the_interpreter()
_leave_with(int(os.environ["EVERYWHERE_PARENT"]))
