"""Coverage: when feedback falls silent it is noticed, silence is not learned from meanwhile, and false alarms are as rare as said."""

import json
import math
import random
from dataclasses import replace

import pytest
from tests.grids import first
from tests.oracles.turn_accounting import recount

from ostinato.core.notices import Alarm, AlarmState
from ostinato.core.records import Holdback, PolicyVersion, Quarantine, Reward
from ostinato.reward.accounting import account
from ostinato.reward.alarms import MOST_NAMES, Alarms, Coverage
from ostinato.reward.config import CoverageConfig, RewardConfig
from ostinato.reward.ledger import TurnLedger
from ostinato.testing.records import a_delivery, a_signal, a_turn

V0 = PolicyVersion(number=0, hash="00")


def turns_to_alarm(share: float, true: float, seed: int, config: CoverageConfig, most: int) -> int:
    """After a long time at `share`, turns at the true share until the alarm; `most` if it does not come before."""
    dice, coverage = random.Random(seed), Coverage()
    while coverage.turns < 4000:
        coverage.see(dice.random() < share, standing=False, config=config)
        coverage.falling = 0.0  # the history is given: what is measured begins now
    usual = coverage.usual
    for turn in range(most):
        coverage.see(dice.random() < true, standing=False, config=config)
        coverage.weight, coverage.covered = 1000.0, 1000.0 * usual  # the estimate does not follow a lasting drop
        if coverage.fallen_silent(config):
            return turn + 1
    return most


@pytest.mark.parametrize(("share", "most"), [(0.9, 40), (0.5, 100), (0.1, 400), (0.03, 1500)])
def test_silence_is_noticed_after_few_turns(share: float, most: int):
    config = CoverageConfig()
    delays = sorted(turns_to_alarm(share, 0.0, seed, config, 5000) for seed in range(40))
    assert delays[-1] <= most


@pytest.mark.parametrize("count", first([20, 60]))
@pytest.mark.parametrize("share", [0.9, 0.3, 0.05])
def test_false_alarms_are_as_rare_as_said_even_at_half_the_usual_share(share: float, count: int):
    config = CoverageConfig(false_alarm_turns=300.0)
    runs = [turns_to_alarm(share, share / 2, seed, config, 20_000) for seed in range(count)]
    assert sum(runs) / len(runs) >= 300.0


def test_at_the_usual_share_there_is_no_alarm_in_three_hundred_thousand_turns():
    dice, coverage, config = random.Random(1), Coverage(), CoverageConfig()
    rates = [dice.betavariate(1, 3) for _ in range(50)]  # people differ, and come in runs
    turns, person = 0, 0.0
    while turns < 300_000:
        if turns % 7 == 0:
            person = dice.choice(rates)
        coverage.see(dice.random() < person, standing=False, config=config)
        assert not coverage.fallen_silent(config)
        turns += 1
    assert coverage.usual == pytest.approx(sum(rates) / 50, abs=0.05)


def test_nothing_is_judged_before_there_is_a_history():
    config = CoverageConfig(min_turns=200)
    coverage = Coverage()
    for _ in range(5000):
        coverage.see(False, standing=False, config=config)
    assert not coverage.fallen_silent(config), "a tenant who never gives feedback is not silent"
    coverage = Coverage()
    for turn in range(199):
        coverage.see(turn < 100, standing=False, config=config)
    assert not coverage.fallen_silent(config)


def test_the_usual_share_is_frozen_while_the_alarm_stands():
    config, coverage = CoverageConfig(), Coverage()
    for turn in range(1000):
        coverage.see(turn % 2 == 0, standing=False, config=config)
    usual = coverage.usual
    for _ in range(10_000):
        coverage.see(False, standing=True, config=config)
    assert coverage.usual == usual
    for _ in range(4):
        assert not coverage.is_back()
        coverage.see(True, standing=True, config=config)
    assert coverage.is_back()


