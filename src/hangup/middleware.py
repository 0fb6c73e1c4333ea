"""`HangupMiddleware`: what is mounted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from types import MappingProxyType
from typing import Final, Literal
from weakref import WeakKeyDictionary

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ._call import Call
from ._hooks import Hooks, hooks_of, tell
from ._inside import move_in, run_inside
from ._lifecycle import Cause
from ._options import (
    CancelStatus,
    Observer,
    Options,
    Policy,
    RunJournal,
    application,
    flag,
    functions,
    header_name,
    journal_of,
    named_policies,
    policy_of,
    seconds,
    size,
    spec_version,
    status_of_cancel,
)
from ._runtime import current_loop
from ._shutdown import Here
from ._signals import Link, chain, listen
from ._websocket import WebSocketCall
from .telemetry import Telemetry

logger: Final = logging.getLogger("hangup")

#: Seconds a call lasts before anything is started for it.
WATCH_AFTER: Final = 0.02


class HangupMiddleware:
    """Gives every HTTP request and every WebSocket of ``app`` one life and one terminal state.

    Mount it outermost, but inside the telemetry: ``app.add_middleware(HangupMiddleware)`` last, or
    ``app = HangupMiddleware(app)``. Works on every ASGI server, under asyncio and trio. Around telemetry that it knows
    (FastAPI's, Starlette's, contrib's) it puts a piece of itself inside, when the first scope comes. Mounted twice,
    the inner one steps aside, and is that piece for whatever telemetry is between the two. Its options count for
    nothing, which is said once, at WARNING.

    :param policy: what a disconnect does: ``"cancel"`` (the default), ``"signal"``, ``"finish"``, a name in
        ``policies``, a `Policy`, or a function of the scope that returns a `Policy`. A route may say otherwise with
        `hangup.on_disconnect`, and a running call with ``current_call().policy``; the most specific wins.
    :param policies: more policies, by name: ``{"upload": Policy("finish", timeout=3600)}``.
    :param grace: seconds that a handler which has been told may take before it is interrupted, and between the
        interruptions of one that goes on regardless. A `Policy` has its own, as it has of the next two.
    :param timeout: seconds that a call may take until its response is complete. After that the client is answered 504,
        or its connection is cut if the response has started, and the work is interrupted. None: no limit.
    :param send_timeout: seconds that one ``send`` may take: a client that stays but does not read. None: no limit.
    :param deadline_header: the name of a request header with the milliseconds that the caller will still wait. It can
        shorten ``timeout``, never lengthen it; a call whose time is over is answered 504 and not started. None: no
        header is looked at.
    :param max_protect: seconds that `hangup.protect` may hold an interruption off.
    :param finalizer_timeout: seconds that one finalizer, ``cancel=`` or ``before_success`` hook may take.
    :param finalizer_budget: seconds that all finalizers of a call may take together.
    :param shutdown_grace: seconds that calls in flight may go on after SIGTERM or SIGINT; then they are canceled, with
        cause ``server_shutdown``. Less than the server's own limit, if it has one. None: they are not canceled before
        the server's ``lifespan.shutdown``.
    :param read_ahead: how many bytes of an unread request body, or of WebSocket messages, may be held so that a
        disconnect behind them is seen.
    :param present_spec: the ASGI version shown to the application. ``"2.4"`` makes Starlette stream in the task of
        the handler; ``"server"`` keeps what the server says.
    :param observers: functions called with the `Outcome` of every call, after its finalizers. One that raises is
        logged.
    :param telemetry: whether calls, steps and finalizers are recorded with OpenTelemetry, where that is set up. False
        also leaves the application as it is.
    :param cancel_status: the status of a span whose work was canceled. ``"unset"`` (the default): a client that leaves
        is no error, a shutdown of the server is. ``"error"``: every cancellation is. Or a function of the `Cause` that
        returns one or the other. Work that timed out or failed is an error in any case.
    :param detailed_metrics: whether the durations of steps and finalizers are recorded as metrics.
    :param journal: a `hangup.journal.Journal`, for calls that are runs somebody will ask about later: see
        `Call.open_run`. It is started with the application and closed after it.
    :raises TypeError: for an option of the wrong kind.
    :raises ValueError: for an option out of range. Both name the option and the choices.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        policy: str | Policy | Callable[[Scope], Policy] = "cancel",
        policies: Mapping[str, Policy] = MappingProxyType({}),
        grace: float = 10.0,
        timeout: float | None = None,
        send_timeout: float | None = None,
        deadline_header: str | None = None,
        max_protect: float = 30.0,
        finalizer_timeout: float = 5.0,
        finalizer_budget: float = 10.0,
        shutdown_grace: float | None = None,
        read_ahead: int = 65536,
        present_spec: Literal["2.4", "server"] = "2.4",
        observers: Iterable[Observer] = (),
        telemetry: bool = True,
        cancel_status: CancelStatus | Callable[[Cause], CancelStatus] = "unset",
        detailed_metrics: bool = False,
        journal: RunJournal | None = None,
    ) -> None:
        given = locals()
        self.app = application(app)
        named = named_policies(Policy("cancel", grace, timeout, send_timeout), policies)
        self._options = Options(
            policy=policy_of(policy, named),
            policies=named,
            deadline_header=header_name("deadline_header", deadline_header),
            max_protect=seconds("max_protect", max_protect),
            finalizer_timeout=seconds("finalizer_timeout", finalizer_timeout),
            finalizer_budget=seconds("finalizer_budget", finalizer_budget),
            shutdown_grace=None if shutdown_grace is None else seconds("shutdown_grace", shutdown_grace, zero=True),
            read_ahead=size("read_ahead", read_ahead),
            present_spec=spec_version(present_spec),
            observers=functions(observers),
            hooks=_hooks_of(
                flag("telemetry", telemetry),
                status_of_cancel(cancel_status),
                flag("detailed_metrics", detailed_metrics),
            ),
            journal=journal_of(journal),
        )
        # What is lost if this turns out to be inside another, which has the say.
        defaults = HangupMiddleware.__init__.__kwdefaults__ or {}
        self._unheard = [name for name, default in defaults.items() if given[name] != default]
        self._heres: WeakKeyDictionary[object, Here] = WeakKeyDictionary()
        self._here: tuple[object, Here | None] = (None, None)
        if journal is not None:
            journal.attach(lambda: self.calls_in_flight)

    @property
    def calls_in_flight(self) -> tuple[Call, ...]:
        """The calls that are running now, those of every event loop."""
        return tuple(call for here in list(self._heres.values()) for call in list(here.calls))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call_class = _CALLS.get(scope["type"])
        if call_class is not None and "hangup" not in (scope.get("extensions") or ()):
            await call_class(self._options, self._find_here(), scope, receive, send).run(self.app)
        elif scope["type"] == "lifespan":
            await self._run_lifespan(scope, receive, send)
        else:
            if self._unheard and call_class is not None:
                unheard, self._unheard = self._unheard, []
                logger.warning(
                    "HangupMiddleware is mounted inside another, which has the say: give it the options of this one, "
                    "which count for nothing (%s)",
                    ", ".join(unheard),
                )
            await run_inside(self.app, scope, receive, send)

    async def drain(self, timeout: float) -> bool:
        """Cancel every call of this event loop, with cause ``server_shutdown``, and wait for their ends.

        For those who handle signals themselves. Sets `Call.shutting_down`; calls that come later are answered 503 and
        not started. Returns whether all calls and finalizers have ended within ``timeout`` seconds. A second call
        waits for the same. Call it on the event loop, and never from inside a call: that would wait for itself.
        """
        return await self._find_here().drain(seconds("timeout", timeout, zero=True))

    async def _run_lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hear of signals from startup on, and hold ``lifespan.shutdown`` back until calls and finalizers have ended.

        Until then the application must not take away what they need.
        """
        here = self._look_up(current_loop())
        journal = self._options.journal
        links: list[Link] = []
        journals = AsyncExitStack()

        async def receive_in_order() -> Message:
            message = await receive()
            if message["type"] == "lifespan.startup":
                here.restart()
                links.extend(chain())
                here.hears = bool(links)
                self._here = (None, None)
                if journal is not None:
                    try:
                        await journals.enter_async_context(journal)
                    except Exception as exc:
                        # Else servers take it for an application without lifespan, and serve it without its startup.
                        await send({"type": "lifespan.startup.failed", "message": f"hangup: {exc}"})
                        raise
            elif message["type"] == "lifespan.shutdown":
                await here.hold(self._options.finalizer_budget)
            return message

        async def send_in_order(message: Message) -> None:
            if message["type"] in {"lifespan.shutdown.complete", "lifespan.shutdown.failed"}:
                await journals.aclose()  # servers stop their loop once they have this
            await send(message)

        try:
            await self.app(scope, receive_in_order, send_in_order)
        finally:
            for link in links:
                link.release()
            here.hears = False
            if not here.calls:
                here.restart()
            await journals.aclose()

    def _find_here(self) -> Here:
        loop = current_loop()
        known, here = self._here
        if here is None or known is not loop:
            here = self._look_up(loop)
            if not here.hears:  # no lifespan came by, or it came before the server handled signals
                here.hears = True
                chain(lasting=True)
            self._here = (loop, here)
        return here

    def _look_up(self, loop: object) -> Here:
        here = self._heres.get(loop)
        if here is None:
            here = self._heres[loop] = Here(WATCH_AFTER, self._options.shutdown_grace)
            listen(here)
            if self._options.hooks.call_inside is not None:
                tell(move_in, self.app)
        return here


_CALLS: Final[dict[str, type[Call]]] = {"http": Call, "websocket": WebSocketCall}


def _hooks_of(telemetry: bool, cancel_status: Callable[[Cause], CancelStatus], detailed: bool) -> Hooks:
    return hooks_of(Telemetry(cancel_status, detailed=detailed)) if telemetry else Hooks()
