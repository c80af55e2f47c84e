"""Off-policy estimates of what a changed router would have earned, and a test of the logged propensities. Pure functions.

    w_i = pi(a_i | x_i) / p_i(a_i)      importance weight: how much more often the new router would choose the arm that was chosen
    h_i = c (sum_a m_a / p_i(a))^(-1/2), m_a = mean over i of pi(a | x_i)^2      evaluation weight
    IPS    sum of h_i w_i r_i / sum of h_i                Horvitz and Thompson 1952; Dudík, Langford and Li 2011 (arXiv 1103.4601)
    SNIPS  sum of h_i w_i r_i / sum of h_i w_i            Swaminathan and Joachims 2015
    DR     sum of h_i (sum_a pi(a | x_i) q(x_i, a) + w_i (r_i - q(x_i, a_i))) / sum of h_i         Dudík, Langford and Li 2011

**Why evaluation weights.** A router that learns gives few turns to an arm that began badly: the arm's mean stays low, and its few later
turns get large weights w. With h = 1 the estimate is skewed, and 95% intervals cover 90 to 93%. sum_a m_a / p_i(a) measures the variance of
one turn's score at the odds of its draw. Dividing each score by its root makes every turn add about the same variance, as the martingale
central limit theorem requires: Hadad, Hirshberg, Zhan, Wager and Athey 2021 (PNAS 118, arXiv 1911.02768); with contexts, as `StableVar`,
Zhan, Hadad, Hirshberg and Athey 2021 (arXiv 2106.02029); Bibaut et al. 2021 (arXiv 2106.00418) divide by the deviation itself. h depends
only on the odds, which were set before the draw, and is 1 if they never changed. c makes its mean 1 within each group of turns that had the
same arms to choose from, so that no group counts for more than its turns.

**The interval** is mean ± t x error. The error is the jackknife over users (leave out one user at a time: Tukey 1958; MacKinnon, Nielsen
and Webb 2023 for clusters), because the turns of one user are correlated. t is Student's with nu = (sum_u W_u^2)^2 / sum_u W_u^4 degrees of
freedom, where W_u is the sum of h w over user u's turns. This is Satterthwaite 1946 for a sum of squares to which user u adds about W_u^2,
as used by Bell and McCaffrey 2002 and Imbens and Kolesár 2016; if few users have most of the weight, few degrees of freedom are left.

**Assumptions.** The distribution of rewards and users must not change while the odds do, and the estimate must be looked at once, after a
number of turns fixed in advance; only `PropensityTest` may be looked at as often as you like. `benchmarks/release/auto.py` measures the
coverage. It falls short for few users, for skewed rewards (IPS first), and if the new router prefers an arm to which a learning router had
given hardly any turns: `PolicyValue.turns` is small then. If rewards rise and fall with the hour, h weights the hours, and only h = 1 would
be unbiased. Every turn of an episode has the odds of the episode's draw.

**The test of the propensities** asks whether the logged ones are those of the actual draws. It may be looked at after every draw. If they
are, E[1{arm is drawn} / p] = 1 for every arm that could be drawn: the arm comes up with probability p. The test bets against that. For each
of a few alternatives q, in which the arm's odds are r times the logged odds, it multiplies its stake by q / p when the arm comes up and by
(1 - q) / (1 - p) when it does not. While the propensities are right, the expected stake stays constant. By Ville's inequality (1939), the
stake then ever reaches 1 / alpha with probability at most alpha, however often it is looked at and however the propensities change from
draw to draw (Waudby-Smith and Ramdas 2024, arXiv 2010.09686; a mixture as in Robbins 1970). The test is exact, not asymptotic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedTurns:
    """N turns assigned among A arms: all turns, because the rated ones alone are not a sample drawn with these odds.

    `users_N` number the users, `arms_N` the arms that were drawn. `odds_NA` are the probabilities of the draws, 0 for an arm that was not
    available.

    Example: ``LoggedTurns(users_N=np.array([0, 0, 1]), arms_N=np.array([1, 1, 0]), odds_NA=..., rewards_N=...)``

    Raises:
        ValueError: arrays of different lengths, fewer than two users, odds that do not sum to 1, or odds of 0 for an arm that was drawn.
    """

    users_N: Ints
    arms_N: Ints
    odds_NA: Floats
    rewards_N: Floats

    def __post_init__(self) -> None:
        lengths = {len(self.users_N), len(self.arms_N), len(self.odds_NA), len(self.rewards_N)}
        if len(lengths) > 1:
            raise ValueError(f"users, arms, odds and rewards must have one length, not {sorted(lengths)}")
        if np.unique(self.users_N).size < 2:
            raise ValueError("an interval needs at least 2 users")
        _check_odds(self.odds_NA, self.odds_NA.shape)
        if not (self.propensities_N > 0.0).all():
            raise ValueError("the propensity of an arm that was drawn must lie above 0")

    @property
    def propensities_N(self) -> Floats:
        """The probability of the arm that was drawn."""
        return self.odds_NA[np.arange(len(self.arms_N)), self.arms_N]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyValue:
    """The mean reward per turn under a router, with a 95% interval.

    `turns` is the effective sample size: the number of turns routed by that router itself that would be as informative, (sum h w)^2 /
    sum((h w)^2) (Kish).

    Example: ``PolicyValue(mean=0.58, lower=0.55, upper=0.61, error=0.015, users=800, turns=2310.5)``
    """

    mean: float
    lower: float
    upper: float
    error: float
    users: int
    turns: float


def earned(logged: LoggedTurns) -> PolicyValue:
    """Return the reward earned under the actual odds: the plain mean."""
    ones_N = np.ones_like(logged.rewards_N)
    mean = float(logged.rewards_N.mean())
    return _value(logged, mean, logged.rewards_N - mean, ones_N, ones_N)


def ips(logged: LoggedTurns, target_NA: Floats) -> PolicyValue:
    """Estimate by inverse propensity scores. `target_NA`: the changed router's probability of every arm at each turn.

    Raises:
        ValueError: probabilities that do not fit the turns, do not sum to 1, or are above 0 for an arm that was not available.
    """
    weights_N, evaluation_N = _weights(logged, target_NA), evaluation_weights(logged, target_NA)
    return _mean_of(logged, weights_N * logged.rewards_N, weights_N, evaluation_N)


def snips(logged: LoggedTurns, target_NA: Floats) -> PolicyValue:
    """Estimate by self-normalised inverse propensity scores: the right mean per turn even if arms differ in the turns per episode.

    Raises:
        ValueError: as `ips`, or no turn that the changed router would have chosen.
    """
    weights_N = _weights(logged, target_NA) * evaluation_weights(logged, target_NA)
    total = float(weights_N.sum())
    if total <= 0.0:
        raise ValueError("the changed router would have chosen none of these turns: they say nothing about it")
    mean = float(weights_N @ logged.rewards_N) / total
    return _value(logged, mean, weights_N * (logged.rewards_N - mean), weights_N, weights_N)


def difference(logged: LoggedTurns, arm: int, other: int) -> PolicyValue:
    """Estimate how much more all turns would have earned with one arm than with another, each by SNIPS with h = 1.

    The error is that of the linearised difference, with users as clusters (Liang and Zeger 1986). `turns`: the effective sample size of the
    rarer arm. The caller must leave out turns at which one of the two arms could not be drawn.

    Raises:
        ValueError: no turn of one of the two arms.
    """
    residuals_N, effective, means = np.zeros_like(logged.rewards_N), list[float](), list[float]()
    for sign, each in ((1.0, arm), (-1.0, other)):
        weights_N = (logged.arms_N == each) / logged.propensities_N
        total = float(weights_N.sum())
        if total <= 0.0:
            raise ValueError("one of the arms was never drawn: nothing is known about it")
        means.append(float(weights_N @ logged.rewards_N) / total)
        residuals_N = residuals_N + sign * weights_N * (logged.rewards_N - means[-1]) / total
        effective.append(total**2 / float(weights_N @ weights_N))
    _, cluster_N = np.unique(logged.users_N, return_inverse=True)
    sums_U = np.bincount(cluster_N, weights=residuals_N)
    error = math.sqrt(len(sums_U) / (len(sums_U) - 1) * float(sums_U @ sums_U))
    half = half_width(len(sums_U) - 1, error)
    mean = means[0] - means[1]
    return PolicyValue(
        mean=mean, lower=mean - half, upper=mean + half, error=error, users=len(sums_U), turns=min(effective)
    )


def doubly_robust(logged: LoggedTurns, target_NA: Floats, predicted_NA: Floats) -> PolicyValue:
    """Estimate by the model's prediction, corrected with the actual rewards. `predicted_NA`: the reward expected of each arm at each turn.

    The interval holds if no turn's prediction uses rewards of the same user (`cross_fitted`).

    Raises:
        ValueError: as `ips`, or predictions of another shape or that are not finite.
    """
    weights_N, evaluation_N = _weights(logged, target_NA), evaluation_weights(logged, target_NA)
    if predicted_NA.shape != target_NA.shape or not np.isfinite(predicted_NA).all():
        raise ValueError(f"predictions must be finite, with the shape {target_NA.shape} of the probabilities")
    chosen_N = predicted_NA[np.arange(len(weights_N)), logged.arms_N]
    values_N = (target_NA * predicted_NA).sum(axis=1) + weights_N * (logged.rewards_N - chosen_N)
    return _mean_of(logged, values_N, weights_N, evaluation_N)


def evaluation_weights(logged: LoggedTurns, target_NA: Floats) -> Floats:
    """Return the weights h of the formulas above, with which all turns add about the same variance. Raises ValueError as `ips` does."""
    _check_target(logged, target_NA)
    _, choices_N = np.unique(logged.odds_NA > 0.0, axis=0, return_inverse=True)
    evaluation_N = np.ones(len(choices_N))
    for choice in range(int(choices_N.max()) + 1):
        alike_N = choices_N == choice
        squares_A = (target_NA[alike_N] ** 2).mean(axis=0)
        odds_MA = logged.odds_NA[alike_N]
        variance_M = np.divide(squares_A, odds_MA, out=np.zeros_like(odds_MA), where=odds_MA > 0.0).sum(axis=1)
        evaluation_N[alike_N] = variance_M**-0.5 / (variance_M**-0.5).mean()
    return evaluation_N


def cross_fitted(logged: LoggedTurns, contexts_N: Ints, arms: int, folds: int = 5) -> Floats:
    """Return the simplest model: each arm's mean reward in each context, over the users of the other folds; shape [turns, arms].

    For an arm that was not seen in a context, the prediction is its mean over all contexts, or else the mean over all arms. `contexts_N`
    numbers the contexts from 0. (Cross-fitting: Chernozhukov et al. 2018, arXiv 1608.00060.)

    Raises:
        ValueError: fewer than two folds, or contexts of another length.
    """
    if folds < 2 or len(contexts_N) != len(logged.arms_N):
        raise ValueError("cross-fitting needs 2 folds or more, and one context per turn")
    folds_N = np.unique(logged.users_N, return_inverse=True)[1] % folds
    contexts = int(contexts_N.max()) + 1
    predicted_NA = np.empty((len(contexts_N), arms))
    for fold in range(folds):
        learned_N = folds_N != fold
        rewards = logged.rewards_N[learned_N]
        everybody = float(rewards.mean()) if rewards.size else 0.0
        cells = np.ravel_multi_index((contexts_N[learned_N], logged.arms_N[learned_N]), (contexts, arms))
        sums_XA = np.bincount(cells, weights=rewards, minlength=contexts * arms).reshape(contexts, arms)
        counts_XA = np.bincount(cells, minlength=contexts * arms).reshape(contexts, arms)
        arms_A = np.where(
            counts_XA.sum(axis=0) > 0, sums_XA.sum(axis=0) / np.maximum(counts_XA.sum(axis=0), 1), everybody
        )
        table_XA = np.where(counts_XA > 0, sums_XA / np.maximum(counts_XA, 1), arms_A)
        predicted_NA[~learned_N] = table_XA[contexts_N[~learned_N]]
    return predicted_NA


def _check_odds(odds_NA: Floats, shape: tuple[int, ...]) -> None:
    if odds_NA.ndim != 2 or odds_NA.shape != shape:
        raise ValueError(f"the probabilities have shape {odds_NA.shape}; {shape}, turns and arms, is needed")
    if (odds_NA < 0.0).any() or not np.allclose(odds_NA.sum(axis=1), 1.0):
        raise ValueError("probabilities must be at least 0 and sum to 1 at every turn")


def _check_target(logged: LoggedTurns, target_NA: Floats) -> None:
    _check_odds(target_NA, logged.odds_NA.shape)
    if (target_NA[logged.odds_NA <= 0.0] > 0.0).any():
        raise ValueError(
            "the changed router would choose an arm that was not available: nothing is known about that turn"
        )


def _weights(logged: LoggedTurns, target_NA: Floats) -> Floats:
    _check_target(logged, target_NA)
    return target_NA[np.arange(len(logged.arms_N)), logged.arms_N] / logged.propensities_N


def _mean_of(logged: LoggedTurns, values_N: Floats, weights_N: Floats, evaluation_N: Floats) -> PolicyValue:
    mean = float(evaluation_N @ values_N / evaluation_N.sum())
    return _value(logged, mean, evaluation_N * (values_N - mean), evaluation_N, evaluation_N * weights_N)


def _value(logged: LoggedTurns, mean: float, residuals_N: Floats, shares_N: Floats, weights_N: Floats) -> PolicyValue:
    """Return the value and interval of a mean sum(values) / sum(shares), with residuals = values - mean x shares.

    Leaving out user u lowers the mean by the sum of u's residuals over the sum of everybody else's shares.
    """
    _, cluster_N = np.unique(logged.users_N, return_inverse=True)
    shares_U = np.bincount(cluster_N, weights=shares_N)
    weights_U = np.bincount(cluster_N, weights=weights_N)
    others_U = shares_U.sum() - shares_U
    users, squares = shares_U.size, float(weights_N @ weights_N)
    # all weight is on one user: the variance between users is unknown
    if others_U.min() <= 0.0 or weights_U.sum() <= 0.0:
        error = half = math.inf
    else:
        left_out_U = np.bincount(cluster_N, weights=residuals_N) / others_U
        error = math.sqrt((users - 1) / users * float(left_out_U @ left_out_U))
        freedom = float(weights_U @ weights_U) ** 2 / float((weights_U**4).sum())
        half = half_width(max(1.0, freedom), error)
    turns = float(weights_N.sum()) ** 2 / squares if squares > 0.0 else 0.0
    return PolicyValue(mean=mean, lower=mean - half, upper=mean + half, error=error, users=users, turns=turns)


def half_width(freedom: float, error: float) -> float:
    """Return half the width of a 95% interval by Student's t."""
    from scipy import special  # a slow import (a quarter of a second), needed only here

    return float(special.stdtrit(freedom, 0.975)) * error


