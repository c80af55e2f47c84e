"""One trial: what ramps, ships, stops and waits, and what never does."""

import dataclasses

import numpy as np
import pytest

from ostinato.release.metrics.config import MetricConfig
from ostinato.release.metrics.metric import metrics_of
from ostinato.release.trial.config import HOUR, TrialConfig
from ostinato.release.trial.contrast import TimeSlot
from ostinato.release.trial.trial import Trial
from ostinato.release.trial.verdict import NextAction, read

CONFIG = TrialConfig(better_after_s=4 * HOUR)


class Users:
    """Simulated users of one taste, dealt anew by the share that the trial asks for."""

    def __init__(self, count, effect, *, seed=0, turns=4, lost=0.0):
        self.rng, self.count, self.effect, self.turns, self.lost = (
            np.random.default_rng(seed),
            count,
            effect,
            turns,
            lost,
        )
        self.place, self.taste = self.rng.random(count), self.rng.beta(3.4, 2.3, count)

    def slot(self, share, number=0):
        treated = self.place < share
        came = self.rng.random(self.count) < np.where(treated, 0.3 * (1 - self.lost), 0.3)
        chance = np.clip(self.taste + self.effect * treated, 0, 1)[came]
        people = np.flatnonzero(came)
        return TimeSlot(
            day=number // 48,
            people_R=people,
            turns_R=np.full(len(people), float(self.turns)),
            good_R=self.rng.binomial(self.turns, chance).astype(float),
            expected_R=np.full(len(people), 0.6),
            treated_R=treated[came],
        )


def add(trial, slot, number=0, **others):
    outcomes = {"acceptance": {"": slot}} | {name: {"": other} for name, other in others.items()}
    trial.add(slot, outcomes, (number + 1) * HOUR / 2)


def run(trial, users, slots, first=0):
    """The decisions that were more than waiting, and the last one."""
    said = []
    for j in range(first, first + slots):
        if trial.over:
            break
        add(trial, users.slot(trial.share, j), j)
        decision = trial.look((j + 1) * HOUR / 2)
        if decision.next is not NextAction.WAIT:
            said.append(decision)
    return said, decision


def test_an_equal_one_ramps_and_ships_and_one_in_ten_stays_behind():
    trial = Trial(CONFIG, active=4000)
    said, _ = run(trial, Users(4000, 0.0), 150)
    assert [each.next for each in said][-1] is NextAction.SHIP
    shares = [each.share for each in said]
    assert shares == sorted(shares)
    assert all(share in CONFIG.shares for share in shares[:-1])
    assert shares[-1] == pytest.approx(0.9)
    assert said[-1].reason.startswith("not worse than 2.0 pp: ")
    last = said[-1].reading
    assert f" [{100 * last.lower:+.1f}, {100 * last.upper:+.1f}]" in said[-1].reason
    assert last.lower > -0.02
    assert trial.shipped


def test_a_worse_one_is_stopped_before_half_of_the_users_have_met_it():
    trial = Trial(CONFIG, active=4000)
    said, last = run(trial, Users(4000, -0.15), 150)
    assert last.next is NextAction.BLOCK
    assert last.share == 0.0
    assert last.reason.startswith("worse: -")
    assert trial.over
    assert max(each.share for each in said) <= 0.25


def test_the_risk_bounds_every_step_of_the_ramp():
    for seed in range(5):
        said, _ = run(Trial(CONFIG, active=4000), Users(4000, -0.02, seed=seed), 60)
        for each in said:
            if each.next is NextAction.RAMP:
                assert each.share * -each.reading.lower <= CONFIG.risk + 1e-12


def test_a_better_one_is_called_so_after_its_time_and_never_before():
    trial = Trial(CONFIG, active=4000)
    users, told = Users(4000, +0.10), []
    for j in range(40):
        add(trial, users.slot(trial.share, j), j)
        last = trial.look((j + 1) * HOUR / 2)
        told += [j + 1] * (last.next is NextAction.BETTER)
    assert len(told) == 1
    assert told[0] * HOUR / 2 >= CONFIG.better_after_s
    assert last.reason.startswith("better (provisional): +")


