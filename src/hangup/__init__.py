"""What happens to the work when the client hangs up."""

from ._call import Call
from ._current import add_finalizer, before_success, current_call, protect, step
from ._lifecycle import Cause, FinalizerRecord, Outcome, Phase, State, StepRecord
from ._options import Policy
from ._route import on_disconnect
from ._steps import AmbiguousOutcome, Step
from ._success import HookFailure
from ._token import Canceled, CancelToken
from .middleware import HangupMiddleware

__all__ = [
    "AmbiguousOutcome",
    "Call",
    "CancelToken",
    "Canceled",
    "Cause",
    "FinalizerRecord",
    "HangupMiddleware",
    "HookFailure",
    "Outcome",
    "Phase",
    "Policy",
    "State",
    "Step",
    "StepRecord",
    "add_finalizer",
    "before_success",
    "current_call",
    "on_disconnect",
    "protect",
    "step",
]
