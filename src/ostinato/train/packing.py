"""Sequence packing: the turns of a micro-batch as one token tree, so that a shared prefix is computed once.

Data flow: turns -> `microbatches` (which of them are computed together) -> `pack` (ids, positions, subtree ends) -> the tree
attention. Pure numpy: no torch, no IO.

The tree is a trie over the turns' paths. A path is a turn's prompt and all sampled tokens but the last, from which nothing is predicted.
Tokens are in depth-first order, so a single array describes the whole attention mask: token j is an ancestor of token i, or i itself,
exactly if ``j <= i < ends_N[j]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTurn:
    """The part of a turn that packing needs: the exact prompt and the sampled tokens, both non-empty.

    Example: ``TokenTurn(prompt=(1, 2, 3), sampled=(7, 9))`` has the path ``(1, 2, 3, 7)``; its last two tokens predict 7 and 9.
    """

    prompt: tuple[int, ...]
    sampled: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.prompt or not self.sampled:
            raise ValueError("a turn needs at least one prompt token and one sampled token: hold the others back")

    @property
    def path(self) -> tuple[int, ...]:
        """The tokens whose hidden states are needed."""
        return self.prompt + self.sampled[:-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """A micro-batch as one tree of N tokens that predicts M sampled tokens.

    `ids_N`, `positions_N`: token id and position (distance from its root). `ends_N`: one past the last descendant. `rows_M`: the
    token whose hidden state predicts the sampled token `targets_M`; `turns_M`: the index of the turn in `pack`'s argument. A
    turn's M entries are contiguous and in sampling order, turns in the order of `pack`'s argument. `unpacked`: the number of tokens
    without sharing.

    Example: turns ``(1,2)->(7,8)`` and ``(1,2)->(9,)`` give ``ids_N=[1,2,7]``, ``positions_N=[0,1,2]``, ``ends_N=[3,3,3]``,
    ``rows_M=[1,2,1]``, ``targets_M=[7,8,9]``, ``turns_M=[0,0,1]``, ``unpacked=5``.
    """

    ids_N: Ints
    positions_N: Ints
    ends_N: Ints
    rows_M: Ints
    targets_M: Ints
    turns_M: Ints
    unpacked: int

    @property
    def tokens(self) -> int:
        """N: the number of tokens that are computed."""
        return len(self.ids_N)

    @property
    def saved(self) -> int:
        """The number of tokens saved by sharing."""
        return self.unpacked - self.tokens


def _sorted_paths(turns: Sequence[TokenTurn]) -> tuple[list[int], list[Ints], list[int]]:
    """Return the turns' indices in lexicographic order of their paths, which puts shared prefixes next to each other; the paths in that
    order; and how many tokens each path shares with the previous one.
    """
    paths = [np.array(turn.path, ">u4") for turn in turns]
    keys = [path.tobytes() for path in paths]  # big-endian, so that the bytes compare like the numbers
    order = sorted(range(len(turns)), key=lambda index: keys[index])
    paths = [paths[index] for index in order]
    depths = [0] * min(1, len(turns)) + [_common_prefix(one, other) for one, other in pairwise(paths)]
    return order, paths, depths


def _common_prefix(one: Ints, other: Ints) -> int:
    """Return the length of the common prefix."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


def microbatches(
    turns: Sequence[TokenTurn], budget: int, *, largest: int = 1 << 15, waste: float = 0.09
) -> list[list[int]]:
    """Cut turns into micro-batches of about `budget` packed tokens; returns the turns' indices.

    After a cut, the prefix shared with the previous micro-batch is computed again. So a micro-batch grows beyond the budget
    while a cut would cost more than `waste` times its tokens, and beyond `largest` while it would cost more than half of
    them. All micro-batches together are then at most 1 / (1 - waste) times the whole tree, if `largest` is never reached. An episode
    is never cut, because its turns contain each other; nor are the samples of one long prompt before they outweigh it.
    No micro-batch is larger than all of `budget`, `largest` and twice its longest path.

    The result does not depend on the order of arrival of distinct turns.
    """
    order, paths, depths = _sorted_paths(turns)
    batches: list[list[int]] = []
    used = 0
    for index, path, depth in zip(order, paths, depths, strict=True):
        grown = used + len(path) - depth
        bearable = (waste if grown <= largest else 0.5) * used
        if not batches or (grown > budget and depth <= bearable):
            batches.append([])
            grown = len(path)
        batches[-1].append(index)
        used = grown
    return batches


def pack(turns: Sequence[TokenTurn]) -> PackedBatch:
    """Build the token tree of one micro-batch. Raises ValueError if there is no turn."""
    if not turns:
        raise ValueError("cannot pack an empty micro-batch")
    order, paths, depths = _sorted_paths(turns)
    sizes = [len(path) - depth for path, depth in zip(paths, depths, strict=True)]
    ends_N = np.empty(sum(sizes), np.int64)
    branch = np.empty(max(map(len, paths)), np.int64)  # the last path's tokens, from the root
    length = count = 0
    rows: list[Ints] = [branch] * len(turns)
    for index, path, depth in zip(order, paths, depths, strict=True):
        ends_N[branch[depth:length]] = count
        length = len(path)
        branch[depth:length] = np.arange(count, count + length - depth)
        count += length - depth
        rows[index] = branch[len(turns[index].prompt) - 1 : length].copy()
    ends_N[branch[:length]] = count
    return PackedBatch(
        ids_N=np.concatenate([path[depth:] for path, depth in zip(paths, depths, strict=True)]).astype(np.int64),
        positions_N=np.concatenate([np.arange(depth, len(path)) for path, depth in zip(paths, depths, strict=True)]),
        ends_N=ends_N,
        rows_M=np.concatenate(rows),
        targets_M=np.concatenate([np.array(turn.sampled, np.int64) for turn in turns]),
        turns_M=np.repeat(np.arange(len(turns), dtype=np.int64), [len(turn.sampled) for turn in turns]),
        unpacked=sum(map(len, paths)),
    )
