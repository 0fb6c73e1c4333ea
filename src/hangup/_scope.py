"""What a request says in its head, and what the application sees of it."""

from __future__ import annotations

from typing import Any

from starlette.types import Scope


def present(scope: Scope, call: Any, spec_version: str | None) -> Scope:
    """A copy of ``scope`` with ``call`` in it. Nothing of the server's is changed; some leave keys out."""
    shown = {
        **scope,
        "extensions": {**(scope.get("extensions") or {}), "hangup": call},
        "state": {**(scope.get("state") or {}), "hangup": call},
    }
    if spec_version is not None:
        shown["asgi"] = {**(scope.get("asgi") or {}), "spec_version": spec_version}
    return shown


def show_route(shown: Scope, scope: Scope) -> None:
    """Let what is mounted outside see where the router went, as it would had it shared its scope with the router."""
    for key in ("route", "endpoint", "path_params", "root_path"):
        if key in shown:
            scope[key] = shown[key]


def has_body(scope: Scope) -> bool:
    """Whether the request has a body, as far as its head says. uvicorn loses the empty one when the client leaves."""
    return scope.get("method") in {"POST", "PUT", "PATCH"} or any(
        name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
        for name, value in scope.get("headers") or ()
    )


def expects_continue(scope: Scope) -> bool:
    """Whether the client sends its body only once it is asked to: by the first look at it."""
    return any(name == b"expect" and value.lower() == b"100-continue" for name, value in scope.get("headers") or ())


def printable(text: str) -> str:
    """``text`` as it is, or quoted if it could break the line of a log."""
    return text if text.isprintable() else repr(text)
