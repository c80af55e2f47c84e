"""Durations as people read them."""

from __future__ import annotations


def ago(seconds: float) -> str:
    """A time span for people. Example: ``ago(200) == "3 min"``"""
    for unit, length in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
