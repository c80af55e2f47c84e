"""A cross-validated classifier two-sample test: can production be told from simulation, and by which features?

The classifier is an L2-penalised logistic regression on ranks. Each feature enters by its rank and by its distance from the median, so the
classifier detects differences in location and scale of single features and their sums, but not those that only an interaction shows. It is
always tested on groups that it was not trained on. Groups, not observations, are the sampling units of all intervals.
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
"""The largest AUC that still counts as faithful (0.5 is chance)."""
ALPHA = 0.05
FOLDS = 5
REPEATS = 4
STEPS = 12
PENALTY = 5.0
FEWEST = 10
"""Smallest number of groups on each side for a verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """One column with its AUC (at least 0.5) over groups. `p` is Holm-corrected for all columns.

    Example: ``Tell(name="env:IS_SANDBOX is there", auc=1.0, p=0.0002, production="0 of 40", simulation="40 of 40")``
    """

    name: str
    auc: float
    p: float
    production: str
    simulation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """How well the two sides can be told apart.

    `lower`, `upper`: 95% confidence interval of the AUC. `p`: p-value of a permutation test, None if it was not run. `production`,
    `simulation`: numbers of (observations, groups). `paired`: each pair of observations has the same prompt. `needed`: the number of groups
    on each side (of independent pairs, if `paired`) at which the upper bound of an AUC of 0.5 would be at most `BOUND`.

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
        """True if the sides differ, by one feature or by all together. Each of the two tests has a false-positive rate of 2.5%, so that the
        total is at most 5%.
        """
        by_one = any(tell.p <= ALPHA / 2 for tell in self.tells)
        # the 95% interval's lower bound is a one-sided test at 2.5%
        by_all = self.lower > 0.5 and (self.p is None or self.p <= ALPHA)
        return not self.too_few and (by_one or by_all)

    @property
    def faithful(self) -> bool:
        """True if an AUC above `BOUND` is ruled out and no difference was found."""
        return not self.too_few and not self.told_apart and self.upper <= BOUND

    @property
    def too_few(self) -> bool:
        """True if there are too few groups for a verdict."""
        return min(self.production[1], self.simulation[1]) < FEWEST

    @property
    def needed(self) -> int:
        """The sample size, from the standard error of an AUC of 0.5: sqrt((2n + 1) / 12) / n (Hanley and McNeil 1982); 0.5 / sqrt(n) if
        paired.
        """
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
    """Cross-validate the classifier by group, and rank the columns by their own AUC. Deterministic for a given seed.

    Raises BadRequest with fewer than two groups on a side.
    """
    columns = columns_of(production, simulation)
    sizes = [len(set(columns.groups_N[columns.label_N == side].tolist())) for side in (1, 0)]
    if min(sizes) < 2:
        raise BadRequest(
            f"{sizes[0]} groups of production and {sizes[1]} of simulation; each side needs two, and {FEWEST} for a verdict"
        )
    rng = np.random.default_rng(seed)
    agree_GH, pairs_GH = _concordance(columns, columns.label_N, rng, REPEATS)
    auc = float(agree_GH.sum() / pairs_GH.sum())
    lower, upper = _interval(auc, agree_GH, pairs_GH, rng, resamples)
    return ProbeResult(
        auc=auc,
        lower=lower,
        upper=upper,
        p=_permutation_p(columns, rng, permutations) if permutations else None,
        production=(len(production), sizes[0]),
        simulation=(len(simulation), sizes[1]),
        columns=columns.values_NC.shape[1],
        tells=_tells(columns),
    )


def _concordance(
    columns: Columns, label_N: NDArray[np.int64], rng: np.random.Generator, repeats: int
) -> tuple[Floats, Floats]:
    """Return [G, H] sums over pairs of a production and a simulation group: concordant pairs of observations, and all compared pairs.

    A pair is concordant if production's observation scores higher; ties count as a half. Only observations of the same fold are compared,
    since each fold has its own classifier. All groups have the same weight.
    """
    units, unit_N = np.unique(2 * columns.groups_N + label_N, return_inverse=True)
    side_U = units % 2
    first, second = np.flatnonzero(side_U == 1), np.flatnonzero(side_U == 0)
    agree_UU, pairs_UU = np.zeros((len(units), len(units))), np.zeros((len(units), len(units)))
    weight_N = 1.0 / np.bincount(unit_N)[unit_N]
    weighted_NU = np.zeros((len(unit_N), len(units)))
    weighted_NU[np.arange(len(unit_N)), unit_N] = weight_N
    for _ in range(repeats):
        fold_N = deal_folds(columns.groups_N, label_N, FOLDS, rng)
        for each in range(FOLDS):
            is_test = fold_N == each
            ones, zeros = np.flatnonzero(is_test & (label_N == 1)), np.flatnonzero(is_test & (label_N == 0))
            rest = label_N[~is_test]
            if not len(ones) or not len(zeros) or rest.min(initial=1) == rest.max(initial=0):
                continue
            beta_C = fit_logistic(columns.values_NC[~is_test], rest, weight_N[~is_test])
            score_N = beta_C[0] + columns.values_NC @ beta_C[1:]
            above = score_N[ones][:, None] - score_N[zeros][None, :]
            concordant = (above > 0) + 0.5 * (above == 0)
            first_NU, second_NU = weighted_NU[ones], weighted_NU[zeros]
            agree_UU += first_NU.T @ concordant @ second_NU
            pairs_UU += np.outer(first_NU.sum(axis=0), second_NU.sum(axis=0))
    return agree_UU[np.ix_(first, second)], pairs_UU[np.ix_(first, second)]


def fit_logistic(values_NC: Floats, label_N: NDArray[np.int64], weight_N: Floats) -> Floats:
    """Fit the penalised logistic regression. Return [1 + C] coefficients, the unpenalised intercept first. Weights are scaled to mean 1."""
    weight_N = weight_N / weight_N.mean()
    design_NC = np.column_stack([np.ones(len(values_NC)), values_NC])
    ridge_C = np.full(design_NC.shape[1], PENALTY)
    ridge_C[0] = 1e-6
    return newton(design_NC, ridge_C, label_N, weight_N)


def newton(design_NC: Floats, ridge_C: Floats, label_N: NDArray[Any], weight_N: Floats) -> Floats:
    """Fit a ridge-penalised logistic regression of labels in [0, 1] by Newton's method. Return the [C] coefficients."""
    beta_C = np.zeros(design_NC.shape[1])
    for _ in range(STEPS):
        probability_N = 1.0 / (1.0 + np.exp(-np.clip(design_NC @ beta_C, -30.0, 30.0)))
        gradient_C = design_NC.T @ (weight_N * (label_N - probability_N)) - ridge_C * beta_C
        curvature_N = np.maximum(weight_N * probability_N * (1.0 - probability_N), 1e-9)
        step_C = np.linalg.solve((design_NC * curvature_N[:, None]).T @ design_NC + np.diag(ridge_C), gradient_C)
        beta_C = beta_C + step_C
        if np.abs(step_C).max() < 1e-4:
            break
    return beta_C


