"""The guard goes on looking as long as a release stands, and all its looks together stay within alpha."""

import random
from dataclasses import replace

import numpy as np

from ostinato.core.records import Arm, PolicyVersion
from ostinato.evaluate.statistics import clustered_difference
from ostinato.release.guard import GuardConfig, judge, look_due
from ostinato.release.ledger import State
from ostinato.release.metrics.config import OutcomeConfig
from ostinato.release.pace import DAY
from ostinato.release.watch import Outcomes, ReleaseWatch
from ostinato.testing.log import MemoryLog
from ostinato.testing.records import a_signal, a_turn

V0, V3 = (PolicyVersion(number=n, hash=f"{n:064x}") for n in (0, 3))
STATE = State(releases=(V0, V3), shipped_at=1.0)
WINDOW = 600
RULES = GuardConfig(min_outcomes=30)


class Product:
    """Ten users on each side, who say after each turn whether it was good."""

    def __init__(self):
        self.log, self.random, self.rounds = MemoryLog(), random.Random(0), 0
        self.looks = []
        self.watch = self.started()

    def started(self):
        outcomes = Outcomes(self.log, OutcomeConfig(maturity_s=0.0, window=WINDOW))
        return ReleaseWatch(outcomes, RULES, self._compare, 1800.0)

    def _compare(self, watched, baseline, confidence):
        self.looks.append(self.rounds)
        return clustered_difference(watched, baseline, confidence)

    async def round(self, worth):
        self.rounds += 1
        for n in range(20):
            arm, policy = ((Arm.LIVE, V3), (Arm.CONTROL, V0))[n % 2]
            made = a_turn(
                f"{self.rounds}:{n}", user=f"u{n}", arm=arm, version=policy.number, ended_at=1.0 + self.rounds
            )
            turn = replace(made, propensity=0.5)
            good = self.random.random() < (worth if arm is Arm.LIVE else 0.7)
            name = "accepted" if good else "rejected"
            await self.log.append(turn, a_signal(turn, name, at=1.0 + self.rounds, id=turn.id))
        return await self.watch.live(STATE, V0, 0, 2.0 + self.rounds)


async def test_harm_that_begins_after_the_window_is_full_is_found():
    product = Product()
    for _ in range(200):
        assert await product.round(0.7) is None
    found = [await product.round(0.2) for _ in range(60)]
    harm = next(each for each in found if each is not None)
    assert harm.measure == "acceptance against the control arm"


async def test_a_look_follows_each_time_the_log_has_grown_by_a_window_and_a_restart_counts_on():
    product = Product()
    for _ in range(150):
        await product.round(0.7)
    late = sorted({at for at in product.looks if at > 15})
    assert late == list(range(30, 151, 15)), "15 rounds are 600 rows"
    product.watch = product.started()
    await product.round(0.7)
    assert product.looks[-2:] == [151, 151], "a restart may repeat the last look"
    for _ in range(13):
        await product.round(0.7)
    assert product.looks[-1] == 151


def test_looks_go_on_by_rows_where_doublings_end():
    config = GuardConfig(min_outcomes=60)
    assert [look_due(59, rows, 1_000, config) for rows in (0, 5_000)] == [None, None]
    assert [look_due(960, rows, 1_000, config) for rows in (0, 999, 1_000, 1_999, 3_500)] == [4, 4, 5, 5, 7]
    assert look_due(960, 5_000, 59, config) == 4, "a window that holds no look at all says nothing of its doublings"


def condemned(rng, *, windows=30, users=40):
    """An equally good release, all of whose looks are at windows that overlap by half, of users who differ and stay as they are."""
    config = GuardConfig(alpha=0.1, tolerance=0.0)
    rates = rng.beta(2, 2, (2, users))
    halves = rng.binomial(10, rates, (windows + 1, 2, users))
    for number in range(windows):
        good = halves[number] + halves[number + 1]
        watched, baseline = ({("t", f"{side}{n}"): (float(good[side][n]), 20) for n in range(users)} for side in (0, 1))
        if judge("acceptance", watched, baseline, number, config, clustered_difference):
            return True
    return False


def test_an_equally_good_release_is_condemned_within_alpha_over_many_windows():
    rng = np.random.default_rng(5)
    assert sum(condemned(rng) for _ in range(150)) / 150 <= 0.1


async def returns(leave, days):
    """Two hundred users a side who come every day, until those of live leave. What the guard found at the end of each day."""
    log, chance, gone, found = MemoryLog(), random.Random(1), set(), []
    outcomes = Outcomes(log, OutcomeConfig(maturity_s=0.0, window=WINDOW))
    guard = ReleaseWatch(outcomes, RULES, clustered_difference, 1800.0)
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
        found.append(await guard.live(replace(STATE, shipped_at=0.0), V0, 0, (day + 0.9) * DAY))
    return found


async def test_users_of_live_who_do_not_come_again_are_harm():
    found = await returns(0.3, 4)
    assert found[:2] == [None, None], "the first day after the first is not over"
    harm = next(each for each in found if each is not None)
    assert harm.measure == "users who came again the next day against the control arm"
    assert harm.loss > 0.15


async def test_users_who_come_as_seldom_as_controls_are_none():
    assert await returns(0.0, 6) == [None] * 6
