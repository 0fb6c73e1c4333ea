"""What happens to the work when the client hangs up."""

from ._call import Call
from ._current import add_finalizer, current_call, step
from ._lifecycle import Cause, FinalizerRecord, Outcome, Phase, State, StepRecord
from ._options import Policy
from ._steps import Step
from ._token import Canceled, CancelToken
from .middleware import HangupMiddleware

__all__ = [
    "Call",
    "CancelToken",
    "Canceled",
    "Cause",
    "FinalizerRecord",
    "HangupMiddleware",
    "Outcome",
    "Phase",
    "Policy",
    "State",
    "Step",
    "StepRecord",
    "add_finalizer",
    "current_call",
    "step",
]
