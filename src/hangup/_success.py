"""`before_success`: what must have happened before the client can see success."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any, Final, cast

from starlette.types import Message, Scope

from ._bounded import Bounded, name_of
from ._options import requires
from ._runtime import endure, spawn

if TYPE_CHECKING:
    from ._call import Call

logger: Final = logging.getLogger("hangup")


class HookFailure(Exception):
    """Raise it in a ``before_success`` hook to choose what the client is answered instead of success.

    Raised elsewhere it is an error like any other. `Call.refuse` answers with one from anywhere.

    :param detail: a short text for the client. Nothing else of an exception ever reaches one.
    :param status: the HTTP status, 400 to 599.
    :param headers: more headers, such as ``{"Retry-After": "5"}``.
    :raises TypeError: for one of the wrong kind.
    :raises ValueError: for another status.
    """

    def __init__(
        self, detail: str = "Internal Server Error", *, status: int = 500, headers: Mapping[str, str] | None = None
    ) -> None:
        if not isinstance(detail, str):
            raise TypeError(f"HookFailure() takes a text for the client, not {detail!r}; the status is status=")
        if isinstance(status, bool) or not isinstance(status, int):
            raise TypeError(f"HookFailure(status=) takes a number, 400 to 599, not {status!r}")
        if not 400 <= status <= 599:
            raise ValueError(f"HookFailure(status=) takes 400 to 599, not {status!r}")
        if headers is not None and not _is_texts(headers):
            raise TypeError(f"HookFailure(headers=) takes texts by name, {{'Retry-After': '5'}}, not {headers!r}")
        super().__init__(detail)
        self.detail: str = detail
        self.status: int = status
        self.headers: dict[str, str] = {name: str(value) for name, value in (headers or {}).items()}


class Hook:
    """One registered hook, with the context it was registered in."""

    __slots__ = ("_context", "_fn", "name")

    def __init__(self, fn: Callable[[], object]) -> None:
        requires("before_success() takes a function without arguments", fn)
        self._fn = fn
        self._context: Context = copy_context()
        self.name = name_of(fn)

    async def run(self, timeout: float) -> BaseException | None:
        """Run, for at most ``timeout`` seconds, out of reach of any cancellation of the call. What went wrong."""
        run = Bounded(self._fn)
        await run.run(timeout, self._context, f"hangup: before success {self.name}")
        if run.cut:
            return TimeoutError(f"the before_success hook {self.name} took longer than {timeout:g} s")
        return run.error


class Commit(Hook):
    """The hook of a journal: a coroutine function, on asyncio, that sees to it by itself that it ends in time.

    Nothing has to interrupt it, so it needs less around it than a `Bounded`; every run waits for it.
    """

    __slots__ = ()

    async def run(self, timeout: float) -> BaseException | None:
        """Run, out of reach of any cancellation of the call. What went wrong."""
        errors: list[BaseException] = []
        job = spawn(self._run, errors, context=self._context, name=f"hangup: {self.name}")
        if not await endure(job, timeout):
            job.cancel()
            return TimeoutError(f"{self.name} took longer than {timeout:g} s")
        return errors[0] if errors else None

    async def _run(self, errors: list[BaseException]) -> None:
        try:
            await cast("Coroutine[Any, Any, object]", self._fn())
        except BaseException as exc:
            errors.append(exc)
            if not isinstance(exc, Exception):
                raise


async def run_hooks(hooks: Iterable[Hook], call: Call) -> BaseException | None:
    """Run ``hooks`` in order until one fails. That failure is logged at ERROR and returned."""
    for hook in hooks:
        error = await hook.run(call.hook_timeout)
        if error is not None:
            logger.error(
                "before_success hook %s of %s failed: the client is not told of success",
                hook.name,
                call.who,
                exc_info=error,
                extra={"hangup_hook": hook.name},
            )
            return error
    return None


def failure_response(error: BaseException, scope: Scope) -> list[Message]:
    """What a client is answered when a hook failed: JSON if it asks for that, else text. Raises nothing."""
    failure = error if isinstance(error, HookFailure) else HookFailure()
    accept = b",".join(value for name, value in scope.get("headers") or () if name == b"accept")
    if b"json" in accept:
        import json  # only here: `import hangup` is to be quick

        kind, body = "application/json", json.dumps({"detail": failure.detail}).encode()
    else:
        kind, body = "text/plain; charset=utf-8", failure.detail.encode(errors="replace")
    headers = {"content-type": kind, **{name.lower(): value for name, value in failure.headers.items()}}
    headers["content-length"] = str(len(body))
    pairs = [(_encoded(name), _encoded(value)) for name, value in headers.items()]
    return [
        {"type": "http.response.start", "status": failure.status, "headers": pairs},
        {"type": "http.response.body", "body": body, "more_body": False},
    ]


def _is_texts(headers: object) -> bool:
    """Whether they are headers; a number will do for a value."""
    return isinstance(headers, Mapping) and all(
        isinstance(name, str) and isinstance(value, (str, int)) for name, value in headers.items()
    )


def _encoded(text: str) -> bytes:
    """``text`` as a header may have it: no line break of it begins another."""
    return "".join(c if c.isprintable() else "?" for c in text).encode("latin-1", "replace")
