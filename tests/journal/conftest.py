from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import asyncpg  # type: ignore[import-untyped]
import pytest

from hangup.journal import Journal

from .helpers import eventually
from .postgres import PostgresServer


@pytest.fixture(params=[("asyncio", {})], ids=["asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    server = PostgresServer(durable=False)
    try:
        server.start()
        yield server
    finally:
        server.remove()


async def empty_database(server: PostgresServer) -> str:
    """The server's one database, emptied: a new one is three hundred files, and takes as many times longer."""
    connection = await asyncpg.connect(**server.dsn())
    await connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    await connection.close()
    return server.url()


async def threads_to_end() -> None:
    """aiosqlite does not wait for the thread of a connection that could not be opened; and that needs the loop."""
    await eventually(lambda: not any("_connection_worker" in thread.name for thread in threading.enumerate()))


@pytest.fixture
async def postgres_url(postgres_server: PostgresServer) -> str:
    """An empty database."""
    return await empty_database(postgres_server)


@pytest.fixture
def file_url(tmp_path: Path) -> str:
    """For tests that have no event loop yet."""
    return f"sqlite:///{tmp_path}/runs.db"


@pytest.fixture
async def sqlite_url(tmp_path: Path) -> AsyncIterator[str]:
    yield f"sqlite:///{tmp_path}/runs.db"
    await threads_to_end()


@pytest.fixture(params=["sqlite", "postgresql"])
async def url(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    """Each database in turn, empty."""
    if request.param == "postgresql":
        yield await empty_database(request.getfixturevalue("postgres_server"))
    else:
        yield f"sqlite:///{tmp_path}/runs.db"
        await threads_to_end()


@pytest.fixture
async def journal(url: str) -> AsyncIterator[Journal]:
    async with Journal(url) as journal:
        yield journal
