"""Statistics of the gate and the report: paired differences, clustered proportions, intervals, power. Pure functions.

Scores come in as `ItemScore` rows (evaluation) or as per-user tallies (people); estimates with bounds go out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from ostinato.core.records import Person
from ostinato.core.report import ItemScore

_NORMAL = NormalDist()

FEW_INFORMATIVE = 10
"""The least number of items that differ from the rest for estimating the variance of a t interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean with bounds. `df` are the degrees of freedom behind them, `n` the independent units (items or users).

    Example: ``Estimate(mean=0.04, lower=-0.01, upper=0.09, error=0.025, df=99.0, n=100)``
    """

    mean: float
    lower: float
    upper: float
    error: float
    df: float
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """What bounds of a mean difference need to know about the items, at any level: their number, mean and standard error.

    The bounds lie around `centre`, which is not the mean if pseudo-items were added. `constant`: all items are equal.

    Example: ``Spread(mean=0.04, centre=0.04, error=0.025, n=100, df=99, constant=False)``
    """

    mean: float
    centre: float
    error: float
    n: int
    df: int
    constant: bool


Tally = Mapping[Person, tuple[float, int]]
"""Tenant and user -> (sum of outcomes, number of outcomes)."""
WeightedTally = Mapping[Person, tuple[float, float]]
"""The same, with weighted outcomes."""


def paired_items(
    candidate: Iterable[ItemScore], live: Iterable[ItemScore]
) -> tuple[list[str], NDArray[np.float64], int]:
    """Return item ids, each item's candidate-minus-live difference (its draws averaged; shape [items]), and the draws per item.

    Averaging within the item is the item-clustered analysis of Miller 2024 (arXiv 2411.00640, section 3): draws of one item are not
    independent evidence.

    Raises:
        ValueError: the two sides do not hold the same (item, draw) pairs, or an item has more draws than another.
    """
    left, right = _by_pair(candidate, "candidate"), _by_pair(live, "live")
    if left.keys() != right.keys():
        odd = sorted(left.keys() ^ right.keys())
        raise ValueError(
            f"unpaired scores: {len(odd)} (item, draw) pairs are on one side only, first {odd[0]}; rerun them"
        )
    differences: dict[str, list[float]] = {}
    for pair in sorted(left):
        differences.setdefault(pair[0], []).append(left[pair] - right[pair])
    counts = {len(values) for values in differences.values()}
    if len(counts) > 1:
        raise ValueError(f"items have {min(counts)} to {max(counts)} draws; every item needs the same number")
    means = np.array([math.fsum(values) / len(values) for values in differences.values()], dtype=np.float64)
    return list(differences), means, counts.pop() if counts else 0


def _by_pair(scores: Iterable[ItemScore], side: str) -> dict[tuple[str, int], float]:
    pairs: dict[tuple[str, int], float] = {}
    for score in scores:
        pair = (score.item, score.draw)
        if pairs.setdefault(pair, score.score) != score.score:
            raise ValueError(f"{side}: (item, draw) {pair} has two different scores")
        if not 0.0 <= score.score <= 1.0:
            raise ValueError(f"{side}: the score of {pair} is {score.score}; a grader answers in [0, 1]")
    return pairs


def mean_difference(differences_I: NDArray[np.float64], *, lower_alpha: float, upper_alpha: float) -> Estimate:
    """Return the mean of per-item differences in [-1, 1] with a one-sided bound on each side, each with its own error probability.

    This is `bounds` of their `spread_of`.

    Raises:
        ValueError: no items.
    """
    return bounds(spread_of(differences_I), lower_alpha=lower_alpha, upper_alpha=upper_alpha)


def spread_of(differences_I: NDArray[np.float64]) -> Spread:
    """Summarise per-item differences in [-1, 1]; `bounds` computes the bounds of their mean from the summary.

    Three cases, from much to little evidence: Student's t on the item means (Miller 2024, arXiv 2411.00640); with fewer than
    `FEW_INFORMATIVE` items that differ from the rest, the same after adding one pseudo-item at +1 and one at -1 (Bonett and Price 2012, doi
    10.3102/1076998611411915, is this rule for binary pairs); with all items equal, the exact binomial bound on the share of items that
    would have differed (Clopper and Pearson 1934), so that the interval never has zero width.

    Raises:
        ValueError: no items.
    """
    n = int(differences_I.size)
    if n == 0:
        raise ValueError("no items to compare; the suite is empty")
    mean = float(differences_I.mean())
    _, counts = np.unique(differences_I, return_counts=True)
    informative = n - int(counts.max())
    if informative == 0:
        return Spread(mean=mean, centre=mean, error=0.0, n=n, df=0, constant=True)
    sample = differences_I if informative >= FEW_INFORMATIVE else np.append(differences_I, [1.0, -1.0])
    error = float(sample.std(ddof=1)) / math.sqrt(sample.size)
    return Spread(mean=mean, centre=float(sample.mean()), error=error, n=n, df=sample.size - 1, constant=False)


def bounds(found: Spread, *, lower_alpha: float, upper_alpha: float) -> Estimate:
    """Return a mean difference with a one-sided bound on each side, each with its own error probability (see `spread_of`)."""
    mean, n = found.mean, found.n
    if found.constant:
        unseen_low, unseen_high = 1.0 - lower_alpha ** (1.0 / n), 1.0 - upper_alpha ** (1.0 / n)
        lower, upper = mean - unseen_low * (1.0 + mean), mean + unseen_high * (1.0 - mean)
        return Estimate(mean=mean, lower=lower, upper=upper, error=unseen_low, df=math.inf, n=n)
    lower = max(-1.0, found.centre - t_quantile(found.df, 1.0 - lower_alpha) * found.error)
    upper = min(1.0, found.centre + t_quantile(found.df, 1.0 - upper_alpha) * found.error)
    return Estimate(
        mean=mean, lower=min(lower, mean), upper=max(upper, mean), error=found.error, df=float(found.df), n=n
    )


def skew_bounds(differences_I: NDArray[np.float64], *, alpha: float) -> Estimate:
    """As `mean_difference`, with the same error probability on both sides and corrected for skewness: for differences of which few are
    large.

    Student's t is corrected by the transformation of Hall (1992, doi 10.1111/j.2517-6161.1992.tb01872.x). Without it, the bound beyond the
    short tail errs up to ten times as often.

    Raises:
        ValueError: no items.
    """
    spread = spread_of(differences_I)
    plain = bounds(spread, lower_alpha=alpha, upper_alpha=alpha)
    if spread.constant or spread.df != spread.n - 1:  # too few differ for estimating their skewness
        return plain
    standard_I = (differences_I - spread.mean) / differences_I.std()
    k = float((standard_I**3).mean()) / math.sqrt(spread.n)

    def errors(quantile: float) -> float:
        return quantile if abs(k) < 1e-9 else 3.0 / k * (float(np.cbrt(1.0 + k * (quantile - k / 6.0))) - 1.0)

    most = t_quantile(spread.df, 1.0 - alpha)
    lower, upper = spread.mean - errors(most) * spread.error, spread.mean - errors(-most) * spread.error
    return replace(plain, lower=max(-1.0, lower), upper=min(1.0, upper))


def scores_by_item(scores: Iterable[ItemScore]) -> dict[str, list[float]]:
    """Return each item's scores."""
    items: dict[str, list[float]] = {}
    for score in scores:
        items.setdefault(score.item, []).append(score.score)
    return items


