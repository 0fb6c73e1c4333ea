"""The options of the middleware, and the errors that name a wrong one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal, get_args

from starlette.types import Scope

from ._lifecycle import Outcome

Disconnect = Literal["cancel", "signal", "finish"]

#: The names a policy goes by.
NAMES: Final[tuple[str, ...]] = get_args(Disconnect)


@dataclass(frozen=True, slots=True)
class Policy:
    """What a disconnect does to a call.

    ``"cancel"``: the token flips and the work is interrupted. ``"signal"``: the token flips, nothing else.
    ``"finish"``: the work goes on to its end, its output is discarded, the record says ``delivered=False``.

    ``grace``: seconds that an application which has been told may take before it is interrupted (again).
    """

    disconnect: Disconnect = "cancel"
    grace: float = 10.0

    def __post_init__(self) -> None:
        if self.disconnect not in NAMES:
            raise ValueError(f"policy is one of {', '.join(map(repr, NAMES))}, not {self.disconnect!r}")
        seconds("grace", self.grace, zero=True)


Observer = Callable[[Outcome], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of one middleware, validated. Times are seconds, sizes bytes."""

    policy: Callable[[Scope], Policy]
    finalizer_timeout: float
    finalizer_budget: float
    read_ahead: int
    present_spec: str | None
    observers: tuple[Observer, ...]


def seconds(option: str, value: object, *, zero: bool = False) -> float:
    """``value`` as seconds, or a clear error that names ``option``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{option} takes seconds, not {value!r}")
    if math.isnan(value) or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{option} takes {'0 or more' if zero else 'more than 0'} seconds, not {value!r}")
    return float(value)


def policy_of(policy: object, grace: float) -> Callable[[Scope], Policy]:
    """The policy of a call by its scope, from any form the option takes."""
    if isinstance(policy, str):
        fixed = Policy(policy, grace)  # type: ignore[arg-type]  # it says what is wrong
    elif isinstance(policy, Policy):
        fixed = policy
    elif callable(policy):
        return policy
    else:
        raise TypeError(
            f"policy takes {', '.join(map(repr, NAMES))}, a Policy, or a function of the scope, not {policy!r}"
        )
    return lambda scope: fixed


def size(option: str, value: object) -> int:
    """``value`` as a number of bytes, or a clear error that names ``option``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{option} takes a number of bytes, not {value!r}")
    if value < 0:
        raise ValueError(f"{option} takes 0 bytes or more, not {value!r}")
    return value


def spec_version(value: object) -> str | None:
    """The ASGI version to show, None for the server's own."""
    if value not in {"2.4", "server"}:
        raise ValueError(f"present_spec is '2.4' or 'server', not {value!r}")
    return None if value == "server" else str(value)


def functions(observers: Iterable[Observer]) -> tuple[Observer, ...]:
    """The observers, each seen to be a function."""
    try:
        found = tuple(observers)
    except TypeError:
        raise TypeError(f"observers takes a list of functions, not {observers!r}") from None
    for observer in found:
        if not callable(observer):
            raise TypeError(f"observers takes functions of an Outcome, not {observer!r}")
    return found
