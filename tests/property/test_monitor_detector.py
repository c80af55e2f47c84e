"""The behaviour monitors: as few false alarms as promised, the same alarms wherever a reader begins again, bounded whatever comes."""

import json
import math
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.core.records import Arm
from ostinato.release.monitors.behaviour import Activity, OpenSessions
from ostinato.release.monitors.config import MonitorsConfig
from ostinato.release.monitors.detector import EXAMPLES, Detector, ExpectedRange, Gambler, ReturnTest, thresholds
from ostinato.release.monitors.monitors import Monitors
from ostinato.release.monitors.rates import BUILT_IN, Shift
from ostinato.release.monitors.reference import ArmReference, FixedReference, Level
from ostinato.release.monitors.watcher import rates_of
from ostinato.testing.records import a_turn

unit = st.floats(0, 1)
CONFIG = MonitorsConfig(
    false_alarm_sessions=3.0, false_comfort_sessions=3.0, session_turns=3, reference=("control",), reference_sessions=30.0,
    stale_sessions=15, least_people=2,
    off=tuple(BUILT_IN.keys() - {"question", "edit", "praise"}),
    turns_a_day=10_000, most_people=60, most_sessions=12,
)  # fmt: skip
TEXTS = ("Sorted.", "Which one?", "```python\na = 1\nb = 2\nc = 3\n```", "Great question! Done.", "")


def either(h):
    return dict.fromkeys(Shift, h)


def sessions(rng, share, rho, events, count):
    """Means of sessions of so many events that are correlated within one."""
    share_S = rng.beta(share * (1 - rho) / rho, (1 - share) * (1 - rho) / rho, count)
    return rng.binomial(events, share_S) / events


def alarms_of(mean_S, expected, h):
    detector = Detector()
    return sum(detector.observe(mean, {"t": mean}, expected, h=either(h)) is not None for mean in mean_S)


def test_false_alarms_stay_below_the_promised_rate_although_events_of_a_session_are_correlated():
    """At most one alarm in exp(h) sessions and direction; the rate that is expected is the true one."""
    rng, count, h = np.random.default_rng(0), 5_000, math.log(100.0)
    for share in (0.02, 0.3, 0.6):
        expected = ExpectedRange(low=share, high=share, deviation=math.sqrt(share * (1 - share) * (0.95 / 8 + 0.05)))
        alarms = alarms_of(sessions(rng, share, 0.05, 8, count), expected, h)
        assert 0 < alarms <= 2 * count / math.exp(h), share


def test_the_threshold_shares_the_promise_between_all_tests_that_a_session_feeds():
    for harmful in (set(), {Shift.UP}, {Shift.DOWN}, {Shift.UP, Shift.DOWN}):
        groups = [thresholds(1_000.0, 16, harmful, everybody=everybody) for everybody in (True, False)]
        wrong = [math.exp(-h) for group in groups for h in group.values()]
        assert math.isclose(16 * sum(wrong), 1 / 1_000.0)
        for shift in harmful:
            assert all(group[shift] <= min(group.values()) for group in groups)
            assert groups[0][shift] < math.log(16 * 2 * 2 * 1_000.0), (
                "harm to everybody is found sooner than by even parts"
            )


def test_a_shift_is_seen_either_way_and_the_return_too():
    rng = np.random.default_rng(1)
    expected = ExpectedRange(low=0.29, high=0.31, deviation=0.19)
    for share, shift in ((0.45, Shift.UP), (0.15, Shift.DOWN)):
        detector, found, count = Detector(), None, 0
        while found is None:
            found, count = (
                detector.observe(
                    float(sessions(rng, share, 0.05, 8, 1)[0]),
                    {f"t{count}": 1.0 if shift is Shift.UP else 0.0},
                    expected,
                    h=either(15.0),
                ),
                count + 1,
            )
        assert found.shift is shift
        assert 0.05 < (found.observed - 0.3) / (share - 0.3) < 2.0
        assert count < 150
        way_back = ReturnTest(found.observed - found.expected)
        assert not any(way_back.observe(mean, expected, 1.0, 7.0) for mean in sessions(rng, share, 0.05, 8, 400))
        assert any(way_back.observe(mean, expected, 1.0, 7.0) for mean in sessions(rng, 0.3, 0.05, 8, 400))


