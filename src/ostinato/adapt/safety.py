"""Red-teaming of a basis: the extreme dial settings that people could come to have, at which answers are tried against a suite. Pure.

A cap on KL divergence bounds drift, not harm: a behaviour that the base model shows in 1% of its answers may come in 16% of those that
spend 0.3 nats. So what counts is measured where the drift is largest.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from ostinato.adapt.learner import Floats, PersonPosterior, Prior
from ostinato.core.steering import CLIP, Basis

_FARTHEST = 1e6  # a slope that no rating gives: the dial goes as far as the cap's estimate lets it
_WIDER = 2.0  # of the drawn states, times the prior's standard deviation


@dataclass(frozen=True, slots=True, kw_only=True)
class Corner:
    """Dial settings at which answers are tried. `dial`: the one that is turned, by name; "" if several are.

    Example: ``Corner(name="brief as far up as it goes", dials=(3.5, 0.0), dial="brief")``
    """

    name: str
    dials: tuple[float, ...]
    dial: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DialReach:
    """How far dials go: an answer's covariance of features and mean number of steered tokens, the cap in nats, the KL penalty's strength.

    Example: ``DialReach(fisher_KK=np.eye(2), tokens=20.0, cap=0.1, strength=0.05).dials(slopes_K)``
    """

    fisher_KK: Floats
    tokens: float
    cap: float
    strength: float

    @classmethod
    def of(cls, features: Sequence[Sequence[float]], tokens: Sequence[int], cap: float, strength: float) -> DialReach:
        """From answers that were sampled with all dials at 0: their features, and how many of their tokens were steered."""
        features_NK = np.asarray(features, np.float64)
        return cls(
            fisher_KK=features_NK.T @ features_NK / len(features_NK),
            tokens=float(np.mean(tokens)),
            cap=cap,
            strength=strength,
        )

    def dials(self, slopes_K: Floats) -> tuple[float, ...]:
        """The settings of a person with these slopes."""
        size = len(slopes_K) + 1
        believed = PersonPosterior(mean_D=np.append(slopes_K, 0.5), covariance_DD=np.eye(size))
        return believed.dials(self.fisher_KK, tokens=self.tokens, nats=self.cap, strength=self.strength)

    def only(self, kept: Sequence[int]) -> DialReach:
        """That of some dials, by number."""
        return DialReach(
            fisher_KK=self.fisher_KK[np.ix_(kept, kept)], tokens=self.tokens, cap=self.cap, strength=self.strength
        )


def single_corners(basis: Basis, reach: DialReach) -> list[Corner]:
    """Each dial alone, up and down as far as it goes; at least until it moves its likeliest token by the clip, if it moved no answer."""
    found: list[Corner] = []
    for number, name in enumerate(basis.names):
        moves = reach.fisher_KK[number, number] > 0.0
        largest = float(np.abs(basis.directions_KM[number]).max())
        for sign, way in ((1.0, "up"), (-1.0, "down")):
            dials = [0.0] * len(basis.names)
            slopes_K = np.zeros(len(basis.names))
            slopes_K[number] = sign * _FARTHEST
            dials[number] = (
                reach.dials(slopes_K)[number] if moves else float(np.float32(sign * CLIP / (largest or 1.0)))
            )
            found.append(Corner(name=f"{name} {way}", dials=tuple(dials), dial=name))
    return found


def drawn_corners(reach: DialReach, prior: Prior, count: int, seed: int) -> list[Corner]:
    """People drawn from the prior at twice its width. The same seed gives the same people."""
    rng = np.random.default_rng(seed)
    root_DD = np.linalg.cholesky(prior.covariance_DD)
    slopes_NK = (prior.mean_D + _WIDER * rng.standard_normal((count, len(prior.mean_D))) @ root_DD.T)[:, :-1]
    return [Corner(name=f"drawn person {number}", dials=reach.dials(each)) for number, each in enumerate(slopes_NK, 1)]


def most_moved(basis: Basis, reach: DialReach, corners: Collection[Corner]) -> str:
    """The dial that has the largest part in some corners, by the quadratic estimate of its own divergence."""
    squares_K = np.sum([np.square(np.asarray(corner.dials, np.float64)) for corner in corners], axis=0)
    return basis.names[int(np.argmax(squares_K * np.diag(reach.fisher_KK)))]


def without_dials(basis: Basis, dropped: Collection[str]) -> Basis:
    """The basis without some dials: another hash, so that each turn tells by which it was steered. Without any, one that moves nothing."""
    kept = [number for number, name in enumerate(basis.names) if name not in dropped]
    if not kept:
        return Basis(basis.names, basis.tokens_M, np.zeros_like(basis.directions_KM), basis.weights)
    return Basis(tuple(basis.names[k] for k in kept), basis.tokens_M, basis.directions_KM[kept], basis.weights)
