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


def show(shown: Scope, scope: Scope) -> None:
    """Let what is outside see what the application has written into its scope, as it would had the two shared it.

    That is middleware, and the server's access log. Not the root path, by which the route is known until the end.
    """
    written = dict(shown)
    take = written.pop
    state = take("state", None)
    take("asgi", None)
    take("extensions", None)
    take("root_path", None)
    scope.update(written)
    _show_state(state, scope)


def show_rest(shown: Scope, scope: Scope) -> None:
    """The same, at the end: what may have been written since, or was kept back."""
    if "root_path" in shown:
        scope["root_path"] = shown["root_path"]
    _show_state(shown.get("state"), scope)


def _show_state(state: dict[str, Any] | None, scope: Scope) -> None:
    if not state or (len(state) == 1 and "hangup" in state):
        return  # nothing but what `present` has put there
    outside = scope.get("state")
    if outside is None:
        outside = scope["state"] = {}
    outside.update(state)
    outside.pop("hangup", None)


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
