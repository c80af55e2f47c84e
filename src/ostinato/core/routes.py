"""Compact encoding of the experts that each token was routed to, for the engine's router ids, the log and the trainer's replay.

The order of a token's k experts carries no meaning (gates are recomputed from live logits), so a layer's choice is a k-subset of E
experts. It is stored as its rank in the combinatorial number system: ceil(log2 C(E, k)) bits, whatever the router's skew. 48 layers
of 8 out of 128 experts take 48 x 41 bits = 246 bytes a token. If a rank needs more than 63 bits (10 of 512), the subset is
cut into consecutive parts that fit.
"""

from __future__ import annotations

import struct
import zlib
from functools import lru_cache
from math import comb
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ostinato.core.errors import BadRoutes

Ids = NDArray[np.integer]
"""Expert ids [T, L, k]."""

_MAGIC = b"ORT1"
_HEADER = struct.Struct("<4sIIHHH")  # magic, crc32 of everything after it, T, L, k, E
_MAX_EXPERTS, _MAX_TOP_K, _MAX_LAYERS = 4096, 64, 4096
_CHUNK = 1 << 14  # sets per chunk: small enough for the working arrays to stay in the cache; a multiple of 8
# "every set is 0..k-1" counts as a failure if its probability under a uniform router is below 2 ** -64
_MAX_CHANCE_BITS = 64


class _Part(NamedTuple):
    """Slots first..last of the sorted subset, ranked together."""

    first: int
    last: int  # exclusive
    bits: int
    sets: int  # C(E, last - first): the exclusive upper bound of ranks
    table_iE: NDArray[np.uint64]  # C(c, i + 1) for slot first + i and expert c


