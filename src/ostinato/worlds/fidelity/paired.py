"""A paired classifier two-sample test: can production be told from simulation when both get the same prompts, and by what? Pure.

How often each prompt comes is a difference of the traffic. `match_prompts` removes it, so that each prompt is as often in production as in
simulation; what is left is what the environment gives away.

A pair is one observation of each side under one prompt. The classifier is a conditional logistic regression (Breslow and Day 1980,
chapter 7): a logistic regression without an intercept on the differences within pairs, in which whatever depends on the prompt alone is
zero. The AUC is how often it picks the production side of a pair it was not trained on.

Pairs are not independent: a person has several, and so does a task. The classifier is tested only on pairs that share no group of
either side with its training pairs. Errors are clustered by both sides' groups at once (Cameron, Gelbach and Miller 2011, doi
10.1198/jbes.2010.07136), and never below the spread of the AUC when the sides of whole groups' pairs are swapped at random.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ostinato.core.errors import BadRequest
from ostinato.worlds.fidelity.observation import Columns, Floats, Observation, columns_of, deal_folds
from ostinato.worlds.fidelity.probe import FEWEST, PENALTY, ProbeResult, Tell, newton, with_holm

# ---------------------------------------------------------------- matching


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedPairs:
    """Paired observations: those at the same index on both sides were asked the same. `left_out` counts each side's unpaired ones.

    Example: ``MatchedPairs(production=(a,), simulation=(b,), prompts=1, left_out=(14, 3))`` where ``a.asked == b.asked``
    """

    production: tuple[Observation, ...]
    simulation: tuple[Observation, ...]
    prompts: int
    left_out: tuple[int, int]


def match_prompts(
    production: Sequence[Observation], simulation: Sequence[Observation], *, seed: int = 0
) -> MatchedPairs:
    """For each prompt that both sides have, draw equally many observations from each side, from as many groups as there are.

    The draw does not depend on features. Raises BadRequest if no prompt is shared.
    """
    rng = np.random.default_rng(seed)
    sides = [_by_prompt(side) for side in (production, simulation)]
    shared = sorted(set(sides[0]) & set(sides[1]))
    if not shared:
        raise BadRequest(_nothing_shared(sides[0], sides[1]))
    pairs: list[tuple[Observation, Observation]] = []
    for prompt in shared:
        first, second = (_spread(side[prompt], rng) for side in sides)
        many = min(len(first), len(second))
        order = rng.permutation(many)
        pairs += [(first[at], second[int(other)]) for at, other in enumerate(order)]
    return MatchedPairs(
        production=tuple(first for first, _ in pairs),
        simulation=tuple(second for _, second in pairs),
        prompts=len(shared),
        left_out=(len(production) - len(pairs), len(simulation) - len(pairs)),
    )


def _by_prompt(side: Sequence[Observation]) -> dict[str, list[Observation]]:
    found: defaultdict[str, list[Observation]] = defaultdict(list)
    for each in side:
        if each.asked:
            found[each.asked].append(each)
    return dict(found)


def _spread(observations: Sequence[Observation], rng: np.random.Generator) -> list[Observation]:
    """The observations in random order, every group once before any group twice, because groups are the sampling units."""
    taken: defaultdict[str, int] = defaultdict(int)
    ranked: list[tuple[int, float, int]] = []
    for at in rng.permutation(len(observations)).tolist():
        group = observations[at].group
        ranked.append((taken[group], float(rng.random()), at))
        taken[group] += 1
    return [observations[at] for _, _, at in sorted(ranked)]


def _nothing_shared(first: dict[str, list[Observation]], second: dict[str, list[Observation]]) -> str:
    for name, side in (("production", first), ("simulation", second)):
        if not side:
            return (
                f"no observation of {name} says what was asked: only episodes do, not machines; write them again with "
                "`ostinato worlds episodes`, or leave --same-prompts out"
            )
    return (
        f"nothing was asked on both sides: {len(first)} prompts of production, {len(second)} of simulation, none of them the same; "
        "take episodes of the same tasks, or leave --same-prompts out"
    )


# ---------------------------------------------------------------- the classifier of pairs


FOLDS = 3
"""Folds of each side's groups: nine parts in all, each tested by a classifier trained on pairs that share no group with it."""
REPEATS = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pairs:
    """P pairs: differences in C columns, and the numbers of both sides' groups."""

    found: Columns
    differ_PC: Floats
    first_P: NDArray[np.int64]
    second_P: NDArray[np.int64]


