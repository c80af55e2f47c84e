"""The size of what a JSON text holds, from its bytes alone, so that a crowded text can be refused before a parser builds it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ostinato.core.errors import BadRequest, TooLarge

_QUOTE, _BACKSLASH, _COMMA, _COLON, _SPACE = b'"\\,: '
_UNMARKED = bytes(byte for byte in range(256) if byte not in b'"[]{},:')
"""The bytes that say nothing about a text's shape, once escaped quotes are gone."""
_ZERO = ord("0")
MAX_NAMES = 40_000
"""The most fields in a text, of all its objects together: each takes about three times as long to build as a value in a list."""
LONG_BYTES = 65_536
"""Longer texts take noticeable time to parse, so that is done on a thread, and each number's length is checked."""
_MAX_DIGITS = 100
_STEP = np.zeros(256, dtype=np.int8)
_STEP[list(b"[{")] = 1
_STEP[list(b"]}")] = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonShape:
    """How deep a text nests, how many values it has on all levels (one more if it is no empty list or object), and how many fields.

    Example: ``shape_of(b'{"a": [1, 2]}') == JsonShape(depth=2, values=3, names=1)``
    """

    depth: int
    values: int
    names: int


def shape_of(data: bytes) -> JsonShape:
    """The shape of a text, which may be malformed. It takes a nanosecond or two a byte."""
    marks = np.frombuffer(_without_escaped_quotes(data).translate(None, _UNMARKED), dtype=np.uint8)
    bare = marks.compress(_outside(marks == _QUOTE))
    steps = _STEP.take(bare)
    steps = steps.compress(steps != 0)
    return JsonShape(
        depth=int(np.cumsum(steps, dtype=np.int32).max(initial=0)),
        values=int(np.count_nonzero(steps > 0) + np.count_nonzero(bare == _COMMA)),
        names=int(np.count_nonzero(bare == _COLON)),
    )


def check_json(data: bytes, *, depth: int, values: int) -> None:
    """Refuse JSON that would be costly to parse: raise BadRequest if it is too deep or has very long numbers, TooLarge if it has too many
    values or fields.
    """
    if len(data) > LONG_BYTES:
        _check_digits(data)
    opened = data.count(b"[") + data.count(b"{")  # those in strings included, so at least as many as count
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
    """The bytes outside JSON strings, including the closing quotes."""
    text = np.frombuffer(data, dtype=np.uint8)
    if b'"' not in data:
        return text
    quotes = text == _QUOTE
    if b"\\" in data:
        quotes[_escaped_quotes(text)] = False
    return text[_outside(quotes)]


def _outside(quotes: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Where the number of quotes so far is even: outside strings, and at closing quotes."""
    return ~np.logical_xor.accumulate(quotes)


def _without_escaped_quotes(data: bytes) -> bytes:
    """The text with a space in place of each escaped quote."""
    if b"\\" not in data:
        return data
    text = np.frombuffer(bytearray(data), dtype=np.uint8)
    text[_escaped_quotes(text)] = _SPACE
    return text.tobytes()


def _escaped_quotes(text: NDArray[np.uint8]) -> NDArray[np.int32]:
    """The places of quotes that do not end a string."""
    escaped = _escaped(text)
    escaped = escaped[escaped < len(text)]
    return escaped[text[escaped] == _QUOTE]


def _escaped(text: NDArray[np.uint8]) -> NDArray[np.int32]:
    """The places of bytes that follow an odd number of backslashes, among them the text's end."""
    slashes = np.flatnonzero(text == _BACKSLASH).astype(np.int32)
    number = np.arange(len(slashes), dtype=np.int32)
    begins = np.diff(slashes, prepend=np.int32(-2)) != 1
    first = np.maximum.accumulate(np.where(begins, number, np.int32(0)))  # of the run that each is in
    return slashes[(number - first) & 1 == 0] + 1


def _check_digits(data: bytes) -> None:
    """Refuse numbers of more than `_MAX_DIGITS` digits, before a parser spends its time on them."""
    half = _MAX_DIGITS // 2
    # each such number covers a block of half its digits
    if not _has_block(np.frombuffer(data, dtype=np.uint8), half):
        return
    digits = outside_strings(data) - _ZERO < 10
    ends = np.flatnonzero(~np.concatenate(([False], digits, [False])))
    if int(np.diff(ends).max()) > _MAX_DIGITS + 1:
        raise BadRequest("The body contains a number with too many digits.")


def _has_block(text: NDArray[np.uint8], size: int) -> bool:
    """True if one of the text's blocks of `size` bytes is digits only."""
    whole = len(text) // size * size
    blocks = text[:whole].reshape(-1, size)
    blocks = blocks[(blocks[:, 0] - _ZERO < 10) & (blocks[:, -1] - _ZERO < 10)]  # few are looked through
    return bool((blocks - _ZERO < 10).all(axis=1).any())
