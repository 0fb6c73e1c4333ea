"""Tasks that begin at once, where Python has them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

if sys.version_info >= (3, 12):

    def start(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that has begun when this returns, and may have ended."""
        return asyncio.Task(work, loop=asyncio.get_running_loop(), eager_start=True)

else:

    def start(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that begins with the next turn of the event loop."""
        return asyncio.ensure_future(work)
