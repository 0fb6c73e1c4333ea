"""Litestar: the call and its token as dependencies.

::

    app = HangupMiddleware(
        Litestar([answer], dependencies={"call": provide_call, "cancel_token": provide_token})
    )

Wrap the application: Litestar's own list of middlewares sits inside its exception handler.
"""

from __future__ import annotations

from litestar.di import Provide

from ._call import Call
from ._current import current_call
from ._stream import closing_stream
from ._token import CancelToken

__all__ = ["closing_stream", "provide_call", "provide_token"]


async def _call() -> Call:
    return current_call()


async def _token() -> CancelToken:
    return current_call().token


#: Injects the running `Call`.
provide_call: Provide = Provide(_call)
#: Injects its `CancelToken`.
provide_token: Provide = Provide(_token)
