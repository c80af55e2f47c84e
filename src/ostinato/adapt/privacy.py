"""Differential privacy of the shared prior: the analytic Gaussian mechanism, its exact composition over releases, and the release itself.

The protected unit is a person with all of their ratings (user-level privacy, add or remove one person). Each contributes one vector of
bounded norm; noise is added to the sum, and the prior is computed from the noised sum alone. Vectors and noise are whole numbers on a grid:
the sum does not depend on the order of people, masks of secure aggregation cancel exactly, and the last bits of a float reveal nothing
(Mironov 2012). Rounding the noise of a Gaussian mechanism is post-processing, so its guarantee is kept.

Pure, except for the noise, which the operating system's generator draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import SystemRandom

import numpy as np
from numpy.typing import NDArray

from ostinato.adapt.config import PriorPrivacyConfig
from ostinato.adapt.learner import Evidence, Floats, Prior
from ostinato.adapt.prior import Organisation, flat_prior
from ostinato.core.errors import BadConfig, Unavailable

YEAR_S = 365 * 86_400.0
"""The period of a budget in seconds."""
GRID = 1 << 20
"""The grid value of slopes of the largest norm that counts, `clip`."""
Grid = NDArray[np.int64]

_secure = SystemRandom()
_COUNT = GRID // 4  # what a person adds to the count
_SECOND = math.sqrt(15) / 4 * GRID  # the largest norm of the second moments: GRID^2 + _SECOND^2 + _COUNT^2 = 2 GRID^2
_SENSITIVITY = math.sqrt(2) * GRID
_WIDE_VARIANCE = 0.1  # variance of the wide prior with which a person's own slopes are estimated
_LEAST_RATINGS = 2  # least ratings per estimated number for a person to count
_LEAST, _MOST = 2e-4, 0.03  # the range to which the variance of a slope between people is clipped
_TAIL_BITS = 160  # bits of the uniform number that decides how far out in the tail a draw lies
_SAFETY = 1 - 2.0**-40  # a margin larger than the rounding error of a norm in float64


# ---------------------------------------------------------------- accountant


def gaussian_delta(sigma: float, epsilon: float) -> float:
    """Return the smallest delta at which the Gaussian mechanism is (epsilon, delta)-private (Balle & Wang 2018, theorem 8).

    `sigma`: the noise multiplier, the noise's standard deviation over the sensitivity.
    """
    return math.exp(_log_tail(epsilon * sigma - 0.5 / sigma)) - math.exp(
        epsilon + _log_tail(epsilon * sigma + 0.5 / sigma)
    )


def gaussian_epsilon(sigma: float, delta: float) -> float:
    """Return the smallest epsilon at this noise multiplier and delta."""
    _check_delta(delta)
    if gaussian_delta(sigma, 0.0) <= delta:
        return 0.0
    most = 1.0
    while gaussian_delta(sigma, most) > delta:
        most *= 2
    return _bisect(lambda epsilon: gaussian_delta(sigma, epsilon) <= delta, 0.0, most)


def gaussian_sigma(epsilon: float, delta: float) -> float:
    """Return the smallest noise multiplier of an (epsilon, delta)-private release. Raises BadConfig unless epsilon > 0, 0 < delta < 1."""
    _check_delta(delta)
    if not 0 < epsilon < math.inf:
        raise BadConfig(f"adapt.privacy.epsilon must be a number above 0, not {epsilon}")
    least, most = 1.0, 1.0
    while gaussian_delta(most, epsilon) > delta:
        most *= 2
    while gaussian_delta(least, epsilon) <= delta:
        least /= 2
    return _bisect(lambda sigma: gaussian_delta(sigma, epsilon) <= delta, least, most)


def composed_sigma(sigmas: Iterable[float]) -> float:
    """Return the noise multiplier of the one Gaussian mechanism equivalent to all of these (Dong et al. 2022); infinite for none."""
    told = math.fsum(sigma**-2 for sigma in sigmas)
    return told**-0.5 if told else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyBudget:
    """The (epsilon, delta) that all releases of any 365 days may spend, in `releases` equal parts.

    Example: ``PrivacyBudget(epsilon=2.0, delta=1e-6, releases=52).next_sigma(sigmas_of_this_year)``
    """

    epsilon: float
    delta: float
    releases: int

    @classmethod
    def of(cls, config: PriorPrivacyConfig) -> PrivacyBudget | None:
        """Return the budget of these settings; None if they have none."""
        if not config.epsilon:
            return None
        return cls(epsilon=config.epsilon, delta=config.delta, releases=config.releases)

    def spent(self, earlier: Sequence[float]) -> float:
        """Return the epsilon, at the budget's delta, of all releases with these noise multipliers together."""
        return gaussian_epsilon(composed_sigma(earlier), self.delta) if earlier else 0.0

    def admits(self, people: Mapping[str, int]) -> list[str]:
        """Return the tenants whose people a release may use, given each tenant's number of people.

        These are all tenants if delta is below 1 / the total number of people, else those with fewer people than an equal part of 1 /
        delta, so that one tenant's invented people block no other tenant. Raises BadConfig if there are none.
        """
        total = sum(people.values())
        if self.delta * total < 1:
            return [*people]
        found = [tenant for tenant, number in people.items() if self.delta * number * len(people) < 1]
        if not found:
            raise BadConfig(
                f"adapt.privacy.delta = {self.delta} is not below 1 in {total}, the number of people: it would allow to publish one of "
                f"them whole; set it to {0.1 / total:.0e} or less"
            )
        return found

    def next_sigma(self, earlier: Sequence[float]) -> float:
        """Return the noise multiplier of the next release, given the `earlier` ones. Raises Unavailable if the budget does not suffice."""
        whole = gaussian_sigma(self.epsilon, self.delta)
        each = whole * math.sqrt(self.releases)
        if not composed_sigma([*earlier, each]) >= whole * (1 - 1e-9):
            raise Unavailable(
                f"{len(earlier)} releases of the prior have spent epsilon {self.spent(earlier):.3f} of adapt.privacy.epsilon = "
                f"{self.epsilon} within a year, and another would exceed it; the last prior stays in use. Wait until the oldest is a "
                "year old, or raise the budget, which weakens what people were promised"
            )
        return each

    @property
    def spacing_s(self) -> float:
        """Seconds between two releases such that the budget lasts a year."""
        return YEAR_S / self.releases

    def state(self, priors: Iterable[tuple[float, float]], now: float) -> dict[str, float]:
        """Return what these priors, given as times and noise multipliers, have spent at `now`, as JSON types.

        `without_noise`: the number of priors of the same 365 days that no budget covers.
        """
        recent = within_year(priors, now)
        noised = [sigma for sigma in recent if sigma]
        return {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "releases": self.releases,
            "spent": self.spent(noised),
            "released": len(noised),
            "without_noise": len(recent) - len(noised),
        }

    def words(self, priors: Iterable[tuple[float, float]], now: float) -> str:
        """Return `state` as text."""
        told = self.state(priors, now)
        bare = f"; {told['without_noise']} more without noise, which no budget covers" if told["without_noise"] else ""
        return (
            f"epsilon {told['spent']:.3f} of {self.epsilon:g} (delta {self.delta:g}) spent in 365 days, by {told['released']} of "
            f"{self.releases} releases{bare}"
        )


