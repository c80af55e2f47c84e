"""A classifier two-sample test, cross-validated: can production be told from simulation, and by what?

The classifier is a logistic regression with an L2 penalty on ranks. Each feature enters by its rank and by its distance from the median,
so the classifier finds shifts and spreads of single features and their sums, and misses what only a combination gives away. It is always
tested on groups that it was not trained on. Groups, not observations, are the sampling units: all intervals rest on their number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ostinato.core.errors import BadRequest
from ostinato.worlds.fidelity.observation import Columns, Floats, Observation, columns_of, deal_folds

BOUND = 0.55
"""The largest AUC that is still called faithful (0.5 is a coin)."""
ALPHA = 0.05
FOLDS = 5
REPEATS = 4
STEPS = 12
PENALTY = 5.0
FEWEST = 10
"""With fewer groups than this on a side there is no verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """One column with its AUC (at least 0.5), groups as units; `p` is Holm-corrected for all columns.

    Example: ``Tell(name="env:IS_SANDBOX is there", auc=1.0, p=0.0002, production="0 of 40", simulation="40 of 40")``
    """

    name: str
    auc: float
    p: float
    production: str
    simulation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """How well the two sides can be told apart. `p` is the p-value of a permutation test; None if the test was not run.

    `paired`: the two sides were asked the same, pair by pair. `needed` is the number of groups on each side (of independent pairs, if
    `paired`) at which the upper bound of an AUC of 0.5 would be at most `BOUND`.

    Example: ``ProbeResult(auc=0.52, lower=0.46, upper=0.58, p=0.31, production=(400, 40), simulation=(400, 40), columns=97, tells=())``
    """

    auc: float
    lower: float
    upper: float
    p: float | None
    production: tuple[int, int]
    simulation: tuple[int, int]
    columns: int
    tells: tuple[Tell, ...]
    paired: bool = False

    @property
    def told_apart(self) -> bool:
        """True if a model could tell the sides apart, by one feature or by all together. If the sides are alike, each of the two tests is
        wrong in one case of forty, so together in one of twenty.
        """
        by_one = any(tell.p <= ALPHA / 2 for tell in self.tells)
        by_all = self.lower > 0.5 and (self.p is None or self.p <= ALPHA)  # the interval's lower end is one-sided
        return not self.too_few and (by_one or by_all)

    @property
    def faithful(self) -> bool:
        """True if an AUC above `BOUND` is ruled out and the sides are not told apart."""
        return not self.too_few and not self.told_apart and self.upper <= BOUND

    @property
    def too_few(self) -> bool:
        """True if there are too few groups to say anything."""
        return min(self.production[1], self.simulation[1]) < FEWEST

    @property
    def needed(self) -> int:
        """From the standard error of an AUC of 0.5: sqrt((2n + 1) / 12) / n (Hanley and McNeil 1982), and 0.5 / sqrt(n) for pairs."""
        if self.paired:
            return math.ceil((0.5 * 1.96 / (BOUND - 0.5)) ** 2)
        n = 1
        while 1.96 * math.sqrt((2 * n + 1) / 12.0) / n > BOUND - 0.5:
            n += 1
        return n


def tell_apart(
    production: Sequence[Observation],
    simulation: Sequence[Observation],
    *,
    seed: int = 0,
    resamples: int = 2000,
    permutations: int = 99,
) -> ProbeResult:
    """Cross-validate the classifier by group, and rank the columns by their own AUC. The same arguments give the same numbers.

    Raises BadRequest with fewer than two groups on a side.
    """
    found = columns_of(production, simulation)
    sizes = [len(set(found.groups_N[found.label_N == side].tolist())) for side in (1, 0)]
    if min(sizes) < 2:
        raise BadRequest(
            f"{sizes[0]} groups of production and {sizes[1]} of simulation; each side needs two, and {FEWEST} to say anything"
        )
    rng = np.random.default_rng(seed)
    agree_GH, pairs_GH = _concordance(found, found.label_N, rng, REPEATS)
    auc = float(agree_GH.sum() / pairs_GH.sum())
    lower, upper = _interval(auc, agree_GH, pairs_GH, rng, resamples)
    return ProbeResult(
        auc=auc,
        lower=lower,
        upper=upper,
        p=_by_chance(found, rng, permutations) if permutations else None,
        production=(len(production), sizes[0]),
        simulation=(len(simulation), sizes[1]),
        columns=found.values_NC.shape[1],
        tells=_tells(found),
    )