def _interval(
    auc: float, agree_GH: Floats, pairs_GH: Floats, rng: np.random.Generator, resamples: int
) -> tuple[float, float]:
    """Return a 95% normal interval from the larger of two standard errors: a bootstrap over groups, and Hanley and McNeil 1982.

    The latter is taken at an AUC shrunk towards 0.5, so that the interval has a width even if all pairs agree.
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
    """Return the standard error of an AUC with `first` and `second` units (Hanley and McNeil 1982, doi 10.1148/radiology.143.1.7063747)."""
    of_first, of_second = auc / (2.0 - auc), 2.0 * auc**2 / (1.0 + auc)
    spread = auc * (1.0 - auc) + (first - 1) * (of_first - auc**2) + (second - 1) * (of_second - auc**2)
    return math.sqrt(spread / (first * second))


def _permutation_p(columns: Columns, rng: np.random.Generator, permutations: int) -> float:
    """Return the p-value of a permutation test over whole groups. All labellings, also the true one, use one repeat: the test is exact."""
    units, unit_N = np.unique(2 * columns.groups_N + columns.label_N, return_inverse=True)

    def auc_of(label_N: NDArray[np.int64]) -> float:
        agree_GH, pairs_GH = _concordance(columns, label_N, rng, 1)
        return float(agree_GH.sum() / max(pairs_GH.sum(), 1e-12))

    true = auc_of(columns.label_N)
    permuted = [auc_of((units % 2)[rng.permutation(len(units))][unit_N]) for _ in range(permutations)]
    return (1 + sum(each >= true - 1e-12 for each in permuted)) / (1 + permutations)


def _tells(columns: Columns) -> tuple[Tell, ...]:
    """Rank the columns by their own AUC over groups, with p-values of the Mann-Whitney test."""
    from scipy.stats import mannwhitneyu

    units, unit_N = np.unique(2 * columns.groups_N + columns.label_N, return_inverse=True)
    counts_U, side_U = np.bincount(unit_N), units % 2
    first, second = int((side_U == 1).sum()), int((side_U == 0).sum())
    known: list[tuple[float, float, int]] = []
    for place in range(columns.values_NC.shape[1]):
        mean_U = np.bincount(unit_N, weights=columns.values_NC[:, place]) / counts_U
        tested = mannwhitneyu(mean_U[side_U == 1], mean_U[side_U == 0], alternative="two-sided", method="asymptotic")
        auc = float(tested.statistic) / (first * second)
        known.append((max(auc, 1.0 - auc), float(tested.pvalue), place))
    return holm_corrected(columns, known)


def holm_corrected(columns: Columns, known: Sequence[tuple[float, float, int]]) -> tuple[Tell, ...]:
    """Return tells from (AUC, p, column number), the highest AUC first, with p-values corrected for multiplicity (Holm 1979)."""
    tells: list[Tell] = []
    worst = 0.0
    ordered = sorted(known, key=lambda each: (each[1], -each[0], columns.names[each[2]]))
    for rank, (auc, p, place) in enumerate(ordered):
        worst = max(worst, min(1.0, p * (len(known) - rank)))
        production, simulation = columns.examples(place)
        tells.append(Tell(name=columns.names[place], auc=auc, p=worst, production=production, simulation=simulation))
    return tuple(sorted(tells, key=lambda tell: (-tell.auc, tell.p, tell.name)))
