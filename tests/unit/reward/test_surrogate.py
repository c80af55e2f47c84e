"""Late rewards that are predicted from what is known early: learned from at once, compared with what came, and never trained on."""

import json
import math
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from benchmarks.reward.late_truth import DAY, HOUR, Run, World, config_of, cosine
from scipy import stats

from ostinato.core.errors import BadConfig, Corrupt
from ostinato.core.notices import Alarm, AlarmState, Forgotten
from ostinato.core.records import (
    Arm,
    Batch,
    Consent,
    ConsentGiven,
    Holdback,
    NoReward,
    Pending,
    PolicyVersion,
    Reward,
    Signal,
    Source,
    Turn,
)
from ostinato.core.verdicts import LATE, LATE_REWARD, LATE_REWARD_FAILED, NO_LATE_REWARD, late_id
from ostinato.reward.alarms import Alarms
from ostinato.reward.config import CoverageConfig, RewardConfig, SurrogateConfig
from ostinato.reward.erasure import CreditRefold, erased_people
from ostinato.reward.functions import copilot
from ostinato.reward.ledger import TurnLedger
from ostinato.reward.ledger_entries import Taught, TurnFacts
from ostinato.reward.log_fold import LedgerFollower, needed_above, restored, snapshot
from ostinato.reward.pipeline import RewardDesk
from ostinato.reward.protocol import Failure
from ostinato.reward.runners import Inline, late_asker_of
from ostinato.reward.surrogate import (
    CORRELATION_Z,
    EVALUATE_EVERY_S,
    GAP_Z,
    INFINITE_DF,
    Surrogate,
    TruthPair,
    early_values,
    student_quantile,
)
from ostinato.testing.log import MemoryFolds, MemoryLog
from ostinato.testing.records import a_delivery, a_signal, a_turn

V0 = PolicyVersion(number=0, hash="00")
SOON = {"truth_after_s": 6 * HOUR}
QUICK = World(late_s=5 * HOUR)


def states_of(log, name):
    return [row.state.value for row in log.rows if isinstance(row, Alarm) and row.name == name]


def states(run, name):
    return states_of(run.log, name)


# ---------------------------------------------------------------- a planted truth


async def test_truth_of_the_next_day_is_learned_from_within_the_hour_in_the_right_direction():
    run, blind = (Run(config, look_s=1800.0) for config in (config_of("surrogate", memory=400), config_of("early")))
    await run.go(54, 20)
    await blind.go(48, 20)
    quality = run.quality
    assert quality.correlation >= 0.8
    assert quality.bounds()[0] >= 0.8
    assert max(run.ages) < 5 * HOUR, "turns wait for their window and for twelve others, not for a day"
    late = [signal for signal in run.log.signals() if signal.name == LATE_REWARD]
    assert len(late) > 300
    trained = Counter(turn for row in run.log.rows if isinstance(row, Batch) for turn in row.turns)
    assert set(trained.values()) == {1}, "none is trained on again when its late reward comes"
    assert {signal.turn for signal in late} & set(trained)
    cosines = [
        cosine(sum(gradient for at, gradient in each.gradients if at > DAY + HOUR), each.late_gradient())
        for each in (run, blind)
    ]
    assert cosines[0] > 0.4
    assert cosines[1] < -0.2, "what is accepted at once is what does not last"
    assert not states(run, "surrogate:default")


async def test_when_early_signals_tell_nothing_any_more_an_alarm_says_so():
    run = Run(
        config_of("surrogate", memory=400, least_correlation=0.8, **SOON),
        replace(QUICK, blind_from=14.0),
        look_s=1800.0,
    )
    await run.go(20, 30)
    assert run.quality.correlation > 0.9
    before = states(run, "surrogate:default")
    assert before in ([], ["raised", "cleared"]), (
        "what was predicted before the first late reward was the early one itself"
    )
    await run.go(5, 30)
    assert states(run, "surrogate:default") == [*before, "raised"]
    alarm = [row for row in run.log.rows if isinstance(row, Alarm)][-1]
    assert "reward.surrogate.signals" in alarm.reason
    assert alarm.detail["correlation"] < 0.8