def test_a_stray_signal_now_and_then_is_no_all_clear():
    config, coverage = CoverageConfig(), Coverage()
    for turn in range(1000):
        coverage.see(turn % 2 == 0, standing=False, config=config)
    for turn in range(2000):
        coverage.see(turn % 100 == 0, standing=True, config=config)
        assert not coverage.is_back()


def test_it_survives_being_saved():
    alarms, again = Alarms(CoverageConfig()), Alarms(CoverageConfig())
    for turn in range(300):
        alarms.decided("acme", heard=turn % 3 == 0, names={"accepted"} if turn % 3 == 0 else frozenset())
    again.restore(json.loads(json.dumps(alarms.snapshot())))
    assert (again.coverages, again.signals) == (alarms.coverages, alarms.signals)
    assert math.isfinite(again.coverages["acme"].falling)
    assert list(again.signals["acme"]) == ["accepted"]


# ---------------------------------------------------------------- at the desk


def either(i: int) -> str:
    return "accepted" if i % 2 else "rejected"


async def served(log, desk, now, turn, first: int, count: int, heard, said=either, **changes) -> None:
    """Turns, each matured at once: `heard(i)` says whether anything is said about turn i, and `said(i)` what."""
    for i in range(first, first + count):
        each = turn(i, ended_at=float(i), **changes)
        await log.append(each, a_delivery(each, at=float(i)))
        if heard(i):
            await log.append(a_signal(each, said(i), at=float(i)))
        now.at = i + 31.0
        if i % 10 == 9:
            await desk.poll()


async def test_an_outage_of_feedback_is_not_learned_from_and_passes_by_itself(log, now, open_desk, turn):
    desk = open_desk(log, config=RewardConfig(max_staleness=10**6))
    await served(log, desk, now, turn, 0, 600, lambda i: i % 5 > 0)
    await served(log, desk, now, turn, 0 + 600, 400, lambda i: False)  # the pipeline is down
    (raised,) = log.of(Alarm)
    assert raised.detail["usual"] == pytest.approx(0.8, abs=0.01), "the silence itself is no part of what is usual"
    assert (raised.name, raised.state) == ("coverage:default", AlarmState.RAISED)
    assert "80% of turns usually have some" in raised.reason
    assert raised.at < 600 + 31 + 60, "within some fifty turns"
    zero = [row.turn for row in log.of(Reward) if not row.signals and int(row.turn[1:-2]) >= 600]
    assert len(zero) < 60
    held = log.reasons(Quarantine)
    assert set(held.values()) == {"coverage"}
    assert len(held) > 300
    await desk.ready(0, 10)
    assert {log.reasons(Holdback)[turn] for turn in zero} == {"coverage"}, "nor is what was read as 0 before"
    await served(log, desk, now, turn, 1000, 100, lambda i: i % 5 > 0)
    _, cleared = log.of(Alarm)
    assert (cleared.state, cleared.reason) == (AlarmState.CLEARED, "feedback is back")
    silent_again = [row for row in log.of(Reward) if not row.signals and int(row.turn[1:-2]) >= 1030]
    assert silent_again, "silence means something again"
    found = await account(log)
    assert found.coverage["default"].usual == pytest.approx(0.8, abs=0.02)
    assert found.balanced
    assert (await recount(log)).balanced


async def test_one_signal_that_is_lost_while_others_arrive_is_told(log, now, open_desk, turn):
    """An update of the product no longer sends `accepted`: what is left looks like a model that nobody likes."""
    desk = open_desk(log)
    await served(log, desk, now, turn, 0, 600, lambda i: i % 5 > 0)
    assert log.of(Alarm) == []
    await served(log, desk, now, turn, 600, 300, lambda i: i % 5 > 0 and i % 2 == 0)
    (raised,) = log.of(Alarm)
    assert (raised.name, raised.state) == ("signal:default:accepted", AlarmState.RAISED)
    assert "no 'accepted' for" in raised.reason
    assert "40% of turns usually have it, while other feedback arrives" in raised.reason
    assert raised.at < 600 + 31 + 120
    desk = open_desk(log)  # a restart
    await served(log, desk, now, turn, 900, 100, lambda i: i % 5 > 0 and i % 2 == 0)
    assert len(log.of(Alarm)) == 1
    await served(log, desk, now, turn, 1000, 200, lambda i: i % 5 > 0)
    _, cleared = log.of(Alarm)
    assert (cleared.state, cleared.reason) == (AlarmState.CLEARED, "'accepted' is back")


