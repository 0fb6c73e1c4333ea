"""The options of the middleware, and the errors that name a wrong one."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import FunctionType, MethodType
from typing import Any, Final, Literal, Protocol, get_args

from starlette.types import ASGIApp, Scope

from ._hooks import Hooks
from ._lifecycle import Cause, Outcome

Disconnect = Literal["cancel", "signal", "finish"]

#: The names a policy goes by.
NAMES: Final[tuple[Disconnect, ...]] = get_args(Disconnect)


@dataclass(frozen=True, slots=True)
class Policy:
    """What a disconnect does to a call, and how long the call may take. Times are seconds.

    ``"cancel"``: the token flips and the work is interrupted. ``"signal"``: the token flips, nothing else.
    ``"finish"``: the work goes on to its end, its output is discarded, the record says ``delivered=False``.

    It is whole: what is not given is the default, whatever the middleware says. `dataclasses.replace` changes one.

    :param grace: what an application that has been told may take before it is interrupted (again).
    :param timeout: what the call may take until its response is complete; None for no limit. Background tasks after
        the response are not subject to it. While a debugger is at work it does not fire.
    :param send_timeout: what one ``send()`` may take: a client that stays but does not read. None for no limit.
    """

    disconnect: Disconnect = "cancel"
    grace: float = 10.0
    timeout: float | None = None
    send_timeout: float | None = None

    def __post_init__(self) -> None:
        if self.disconnect not in NAMES:
            raise ValueError(f"policy is one of {', '.join(map(repr, NAMES))}, not {self.disconnect!r}")
        seconds("grace", self.grace, zero=True)
        for name in ("timeout", "send_timeout"):
            limit(name, getattr(self, name))


Observer = Callable[[Outcome], object]
CancelStatus = Literal["unset", "error"]


class RunJournal(Protocol):
    """What the core knows of a journal; `hangup.journal.Journal` is one."""

    async def __aenter__(self) -> Any:
        """The server starts."""

    async def __aexit__(self, *exc: object) -> None:
        """The server has stopped."""

    def attach(self, calls: Callable[[], Iterable[Any]]) -> None:
        """Learn where the calls in flight are to be found."""

    async def open_run(
        self,
        call: Any,
        name: str,
        *,
        id: str | None,  # noqa: A002 - what the table and its users call it
        owner: str | None,
        attributes: Mapping[str, Any] | None,
    ) -> Any:
        """See `Call.open_run`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of one middleware, validated. Times are seconds, sizes bytes."""

    policy: Callable[[Scope], Policy]
    policies: Mapping[str, Policy]
    deadline_header: bytes | None
    max_protect: float
    finalizer_timeout: float
    finalizer_budget: float
    shutdown_grace: float | None
    read_ahead: int
    present_spec: str | None
    observers: tuple[Observer, ...]
    hooks: Hooks
    journal: RunJournal | None


def limit(option: str, value: object) -> float | None:
    """``value`` as seconds, or None, which is no limit."""
    return None if value is None else seconds(option, value, more=", or None for no limit")


def seconds(option: str, value: object, *, zero: bool = False, more: str = "") -> float:
    """``value`` as seconds, or a clear error that names ``option``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{option} takes seconds{more}, not {value!r}")
    if math.isnan(value) or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{option} takes {'0 or more' if zero else 'more than 0'} seconds{more}, not {value!r}")
    return float(value)


def named_policies(default: Policy, named: Mapping[str, Policy]) -> dict[str, Policy]:
    """All policies that have a name: the three of everybody's, with the default's times, and the user's own."""
    policies: dict[str, Policy] = {name: replace(default, disconnect=name) for name in NAMES}
    if not isinstance(named, Mapping):
        raise TypeError(f"policies takes Policy objects by name, not {named!r}")
    for name, policy in named.items():
        if not isinstance(name, str) or not isinstance(policy, Policy):
            raise TypeError(f"policies takes Policy objects by name, not {name!r}: {policy!r}")
        if name in NAMES:  # a route that asks for it by name would keep the times of the application
            raise ValueError(f"policies takes names of your own, not {name!r}: the three are what they are everywhere")
        policies[name] = policy
    return policies


def policy_by_name(policies: Mapping[str, Policy], name: str) -> Policy:
    """The policy called ``name``, or an error that lists the names there are."""
    try:
        return policies[name]
    except KeyError:
        raise ValueError(f"policy is one of {', '.join(map(repr, policies))}, not {name!r}") from None


def application(app: ASGIApp) -> ASGIApp:
    """The application, seen to be one of ASGI 3."""
    if isinstance(app, Mapping) and "type" in app:  # uvicorn takes a class for an application of ASGI 2
        raise TypeError("the server was given the class HangupMiddleware: give it HangupMiddleware(app)")
    if not callable(app):
        raise TypeError(f"HangupMiddleware wraps an ASGI application, not {app!r}")
    if not takes(app, 3):
        raise TypeError(
            f"HangupMiddleware wraps an ASGI application, which is called with scope, receive and send, not {app!r}: "
            "a class or a factory has to be called first, and WSGI or ASGI 2 needs an adapter"
        )
    return app


