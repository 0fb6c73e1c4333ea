"""Stands between a service and PostgreSQL and makes one kind of statement go wrong, on real sockets.

``fails``: the connection breaks before the statement arrives. ``hangs``: the statement never arrives, and the
connection stays for as long as the fault does. ``loses``: the statement arrives and is committed, and the connection
breaks before the reply: once, whoever asks again is answered.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Proxy:
    """Statements that contain ``words`` go wrong, ``how`` says in which way, as long as both are set."""

    def __init__(self, database: str) -> None:
        self.database = database  #: the path of the server's Unix socket
        self.port = 0
        self.hits = 0
        self._fault: tuple[bytes, str] | None = None
        self._held: set[asyncio.Task[None]] = set()

    @contextmanager
    def fault(self, words: str, how: str) -> Iterator[None]:
        """Let statements that contain ``words`` go wrong inside the block."""
        self._fault, self.hits = (words.encode(), how), 0
        try:
            yield
        finally:
            self._fault = None

    @contextmanager
    def running(self) -> Iterator[Proxy]:
        """Serve in a thread, on a free port."""
        loop = asyncio.new_event_loop()
        server = loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            server.close()
            loop.run_until_complete(self._end())
            loop.close()

    async def _end(self) -> None:
        for task in self._held:
            task.cancel()
        await asyncio.gather(*self._held, return_exceptions=True)

    async def _serve(self, client: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._held.add(task)
        server, forth = await asyncio.open_unix_connection(self.database)
        replies = asyncio.create_task(self._pass_back(server, back))
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                await self._pass_on(client, forth, server, replies)
        finally:
            replies.cancel()
            for writer in (back, forth):
                writer.transport.abort()
            self._held.discard(task)

    async def _pass_back(self, server: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await server.read(65536):
                back.write(data)
                await back.drain()
            back.close()

    async def _pass_on(
        self,
        client: asyncio.StreamReader,
        forth: asyncio.StreamWriter,
        server: asyncio.StreamReader,
        replies: asyncio.Task[None],
    ) -> None:
        """Message by message: Parse names a statement, Bind uses it, Execute runs it, Sync ends the exchange."""
        statements: dict[bytes, bytes] = {}
        bound = b""
        losing = False
        size = await client.readexactly(4)
        forth.write(size + await client.readexactly(int.from_bytes(size, "big") - 4))
        while True:
            kind = await client.readexactly(1)
            size = await client.readexactly(4)
            body = await client.readexactly(int.from_bytes(size, "big") - 4)
            if kind == b"P":
                name, _, rest = body.partition(b"\0")
                statements[name] = rest
            elif kind == b"B":
                bound = statements.get(body.split(b"\0", 2)[1], b"")
            elif kind == b"E" and self._fault is not None and self._fault[0] in bound:
                self.hits += 1
                how = self._fault[1]
                if how == "loses":
                    self._fault = None  # once: whoever asks again is answered
                if how == "fails":
                    return
                if how == "hangs":
                    while self._fault is not None:  # noqa: ASYNC110
                        await asyncio.sleep(0.02)  # another thread lifts it
                    return
                losing = True
                replies.cancel()
                await asyncio.wait([replies])
            forth.write(kind + size + body)
            if kind == b"S" and losing:  # the reply ends with "ready for query", in autocommit that is after the commit
                reply = b""
                while not reply.endswith(b"Z\0\0\0\5I"):
                    reply += await server.readexactly(1)
                return
