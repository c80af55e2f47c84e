"""The lossless codec of a chunk: encodes a tensor slice's new bytes, given the old ones, as a payload, and decodes it.

Each chunk is encoded, fetched and repaired independently of the others. The manifest names one of five codecs:

- ``equal``: nothing changed; the payload is empty.
- ``steps``: the changed elements of a 16-bit float tensor, with the old values as context (`encoder`).
- ``xor-planes-zstd``: bitwise XOR with the old bytes, split into byte planes (all first bytes, all second bytes, ...), zstd.
- ``planes-zstd``: the new bytes alone, split into byte planes, zstd. For full snapshots and chunks that changed too much.
- ``raw``: the new bytes, when no other codec is smaller.

All codecs work on integer bits, so NaN payloads, -0.0 and subnormals are preserved. Compared with zstd on the interleaved bytes, byte
planes make XOR payloads about 11% smaller, and full snapshots about a quarter smaller. XOR deltas of weights follow PULSE (arXiv
2602.03839), which ships the changed bits of bf16 weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from ostinato.core.errors import Corrupt
from ostinato.core.weights import ITEMSIZES
from ostinato.weights.delta import decoder, encoder

Bytes = NDArray[np.uint8]

EQUAL: Final = "equal"
RAW: Final = "raw"
PLANES: Final = "planes-zstd"
XOR: Final = "xor-planes-zstd"
STEPS: Final = "steps"
CODECS: Final = frozenset({EQUAL, RAW, PLANES, XOR, STEPS})
NEEDS_OLD: Final = frozenset({EQUAL, XOR, STEPS})
"""Codecs that need the old bytes to decode, and so are never in a full snapshot."""

MAX_CHUNK_BYTES: Final = 1 << 26
"""Largest decoded chunk. Checked before anything is allocated."""

_MANTISSA_BITS: Final = {"BF16": 7, "F16": 10}
_GOOD_RATIO = 8  # a `steps` payload this many times smaller than the chunk is accepted without trying another codec
_POOR_XOR_SHARE = 0.5  # if an XOR payload exceeds this share of the chunk, also try to encode the new bytes alone


@dataclass(frozen=True, slots=True)
class Coded:
    """An encoded chunk.

    Example: ``Coded(codec="equal", payload=b"")``
    """

    codec: str
    payload: bytes


def encode(old: Bytes | None, new: Bytes, *, dtype: str, level: int = 1) -> Coded:
    """Encode `new`, given `old` of the same length if the receiver has it.

    Args:
        old: flat contiguous uint8 array, or None for a full snapshot.
        new: flat contiguous uint8 array of at most MAX_CHUNK_BYTES.
        dtype: name of the elements' type (safetensors).
        level: zstd level, 1 (fast) to 3.

    Raises:
        ValueError: the lengths differ, are not a multiple of the element size, or exceed MAX_CHUNK_BYTES.
    """
    itemsize = ITEMSIZES[dtype]
    if new.size > MAX_CHUNK_BYTES or new.size % itemsize:
        raise ValueError(f"a chunk of {new.size} bytes is not a multiple of {itemsize} up to {MAX_CHUNK_BYTES}")
    if old is None:
        return _smallest(new, [Coded(PLANES, _compress(new, itemsize, level))])
    if old.size != new.size:
        raise ValueError(f"old has {old.size} bytes and new has {new.size}; a delta needs the same shape")
    candidates: list[Coded] = []
    if dtype in _MANTISSA_BITS:
        steps = encoder.encode(old.view(np.uint16), new.view(np.uint16), _MANTISSA_BITS[dtype])
        if steps == b"":
            return Coded(EQUAL, b"")
        candidates = [] if steps is None else [Coded(STEPS, steps)]
        if steps is not None and len(steps) * _GOOD_RATIO < new.size:
            return candidates[0]
    difference = np.bitwise_xor(old, new)
    if not difference.any():
        return Coded(EQUAL, b"")
    candidates.append(Coded(XOR, _compress(difference, itemsize, level)))
    if len(candidates[-1].payload) > _POOR_XOR_SHARE * new.size:
        candidates.append(Coded(PLANES, _compress(new, itemsize, level)))
    return _smallest(new, candidates)


def decode(codec: str, target: Bytes, payload: bytes | memoryview, *, dtype: str, old: bool) -> None:
    """Decode a payload in place, the inverse of `encode`. `target` holds the old bytes if `old`, and the new ones afterwards.

    Safe for untrusted input: the chunk's size is bounded, and the payload's declared size must match `target` before memory is allocated.

    Raises Corrupt for an unknown codec, missing old bytes, or a payload that does not match this chunk; `target` may then hold a mixture of
    old and new bytes.
    """
    itemsize = ITEMSIZES[dtype]
    if target.size > MAX_CHUNK_BYTES or target.size % itemsize:
        raise Corrupt(f"chunk size {target.size} is not a multiple of {itemsize} up to {MAX_CHUNK_BYTES}")
    if codec not in CODECS:
        raise Corrupt(f"codec {codec!r} is not known to this release; it knows {', '.join(sorted(CODECS))}")
    if codec in NEEDS_OLD and not old:
        raise Corrupt(f"codec {codec!r} needs the old bytes of the chunk, and there are none")
    if codec == EQUAL:
        if len(payload):
            raise Corrupt(f"an unchanged chunk carries {len(payload)} bytes of payload")
    elif codec == STEPS:
        if dtype not in _MANTISSA_BITS:
            raise Corrupt(f"codec {codec!r} is for {' and '.join(_MANTISSA_BITS)}, not {dtype}")
        decoder.decode(target.view(np.uint16), payload, _MANTISSA_BITS[dtype])
    elif codec == RAW:
        target[:] = _exact(np.frombuffer(payload, np.uint8), target.size)
    else:
        planes = _decompress(payload, target.size).reshape(itemsize, -1)
        for plane in range(itemsize):
            part = target[plane::itemsize]
            np.bitwise_xor(part, planes[plane], out=part) if codec == XOR else np.copyto(part, planes[plane])


def changed_elements(old: Bytes, new: Bytes, itemsize: int) -> int:
    """Return the number of elements that differ in at least one bit."""
    differs = old != new
    if itemsize == 1:
        return int(np.count_nonzero(differs))
    return int(np.count_nonzero(differs.view(np.dtype(f"u{itemsize}"))))


def _smallest(new: Bytes, candidates: list[Coded]) -> Coded:
    best = min(candidates, key=lambda coded: len(coded.payload))
    return best if len(best.payload) < new.size else Coded(RAW, new.tobytes())


def _exact(data: Bytes, size: int) -> Bytes:
    if data.size != size:
        raise Corrupt(f"a chunk of {size} bytes has {data.size} bytes")
    return data


def _compress(data: Bytes, itemsize: int, level: int) -> bytes:
    planes = np.empty((itemsize, data.size // itemsize), np.uint8)
    for plane in range(itemsize):  # a loop of strided copies is several times faster than one transposed copy
        planes[plane] = data[plane::itemsize]
    return zstandard.ZstdCompressor(level=level, write_content_size=True).compress(planes.data)


def _decompress(payload: bytes | memoryview, size: int) -> Bytes:
    # a skippable frame has no content, but zstandard allocates memory for its length
    if payload[:4] != zstandard.FRAME_HEADER:
        raise Corrupt(f"a chunk of {size} bytes does not start with a zstd frame")
    try:
        declared = zstandard.frame_content_size(payload)
        # also refuses -1 (not declared): zstandard trusts the declared size, so it must be right
        if declared != size:
            raise Corrupt(f"a chunk of {size} bytes declares {declared} bytes in its zstd frame")
        plain = zstandard.ZstdDecompressor().decompress(payload, max_output_size=max(size, 1), allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Corrupt(f"a chunk's zstd frame does not decode: {error}") from error
    return _exact(np.frombuffer(plain, np.uint8), size)
