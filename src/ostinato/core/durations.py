"""Durations for people."""

from __future__ import annotations

import re

from ostinato.core.errors import BadConfig


def ago(seconds: float) -> str:
    """Format a time span for people. Example: ``ago(200) == "3 min"``"""
    for unit, length in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


_UNITS = {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0, "w": 604_800.0}


def seconds_in(text: str) -> float:
    """Return the seconds of a time span: a number and s, min, h, d or w. Raises BadConfig. Example: ``seconds_in("7d")``"""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d|w)", text.strip())
    if match is None:
        raise BadConfig(f"{text!r} is not a time span; write a number and a unit: 90min, 12h, 7d, 2w")
    return float(match[1]) * _UNITS[match[2]]