def tell_pairs_apart(matched: MatchedPairs, *, seed: int = 0, permutations: int = 99) -> ProbeResult:
    """Like `tell_apart`, for pairs. The same arguments give the same numbers. Raises BadRequest with fewer than two groups on a side."""
    found = columns_of(matched.production, matched.simulation)
    half = len(matched.production)
    pairs = _Pairs(
        found=found,
        differ_PC=found.values_NC[:half] - found.values_NC[half:],
        first_P=_numbered(matched.production),
        second_P=_numbered(matched.simulation),
    )
    sizes = [int(groups_P.max(initial=-1)) + 1 for groups_P in (pairs.first_P, pairs.second_P)]
    if min(sizes) < 2:
        raise BadRequest(
            f"{sizes[0]} groups of production and {sizes[1]} of simulation share prompts; each side needs two, and {FEWEST} to say anything"
        )
    rng = np.random.default_rng(seed)
    won_P = _won(pairs, np.ones(half), rng)
    auc = float(won_P.mean())
    error = math.sqrt(_clustered(won_P - auc, pairs)) / half
    least = min(half, *sizes)
    shrunk = (max(auc, 1.0 - auc) * least + 0.5) / (least + 1)  # an interval has a width even where all pairs agree
    error = max(error, math.sqrt(shrunk * (1.0 - shrunk) / half))
    p: float | None = None
    if permutations:
        p, spread = _by_swapping(auc, pairs, rng, permutations)
        error = max(error, spread)
    return ProbeResult(
        auc=auc,
        lower=max(0.0, auc - 1.96 * error),
        upper=min(1.0, auc + 1.96 * error),
        p=p,
        production=(half, sizes[0]),
        simulation=(half, sizes[1]),
        columns=found.values_NC.shape[1],
        tells=_tells(pairs),
        paired=True,
    )


def _numbered(side: Sequence[Observation]) -> NDArray[np.int64]:
    _, number_P = np.unique(np.array([each.group for each in side], dtype=object).astype(str), return_inverse=True)
    return number_P.astype(np.int64)


def _won(pairs: _Pairs, sign_P: Floats, rng: np.random.Generator) -> Floats:
    """How often the classifier was right about each pair. A tie, or a pair that was never tested, counts as a half.

    `sign_P` is -1 where the two sides of a pair are swapped.
    """
    count = len(sign_P)
    differ_PC = pairs.differ_PC * sign_P[:, None]
    right_P, asked_P = np.zeros(count), np.zeros(count)
    ones_P = np.ones(count, dtype=np.int64)
    ridge_C = np.full(differ_PC.shape[1], PENALTY)
    for _ in range(REPEATS):
        fold_P = deal_folds(pairs.first_P, ones_P, FOLDS, rng)
        other_P = deal_folds(pairs.second_P, ones_P, FOLDS, rng)
        for first in range(FOLDS):
            for second in range(FOLDS):
                held_P = (fold_P == first) & (other_P == second)
                taught_P = (fold_P != first) & (other_P != second)
                if not held_P.any() or not taught_P.any() or not len(ridge_C):
                    continue
                beta_C = newton(
                    differ_PC[taught_P], ridge_C, np.ones(int(taught_P.sum())), np.ones(int(taught_P.sum()))
                )
                right_P[held_P] += 0.5 + 0.5 * np.sign(np.round(differ_PC[held_P] @ beta_C, 12))
                asked_P[held_P] += 1
    return np.where(asked_P > 0, right_P / np.maximum(asked_P, 1), 0.5)


def _clustered(of_P: Floats, pairs: _Pairs) -> float:
    """The variance of a sum over pairs that depend on each other within both sides' groups."""
    both_P = pairs.first_P * (int(pairs.second_P.max()) + 1) + pairs.second_P
    _, both_P = np.unique(both_P, return_inverse=True)
    by_first, by_second, by_both = (
        float((np.bincount(groups_P, weights=of_P) ** 2).sum()) for groups_P in (pairs.first_P, pairs.second_P, both_P)
    )
    return max(by_first + by_second - by_both, by_first, by_second)


def _by_swapping(true: float, pairs: _Pairs, rng: np.random.Generator, permutations: int) -> tuple[float, float]:
    """A permutation test that swaps the sides of pairs at random: the true AUC's p-value, and the AUC's spread around 0.5.

    All pairs of a group are swapped together, once by production's groups and once by simulation's; the larger p-value and spread count.
    """
    odds: list[float] = []
    spreads: list[float] = []
    for groups_P in (pairs.first_P, pairs.second_P):
        found = [
            float(_won(pairs, rng.choice((-1.0, 1.0), int(groups_P.max()) + 1)[groups_P], rng).mean())
            for _ in range(permutations)
        ]
        odds.append((1 + sum(each >= true - 1e-12 for each in found)) / (1 + permutations))
        spreads.append(math.sqrt(sum((each - 0.5) ** 2 for each in found) / permutations))
    return max(odds), max(spreads)


def _tells(pairs: _Pairs) -> tuple[Tell, ...]:
    """Every column by how often it is larger on one side of a pair; `p` is that of a sign test with clustered errors."""
    from scipy.stats import norm

    known: list[tuple[float, float, int]] = []
    for place in range(pairs.differ_PC.shape[1]):
        sign_P = np.sign(np.round(pairs.differ_PC[:, place], 9))
        spread = math.sqrt(_clustered(sign_P, pairs))
        p = float(2.0 * norm.sf(abs(sign_P.sum()) / spread)) if spread else 1.0
        known.append((0.5 + 0.5 * abs(float(sign_P.mean())), p, place))
    return with_holm(pairs.found, known)