def suite_mean(scores: Iterable[ItemScore]) -> Estimate:
    """Return one policy's mean score over a suite, draws averaged within each item, with a two-sided 95% t interval clipped to [0, 1].

    If every item has the same mean, the interval is the exact binomial bound on an unseen different item.

    Raises:
        ValueError: no scores.
    """
    items = scores_by_item(scores)
    if not items:
        raise ValueError("no scores to average; run the suite first")
    means_I = np.array([math.fsum(values) / len(values) for values in items.values()])
    n, mean = means_I.size, float(means_I.mean())
    if n == 1 or float(np.ptp(means_I)) == 0.0:
        unseen = 1.0 - 0.025 ** (1.0 / n)
        lower, upper = mean * (1.0 - unseen), mean + unseen * (1.0 - mean)
        return Estimate(mean=mean, lower=lower, upper=upper, error=unseen, df=math.inf, n=n)
    error = float(means_I.std(ddof=1)) / math.sqrt(n)
    half = t_quantile(n - 1, 0.975) * error
    lower, upper = max(0.0, mean - half), min(1.0, mean + half)
    return Estimate(mean=mean, lower=lower, upper=upper, error=error, df=float(n - 1), n=n)


def draw_spread(scores: Iterable[ItemScore]) -> float | None:
    """Return the standard deviation of one draw of an item, pooled over items (one-way analysis of variance); None without two draws.

    Example: binary items that are solved at a rate of 0.25 on average, with rates that spread by 0.25, give 0.35.
    """
    again = [np.array(values) for values in scores_by_item(scores).values() if len(values) > 1]
    if not again:
        return None
    squares = sum(float(((values - values.mean()) ** 2).sum()) for values in again)
    return math.sqrt(squares / sum(len(values) - 1 for values in again))


