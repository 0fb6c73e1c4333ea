"""How long a call may take, and how that is passed between services."""

from __future__ import annotations

import sys
from typing import Any

from starlette.types import Scope


def remaining_of(scope: Scope, header: bytes) -> float | None:
    """Seconds that the caller still waits, from a header in milliseconds. None if there is none that makes sense."""
    for name, value in scope.get("headers") or ():
        if name == header:
            try:
                return max(float(int(value)) / 1000, 0.0)
            except (ValueError, OverflowError):
                return None
    return None


def debugging() -> bool:
    """Whether a debugger is at work: nobody wants a deadline to fire at a breakpoint."""
    tracer: Any = sys.gettrace()
    if tracer is not None:
        module = getattr(tracer, "__module__", None) or type(tracer).__module__
        return not module.startswith("coverage")
    monitoring = getattr(sys, "monitoring", None)  # Python 3.12
    return monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None
