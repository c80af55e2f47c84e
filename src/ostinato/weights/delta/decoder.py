# pyright: basic, reportCallIssue=false
"""The delta decoder, inverse of `encoder`: applies a payload's steps to the old codes, in place. Validates every count, position and
length in the payload.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from ostinato.core.errors import Corrupt
from ostinato.weights.delta.bits import (
    BLOCK,
    MAGNITUDE,
    Codes,
    exponents,
    lowest,
    nth,
    ones,
    ordered,
    take,
    take_gamma,
    take_rice,
    unordered,
    within,
)
from ostinato.weights.delta.encoder import CLASSES, DENSEST

_LONGEST_STEP = 0xFFFF


@njit(nogil=True, cache=True)
def _read_header(words, end, shift, most, starts, widths, firsts, gap_k, length_k):
    """Return (number of classes, next bit position), or (-1, 0) for a header that no encoder writes."""
    n, at = take(words, 0, 5)
    edge = 0
    if n < 1 or n > CLASSES:
        return -1, 0
    for c in range(n):
        skip, at = take_gamma(words, at)
        width, at = take_gamma(words, at)
        count, at = take_gamma(words, at)
        gap_k[c], at = take(words, at, 5)
        length_k[c], at = take(words, at, 5)
        if at > end or skip < 0 or width < 0 or count < 0 or edge + skip + width + 1 > 1 << (15 - shift):
            return -1, 0
        starts[c], widths[c] = edge + skip, width
        edge += skip + width + 1
        firsts[c + 1] = firsts[c] + count + 1
        if firsts[c + 1] > most:
            return -1, 0
    return n, at


@njit(nogil=True, cache=True)
def _read_class(words, at, end, most, gap_k, length_k, ranks, steps):
    """Fill one class's ranks (ascending, below `most`) and steps. Returns the next bit position, or -1 if the stream is damaged."""
    count, rank = len(ranks), np.int64(-1)
    for i in range(count):
        gap, at = take_rice(words, at, gap_k)
        down, at = take(words, at, 1)
        rank += gap + 1
        if at > end or rank >= most:
            return -1
        ranks[i] = rank
        steps[i] = -1 if down else 1
    if length_k:
        for i in range(count):
            extra, at = take_rice(words, at, length_k)
            if at > end or extra > _LONGEST_STEP:
                return -1
            steps[i] *= extra + 1
        return at
    long, at = take_gamma(words, at)
    if long < 0 or long > count or at > end:
        return -1
    if long:
        k, at = take(words, at, 5)
        i = -1
        for _ in range(long):
            gap, at = take_rice(words, at, k)
            extra, at = take_rice(words, at, 0)
            i += gap + 1
            if at > end or i >= count or extra > _LONGEST_STEP:
                return -1
            steps[i] *= extra + 2
    return at


@njit(nogil=True, cache=True)
def _apply(codes, shift, starts, widths, firsts, ranks, steps):
    """Apply the steps in place. Returns False if a rank lies beyond its class."""
    n = len(starts)
    found = np.empty(BLOCK, np.uint8)
    never = np.int64(1) << 62
    left, nexts, masks = np.empty(n, np.int64), firsts[:n].copy(), np.zeros(n, np.uint64)
    for c in range(n):
        left[c] = ranks[nexts[c]] if nexts[c] < firsts[c + 1] else never
    whole = len(codes) // BLOCK * BLOCK
    for i in range(0, whole, BLOCK):
        exponents(codes, i, shift, found)
        hit = np.uint64(0)
        for c in range(n):
            masks[c] = within(found, starts[c], widths[c])
            left[c] -= ones(masks[c])
            hit |= (np.uint64(left[c]) >> np.uint64(63)) << np.uint64(c)
        while hit:  # all masks of the block are computed already, so these writes cannot change them
            c = lowest(hit)
            hit &= hit - np.uint64(1)
            ahead, k, size = left[c], nexts[c], ones(masks[c])
            while ahead < 0:
                at = i + nth(masks[c], ahead + size)
                codes[at] = unordered(ordered(codes[at]) + steps[k])
                k += 1
                ahead = ahead + ranks[k] - ranks[k - 1] if k < firsts[c + 1] else never
            left[c], nexts[c] = ahead, k
    for i in range(whole, len(codes)):
        exponent = (codes[i] & MAGNITUDE) >> shift
        for c in range(n):
            if starts[c] <= exponent <= starts[c] + widths[c]:
                left[c] -= 1
                if left[c] < 0:
                    codes[i] = unordered(ordered(codes[i]) + steps[nexts[c]])
                    nexts[c] += 1
                    left[c] = left[c] + ranks[nexts[c]] - ranks[nexts[c] - 1] if nexts[c] < firsts[c + 1] else never
    return (nexts == firsts[1:]).all()


def decode(codes: Codes, payload: bytes | memoryview, shift: int) -> None:
    """Turn the old codes into the new ones, in place. Needs 8 bytes of memory per changed element, and the payload.

    Raises Corrupt for anything that `encode` does not write; `codes` may then hold a mixture of old and new codes and must be dropped.
    """
    # padded, because a header is read before its end is checked
    words = np.zeros(len(payload) // 8 + 8, np.uint64)
    words.view(np.uint8)[: len(payload)] = np.frombuffer(payload, np.uint8)
    end = len(payload) * 8
    starts, widths = np.zeros(CLASSES, np.uint8), np.zeros(CLASSES, np.uint8)
    firsts, gap_k, length_k = (np.zeros(CLASSES + 1, np.int64) for _ in range(3))
    most = len(codes) // DENSEST + BLOCK  # bounds the memory that a payload can claim
    n, at = _read_header(words, end, shift, most, starts, widths, firsts, gap_k, length_k)
    if n < 0:
        raise Corrupt("the payload's classes are not what this codec writes")
    ranks, steps = np.empty(firsts[n], np.int32), np.empty(firsts[n], np.int32)
    for c in range(n):
        part = slice(firsts[c], firsts[c + 1])
        at = _read_class(words, at, end, len(codes), gap_k[c], length_k[c], ranks[part], steps[part])
        if at < 0:
            raise Corrupt("the payload ends before its changes do")
    if (at + 7) // 8 != len(payload):
        raise Corrupt("the payload goes on after its last change")
    if not _apply(codes, shift, starts[:n], widths[:n], firsts[: n + 1], ranks, steps):
        raise Corrupt("the payload names elements that the old weights do not have")