def policy_of(
    policy: str | Policy | Callable[[Scope], Policy], policies: Mapping[str, Policy]
) -> Callable[[Scope], Policy]:
    """The policy of a call by its scope, from any form the option takes."""
    if isinstance(policy, str):
        fixed = policy_by_name(policies, policy)
    elif isinstance(policy, Policy):
        fixed = policy
    elif callable(policy) and not isinstance(policy, type) and not is_awaited(policy) and takes(policy, 1):
        return _seen_to_be_one(policy)
    else:
        raise TypeError(
            f"policy takes {', '.join(map(repr, policies))}, a Policy, or a function of the scope, not {policy!r}"
        )
    return lambda scope: fixed


def _seen_to_be_one(function: Callable[[Scope], Policy]) -> Callable[[Scope], Policy]:
    def policy(scope: Scope) -> Policy:
        found = function(scope)
        if not isinstance(found, Policy):
            raise TypeError(
                f"policy takes a function of the scope that returns a Policy; {function!r} returned {found!r}"
            )
        return found

    return policy


def takes(function: Callable[..., object], count: int) -> bool:
    """Whether ``function`` can be called with ``count`` arguments by position. True as well if nobody can say."""
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # some builtins have none
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def required_of(function: Callable[..., Any]) -> int:
    """How many arguments ``function`` requires by position. 0 as well if nobody can say."""
    if not hasattr(function, "__wrapped__"):  # the quick way: `inspect.signature` costs 20 µs
        plain: Any = function.__func__ if isinstance(function, MethodType) else function
        if isinstance(plain, FunctionType):
            required = plain.__code__.co_argcount - len(plain.__defaults__ or ())
            return required if plain is function else max(required - 1, 0)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins have none
        return 0
    return sum(p.kind in {p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD} and p.default is p.empty for p in parameters)


def requires(what: str, function: Callable[..., Any], most: int = 0) -> int:
    """How many arguments ``function`` requires, at most ``most``; or an error that says ``what`` is taken."""
    if not callable(function):
        hint = ": give the function, do not call it" if inspect.iscoroutine(function) else ""
        raise TypeError(f"{what}, not {function!r}{hint}")
    required = required_of(function)
    if required > most and not hasattr(function, "__wrapped__"):  # whoever wrapped it may add some
        raise TypeError(f"{what}, not {function!r}, which requires {required}: functools.partial fills them in")
    return min(required, most)


def is_awaited(function: object) -> bool:
    """Whether what calling ``function`` returns is to be awaited."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def header_name(option: str, value: str | None) -> bytes | None:
    """``value`` as ASGI spells header names."""
    if value is None:
        return None
    if not isinstance(value, str) or not value or not value.isascii() or not value.replace("-", "").isalnum():
        raise ValueError(f"{option} takes the name of an HTTP header, not {value!r}")
    return value.lower().encode()


def size(option: str, value: object) -> int:
    """``value`` as a number of bytes, or a clear error that names ``option``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{option} takes a number of bytes, not {value!r}")
    if value < 0:
        raise ValueError(f"{option} takes 0 bytes or more, not {value!r}")
    return value


def spec_version(value: object) -> str | None:
    """The ASGI version to show, None for the server's own."""
    if value not in ("2.4", "server"):
        raise ValueError(f"present_spec is '2.4' or 'server', not {value!r}")
    return None if value == "server" else str(value)


def flag(option: str, value: object) -> bool:
    """``value`` as true or false, or a clear error that names ``option``."""
    if not isinstance(value, bool):
        raise TypeError(f"{option} is True or False, not {value!r}")
    return value


def status_of_cancel(value: object) -> Callable[[Cause], CancelStatus]:
    """What status a span of canceled work gets, by the cause, from any form the option ``cancel_status`` takes."""
    if value == "unset":
        return lambda cause: "error" if cause is Cause.SERVER_SHUTDOWN else "unset"
    if value == "error":
        return lambda cause: "error"
    if isinstance(value, str):
        raise ValueError(f"cancel_status is 'unset', 'error' or a function of the Cause, not {value!r}")
    if not callable(value) or not takes(value, 1):
        raise TypeError(f"cancel_status takes 'unset', 'error' or a function of the Cause, not {value!r}")
    return value


def functions(observers: Iterable[Observer]) -> tuple[Observer, ...]:
    """The observers, each seen to be a function."""
    try:
        found = tuple(observers)
    except TypeError:
        raise TypeError(f"observers takes a list of functions, not {observers!r}") from None
    for observer in found:
        if not callable(observer) or not takes(observer, 1):
            raise TypeError(f"observers takes functions of an Outcome, not {observer!r}")
        if is_awaited(observer):
            raise TypeError(
                f"observers takes functions that are not awaited, not {observer!r}: add a finalizer instead"
            )
    return found


def journal_of(journal: RunJournal | None) -> RunJournal | None:
    """The journal, seen to be one."""
    if journal is not None and (isinstance(journal, type) or not callable(getattr(journal, "open_run", None))):
        raise TypeError(
            f"journal takes a hangup.journal.Journal, such as Journal('sqlite:///runs.db'), not {journal!r}"
        )
    return journal
