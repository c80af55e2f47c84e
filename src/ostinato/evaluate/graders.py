"""Graders that need no sandbox: a suite item names its grader, the runner calls it. Pure."""

from __future__ import annotations

import re

from ostinato.core.errors import BadConfig
from ostinato.evaluate.suites import Item

MAX_PATTERN = 1_000
MAX_TEXT = 20_000


def pattern(item: Item, text: str) -> float:
    """1.0 if the item's regular expression `pattern` is found in the answer's first 20,000 characters, else 0.0.

    Example: an item ``{"grader": "pattern", "pattern": "^[a-z]", ...}``. Raises BadConfig if there is no usable pattern.
    """
    wanted = item.data.get("pattern")
    if not isinstance(wanted, str) or not 0 < len(wanted) <= MAX_PATTERN:
        raise BadConfig(
            f"suite item {item.id!r}: grader 'pattern' needs a string 'pattern' of 1 to {MAX_PATTERN} characters"
        )
    try:
        return float(re.search(wanted, text[:MAX_TEXT]) is not None)
    except re.error as error:
        raise BadConfig(f"suite item {item.id!r}: pattern {wanted!r} is not a regular expression: {error}") from error


def suggestion(item: Item, text: str) -> float:
    """1.0 if the answer is the item's `meant`, 0.0 if it is anything else, and the item's `t` if it is empty or `nothing`.

    That is the reward of `ostinato.reward.functions.tab` plus t: a policy's mean score is t plus its mean reward.

    Example: an item ``{"grader": "suggestion", "meant": "Friday", "nothing": "-", "t": 0.25, ...}``. Raises BadConfig for other fields.
    """
    meant, nothing, t = (item.data.get(name) for name in ("meant", "nothing", "t"))
    if not (isinstance(meant, str) and isinstance(nothing, str) and isinstance(t, float) and 0.0 < t < 1.0):
        raise BadConfig(
            f"suite item {item.id!r}: grader 'suggestion' needs the strings 'meant' and 'nothing' and a 't' between 0 and 1"
        )
    answer = text.strip()
    return t if answer in ("", nothing) else float(answer == meant)