def test_a_release_that_turns_bad_after_it_shipped_is_rolled_back():
    trial = Trial(CONFIG, active=4000)
    users = Users(4000, +0.01)
    run(trial, users, 60)
    assert trial.shipped
    users.effect = -0.4
    _, last = run(trial, users, 100, first=60)
    assert last.next is NextAction.ROLL_BACK


def lasting(later, *, slots=24, seed=0):
    """A release that is ten points better until it is called so, and then by `later`."""
    trial = Trial(CONFIG.model_copy(update={"retest_s": 8 * HOUR}), active=4000)
    users = Users(4000, +0.10, seed=seed)
    first = 0
    while trial.better_s is None:
        run(trial, users, 1, first)
        first += 1
    users.effect = later
    return trial, run(trial, users, slots, first)[0]


def test_what_was_called_better_is_tested_again_on_the_days_that_follow():
    trial, said = lasting(+0.10)
    assert [each.next for each in said] == [NextAction.CONFIRMED]
    assert said[0].reason.startswith("better, and over the 8 hours that followed too: +")
    trial, said = lasting(0.0)
    assert [each.next for each in said] == [NextAction.FADED]
    assert said[0].reason.startswith("better at first, but not over the 8 hours that followed: ")
    assert not trial.over
    assert trial.look(40 * HOUR).next is NextAction.WAIT, "it is not called better twice"


def test_harm_is_not_hidden_by_what_pleased_before():
    trial, said = lasting(-0.08, slots=40)
    assert said[-1].next is NextAction.ROLL_BACK
    assert " worse over the last " in f" {said[-1].reason}"
    assert said[-1].reading.effect.difference < 0
    assert trial._contrasts["acceptance"].effect().difference > 0, "over the whole trial it looks better"


def test_periods_end_where_they_end_however_seldom_one_looks():
    users = Users(4000, +0.10, seed=2)
    config = CONFIG.model_copy(update={"retest_s": 3 * HOUR})
    often, seldom = Trial(config, active=4000), Trial(config, active=4000)
    for trial in (often, seldom):
        trial.share, trial.shipped, trial.better_s = 0.9, True, 2 * HOUR
    for j in range(30):
        slot = users.slot(0.9, j)
        for trial in (often, seldom):
            trial.share = 0.9
            add(trial, slot, j)
        often.look((j + 1) * HOUR / 2)
    assert often._recent.afterwards == seldom._recent.afterwards
    assert seldom.look(15 * HOUR).next is NextAction.CONFIRMED
    assert often.retested is True


def test_four_users_never_ship_however_well_or_long_they_are_served():
    trial = Trial(TrialConfig(first_people=4), active=80)
    users = Users(80, 0.0, turns=20)
    users.place[:4] = 0.0
    users.place[4:] = 0.99
    said, last = run(trial, users, 400)
    assert last.next is NextAction.BLOCK
    assert not [each for each in said if each.next is NextAction.SHIP]


def test_no_outcome_never_ships_and_says_so():
    trial = Trial(CONFIG, active=4000)
    for hours in range(0, 96):
        assert trial.look(hours * HOUR).next is NextAction.WAIT
    last = trial.look(96 * HOUR)
    assert last.next is NextAction.BLOCK
    assert last.reason == "not enough evidence: no feedback on it yet"


def test_undecided_says_what_could_be_seen_by_now():
    trial = Trial(TrialConfig(shares=(0.05,)), active=4000)
    add(trial, Users(4000, 0.0).slot(trial.share))
    assert "effective users this trial can see losses of " in trial.look(1800.0).reason


def test_an_arm_that_loses_its_users_is_void_not_shipped():
    trial = Trial(TrialConfig(shares=(0.5,)), active=40_000)
    _, last = run(trial, Users(40_000, 0.3, lost=0.4), 40)
    assert last.next is NextAction.BLOCK
    assert "assigned to the arms" in last.reason


