"""What is expected of a rate: of everybody, of a decile, and of people who are seen last."""

import json

import numpy as np
import pytest

from ostinato.release.monitors.detection.reference import ArmReference, FixedReference, Level
from ostinato.release.monitors.detection.sessions import Activity


def seen(sessions, memory=50.0):
    reference = ArmReference(level=Level(memory=memory))
    for mean, decile in sessions:
        reference.observe(mean, decile)
    return reference


def test_a_decile_is_expected_to_differ_from_all_as_it_did():
    rng = np.random.default_rng(1)
    deciles = rng.integers(0, 2, 4000)
    reference = seen([(float(rng.random() < (0.8 if decile else 0.2)), int(decile)) for decile in deciles])
    everybody, low, high = (reference.expected(decile) for decile in (None, 0, 1))
    assert everybody.low < 0.5 < everybody.high
    assert low.high < everybody.middle < high.low
    assert low.middle == pytest.approx(0.2, abs=0.15)
    assert high.middle == pytest.approx(0.8, abs=0.15)


def test_nothing_is_expected_of_what_was_hardly_seen():
    reference = seen([(1.0, 3)] * 49)
    assert reference.expected(None) is None
    reference.observe(1.0, 3)
    assert reference.expected(None) is not None
    assert reference.expected(3) is None  # a decile is learned once the mean is known, and longer
    for _ in range(99):
        reference.observe(1.0, 3)
    assert reference.expected(3) is None
    reference.observe(1.0, 3)
    assert reference.expected(3) is not None
    assert reference.expected(4) is None


def test_who_is_unseen_for_longest_is_forgotten_first():
    activity = Activity(most=2, a_day=1)
    assert activity.see(("t", "ann"), 10.0)[0]
    activity.see(("t", "bob"), 11.0)
    activity.see(("t", "cai"), 12.0)  # ann goes
    assert len(activity) == 2
    assert not activity.see(("t", "bob"), 13.0)[0]  # known: had their turn today
    assert not activity.see(("t", "cai"), 14.0)[0]
    assert activity.see(("t", "ann"), 15.0)[0]


def test_a_saved_reference_goes_on_where_it_was():
    rng = np.random.default_rng(2)
    arm, fixed = seen([], memory=20.0), FixedReference(short=Level(memory=20.0))
    for number in range(300):
        mean = float(rng.random() < 0.3)
        for each in (arm, ArmReference.from_json(json.loads(json.dumps(arm.to_json())))):
            each.observe(mean, number % 10)
        again = FixedReference.from_json(json.loads(json.dumps(fixed.to_json())))
        for each in (fixed, again):
            each.observe(mean, 60.0 * number, sessions=100, seconds=3_600.0)
        assert again == fixed
        assert ArmReference.from_json(json.loads(json.dumps(arm.to_json()))) == arm
    assert fixed.expected().low < 0.3 < fixed.expected().high
