"""From bytes on the wire to a JSON value: size, time, encoding, nesting and number of values are checked before anything is built.

This is the first boundary that untrusted input meets; it returns a plain value of bounded size and depth with valid text.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ostinato.core.errors import BadRequest, TooLarge
from ostinato.serve.wire.packing import unpacking

_DRAIN_FACTOR = 16  # how far beyond the limit a refused body is read, so that the client can see the refusal
_LENGTH_DIGITS = 20
_LONG_BYTES = 65_536  # in longer bodies very long numbers take noticeable time, so each number's length is checked
_MAX_DIGITS = 100
_QUOTE, _BACKSLASH, _COMMA = b'"\\,'
_STEP = np.zeros(256, dtype=np.int8)
_STEP[list(b"[{")] = 1
_STEP[list(b"]}")] = -1


async def read_json(
    chunks: AsyncIterator[bytes],
    headers: Mapping[bytes, bytes],
    *,
    limit: int,
    depth: int,
    values: int,
    timeout_s: float,
    charge: Callable[[int], None],
) -> Any:
    """The JSON value of a request body.

    Args:
        chunks: the body as it arrives.
        headers: the request's headers, lower-case names.
        limit: most bytes taken, compressed and uncompressed.
        depth: deepest nesting taken.
        values: most values taken, counted through all levels.
        timeout_s: longest wait for the whole body.
        charge: called with the number of bytes, before they are read if Content-Length declares them; may raise. What unpacking adds is
            charged after it.

    Raises:
        TooLarge: more bytes than `limit` (no more than that are ever held) or more values than `values`.
        UnsupportedMedia: compressed in an unknown way.
        BadRequest: not JSON, not UTF-8, too deep, or late.
    """
    _check_headers(headers)
    unpack = unpacking(headers, limit)
    try:
        async with asyncio.timeout(timeout_s):
            data = await _read(chunks, limit, _declared(headers), charge)
    except TimeoutError:
        raise BadRequest(f"The body did not arrive within {timeout_s:g} s; send it in one piece.") from None
    if unpack is not None:
        unpacked = unpack(data)
        charge(max(0, len(unpacked) - len(data)))
        data = unpacked
    return parse_json(data, depth=depth, values=values)


def parse_json(data: bytes, *, depth: int, values: int) -> Any:
    """The value of a JSON text. Raises BadRequest, which says where the text is malformed, and TooLarge."""
    _check_shape(data, depth, values)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequest(f"The body is not UTF-8: byte {error.start} cannot be decoded.") from None
    try:
        value = (_DECODER if len(data) <= _LONG_BYTES else _LONG_DECODER).decode(text)
    except json.JSONDecodeError as error:
        raise BadRequest(f"The body is not JSON: {error.msg} at line {error.lineno}, column {error.colno}.") from None
    except BadRequest:
        raise
    except ValueError:
        raise BadRequest("The body holds a number with too many digits.") from None
    if "\\u" in text:
        _check_text(value)
    return value


def _check_headers(headers: Mapping[bytes, bytes]) -> None:
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")
    if kind != "application/json":  # this also keeps a web page from posting here without a CORS preflight
        raise BadRequest(f"Content-Type is {kind or 'missing'!r}; send 'application/json'.")


def _declared(headers: Mapping[bytes, bytes]) -> int:
    """The body's declared length in bytes; 0 if none is declared."""
    length = headers.get(b"content-length", b"")
    return int(length) if length.isdigit() and len(length) <= _LENGTH_DIGITS else 0


async def _read(chunks: AsyncIterator[bytes], limit: int, declared: int, charge: Callable[[int], None]) -> bytes:
    held = bytearray()
    size = 0
    charged = min(declared, limit * _DRAIN_FACTOR)  # more is not read
    charge(charged)
    async for chunk in chunks:
        size += len(chunk)
        if size > charged:
            charge(size - charged)
            charged = size
        if size <= limit:
            held += chunk
            continue
        held.clear()
        if size > limit * _DRAIN_FACTOR:
            break
    if size > limit:
        raise TooLarge(f"The body is longer than {limit} bytes; send less at once.")
    return bytes(held)


def _check_shape(data: bytes, depth: int, values: int) -> None:
    """Refuse JSON that is too deep or has too many values before a parser builds it; plain byte counts decide most bodies."""
    opened = data.count(b"[") + data.count(b"{")
    if opened <= depth and opened + data.count(b",") < values:
        return
    bare = _outside_strings(data)
    steps = _STEP[bare]
    if steps.size and int(np.cumsum(steps, dtype=np.int32).max()) > depth:
        raise BadRequest(f"The body nests deeper than {depth} levels.")
    if np.count_nonzero(steps > 0) + np.count_nonzero(bare == _COMMA) >= values:
        raise TooLarge(f"The body holds more than {values} values; send less at once.")


def _outside_strings(data: bytes) -> NDArray[np.uint8]:
    """The bytes outside JSON strings, including the closing quotes."""
    text = np.frombuffer(data, dtype=np.uint8)
    if b'"' not in data:
        return text
    quotes = text == _QUOTE
    if b"\\" in data:
        quotes &= ~_escaped(text)
    return text[np.cumsum(quotes, dtype=np.int32) & 1 == 0]


def _escaped(text: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Which bytes follow an odd number of backslashes."""
    place = np.arange(len(text), dtype=np.int32)
    # the last byte that is not a backslash
    other = np.maximum.accumulate(np.where(text == _BACKSLASH, np.int32(-1), place))
    escaped = np.zeros(len(text), dtype=np.bool_)
    escaped[1:] = (place[:-1] - other[:-1]) & 1 == 1
    return escaped


def _check_text(value: Any) -> None:
    """Refuse a lone surrogate, which is legal in JSON but cannot be encoded as UTF-8, as all text is later."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise BadRequest("A string holds half of a surrogate pair (\\ud800-\\udfff); send whole characters.") from None


def _short_int(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise BadRequest("The body holds a number with too many digits.")
    return int(digits)


def _refuse_constant(name: str) -> NoReturn:
    raise BadRequest(f"{name} is not JSON; send a finite number.")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
_LONG_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_int=_short_int)