def mean_lower(items: Sequence[Sequence[float]], alpha: float) -> float:
    """Return the one-sided 1 - alpha lower bound of a mean over items. An item is its draws' values in [0, 1], which are not independent.

    With fewer than `FEW_INFORMATIVE` items that differ from the rest, or with items that are each all ones or all zeros, a t interval has
    too little evidence. Then the exact binomial bound is used (Clopper and Pearson 1934), with an item counted as good only if all of its
    draws are 1. Otherwise it is Student's t on the item means.

    Example: 100 perfect items at alpha 0.01 give 0.955.

    Raises:
        ValueError: no items.
    """
    if not items:
        raise ValueError("no items to bound; the suite is empty")
    means_I = np.array([math.fsum(values) / len(values) for values in items])
    n = means_I.size
    _, counts = np.unique(means_I, return_counts=True)
    if n - int(counts.max()) < FEW_INFORMATIVE or bool(np.isin(means_I, (0.0, 1.0)).all()):
        good = int((means_I == 1.0).sum())
        return _binomial_lower(good, n, alpha)
    error = float(means_I.std(ddof=1)) / math.sqrt(n)
    return max(0.0, float(means_I.mean()) - t_quantile(n - 1, 1.0 - alpha) * error)


def _binomial_lower(good: int, n: int, alpha: float) -> float:
    """Return the smallest success probability at which `good` or more successes of n have probability alpha (Clopper and Pearson 1934)."""
    from scipy import special

    return float(special.betaincinv(good, n - good + 1, alpha)) if good else 0.0


def holm(names: Sequence[str], rejects: Callable[[str, float], bool], alpha: float) -> frozenset[str]:
    """Return the hypotheses that Holm's step-down Bonferroni procedure (1979) rejects: with probability at most `alpha` any true one.

    `rejects(name, level)` tests one hypothesis at a level; a higher level must reject all that a lower one does.

    Example: ``holm(["a", "b"], lambda name, level: p[name] <= level, 0.05)``
    """
    standing, fallen = set(names), set[str]()
    while standing:
        found = {name for name in standing if rejects(name, alpha / len(standing))}
        if not found:
            break
        standing, fallen = standing - found, fallen | found
    return frozenset(fallen)


