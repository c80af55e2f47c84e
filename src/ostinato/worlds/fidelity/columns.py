"""Observations as a matrix: each feature by rank, by distance from the median, by value, and by presence. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ostinato.worlds.fidelity.observation import Observation

Floats = NDArray[np.float64]
Scorer = Callable[[Floats], Floats]

MOST_VALUES = 40
"""How many of a text feature's values, the most frequent ones, get columns of their own."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """N observations as C columns of mean 0 and variance 1. `label_N` is 1 for production; `groups_N` are group numbers.

    Columns that are equal up to sign are merged under a joint name. `raw_NC` holds the values to show to people, NaN where one is missing.
    """

    names: tuple[str, ...]
    values_NC: Floats
    raw_NC: Floats
    label_N: NDArray[np.int64]
    groups_N: NDArray[np.int64]

    def examples(self, place: int) -> tuple[str, str]:
        """A column's summary on each side: how many observations have it, or the median and range of its numbers."""
        first, second = (_shown(self.raw_NC[self.label_N == side, place]) for side in (1, 0))
        return first, second


def columns_of(production: Sequence[Observation], simulation: Sequence[Observation]) -> Columns:
    """The columns of both sides together. They do not depend on which side an observation is on."""
    both = [*production, *simulation]
    label_N = np.array([1] * len(production) + [0] * len(simulation), dtype=np.int64)
    numbers = {group: number for number, group in enumerate(sorted({each.group for each in both}))}
    named: dict[bytes, list[str]] = {}
    kept: list[tuple[str, Floats, Floats]] = []
    for name in sorted({name for each in both for name in each.features}):
        for column, raw_N, value_N in _of_feature(name, both):
            if np.ptp(value_N) < 1e-12:
                continue
            value_N = (value_N - value_N.mean()) / value_N.std()
            sign = 1.0 if value_N[np.flatnonzero(np.abs(value_N) > 1e-12)[0]] > 0 else -1.0
            key = np.round(sign * value_N, 9).tobytes()
            if key not in named:
                kept.append((column, raw_N, value_N))
            named.setdefault(key, []).append(column)
    joined = {each[0]: each for each in named.values()}
    return Columns(
        names=tuple(_joined(joined[name]) for name, _, _ in kept),
        values_NC=np.column_stack([value_N for _, _, value_N in kept]) if kept else np.zeros((len(both), 0)),
        raw_NC=np.column_stack([raw_N for _, raw_N, _ in kept]) if kept else np.zeros((len(both), 0)),
        label_N=label_N,
        groups_N=np.array([numbers[each.group] for each in both], dtype=np.int64),
    )


def deal_folds(
    groups_N: NDArray[np.int64], label_N: NDArray[np.int64], folds: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """A fold for each observation: groups stay whole, and each side's groups are spread evenly over the folds."""
    groups, first_N = np.unique(groups_N, return_inverse=True)
    share_G = np.bincount(first_N, weights=label_N) / np.bincount(first_N)
    order = np.lexsort((rng.random(len(groups)), share_G))
    place_G = np.empty(len(groups), dtype=np.int64)
    place_G[order] = (np.arange(len(groups)) + rng.integers(folds)) % folds
    return place_G[first_N]


def _of_feature(name: str, both: Sequence[Observation]) -> list[tuple[str, Floats, Floats]]:
    """The columns of one feature, as (name, values to show, values to learn from)."""
    found = [each.features.get(name) for each in both]
    there_N = np.array([float(value is not None) for value in found])
    columns = [(f"{name} is there", there_N, there_N)]
    texts = Counter(value for value in found if isinstance(value, str))
    for text, _ in texts.most_common(MOST_VALUES):
        is_N = np.array([float(value == text) for value in found])
        columns.append((f"{name} = {text[:80]}", is_N, is_N))
    raw_N = np.array([value if isinstance(value, float) else np.nan for value in found])
    known_N = np.isfinite(raw_N)
    if known_N.any() and np.ptp(raw_N[known_N]) > 0:
        rank_N = np.full(len(both), 0.5)
        rank_N[known_N] = _ranks(raw_N[known_N])
        columns.append((name, raw_N, rank_N))
        if len(set(raw_N[known_N].tolist())) > 2:
            far_N = np.where(known_N, np.abs(rank_N - 0.5), 0.25)
            away_N = np.abs(raw_N - np.median(raw_N[known_N]))
            columns.append((f"{name}, how far from the middle", away_N, far_N))
    return columns


def _ranks(values_N: Floats) -> Floats:
    """Mid-ranks in (0, 1)."""
    _, place_N, counts = np.unique(values_N, return_inverse=True, return_counts=True)
    upto = np.cumsum(counts)
    return (upto - 0.5 * counts)[place_N] / len(values_N)


def _joined(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} alike: {', '.join(names[1:4])})"


def _shown(raw_N: Floats) -> str:
    known_N = raw_N[np.isfinite(raw_N)]
    if set(known_N.tolist()) <= {0.0, 1.0}:
        return f"{int(known_N.sum())} of {len(raw_N)}"
    return f"{np.median(known_N):.4g} [{known_N.min():.4g}, {known_N.max():.4g}]"