async def test_when_live_promises_more_than_control_an_alarm_says_so():
    """Live's answers of one kind look as if they lasted. The regression sees both arms, and may believe early signals less."""
    run = Run(config_of("surrogate", memory=1000, **SOON), replace(QUICK, faked_from=10.0), look_s=1800.0)
    await run.go(16, 40)
    assert not states(run, "surrogate_gap:default")
    await run.go(8, 40)
    assert run.quality.gap > 0.1
    assert states(run, "surrogate_gap:default") == ["raised"]


async def test_a_desk_that_is_killed_at_any_time_writes_what_one_that_runs_on_writes():
    config = config_of("surrogate", memory=150, **SOON)
    steady, killed = Run(config, QUICK), Run(config.model_copy(update={"fold_rows": 97}), QUICK, folds=MemoryFolds())
    await steady.go(12, 20)
    for _ in range(8):
        await killed.go(1.5, 20)
        killed.open()  # the one before saved nothing at its end
    assert killed.log.rows == steady.log.rows
    assert any(signal.name == LATE_REWARD for signal in steady.log.signals())
    again = LedgerFollower(steady.log, config)
    await again.catch_up()
    anew, live = snapshot(again.ledger), snapshot(steady.desk._reading.ledger)
    for part in ("surrogate", "matured", "alarms", "baseline"):
        assert anew[part] == live[part], "read anew, it is the same to the last bit"
    await killed.desk.save()
    (held,) = await killed.log.places(Turn, [(next(iter(again.ledger.surrogate.awaited)),)])
    assert await needed_above(killed.folds, config, steady.now[0]) < held, (
        "retention keeps what is still to be asked about"
    )


# ---------------------------------------------------------------- one turn


class Now:
    at = 0.0

    def __call__(self):
        return self.at


CONFIG = RewardConfig(
    options={"window": 30.0}, user_cap=1.0, surrogate=SurrogateConfig(truth_after_s=1000.0, signals=("kept",))
)


def hour(turn, signals, now):
    return copilot(turn, signals, now, window=30.0)


def late(turn, signals, now):
    return copilot(turn, signals, now, window=1000.0)


def desk_of(log, now, late_fn=late, config=CONFIG, **more):
    return RewardDesk(log, Inline(hour, max_abs=9.0), now, config, late_asker=Inline(late_fn, max_abs=9.0), **more)


async def told(log, turn, *names, at=5.0):
    await log.append(turn, a_delivery(turn), *(a_signal(turn, name, at=turn.ended_at + at) for name in names))


def late_rows(log):
    return [(row.turn, row.name, row.value) for row in log.signals() if row.name in LATE]


async def test_without_evidence_the_early_reward_itself_is_learned_from_and_the_late_one_written_in_time():
    log, now = MemoryLog(), Now()
    desk, turn = desk_of(log, now), a_turn(ended_at=0.0)
    await told(log, turn, "accepted")
    now.at = 40.0
    await desk.poll()
    (reward,) = [row for row in log.rows if isinstance(row, Reward)]
    assert reward.value == dict(reward.early)["reward"] == 0.75
    assert reward.function == "copilot@1 -> 1000 s"
    await log.append(a_signal(turn, "undone", at=900.0), a_signal(turn, "accepted", at=1001.0))
    now.at = 1000.0
    await desk.poll()
    assert late_rows(log) == [], "what was received in time may not be on the disk yet"
    now.at = 1001.0
    await desk.poll()
    assert late_rows(log) == [(turn.id, LATE_REWARD, -0.25)]
    (row,) = desk._reading.ledger.surrogate._rows["default"]
    assert (row.predicted, row.truth) == (0.75, -0.25)
    now.at = 9e5
    await desk.poll()
    assert len(late_rows(log)) == 1


async def test_who_must_not_teach_does_not_teach_predictions_either():
    log, now = MemoryLog(), Now()
    desk = desk_of(log, now, gold=lambda tenant, user: user == "gold")
    changes = {
        "live": {},
        "control": {"arm": Arm.CONTROL},
        "gold": {"user": "gold"},
        "gold control": {"user": "gold", "arm": Arm.CONTROL},
        "aggregate": {"consent": Consent.AGGREGATE},
        "outside": {"arm": Arm.OUTSIDE},
        "takes it back": {"user": "bob"},
        "takes it back later": {"user": "eve"},
        "is forgotten": {"user": "dan", "arm": Arm.CONTROL},
        "secret": {"secret": True},
    }
    await log.append(ConsentGiven(id="c", tenant="default", user="bob", level=Consent.NEVER, at=1.0))
    for name, change in changes.items():
        await told(log, replace(a_turn(name, ended_at=0.0), **change), "accepted")
    await log.append(Forgotten(id="f", tenant="default", user="dan", key=1, at=2.0))
    now.at = 40.0
    await desk.poll()
    await log.append(ConsentGiven(id="d", tenant="default", user="eve", level=Consent.NEVER, at=50.0))
    now.at = 2000.0
    await desk.poll()
    assert {turn for turn, _, _ in late_rows(log)} == {"live", "control"}
    assert [row.control for row in desk._reading.ledger.surrogate._rows["default"]] == [False, True]


