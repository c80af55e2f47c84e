"""A person's state as they are shown it: each dial's credible interval, and in words what it does to their answers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ostinato.adapt.learner import PersonState, Prior
from ostinato.adapt.state_fold import FeatureMoments, StateRules, time_of
from ostinato.core.steering import DialView, NotSteered, PersonView

_DEVIATIONS = 1.96  # of a 95% interval
_WORDS: Mapping[str, tuple[str, str]] = {
    "brief": ("shorter answers", "longer answers"),
    "lists": ("more lists", "fewer lists"),
    "exclaims": ("more exclamation marks", "fewer exclamation marks"),
    "speaks_to_reader": ("speaks to the reader more", "speaks to the reader less"),
    "commas": ("more commas", "fewer commas"),
    "first_person": ("speaks of itself more", "speaks of itself less"),
    "bold": ("more bold type", "less bold type"),
    "long_words": ("longer words", "shorter words"),
}  # by the built-in dials of `adapt.fit.ATTRIBUTES`: above 0, and below


def person_view(
    state: PersonState, prior: Prior, rules: StateRules, moments: FeatureMoments, *, cap: float, off: NotSteered | None
) -> PersonView:
    """What a state says under the `prior` that its person begins with. `cap`: the KL divergence of a token, in nats, that answers may
    spend (`adapt.cap`).
    """
    regression = rules.regression
    posterior = state.posterior(prior, regression)
    evidence = state.evidence(state.prior(rules.prior, regression), regression)
    mean_K = posterior.mean_D[:-1] / regression.strength
    deviation_K = np.sqrt(np.diag(posterior.covariance_DD)[:-1]) / regression.strength
    scale = posterior.scale(moments.fisher_KK, tokens=moments.tokens, nats=cap, strength=regression.strength)
    held = dict(state.held)
    dials = tuple(
        _dial(name, float(mean), float(deviation), held.get(number))
        for number, (name, mean, deviation) in enumerate(zip(rules.names, mean_K, deviation_K, strict=True))
    )
    return PersonView(
        dials=dials,
        scale=scale * regression.strength,
        ratings=evidence.ratings,
        nats=state.nats,
        resets=evidence.resets,
        strikes=state.strikes,
        reset_at=time_of(evidence.reset_at) if evidence.reset_at else None,
        off=off,
    )


def _dial(name: str, mean: float, deviation: float, held: float | None) -> DialView:
    words = _in_words(name, mean, deviation, held)
    low, high = mean - _DEVIATIONS * deviation, mean + _DEVIATIONS * deviation
    return DialView(name=name, value=mean, low=low, high=high, held=held, words=words)


def _in_words(name: str, mean: float, deviation: float, held: float | None) -> str:
    plain = name.replace("_", " ")
    more, less = _WORDS.get(name, (f"more {plain}", f"less {plain}"))
    if held is not None:
        return f"{more if held > 0 else less if held < 0 else 'as the model has it'}, set by hand"
    if abs(mean) < deviation:
        return "not known yet"
    return f"{more if mean > 0 else less}, {'sure' if abs(mean) > _DEVIATIONS * deviation else 'perhaps'}"
