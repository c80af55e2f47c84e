"""What a person is shown: values that are those of the answers, intervals that narrow, and words that say no more than is known."""

import numpy as np
import pytest
from tests.unit.adapt.people import RULES

from ostinato.adapt.dials import _WORDS, person_view
from ostinato.adapt.fit import ATTRIBUTES
from ostinato.adapt.learner import PersonState, names_hash
from ostinato.adapt.state_fold import FeatureMoments
from ostinato.core.steering import NotSteered, PersonView

REGRESSION, PRIOR = RULES.regression, RULES.prior


def rated(count: int, seed: int = 0) -> PersonState:
    """Somebody who dislikes lists, and of whose other wishes nothing can be said."""
    rng, state = np.random.default_rng(seed), PersonState.new(names_hash(RULES.names), 3)
    for place in range(1, count + 1):
        leaning = float(rng.normal())
        state = state.rate(place << 12, (0.0, leaning, 0.0), 1, float(leaning < 0), PRIOR, REGRESSION)
    return state


def view(state: PersonState, cap: float = 0.1, off: NotSteered | None = None) -> PersonView:
    return person_view(state, RULES.prior, RULES, FeatureMoments(3), cap=cap, off=off)


def test_words_become_sure_as_the_interval_narrows() -> None:
    nothing, few, many = view(PersonState.new(names_hash(RULES.names), 3)), view(rated(14)), view(rated(120))
    assert [dial.words for dial in nothing.dials] == ["not known yet"] * 3
    assert (few.dials[1].words, many.dials[1].words) == ("fewer lists, perhaps", "fewer lists, sure")
    widths = [seen.dials[1].high - seen.dials[1].low for seen in (nothing, few, many)]
    assert widths == sorted(widths, reverse=True)
    assert many.dials[1].high < 0
    assert many.dials[0].words == "not known yet"
    assert (many.ratings, many.reset_at) == (120, None)


def test_values_times_scale_are_the_dials_that_answers_lean_by() -> None:
    state, moments = rated(120), FeatureMoments(3)
    posterior = state.posterior(PRIOR, REGRESSION)
    for cap in (0.1, 1e-4):
        told = view(state, cap)
        dials = posterior.dials(moments.fisher_KK, tokens=moments.tokens, nats=cap, strength=REGRESSION.strength)
        assert [dial.value * told.scale for dial in told.dials] == pytest.approx(dials, rel=1e-5)
    little = PersonState.new(names_hash(RULES.names), 3).hold({0: 0.1}, PRIOR, REGRESSION)
    assert view(little).scale == pytest.approx(1.0)
    assert view(little, 1e-5).scale < 0.5


def test_what_was_set_by_hand_is_told_so() -> None:
    state = rated(20).hold({0: 0.5, 1: 0.0, 2: -2.0}, PRIOR, REGRESSION)
    told = view(state, off=NotSteered.HOLDOUT).to_json()
    assert [(dial["set"], dial["words"]) for dial in told["dials"]] == [
        (0.5, "shorter answers, set by hand"),
        (0.0, "as the model has it, set by hand"),
        (-2.0, "less you, set by hand"),
    ]
    assert (told["active"], told["off"]["reason"]) == (False, "holdout")
    again = view(state.reset(99 << 12))
    assert (again.ratings, again.reset_at) == (0, 99 / 1e6)


def test_every_built_in_dial_has_words_and_every_reason_too() -> None:
    assert set(_WORDS) == set(ATTRIBUTES)
    assert all(reason.words for reason in NotSteered)