def encode(ids_TLk: Ids, experts: int) -> bytes:
    """Encode the routes of T >= 1 tokens; ids in any order within a set.

    Raises BadRoutes for routes that are missing, not three-dimensional, out of range, repeated within a set or all zero.
    Example: one token, two layers, top 2 of 4 experts: ``encode(np.array([[[1, 0], [2, 3]]]), 4)`` is 18 + 1 bytes long.
    """
    ids_TLk = _canonical(np.asarray(ids_TLk), experts)
    tokens, layers, top_k = ids_TLk.shape
    sets_kM = ids_TLk.reshape(-1, top_k).T
    parts = _parts(experts, top_k)
    payload = b"".join(
        _pack(_rank(sets_kM[part.first : part.last], part), part.bits).tobytes()[
            : -(-sets_kM.shape[1] * part.bits // 8)
        ]
        for part in parts
    )
    tail = struct.pack("<IHHH", tokens, layers, top_k, experts) + payload
    return _MAGIC + struct.pack("<I", zlib.crc32(tail)) + tail


def decode(
    data: bytes,
    *,
    experts: int | None = None,
    layers: int | None = None,
    top_k: int | None = None,
    tokens: int | None = None,
) -> Ids:
    """Decode routes [T, L, k], each set ascending; uint8 up to 256 experts, else int16.

    Each argument given must match the encoded value. Raises BadRoutes with the reason: "missing" (no bytes), "corrupt" (another format,
    a wrong length, checksum or rank), "truncated" (fewer tokens than `tokens`), "stale" (another model's shape).
    """
    found = _header(data)
    tokens_, layers_, top_k_, experts_ = found
    _expect(found, experts=experts, layers=layers, top_k=top_k, tokens=tokens)
    count, at = tokens_ * layers_, _HEADER.size
    ids_kM = np.empty((top_k_, count), np.uint8 if experts_ <= 256 else np.int16)
    for part in _parts(experts_, top_k_):
        length = -(-count * part.bits // 8)
        ranks = _unpack(np.frombuffer(data, np.uint8, length, at), part.bits, count)
        if int(ranks.max()) >= part.sets:
            raise BadRoutes(f"the routes hold a rank beyond the {part.sets} sets there are", reason="corrupt")
        _unrank(ranks, part, ids_kM[part.first : part.last])
        at += length
    ids_Mk = np.ascontiguousarray(ids_kM.T)
    if len(_parts(experts_, top_k_)) > 1 and not _ascending(ids_Mk):
        raise BadRoutes("the parts of a set overlap", reason="corrupt")
    return ids_Mk.reshape(tokens_, layers_, top_k_)


def check(ids_TLk: Ids | None, *, experts: int, layers: int, top_k: int, tokens: int | None = None) -> None:
    """Raise BadRoutes, with the reason, for routes that must not be replayed into a model of this shape.

    "missing": none at all. "truncated": fewer tokens than `tokens` (more are fine: the last one may have no successor).
    "stale": another number of layers or slots, or ids that the model does not have. "zero": values that a failed kernel leaves behind.
    "repeated": an expert twice in one set.
    """
    if ids_TLk is None or ids_TLk.size == 0:
        raise BadRoutes("there are no routes: the engine recorded none for this turn", reason="missing")
    if ids_TLk.ndim != 3:
        raise BadRoutes(f"routes have the shape {ids_TLk.shape}, not [tokens, layers, top_k]", reason="corrupt")
    _expect((*ids_TLk.shape, experts), experts=experts, layers=layers, top_k=top_k, tokens=tokens)
    _canonical(ids_TLk, experts)


def size(tokens: int, layers: int, top_k: int, experts: int) -> int:
    """Return the number of bytes that `encode` gives for this shape; it does not depend on the routes.

    Raises BadRoutes for a shape outside the codec's bounds.
    """
    return _HEADER.size + sum(-(-tokens * layers * part.bits // 8) for part in _parts(experts, top_k))


def _header(data: bytes) -> tuple[int, int, int, int]:
    """Return (T, L, k, E), after checking the checksum and the exact length."""
    if not data:
        raise BadRoutes("there are no routes: the engine recorded none for this turn", reason="missing")
    if len(data) < _HEADER.size or data[:4] != _MAGIC:
        raise BadRoutes("these bytes are not routes of this version", reason="corrupt")
    _, crc, tokens, layers, top_k, experts = _HEADER.unpack_from(data)
    if not tokens or not 0 < layers <= _MAX_LAYERS:
        raise BadRoutes(f"the routes claim {tokens} tokens and {layers} layers", reason="corrupt")
    expected = size(tokens, layers, top_k, experts)
    if len(data) != expected:
        reason = "truncated" if len(data) < expected else "corrupt"
        raise BadRoutes(f"the routes should be {expected} bytes long and are {len(data)}", reason=reason)
    if zlib.crc32(memoryview(data)[8:]) != crc:
        raise BadRoutes("the checksum of the routes is wrong", reason="corrupt")
    return tokens, layers, top_k, experts


def _expect(
    found: tuple[int, ...], *, experts: int | None, layers: int | None, top_k: int | None, tokens: int | None
) -> None:
    for name, got, wanted in zip(("layers", "top_k", "experts"), found[1:], (layers, top_k, experts), strict=True):
        if wanted is not None and got != wanted:
            raise BadRoutes(f"the routes are of another model: {name} is {got}, not {wanted}", reason="stale")
    if tokens is not None and found[0] < tokens:
        raise BadRoutes(f"the routes cover {found[0]} of {tokens} tokens", reason="truncated")


def _canonical(ids_TLk: Ids, experts: int) -> Ids:
    """Check the content, and return the ids with each set ascending, in the narrowest dtype that fits."""
    if ids_TLk.ndim != 3 or ids_TLk.dtype.kind not in "iu":
        raise BadRoutes(
            f"routes must be integers [tokens, layers, top_k], not {ids_TLk.dtype}{ids_TLk.shape}", reason="corrupt"
        )
    if ids_TLk.size == 0:
        raise BadRoutes("there are no routes", reason="missing")
    top_k = ids_TLk.shape[2]
    _parts(experts, top_k)
    if ids_TLk.shape[1] > _MAX_LAYERS or ids_TLk.shape[0] >= 1 << 32:
        raise BadRoutes(f"routes of {ids_TLk.shape[:2]} tokens and layers are beyond the bounds", reason="corrupt")
    low, high = int(ids_TLk.min()), int(ids_TLk.max())
    if low < 0 or high >= experts:
        raise BadRoutes(f"expert {low if low < 0 else high} does not exist: the model has {experts}", reason="stale")
    narrow = ids_TLk.astype(np.uint8 if experts <= 256 else np.int16, copy=False)
    if not _ascending(narrow):
        narrow = np.sort(narrow, axis=-1)
        if not _ascending(narrow):
            if bool((narrow == 0).all(-1).any()):
                raise BadRoutes("a token's routes are all zero: the engine's kernel recorded nothing", reason="zero")
            raise BadRoutes("a token goes to the same expert twice in one layer", reason="repeated")
    # ascending and below k: every set is 0..k-1
    if high == top_k - 1 and _information_bits(ids_TLk, experts) > _MAX_CHANCE_BITS:
        raise BadRoutes(f"every token goes to experts 0 to {high} in every layer: nothing was recorded", reason="zero")
    return narrow


def _ascending(ids: Ids) -> bool:
    return bool((ids[..., 1:] > ids[..., :-1]).all())


def _information_bits(ids_TLk: Ids, experts: int) -> int:
    """Return the bits of information in these routes under a uniform router (rounded down for each set)."""
    tokens, layers, top_k = ids_TLk.shape
    return tokens * layers * (comb(experts, top_k).bit_length() - 1)


@lru_cache(maxsize=64)
def _parts(experts: int, top_k: int) -> tuple[_Part, ...]:
    """Return the parts of a subset: cut greedily, because one long and one short part waste fewer bits than two equal ones."""
    if not 0 < top_k <= min(experts, _MAX_TOP_K) or experts > _MAX_EXPERTS:
        raise BadRoutes(
            f"routes of top {top_k} of {experts} experts are beyond the bounds ({_MAX_TOP_K} of {_MAX_EXPERTS})",
            reason="corrupt",
        )
    parts: list[_Part] = []
    first = 0
    while first < top_k:
        last = first + 1
        while last < top_k and _largest(experts, last + 1 - first) < 1 << 63:
            last += 1
        width = last - first
        table = [[comb(c, i + 1) for c in range(experts)] for i in range(width)]
        bits = max(1, (comb(experts, width) - 1).bit_length())  # never 0: the length must bound the number of sets
        parts.append(_Part(first, last, bits, comb(experts, width), np.array(table, np.uint64)))
        first = last
    return tuple(parts)


def _largest(experts: int, width: int) -> int:
    """Return the largest entry of the tables, which exceeds C(E, k) when k is more than half of E."""
    return max(comb(experts, i) for i in range(1, width + 1))


def _rank(ids_kM: Ids, part: _Part) -> NDArray[np.uint64]:
    """Return the rank among all subsets: the sum over slots i of C(c_i, i + 1), c ascending (Knuth 4A, 7.2.1.3, theorem L)."""
    ranks = np.empty(ids_kM.shape[1], np.uint64)
    for start in range(0, len(ranks), _CHUNK):
        chunk = ids_kM[:, start : start + _CHUNK].astype(np.intp)
        total = part.table_iE[0][chunk[0]]
        for row, column in zip(part.table_iE[1:], chunk[1:], strict=True):
            total += row[column]
        ranks[start : start + _CHUNK] = total
    return ranks


def _unrank(ranks_M: NDArray[np.uint64], part: _Part, out_kM: Ids) -> None:
    """Fill in the subset of each rank: from the last slot down, the largest c with C(c, i + 1) <= the remainder."""
    for start in range(0, len(ranks_M), _CHUNK):
        rest = ranks_M[start : start + _CHUNK].copy()
        for i in reversed(range(part.last - part.first)):
            row = part.table_iE[i]
            column = np.searchsorted(row, rest, side="right") - 1
            out_kM[i, start : start + _CHUNK] = column
            rest -= row[column]


def _pack(ranks_M: NDArray[np.uint64], bits: int) -> NDArray[np.uint8]:
    """Pack ranks one after another, low bit first: 8 of them are exactly `bits` bytes, so bytes are built a column at a time."""
    groups = np.zeros((-(-len(ranks_M) // 8), 8), np.uint64)
    groups.reshape(-1)[: len(ranks_M)] = ranks_M
    out = np.zeros((bits, len(groups)), np.uint8)
    for slot in range(8):
        column = np.ascontiguousarray(groups[:, slot])
        for byte, shift in _places(slot, bits):
            moved = column >> np.uint64(shift) if shift >= 0 else column << np.uint64(-shift)
            out[byte] |= moved.astype(np.uint8)
    return np.ascontiguousarray(out.T).reshape(-1)


def _unpack(data: NDArray[np.uint8], bits: int, count: int) -> NDArray[np.uint64]:
    groups = -(-count // 8)
    padded = np.zeros(groups * bits, np.uint8)
    padded[: len(data)] = data
    columns = np.ascontiguousarray(padded.reshape(groups, bits).T)
    mask = np.uint64((1 << bits) - 1)
    out = np.empty((groups, 8), np.uint64)
    for slot in range(8):
        value = np.zeros(groups, np.uint64)
        for byte, shift in _places(slot, bits):
            column = columns[byte].astype(np.uint64)
            value |= column << np.uint64(shift) if shift >= 0 else column >> np.uint64(-shift)
        out[:, slot] = value & mask
    ranks = out.reshape(-1)
    if ranks[count:].any():
        raise BadRoutes("the unused bits at the end of the routes are not zero", reason="corrupt")
    return ranks[:count]


def _places(slot: int, bits: int) -> list[tuple[int, int]]:
    """Return (byte of the group, right shift of the rank that fills it) for the rank in `slot`."""
    begin, end = slot * bits, (slot + 1) * bits
    return [(byte, byte * 8 - begin) for byte in range(begin // 8, -(-end // 8))]
