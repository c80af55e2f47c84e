"""A paired classifier two-sample test: can production be told from simulation on the same prompts, and by which features? Pure functions.

The frequency of prompts is a property of the traffic. `match_prompts` balances it, so that each prompt occurs equally often in production
and in simulation; the remaining differences come from the environment.

A pair is one observation of each side under the same prompt. The classifier is a conditional logistic regression (Breslow and Day 1980,
chapter 7): a logistic regression without an intercept on the differences within pairs, which removes whatever depends on the prompt alone.
The AUC is the share of held-out pairs in which it picks the production side.

Pairs are not independent: a person has several, and so does a task. The classifier is tested only on pairs that share no group of either
side with its training pairs. Standard errors are clustered by both sides' groups (two-way; Cameron, Gelbach and Miller 2011, doi
10.1198/jbes.2010.07136), and at least the standard deviation of the AUC under random swaps of the sides of whole groups' pairs.
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
from ostinato.worlds.fidelity.probe import FEWEST, PENALTY, ProbeResult, Tell, holm_corrected, newton

# ---------------------------------------------------------------- matching


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedPairs:
    """Observations paired by index, with the same question in each pair. `prompts`: the number of distinct ones. `left_out`: the number of
    unpaired observations of each side.

    Example: ``MatchedPairs(production=(a,), simulation=(b,), prompts=1, left_out=(14, 3))`` where ``a.asked == b.asked``
    """

    production: tuple[Observation, ...]
    simulation: tuple[Observation, ...]
    prompts: int
    left_out: tuple[int, int]


def match_prompts(
    production: Sequence[Observation], simulation: Sequence[Observation], *, seed: int = 0
) -> MatchedPairs:
    """Draw equally many observations from each side for each shared prompt, from as many groups as possible, and pair them at random.

    The draw does not depend on features. Raises BadRequest if no prompt is shared.
    """
    rng = np.random.default_rng(seed)
    sides = [_by_prompt(side) for side in (production, simulation)]
    shared = sorted(set(sides[0]) & set(sides[1]))
    if not shared:
        raise BadRequest(_no_shared_prompt(sides[0], sides[1]))
    pairs: list[tuple[Observation, Observation]] = []
    for prompt in shared:
        first, second = (_interleave_groups(side[prompt], rng) for side in sides)
        count = min(len(first), len(second))
        order = rng.permutation(count)
        pairs += [(first[at], second[int(other)]) for at, other in enumerate(order)]
    return MatchedPairs(
        production=tuple(first for first, _ in pairs),
        simulation=tuple(second for _, second in pairs),
        prompts=len(shared),
        left_out=(len(production) - len(pairs), len(simulation) - len(pairs)),
    )


def _by_prompt(side: Sequence[Observation]) -> dict[str, list[Observation]]:
    by_prompt: defaultdict[str, list[Observation]] = defaultdict(list)
    for each in side:
        if each.asked:
            by_prompt[each.asked].append(each)
    return dict(by_prompt)


def _interleave_groups(observations: Sequence[Observation], rng: np.random.Generator) -> list[Observation]:
    """Return the observations in random order, with every group once before any group twice, since groups are the sampling units."""
    taken: defaultdict[str, int] = defaultdict(int)
    ranked: list[tuple[int, float, int]] = []
    for at in rng.permutation(len(observations)).tolist():
        group = observations[at].group
        ranked.append((taken[group], float(rng.random()), at))
        taken[group] += 1
    return [observations[at] for _, _, at in sorted(ranked)]


def _no_shared_prompt(first: dict[str, list[Observation]], second: dict[str, list[Observation]]) -> str:
    for name, side in (("production", first), ("simulation", second)):
        if not side:
            return (
                f"no observation of {name} has a prompt: only episodes do, not machines; write them again with "
                "`ostinato worlds episodes`, or leave --same-prompts out"
            )
    return (
        f"no prompt occurs on both sides: {len(first)} prompts of production, {len(second)} of simulation, none of them the same; "
        "take episodes of the same tasks, or leave --same-prompts out"
    )


# ---------------------------------------------------------------- the paired classifier


FOLDS = 3
"""Folds of each side's groups: nine cells in all, each tested by a classifier that was trained on pairs sharing no group with it."""
REPEATS = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pairs:
    """P pairs: their differences in C columns, and the group numbers on both sides."""

    found: Columns
    differ_PC: Floats
    first_P: NDArray[np.int64]
    second_P: NDArray[np.int64]