def within_year(priors: Iterable[tuple[float, float]], now: float) -> list[float]:
    """Return the noise multipliers of the priors (times and noise multipliers) that a budget counts at `now`, future ones included."""
    return [sigma for at, sigma in priors if now - at < YEAR_S]


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise BadConfig(f"adapt.privacy.delta must lie between 0 and 1, not {delta}")


def _log_tail(x: float) -> float:
    """Return the logarithm of P(Z > x) for a standard normal Z."""
    if x < 30:
        return math.log(math.erfc(x / math.sqrt(2)) / 2)
    return -x * x / 2 - math.log(x * math.sqrt(2 * math.pi)) + math.log1p(-1 / x**2 + 3 / x**4)


def _bisect(holds: Callable[[float], bool], least: float, most: float) -> float:
    """Return the smallest number at which `holds` is true, approached from above."""
    for _ in range(200):
        middle = (least + most) / 2
        least, most = (least, middle) if holds(middle) else (middle, most)
    return most


# ---------------------------------------------------------------- release


def contribution(person: Evidence, clip: float) -> Grid:
    """Return what a person adds to the sum: K slopes, K(K+1)/2 second moments less their estimation error, and 1 for the count.

    The slopes are the person's own, estimated without others' data, and clipped to the norm `clip`; the second moments are clipped to that
    of their outer product, `clip` squared. The norm of the whole is at most sqrt(2) `GRID`, whatever the evidence; it is 0 for a person
    with fewer than two ratings per estimated number.
    """
    dials = len(person.shift_D) - 1
    none = np.zeros(dials + dials * (dials + 1) // 2 + 1, np.int64)
    wide = flat_prior(dials, variance=_WIDE_VARIANCE)
    precision_DD = wide.precision_DD + person.precision_DD
    if person.ratings < _LEAST_RATINGS * (dials + 1) or not np.isfinite(precision_DD).all():
        return none
    covariance_DD = np.linalg.inv(precision_DD)
    slopes_K = (covariance_DD @ (wide.shift_D + person.shift_D))[:dials]
    second_KK = np.outer(slopes_K, slopes_K) - covariance_DD[:dials, :dials]
    if not np.isfinite(slopes_K).all() or not np.isfinite(second_KK).all():
        return none
    rows, columns = np.triu_indices(dials)
    second_P = second_KK[rows, columns] * np.where(rows == columns, 1.0, math.sqrt(2))
    return np.concatenate(
        [_on_grid(slopes_K / clip, GRID), _on_grid(second_P / clip**2, _SECOND), np.array([_COUNT], np.int64)]
    )


def total_contribution(people: Iterable[Evidence], dials: int, clip: float) -> Grid:
    """Return the sum of people's contributions: K + K(K+1)/2 + 1 numbers. Each element of `people` must be one whole person."""
    total_P = contribution(Evidence.none(dials), clip)
    for person in people:
        total_P += contribution(person, clip)
    return total_P


def secure_gauss(bits: Callable[[int], int] = _secure.getrandbits) -> float:
    """Draw from a standard normal distribution, with the operating system's generator (Box and Muller 1958).

    `random.gauss` ends at 8.6 standard deviations, since its uniform numbers have 53 bits. A total beyond them would reveal a person for
    certain, with probability about 1e-17, although a smaller `delta` may be promised. With 160 bits it ends at 14.9, a probability of
    1e-50.
    """
    size = (bits(_TAIL_BITS) + 1) / (1 << _TAIL_BITS)
    return math.sqrt(-2.0 * math.log(size)) * math.cos(math.tau * bits(53) / (1 << 53))


def noised(total_P: Grid, sigma: float, gauss: Callable[[], float] = secure_gauss) -> Grid:
    """Return a sum of contributions with noise of `sigma` times its sensitivity on each number.

    `gauss` draws from a standard normal distribution; the default is the operating system's generator, which no seed repeats.
    """
    return total_P + np.array([round(gauss() * sigma * _SENSITIVITY) for _ in total_P], np.int64)


def prior_of(total_P: Grid, clip: float) -> tuple[Prior, float]:
    """Return the prior and the number of people that a sum of contributions, noised or not, stands for.

    Whatever the noise, the prior's mean is no longer than `clip` and its covariance is positive definite.
    """
    dials, told_P = math.isqrt(2 * len(total_P)) - 1, total_P.astype(np.float64)
    people = max(1.0, float(told_P[-1]) / _COUNT)
    slopes_K = told_P[:dials] * (clip / GRID / people)
    slopes_K *= min(1.0, clip / max(float(np.linalg.norm(slopes_K)), 1e-300))
    rows, columns = np.triu_indices(dials)
    second_KK = np.zeros((dials, dials))
    second_KK[rows, columns] = told_P[dials:-1] * (clip**2 / _SECOND / people)
    second_KK = (second_KK + second_KK.T) / np.where(np.eye(dials) > 0, 2, math.sqrt(2))
    variances_K, vectors_KK = np.linalg.eigh(second_KK - np.outer(slopes_K, slopes_K))
    spread_KK = (vectors_KK * np.clip(variances_K, _LEAST, _MOST)) @ vectors_KK.T
    return Prior.of(slopes_K, (spread_KK + spread_KK.T) / 2), people


def release_prior(people: Iterable[Evidence], dials: int, *, clip: float, sigma: float) -> Organisation:
    """Release the prior of an organisation's people with this noise multiplier.

    Its number of people is the effective one: how many people would give a dial's mean as precisely without noise, by the flat prior's
    variance. So an organisation that is small for its noise weighs little among others, and has no level of its own.
    """
    prior, counted = prior_of(noised(total_contribution(people, dials, clip), sigma), clip)
    noise = (sigma * math.sqrt(2) * clip) ** 2 / float(flat_prior(dials).covariance_DD[0, 0])
    return Organisation(int(counted / (1 + noise / counted)), prior)


def _on_grid(vector: Floats, unit: float) -> Grid:
    """Return a vector as multiples of 1 / `unit`, clipped to a norm of at most 1."""
    largest = float(np.abs(vector).max(initial=0.0))
    norm = largest * float(np.linalg.norm(vector / largest)) if largest else 0.0
    return np.trunc(vector / max(1.0, norm) * (unit * _SAFETY)).astype(np.int64)