@given(st.lists(st.tuples(unit, unit, unit, st.floats(0, 1)), max_size=60), st.floats(1, 20))
def test_no_means_and_no_expectations_break_a_bet(steps, h):
    detector = Detector()
    for number, (mean, one, other, deviation) in enumerate(steps):
        expected = ExpectedRange(low=min(one, other), high=max(one, other), deviation=deviation)
        detector.observe(mean, {f"t{number}": mean}, expected, h=either(h))
        state = detector.to_json()
        assert json.loads(json.dumps(state)) == state
        assert all(math.isfinite(log) for side in state.values() for log in (*side["sums"], *side["wins"]))
        assert all(len(side["turns"]) <= EXAMPLES for side in state.values())


@given(st.lists(unit, max_size=200), st.integers(0, 200))
def test_a_detector_goes_on_where_its_state_was_saved(means, cut):
    expected = ExpectedRange(low=0.4, high=0.5, deviation=0.1)
    whole, parted = Detector(), Detector()
    for number, mean in enumerate(means):
        if number == cut:
            parted = Detector.from_json(json.loads(json.dumps(parted.to_json())))
        turns = {f"t{number}": mean}
        assert whole.observe(mean, turns, expected, h=either(3.0)) == parted.observe(
            mean, turns, expected, h=either(3.0)
        )


@given(st.lists(unit, max_size=60), st.integers(0, 60), st.floats(-1, 1))
def test_a_way_back_goes_on_where_its_state_was_saved(means, cut, gap):
    expected = ExpectedRange(low=0.4, high=0.5, deviation=0.1)
    whole, parted = ReturnTest(gap), ReturnTest(gap)
    for number, mean in enumerate(means):
        if number == cut:
            parted = ReturnTest.from_json(json.loads(json.dumps(parted.to_json())))
        assert whole.observe(mean, expected, 1.0, 3.0) == parted.observe(mean, expected, 1.0, 3.0)
        assert whole.gap == parted.gap
    late = ReturnTest(0.3, since=5.0)
    assert not any(late.observe(0.0, expected, 5.0, 0.1) for _ in range(50)), (
        "what is older than the alarm says nothing of it"
    )
    assert any(late.observe(0.0, expected, 5.1, 0.1) for _ in range(50))


def test_a_gambler_that_lost_everything_begins_anew():
    gambler = Gambler()
    for _ in range(50):
        gambler.bet(-0.5, 0.5, 0.2)
        gambler.note(0.0, {"t": 1.0}, 0.5, 1.0, "ann")
    assert max(gambler.wins) < 0.0
    gambler.bet(0.5, 0.5, 0.2)
    assert (gambler.sessions, list(gambler.turns), gambler.people) == (0, [], [])


def test_one_person_is_no_shift_however_much_they_do():
    expected, alone, together = ExpectedRange(low=0.0, high=0.01, deviation=0.02), Detector(), Detector()
    for number in range(200):
        assert alone.observe(1.0, {"t": 1.0}, expected, h=either(15.0), person="ann", people=5) is None
        found = together.observe(1.0, {"t": 1.0}, expected, h=either(15.0), person=f"u{number}", people=5)
        assert (found is not None) == (number % 5 == 4), "the fifth person decides, and then it begins anew"


def traffic(seed, count):
    """Turns of people who change their minds: what is written drifts, so that alarms come and go."""
    rng = np.random.default_rng(seed)
    at, policy = 0.0, rng.dirichlet(np.ones(len(TEXTS)))
    for number in range(count):
        at += float(rng.exponential(60.0))
        if rng.random() < 0.01:
            policy = rng.dirichlet(np.full(len(TEXTS), 0.5))
        arm = (Arm.LIVE, Arm.CANARY, Arm.CONTROL, Arm.EVAL)[int(rng.choice(4, p=(0.6, 0.1, 0.27, 0.03)))]
        text = TEXTS[int(rng.choice(len(TEXTS), p=policy if arm is not Arm.CONTROL else None))]
        turn = a_turn(f"t{number}", user=f"u{rng.integers(80)}", arm=arm, ended_at=at)
        yield number + 1, replace(turn, text=text)


def fresh():
    return Monitors(CONFIG, rates_of(CONFIG.off, {}))


