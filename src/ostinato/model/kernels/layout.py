# pyright: basic, reportCallIssue=false
"""The layout of a weight for the kernels (`product`): a transposition of 32-bit words within each panel of outputs."""

from __future__ import annotations

from numba import njit
from numba.np.numpy_support import carray

from ostinato.model.kernels.vector import PANEL, WIDE, pointer


@njit(nogil=True, cache=True)
def lay_out(address, rows, first, last, out_PXL):
    """Fill panels [first, last) of out_PXL with a matrix's rows of 32-bit words; missing rows of the last panel are zeros.

    It is given by its address: torch never again resizes memory that numpy has seen, and FSDP resizes its weights'.
    """
    words = out_PXL.shape[1]
    words_NX = carray(pointer(address, out_PXL), (rows, words))
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
