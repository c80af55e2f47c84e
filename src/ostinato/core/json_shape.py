"""The size of what a JSON text holds, from its bytes alone, so that a crowded text can be refused before a parser builds it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_QUOTE, _BACKSLASH, _COMMA, _COLON = b'"\\,:'
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
    """The shape of a text, which may be malformed. It takes a few nanoseconds a byte."""
    bare = outside_strings(data)
    steps = _STEP[bare]
    return JsonShape(
        depth=int(np.cumsum(steps, dtype=np.int32).max()) if steps.size else 0,
        values=int(np.count_nonzero(steps > 0) + np.count_nonzero(bare == _COMMA)),
        names=int(np.count_nonzero(bare == _COLON)),
    )


def is_small(data: bytes, *, depth: int, values: int, names: int) -> bool:
    """True if plain counts of bytes, those in strings included, show that a text is within these bounds."""
    opened = data.count(b"[") + data.count(b"{")
    return opened <= depth and opened + data.count(b",") < values and data.count(b":") <= names


def outside_strings(data: bytes) -> NDArray[np.uint8]:
    """The bytes outside JSON strings, including the closing quotes."""
    text = np.frombuffer(data, dtype=np.uint8)
    if b'"' not in data:
        return text
    quotes = text == _QUOTE
    if b"\\" in data:
        escaped = _escaped(text)
        quotes[escaped[escaped < len(text)]] = False
    return text[np.cumsum(quotes, dtype=np.int32) & 1 == 0]


def _escaped(text: NDArray[np.uint8]) -> NDArray[np.intp]:
    """The places of bytes that follow an odd number of backslashes, among them the text's end."""
    slashes = np.flatnonzero(text == _BACKSLASH)
    number = np.arange(len(slashes))
    first = np.maximum.accumulate(np.where(np.diff(slashes, prepend=-2) != 1, number, 0))  # of the run that each is in
    return slashes[(number - first) & 1 == 0] + 1