def _concordance(
    found: Columns, label_N: NDArray[np.int64], rng: np.random.Generator, repeats: int
) -> tuple[Floats, Floats]:
    """How often an observation of one group (rows: production) scores above one of another, and the weight of the pairs compared.

    Only observations of the same fold are compared, since each fold has its own classifier. All groups have the same weight.
    """
    units, unit_N = np.unique(2 * found.groups_N + label_N, return_inverse=True)
    side_U = units % 2
    first, second = np.flatnonzero(side_U == 1), np.flatnonzero(side_U == 0)
    agree_UU, pairs_UU = np.zeros((len(units), len(units))), np.zeros((len(units), len(units)))
    weight_N = 1.0 / np.bincount(unit_N)[unit_N]
    weighted_NU = np.zeros((len(unit_N), len(units)))
    weighted_NU[np.arange(len(unit_N)), unit_N] = weight_N
    for _ in range(repeats):
        fold_N = deal_folds(found.groups_N, label_N, FOLDS, rng)
        for each in range(FOLDS):
            held = fold_N == each
            ones, zeros = np.flatnonzero(held & (label_N == 1)), np.flatnonzero(held & (label_N == 0))
            rest = label_N[~held]
            if not len(ones) or not len(zeros) or rest.min(initial=1) == rest.max(initial=0):
                continue
            beta_C = fitted(found.values_NC[~held], rest, weight_N[~held])
            score_N = beta_C[0] + found.values_NC @ beta_C[1:]
            above = score_N[ones][:, None] - score_N[zeros][None, :]
            won = (above > 0) + 0.5 * (above == 0)
            first_NU, second_NU = weighted_NU[ones], weighted_NU[zeros]
            agree_UU += first_NU.T @ won @ second_NU
            pairs_UU += np.outer(first_NU.sum(axis=0), second_NU.sum(axis=0))
    return agree_UU[np.ix_(first, second)], pairs_UU[np.ix_(first, second)]


def fitted(values_NC: Floats, label_N: NDArray[np.int64], weight_N: Floats) -> Floats:
    """The coefficients of a logistic regression, first the intercept, which is not penalised; weights are scaled to a mean of 1."""
    weight_N = weight_N / weight_N.mean()
    design_NC = np.column_stack([np.ones(len(values_NC)), values_NC])
    ridge_C = np.full(design_NC.shape[1], PENALTY)
    ridge_C[0] = 1e-6
    return newton(design_NC, ridge_C, label_N, weight_N)


def newton(design_NC: Floats, ridge_C: Floats, label_N: NDArray[Any], weight_N: Floats) -> Floats:
    """The coefficients of a logistic regression of labels in [0, 1] by Newton's method, with a penalty for each column."""
    beta_C = np.zeros(design_NC.shape[1])
    for _ in range(STEPS):
        chance_N = 1.0 / (1.0 + np.exp(-np.clip(design_NC @ beta_C, -30.0, 30.0)))
        slope_C = design_NC.T @ (weight_N * (label_N - chance_N)) - ridge_C * beta_C
        bend_N = np.maximum(weight_N * chance_N * (1.0 - chance_N), 1e-9)
        step_C = np.linalg.solve((design_NC * bend_N[:, None]).T @ design_NC + np.diag(ridge_C), slope_C)
        beta_C = beta_C + step_C
        if np.abs(step_C).max() < 1e-4:
            break
    return beta_C


