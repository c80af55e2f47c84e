"""Packing: the turns of a micro-batch as one token tree, so that a prefix that turns share is computed once.

Data flow: samples -> `plan` (micro-batches under a token budget) -> `pack` (ids, positions, subtree ends) -> `blocks` (which
keys each run of queries reads) -> `tree_attention`. Pure numpy: no torch, no IO.

The tree is a trie over each turn's path, which is its prompt and all sampled tokens but the last (nothing is predicted from that
one). Tokens lie in depth-first order, so a single array describes all of the attention: token j is an ancestor of token i, or i
itself, exactly if ``j <= i < ends_N[j]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTurn:
    """What packing needs of a turn: the exact prompt and the sampled tokens, both non-empty.

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
class Packed:
    """A micro-batch as one tree of N tokens that predicts M sampled tokens.

    `ids_N`, `positions_N`: token id and position (distance from its root). `ends_N`: one past the last descendant. `rows_M`: the
    token whose hidden state predicts the sampled token `targets_M`; `turns_M`: the index of the turn in `pack`'s argument. A
    turn's M entries are contiguous and in sampling order, turns in the order of `pack`'s argument. `unpacked`: tokens that
    the turns would need one by one.

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
        """N: the tokens that are computed."""
        return len(self.ids_N)

    @property
    def saved(self) -> int:
        """Tokens that sharing did away with."""
        return self.unpacked - self.tokens


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix."""
    for depth, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return depth
    return min(len(one), len(other))


def microbatches(turns: Sequence[TokenTurn], budget: int) -> list[list[int]]:
    """Cut turns into micro-batches of at most `budget` packed tokens; returns the turns' indices.

    Turns are taken in lexicographic order of their paths, which puts shared prefixes side by side and makes the result the same
    for every order of arrival of distinct turns. A turn longer than the budget stands alone.
    """
    order = sorted(range(len(turns)), key=lambda index: turns[index].path)
    batches: list[list[int]] = []
    previous: tuple[int, ...] = ()
    used = 0
    for index in order:
        path = turns[index].path
        new = len(path) - shared(previous, path)
        if not batches or used + new > budget:
            batches.append([])
            used, new = 0, len(path)
        batches[-1].append(index)
        used, previous = used + new, path
    return batches


def pack(turns: Sequence[TokenTurn]) -> Packed:
    """Build the token tree of one micro-batch. Raises ValueError if there is no turn."""
    if not turns:
        raise ValueError("cannot pack an empty micro-batch")
    ids: list[int] = []
    positions: list[int] = []
    ends: list[int] = []
    branch: list[int] = []  # the tokens of the last path, from the root
    rows: list[list[int]] = [[] for _ in turns]
    previous: tuple[int, ...] = ()
    for index in sorted(range(len(turns)), key=lambda index: turns[index].path):
        path = turns[index].path
        depth = shared(previous, path)
        for token in branch[depth:]:
            ends[token] = len(ids)
        del branch[depth:]
        branch.extend(range(len(ids), len(ids) + len(path) - depth))
        ids.extend(path[depth:])
        positions.extend(range(depth, len(path)))
        ends.extend([0] * (len(path) - depth))
        rows[index] = branch[len(turns[index].prompt) - 1 :]
        previous = path
    for token in branch:
        ends[token] = len(ids)
    return Packed(
        ids_N=np.array(ids, np.int64),
        positions_N=np.array(positions, np.int64),
        ends_N=np.array(ends, np.int64),
        rows_M=np.concatenate([np.array(row, np.int64) for row in rows]),
        targets_M=np.concatenate([np.array(turn.sampled, np.int64) for turn in turns]),
        turns_M=np.repeat(np.arange(len(turns), dtype=np.int64), [len(turn.sampled) for turn in turns]),
        unpacked=sum(len(turn.path) for turn in turns),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Tokens [first, first + count) of the tree, each the next one's parent, at positions `position`, `position` + 1, ...

    `path` holds the tree's tokens at positions 0 to `position` + count - 1: the run's ancestors and itself.
    """

    first: int
    position: int
    path: Ints

    @property
    def count(self) -> int:
        """Tokens of the run."""
        return len(self.path) - self.position


def runs(packed: Packed) -> list[Run]:
    """Cut the tree into its unbranched stretches, in order: a new one begins wherever a token is not its predecessor's child."""
    starts = np.flatnonzero(np.diff(packed.positions_N, prepend=packed.positions_N[0]) != 1)
    found: list[Run] = []
    for a, b in zip(starts.tolist(), [*starts[1:].tolist(), packed.tokens], strict=True):
        path = np.concatenate([np.flatnonzero(packed.ends_N[:a] > a), np.arange(a, b)])
        found.append(Run(first=a, position=int(packed.positions_N[a]), path=path))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """B blocks of `Q` queries each that read about as many keys: padded to K keys.

    `queries_BQ` and `keys_BK` index the N tokens; `allowed_BQK` says which key a query reads. A padded key repeats the block's
    first token and is never allowed; a padded query repeats it too, and `real_BQ` is False there.
    """

    queries_BQ: Ints
    keys_BK: Ints
    allowed_BQK: NDArray[np.bool_]
    real_BQ: NDArray[np.bool_]


def blocks(ends_N: Ints, *, queries: int = 64, waste: float = 0.25, cells: int = 1 << 21) -> list[Bucket]:
    """Cut the tree into runs of `queries` tokens; each reads its first token's ancestors and itself.

    In depth-first order an ancestor of any token of the run [a, b) that lies before a is an ancestor of a, so these keys
    are all that the run can need. Runs are grouped by key count so that padding adds at most `waste`, and a group has at most
    `cells` query-key pairs (one run excepted), which bounds memory.
    """
    N = len(ends_N)
    runs = [(start, min(start + queries, N)) for start in range(0, N, queries)]
    keys = [np.concatenate([np.flatnonzero(ends_N[:a] > a), np.arange(a, b)]) for a, b in runs]
    buckets: list[list[int]] = []
    for run in sorted(range(len(runs)), key=lambda run: (-len(keys[run]), run)):
        widest = len(keys[buckets[-1][0]]) if buckets else 0
        fits = (
            len(keys[run]) * (1 + waste) >= widest and (len(buckets[-1]) + 1) * queries * widest <= cells
            if buckets
            else False
        )
        if fits:
            buckets[-1].append(run)
        else:
            buckets.append([run])
    return [
        _bucket(ends_N, [runs[run] for run in bucket], [keys[run] for run in bucket], queries) for bucket in buckets
    ]


def _bucket(ends_N: Ints, runs: list[tuple[int, int]], keys: list[Ints], queries: int) -> Bucket:
    width = max(len(key) for key in keys)
    starts_B = np.array([start for start, _ in runs], np.int64)
    lengths_B = np.array([stop - start for start, stop in runs], np.int64)
    queries_BQ = starts_B[:, None] + np.arange(queries)[None]
    real_BQ = np.arange(queries)[None] < lengths_B[:, None]
    queries_BQ = np.where(real_BQ, queries_BQ, starts_B[:, None])
    keys_BK = np.stack([np.concatenate([key, np.full(width - len(key), key[-1])]) for key in keys])
    present_BK = np.arange(width)[None] < np.array([len(key) for key in keys])[:, None]
    allowed_BQK = (keys_BK[:, None] <= queries_BQ[:, :, None]) & (queries_BQ[:, :, None] < ends_N[keys_BK][:, None])
    return Bucket(
        queries_BQ=queries_BQ,
        keys_BK=keys_BK,
        allowed_BQK=allowed_BQK & present_BK[:, None],
        real_BQ=real_BQ,
    )
