"""What a changed router would have earned, from turns that another router dealt. Pure maths.

    w_i = pi(a_i | x_i) / p_i       how much more often the new router would choose what was chosen
    IPS    mean of w_i r_i                                     Horvitz and Thompson 1952; Dudík, Langford and Li 2011 (arXiv 1103.4601)
    SNIPS  sum of w_i r_i / sum of w_i                         Swaminathan and Joachims 2015
    DR     mean of sum_a pi(a | x_i) q(x_i, a) + w_i (r_i - q(x_i, a_i))      Dudík, Langford and Li 2011

IPS and DR are unbiased if the logged propensities p are right, whatever the model q; SNIPS is biased by an order of 1/n, and varies less
where rewards are far from 0. The intervals are asymptotic: Student's t on the variance of leaving out one user at a time (the jackknife;
Tukey 1958, Efron and Stein 1981 on why it errs to the wide side; MacKinnon, Nielsen and Webb 2023 for clusters), with as many degrees of
freedom as users who weigh alike would be (Kish), less one. They hold for one look at a number of turns that was fixed before: look as
often as you like only at `propensities.PropensityTest`. A turn takes the propensity of its episode's draw.

The approximation is worst where a learning router had left an arm that the new one prefers with hardly any turns: `PolicyValue.turns`
is then small beside the turns in the log.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedTurns:
    """Turns whose reward is known, in arrays of one length N.

    `users_N` number the users, `arms_N` the arms (a column of the matrices below); `propensities_N` lie in (0, 1].

    Example: ``LoggedTurns(users_N=np.array([0, 0, 1]), arms_N=np.array([1, 1, 0]), propensities_N=..., rewards_N=...)``

    Raises:
        ValueError: arrays of different lengths, fewer than two users, a propensity outside (0, 1].
    """

    users_N: Ints
    arms_N: Ints
    propensities_N: Floats
    rewards_N: Floats

    def __post_init__(self) -> None:
        lengths = {len(self.users_N), len(self.arms_N), len(self.propensities_N), len(self.rewards_N)}
        if len(lengths) > 1:
            raise ValueError(f"users, arms, propensities and rewards must have one length, not {sorted(lengths)}")
        if np.unique(self.users_N).size < 2:
            raise ValueError("an interval needs at least 2 users")
        if not ((self.propensities_N > 0.0) & (self.propensities_N <= 1.0)).all():
            raise ValueError("every propensity must lie above 0 and be at most 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyValue:
    """The mean reward per turn under a router. `turns` is how many turns dealt by the router itself would say as much of it:
    (sum w)^2 / sum(w^2), Kish's effective size.

    Example: ``PolicyValue(mean=0.58, lower=0.55, upper=0.61, error=0.015, users=800, turns=2310.5)``
    """

    mean: float
    lower: float
    upper: float
    error: float
    users: int
    turns: float


def ips(logged: LoggedTurns, target_NA: Floats, confidence: float = 0.95) -> PolicyValue:
    """Inverse propensity scores. `target_NA` are the changed router's probabilities of every arm at each turn.

    Raises:
        ValueError: probabilities that do not fit the turns, or do not sum to 1.
    """
    weights_N = _weights(logged, target_NA)
    values_N = weights_N * logged.rewards_N
    mean = float(values_N.mean())
    return _value(logged, mean, values_N - mean, np.ones_like(values_N), weights_N, confidence)


def snips(logged: LoggedTurns, target_NA: Floats, confidence: float = 0.95) -> PolicyValue:
    """Self-normalised inverse propensity scores. If arms differ in how many turns an episode has, this is the right mean per turn.

    Raises:
        ValueError: as `ips`, or no turn that the changed router would have chosen.
    """
    weights_N = _weights(logged, target_NA)
    total = float(weights_N.sum())
    if total <= 0.0:
        raise ValueError("the changed router would have chosen none of these turns: they say nothing about it")
    mean = float(weights_N @ logged.rewards_N) / total
    return _value(logged, mean, weights_N * (logged.rewards_N - mean), weights_N, weights_N, confidence)


def doubly_robust(
    logged: LoggedTurns, target_NA: Floats, predicted_NA: Floats, confidence: float = 0.95
) -> PolicyValue:
    """The model's prediction, corrected by what came. `predicted_NA` is the reward that each arm is expected to get at each turn; the
    interval holds if no turn's prediction was made of rewards of the same user (`cross_fitted`).

    Raises:
        ValueError: as `ips`, or predictions of another shape or that are not finite.
    """
    weights_N = _weights(logged, target_NA)
    if predicted_NA.shape != target_NA.shape or not np.isfinite(predicted_NA).all():
        raise ValueError(f"predictions must be finite, with the shape {target_NA.shape} of the probabilities")
    chosen_N = predicted_NA[np.arange(len(weights_N)), logged.arms_N]
    values_N = (target_NA * predicted_NA).sum(axis=1) + weights_N * (logged.rewards_N - chosen_N)
    mean = float(values_N.mean())
    return _value(logged, mean, values_N - mean, np.ones_like(values_N), weights_N, confidence)


def cross_fitted(logged: LoggedTurns, contexts_N: Ints, arms: int, folds: int = 5) -> Floats:
    """The simplest model: each arm's mean reward in each context, of the users of the other folds; shape [turns, arms].

    Where an arm was not seen in a context, its mean over all contexts stands in, or else everybody's. `contexts_N` numbers the contexts
    from 0. (Cross-fitting: Chernozhukov et al. 2018, arXiv 1608.00060.)

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


def _weights(logged: LoggedTurns, target_NA: Floats) -> Floats:
    turns = len(logged.arms_N)
    if target_NA.ndim != 2 or target_NA.shape[0] != turns or int(logged.arms_N.max()) >= target_NA.shape[1]:
        raise ValueError(
            f"the router's probabilities have shape {target_NA.shape}; {turns} turns and every arm are needed"
        )
    if (target_NA < 0.0).any() or not np.allclose(target_NA.sum(axis=1), 1.0):
        raise ValueError("the router's probabilities must be at least 0 and sum to 1 at every turn")
    return target_NA[np.arange(turns), logged.arms_N] / logged.propensities_N


def _value(
    logged: LoggedTurns, mean: float, residuals_N: Floats, shares_N: Floats, weights_N: Floats, confidence: float
) -> PolicyValue:
    """Of a mean that is sum(values) / sum(shares), with residuals = values - mean x shares: without user u it would be less by
    the sum of u's residuals over the sum of everybody else's shares.
    """
    from scipy import special  # takes a quarter of a second to import

    _, cluster_N = np.unique(logged.users_N, return_inverse=True)
    shares_U = np.bincount(cluster_N, weights=shares_N)
    weights_U = np.bincount(cluster_N, weights=weights_N)
    others_U = shares_U.sum() - shares_U
    users, squares = shares_U.size, float(weights_N @ weights_N)
    if (
        others_U.min() <= 0.0 or weights_U.sum() <= 0.0
    ):  # it rests on one user: nothing is known of how much users differ
        error = half = math.inf
    else:
        left_out_U = np.bincount(cluster_N, weights=residuals_N) / others_U
        error = math.sqrt((users - 1) / users * float(left_out_U @ left_out_U))
        alike = float(weights_U.sum()) ** 2 / float(weights_U @ weights_U)
        half = float(special.stdtrit(max(1.0, alike - 1.0), 0.5 + confidence / 2)) * error
    turns = float(weights_N.sum()) ** 2 / squares if squares > 0.0 else 0.0
    return PolicyValue(mean=mean, lower=mean - half, upper=mean + half, error=error, users=users, turns=turns)