# ---------------------------------------------------------------- test of the logged propensities


_ODDS_RATIOS = (0.25, 0.5, 0.8, 1.25, 2.0, 4.0)  # the alternatives: ratios of the true odds to the logged odds

_NO_DRAWS = [0.0] * (3 + len(_ODDS_RATIOS))
_REJECTED = 1e9  # log of a stake that rejects at any level


@dataclass(frozen=True, slots=True, kw_only=True)
class PropensityBalance:
    """One arm's draws. `ratio`: the mean of 1{drawn} / p, about 1 if the propensities are right. `p_value` is valid at any time.

    Example: ``PropensityBalance(arm="live", draws=4000, ratio=1.01, p_value=1.0)``
    """

    arm: str
    draws: int
    ratio: float
    p_value: float


class PropensityTest:
    """Tests the logged propensities, given every draw: the arm that came up, and the logged probabilities of all arms that could have.

    Example::

        test = PropensityTest()
        test.add("live", {"live": 0.7, "cheap": 0.3})
        test.wrong(alpha=0.001)  # the arms whose logged propensities are not what was done
    """

    def __init__(self) -> None:
        # draws, sum of 1{drawn} / p, the largest log of the mean stake, log stakes
        self._arms: dict[str, list[float]] = {}

    def add(self, arm: str, odds: Mapping[str, float]) -> None:
        """Count one draw, one per episode. Odds that exclude the drawn arm, or do not sum to 1, are rejected at once."""
        if odds.get(arm, 0.0) <= 0.0 or not math.isclose(math.fsum(odds.values()), 1.0, abs_tol=1e-6):
            draws, total, _, *stakes = self._arms.get(arm, _NO_DRAWS)
            self._arms[arm] = [draws + 1.0, total, _REJECTED, *stakes]
            return
        for name, chance in odds.items():
            if 0.0 < chance < 1.0:
                self._bet(name, chance, name == arm)

    def balances(self) -> list[PropensityBalance]:
        """Return the balance of every arm so far, by name. An arm whose draws were all certain has none."""
        return [
            PropensityBalance(arm=arm, draws=int(draws), ratio=total / draws, p_value=min(1.0, math.exp(-best)))
            for arm, (draws, total, best, *_) in sorted(self._arms.items())
        ]

    def wrong(self, alpha: float) -> list[str]:
        """Return the arms whose propensities are rejected. While all are right, any is ever rejected with probability at most `alpha`.

        The j-th arm to appear may spend alpha / (j (j + 1)), which sums to alpha for any number of arms.
        """
        allowed = {arm: alpha / (j * (j + 1)) for j, arm in enumerate(self._arms, 1)}
        return [balance.arm for balance in self.balances() if balance.p_value <= allowed[balance.arm]]

    def state(self) -> dict[str, Any]:
        """Return the whole state as JSON types."""
        return {arm: list(values) for arm, values in self._arms.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned. Raises ValueError, TypeError or AttributeError for anything else."""
        arms = {str(arm): [float(value) for value in values] for arm, values in state.items()}
        if any(len(values) != len(_NO_DRAWS) for values in arms.values()):
            raise ValueError(f"every arm has {len(_NO_DRAWS)} numbers")
        self._arms = arms

    def _bet(self, arm: str, chance: float, drawn: bool) -> None:
        draws, total, best, *stakes = self._arms.get(arm, _NO_DRAWS)
        for i, times in enumerate(_ODDS_RATIOS):
            # with odds r p / (1 - p) the probability is r p / (1 - p + r p), and q / p and (1 - q) / (1 - p) follow
            stakes[i] += (math.log(times) if drawn else 0.0) - math.log1p(chance * (times - 1.0))
        most = max(stakes)
        mixed = most + math.log(math.fsum(math.exp(stake - most) for stake in stakes) / len(stakes))
        total += 1.0 / chance if drawn else 0.0
        self._arms[arm] = [draws + 1.0, total, max(best, mixed), *stakes]
