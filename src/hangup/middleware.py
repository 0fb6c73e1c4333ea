"""`HangupMiddleware`: what is mounted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Literal
from weakref import WeakKeyDictionary

from starlette.types import ASGIApp, Receive, Scope, Send

from ._call import Call, Here
from ._options import (
    Disconnect,
    Observer,
    Options,
    Policy,
    functions,
    policy_of,
    seconds,
    size,
    spec_version,
)
from ._runtime import current_loop

#: Seconds a call lasts before anything is started for it.
WATCH_AFTER: Final = 0.02


class HangupMiddleware:
    """Gives every HTTP request of ``app`` one life and one terminal state.

    Mount it outermost, but inside the telemetry: ``app.add_middleware(HangupMiddleware)`` last, or
    ``app = HangupMiddleware(app)``. Works on every ASGI server, under asyncio and trio. Mounted twice, the inner one
    steps aside.

    :param policy: what a disconnect does: ``"cancel"`` (the default), ``"signal"``, ``"finish"``, a `Policy`, or a
        function of the scope that returns a `Policy`.
    :param grace: seconds that a handler which has been told may take before it is interrupted, and between the
        interruptions of one that goes on regardless. A `Policy` has its own.
    :param finalizer_timeout: seconds that one finalizer may take.
    :param finalizer_budget: seconds that all finalizers of a call may take together.
    :param read_ahead: how many bytes of an unread request body may be held so that a disconnect behind them is seen.
    :param present_spec: the ASGI version shown to the application. ``"2.4"`` makes Starlette stream in the task of
        the handler; ``"server"`` keeps what the server says.
    :param observers: functions called with the `Outcome` of every call, after its finalizers. One that raises is
        logged.
    :raises TypeError: for an option of the wrong kind.
    :raises ValueError: for an option out of range. Both name the option and the choices.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        policy: Disconnect | Policy | Callable[[Scope], Policy] = "cancel",
        grace: float = 10.0,
        finalizer_timeout: float = 5.0,
        finalizer_budget: float = 10.0,
        read_ahead: int = 65536,
        present_spec: Literal["2.4", "server"] = "2.4",
        observers: Iterable[Observer] = (),
    ) -> None:
        if not callable(app):
            raise TypeError(f"HangupMiddleware wraps an ASGI application, not {app!r}")
        self.app = app
        self._options = Options(
            policy=policy_of(policy, grace),
            finalizer_timeout=seconds("finalizer_timeout", finalizer_timeout),
            finalizer_budget=seconds("finalizer_budget", finalizer_budget),
            read_ahead=size("read_ahead", read_ahead),
            present_spec=spec_version(present_spec),
            observers=functions(observers),
        )
        self._heres: WeakKeyDictionary[object, Here] = WeakKeyDictionary()
        self._here: tuple[object, Here | None] = (None, None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or "hangup" in (scope.get("extensions") or ()):
            await self.app(scope, receive, send)
            return
        await Call(self._options, self._find_here(), scope, receive, send).run(self.app)

    def _find_here(self) -> Here:
        loop = current_loop()
        known, here = self._here
        if here is None or known is not loop:
            here = self._heres.get(loop)
            if here is None:
                here = self._heres[loop] = Here(WATCH_AFTER)
            self._here = (loop, here)
        return here
