"""The watch on session length: what a prolonged or shortened session shows, against whom, and that equal arms show nothing."""

import json
from copy import deepcopy
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from ostinato.core.notices import AlarmState, Forgotten
from ostinato.core.records import Arm, Pick, PolicyVersion, Purpose, ReleaseEvent, Reward
from ostinato.release.monitors.config import DAY, MonitorsConfig
from ostinato.release.monitors.influence import Owner
from ostinato.release.monitors.monitors import Monitors
from ostinato.release.monitors.session_length import SESSION_LENGTH, SESSION_LENGTH_PREVIOUS, SessionLengthWatch
from ostinato.release.monitors.watcher import acceptable, acceptance
from ostinato.testing.records import a_turn

CONFIG = MonitorsConfig()
NAMES = {Arm.CONTROL: SESSION_LENGTH, Arm.PREVIOUS: SESSION_LENGTH_PREVIOUS}


def served(watch, rng, more, *, first=0, count=6, crowd=400, beside=Arm.CONTROL, rewarded=0.5, **fields):
    """Days on which everybody comes for a session of 1 + Poisson(3) turns, on live (four of five) of 1 + Poisson(3 + more)."""
    told = []
    for day in range(first, first + count):
        for number in range(crowd):
            arm = beside if number % 5 == 0 else Arm.LIVE
            for part in range(1 + rng.poisson(3.0 + more * (arm is Arm.LIVE))):
                at = (day + number / crowd) * DAY + 30.0 * part
                name = f"{day}:{number}:{part}"
                turn = a_turn(name, user=f"u{number}", arm=arm, ended_at=at, propensity=0.5, **fields)
                told += watch.turn(turn)
                owner = Owner(person=turn.person, episode="e", live=arm is Arm.LIVE, control=arm is Arm.CONTROL)
                value = 1.0 if rng.random() < rewarded else -1.0
                watch.reward(Reward(turn=turn.id, value=value, function="f@1", signals=("s",), at=at), owner)
    return told


@cache
def _longer():
    watch = SessionLengthWatch(CONFIG)
    (raised,) = served(watch, np.random.default_rng(0), 2.0)
    return watch, raised


def once_longer():
    """A watch that has told of longer sessions, and the alarm; a copy for each test, since it changes with what it is shown."""
    return deepcopy(_longer())


def went_live(number, at):
    policy = PolicyVersion(number=number, hash=f"{number:02}" * 16)
    return ReleaseEvent(id=f"s{number}", action="shipped", policy=policy, previous=None, reason="", detail={}, at=at)


@pytest.mark.parametrize("beside", [Arm.CONTROL, Arm.PREVIOUS])
@pytest.mark.parametrize("more", [2.0, -1.5])
def test_longer_and_shorter_sessions_are_told_with_what_they_bring_and_pause_nothing(beside, more):
    watch, rng = SessionLengthWatch(CONFIG), np.random.default_rng(0)
    if (more, beside) == (2.0, Arm.CONTROL):
        watch, raised = once_longer()
    else:
        (raised,) = served(watch, rng, more, beside=beside)
    assert (raised.name, raised.state, raised.detail["pauses"]) == (NAMES[beside], AlarmState.RAISED, False)
    assert raised.detail["against"] == beside
    assert np.sign(raised.detail["difference"]) == np.sign(more)
    assert abs(raised.detail["difference"]) > 0.2
    live, others = raised.detail["positive_rewards"]
    assert live == pytest.approx((4.0 + more) / 2, abs=0.4)
    assert others == pytest.approx(2.0, abs=0.4)
    assert ("more" if more > 0 else "fewer") + " turns than those of" in raised.reason
    assert f"on {beside}" in raised.reason
    assert watch.standing == [NAMES[beside]]
    assert acceptable(NAMES[beside])


