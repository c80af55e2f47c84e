"""The one place that reads the wall clock; everything else takes a `Clock`."""

from __future__ import annotations

import time


def wall_clock() -> float:
    """Return Unix seconds."""
    return time.time()  # noqa: TID251 (this is the place)