def mcnemar(gained: int, lost: int) -> float:
    """Return the exact two-sided p-value of gains and losses being equally likely (McNemar 1947; binomial on the discordant pairs).

    `gained`: the items passed only by the candidate; `lost`: only by live. The p-value is 1 if there are none.
    """
    if gained < 0 or lost < 0:
        raise ValueError(f"counts must not be negative: gained={gained}, lost={lost}")
    if gained + lost == 0:
        return 1.0
    from scipy import special

    return min(1.0, 2.0 * float(special.bdtr(min(gained, lost), gained + lost, 0.5)))


def wilson(successes: float, n: int) -> tuple[float, float]:
    """Return Wilson's 95% score interval of a proportion (Wilson 1927); (0, 1) if nothing was observed."""
    if n < 0 or not 0 <= successes <= n:
        raise ValueError(f"successes must lie in 0..n: successes={successes}, n={n}")
    if n == 0:
        return 0.0, 1.0
    return _score_interval(successes / n, n, _NORMAL.inv_cdf(0.975))


def clustered_share(tally: Tally) -> tuple[float, float]:
    """Return the 95% interval of a pooled proportion with users as clusters: Wilson's, with the effective number of independent turns.

    That number is mean (1 - mean) over the user-clustered variance, at most that of the turns. If no user differs from the mean, it is
    Kish's number of users, (sum n_u)^2 / sum n_u^2. Student's t replaces the normal, as in Korn and Graubard (1998), with (sum n_u^2)^2 /
    sum n_u^4 degrees of freedom (Satterthwaite 1946), which are few if a few users have most of the turns. (0, 1) below two users, since
    the variance between users is then unknown.
    """
    counts_U = np.array([count for _, count in tally.values() if count > 0], dtype=np.float64)
    if counts_U.size < 2:
        return 0.0, 1.0
    mean, residual_U = residuals(tally, list(tally))
    total, squares = float(counts_U.sum()), float(counts_U @ counts_U)
    variance = counts_U.size / (counts_U.size - 1) * float(residual_U @ residual_U)
    alike = float(np.abs(residual_U).max()) < 1e-12
    turns = total**2 / squares if alike else min(total, mean * (1.0 - mean) / variance)
    freedom = max(1.0, squares**2 / float((counts_U**4).sum()))
    return _score_interval(mean, turns, t_quantile(freedom, 0.975))


