"""The size of a JSON text's content, from its bytes alone, so that an excessive text can be refused before a parser builds it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ostinato.core.errors import BadRequest, TooLarge

_QUOTE, _BACKSLASH, _COMMA, _COLON, _SPACE = b'"\\,: '
_UNMARKED = bytes(byte for byte in range(256) if byte not in b'"[]{},:')
"""The bytes that are irrelevant for a text's shape, once escaped quotes are removed."""
_ZERO = ord("0")
MAX_NAMES = 40_000
"""Most fields in a text, over all its objects: each takes about three times as long to build as a value in a list."""
LONG_BYTES = 65_536
"""Longer texts take noticeable time to parse, so they are parsed in a thread, and each number's length is checked."""
_MAX_DIGITS = 100
_NESTING_STEP = np.zeros(256, dtype=np.int8)
_NESTING_STEP[list(b"[{")] = 1
_NESTING_STEP[list(b"]}")] = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonShape:
    """The nesting depth of a text, its number of values on all levels (one more unless it is an empty list or object), and of fields.

    Example: ``shape_of(b'{"a": [1, 2]}') == JsonShape(depth=2, values=3, names=1)``
    """

    depth: int
    values: int
    names: int


def shape_of(data: bytes) -> JsonShape:
    """Return the shape of a text, which may be malformed. Takes a nanosecond or two per byte."""
    marks = np.frombuffer(_without_escaped_quotes(data).translate(None, _UNMARKED), dtype=np.uint8)
    bare = marks.compress(_outside(marks == _QUOTE))
    steps = _NESTING_STEP.take(bare)
    steps = steps.compress(steps != 0)
    return JsonShape(
        depth=int(np.cumsum(steps, dtype=np.int32).max(initial=0)),
        values=int(np.count_nonzero(steps > 0) + np.count_nonzero(bare == _COMMA)),
        names=int(np.count_nonzero(bare == _COLON)),
    )


def check_json(data: bytes, *, depth: int, values: int) -> None:
    """Raise BadRequest if JSON is too deep or has very long numbers, TooLarge if it has too many values or fields, before it is parsed."""
    if len(data) > LONG_BYTES:
        _check_digits(data)
    opened = data.count(b"[") + data.count(b"{")  # those in strings included, so an upper bound
    if opened <= depth and opened + data.count(b",") < values and data.count(b":") <= MAX_NAMES:
        return
    shape = shape_of(data)
    if shape.depth > depth:
        raise BadRequest(f"The body nests deeper than {depth} levels.")
    if shape.values >= values:
        raise TooLarge(f"The body contains more than {values} values; send less at once.")
    if shape.names > MAX_NAMES:
        raise TooLarge(f"The objects in the body have more than {MAX_NAMES} fields together; send less at once.")


def outside_strings(data: bytes) -> NDArray[np.uint8]:
    """Return the bytes outside JSON strings, including the closing quotes."""
    text = np.frombuffer(data, dtype=np.uint8)
    if b'"' not in data:
        return text
    quotes = text == _QUOTE
    if b"\\" in data:
        quotes[_escaped_quotes(text)] = False
    return text[_outside(quotes)]


def _outside(quotes: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return a mask that is True where the number of quotes so far is even: outside strings, and at closing quotes."""
    return ~np.logical_xor.accumulate(quotes)


def _without_escaped_quotes(data: bytes) -> bytes:
    """Return the text with a space in place of each escaped quote."""
    if b"\\" not in data:
        return data
    text = np.frombuffer(bytearray(data), dtype=np.uint8)
    text[_escaped_quotes(text)] = _SPACE
    return text.tobytes()


def _escaped_quotes(text: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Return the places of quotes that do not end a string."""
    escaped = _escaped(text)
    escaped = escaped[escaped < len(text)]
    return escaped[text[escaped] == _QUOTE]


def _escaped(text: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Return the places of bytes that follow an odd number of backslashes, which may include the text's end."""
    slashes = np.flatnonzero(text == _BACKSLASH).astype(np.int32)
    number = np.arange(len(slashes), dtype=np.int32)
    begins = np.diff(slashes, prepend=np.int32(-2)) != 1
    first = np.maximum.accumulate(np.where(begins, number, np.int32(0)))  # the first backslash of each one's run
    return slashes[(number - first) & 1 == 0] + 1


def _check_digits(data: bytes) -> None:
    """Refuse numbers of more than `_MAX_DIGITS` digits before a parser spends time on them."""
    half = _MAX_DIGITS // 2
    # each such number covers a whole block of half its digits
    if not _has_block(np.frombuffer(data, dtype=np.uint8), half):
        return
    digits = outside_strings(data) - _ZERO < 10
    ends = np.flatnonzero(~np.concatenate(([False], digits, [False])))
    if int(np.diff(ends).max()) > _MAX_DIGITS + 1:
        raise BadRequest("The body contains a number with too many digits.")


def _has_block(text: NDArray[np.uint8], size: int) -> bool:
    """Return True if one of the text's blocks of `size` bytes is digits only."""
    whole = len(text) // size * size
    blocks = text[:whole].reshape(-1, size)
    blocks = blocks[(blocks[:, 0] - _ZERO < 10) & (blocks[:, -1] - _ZERO < 10)]  # cheap filter, which leaves few blocks
    return bool((blocks - _ZERO < 10).all(axis=1).any())