@settings(max_examples=10)
@given(st.integers(0, 10**6), st.integers(0, 500))
def test_a_reader_that_begins_again_at_any_turn_comes_to_the_same_alarms(seed, cut):
    whole, parted, alarms, again = fresh(), fresh(), [], []
    for seq, turn in traffic(seed, 500):
        if seq == cut:
            state = json.loads(json.dumps(parted.snapshot()))
            parted = fresh()
            assert parted.restore(state)
        alarms += whole.apply(seq, turn)
        again += parted.apply(seq, turn)
    assert again == alarms
    assert parted.snapshot() == whole.snapshot()
    assert len({alarm.id for alarm in alarms}) == len(alarms)


def test_such_traffic_does_raise_and_clear_alarms():
    states = {(alarm.name, alarm.state) for seed in range(3) for alarm in play(seed)}
    assert len(states) >= 4


def play(seed):
    monitors = fresh()
    return [alarm for seq, turn in traffic(seed, 500) for alarm in monitors.apply(seq, turn)]


visits = st.tuples(st.integers(0, 6), st.sampled_from(["live", "canary"]), st.floats(0, 900), st.integers(1, 2))


@settings(max_examples=40)
@given(st.lists(visits, max_size=60), st.integers(1, 4), st.integers(1, 5))
def test_each_turn_is_in_one_session_of_its_person_and_arm_and_few_are_open(steps, turns, most):
    grouping = OpenSessions(turns=turns, pause_s=600.0, most=most)
    at, closed, people = 0.0, [], {}
    for number, (user, arm, later, tenant) in enumerate(steps):
        at += later
        people[f"t{number}"] = (f"tenant{tenant}", f"u{user}", arm)
        closed += grouping.add((f"tenant{tenant}", f"u{user}"), arm, None, f"t{number}", {"edit": 1.0}, at)
        assert len(grouping) <= most
        copy = OpenSessions(turns=turns, pause_s=600.0, most=most)
        copy.restore(json.loads(json.dumps(grouping.snapshot())))
        assert copy.snapshot() == grouping.snapshot()
    closed += grouping.advance(at + 601.0)
    assert len(grouping) == 0
    found = [(turn, (session.tenant, session.user, session.arm)) for session in closed for turn in session.turns]
    assert dict(found) == people
    assert len(found) == len(people)
    assert all(1 <= len(session.turns) <= turns for session in closed)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 300), st.floats(0, 40_000)), max_size=200))
def test_activity_is_bounded_counts_so_many_turns_a_day_and_ranks_by_use(steps):
    activity, at, counted = Activity(most=100, a_day=3), 0.0, {}
    for user, later in steps:
        at += later
        counts, decile = activity.see(("t", f"u{user}"), at)
        assert len(activity) <= 100
        assert decile is None or 0 <= decile <= 9
        day = (user, int(at // 86_400))
        counted[day] = counted.get(day, 0) + counts
    if len({user for user, _ in steps}) <= 100:
        assert max(counted.values(), default=0) <= 3


def test_who_uses_it_most_is_in_the_highest_decile():
    activity, last = Activity(most=1_000, a_day=10**6), {}
    for turn in range(400):
        for user in range(100):
            if turn % (100 - user) == 0:
                last[user] = activity.see(("t", f"u{user}"), float(turn))[1]
    assert last[99] == 9
    assert last[0] <= 3  # a third of them use it as seldom


@settings(max_examples=40)
@given(st.lists(unit, min_size=1, max_size=150))
def test_what_is_expected_is_a_range_within_0_and_1_that_holds_the_mean(means):
    arm, fixed = ArmReference(level=Level(memory=50.0)), FixedReference(short=Level(memory=50.0))
    for number, mean in enumerate(means):
        arm.observe(mean, number % 10)
        fixed.observe(mean, float(number), sessions=60, seconds=100.0)
    assert (arm.expected(None) is None) == (len(means) < 50)
    assert fixed.expected() is None or len(means) >= 101
    for found in (arm.expected(None), arm.expected(3), fixed.expected()):
        if found is not None:
            assert 0.0 <= found.low <= found.high <= 1.0
            assert found.deviation > 0.0
    assert ArmReference.from_json(json.loads(json.dumps(arm.to_json()))) == arm
    assert FixedReference.from_json(json.loads(json.dumps(fixed.to_json()))) == fixed