def _score_interval(share: float, n: float, z: float) -> tuple[float, float]:
    z2 = z * z / n
    centre = (share + z2 / 2) / (1 + z2)
    half = z / (1 + z2) * math.sqrt(share * (1 - share) / n + z2 / (4 * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def clustered_difference(
    treated: WeightedTally,
    control: WeightedTally,
    confidence: float = 0.95,
    *,
    raw: tuple[WeightedTally, WeightedTally] | None = None,
) -> Estimate:
    """Return the difference of two pooled proportions, treated minus control, with a user-clustered variance and t interval.

    Every user contributes one residual to the linearised ratio estimator (the delta method; Liang and Zeger 1986; Deng, Knoblich and Lu
    2018, arXiv 1803.06336). A user who is on both sides contributes the difference of both residuals, so before/after comparisons of the
    same people gain from the pairing. The degrees of freedom are those of the smaller side.

    On a side where no user differs from the mean (all accept, none accept), the variance is that of Agresti and Caffo over its users, or
    the clustered one if that is larger. If expected outcomes were subtracted, pass both sides' original outcomes as `raw`: that a side has
    no variation shows only there, as its residuals still vary with the expected outcomes.

    Raises:
        ValueError: a side without two users.
    """
    for name, side in (("treated", treated), ("control", control)):
        if sum(1 for _, count in side.values() if count > 0) < 2:
            raise ValueError(f"{name}: a clustered interval needs at least 2 users with an outcome")
    users = sorted(set(treated) | set(control))
    mean_t, residual_t_U = residuals(treated, users)
    mean_c, residual_c_U = residuals(control, users)
    smaller = min(sum(1 for _, count in side.values() if count > 0) for side in (treated, control))
    variance = _cluster_variance(residual_t_U, residual_c_U)
    for residual_U, side in zip((residual_t_U, residual_c_U), raw or (treated, control), strict=True):
        share, raw_U = residuals(side, users)
        if float(np.abs(raw_U).max()) < 1e-12:
            own = _cluster_variance(residual_U, np.zeros_like(residual_U))
            variance += max(0.0, agresti_caffo(share, len(side)) - own)
    error = math.sqrt(variance)
    half = t_quantile(smaller - 1, 0.5 + confidence / 2) * error
    mean = mean_t - mean_c
    return Estimate(mean=mean, lower=mean - half, upper=mean + half, error=error, df=float(smaller - 1), n=len(users))


def residuals(tally: WeightedTally, users: Sequence[Person]) -> tuple[float, NDArray[np.float64]]:
    """Return the pooled mean, and each of U users' residual of the linearised ratio estimator: what they add to its error."""
    total = sum(count for _, count in tally.values())
    mean = math.fsum(value for value, _ in tally.values()) / total
    pairs = (tally.get(user, (0.0, 0)) for user in users)
    return mean, np.array([(value - mean * count) / total for value, count in pairs])


def _cluster_variance(treated_U: NDArray[np.float64], control_U: NDArray[np.float64]) -> float:
    """Return the cluster variance with the small-sample factor k/(k-1) per side, which is not negligible with 10 control users."""
    factors = [k / (k - 1) for k in (max(2, int(np.count_nonzero(side))) for side in (treated_U, control_U))]
    residuals_U = math.sqrt(factors[0]) * treated_U - math.sqrt(factors[1]) * control_U
    return float(residuals_U @ residuals_U)


def agresti_caffo(mean: float, n: int) -> float:
    """Return the variance of a share of n users with one more success and one more failure (Agresti and Caffo 2000); it is never 0."""
    share = (mean * n + 1.0) / (n + 2.0)
    return share * (1.0 - share) / (n + 2.0)


def power(items: int, variance: float, margin: float, *, alpha: float = 0.05) -> float:
    """Return the probability that an equally good candidate passes the non-inferiority test at one look.

    `variance` is that of one item's difference; for one binary draw it is the discordance. Normal approximation: Phi(margin / sqrt(variance
    / items) - z_alpha) (Chow, Shao and Wang 2008, section 4.2).

    Example: ``power(1000, 0.15, 0.02)`` is 0.50: one thousand items cannot certify 2 points at 15% discordance.
    """
    if items <= 0:
        return 0.0
    if variance <= 0.0:
        return 1.0 if margin > 0 else 0.0
    return _NORMAL.cdf(margin / math.sqrt(variance / items) - _NORMAL.inv_cdf(1.0 - alpha))


def items_needed(found: Spread, margin: float, *, alpha: float) -> int:
    """Return the number of items at which equals pass with probability 0.8, in a test whose one-sided upper bound must not exceed `margin`.

    It is the inverse of `power` (normal approximation) at this spread. If all items were equal, it is the number at which the exact
    binomial bound for no differing item holds.

    Example: items that vary by 0.2 need 2,474 for a margin of 0.01 at alpha 0.05.
    """
    if found.constant:
        return math.ceil(math.log(alpha) / math.log1p(-margin))
    wanted = _NORMAL.inv_cdf(1.0 - alpha) + _NORMAL.inv_cdf(0.8)
    return math.ceil(found.error**2 * (found.df + 1) * (wanted / margin) ** 2)


@lru_cache(maxsize=1024)
def t_quantile(df: float, p: float) -> float:
    """Return the p-quantile of Student's t with `df` degrees of freedom."""
    from scipy import special  # a slow import (a quarter of a second), for which `ostinato status` need not wait

    return float(special.stdtrit(df, p))
