"""FastAPI: the call and its token as dependencies.

::

    @app.get("/answer")
    async def answer(token: CancelTokenDep) -> str: ...
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends
from starlette.requests import HTTPConnection

from ._call import Call
from ._stream import closing_stream
from ._token import CancelToken
from .starlette import call_of

__all__ = ["CallDep", "CancelTokenDep", "call", "cancel_token", "closing_stream"]


# Coroutine functions, because FastAPI sends plain ones through a thread.


async def call(conn: HTTPConnection) -> Call:
    """The running call, as a dependency."""
    return call_of(conn)


async def cancel_token(conn: HTTPConnection) -> CancelToken:
    """The token of the running call, as a dependency."""
    return call_of(conn).token


CallDep = Annotated[Call, Depends(call)]
CancelTokenDep = Annotated[CancelToken, Depends(cancel_token)]
