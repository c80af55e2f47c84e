"""Who is never learned from, how far they and the others part, and the alarm about it."""

import json

import numpy as np
import pytest

from ostinato.core.records import AlarmState, Arm, Reward
from ostinato.release.monitors.accepting import acceptance
from ostinato.release.monitors.config import MonitorsConfig
from ostinato.release.monitors.gap import NAME, GoldWatch, gold_people, is_gold, proxy_gap
from ostinato.release.monitors.owners import Owner, TurnOwners
from ostinato.testing.records import a_turn

HOUR, DAY = 3_600.0, 86_400.0
CONFIG = MonitorsConfig(gold=0.2)


def gold(tenant, user):
    return is_gold(tenant, user, share=0.2, salt="gold")


def people(rng, count, taught, held_back):
    """Tallies of people who are pleased with these probabilities, by whether they teach. Tastes differ between people."""
    found = {}
    for number in range(count):
        person = ("t", f"u{number}")
        turns, mean = int(rng.integers(1, 30)), held_back if gold(*person) else taught
        found[person] = (float(rng.binomial(turns, rng.beta(5 * mean, 5 * (1 - mean)))), float(turns))
    return found


def test_gold_is_a_stable_share_that_only_grows_and_tells_tenants_apart():
    names = [f"u{number}" for number in range(5_000)]
    small = {name for name in names if is_gold("t", name, share=0.1, salt="gold")}
    large = {name for name in names if is_gold("t", name, share=0.3, salt="gold")}
    assert abs(len(small) - 500) < 90
    assert small < large
    assert small != {name for name in names if is_gold("other", name, share=0.1, salt="gold")}
    assert small != {name for name in names if is_gold("t", name, share=0.1, salt="another")}
    assert not any(is_gold("t", name, share=0.0, salt="gold") for name in names)


def test_a_tenants_name_does_not_run_into_its_users():
    differs = [
        is_gold(f"a{n}", "b", share=0.5, salt="s") != is_gold("a", f"{n}b", share=0.5, salt="s") for n in range(50)
    ]
    assert any(differs)


def test_the_settings_say_who_is_gold():
    assert not any(gold_people(MonitorsConfig())("t", f"u{n}") for n in range(200))
    assert not any(gold_people(MonitorsConfig(gold=0.2, enabled=False))("t", f"u{n}") for n in range(200))
    chosen = gold_people(CONFIG)
    assert [chosen("t", f"u{n}") for n in range(200)] == [gold("t", f"u{n}") for n in range(200)]


def test_the_gap_is_found_where_those_who_teach_are_pleased_more():
    found = proxy_gap(people(np.random.default_rng(0), 1_000, 0.7, 0.5), gold, 0.02)
    assert found is not None
    assert 0.05 < found.lower < found.mean
    assert found.mean == pytest.approx(0.2, abs=0.07)
    assert found.taught_by + found.gold == 1_000
    assert 150 < found.gold < 250


def test_equal_groups_part_as_seldom_as_is_asked_for_however_often_one_looks():
    """Ten looks at growing crowds: the bound may lie above the truth at any of them in 10% of runs."""
    rng = np.random.default_rng(1)
    above = 0
    for _ in range(60):
        crowd = list(people(rng, 400, 0.6, 0.6).items())
        looks = [proxy_gap(dict(crowd[: 40 * n]), gold, 0.1) for n in range(1, 11)]
        above += any(look is not None and look.lower > 0.0 for look in looks)
    assert above <= 10


def test_with_few_people_on_a_side_nothing_is_said():
    rng = np.random.default_rng(2)
    assert proxy_gap(people(rng, 60, 0.9, 0.1), gold, 0.02) is None
    assert proxy_gap({("t", f"u{number}"): (0.0, 0.0) for number in range(1_000)}, gold, 0.02) is None
    assert proxy_gap({}, gold, 0.02) is None


def days(watch, rng, taught, held_back, *, first, count, crowd=500):
    """Everybody takes four turns a day; the alarms of `count` days."""
    told = []
    for day in range(first, first + count):
        for turn in range(4 * crowd):
            person = ("t", f"u{turn % crowd}")
            value = 1.0 if rng.random() < (held_back if gold(*person) else taught) else -1.0
            at = day * DAY + turn * DAY / (4 * crowd)
            owner = Owner(person=person, episode="e", live=True)
            told += watch.reward(Reward(turn="x", value=value, function="f@1", signals=(), at=at), owner)
    return told


def test_a_policy_that_pleases_only_those_who_teach_raises_an_alarm_and_the_end_of_it_clears_it():
    rng, watch = np.random.default_rng(5), GoldWatch(CONFIG)
    assert days(watch, rng, 0.6, 0.6, first=0, count=2) == []
    (raised,) = days(watch, rng, 0.75, 0.55, first=2, count=5)
    assert (raised.name, raised.state, raised.detail["pauses"]) == (NAME, AlarmState.RAISED, True)
    assert raised.detail["lower"] > 0.02
    assert "people whose feedback is learned from are pleased more often than" in raised.reason
    assert watch.standing == [NAME]
    again = GoldWatch(CONFIG)
    again.restore(json.loads(json.dumps(watch.snapshot())))
    assert again.standing == [NAME]
    (cleared,) = days(again, rng, 0.6, 0.6, first=7, count=8)
    assert cleared.state is AlarmState.CLEARED
    assert again.standing == []


def test_without_gold_people_who_please_alike_there_is_no_alarm():
    rng, watch = np.random.default_rng(6), GoldWatch(CONFIG)
    assert days(watch, rng, 0.7, 0.7, first=0, count=7) == []


def test_what_a_person_accepts_is_tolerated_from_then_on_and_no_more():
    rng, watch = np.random.default_rng(7), GoldWatch(CONFIG)
    (raised,) = days(watch, rng, 0.75, 0.6, first=0, count=4)
    watch.alarm(acceptance(raised, "ann", 9.0))
    assert watch.standing == []
    assert days(watch, rng, 0.75, 0.6, first=4, count=3) == []
    assert days(watch, rng, 0.95, 0.5, first=7, count=5)


def test_other_arms_and_turns_that_nobody_remembers_do_not_count():
    watch, owners = GoldWatch(CONFIG), TurnOwners(most=2)
    for number, arm in enumerate((Arm.CONTROL, Arm.LIVE, Arm.LIVE)):
        owners.see(a_turn(f"t{number}", user=f"u{number}", arm=arm))
    assert len(owners) == 2
    assert owners.get("t0") is None
    elsewhere = Owner(person=("t", "u0"), episode="e", live=False)
    for owner in (owners.get("t0"), elsewhere):
        for n in range(200):
            row = Reward(turn="t0", value=1.0, function="f@1", signals=(), at=n * HOUR)
            assert list(watch.reward(row, owner)) == []
    assert watch.snapshot()["people"] == []


def test_switching_gold_off_clears_what_stood():
    watch = GoldWatch(MonitorsConfig())
    watch.begin({NAME: next(iter(days(GoldWatch(CONFIG), np.random.default_rng(5), 0.9, 0.5, first=0, count=3)))})
    assert watch.standing == [NAME]
    (row,) = watch.reward(Reward(turn="x", value=1.0, function="f@1", signals=(), at=1.0), None)
    assert row.state is AlarmState.CLEARED