def _interval(
    auc: float, agree_GH: Floats, pairs_GH: Floats, rng: np.random.Generator, resamples: int
) -> tuple[float, float]:
    """A normal interval by the larger of two standard errors: a bootstrap over groups, and Hanley and McNeil 1982 at an AUC nearer to 0.5.

    The second gives the interval a width even where all pairs agree.
    """
    count_G, count_H = agree_GH.shape
    drawn_RG = rng.multinomial(count_G, np.full(count_G, 1.0 / count_G), size=resamples).astype(np.float64)
    drawn_RH = rng.multinomial(count_H, np.full(count_H, 1.0 / count_H), size=resamples).astype(np.float64)
    known_R = np.einsum("rg,gh,rh->r", drawn_RG, pairs_GH, drawn_RH, optimize=True)
    agreed_R = np.einsum("rg,gh,rh->r", drawn_RG, agree_GH, drawn_RH, optimize=True)
    spread = float(np.std(agreed_R[known_R > 0] / known_R[known_R > 0]))
    least = min(count_G, count_H)
    shrunk = (max(auc, 1.0 - auc) * least + 0.5) / (least + 1)
    error = max(spread, hanley_mcneil(shrunk, count_G, count_H))
    return max(0.0, auc - 1.96 * error), min(1.0, auc + 1.96 * error)


def hanley_mcneil(auc: float, first: int, second: int) -> float:
    """The standard error of an AUC of `first` against `second` units (Hanley and McNeil 1982, doi 10.1148/radiology.143.1.7063747)."""
    of_first, of_second = auc / (2.0 - auc), 2.0 * auc**2 / (1.0 + auc)
    spread = auc * (1.0 - auc) + (first - 1) * (of_first - auc**2) + (second - 1) * (of_second - auc**2)
    return math.sqrt(spread / (first * second))


def _by_chance(found: Columns, rng: np.random.Generator, permutations: int) -> float:
    """The p-value of a permutation test over whole groups. Every labelling, the true one too, uses one repeat, so the test is exact."""
    units, unit_N = np.unique(2 * found.groups_N + found.label_N, return_inverse=True)

    def told(label_N: NDArray[np.int64]) -> float:
        agree_GH, pairs_GH = _concordance(found, label_N, rng, 1)
        return float(agree_GH.sum() / max(pairs_GH.sum(), 1e-12))

    true = told(found.label_N)
    dealt = [told((units % 2)[rng.permutation(len(units))][unit_N]) for _ in range(permutations)]
    return (1 + sum(each >= true - 1e-12 for each in dealt)) / (1 + permutations)


def _tells(found: Columns) -> tuple[Tell, ...]:
    """Every column by its own AUC over groups, the most telling first."""
    from scipy.stats import mannwhitneyu

    units, unit_N = np.unique(2 * found.groups_N + found.label_N, return_inverse=True)
    counts_U, side_U = np.bincount(unit_N), units % 2
    first, second = int((side_U == 1).sum()), int((side_U == 0).sum())
    known: list[tuple[float, float, int]] = []
    for place in range(found.values_NC.shape[1]):
        mean_U = np.bincount(unit_N, weights=found.values_NC[:, place]) / counts_U
        tested = mannwhitneyu(mean_U[side_U == 1], mean_U[side_U == 0], alternative="two-sided", method="asymptotic")
        auc = float(tested.statistic) / (first * second)
        known.append((max(auc, 1.0 - auc), float(tested.pvalue), place))
    return with_holm(found, known)


def with_holm(found: Columns, known: Sequence[tuple[float, float, int]]) -> tuple[Tell, ...]:
    """Tells from (AUC, p, column number), the most telling first, with each p corrected for their number (Holm 1979)."""
    tells: list[Tell] = []
    worst = 0.0
    ordered = sorted(known, key=lambda each: (each[1], -each[0], found.names[each[2]]))
    for rank, (auc, p, place) in enumerate(ordered):
        worst = max(worst, min(1.0, p * (len(known) - rank)))
        production, simulation = found.examples(place)
        tells.append(Tell(name=found.names[place], auc=auc, p=worst, production=production, simulation=simulation))
    return tuple(sorted(tells, key=lambda tell: (-tell.auc, tell.p, tell.name)))
