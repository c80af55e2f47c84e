"""Empirical Bayes: the distribution of people's slopes by random-effects EM, for each organisation and for the whole population. Pure.

Each organisation is fitted by itself, and the population is their weighted mixture. One organisation's ratings therefore move another's
prior at most by its share of the weight, which is capped, and no organisation's mean lies further out than `MOST_DEVIATIONS` standard
deviations of the flat prior. So an organisation of invented people has a bounded effect on the others, whatever they rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ostinato.adapt.learner import Evidence, Floats, Prior
from ostinato.core.steering import DialPrior

MOST_DEVIATIONS = 4.0
"""The largest distance of a fitted mean, of people or of a person, from the fit's initial prior, in standard deviations of that prior."""
LEAST_RATERS = 5
"""The least number of raters for an organisation's own level: with fewer, its mean would reveal something about each of them."""
_PASSES = 40
_PSEUDO_PEOPLE = 20  # number of people at which an organisation's own mean weighs as much as the population's
_SLOPE_VARIANCE = 0.003  # prior variance of a slope before anything is known
_CAP_PASSES = 200  # iterations for the cap on a share, which converge geometrically


def flat_prior(dials: int, *, variance: float = _SLOPE_VARIANCE) -> Prior:
    """Return the prior of a population of which nothing is known: no slope is likelier up than down."""
    return Prior.of(np.zeros(dials), variance * np.eye(dials))


def fit_prior(people: Sequence[Evidence], start: Prior, *, passes: int = _PASSES) -> Prior:
    """Fit the mean m0 and covariance S0 of people, each of whom has D numbers ~ N(m0, S0) and ratings.

    The covariance is fitted by EM. The mean is the generalised least squares mean in each pass, as plain EM converges slowly to it when
    people have rated little.

    Args:
        people: the evidence of people who consented, at most some 10^5; those without ratings are left out.
        start: the initial prior. Its mean weighs as much as one person, its covariance as `D + 1`, which keeps the fit positive definite.
        passes: EM passes, each with one D x D solution per person.

    Returns `start` if nobody rated.
    """
    told = [person for person in people if person.ratings]
    if not told:
        return start
    precision_NDD = np.stack([person.precision_DD for person in told]).astype(np.float64)
    shift_ND = np.stack([person.shift_D for person in told]).astype(np.float64)
    reach_D = MOST_DEVIATIONS * np.sqrt(np.diag(start.covariance_DD))
    low_D, high_D = start.mean_D - reach_D, start.mean_D + reach_D
    prior, pull, one_DD = start, len(start.mean_D) + 1, np.eye(len(start.mean_D))
    for _ in range(passes):
        covariance_NDD = np.asarray(np.linalg.inv(precision_NDD + prior.precision_DD), np.float64)
        # (S + V)^-1 of a person whose ratings alone say N(mean, V), times S
        known_DD = np.einsum("nij,njk->ik", covariance_NDD, precision_NDD)
        said_D = np.einsum("nij,nj->i", covariance_NDD, shift_ND)
        mean_D = np.clip(np.linalg.solve(known_DD + one_DD, said_D + start.mean_D), low_D, high_D)
        mean_ND = np.einsum("nij,nj->ni", covariance_NDD, shift_ND + prior.precision_DD @ mean_D)
        spread_ND = np.clip(mean_ND, low_D, high_D) - mean_D
        scatter_DD = spread_ND.T @ spread_ND + covariance_NDD.sum(0) + pull * start.covariance_DD
        scatter_DD = scatter_DD / (len(told) + pull)
        prior = Prior(mean_D, (scatter_DD + scatter_DD.T) / 2)
    return prior