async def test_a_late_function_that_gives_none_waits_or_fails_costs_its_own_turn_only():
    def odd(turn, signals, now):
        if turn.id == "fails":
            raise ZeroDivisionError
        if turn.id == "waits":
            return Pending(until=now + 500.0)
        return NoReward(reason="silence") if turn.id == "none" else late(turn, signals, now)

    log, now = MemoryLog(), Now()
    desk = desk_of(log, now, odd, CONFIG.model_copy(update={"longest_wait_s": 4000.0}))
    for name in ("fails", "waits", "none", "fine"):
        await told(log, a_turn(name, ended_at=0.0), "accepted")
    for now.at in (40.0, 1100.0, 1200.0):
        await desk.poll()
    assert sorted(late_rows(log)) == [
        ("fails", LATE_REWARD_FAILED, 0.0),
        ("fine", LATE_REWARD, 0.75),
        ("none", NO_LATE_REWARD, 0.0),
    ]
    assert [row.name for row in log.rows if isinstance(row, Alarm)] == ["late_reward_function"]
    for now.at in np.arange(1300.0, 5000.0, 100.0):
        await desk.poll()
    assert ("waits", NO_LATE_REWARD, 0.0) in late_rows(log)
    assert not desk._reading.ledger.surrogate.awaited


async def test_early_rewards_do_not_clear_what_a_late_one_raised_and_late_ones_do():
    def sometimes(turn, signals, at):
        return late(turn, signals, at) if turn.user == "late" else 1 / 0

    log, now = MemoryLog(), Now()
    desk = desk_of(log, now, sometimes)
    for day, user in enumerate(("none", "late", "late")):
        for i in range(25):
            await told(log, a_turn(f"t{day}/{i}", user=user, ended_at=day * DAY), "accepted")
        for now.at in (day * DAY + 40.0, day * DAY + 1100.0):
            await desk.poll()
        assert states_of(log, "late_reward_function") == ["raised", "cleared"][: 1 + (day > 0)]
    assert not states_of(log, "reward_function")


async def test_late_rewards_copied_from_another_log_raise_no_alarm():
    log, now = MemoryLog(), Now()
    desk, turn = desk_of(log, now), a_turn(ended_at=0.0)
    failed = replace(a_signal(turn, LATE_REWARD_FAILED, id=late_id(turn.id), value=0.0), source=Source.CODE)
    await log.append(turn, a_delivery(turn), failed)
    now.at = 40.0
    await desk.poll()
    assert not [row for row in log.rows if isinstance(row, Alarm)]


def test_alarms_end_with_what_they_rest_on():
    found, alarms = surrogate(), Alarms(CoverageConfig())
    for name in (
        "surrogate:acme",
        "surrogate_gap:acme",
        "surrogate:gone",
        "surrogate_gap:gone",
        "late_reward_function",
    ):
        alarms.apply(alarms.row(name, AlarmState.RAISED, "", 1.0))
    for i in range(60):
        teach(found, i, 0.5, -float(i % 2), tenant="acme", user=f"u{i}")
    cleared = {"surrogate_gap:acme", "surrogate:gone", "surrogate_gap:gone"}
    assert {row.name for row in found.due(alarms, 2.0) if row.state is AlarmState.CLEARED} == cleared
    off = Surrogate(SurrogateConfig(), 1.0, 1e6)
    assert sorted(row.name for row in off.due(alarms, 2.0)) == sorted(alarms.standing())


