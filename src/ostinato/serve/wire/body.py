"""Reads request bodies: from bytes on the wire to a JSON value. Size, time, encoding, nesting and number of values are checked before
anything is built.

This is the first boundary that untrusted input meets. It returns a plain value of bounded size and depth with valid text. Compressed bodies
are decompressed to a bounded length.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

import msgspec
import zstandard

from ostinato.core.errors import BadRequest, TooLarge
from ostinato.core.json_shape import check_json

# ---------------------------------------------------------------- content encodings


_GZIP = 16 + zlib.MAX_WBITS
_MOST_WINDOW = 8 * 2**20  # bytes; every zstd decoder must support this window

Unpack = Callable[[bytes], bytes]
"""Decompresses a body. Raises BadRequest, TooLarge."""


class UnsupportedMedia(BadRequest):
    """A content type or encoding that is not supported here."""

    status = 415
    code = "unsupported_media_type"


def unpacking(headers: Mapping[bytes, bytes], limit: int) -> Unpack | None:
    """Return the function that decompresses a body with these headers (lower-case names) to at most `limit` bytes; None: uncompressed.

    Raises UnsupportedMedia for an unknown encoding.
    """
    encoding = headers.get(b"content-encoding", b"").strip().lower().decode("latin-1")
    match encoding:
        case "" | "identity":
            return None
        case "gzip" | "x-gzip":
            return lambda data: _inflated(data, limit, _GZIP, "gzip")
        case "deflate":
            return lambda data: _inflated(data, limit, zlib.MAX_WBITS, "deflate")
        case "zstd":
            return lambda data: _zstd(data, limit)
        case _:
            raise UnsupportedMedia(
                f"Content-Encoding {encoding[:200]!r} is not supported; send 'gzip', 'deflate' or 'zstd', or the body uncompressed."
            )


def _inflated(data: bytes, limit: int, bits: int, name: str) -> bytes:
    """Decompress data; at most `limit` + 1 bytes are ever held."""
    stream = zlib.decompressobj(bits)
    try:
        content = stream.decompress(data, limit + 1)
    except zlib.error:
        raise _wrong_encoding(name) from None
    if len(content) > limit:
        raise _too_long(limit)
    if not stream.eof or stream.unused_data:
        raise _incomplete(name)
    return content


def _zstd(data: bytes, limit: int) -> bytes:
    """Decompress data; at most `limit` + 1 bytes and a window are ever held, whatever length the frame declares."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW)
    try:
        if len(decompressor.stream_reader(data).read(limit + 1)) > limit:
            raise _too_long(limit)
        stream = decompressor.decompressobj()
        content = stream.decompress(data)
    except zstandard.ZstdError:
        raise _wrong_encoding("zstd") from None
    if not stream.eof or stream.unused_data:
        raise _incomplete("zstd")
    return content


def _too_long(limit: int) -> TooLarge:
    return TooLarge(f"The body is longer than {limit} bytes when unpacked; send less at once.")


def _wrong_encoding(name: str) -> BadRequest:
    return BadRequest(f"The body is not {name}, as Content-Encoding says; send it so, or uncompressed.")


def _incomplete(name: str) -> BadRequest:
    return BadRequest(f"The body is not one whole piece of {name}; it ends too early, or something follows.")


# ---------------------------------------------------------------- bodies


_FIELDS, _ITEMS = msgspec.json.Decoder(dict[str, msgspec.Raw]), msgspec.json.Decoder(list[msgspec.Raw])
_DRAIN_FACTOR = 16  # a refused body is read up to this many times the limit, so that the client sees the refusal
_LENGTH_DIGITS = 20


