"""Django, with an async view, a sync one, and the wrapper."""

from __future__ import annotations

import os
from typing import Any

import django
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.urls import path

from . import base

MIDDLEWARE = ["hangup.django.call_middleware"]
if os.environ["EVERYWHERE_FRAMEWORK"] == "django_sync":
    MIDDLEWARE.append(f"{__package__}.django_sync.sync_middleware")

settings.configure(
    DEBUG=False,
    SECRET_KEY="of the matrix",
    ROOT_URLCONF=__name__,
    ALLOWED_HOSTS=["*"],
    MIDDLEWARE=MIDDLEWARE,
    LOGGING_CONFIG=None,
)
django.setup()


async def plain(request: HttpRequest) -> HttpResponse:
    assert request.hangup is base.current_call()  # type: ignore[attr-defined]
    return HttpResponse(base.plain())


async def idle(request: HttpRequest) -> HttpResponse:
    return HttpResponse(await base.idle())


def thread(request: HttpRequest) -> HttpResponse:
    return HttpResponse(base.in_thread(request.hangup))  # type: ignore[attr-defined]


async def body(request: HttpRequest) -> HttpResponse:
    return HttpResponse(base.read(len(request.body)))


async def stream(request: HttpRequest) -> StreamingHttpResponse:
    return StreamingHttpResponse(base.chunks())


async def sse(request: HttpRequest) -> StreamingHttpResponse:
    return StreamingHttpResponse(base.chunks(), content_type="text/event-stream")


async def fails(request: HttpRequest) -> HttpResponse:
    base.fail()
    return HttpResponse()


urlpatterns: list[Any] = [path(fn.__name__, fn) for fn in (plain, idle, thread, body, stream, sse, fails)]

app = get_asgi_application()
