"""What uvicorn is given: ``EVERYWHERE_FRAMEWORK`` names the module, mounted and witnessed."""

from __future__ import annotations

import importlib
import os
from typing import Any

from hangup import HangupMiddleware

from ..witness import Witness, note_outcome, policy_by_header

_module = importlib.import_module(f"{__package__}.{os.environ['EVERYWHERE_FRAMEWORK']}")


def _mount(app: Any) -> Any:
    if getattr(_module, "MOUNTS_ITSELF", False):
        return app
    return HangupMiddleware(app, policy=policy_by_header, observers=[note_outcome])


main = Witness(_mount(_module.app))
