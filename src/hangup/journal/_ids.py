"""UUIDv7: ids that sort by the time they were made (RFC 9562, section 5.7)."""

from __future__ import annotations

import os
import time


def new_id() -> str:
    """A new id. Unique without asking anybody; ids of one process made a millisecond apart sort in that order."""
    random = os.urandom(10).hex()
    time_ = f"{time.time_ns() // 1_000_000 & (1 << 48) - 1:012x}"
    variant = "89ab"[int(random[3], 16) & 3]
    return f"{time_[:8]}-{time_[8:]}-7{random[:3]}-{variant}{random[4:7]}-{random[7:19]}"
