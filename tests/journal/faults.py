"""Faults between the journal and its database: below everything the journal has, above a database that is real."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sqlalchemy.exc import OperationalError

from hangup.journal import _database, _store

#: The statements, by the name the tests have for them.
STATEMENTS: dict[str, list[Any]] = {
    "open": [_store._OPEN],
    "close": [_store._CLOSE],
    "checkpoint": [_store._CHECKPOINT],
    "effects": [_store._EFFECTS],
    "sweep": [_store._SWEEP],
    "look up": [_store._GET],
    "cancel": [_store._ASK, _store._ASK_LOUDLY],
    "seen": [_store._SEEN],
}

#: raises: nothing has happened. hangs: neither happened nor answered. lost: it has happened, and nobody is told.
#: late: it has happened, and the answer never comes.
KINDS = ("raises", "hangs", "lost", "late")


def name_of(statement: Any, values: Mapping[str, Any]) -> str:
    for name, known in STATEMENTS.items():
        if any(statement is one for one in known):
            return name
    return "renew" if {"ids", "seconds"} <= values.keys() else "other"


async def to_its_end(send: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """Also if its time is over meanwhile, on a machine that stood still: what has to have happened has happened."""
    sending, cancelled = asyncio.ensure_future(send()), False
    while not sending.done():
        try:
            await asyncio.wait({sending})
        except asyncio.CancelledError:
            cancelled = True
    sending.result()
    if cancelled:
        raise asyncio.CancelledError


async def suffer(kind: str, send: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    if kind in {"lost", "late"}:
        await to_its_end(send)
    if kind in {"hangs", "late"}:
        await asyncio.Event().wait()
    raise OperationalError("injected", {}, ConnectionError(f"injected: {kind}"))


@contextmanager
def faults(choose: Callable[[str, Mapping[str, Any]], str | None]) -> Iterator[None]:
    """Have ``choose(name, values)`` say which fault a statement suffers; None for none."""
    send = _database._send

    async def send_or_suffer(connection: Any, statement: Any, values: Any) -> Any:
        kind = choose(name_of(statement, values), values)
        if kind is None:
            return await send(connection, statement, values)
        return await suffer(kind, lambda: send(connection, statement, values))

    _database._send = send_or_suffer
    try:
        yield
    finally:
        _database._send = send


class Once:
    """One fault per run: at its first statement of that name."""

    def __init__(self, name: str, kind: str) -> None:
        self._name, self._kind = name, kind
        self._done: set[str] = set()
        self.count = 0

    def __call__(self, name: str, values: Mapping[str, Any]) -> str | None:
        run = values.get("id") or values.get("run") or "all"
        if name != self._name or run in self._done:
            return None
        if run != "all":
            self._done.add(run)
        self.count += 1
        return self._kind


class Every:
    """A fault at the first and every ``nth`` statement of that name after it, whoever sends it."""

    def __init__(self, name: str, kind: str, nth: int) -> None:
        self._name, self._kind, self._nth = name, kind, nth
        self._seen = 0
        self.count = 0

    def __call__(self, name: str, values: Mapping[str, Any]) -> str | None:
        if name != self._name:
            return None
        self._seen += 1
        if (self._seen - 1) % self._nth:
            return None
        self.count += 1
        return self._kind
