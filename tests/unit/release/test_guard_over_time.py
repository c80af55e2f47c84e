"""The guard looks after every slot as long as a release stands, and all its looks together stay within alpha."""

import random
from dataclasses import replace

import numpy as np
import pytest

from ostinato.core.errors import Unavailable
from ostinato.core.records import Arm, PolicyVersion
from ostinato.release.guard import GuardConfig, GuardTest
from ostinato.release.ledger import State
from ostinato.release.metrics.config import OutcomeConfig
from ostinato.release.pace import DAY
from ostinato.release.trial.contrast import TimeSlot
from ostinato.release.watch import Outcomes, ReleaseWatch
from ostinato.testing.log import MemoryLog
from ostinato.testing.records import a_signal, a_turn

V0, V3 = (PolicyVersion(number=n, hash=f"{n:064x}") for n in (0, 3))
SLOT_S = 1800.0
BEGAN = 1000.0 * SLOT_S
STATE = State(releases=(V0, V3), shipped_at=BEGAN)
PERIOD = 20
RULES = GuardConfig(min_outcomes=30, period_s=PERIOD * SLOT_S)


class Product:
    """Twenty users on each side, who differ, and say after each turn whether it was good. A round is a slot."""

    def __init__(self, window=100_000):
        self.log, self.random, self.rounds = MemoryLog(), random.Random(0), 0
        self.window = window
        self.own = [self.random.uniform(-0.25, 0.25) for _ in range(40)]
        self.watch = self.started()

    def started(self, **more):
        return ReleaseWatch(
            Outcomes(self.log, OutcomeConfig(maturity_s=0.0, window=self.window)),
            RULES,
            SLOT_S,
            most_turns_a_day=1e9,
            **more,
        )

    async def serve(self, worth, at, arms=((Arm.LIVE, V3), (Arm.CONTROL, V0))):
        for n in range(40):
            arm, policy = arms[n % 2]
            for turn_number in range(2):
                made = a_turn(f"{at}:{n}:{turn_number}", user=f"u{n}", arm=arm, version=policy.number, ended_at=at)
                turn = replace(made, propensity=0.5)
                good = self.random.random() < (worth if arm is Arm.LIVE else 0.7) + self.own[n]
                await self.log.append(turn, a_signal(turn, "accepted" if good else "rejected", at=at, id=turn.id))

    async def round(self, worth):
        at = BEGAN + self.rounds * SLOT_S + 1.0
        self.rounds += 1
        await self.serve(worth, at)
        return await self.watch.live(STATE, V0, BEGAN + self.rounds * SLOT_S)


async def test_harm_that_begins_late_is_found_since_each_period_is_looked_at_by_itself():
    product = Product()
    for _ in range(3 * PERIOD):
        assert await product.round(0.7) is None
    found = [await product.round(0.2) for _ in range(PERIOD)]
    harm = next(each for each in found if each is not None)
    assert harm.measure == "acceptance against the control arm"
    assert harm.period == 3


@pytest.mark.parametrize("moves", [True, False])
async def test_a_control_arm_whose_version_moves_is_one_comparison(moves):
    product, found = Product(), []
    product.watch = product.started(control_moves=moves)
    for slot in range(PERIOD - 1):
        control, at = PolicyVersion(number=10 + slot, hash=f"{10 + slot:064x}"), BEGAN + slot * SLOT_S + 1.0
        await product.serve(0.3, at, ((Arm.LIVE, V3), (Arm.CONTROL, control)))
        found.append(await product.watch.live(STATE, control, BEGAN + (slot + 1) * SLOT_S))
    assert any(found) is moves, "of one version after another no slot is enough"


async def test_who_follows_training_changes_nothing_and_a_month_of_its_steps_takes_no_room():
    without, beside = Product(), Product()
    for product in (without, beside):
        for step in range(40):
            if product is beside:
                at = BEGAN + product.rounds * SLOT_S + 1.0
                for n in range(40, 50):
                    made = a_turn(f"l{step}:{n}", user=f"u{n}", arm=Arm.LEARNER, version=100 + step, ended_at=at)
                    turn = replace(made, propensity=0.05)
                    await product.log.append(turn, a_signal(turn, "rejected", at=at, id=turn.id))
            await product.round(0.6)
    assert beside.watch.test.effects() == without.watch.test.effects()
    known, usual = beside.watch._outcomes._met, without.watch._outcomes._met
    assert {day: len(met) for day, met in known.items()} == {day: len(met) + 1 for day, met in usual.items()}, (
        "not one for each step"
    )


