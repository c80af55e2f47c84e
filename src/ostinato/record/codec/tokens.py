"""Token ids and log-probabilities as bytes: lossless, with the ids that a turn shares with its base left out (delta encoding).

A turn's ids are its prompt ids followed by its sampled ids. Leading ids that it shares with an earlier turn (its *base*) are not stored
again; the base's distance and their number represent them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LONGEST = 1 << 31  # every token id is below it

# Width codes: bytes per id. With three, all low 16-bit halves come first, then the high bytes, which are nearly always 0 or 1.
_TWO, _THREE, _FOUR = 0, 1, 2


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """A turn's ids in stored form.

    `gap`: how many rows before this turn its base is, 0 for no base. `depth`: length of the chain of bases below it. `shared`: number of
    ids taken from the base. `prompt`: number of prompt ids among all ids. `ids`: the ids that are not shared, in `width`.
    """

    gap: int
    depth: int
    shared: int
    prompt: int
    width: int
    ids: bytes


def flat(ids: Sequence[int]) -> bytes:
    """Return ids as little-endian uint32. Raises ValueError for a number that is not a token id."""
    try:
        packed = struct.pack(f"<{len(ids)}I", *ids)
    except struct.error as error:
        raise ValueError(f"a token id is a whole number from 0 to {LONGEST - 1} ({error})") from error
    return checked(packed)


def checked(packed: bytes) -> bytes:
    """Return `packed` itself. Raises ValueError if it holds a number that is not a token id."""
    if len(packed) >= 4 and np.frombuffer(packed, dtype="<u4").max() >= LONGEST:
        raise ValueError(f"a token id is a whole number from 0 to {LONGEST - 1}")
    return packed


def unflat(packed: bytes) -> tuple[int, ...]:
    """The inverse of `flat`. Raises ValueError for a length that is not a multiple of four."""
    if len(packed) % 4:
        raise ValueError(f"{len(packed)} bytes are no token ids")
    return struct.unpack(f"<{len(packed) // 4}I", packed)


def narrow(packed: bytes) -> tuple[int, bytes]:
    """Store ids from `flat` in as few bytes each as the largest allows; return the width code and the bytes."""
    if packed[3::4].strip(b"\0"):
        return _FOUR, packed
    halves = bytearray(len(packed) // 2)
    halves[0::2], halves[1::2] = packed[0::4], packed[1::4]
    high = packed[2::4]
    return (_THREE, bytes(halves) + high) if high.strip(b"\0") else (_TWO, bytes(halves))


def widen(width: int, packed: bytes) -> bytes:
    """The inverse of `narrow`."""
    if width == _FOUR:
        return packed
    count = len(packed) // (3 if width == _THREE else 2)
    ids = bytearray(4 * count)
    ids[0::4], ids[1::4] = packed[0 : 2 * count : 2], packed[1 : 2 * count : 2]
    if width == _THREE:
        ids[2::4] = packed[2 * count :]
    return bytes(ids)


def shared_ids(ids: bytes, base: bytes) -> int:
    """Return the length, in ids, of the common prefix of two flat sequences."""
    least, most = 0, min(len(ids), len(base)) // 4
    if (ids if len(ids) >= len(base) else base).startswith(base if len(ids) >= len(base) else ids):
        return most
    while most - least > 1:  # they agree up to `least`, but not up to `most`
        middle = (least + most) // 2
        if ids[4 * least : 4 * middle] == base[4 * least : 4 * middle]:
            least = middle
        else:
            most = middle
    return least


def write_ints(*values: int) -> bytes:
    """Return non-negative integers as varints: seven bits per byte, low bits first."""
    out = bytearray()
    for value in values:
        while value > 0x7F:
            out.append(value & 0x7F | 0x80)
            value >>= 7
        out.append(value)
    return bytes(out)


def read_ints(data: bytes, count: int) -> tuple[list[int], int]:
    """Return `count` integers from `write_ints` and the offset after them. Raises IndexError if they are cut short."""
    values: list[int] = []
    at = 0
    for _ in range(count):
        value = shift = 0
        while (byte := data[at]) > 0x7F:
            value |= (byte & 0x7F) << shift
            shift, at = shift + 7, at + 1
        values.append(value | byte << shift)
        at += 1
    return values, at


# ---------------------------------------------------------------- log-probabilities


def pack_logprobs(logprobs: Sequence[float]) -> bytes:
    """Return float32 numbers in packed form.

    The first byte of each (sign and most of the exponent) takes four bits: its distance below the largest first byte. First bytes 15 or
    more below the largest follow these, in full; then come the other bytes, unchanged. Raises ValueError for NaN and for numbers too large
    for float32.
    """
    count = len(logprobs)
    try:
        numbers = struct.pack(f"<{count}f", *logprobs)
    except (struct.error, OverflowError) as error:
        raise ValueError(f"a log-probability is a float32 number ({error})") from error
    if not count:
        return b""
    first = numbers[3::4]
    largest = max(first)
    if (largest & 0x7F == 0x7F or b"\x7f" in first) and any(number != number for number in logprobs):
        raise ValueError("NaN is not a number that the log keeps")
    below = first.translate(_BELOW[largest])
    far = bytes(byte for byte, half in zip(first, below, strict=True) if half == _FAR) if _FAR in below else b""
    if count % 2:
        below += b"\0"
    halves = int.from_bytes(below[0::2], "big") << 4 | int.from_bytes(below[1::2], "big")
    packed = halves.to_bytes(len(below) // 2, "big")
    return b"".join((write_ints(count), bytes([largest]), packed, far, numbers[2::4], numbers[1::4], numbers[0::4]))


def unpack_logprobs(packed: bytes) -> tuple[tuple[float, ...], bytes]:
    """The inverse of `pack_logprobs`; also return the bytes that follow. Raises ValueError, IndexError for damaged bytes."""
    if packed[:1] in (b"", b"\0"):
        return (), packed[1:]
    (count,), at = read_ints(packed, 1)
    if count > len(packed):
        raise ValueError(f"{count} log-probabilities do not fit into {len(packed)} bytes")
    largest, size = packed[at], (count + 1) // 2
    halves = int.from_bytes(packed[at + 1 : at + 1 + size], "big")
    low = int.from_bytes(b"\x0f" * size, "big")
    below = bytearray(2 * size)
    below[0::2], below[1::2] = (halves >> 4 & low).to_bytes(size, "big"), (halves & low).to_bytes(size, "big")
    first = bytearray(below[:count].translate(_FIRST[largest]))
    at += 1 + size
    place = below.find(_FAR, 0, count)
    while place >= 0:
        first[place] = packed[at]
        place, at = below.find(_FAR, place + 1, count), at + 1
    numbers = bytearray(4 * count)
    numbers[3::4] = first
    for plane in range(3):
        numbers[2 - plane :: 4] = packed[at + plane * count : at + (plane + 1) * count]
    return struct.unpack(f"<{count}f", numbers), packed[at + 3 * count :]


_FAR = 15
_BELOW = [bytes(min(largest - byte, _FAR) if byte <= largest else 0 for byte in range(256)) for largest in range(256)]
_FIRST = [bytes(max(largest - half, 0) for half in range(256)) for largest in range(256)]