async def test_a_late_function_that_hangs_costs_two_processes_a_poll_and_no_early_reward():
    class Hanging:
        asked = 0

        async def open(self): ...

        async def close(self): ...

        async def ask(self, questions):
            self.asked += 1
            failures = [Failure(reason="reward_hung: no answer in 5 s")] * 2
            return [*failures, *[None] * len(questions)][: len(questions)]

    log, now, hanging = MemoryLog(), Now(), Hanging()
    desk = RewardDesk(log, Inline(hour, max_abs=9.0), now, CONFIG, late_asker=hanging)
    for i in range(7):
        await told(log, a_turn(f"t{i}", ended_at=0.0), "accepted")
    now.at = 40.0
    await desk.poll()
    await told(log, a_turn("new", ended_at=1900.0), "accepted")
    now.at = 2000.0
    await desk.poll()
    assert (hanging.asked, len(late_rows(log))) == (1, 2)
    assert {row.turn for row in log.rows if isinstance(row, Reward)} == {*(f"t{i}" for i in range(7)), "new"}
    for _ in range(3):
        await desk.poll()
    assert len(late_rows(log)) == 7


async def test_nobody_else_can_say_a_late_reward_or_keep_it_from_being_asked_for():
    log, now = MemoryLog(), Now()
    desk, turn = desk_of(log, now), a_turn(ended_at=0.0)
    taken = a_turn("taken", ended_at=0.0)
    for each in (turn, taken):
        await told(log, each, "accepted")
    now.at = 40.0
    await desk.poll()
    forged = a_signal(turn, LATE_REWARD, at=50.0, value=9.0)
    other = replace(forged, id="x", source=Source.CODE)
    await log.append(forged, other, replace(forged, id=late_id("taken"), turn="taken", name="liked"))
    now.at = 2000.0
    await desk.poll()
    assert [row.truth for row in desk._reading.ledger.surrogate._rows["default"]] == [0.75]
    rows = len(log.rows)
    await desk.poll()
    assert len(log.rows) == rows, "it does not ask again and again for one whose place is taken"


async def test_switched_off_it_keeps_no_row_from_retention():
    log, now, folds = MemoryLog(), Now(), MemoryFolds()
    desk = desk_of(log, now, folds=folds)
    await told(log, a_turn("old", ended_at=0.0), "accepted")
    now.at = 40.0
    await desk.poll()
    await log.append(Holdback(turn="old", reason="too_few: none came", at=now.at))
    await desk.poll()
    await desk.save()
    assert await needed_above(folds, CONFIG, now.at) == 0, "it is still to be asked about"
    assert await needed_above(folds, CONFIG, CONFIG.longest_wait_s + 1.0) == 5, "too long ago"
    off = CONFIG.model_copy(update={"surrogate": SurrogateConfig()})
    assert await needed_above(folds, off, now.at) == 5
    without = RewardDesk(log, Inline(hour, max_abs=9.0), now, off, folds=folds)
    await log.append(Holdback(turn="other", reason="too_few", at=CONFIG.longest_wait_s + 1.0))
    await without.poll()
    assert not without._reading.ledger.surrogate.awaited, "forgotten once its time is over"


async def test_a_turn_from_the_future_ends_nobodys_wait():
    log, now = MemoryLog(), Now()
    at_once = Inline(lambda turn, signals, at: hour(replace(turn, ended_at=0.0), signals, at), max_abs=9.0)
    desk = RewardDesk(log, at_once, now, CONFIG, late_asker=Inline(late, max_abs=9.0))
    await told(log, a_turn("future", ended_at=1e9), "accepted", at=-1e9 + 5.0)
    for i in range(3):
        await told(log, replace(a_turn(f"t{i}", ended_at=float(i)), tenant="acme"), "accepted")
    now.at = 40.0
    await desk.poll()
    assert list(desk._reading.ledger.surrogate.awaited) == ["future", "t0", "t1", "t2"]
    now.at = 2000.0
    await desk.poll()
    assert [turn for turn, _, _ in late_rows(log)] == ["t0", "t1", "t2"]
    await log.append(Holdback(turn="other", reason="too_few", at=2e9))
    await desk.poll()
    assert not desk._reading.ledger.surrogate.awaited


