"""`on_disconnect`: a policy for one route."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final, TypeVar

from ._current import current
from ._options import is_awaited, limit, seconds

F = TypeVar("F", bound=Callable[..., Any])


class Unset:
    """The default of an option that None means something to."""

    def __repr__(self) -> str:
        return "unset"


UNSET: Final = Unset()

#: Where `on_disconnect` leaves its mark, for those who can see an endpoint before it is entered.
MARK: Final = "__hangup_policy__"


def on_disconnect(
    policy: str | None = None,
    *,
    grace: float | Unset = UNSET,
    timeout: float | Unset | None = UNSET,
    send_timeout: float | Unset | None = UNSET,
) -> Callable[[F], F]:
    """Give one endpoint its own policy. It goes below the route decorator; above it, it changes nothing::

        @app.post("/orders")
        @on_disconnect("finish", timeout=None)
        async def order(...): ...

    :param policy: ``"cancel"``, ``"signal"``, ``"finish"`` or a name in the middleware's ``policies``. None keeps the
        policy and changes only what is given beside it.
    :param grace: as in `hangup.Policy`, like the next two. None for a timeout lifts the one of the application.

    Works with coroutine functions, plain functions, generators and methods, and keeps their signatures for dependency
    injection. It takes effect when the endpoint is entered; frameworks that put the endpoint into the scope
    (Starlette, FastAPI) let it take effect as soon as they have routed. Without the middleware it does nothing.

    :raises ValueError: when the endpoint is entered, for a policy nobody has defined; at once, for bad seconds.
    :raises TypeError: at once, for what is no name, no number, or no endpoint, and for a second one on an endpoint.
    """
    changes: dict[str, Any] = {}
    if not isinstance(grace, Unset):
        changes["grace"] = seconds("grace", grace, zero=True)
    for name, value in (("timeout", timeout), ("send_timeout", send_timeout)):
        if not isinstance(value, Unset):
            changes[name] = limit(name, value)
    if policy is not None and not isinstance(policy, str):
        raise TypeError(f"on_disconnect() takes the name of a policy, perhaps one in policies=, not {policy!r}")

    def enter() -> None:
        call = current.get()
        if call is not None:
            call.apply_route(policy, changes)

    def decorate(fn: F) -> F:
        if not callable(fn) or isinstance(fn, (type, staticmethod)):
            raise TypeError(f"on_disconnect() decorates an endpoint, a function or a method, not {fn!r}")
        if hasattr(fn, MARK):
            raise TypeError(f"on_disconnect() decorates an endpoint once, with all it wants: {fn!r} has one already")
        wrapper: F = _wrap(fn, enter)
        setattr(wrapper, MARK, (policy, changes))
        return wrapper

    return decorate


def _wrap(fn: Any, enter: Callable[[], None]) -> Any:
    """A function of the same kind as ``fn`` that calls ``enter`` first."""
    if inspect.isasyncgenfunction(fn):

        @functools.wraps(fn)
        async def stream(*args: Any, **kwargs: Any) -> Any:
            enter()
            generator = fn(*args, **kwargs)
            try:
                async for item in generator:
                    yield item
            finally:
                await generator.aclose()

        return stream
    if inspect.isgeneratorfunction(fn):

        @functools.wraps(fn)
        def parts(*args: Any, **kwargs: Any) -> Any:
            enter()
            return (yield from fn(*args, **kwargs))

        return parts
    if is_awaited(fn):

        @functools.wraps(fn)
        async def endpoint(*args: Any, **kwargs: Any) -> Any:
            enter()
            return await fn(*args, **kwargs)

        return endpoint

    @functools.wraps(fn)
    def plain(*args: Any, **kwargs: Any) -> Any:
        enter()
        return fn(*args, **kwargs)

    return plain