async def read_body(
    chunks: AsyncIterator[bytes],
    headers: Mapping[bytes, bytes],
    *,
    limit: int,
    timeout_s: float,
    charge: Callable[[int], None],
) -> bytes:
    """Return a request body, decompressed.

    Args:
        chunks: the body as it arrives.
        headers: the request's headers, lower-case names.
        limit: most bytes accepted, compressed and decompressed.
        timeout_s: longest wait for the whole body.
        charge: called with the number of bytes, before they are read if Content-Length declares them; may raise. What decompression adds is
            charged afterwards.

    Raises:
        TooLarge: more bytes than `limit` (no more are ever held).
        UnsupportedMedia: an unknown compression.
        BadRequest: the body is late, or not compressed as declared.
    """
    unpack = unpacking(headers, limit)
    try:
        async with asyncio.timeout(timeout_s):
            data = await _read(chunks, limit, _declared(headers), charge)
    except TimeoutError:
        raise BadRequest(f"The body did not arrive within {timeout_s:g} s; send it in one piece.") from None
    if unpack is not None:
        unpacked = await asyncio.to_thread(unpack, data)
        charge(max(0, len(unpacked) - len(data)))
        data = unpacked
    return data


def parse_json(data: bytes, *, depth: int, values: int, unread: Collection[str] = ()) -> Any:
    """Parse a JSON text of at most `depth` levels and `values` values, counted over all levels.

    If the value is an object with a list in one of the fields `unread`, the list's items are left as JSON text (`msgspec.Raw`); an error in
    such an item surfaces when it is decoded.

    Raises BadRequest, which locates the error in the text, and TooLarge.
    """
    check_json(data, depth=depth, values=values)
    if unread:
        with suppress(msgspec.MsgspecError, ValueError):  # the error is raised below
            data.decode()  # skipped items must be valid UTF-8, too
            return _in_part(data, unread)
    try:
        return msgspec.json.decode(data)
    except UnicodeDecodeError as error:
        raise BadRequest(f"The body is not UTF-8: {error.reason} {_place(data, error.start, 'byte')}.") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise BadRequest(_malformed(str(error), data)) from None


def _in_part(data: bytes, unread: Collection[str]) -> Any:
    fields = dict[str, Any](_FIELDS.decode(data))
    for name, text in fields.items():
        items = name in unread and bytes(memoryview(text)[:1]) == b"["
        fields[name] = _ITEMS.decode(text) if items else msgspec.json.decode(text)
    return fields


def _malformed(why: str, data: bytes) -> str:
    """Return the decoder's message, reworded where there is a remedy."""
    truncated = "truncated" in why  # also if half of a surrogate pair is at the very end
    if "surrogate" in why or (truncated and b"\\ud" in data[-16:].lower()):
        return "A string contains half of a surrogate pair (\\ud800-\\udfff); send whole characters."
    if "out of range" in why:
        return "The body contains a number with too many digits."
    why, _, at = why.removeprefix("JSON is malformed: ").partition(" (byte ")
    place = int(at[:-1]) if at else len(data)
    if truncated:
        why = "it ends"
    elif data[place : place + 1] in (b"N", b"I"):
        why = "NaN and Infinity are not JSON numbers; send a finite one;"
    return f"The body is not JSON: {why} {_place(data, place, 'column')}."


def _place(data: bytes, at: int, word: str) -> str:
    line = data.count(b"\n", 0, at) + 1
    return f"at line {line}, {word} {at - data.rfind(bytes([10]), 0, at)}"


def content_type(headers: Mapping[bytes, bytes]) -> str:
    """Return the declared type of a body without parameters; "" if none is declared."""
    return headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")


def _declared(headers: Mapping[bytes, bytes]) -> int:
    """Return the body's declared length in bytes; 0 if none is declared."""
    length = headers.get(b"content-length", b"")
    return int(length) if length.isdigit() and len(length) <= _LENGTH_DIGITS else 0


async def _read(chunks: AsyncIterator[bytes], limit: int, declared: int, charge: Callable[[int], None]) -> bytes:
    held = bytearray()
    size = 0
    charged = min(declared, limit * _DRAIN_FACTOR)  # no more is ever read
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