@dataclass(frozen=True, slots=True)
class Organisation:
    """The prior of one organisation's people from their ratings alone, and how many of them rated."""

    people: int
    prior: Prior

    @classmethod
    def fit(cls, people: Sequence[Evidence], dials: int) -> Organisation:
        """Fit an organisation, starting from the flat prior."""
        return cls(sum(person.ratings > 0 for person in people), fit_prior(people, flat_prior(dials)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Population:
    """The priors of everybody: a mixture of organisations, N(mean, within + between), and the levels of some organisations.

    `within_DD`: the covariance of people within an organisation; `between_DD`: of organisations' means. `people`: how many people it is
    estimated from; with 0 nothing is known, and the mixture is the flat prior. `organisations`: the number of people and the mean of each.

    Raises ValueError for numbers that are no priors.

    Example: ``Population.flat(8).of("acme")``
    """

    people: int
    mean_D: Floats
    within_DD: Floats
    between_DD: Floats
    organisations: Mapping[str, tuple[int, Floats]]

    @classmethod
    def flat(cls, dials: int) -> Population:
        """Return the population of which nothing is known."""
        prior = flat_prior(dials)
        none_DD = np.zeros_like(prior.covariance_DD)
        return cls(people=0, mean_D=prior.mean_D, within_DD=prior.covariance_DD, between_DD=none_DD, organisations={})

    @classmethod
    def pool(cls, organisations: Sequence[Organisation], dials: int, *, least: int, share: float) -> Population:
        """Pool these organisations; return the flat population if fewer than `least` people rated in all.

        An organisation's weight is its number of people, but at most the share `share` of all, or `least` people if that is more.
        """
        told = [each for each in organisations if each.people]
        if sum(each.people for each in told) < least:
            return cls.flat(dials)
        weight_T = _capped(np.array([each.people for each in told], np.float64), float(least), share)
        weight_T = weight_T / weight_T.sum()
        means_TD = np.stack([each.prior.mean_D for each in told])
        mean_D = (weight_T[:, None] * means_TD).sum(0)
        known_T = np.array([_own_weight(each.people) for each in told])
        apart_TD = (np.sqrt(weight_T) * known_T)[:, None] * (means_TD - mean_D)
        within_DD = sum(
            (weight * each.prior.covariance_DD for weight, each in zip(weight_T, told, strict=True)),
            np.zeros((len(mean_D), len(mean_D))),
        )
        return cls(
            people=sum(each.people for each in told),
            mean_D=mean_D,
            within_DD=within_DD,
            between_DD=apart_TD.T @ apart_TD,
            organisations={},
        )

    @cached_property
    def shared(self) -> Prior:
        """The prior of somebody of any organisation."""
        return Prior(self.mean_D, self.within_DD + self.between_DD)

    @cached_property
    def _own(self) -> Mapping[str, Prior]:
        """The priors of organisations with a level of their own.

        With k people, the level lies k / (k + 20) of the way from the shared mean to its own mean, and the variance between organisations
        shrinks by the same fraction.
        """
        return {
            tenant: Prior(
                self.mean_D + _own_weight(people) * (mean_D - self.mean_D),
                self.within_DD + (1.0 - _own_weight(people)) * self.between_DD,
            )
            for tenant, (people, mean_D) in self.organisations.items()
        }

    def of(self, tenant: str) -> Prior:
        """Return the prior of a tenant's people: with the tenant's own level, or the shared one."""
        return self._own.get(tenant, self.shared)

    # ------------------------------------------------------------ the log's row

    def row(self, *, names: str, number: int, upto: int, at: float) -> DialPrior:
        """Return the population as a row of the log."""
        return DialPrior(
            names=names,
            number=number,
            people=self.people,
            mean=_numbers(self.mean_D),
            within=_triangle(self.within_DD),
            between=_triangle(self.between_DD),
            organisations={
                tenant: (float(people), *_numbers(mean_D)) for tenant, (people, mean_D) in self.organisations.items()
            },
            upto=upto,
            at=at,
        )

    @classmethod
    def read(cls, row: DialPrior, dials: int) -> Population:
        """Parse what `row` returned. Raises ValueError for numbers that are no priors of so many dials."""
        size = dials + 1
        lengths = (len(row.mean), *(len(each) - 1 for each in row.organisations.values()))
        if set(lengths) != {size} or {len(row.within), len(row.between)} != {size * (size + 1) // 2}:
            raise ValueError(f"prior {row.number} is not of {dials} dials")
        organisations = {
            tenant: (int(people), np.array(mean, np.float64)) for tenant, (people, *mean) in row.organisations.items()
        }
        found = cls(
            people=row.people,
            mean_D=np.array(row.mean, np.float64),
            within_DD=_symmetric(row.within, size),
            between_DD=_symmetric(row.between, size),
            organisations=organisations,
        )
        priors = (found.shared, *found._own.values())
        if not all(np.isfinite(each.mean_D).all() and np.isfinite(each.covariance_DD).all() for each in priors):
            raise ValueError(f"prior {row.number} is not finite")
        return found


def _own_weight(people: int) -> float:
    """Return the weight of an organisation's own mean."""
    return people / (people + _PSEUDO_PEOPLE)


def _capped(people_T: Floats, least: float, share: float) -> Floats:
    """Return the capped number of people of each organisation: none exceeds both `least` and `share` of the sum."""
    cap = float(people_T.max())
    for _ in range(_CAP_PASSES):
        cap = min(cap, max(least, share * float(np.minimum(people_T, cap).sum())))
    return np.minimum(people_T, cap)


def _numbers(values_D: Floats) -> tuple[float, ...]:
    return tuple(float(value) for value in values_D)


def _triangle(matrix_DD: Floats) -> tuple[float, ...]:
    return _numbers(matrix_DD[np.tril_indices(len(matrix_DD))])


def _symmetric(triangle: Sequence[float], size: int) -> Floats:
    matrix_DD = np.zeros((size, size))
    matrix_DD[np.tril_indices(size)] = triangle
    return matrix_DD + np.tril(matrix_DD, -1).T