def test_the_first_share_reaches_enough_people_and_no_more_than_the_last_step():
    assert Trial(CONFIG, active=100_000).share == 0.01
    assert Trial(CONFIG, active=4000).share == pytest.approx(0.05)
    assert Trial(CONFIG, active=10).share == 0.5


def test_the_same_slots_give_the_same_decisions_and_looking_changes_nothing():
    users = Users(2000, -0.01, seed=3)
    often, seldom = Trial(CONFIG, active=2000), Trial(CONFIG, active=2000)
    for j in range(12):
        slot = users.slot(0.1, j)
        for trial in (often, seldom):
            trial.share = 0.1
            add(trial, slot)
        if j % 4 == 3:
            for _ in range(5):
                often.share = 0.1
                last = often.look(j * HOUR)
            seldom.share = 0.1
            assert seldom.look(j * HOUR) == last


def test_goals_and_guardrails_have_half_of_the_chance_of_a_false_stop_each_and_share_it():
    users = Users(4000, -0.05)
    slots = [users.slot(0.3, j) for j in range(10)]

    def sees(*guardrails):
        trial = Trial(CONFIG, active=4000, metrics=watched(*guardrails))
        for slot in slots:
            trial.share = 0.3
            add(trial, slot, **dict.fromkeys(guardrails, slot))
        effects = {name: contrast.effect() for name, contrast in trial._contrasts.items()}
        found = read(effects, trial._metrics, CONFIG)
        return found["acceptance"].sees, found[guardrails[0]].sees if guardrails else None

    alone, one, many = sees(), sees("g"), sees(*(f"g{n}" for n in range(50)))
    assert alone[0] < one[0] == many[0]
    assert one[0] == one[1] < many[1]


def watched(*guardrails):
    declared = [MetricConfig(name=name, numerator=("x",), tolerance=0.01) for name in guardrails]
    return metrics_of([MetricConfig(name="acceptance"), *declared], CONFIG.margin)


def failures(slot, failing):
    """Every turn of a slot works, but for a share of the treated side's."""
    good = np.where(slot.treated_R, slot.turns_R * (1 - failing), slot.turns_R)
    return dataclasses.replace(slot, good_R=good, expected_R=np.ones(len(good)))


@pytest.mark.parametrize(("failing", "stopped"), [(0.0, False), (0.002, False), (0.3, True), (1.0, True)])
def test_a_guardrail_that_breaks_ends_the_trial_however_good_the_goal_is(failing, stopped):
    trial = Trial(CONFIG, active=4000, metrics=watched("worked"))
    users = Users(4000, +0.05)
    reasons = []
    for j in range(30):
        slot = users.slot(trial.share, j)
        add(trial, slot, worked=failures(slot, failing))
        decision = trial.look((j + 1) * HOUR / 2)
        reasons.append(decision.reason)
        if trial.over:
            break
    assert trial.over == stopped
    assert trial.shipped != stopped
    if stopped:
        assert reasons[-1].startswith("worked worse: -")


def test_what_looks_worse_than_is_tolerated_does_not_go_live_before_it_looks_better():
    """A guardrail of which hardly anything is known yet stops nothing, and lets nothing pass that looks bad."""
    trial = Trial(CONFIG, active=4000, metrics=watched("worked", "unheard"))
    users = Users(4000, +0.05)
    for j in range(60):
        slot = users.slot(trial.share, j)
        few = np.arange(len(slot.people_R)) % 50 == j % 50
        some = dataclasses.replace(
            slot,
            **{name: getattr(slot, name)[few] for name in ("people_R", "turns_R", "good_R", "expected_R", "treated_R")},
        )
        add(trial, slot, j, worked=failures(some, 0.03 if j < 8 else 0.0))
        decision = trial.look((j + 1) * HOUR / 2)
        assert not trial.shipped or j >= 8
        if trial.shipped:
            break
    assert trial.shipped
    assert decision.reason.endswith("; no data for unheard")
