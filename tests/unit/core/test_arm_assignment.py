"""A person's place: the same for ever, spread evenly, and never shared by two people whose names run together. Whose answers could lean."""

from dataclasses import replace

import pytest

from ostinato.core.arm_assignment import ANONYMOUS, could_lean, dealing_key, place_of
from ostinato.core.records import Arm, Purpose
from ostinato.testing.records import a_turn

PLACE_OF_ANN = 0.7905285241623224


def test_a_persons_place_never_changes():
    """The literal holds who is in which arm: whoever changes the hash deals every user of every product anew."""
    assert place_of(dealing_key("ostinato"), "default", "ann") == PLACE_OF_ANN
    assert place_of(dealing_key("another"), "default", "ann") != PLACE_OF_ANN


def test_places_are_spread_evenly():
    key = dealing_key("salt")
    places = sorted(place_of(key, "default", f"u{n}") for n in range(2_000))
    assert max(abs(place - n / 2_000) for n, place in enumerate(places)) < 0.04  # Kolmogorov and Smirnov at p < 0.003
    assert 0.0 <= places[0] < places[-1] < 1.0


def test_names_that_run_together_are_different_people():
    key = dealing_key("salt")
    assert place_of(key, "ab", "c") != place_of(key, "a", "bc")


@pytest.mark.parametrize("arm", Arm)
@pytest.mark.parametrize("purpose", Purpose)
def test_dials_could_move_answers_for_people_to_their_tasks_outside_the_control_arm(arm, purpose):
    turn = replace(a_turn(arm=arm, version=3), purpose=purpose)
    people = arm not in (Arm.CONTROL, Arm.EVAL, Arm.WORLD, Arm.OUTSIDE)
    assert could_lean(turn, {turn.versions[0].hash}) is (people and purpose in (Purpose.TASK, Purpose.SUBAGENT))


def test_no_answer_leans_without_a_basis_under_a_grammar_or_to_nobody():
    turn = a_turn(version=3)
    bases = {turn.versions[0].hash}
    assert could_lean(turn, bases)
    assert not could_lean(turn, {a_turn(version=4).versions[0].hash})
    assert not could_lean(replace(turn, user=ANONYMOUS), bases)
    assert not could_lean(replace(turn, sampling=replace(turn.sampling, grammar='start: "a"')), bases)
