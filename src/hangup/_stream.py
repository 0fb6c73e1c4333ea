"""`closing_stream`: an iterator whose cleanup runs on time."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Generator, Iterable, Iterator
from contextvars import copy_context
from typing import Any, Final, Generic, Self, TypeVar

import anyio
import anyio.to_thread

from ._bounded import Bounded
from ._current import current, protect

T = TypeVar("T")

#: Seconds that a generator may take to close.
CLOSE_TIMEOUT: Final = 5.0

_END: Final[Any] = object()


def closing_stream(stream: AsyncIterable[T] | Iterable[T]) -> AsyncIterator[T]:
    """Iterate ``stream``, and close it when the response ends, however that was::

        return StreamingResponse(closing_stream(rows()))

    Starlette, FastAPI and Litestar leave a sync generator that was not exhausted to the garbage collector, and its
    ``finally`` runs after it, or never. Here it runs before the finalizers of the call have ended. A sync iterable
    is iterated, and closed, in worker threads; an async generator in the task that iterates it, also when it was left
    at its ``yield``, because the client did not read. Only one that another task than the handler's iterated is closed
    elsewhere: by a finalizer, which also says so if closing fails.
    """
    if not isinstance(stream, (AsyncIterable, Iterable)):
        raise TypeError(f"closing_stream() takes an iterable or an async iterable, not {stream!r}")
    return Closing(stream)


class Closing(AsyncIterator[T], Generic[T]):
    """What `closing_stream` returns."""

    def __init__(self, stream: AsyncIterable[T] | Iterable[T]) -> None:
        self._stream: AsyncIterator[T] | Iterator[T]
        self._stream = aiter(stream) if isinstance(stream, AsyncIterable) else iter(stream)
        self._ended = False
        self._error: BaseException | None = None
        self._task: int | None = None
        call = current.get()
        if call is not None:
            call.add_finalizer(self.aclose, name="closing_stream")
            call.streams = [*call.streams, self]

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        if self._task is None:
            self._task = anyio.get_current_task().id
        try:
            if isinstance(self._stream, AsyncIterator):
                return await anext(self._stream)
            item: T = await anyio.to_thread.run_sync(next, self._stream, _END)
        except BaseException:
            with protect():
                await self.aclose()
            raise
        if item is _END:
            self._ended = True
            raise StopAsyncIteration
        return item

    async def close_left_behind(self) -> None:
        """Close an async generator that this task iterated and left at its ``yield``: elsewhere it could not leave its
        scopes and context variables in order, nor could it here inside a scope of ours. Never raises; `aclose` does.
        """
        if self._ended or not isinstance(self._stream, AsyncGenerator) or self._task != anyio.get_current_task().id:
            return
        self._ended = True
        try:
            await self._stream.aclose()
        except anyio.get_cancelled_exc_class():
            self._error = TimeoutError("the generator was cut off while it closed")
        except Exception as exc:
            self._error = exc

    async def aclose(self) -> None:
        """Close what is iterated. A second call does nothing."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._ended:
            return
        self._ended = True
        if isinstance(self._stream, AsyncGenerator):
            await self._stream.aclose()
        elif isinstance(self._stream, Generator):
            closing = Bounded(self._stream.close)
            await closing.run(CLOSE_TIMEOUT, copy_context(), "hangup: closing_stream")
            if closing.error is not None:
                raise closing.error
