"""Compressed request bodies, unpacked to a bounded length."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

import zstandard

from ostinato.core.errors import BadRequest, TooLarge

_GZIP = 16 + zlib.MAX_WBITS
_MOST_WINDOW = 8 * 2**20  # bytes: what every zstd decoder must support

Unpack = Callable[[bytes], bytes]
"""The content of a compressed body. Raises BadRequest, TooLarge."""


class UnsupportedMedia(BadRequest):
    """A content type or encoding that is not supported here."""

    status = 415
    code = "unsupported_media_type"


def unpacking(headers: Mapping[bytes, bytes], limit: int) -> Unpack | None:
    """How to unpack a body with these headers (lower-case names) to at most `limit` bytes; None if it is not compressed.

    Raises UnsupportedMedia for an encoding that is not known here.
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
                f"Content-Encoding {encoding[:200]!r} is not taken; send 'gzip', 'deflate' or 'zstd', or the body uncompressed."
            )


def _inflated(data: bytes, limit: int, bits: int, name: str) -> bytes:
    """At most `limit` + 1 bytes are ever held."""
    stream = zlib.decompressobj(bits)
    try:
        content = stream.decompress(data, limit + 1)
    except zlib.error:
        raise _other(name) from None
    if len(content) > limit:
        raise _too_long(limit)
    if not stream.eof or stream.unused_data:
        raise _unended(name)
    return content


def _zstd(data: bytes, limit: int) -> bytes:
    """At most `limit` + 1 bytes and a window are ever held, whatever length the frame declares."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW)
    try:
        if len(decompressor.stream_reader(data).read(limit + 1)) > limit:
            raise _too_long(limit)
        stream = decompressor.decompressobj()
        content = stream.decompress(data)
    except zstandard.ZstdError:
        raise _other("zstd") from None
    if not stream.eof or stream.unused_data:
        raise _unended("zstd")
    return content


def _too_long(limit: int) -> TooLarge:
    return TooLarge(f"The body is longer than {limit} bytes when unpacked; send less at once.")


def _other(name: str) -> BadRequest:
    return BadRequest(f"The body is not {name}, as Content-Encoding says; send it so, or uncompressed.")


def _unended(name: str) -> BadRequest:
    return BadRequest(f"The body is not one whole piece of {name}; it ends too early, or something follows.")
