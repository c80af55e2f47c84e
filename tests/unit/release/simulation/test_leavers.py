"""People who leave a version that they cannot stand: `returned` stops it, and equal versions ship as before."""

from collections import Counter

from benchmarks.release.leavers import EQUAL, METRICS, World, after_two_days, falsely_worse, followed

RUNS = range(5)


def test_a_version_that_drives_away_one_user_in_ten_is_blocked():
    assert Counter(after_two_days(World(), seed) for seed in RUNS) == {"block": 5}


def test_by_metrics_over_turns_it_ships():
    assert Counter(after_two_days(World(), seed, METRICS[:1]) for seed in RUNS)["ship"] >= 4


def test_equal_versions_ship():
    assert Counter(after_two_days(EQUAL, seed) for seed in RUNS)["ship"] >= 4


def test_a_trial_that_ships_before_a_day_is_over_does_not_wait_for_it_and_is_taken_back():
    shipped = next(run for run in (followed(World(), seed, days=3) for seed in RUNS) if run.shipped_h is not None)
    assert shipped.shipped_h < 48.0
    assert shipped.end == "roll_back"
    assert shipped.why.startswith(("returned worse: -", "fewer of the candidate's users came back"))


def test_equal_versions_are_hardly_ever_found_worse_without_any_tolerance():
    assert not any(falsely_worse(seed) for seed in range(8))