async def test_silence_while_feedback_is_lost_is_no_late_reward():
    log, now, folds = MemoryLog(), Now(), MemoryFolds()
    desk = desk_of(log, now, folds=folds)
    other = replace(a_turn("other", ended_at=0.0), tenant="acme")
    await told(log, other, "accepted")
    await told(log, a_turn("before", ended_at=0.0), "accepted")
    now.at = 40.0
    await desk.poll()
    lost = Alarm(id="coverage:default:1", name="coverage:default", state=AlarmState.RAISED, reason="lost", at=50.0)
    await log.append(lost)
    await told(log, a_turn("meanwhile", ended_at=60.0), "accepted")
    await told(log, a_turn("at its end", ended_at=180.0), "accepted")
    now.at = 100.0
    await desk.poll()
    assert list(desk._reading.ledger.surrogate.awaited) == ["other"]
    await log.append(replace(lost, id="coverage:default:2", state=AlarmState.CLEARED, at=200.0))
    await told(log, a_turn("after", ended_at=210.0), "accepted")
    await desk.poll()
    await desk.close()
    desk = desk_of(log, now, folds=folds)
    for now.at in (250.0, 3000.0):
        await desk.poll()
    assert {row.turn for row in log.rows if isinstance(row, Reward)} == {
        *("other", "before", "meanwhile", "at its end", "after")
    }
    assert [turn for turn, _, _ in late_rows(log)] == ["other", "after"]


# ---------------------------------------------------------------- the regression


def surrogate(**more):
    return Surrogate(SurrogateConfig(truth_after_s=10.0, signals=("kept",), **more), 1.0, 1e6)


def early_reward(turn, kept):
    at = turn.ended_at + 5.0
    signals = [a_signal(turn, "accepted", at=at), a_signal(turn, "kept", at=at, value=kept)]
    reward = Reward(turn=turn.id, value=0.75, function="f@1", signals=(), at=at)
    return reward, early_values(reward, turn.ended_at, signals, ("kept",))


def teach(found, number, kept, truth, *, user="ann", tenant="default", arm=Arm.LIVE):
    turn = replace(a_turn(f"{tenant}/{number}", user=user, arm=arm), tenant=tenant)
    reward, early = early_reward(turn, kept)
    reward = replace(reward, function="f@1 -> 10 s", early=tuple(early.items()))
    found.follow(TurnFacts.of(number, turn, RewardConfig()), (), reward, control=arm is Arm.CONTROL)
    found.learn(
        replace(a_signal(turn, LATE_REWARD, id=late_id(turn.id), value=truth), source=Source.CODE, tenant=tenant)
    )


def expected(found, kept, tenant="default"):
    return found.predicted(tenant, *early_reward(a_turn("q:0"), kept), 100.0).value


def taught(count=300, gone=(), **more):
    found, draw = surrogate(**more), random.Random(5)
    for i in range(count):
        user, kept = f"u{draw.randrange(20)}", draw.random()
        truth = (0.75 if draw.random() < kept else -0.25) if user != "u3" else -5.0
        if user not in gone:
            teach(found, i, kept, truth, user=user)
    return found


def test_predictions_move_from_the_early_reward_to_what_came_as_turns_come():
    found = surrogate()
    assert expected(found, 0.0) == 0.75, "nothing is known"
    for i in range(3):
        teach(found, i, 0.0, -0.25)
    assert 0.2 < expected(found, 0.0) < 0.75, "little is"
    found = taught(2000, gone={"u3"})
    for kept in (0.1, 0.5, 0.9):
        assert expected(found, kept) == pytest.approx(kept - 0.25, abs=0.1)
    assert expected(found, -9.0) >= -0.25, "never beyond what was seen"


def test_a_forgotten_person_is_taken_out_to_the_last_bit():
    found, without = taught(), taught(gone={"u3"})
    assert expected(found, 0.4) != expected(without, 0.4)
    found.forget(lambda person: person == ("default", "u3"))
    assert expected(found, 0.4) == expected(without, 0.4)
    assert "u3" not in str(found.snapshot())


def test_a_tenants_and_a_persons_part_are_bounded():
    found = surrogate(memory=200)
    for i in range(400):
        teach(found, i, 0.5, -100.0, tenant="acme", user=f"u{i % 9}")
    assert expected(found, 0.5) == 0.75, "another tenant's people have no part in it"
    capped = Surrogate(SurrogateConfig(truth_after_s=10.0, memory=200), 0.1, 1e6)
    for i in range(2000):
        teach(capped, i, 0.5, 0.0, user=f"u{i % 50}" if i % 5 else "busy")
    held = Counter(row.person[1] for row in capped._rows["default"])
    assert held["busy"] <= 0.1 * 200 + 1
    assert sum(held.values()) == 200


