"""Which rank computes which micro-batch. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def balanced(tokens: Sequence[int], ranks: int) -> list[list[int]]:
    """Divide micro-batches of so many tokens among ranks; returns each rank's indices, in ascending order.

    The largest first, each to the rank with the least so far (Graham 1969): the fullest rank then has at most
    4/3 - 1/(3 ranks) times what the best division gives it. The same input gives the same division everywhere.

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
    """How often every rank calls forward and backward: all alike, or those that call oftener would wait for ever."""
    return max(len(share) for share in shares)


def rows_of(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """The first and one past the last row of a tensor of `size` rows that a rank holds: `torch.chunk`'s division, as FSDP2's.

    Example: 5 rows on 4 ranks are ``(0, 2), (2, 4), (4, 5), (5, 5)``.
    """
    step = -(-size // ranks)
    return min(rank * step, size), min((rank + 1) * step, size)
