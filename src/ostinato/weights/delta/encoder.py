# pyright: basic, reportCallIssue=false
"""The delta encoder for 16-bit floats, with the receiver's old values as context.

A bf16 weight changes when its fp32 master weight crosses a rounding boundary. The probability is about step / ulp, so it doubles each time
the exponent falls by one, and the receiver knows the old exponents. The encoding uses this:

- Elements fall into at most 24 classes: ranges of the old value's exponent.
- Within a class the elements are counted 0, 1, 2, ... The gaps between changed elements are nearly geometric, so they are Rice codes
  with one parameter per class (Golomb 1966; Rice 1979).
- A new value is a step along the 65,536 codes sorted by value: a sign, and a length that is nearly always 1. In classes where this holds,
  only the exceptions are encoded, by their own gaps; in the other classes every length is a Rice code.

The payload is one bit stream: the classes' headers, then for each class the gaps, signs and lengths. It has no positions and no tables.
Elements are processed 64 at a time, by one comparison per class and a bit count, so a chunk takes under a cycle per element and class.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from ostinato.weights.delta.bits import (
    BLOCK,
    LONGEST,
    MAGNITUDE,
    Codes,
    differing,
    exponents,
    lowest,
    ones,
    ordered,
    put,
    put_gamma,
    put_rice,
    put_signed_gap,
    within,
)

CLASSES = 24
DENSEST = 4  # a chunk in which more than 1 in 4 elements changed is left to other codecs
# room per change, plus room for 256 changes; a stream that does not fit is written again with more room
_USUAL_BITS = 32
# classes are merged if that costs fewer bits; a header takes about 30, but separate classes code steps better
_MERGE_BITS = 10
# counters per exponent: neighbours often share an exponent, and incrementing the same counter twice in a row stalls
_LANES = 4
# 1 block in 29 is sampled to estimate how many elements each exponent has; row lengths are not multiples of 29
_SAMPLING = 29


@njit(nogil=True, cache=True)
def _find(old, new, shift, positions, steps, total, changed):
    """Fill `positions` (int32) with the indices that differ, ascending, and `steps` with the differences, and count by exponent.

    Returns the number of differing elements, or -1 if there is no room for all. Per exponent, `changed` counts the elements that differ,
    and `total` estimates the number of all elements from a sample.
    """
    count, room, sampled = 0, len(positions), 0
    seen = np.zeros((_LANES, len(total)), np.int32)
    whole = len(old) // BLOCK * BLOCK
    for i in range(0, whole, BLOCK):
        mask = differing(old, new, i)
        if mask:
            if count + BLOCK > room:
                return -1
            while mask:
                at = i + lowest(mask)
                mask &= mask - np.uint64(1)
                positions[count], steps[count] = at, ordered(new[at]) - ordered(old[at])
                changed[(old[at] & MAGNITUDE) >> shift] += 1
                count += 1
        if i == sampled:
            sampled += BLOCK * _SAMPLING
            for j in range(i, i + BLOCK):
                seen[j % _LANES, (old[j] & MAGNITUDE) >> shift] += 1
    for i in range(whole, len(old)):
        if i >= sampled:
            seen[0, (old[i] & MAGNITUDE) >> shift] += 1
        if old[i] != new[i]:
            if count == room:
                return -1
            positions[count], steps[count] = i, ordered(new[i]) - ordered(old[i])
            changed[(old[i] & MAGNITUDE) >> shift] += 1
            count += 1
    for lane in range(_LANES):
        for e in range(len(total)):
            total[e] += seen[lane, e] * _SAMPLING
    return count


@njit(nogil=True, cache=True)
def _classes(total, changed, starts, widths, firsts, class_of):
    """Choose the ranges of exponents that form classes. Returns their number. Neighbours are merged while that costs fewer bits than
    `_MERGE_BITS`.

    `class_of` receives the class of each exponent, `firsts` the number of changed elements in the classes before each class.
    """
    most = len(total)
    first, last, count, n = np.zeros(most, np.int64), np.zeros(most, np.int64), 0, 0
    sums = np.zeros((most, 2), np.float64)
    for e in range(most):
        if changed[e]:
            first[count] = last[count] = e
            sums[count, 0], sums[count, 1] = max(total[e], changed[e] + 1), changed[e]
            count += 1
    n = count
    while n > 1:
        best, where = np.float64(_MERGE_BITS), -1
        for c in range(n - 1):
            between = 0.0
            for e in range(last[c] + 1, first[c + 1]):
                between += total[e]
            apart = _cost(sums[c, 0], sums[c, 1]) + _cost(sums[c + 1, 0], sums[c + 1, 1])
            loss = _cost(sums[c, 0] + sums[c + 1, 0] + between, sums[c, 1] + sums[c + 1, 1]) - apart
            if loss < best or (n > CLASSES and where < 0):
                best, where = loss, c
        if where < 0:
            break
        for e in range(last[where] + 1, first[where + 1]):
            sums[where, 0] += total[e]
        sums[where] += sums[where + 1]
        last[where] = last[where + 1]
        n -= 1
        for c in range(where + 1, n):
            first[c], last[c], sums[c] = first[c + 1], last[c + 1], sums[c + 1]
    for c in range(n):
        starts[c], widths[c] = first[c], last[c] - first[c]
        class_of[first[c] : last[c] + 1] = c
        firsts[c + 1] = firsts[c] + np.int64(sums[c, 1])
    return n


@njit(inline="always")
def _cost(total, changed):
    """Return the bits that it takes to encode which `changed` of `total` elements changed (their entropy)."""
    p = changed / total
    return -total * (p * np.log2(p) + (1 - p) * np.log2(1 - p)) if p < 1 else 0.0


@njit(nogil=True, cache=True)
def _rank(old, positions, jumps, shift, starts, widths, firsts, class_of, ranks, steps):
    """Fill `ranks` with the changed elements' ranks among their class's elements, class by class, and `steps` with their steps.

    `jumps` are the steps in the order of the positions; firsts[c] is where class c begins.
    """
    n, found = len(starts), np.empty(BLOCK, np.uint8)
    seen, masks, nexts = np.zeros(n, np.int64), np.zeros(n, np.uint64), firsts[:n].copy()
    whole = len(old) // BLOCK * BLOCK
    k = 0
    for i in range(0, whole, BLOCK):
        if k == len(positions):
            break
        exponents(old, i, shift, found)
        for c in range(n):
            masks[c] = within(found, starts[c], widths[c])
        while k < len(positions) and positions[k] < i + BLOCK:
            at = positions[k]
            bit = np.uint64(1) << np.uint64(at - i)
            c = class_of[(old[at] & MAGNITUDE) >> shift]
            ranks[nexts[c]] = seen[c] + ones(masks[c] & (bit - np.uint64(1)))
            steps[nexts[c]] = jumps[k]
            nexts[c] += 1
            k += 1
        for c in range(n):
            seen[c] += ones(masks[c])
    for i in range(whole, len(old)):
        exponent = (old[i] & MAGNITUDE) >> shift
        for c in range(n):
            if starts[c] <= exponent <= starts[c] + widths[c]:
                if k < len(positions) and positions[k] == i:
                    ranks[nexts[c]], steps[nexts[c]] = seen[c], jumps[k]
                    nexts[c] += 1
                    k += 1
                seen[c] += 1


@njit(nogil=True, cache=True)
def _parameter(total, count):
    """Return a nearly optimal Rice parameter for `count` numbers whose sum is `total`."""
    k = 0
    while k < 24 and (count << (k + 1)) <= total + (total >> 1):  # mean * ln 2 against 2^k, in integers
        k += 1
    return k


@njit(nogil=True, cache=True)
def _write(starts, widths, firsts, ranks, steps, words, limit):
    """Write the bit stream. Returns its length in bits, or -1 if it would exceed `limit`."""
    n = len(starts)
    gap_k, length_k, long = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64)
    gaps = np.empty(len(ranks), np.int64)
    at = put(words, 0, n, 5)
    end = 0
    for c in range(n):
        first, last = firsts[c], firsts[c + 1]
        before, extra, beyond = -1, 0, 0
        for i in range(first, last):
            gaps[i], before = ranks[i] - before - 1, ranks[i]
            extra += abs(steps[i]) - 1
            beyond += abs(steps[i]) > 1
        long[c] = beyond
        gap_k[c], length_k[c] = _parameter(before + 1 - (last - first), last - first), _parameter(extra, last - first)
        start, width = np.int64(starts[c]), np.int64(widths[c])
        at = put_gamma(words, at, start - end)
        at = put_gamma(words, at, width)
        end = start + width + 1
        at = put_gamma(words, at, last - first - 1)
        at = put(words, at, gap_k[c], 5)
        at = put(words, at, length_k[c], 5)
    for c in range(n):
        first, last = firsts[c], firsts[c + 1]
        for i in range(first, last):
            if at > limit - 3 * LONGEST:
                return -1
            at = put_signed_gap(words, at, gaps[i], gap_k[c], 1 if steps[i] < 0 else 0)
        at = _write_lengths(steps[first:last], length_k[c], long[c], words, at, limit)
        if at < 0:
            return -1
    return at


@njit(nogil=True, cache=True)
def _write_lengths(steps, k, long, words, at, limit):
    """Write every length as a Rice code or, with k = 0, only those above 1: their number, and for each a gap and a length."""
    count = len(steps)
    if at > limit - 3 * LONGEST:
        return -1
    if k:
        for i in range(count):
            if at > limit - 3 * LONGEST:
                return -1
            at = put_rice(words, at, abs(steps[i]) - 1, k)
        return at
    at = put_gamma(words, at, long)
    if long == 0:
        return at
    gap_k = _parameter(count - long, long)
    at = put(words, at, gap_k, 5)
    before = -1
    for i in range(count):
        if abs(steps[i]) > 1:
            if at > limit - 3 * LONGEST:
                return -1
            at = put_rice(words, at, i - before - 1, gap_k)
            at = put_rice(words, at, abs(steps[i]) - 2, 0)
            before = i
    return at


def encode(old: Codes, new: Codes, shift: int) -> bytes | None:
    """Return the payload that turns `old` into `new`: empty if they are equal, None if too much changed for this codec.

    Args:
        old: contiguous codes, fewer than 2^31.
        new: the same number of codes.
        shift: bits of the mantissa, 7 for bf16, 10 for fp16.
    """
    room, most = len(old) // DENSEST + BLOCK, 1 << (15 - shift)
    positions, jumps = np.empty(room, np.int32), np.empty(room, np.int32)
    total, changed = np.zeros(most, np.float64), np.zeros(most, np.float64)
    count = int(_find(old, new, shift, positions, jumps, total, changed))
    if count <= 0:
        return b"" if count == 0 else None
    positions, jumps = positions[:count], jumps[:count]
    starts, widths = np.zeros(most, np.uint8), np.zeros(most, np.uint8)
    firsts, class_of = np.zeros(most + 1, np.int64), np.zeros(most, np.int64)
    n = int(_classes(total, changed, starts, widths, firsts, class_of))
    starts, widths, firsts = starts[:n].copy(), widths[:n].copy(), firsts[: n + 1].copy()
    ranks, steps = np.empty(count, np.int32), np.empty(count, np.int32)
    _rank(old, positions, jumps, shift, starts, widths, firsts, class_of, ranks, steps)
    for limit in (min(_USUAL_BITS * count + 8192, old.nbytes * 8), old.nbytes * 8):
        words = np.zeros(limit // 64 + 4 * CLASSES, np.uint64)  # with room for the headers beyond the limit
        bits = int(_write(starts, widths, firsts, ranks, steps, words, limit))
        if bits >= 0:
            return words.view(np.uint8)[: (bits + 7) // 8].tobytes()
    return None