def test_too_many_to_wait_for_are_thinned_evenly_and_cost_no_other_tenant():
    found = surrogate(most_awaited=100)
    reward, early = early_reward(a_turn(), 0.5)
    reward = replace(reward, early=tuple(early.items()))
    for i in range(3000):
        for tenant in ("flood",) if i % 100 else ("flood", "quiet"):
            turn = replace(a_turn(f"{tenant}{i}"), tenant=tenant)
            found.follow(TurnFacts.of(i, turn, RewardConfig()), (), reward, control=False)
    held = Counter(each.person[0] for each in found.awaited.values())
    assert sum(held.values()) <= 100
    assert held["quiet"] == 30
    places = [each.seq for each in found.awaited.values() if each.person[0] == "flood"]
    assert 1000 < np.median(places) < 2000, "neither the first nor the last ones alone"


def test_values_of_another_function_are_not_compared():
    found = taught(200, gone={"u3"})
    reward, early = early_reward(a_turn("q:0"), 0.1)
    assert found.predicted("default", replace(reward, function="f@2"), early, 100.0).value == 0.75


@pytest.mark.parametrize(("more", "raised"), [(0.0, False), (0.1, True)])
def test_rounding_errors_raise_no_alarm_about_a_gap(more, raised):
    found, alarms = surrogate(), Alarms(CoverageConfig())
    for i in range(200):
        control, truth = bool(i % 2), (0.3, 0.6)[i % 4 // 2]
        turn = a_turn(f"x{i}", user=f"u{i % 80}", arm=Arm.CONTROL if control else Arm.LIVE)
        value = truth if control else math.nextafter(truth, 1.0) + more
        reward = Reward(turn=turn.id, value=value, function="f", signals=(), at=1.0, early=(("reward", value),))
        found.follow(TurnFacts.of(i, turn, RewardConfig()), (), reward, control=control)
        at = 5.0 if i < 199 else EVALUATE_EVERY_S
        found.learn(replace(a_signal(turn, LATE_REWARD, id=late_id(turn.id), value=truth, at=at), source=Source.CODE))
    assert found.qualities()["default"].gap > 0.0
    assert [row.name for row in found.due(alarms, 1.0)] == ["surrogate_gap:default"] * raised


def test_late_rewards_that_are_all_alike_say_nothing_of_predictions_and_raise_no_alarm():
    """87 times 0.1 has a mean that is not 0.1."""
    found, alarms = surrogate(), Alarms(CoverageConfig())
    truths = np.full(87, 0.1)
    assert truths.mean() != 0.1
    found._rows["default"] = [
        pair(f"u{i}", control=False, predicted=0.01 * i, truth=truth) for i, truth in enumerate(truths.tolist())
    ]
    found._evaluate("default", EVALUATE_EVERY_S)
    assert found.qualities()["default"].correlation is None
    assert list(found.due(alarms, EVALUATE_EVERY_S)) == []


def pair(user, *, control, predicted, truth):
    person = ("default", user)
    return TruthPair(
        person=person, cap=person, control=control, function="f", early={}, predicted=predicted, truth=truth
    )


def a_window(rng, people, control, activity, own, gap):
    """500 turns, some people's more often than others' (`activity`), each person mispredicted by an amount of their own (`own`)."""
    busy_U, own_U = rng.lognormal(0.0, activity, people), rng.normal(0.0, own, people)
    for user in rng.choice(people, 500, p=busy_U / busy_U.sum()).tolist():
        truth = float(rng.random() < 0.5)
        predicted = 0.3 + 0.4 * truth + own_U[user] + rng.normal(0.0, 0.2) + gap * (user >= control)
        yield pair(f"u{user}", control=user < control, predicted=predicted, truth=truth)


@pytest.mark.parametrize(
    ("world", "windows", "least", "most"),
    [
        ((200, 35, 1.3, 1.0, 0.0), 600, 0, 1),  # by four plain standard errors it is three
        ((120, 30, 0.3, 0.3, 0.6), 100, 90, 100),
    ],
)
def test_an_even_world_raises_no_alarm_about_a_gap_and_an_uneven_one_does(world, windows, least, most):
    rng, raised = np.random.default_rng(11), 0
    for _ in range(windows):
        found = surrogate()
        found._rows["default"] = list(a_window(rng, *world))
        found._evaluate("default", EVALUATE_EVERY_S)
        raised += "surrogate_gap:default" in [row.name for row in found.due(Alarms(CoverageConfig()), EVALUATE_EVERY_S)]
    assert least <= raised <= most


def test_alarms_are_looked_at_once_in_four_hours_whatever_comes_in_between():
    found, alarms = surrogate(least_correlation=0.9), Alarms(CoverageConfig())

    def hear(count, at, predicted):
        for i in range(count):
            turn = a_turn(f"{at}/{i}", user=f"u{i % 60}")
            reward = Reward(
                turn=turn.id, value=predicted(i), function="f", signals=(), at=1.0, early=(("reward", 0.0),)
            )
            found.follow(TurnFacts.of(i, turn, RewardConfig()), (), reward, control=False)
            said = a_signal(turn, LATE_REWARD, id=late_id(turn.id), value=float(i % 2), at=at)
            found.learn(replace(said, source=Source.CODE))
        return [row.name for row in found.due(alarms, at)]

    assert not hear(100, 1.0, lambda i: float(i % 2))
    assert not hear(1, EVALUATE_EVERY_S, lambda i: float(i % 2)), "it is told well"
    assert not hear(400, EVALUATE_EVERY_S + 1.0, lambda i: float(i % 3)), (
        "which is looked at no more until eight o'clock"
    )
    again = surrogate(least_correlation=0.9)
    again.restore(found.snapshot())
    assert not list(again.due(alarms, 2 * EVALUATE_EVERY_S))
    assert hear(1, 2 * EVALUATE_EVERY_S, lambda i: float(i % 2)) == ["surrogate:default"]


def apply_due(found, alarms, at, polls=1):
    """The states of the rows about a gap that so many polls write."""
    rows = list[Alarm]()
    for _ in range(polls):
        for row in list(found.due(alarms, at)):
            alarms.apply(row)
            rows.append(row)
    return [row.state.value for row in rows if row.name == "surrogate_gap:default"]


def with_a_gap(control=20, window=500):
    """A surrogate that has raised the alarm about a gap, with one old turn of each person on control."""
    found, alarms, rng = surrogate(), Alarms(CoverageConfig()), np.random.default_rng(0)
    for i in range(window):
        truth, on_control = float(rng.random()), i < control
        predicted = truth + 0.01 * float(rng.random()) + 0.5 * (not on_control)
        user = f"c{i}" if on_control else f"l{i % 60}"
        found._rows.setdefault("default", []).append(
            pair(user, control=on_control, predicted=predicted, truth=truth)._replace(function="f@1 -> 10 s")
        )
    found._rows_by_person["default"] = Counter(row.cap for row in found._rows["default"])
    found._evaluate("default", 0.0)
    assert apply_due(found, alarms, 1.0, polls=5) == ["raised"]
    return found, alarms


@pytest.mark.parametrize("relabelled", [False, True])
def test_an_alarm_about_a_gap_does_not_flap_when_too_few_people_are_left_to_compare(relabelled):
    found, alarms = with_a_gap()
    if relabelled:
        teach(found, 1, 0.5, 0.5, user="c19", arm=Arm.CONTROL)
        found._rows["default"][-1] = found._rows["default"][-1]._replace(function="f@2 -> 10 s")
        found._invalidate("default")
    else:
        teach(found, 1, 0.5, 0.5, user="l1")
    assert found.qualities()["default"].gap is None
    assert apply_due(found, alarms, 20.0, polls=5) == [], "what was looked at stands until the next look"
    found._evaluate("default", EVALUATE_EVERY_S)
    assert apply_due(found, alarms, EVALUATE_EVERY_S, polls=5) == ["cleared"]


@pytest.mark.parametrize(("gone", "rows"), [("l1", []), ("c1", ["cleared"])])
def test_after_somebody_is_forgotten_what_is_left_says_whether_an_alarm_ends(gone, rows):
    found, alarms = with_a_gap()
    found.forget(lambda person: person == ("default", gone))
    assert apply_due(found, alarms, 20.0, polls=5) == rows


def test_a_snapshot_from_before_alarms_were_looked_at_every_four_hours_is_taken_over():
    found, alarms = with_a_gap()
    config = RewardConfig(surrogate=found._config)
    ledger = TurnLedger(config)
    ledger.surrogate = found
    state = json.loads(json.dumps(snapshot(ledger)))
    assert state["format"] == "ledger@16", "which had neither of these"
    del state["surrogate"]["looked"], state["surrogate"]["seen"]
    again = restored(state, config)
    assert again is not None
    assert expected(again.surrogate, 0.4) == expected(found, 0.4)
    assert apply_due(again.surrogate, alarms, 20.0, polls=5) == []
    again.surrogate._evaluate("default", 20.0)
    assert again.surrogate._evaluated == found._evaluated


@pytest.mark.parametrize("freedom", [8.0, 19.0, 60.0, INFINITE_DF])
def test_bounds_of_few_people_are_students(freedom):
    for normal in (1.96, CORRELATION_Z, GAP_Z):
        exact = stats.t.isf(stats.norm.sf(normal), freedom)
        assert student_quantile(normal, freedom) == pytest.approx(exact, rel=0.01)


# ---------------------------------------------------------------- erasure and settings


async def test_a_replay_without_somebody_predicts_without_their_late_rewards():
    run = Run(config_of("surrogate", memory=400, **SOON), QUICK)
    await run.go(14, 20)
    users = {turn.id: turn.user for turn in run.log.turns()}
    gone = next(users[signal.turn] for signal in run.log.signals() if signal.name == LATE_REWARD)

    async def ledger_of(people, config=run.config):
        refold = CreditRefold(run.log, config, Taught(every=True), erased_people(dict.fromkeys(people, 1 << 40)))
        batches = [batch async for batch in refold.batches()]
        return refold._ledger, batches

    whole, batches = await ledger_of([("default", "nobody")])
    assert not any(batch.changed for batch in batches)
    other = run.config.surrogate.model_copy(update={"ridge": 100.0})
    with pytest.raises(Corrupt, match=r"reward\.surrogate"):
        await ledger_of([("default", "nobody")], run.config.model_copy(update={"surrogate": other}))
    left, batches = await ledger_of([("default", gone)])
    assert any(batch.changed for batch in batches)
    fresh = Surrogate(run.config.surrogate, run.config.user_cap, run.config.longest_wait_s)
    values = {}
    for row in run.log.rows:  # the definition, once more: rows about others only, each reward predicted anew
        if isinstance(row, Reward) and users[row.turn] != gone:
            turn = next(iter(await run.log.find(Turn, [(row.turn,)])))
            row = fresh.predicted("default", row, dict(row.early), run.config.max_abs)
            values[row.turn] = row.value
            facts = TurnFacts.of(0, turn, run.config)
            fresh.follow(facts, (), row, control=turn.arm is Arm.CONTROL)
        elif isinstance(row, Signal) and row.name == LATE_REWARD:
            fresh.learn(row)
    assert [row.predicted for row in left.surrogate._rows["default"]] == [
        row.predicted for row in fresh._rows["default"]
    ]
    assert {turn: entry.value for turn, entry in left.matured.items()} == {turn: values[turn] for turn in left.matured}
    assert any(values[turn] != whole.matured[turn].value for turn in left.matured)


def test_settings_that_cannot_be_meant_are_refused_with_the_remedy():
    for given, words in (
        ({"surrogate": {"truth_after_s": 9e5}}, "longest_wait_s"),
        ({"surrogate": {"truth_after_s": 60.0}, "options": {"window": 60.0}}, "shorter window"),
        ({"surrogate": {"options": {"t": 0.1}}}, "surrogate.function"),
    ):
        with pytest.raises(ValueError, match=words):
            RewardConfig.model_validate(given)
    assert late_asker_of(RewardConfig()) is None
    with pytest.raises(BadConfig, match=r"truth_after_s = 600 is within the window .* 3600 s"):
        late_asker_of(RewardConfig(surrogate=SurrogateConfig(truth_after_s=600.0)))
    with pytest.raises(BadConfig, match=r"reward\.surrogate\.options\.x"):
        late_asker_of(
            RewardConfig(
                surrogate=SurrogateConfig(
                    truth_after_s=DAY, function="ostinato.reward.functions:agent", options={"x": 1}
                )
            )
        )
