"""Load balancing: which rank computes which micro-batch, and which tokens of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_RUN_TOKENS = 64  # about this many per run: long enough for the kernels' tiles, short enough for a tree's branches


def balanced(tokens: Sequence[int], ranks: int) -> list[list[int]]:
    """Divide micro-batches, given their numbers of tokens, among ranks; returns each rank's indices, in ascending order.

    The largest first, each to the rank with the fewest tokens so far (Graham 1969): the fullest rank then has at most
    4/3 - 1/(3 ranks) times its tokens in the best division. The division is deterministic, so all ranks compute the same.

    Example: ``balanced([5, 1, 1, 4], 2)`` is ``[[0, 1], [2, 3]]``.
    """
    if ranks < 1:
        raise ValueError(f"work cannot be divided among {ranks} ranks")
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in sorted(range(len(tokens)), key=lambda index: (-tokens[index], index)):
        rank = min(range(ranks), key=lambda rank: (loads[rank], len(shares[rank]), rank))
        shares[rank].append(index)
        loads[rank] += tokens[index]
    return [sorted(share) for share in shares]


def rounds(shares: Sequence[Sequence[int]]) -> int:
    """Return how many forward and backward passes every rank must run: equally many, or a rank with more would wait forever."""
    return max(len(share) for share in shares)


def rows_of(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return the first and one past the last row that a rank has of a tensor of `size` rows, divided as by `torch.chunk` and FSDP2.

    Example: 5 rows on 4 ranks are ``(0, 2), (2, 4), (4, 5), (5, 5)``.
    """
    step = -(-size // ranks)
    return min(rank * step, size), min((rank + 1) * step, size)


def dealt(costs_N: NDArray[np.int64], ranks: int) -> list[NDArray[np.int64]]:
    """Divide a micro-batch's tokens among the ranks that compute it together; returns each rank's tokens, in ascending order.

    `costs_N`: the cost of attention for each token, in keys. The tokens are cut in order into runs of about 64, equally many for each
    rank. The runs are assigned the costliest first, alternating forwards and backwards over the ranks. On one plain sequence that is
    the zigzag of Llama 3 (2407.21783, 3.3.2) with more than two chunks for each rank. On a tree, where costs drop at every branch, the
    bounds are the same: with r runs for each rank the numbers of tokens differ by at most r, the costs by at most the costliest run's.

    Example: ``dealt(np.arange(1, 9), 2)`` is ``[[0, 1, 6, 7], [2, 3, 4, 5]]``.
    """
    tokens = len(costs_N)
    each = max(2, round(tokens / (_RUN_TOKENS * ranks)))
    edges = np.arange(each * ranks + 1) * tokens // (each * ranks)
    sums = np.concatenate([[0], costs_N.cumsum()])
    rounds = np.argsort(sums[edges[:-1]] - sums[edges[1:]], kind="stable").reshape(each, ranks)
    rounds[1::2] = rounds[1::2, ::-1]
    return [
        np.concatenate([np.arange(*edges[run : run + 2]) for run in sorted(rounds[:, rank])]) for rank in range(ranks)
    ]
