"""From bytes on the wire to a JSON value: size, time, encoding and nesting are checked before anything is built.

The first boundary that untrusted input meets; what leaves here is a plain value of bounded size and depth with valid text.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any, NoReturn

import numpy as np

from ostinato.core.errors import BadRequest, TooLarge

_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_DRAIN_FACTOR = 16  # how far beyond the limit a refused body is read, so that the client can see the refusal
_STEP = np.zeros(256, dtype=np.int32)
_STEP[list(b"[{")] = 1
_STEP[list(b"]}")] = -1


async def read_json(
    chunks: AsyncIterator[bytes], headers: Mapping[str, str], *, limit: int, depth: int, timeout_s: float
) -> Any:
    """The JSON value of a request body.

    Args:
        chunks: the body as it arrives.
        headers: the request's headers, lower-case names.
        limit: most bytes taken.
        depth: deepest nesting taken.
        timeout_s: longest wait for the whole body.

    Raises:
        TooLarge: more bytes than `limit`; at most that many are ever held.
        BadRequest: not JSON, not UTF-8, too deep, compressed, or late.
    """
    _check_headers(headers)
    try:
        async with asyncio.timeout(timeout_s):
            data = await _read(chunks, limit)
    except TimeoutError:
        raise BadRequest(f"The body did not arrive within {timeout_s:g} s; send it in one piece.") from None
    return parse_json(data, depth=depth)


def parse_json(data: bytes, *, depth: int) -> Any:
    """The value of a JSON text. Raises BadRequest that says where the text is broken."""
    _check_depth(data, depth)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequest(f"The body is not UTF-8: byte {error.start} cannot be decoded.") from None
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise BadRequest(f"The body is not JSON: {error.msg} at line {error.lineno}, column {error.colno}.") from None
    except BadRequest:
        raise
    except ValueError:
        raise BadRequest("The body holds a number with too many digits.") from None
    if "\\u" in text:
        _check_text(value)
    return value


def _check_headers(headers: Mapping[str, str]) -> None:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # also what keeps a web page from posting here without the browser asking first
        raise BadRequest(f"Content-Type is {kind or 'missing'!r}; send 'application/json'.")
    encoding = headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise BadRequest(f"Content-Encoding {encoding!r} is not taken; send the body uncompressed.")


async def _read(chunks: AsyncIterator[bytes], limit: int) -> bytes:
    held = bytearray()
    size = 0
    async for chunk in chunks:
        size += len(chunk)
        if size <= limit:
            held += chunk
            continue
        held.clear()
        if size > limit * _DRAIN_FACTOR:
            break
    if size > limit:
        raise TooLarge(f"The body is longer than {limit} bytes; send less at once.")
    return bytes(held)


def _check_depth(data: bytes, depth: int) -> None:
    if data.count(b"[") + data.count(b"{") <= depth:
        return
    bare = np.frombuffer(_STRING.sub(b"", data), dtype=np.uint8)
    if bare.size and int(np.cumsum(_STEP[bare]).max()) > depth:
        raise BadRequest(f"The body nests deeper than {depth} levels.")


def _check_text(value: Any) -> None:
    """Half of a surrogate pair is legal in JSON and illegal in UTF-8, where all text ends up."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise BadRequest("A string holds half of a surrogate pair (\\ud800-\\udfff); send whole characters.") from None


def _refuse_constant(name: str) -> NoReturn:
    raise BadRequest(f"{name} is not JSON; send a finite number.")
