"""UUIDv7: ids that sort by the time they were made (RFC 9562, section 5.7)."""

from __future__ import annotations

import os
import time
import uuid


def new_id() -> str:
    """A new id. Unique without asking anybody; ids of one process made a millisecond apart sort in that order."""
    milliseconds = time.time_ns() // 1_000_000
    random = int.from_bytes(os.urandom(10), "big")
    value = (milliseconds & (1 << 48) - 1) << 80 | random & (1 << 80) - 1
    value = value & ~(0xF << 76) | 0x7 << 76  # version
    value = value & ~(0x3 << 62) | 0x2 << 62  # variant
    return str(uuid.UUID(int=value))