@pytest.mark.parametrize("beside", [Arm.CONTROL, Arm.PREVIOUS])
def test_equal_arms_show_nothing(beside):
    for seed in range(1, 5):
        watch, rng = SessionLengthWatch(CONFIG), np.random.default_rng(seed)
        assert served(watch, rng, 0.0, count=7, crowd=150, beside=beside) == []


def test_a_session_ends_with_a_pause_and_an_endless_one_counts_as_one():
    watch = SessionLengthWatch(CONFIG)
    for at in (0.0, 60.0, 300.0, 2_000.0):
        turn = replace(a_turn(f"t{at}", user="ann", arm=Arm.CONTROL, ended_at=at), propensity=0.5)
        assert list(watch.turn(turn)) == []
    ((_, ann),) = watch._crowds[Arm.CONTROL]
    assert (ann.count, ann.turns) == (2.0, 1.0)
    assert ann.total == pytest.approx(np.log(3) / np.log(256))
    for number in range(2_000):
        ann.visit(a_turn(f"x{number}", user="ann", arm=Arm.CONTROL, ended_at=2_001.0 + number), 600.0, 24)
    assert (ann.count, ann.total) == (2.0, pytest.approx(np.log(3) / np.log(256) + 1.0)), "a program's is a long one"
    for number in range(100):
        ann.visit(a_turn(f"y{number}", user="ann", arm=Arm.CONTROL, ended_at=1e4 * (number + 2)), 600.0, 24)
    assert ann.count == 24.0, "no more of a person than turns_a_day"


def test_only_people_dealt_by_chance_their_tasks_and_the_time_of_both_arms_count():
    rng = np.random.default_rng(3)
    side_calls = SessionLengthWatch(CONFIG)
    assert served(side_calls, rng, 5.0, count=2, purpose=Purpose.SIDE) == []
    assert [len(crowd) for crowd in side_calls._crowds.values()] == [0, 0]
    by_auto = SessionLengthWatch(CONFIG)
    assert served(by_auto, rng, 5.0, count=2, auto=Pick(arm="live", odds={"live": 0.8, "control": 0.2})) == []
    assert [len(crowd) for crowd in by_auto._crowds.values()] == [0, 0], "its shares follow the reward"
    alone = SessionLengthWatch(CONFIG)
    turns = [a_turn(f"t{n}", user=f"u{n}", arm=Arm.LIVE, ended_at=60.0 * n) for n in range(1_000)]
    for turn in turns:
        assert list(alone.turn(turn)) == []
    assert [len(crowd) for crowd in alone._crowds.values()] == [0, 0], "nobody is on another arm"
    list(alone.turn(replace(turns[0], arm=Arm.PREVIOUS, user="bob", propensity=0.1)))
    for hours in (1, 5, 12):
        later = replace(
            turns[0], user=f"c{hours}", started_at=3_600.0 * hours, ended_at=3_600.0 * hours, propensity=0.9
        )
        list(alone.turn(later))
    assert {user for (_, user), _ in alone._crowds[Arm.PREVIOUS]} == {"bob", "c1", "c5"}
    list(alone.turn(replace(turns[0], user="bob", propensity=0.9)))
    assert not dict(alone._crowds[Arm.PREVIOUS])["default", "bob"].treated, "who moves to live stays where they began"
    alone.forget(Forgotten(id="f", tenant="default", user="bob", key=1, at=0.0))
    assert len(alone._crowds[Arm.PREVIOUS]) == 2


def test_it_goes_on_from_its_state_ends_after_a_clear_week_and_what_is_accepted_is_tolerated():
    (watch, raised), rng = once_longer(), np.random.default_rng(5)
    again = SessionLengthWatch(CONFIG)
    again.restore(json.loads(json.dumps(watch.snapshot())))
    assert again.snapshot() == watch.snapshot()
    (cleared,) = served(watch, rng, 0.0, first=7, count=8, crowd=120)
    assert cleared.state is AlarmState.CLEARED
    again.alarm(acceptance(raised, "ann", 7 * DAY))
    assert again.standing == []
    again.gaps[Arm.CONTROL].tolerated += 0.1  # of what it found by chance
    assert served(again, rng, 2.0, first=7, crowd=300) == []


