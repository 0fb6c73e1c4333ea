"""What a disconnect does to a call."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, get_args

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


def seconds(option: str, value: object, *, zero: bool = False) -> float:
    """``value`` as seconds, or a clear error that names ``option``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{option} takes seconds, not {value!r}")
    if math.isnan(value) or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{option} takes {'0 or more' if zero else 'more than 0'} seconds, not {value!r}")
    return float(value)
