"""What the watcher says of each call's lines is the truth, which is known by construction: scripted people in real repositories."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.fakes.coding_world import PEOPLE, World, play


@pytest.mark.parametrize("often", PEOPLE)
@settings(max_examples=2, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.randoms(use_true_random=False), st.integers(3, 7))
def test_survival_is_the_truth_line_by_line_and_call_by_call(often, random, steps):
    with tempfile.TemporaryDirectory() as place, World(Path(place), random) as world:
        play(world, steps, [often])
        told = {(event.target, event.name): event.value for event in world.events.values()}
        truth = {
            (call.id, name): kept / call.written
            for call in world.calls
            if call.written
            for name, kept in call.expected.items()
        }
        assert told == truth
