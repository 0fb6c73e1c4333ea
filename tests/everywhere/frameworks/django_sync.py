"""Django, with a middleware that is sync only: each request crosses a thread."""

from __future__ import annotations

from collections.abc import Callable

from django.http import HttpRequest, HttpResponse


def sync_middleware(get_response: Callable[[HttpRequest], HttpResponse]) -> Callable[[HttpRequest], HttpResponse]:
    return lambda request: get_response(request)


from .django_app import app  # noqa: E402

__all__ = ["app"]
