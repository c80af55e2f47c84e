"""Compares trees of values (`inside/encoding.py`) that untrusted programs sent.

They are compared as trees and never made into objects, so that no code of a sender's choosing runs here.
"""

from __future__ import annotations

import json
import math
from typing import Any

_DEEPEST = 128


def lines_of(sent: bytes) -> list[Any]:
    """The JSON values of complete lines, up to the first that is not JSON or is nested too deep to be serialized again."""
    found: list[Any] = []
    for line in sent.split(b"\n")[:-1]:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            break
        if deeper(value, _DEEPEST):
            break
        found.append(value)
    return found


def deeper(tree: Any, most: int) -> bool:
    """True if lists and objects are nested more than `most` deep."""
    level = [tree]
    for _ in range(most + 1):
        level = [
            part
            for each in level
            for part in (each.values() if isinstance(each, dict) else each if isinstance(each, list) else ())
        ]
        if not level:
            return False
    return True


def same(tree: Any, other: Any, *, relative: float = 0.0, absolute: float = 0.0, depth: int = 0) -> bool:
    """True if two trees stand for values that are equal in Python: 1, 1.0 and True are equal, a list and a tuple are not.

    Numbers may differ by max(`relative` * |other|, `absolute`). Two NaN count as equal: a function that should return NaN did.
    """
    if depth > _DEEPEST:
        return False
    numbers = _number(tree), _number(other)
    if numbers[0] is not None and numbers[1] is not None:
        return _near(numbers[0], numbers[1], relative, absolute)
    if not isinstance(tree, list) or not isinstance(other, list):
        return type(tree) is type(other) and tree == other
    if tree[:1] != other[:1] or not (_holds(tree) and _holds(other)):
        return tree == other
    parts, others = _parts(tree), _parts(other)
    return len(parts) == len(others) and all(
        same(a, b, relative=relative, absolute=absolute, depth=depth + 1) for a, b in zip(parts, others, strict=True)
    )


def _holds(tree: list[Any]) -> bool:
    return len(tree) == 2 and isinstance(tree[1], list)


def _parts(tree: list[Any]) -> list[Any]:
    """The items of a container; for a dict, its keys and values in turn."""
    if tree[0] != "d":
        return tree[1]
    return [part for pair in tree[1] if isinstance(pair, list) for part in pair]


def _number(tree: Any) -> int | float | None:
    if isinstance(tree, bool | int):
        return int(tree)
    if isinstance(tree, list) and len(tree) == 2 and isinstance(tree[1], str):
        try:
            if tree[0] == "i":
                return int(tree[1], 16)
            if tree[0] == "f":
                return float.fromhex(tree[1])
        except (ValueError, OverflowError):
            return None
    return None


def _near(number: float, other: float, relative: float, absolute: float) -> bool:
    if number == other or (number != number and other != other):
        return True
    if not relative and not absolute:
        return False
    try:
        return (
            math.isfinite(number)
            and math.isfinite(other)
            and abs(number - other) <= max(relative * abs(other), absolute)
        )
    except OverflowError:
        return False
