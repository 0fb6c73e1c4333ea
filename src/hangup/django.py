"""Django: the call as ``request.hangup``, also where a view runs in a thread.

::

    # asgi.py
    application = HangupMiddleware(get_asgi_application())

    # settings.py
    MIDDLEWARE = ["hangup.django.call_middleware", ...]
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from django.utils.decorators import sync_and_async_middleware

__all__ = ["call_middleware"]


def _middleware(get_response: Callable[[Any], Any]) -> Callable[[Any], Any]:
    if inspect.iscoroutinefunction(get_response):

        async def set_call(request: Any) -> Any:
            _set(request)
            return await get_response(request)

        return set_call

    def set_call_in_thread(request: Any) -> Any:
        _set(request)
        return get_response(request)

    return set_call_in_thread


def _set(request: Any) -> None:
    scope = getattr(request, "scope", {})
    request.hangup = (scope.get("extensions") or {}).get("hangup")


#: Sets ``request.hangup``: the `Call`, or None where `HangupMiddleware` is not mounted (under WSGI, say).
call_middleware: Callable[[Callable[[Any], Any]], Callable[[Any], Any]] = sync_and_async_middleware(_middleware)
