"""The probe's AUC is what it is called, however features are scaled and whichever side comes first."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.lookalikes import episodes, observed

from ostinato.core.errors import BadRequest
from ostinato.worlds.fidelity.observation import Observation, columns_of, deal_folds, parse_observation
from ostinato.worlds.fidelity.paired import match_prompts
from ostinato.worlds.fidelity.probe import tell_apart

FEATURES = st.dictionaries(
    st.text(min_size=1, max_size=8),
    st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=8)),
    max_size=6,
)


@given(st.text(max_size=8), FEATURES, st.text(max_size=8))
def test_a_line_is_read_back(group, features, asked):
    seen = Observation(group=group, features=features, asked=asked)
    assert parse_observation(seen.line()) == seen


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.0, 1.5))
def test_monotone_rescaling_changes_nothing(seed, shift):
    sides = observed(seed, "p", 12), observed(seed, "s", 12, shift=shift)
    scaled = [
        [
            Observation(
                group=each.group,
                features={
                    name: value if isinstance(value, str) else float(np.exp(3.0 * value))
                    for name, value in each.features.items()
                },
            )
            for each in side
        ]
        for side in sides
    ]
    first, second = (tell_apart(*both, permutations=0, resamples=50) for both in (sides, scaled))
    assert first.auc == pytest.approx(second.auc, abs=1e-9)
    own = {tell.name: tell.auc for tell in first.tells if "middle" not in tell.name}
    assert own == {tell.name: tell.auc for tell in second.tells if "middle" not in tell.name}


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 30), st.integers(2, 30), st.integers(1, 4))
def test_a_group_lies_in_one_fold_and_each_fold_has_of_both_sides(seed, first, second, each):
    found = columns_of(observed(seed, "p", first, each), observed(seed, "s", second, each))
    fold_N = deal_folds(found.groups_N, found.label_N, 5, np.random.default_rng(seed))
    for group in set(found.groups_N.tolist()):
        assert len(set(fold_N[found.groups_N == group].tolist())) == 1
    for side, groups in ((1, first), (0, second)):
        counts = np.bincount(fold_N[found.label_N == side], minlength=5) / each
        assert counts.max() - counts.min() <= 1
        assert counts.sum() == groups


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10_000))
def test_columns_are_standardised_and_no_two_are_alike(seed):
    found = columns_of(observed(seed, "p", 10, 2), observed(seed, "s", 10, 2, tell=0.5))
    assert np.allclose(found.values_NC.mean(axis=0), 0.0, atol=1e-9)
    assert np.allclose(found.values_NC.std(axis=0), 1.0)
    likeness_CC = np.abs(found.values_NC.T @ found.values_NC / len(found.values_NC))
    assert (likeness_CC - np.eye(len(likeness_CC))).max() < 1.0 - 1e-9


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 30), st.integers(1, 30), st.floats(0.0, 8.0))
def test_matched_sides_have_the_same_prompts_and_nothing_twice(seed, first, second, popular):
    production, simulation = episodes(seed, "p", first, 3, popular=popular, prompts=60), episodes(seed, "s", second, 4)
    asked = [Counter(each.asked for each in side) for side in (production, simulation)]
    shared = asked[0] & asked[1]  # of each prompt the smaller number
    if not shared:
        with pytest.raises(BadRequest):
            match_prompts(production, simulation, seed=seed)
        return
    found = match_prompts(production, simulation, seed=seed)
    assert [each.asked for each in found.production] == [each.asked for each in found.simulation]
    assert Counter(each.asked for each in found.production) == shared
    assert found.prompts == len(shared)
    for kept, side, left in zip(
        (found.production, found.simulation), (production, simulation), found.left_out, strict=True
    ):
        assert len({id(each) for each in kept}) == len(kept) == len(side) - left
        assert {id(each) for each in kept} <= {id(each) for each in side}
    assert found == match_prompts(production, simulation, seed=seed)
