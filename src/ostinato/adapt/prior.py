"""Empirical Bayes: the population's distribution of slopes by random-effects EM, and an organisation's between it and the person. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ostinato.adapt.learner import Evidence, Floats, Prior

_PASSES = 40
_SHRINK = 20  # people whose own mean weighs as much as the population's
_WIDTH = 0.003  # the variance of a slope before anything is known


def flat_prior(dials: int, *, variance: float = _WIDTH) -> Prior:
    """The prior of a population that nothing is known of: no slope is likelier up than down."""
    return Prior.of(np.zeros(dials), variance * np.eye(dials))


def fit_prior(people: Sequence[Evidence], start: Prior, *, passes: int = _PASSES) -> Prior:
    """Maximum likelihood of mean m0 and covariance S0 over people, each of whom has D numbers ~ N(m0, S0) and ratings.

    Args:
        people: the evidence of people who consented to it, at most some 10^5; those without ratings tell nothing and are left out.
        start: where EM begins; its covariance, with the weight of `D + 1` people, also keeps the fit positive definite.
        passes: of EM, of one D x D solution per person each.

    Returns `start` without people who rated.
    """
    told = [person for person in people if person.ratings]
    if not told:
        return start
    precision_NDD = np.stack([person.precision_DD for person in told]).astype(np.float64)
    shift_ND = np.stack([person.shift_D for person in told]).astype(np.float64)
    prior, pull = start, len(start.mean_D) + 1
    for _ in range(passes):
        covariance_NDD, mean_ND = _posteriors(precision_NDD, shift_ND, prior)
        mean_D = mean_ND.mean(0)
        spread_ND = mean_ND - mean_D
        scatter_DD = spread_ND.T @ spread_ND + covariance_NDD.sum(0) + pull * start.covariance_DD
        scatter_DD = scatter_DD / (len(told) + pull)
        prior = Prior(mean_D, (scatter_DD + scatter_DD.T) / 2)
    return prior


def organisation_prior(people: Sequence[Evidence], population: Prior) -> Prior:
    """An organisation's prior: the population's mean moved towards the mean of the organisation's people, k / (k + 20) of the way for k
    people who rated. People of one organisation are alike, so what its mean explains is taken off the spread, half of it at most.
    """
    told = [person for person in people if person.ratings]
    if not told:
        return population
    precision_NDD = np.stack([person.precision_DD for person in told]).astype(np.float64)
    shift_ND = np.stack([person.shift_D for person in told]).astype(np.float64)
    moved_D = _posteriors(precision_NDD, shift_ND, population)[1].mean(0) - population.mean_D
    weight = len(told) / (len(told) + _SHRINK)
    explained = float(moved_D @ population.precision_DD @ moved_D) / len(moved_D)
    return Prior(population.mean_D + weight * moved_D, population.covariance_DD * (1 - weight * min(0.5, explained)))


def _posteriors(precision_NDD: Floats, shift_ND: Floats, prior: Prior) -> tuple[Floats, Floats]:
    """Covariances and means of people's numbers."""
    covariance_NDD = np.asarray(np.linalg.inv(precision_NDD + prior.precision_DD), np.float64)
    return covariance_NDD, np.einsum("nij,nj->ni", covariance_NDD, shift_ND + prior.shift_D)