@pytest.mark.parametrize("accepted", [False, True])
def test_an_alarm_beside_control_hides_no_difference_from_the_release_before(accepted):
    (watch, raised), rng = once_longer(), np.random.default_rng(7)
    if accepted:
        watch.alarm(acceptance(raised, "ann", 6 * DAY))
    found = served(watch, rng, -1.5, first=7, beside=Arm.PREVIOUS)
    assert [(each.name, each.state) for each in found if each.detail] == [(SESSION_LENGTH_PREVIOUS, AlarmState.RAISED)]
    assert "fewer turns" in found[-1].reason
    watch.alarm(acceptance(found[-1], "ann", 14 * DAY))
    assert SESSION_LENGTH_PREVIOUS not in watch.standing
    assert (watch.gaps[Arm.CONTROL].tolerated_below, watch.gaps[Arm.PREVIOUS].tolerated) == (0.02, 0.02)


@pytest.mark.parametrize("known", ["standing", "accepted", "from the log"])
def test_longer_sessions_that_were_told_hide_no_shorter_ones(known):
    (watch, longer), rng = once_longer(), np.random.default_rng(8)
    if known == "accepted":
        watch.alarm(acceptance(longer, "ann", 6 * DAY))
    elif known == "from the log":
        watch = SessionLengthWatch(CONFIG)
        watch.begin({longer.name: longer})
    (shorter,) = served(watch, rng, -1.5, first=7)
    assert (shorter.name, shorter.state) == (SESSION_LENGTH, AlarmState.RAISED)
    assert longer.detail["difference"] > 0 > shorter.detail["difference"]
    assert served(watch, rng, -1.5, first=14, count=2) == [], "which is no news then"


@pytest.mark.parametrize("few", [4, 12])
def test_a_handful_of_people_who_happen_to_be_alike_show_nothing(few):
    watch, told = SessionLengthWatch(CONFIG), []
    for day in range(6):
        for number in range(few * 20):
            arm = Arm.CONTROL if number % 20 == 0 else Arm.LIVE
            for part in range(3 + (day == 0 and number % 40 == 0) if arm is Arm.CONTROL else 3 + number % 7):
                at = (day + number / (few * 20)) * DAY + 30.0 * part
                name = f"{day}:{number}:{part}"
                told += watch.turn(a_turn(name, user=f"u{number}", arm=arm, ended_at=at, propensity=0.5))
    assert len(told) == (few >= 8)


def test_through_the_monitors_each_release_begins_the_count_beside_the_one_before_anew():
    monitors, rng, seq, told = Monitors(CONFIG, ()), np.random.default_rng(6), 0, []
    for day in range(8):
        if day in (0, 4):
            monitors.apply(seq, went_live(day, day * DAY))
            assert len(monitors._lengths._crowds[Arm.PREVIOUS]) == 0
        for number in range(300):
            arm = (Arm.PREVIOUS, Arm.LIVE, Arm.LIVE, Arm.LIVE)[number % 4]
            longer = 4.0 * (day >= 4 and arm is Arm.LIVE)
            for part in range(1 + rng.poisson(3.0 + longer)):
                turn = a_turn(
                    f"{day}:{number}:{part}",
                    user=f"u{number}",
                    arm=arm,
                    ended_at=(day + number / 300) * DAY + 30 * part,
                    propensity=0.5,
                )
                seq += 1
                told += [(day, alarm.name) for alarm in monitors.apply(seq, turn)]
    assert len(told) == 1
    assert (told[0][0] >= 4, told[0][1]) == (True, SESSION_LENGTH_PREVIOUS)
    assert monitors.standing == [SESSION_LENGTH_PREVIOUS]
    assert not monitors.paused
    again = Monitors(CONFIG, ())
    assert again.restore(json.loads(json.dumps(monitors.snapshot())))
    assert again.standing == [SESSION_LENGTH_PREVIOUS]
