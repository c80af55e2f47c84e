"""Encodes values as JSON trees that `test_report.py` can compare, and decodes them. Prepended to every program in a grader's sandbox.

None, booleans, strings and small integers stand for themselves. Everything else is a list that begins with a tag: "i" a large integer, "f"
a float, "c" a complex number, "b" bytes, "l" a list, "t" a tuple, "d" a dict, "s" a set, "q" a deque, "o" another standard-library value,
by its repr. An instance of a subclass is encoded as its base class, through the base class's own methods.
"""

import collections
import datetime
import decimal
import fractions
import json
import pathlib
import uuid
from typing import Any

DEEPEST = 48
_BY_REPR = (
    decimal.Decimal, fractions.Fraction, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, pathlib.PurePath, uuid.UUID,
    range, type(...),
)  # fmt: skip
_SEQUENCES: tuple[tuple[Any, str], ...] = ((list, "l"), (tuple, "t"), (collections.deque, "q"))
_SETS: tuple[Any, ...] = (set, frozenset)


class Opaque(Exception):
    """A value that cannot be encoded: an object of a custom class, nested too deep, or containing itself."""


def encode(value: Any, depth: int = 0) -> Any:
    """Return the tree of a value. Raises Opaque."""
    if depth > DEEPEST:
        raise Opaque("too deep")
    if value is None or value is True or value is False:
        return value
    if isinstance(value, int):
        whole = int.__add__(value, 0)
        return whole if abs(whole) < 1 << 53 else ["i", hex(whole)]
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, float):
        return ["f", float.hex(value)]
    if isinstance(value, complex):
        return ["c", float.hex(value.real + 0.0), float.hex(value.imag + 0.0)]  # -0.0 equals 0.0
    if isinstance(value, bytes | bytearray):
        return ["b", bytes(value).hex()]
    return _encode_several(value, depth + 1)


def _encode_several(value: Any, depth: int) -> Any:
    for base, tag in _SEQUENCES:
        if isinstance(value, base):
            return [tag, [encode(each, depth) for each in base.__iter__(value)]]
    if isinstance(value, dict):
        pairs = [[encode(key, depth), encode(each, depth)] for key, each in dict.items(value)]
        return ["d", sorted(pairs, key=json.dumps)]
    for base in _SETS:
        if isinstance(value, base):
            return ["s", sorted((encode(each, depth) for each in base.__iter__(value)), key=json.dumps)]
    if isinstance(value, _BY_REPR):
        return ["o", type(value).__name__, repr(value)]
    raise Opaque(type(value).__qualname__)


def decode(tree: Any) -> Any:
    """Return the value of a tree, which must not contain the tag "o"."""
    if not isinstance(tree, list):
        return tree
    tag = tree[0]
    if tag == "i":
        return int(tree[1], 16)
    if tag == "f":
        return float.fromhex(tree[1])
    if tag == "c":
        return complex(float.fromhex(tree[1]), float.fromhex(tree[2]))
    if tag == "b":
        return bytes.fromhex(tree[1])
    if tag == "d":
        return {decode(key): decode(each) for key, each in tree[1]}
    return {"l": list, "t": tuple, "s": set, "q": collections.deque}[tag](decode(each) for each in tree[1])