async def test_names_that_a_tenant_invents_are_watched_in_bounded_number(log, now, open_desk, turn):
    desk = open_desk(log)
    await served(log, desk, now, turn, 0, 300, lambda i: True, said=lambda i: f"name{i}")
    await served(log, desk, now, turn, 300, 300, lambda i: True)
    assert log.of(Alarm) == []
    assert len(desk._reading.ledger.alarms.signals["default"]) == MOST_NAMES


async def test_a_restart_in_the_middle_knows_the_alarm(log, now, open_desk, turn):
    desk = open_desk(log)
    await served(log, desk, now, turn, 0, 400, lambda i: True)
    await served(log, desk, now, turn, 400, 100, lambda i: False)
    assert len(log.of(Alarm)) == 1
    before = len(log.of(Reward))
    await served(log, open_desk(log), now, turn, 500, 100, lambda i: False)
    assert len(log.of(Reward)) == before
    assert len(log.of(Alarm)) == 1


async def test_one_tenants_silence_is_not_anothers(log, now, open_desk, turn):
    desk = open_desk(log)
    for i in range(0, 800, 2):
        await served(log, desk, now, turn, i, 1, lambda i: True, tenant="acme")
        await served(log, desk, now, turn, i + 1, 1, lambda i: i < 400, tenant="quiet")
    assert [row.name for row in log.of(Alarm)] == ["coverage:quiet"]
    assert {int(turn[1:-2]) % 2 for turn in log.reasons(Quarantine)} == {1}


async def test_answers_that_nobody_got_say_nothing_about_feedback(log, now, open_desk, turn):
    desk = open_desk(log)
    await served(log, desk, now, turn, 0, 400, lambda i: True)
    for i in range(400, 800):
        await log.append(turn(i, ended_at=float(i)))
        now.at = i + 100.0
    await desk.poll()
    assert log.of(Alarm) == []
    assert set(log.reasons(Quarantine).values()) == {"undelivered"}


async def test_it_can_be_switched_off_and_clears_what_stood(log, now, open_desk, turn):
    await served(log, open_desk(log), now, turn, 0, 400, lambda i: True)
    await served(log, open_desk(log), now, turn, 400, 60, lambda i: False)
    off = RewardConfig(coverage=CoverageConfig(enabled=False))
    await served(log, open_desk(log, config=off), now, turn, 500, 300, lambda i: False)
    assert [row.state for row in log.of(Alarm)] == [AlarmState.RAISED, AlarmState.CLEARED]
    assert len([row for row in log.of(Reward) if not row.signals]) >= 300


async def test_alarms_of_others_are_left_alone(log, now, open_desk, turn):
    await log.append(Alarm(id="disk:1", name="disk", state=AlarmState.RAISED, reason="full", at=1.0))
    await served(log, open_desk(log), now, turn, 0, 10, lambda i: True)
    assert (await account(log)).alarms == ()
    mine = replace(log.of(Alarm)[0], id="coverage:default:1", name="coverage:default")
    await log.append(mine)
    assert (await account(log)).alarms == ("coverage:default",)


def test_a_signal_that_the_reward_does_not_rest_on_does_not_make_its_turn_heard():
    """It was committed between the desk's reading and its writing: the reward is what silence means."""
    for upto, silent in ((2, True), (3, False)):
        ledger, turn = TurnLedger(RewardConfig()), a_turn("t0:0")
        reward = Reward(turn=turn.id, value=0.0, function="f@1", signals=(), at=40.0, upto=upto)
        for seq, row in enumerate((turn, a_delivery(turn), a_signal(turn), reward), 1):
            ledger.apply(seq, row)
        assert ledger.matured[turn.id].silent is silent
        assert ledger.alarms.coverages[turn.tenant].silent == silent
