# pyright: basic, reportCallIssue=false
"""The layout of a weight for the kernels (`product`): a transposition of 32-bit words within each panel of outputs."""

from __future__ import annotations

from numba import njit

from ostinato.model.kernels.vector import PANEL, WIDE


@njit(nogil=True, cache=True)
def lay_out(words_NX, first, last, out_PXL):
    """Fill panels [first, last) of out_PXL with the rows of words_NX; missing rows of the last panel are zeros."""
    rows, words = words_NX.shape
    for panel in range(first, last):
        begin = panel * PANEL
        count = min(PANEL, rows - begin)
        for x in range(0, words, WIDE):  # a square of words at a time stays in the first cache
            end = min(words, x + WIDE)
            for lane in range(count):
                for word in range(x, end):
                    out_PXL[panel, word, lane] = words_NX[begin + lane, word]
            for lane in range(count, PANEL):
                for word in range(x, end):
                    out_PXL[panel, word, lane] = 0
