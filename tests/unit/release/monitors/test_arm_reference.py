"""What is expected of a rate: of everybody, of a decile, and of people who are seen last."""

import json

import numpy as np
import pytest

from ostinato.release.monitors.behaviour import Activity
from ostinato.release.monitors.detector import Detector, thresholds
from ostinato.release.monitors.rates import Shift
from ostinato.release.monitors.reference import ArmReference, FixedReference, Level, plausible


def seen(sessions, memory=50.0):
    reference = ArmReference(level=Level(memory=memory))
    for mean, decile in sessions:
        reference.observe(mean, decile)
    return reference


def of_sessions(rng, share, events, count, rho=0.05):
    """Means of sessions whose events are correlated."""
    share_S = rng.beta(share * (1 - rho) / rho, (1 - share) * (1 - rho) / rho, count)
    return (rng.binomial(events, share_S) / events).tolist()


@pytest.mark.parametrize(
    ("share", "events"), [(0.005, 6), (0.01, 8), (0.02, 3), (0.06, 8), (0.3, 3), (0.6, 8), (0.99, 8)]
)
def test_the_truth_is_beyond_what_is_expected_as_seldom_of_a_rare_behaviour_as_of_a_common_one(share, events):
    """With one of the mean's own errors it was so in 16% of references where the rate is common and in up to 29% where it is rare."""
    rng, beyond, runs = np.random.default_rng(4), {"above": 0, "below": 0}, 400
    for _ in range(runs):
        expected = seen([(mean, None) for mean in of_sessions(rng, share, events, 100)], memory=100.0).expected(None)
        beyond["above"] += share > expected.high
        beyond["below"] += share < expected.low
    assert max(beyond.values()) <= 0.15 * runs, "1.25 standard errors on either side: 10.6%"


def test_a_rare_behaviour_that_the_reference_did_not_see_is_no_shift():
    """A hundred sessions show none of what one turn in two hundred does in a tenth of all cases: four hundred that do are as usual."""
    h = thresholds(125_000.0, 16, {Shift.UP}, everybody=True)
    expected = seen([(0.0, None)] * 100, memory=100.0).expected(None)
    for seed in range(40):
        detector = Detector()
        for mean in of_sessions(np.random.default_rng(seed), 0.005, 6, 400):
            assert detector.observe(mean, {"t": mean}, expected, h=h) is None


def test_what_is_plausible_lies_so_many_errors_of_its_own_from_what_was_seen():
    for mean in (0.0, 0.004, 0.3, 0.5, 0.98, 1.0):
        low, high = plausible(mean, 80.0, 1.5)
        assert 0.0 <= low <= mean <= high <= 1.0
        for end in {low, high} - {0.0, 1.0}:
            assert abs(end - mean) == pytest.approx(1.5 * (end * (1 - end) / 80.0) ** 0.5)


def test_sessions_whose_turns_are_alike_say_no_more_than_one_turn():
    independent, alike = Level(memory=2_000.0), Level(memory=2_000.0)
    rng = np.random.default_rng(5)
    for _ in range(2_000):
        independent.observe(float(rng.binomial(8, 0.3)) / 8)
        alike.observe(float(rng.random() < 0.3))
    assert independent.dispersion == pytest.approx(1 / 8, rel=0.1)
    assert alike.dispersion == pytest.approx(1.0, rel=0.01)


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