def tell_pairs_apart(matched: MatchedPairs, *, seed: int = 0, permutations: int = 99) -> ProbeResult:
    """Run the paired version of `tell_apart`. Deterministic for a given seed. Raises BadRequest with fewer than two groups on a side."""
    found = columns_of(matched.production, matched.simulation)
    half = len(matched.production)
    pairs = _Pairs(
        found=found,
        differ_PC=found.values_NC[:half] - found.values_NC[half:],
        first_P=_group_numbers(matched.production),
        second_P=_group_numbers(matched.simulation),
    )
    sizes = [int(groups_P.max(initial=-1)) + 1 for groups_P in (pairs.first_P, pairs.second_P)]
    if min(sizes) < 2:
        raise BadRequest(
            f"{sizes[0]} groups of production and {sizes[1]} of simulation share prompts; each side needs two, and {FEWEST} for a verdict"
        )
    rng = np.random.default_rng(seed)
    accuracy_P = _pair_accuracy(pairs, np.ones(half), rng)
    auc = float(accuracy_P.mean())
    error = math.sqrt(_clustered_variance(accuracy_P - auc, pairs)) / half
    least = min(half, *sizes)
    # shrunk towards 0.5, so that the interval has a width even if all pairs agree
    shrunk = (max(auc, 1.0 - auc) * least + 0.5) / (least + 1)
    error = max(error, math.sqrt(shrunk * (1.0 - shrunk) / half))
    p: float | None = None
    if permutations:
        p, spread = _permutation_test(auc, pairs, rng, permutations)
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


def _group_numbers(side: Sequence[Observation]) -> NDArray[np.int64]:
    _, number_P = np.unique(np.array([each.group for each in side], dtype=object).astype(str), return_inverse=True)
    return number_P.astype(np.int64)


def _pair_accuracy(pairs: _Pairs, sign_P: Floats, rng: np.random.Generator) -> Floats:
    """Return the share of repeats in which the classifier was right about each pair. Ties and untested pairs count as a half.

    `sign_P`: -1 for pairs whose sides are swapped.
    """
    count = len(sign_P)
    differ_PC = pairs.differ_PC * sign_P[:, None]
    correct_P, tested_P = np.zeros(count), np.zeros(count)
    ones_P = np.ones(count, dtype=np.int64)
    ridge_C = np.full(differ_PC.shape[1], PENALTY)
    for _ in range(REPEATS):
        fold_P = deal_folds(pairs.first_P, ones_P, FOLDS, rng)
        other_P = deal_folds(pairs.second_P, ones_P, FOLDS, rng)
        for first in range(FOLDS):
            for second in range(FOLDS):
                test_P = (fold_P == first) & (other_P == second)
                train_P = (fold_P != first) & (other_P != second)
                if not test_P.any() or not train_P.any() or not len(ridge_C):
                    continue
                beta_C = newton(differ_PC[train_P], ridge_C, np.ones(int(train_P.sum())), np.ones(int(train_P.sum())))
                correct_P[test_P] += 0.5 + 0.5 * np.sign(np.round(differ_PC[test_P] @ beta_C, 12))
                tested_P[test_P] += 1
    return np.where(tested_P > 0, correct_P / np.maximum(tested_P, 1), 0.5)


def _clustered_variance(of_P: Floats, pairs: _Pairs) -> float:
    """Return the two-way clustered variance of a sum over pairs that are dependent within both sides' groups."""
    both_P = pairs.first_P * (int(pairs.second_P.max()) + 1) + pairs.second_P
    _, both_P = np.unique(both_P, return_inverse=True)
    by_first, by_second, by_both = (
        float((np.bincount(groups_P, weights=of_P) ** 2).sum()) for groups_P in (pairs.first_P, pairs.second_P, both_P)
    )
    return max(by_first + by_second - by_both, by_first, by_second)


def _permutation_test(true: float, pairs: _Pairs, rng: np.random.Generator, permutations: int) -> tuple[float, float]:
    """Run a permutation test that swaps the sides of pairs. Return the p-value of the true AUC, and the AUC's deviation around 0.5.

    All pairs of a group are swapped together, once by production's groups and once by simulation's; the larger p-value and deviation count.
    """
    p_values: list[float] = []
    spreads: list[float] = []
    for groups_P in (pairs.first_P, pairs.second_P):
        permuted = [
            float(_pair_accuracy(pairs, rng.choice((-1.0, 1.0), int(groups_P.max()) + 1)[groups_P], rng).mean())
            for _ in range(permutations)
        ]
        p_values.append((1 + sum(each >= true - 1e-12 for each in permuted)) / (1 + permutations))
        spreads.append(math.sqrt(sum((each - 0.5) ** 2 for each in permuted) / permutations))
    return max(p_values), max(spreads)


def _tells(pairs: _Pairs) -> tuple[Tell, ...]:
    """Rank the columns by how often they are larger on one side of a pair, with p-values of a sign test with clustered errors."""
    from scipy.stats import norm

    known: list[tuple[float, float, int]] = []
    for place in range(pairs.differ_PC.shape[1]):
        sign_P = np.sign(np.round(pairs.differ_PC[:, place], 9))
        spread = math.sqrt(_clustered_variance(sign_P, pairs))
        p = float(2.0 * norm.sf(abs(sign_P.sum()) / spread)) if spread else 1.0
        known.append((0.5 + 0.5 * abs(float(sign_P.mean())), p, place))
    return holm_corrected(pairs.found, known)