async def test_a_slot_is_looked_at_once_and_a_restart_goes_on_in_the_same_period():
    product = Product()
    for _ in range(PERIOD + 3):
        await product.round(0.55)
    now = BEGAN + product.rounds * SLOT_S
    followed = product.watch.test.effects()
    assert await product.watch.live(STATE, V0, now + 0.9 * SLOT_S) is None
    assert product.watch.test.effects() == followed, "no slot has ended since"
    product.watch = product.started()
    await product.watch.live(STATE, V0, now)
    assert product.watch.test.period == 1
    assert product.watch.test.effects() == followed


async def test_what_people_did_in_the_week_before_makes_the_comparison_sharper_and_moves_it_nowhere():
    known, unknown = Product(), Product()
    for product in (known, unknown):
        days = range(1, 40) if product is known else ()
        for slot in days:
            await product.serve(0.7, BEGAN - slot * SLOT_S, ((Arm.LIVE, V0), (Arm.CONTROL, V0)))
        product.random.seed(7)
        for _ in range(PERIOD):
            await product.round(0.6)
    name = "acceptance against the control arm"
    sharp, dull = (product.watch.test.effects()[name] for product in (known, unknown))
    assert sharp.variance < 0.5 * dull.variance
    assert sharp.difference == pytest.approx(-0.1, abs=3 * sharp.variance**0.5)


def slot_of(rng, rates, live, number):
    count = len(rates)
    return TimeSlot(
        day=number // 48,
        people_R=np.arange(count),
        turns_R=np.full(count, 2.0),
        good_R=rng.binomial(2, rates).astype(float),
        expected_R=np.full(count, 0.5),
        treated_R=live,
    )


def condemned(rng, *, loss=0.0, users=60, control=0.3, slots=40):
    """A release that is looked at after every slot, of users who differ and stay as they are."""
    test = GuardTest(GuardConfig(alpha=0.1, tolerance=0.0, period_s=20 * SLOT_S), 0.0, most_turns_a_day=1e9)
    live = np.arange(users) >= control * users
    rates = np.clip(rng.beta(2, 2, users) - loss * live, 0.0, 1.0)
    for number in range(slots):
        test.add({"acceptance": slot_of(rng, rates, live, number)}, number * SLOT_S)
        if test.harm():
            return True
    return False


def test_an_equally_good_release_is_condemned_within_alpha_over_all_looks_and_periods():
    rng = np.random.default_rng(5)
    assert sum(condemned(rng) for _ in range(60)) / 60 <= 0.1
    assert sum(condemned(rng, loss=0.35) for _ in range(20)) >= 17


async def returns(leave, days):
    """Two hundred users a side who come every day, until those of live leave. What the guard found at the end of each day."""
    log, chance, gone, found = MemoryLog(), random.Random(1), set(), []
    outcomes = Outcomes(log, OutcomeConfig(maturity_s=0.0, window=600))
    guard = ReleaseWatch(outcomes, GuardConfig(min_outcomes=30), SLOT_S)
    for day in range(days):
        for n in range(400):
            arm, policy = ((Arm.LIVE, V3), (Arm.CONTROL, V0))[n % 2]
            if n in gone or chance.random() < 0.1:
                continue
            at = DAY * (day + 0.25 + n / 1000)
            made = a_turn(f"{day}:{n}", user=f"u{n}", arm=arm, version=policy.number, ended_at=at)
            await log.append(replace(made, propensity=0.5))
            if arm is Arm.LIVE and chance.random() < leave:
                gone.add(n)
        found.append(await guard.live(replace(STATE, shipped_at=0.0), V0, (day + 0.9) * DAY))
    return found


async def test_users_of_live_who_do_not_come_again_are_harm():
    found = await returns(0.3, 4)
    assert found[:2] == [None, None], "the first day after the first is not over"
    harm = next(each for each in found if each is not None)
    assert harm.measure == "users who came again the next day against the control arm"
    assert harm.loss > 0.15


async def test_users_who_come_as_seldom_as_controls_are_none():
    assert await returns(0.0, 6) == [None] * 6


async def test_a_clock_that_was_ahead_makes_the_guard_neither_blind_nor_silent():
    product = Product()
    assert await product.watch.live(STATE, V0, BEGAN + 365 * DAY) is None
    assert any([await product.round(0.2) for _ in range(PERIOD)]), "set back, it goes on"
    with pytest.raises(Unavailable, match=r"went live 48\.0 hours from now: the clock was ahead"):
        await product.watch.live(replace(STATE, shipped_at=BEGAN + 2 * DAY), V0, BEGAN)


async def test_harm_is_told_until_it_was_taken_back():
    """A store that was away for a moment delayed the way back by a whole slot."""
    product = Product()
    harm = next(filter(None, [await product.round(0.2) for _ in range(PERIOD)]))
    now = BEGAN + product.rounds * SLOT_S
    assert (await product.watch.live(STATE, V0, now)).measure == harm.measure, "though no slot has ended since"
    assert await product.watch.live(replace(STATE, shipped_at=now), V0, now) is None, (
        "of what is live since it says nothing"
    )
