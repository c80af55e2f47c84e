"""Pauses after rollbacks: by the ledger's times alone."""

from ostinato.release.pace import DAY, RolledBack, brake


def at(*times, by_itself=True):
    return [RolledBack(at=time, by_itself=by_itself) for time in times]


def held(rollbacks, now, *, a_day=1, cooldown_s=100.0):
    found = brake(rollbacks, cooldown_s=cooldown_s, a_day=a_day, now=now)
    return None if found is None else (found.until, found.reason.partition(" (")[0].partition(":")[0])


COOLING = "after a rollback nothing ships by itself for a while"


def test_nothing_holds_without_a_rollback_or_after_the_pause():
    assert held([], 0.0) is None
    assert held(at(10.0), 110.0) is None
    assert held(at(10.0), 60.0, cooldown_s=0.0) is None


def test_the_pause_counts_from_the_last_rollback_whoever_asked_for_it():
    assert held(at(10.0), 109.0) == (110.0, COOLING)
    assert held([*at(10.0), *at(50.0, by_itself=False)], 120.0) == (150.0, COOLING)


def test_more_than_so_many_a_day_hold_until_a_person_ends_it():
    frozen = (None, "more automatic rollbacks within a day than release.rollbacks_a_day = 1 allows")
    assert held(at(0.0, 1_000.0), 1_001.0) == frozen
    assert held(at(0.0, 1_000.0), 30 * DAY) == frozen, "a day that passes is no person"
    assert held(at(0.0, 1_000.0, 5 * DAY), 5 * DAY + 200) == frozen
    assert held(at(0.0, 1_000.0, 2_000.0), 1e6, a_day=2)[0] is None
    assert held(at(0.0), 1.0, a_day=0)[0] is None


def test_a_day_apart_or_by_a_persons_hand_they_are_not_too_many():
    assert held(at(0.0, DAY), DAY + 200.0) is None
    assert held([*at(0.0), *at(1_000.0, by_itself=False)], 2_000.0) is None


def test_a_rollback_that_a_wrong_clock_wrote_far_ahead_holds_nothing():
    assert held(at(1e6), 10.0) is None
    assert held(at(50.0), 10.0) == (150.0, COOLING), "of two processes' clocks one may be a little ahead"
