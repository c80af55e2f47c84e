"""What cannot stop or bend learning: other tenants, bad reward functions, answers that nobody got."""

import sys
from dataclasses import replace

import pytest
from tests.oracles.turn_accounting import recount
from tests.unit.reward.hanging import time_begins_with_a_hang

from ostinato.core.errors import BadConfig
from ostinato.core.notices import Alarm, AlarmState
from ostinato.core.records import Arm, Finish, Holdback, NoReward, Pending, PolicyVersion, Quarantine, Reward
from ostinato.reward.accounting import account
from ostinato.reward.config import RewardConfig
from ostinato.reward.pipeline import RewardDesk
from ostinato.reward.protocol import Failure, Unloadable
from ostinato.reward.runners import Isolated
from ostinato.testing.records import a_delivery, a_signal

V0 = PolicyVersion(number=0, hash="00")

# ---------------------------------------------------------------- tenants


async def test_a_signal_reaches_only_its_own_tenants_turns(log, now, open_desk, turn):
    mine = turn(0, tenant="acme")
    rivals = replace(mine, tenant="rival")  # what the rival's signals would be about
    await log.append(
        a_signal(rivals, "rejected", id="early"),
        mine,
        a_signal(mine, "accepted", id="s1"),
        a_signal(rivals, "undone", id="s2"),
        a_signal(rivals, "sorry", id="s3", retracts="s1"),
        a_signal(rivals, "accepted", id="s1"),  # the same id is another signal
    )
    now.at = 99.0
    await open_desk(log).poll()
    (reward,) = log.of(Reward)
    assert (reward.value, reward.signals) == (0.75, ("s1",))
    found = await account(log)
    assert (found.foreign, found.orphans) == (3, 1)


async def test_another_tenants_word_is_no_proof_of_delivery_and_cannot_unsettle_what_is_decided(
    log, now, open_desk, turn
):
    unseen, praised = turn(0, tenant="acme"), turn(1, tenant="acme")
    await log.append(unseen, praised, a_signal(replace(unseen, tenant="rival")), a_signal(praised, id="s"))
    now.at = 99.0
    desk = open_desk(log)
    await desk.poll()
    assert log.reasons(Holdback) == {"t0:0": "undelivered"}
    await log.append(a_signal(replace(praised, tenant="rival"), "sorry", id="x", at=98.0, retracts="s"))
    await desk.poll()
    assert [each.id for each in await desk.ready(0, 1)] == ["t1:0"]
    assert (await account(log)).foreign == 2


# ---------------------------------------------------------------- bad reward functions


def reward(turn, value=1.0, **more) -> Reward:
    return Reward(turn=turn.id, value=value, function="f@1", signals=(), at=30.0, **more)


def failing(turn, signals, now):
    """Fails on every third turn, each time in another way."""
    number = int(turn.id[1:].partition(":")[0])
    if number % 3:
        return reward(turn)
    ways = [
        lambda: 1 / 0,
        lambda: reward(turn, float("nan")),
        lambda: reward(turn, 1e200),
        lambda: "well done",
        lambda: reward(replace(turn, id="other:0")),
        lambda: sys.exit(1),
        lambda: Pending(until=now),
    ]
    return ways[number // 3 % len(ways)]()


async def test_a_bad_answer_costs_its_own_turn_only(log, now, open_desk, turn):
    turns = [turn(i, arm=Arm.CONTROL if i == 3 else Arm.LIVE) for i in range(21)]
    await log.append(*turns, a_delivery(*turns))
    desk = open_desk(log, fn=failing)
    now.at = 99.0
    await desk.poll()
    reasons = log.reasons(Quarantine)
    assert set(reasons) == {f"t{i}:0" for i in range(0, 21, 3)}
    assert reasons["t0:0"] == "reward_failed: ZeroDivisionError: division by zero"
    assert reasons["t6:0"].startswith("reward_nonsense: the value 1e+200")
    assert {row.turn for row in log.of(Reward)} == {f"t{i}:0" for i in range(21) if i % 3}
    held = log.reasons(Holdback)
    assert held == {turn: "arm:control" if turn == "t3:0" else why for turn, why in reasons.items()}
    assert len(await desk.ready(0, 14)) == 14
    rows = len(log.rows)
    await desk.poll()
    assert len(log.rows) == rows, "nothing is asked twice"
    found = await account(log)
    assert found.balanced
    assert found.quarantined == {"reward_failed": 2, "reward_nonsense": 5}
    assert (await recount(log)).balanced


async def test_an_alarm_is_raised_once_while_the_function_fails_and_cleared_when_it_works_again(
    log, now, open_desk, turn
):
    broken = [True]

    def fn(turn, signals, now):
        return 1 / 0 if broken[0] else reward(turn)

    desk = open_desk(log, fn=fn)
    now.at = 99.0
    for i in range(3):
        await log.append(turn(i), a_delivery(turn(i)))
        await desk.poll()
    (raised,) = log.of(Alarm)
    assert (raised.name, raised.state) == ("reward_function", AlarmState.RAISED)
    assert "t0:0: reward_failed: ZeroDivisionError" in raised.reason
    broken[0] = False
    await log.append(turn(10), a_delivery(turn(10)))
    await desk.poll()
    assert len(log.of(Alarm)) == 1, "one good answer is no proof"
    desk = open_desk(log, fn=fn)  # a restart changes nothing
    more = [turn(i) for i in range(11, 40)]
    await log.append(*more, a_delivery(*more))
    await desk.poll()
    _, cleared = log.of(Alarm)
    assert (cleared.name, cleared.state, cleared.id) == ("reward_function", AlarmState.CLEARED, "reward_function:2")
    assert (await account(log)).alarms == ()


HANGS = """
from ostinato.core.records import Reward

def fn(turn, signals, now):
    if turn.id in ("t3:0", "t7:0"):
        open(__file__ + ".hangs", "w").close()
    while turn.id in ("t3:0", "t7:0"):
        try:
            [].pop()
        except BaseException:
            pass
    return Reward(turn=turn.id, value=1.0, function="f@1", signals=(), at=30.0)
"""


async def test_a_function_that_hangs_and_catches_everything_holds_nobody_up(log, now, turn, tmp_path, monkeypatch):
    (tmp_path / "hanging_reward.py").write_text(HANGS)
    monkeypatch.syspath_prepend(str(tmp_path))
    time_begins_with_a_hang(monkeypatch, tmp_path / "hanging_reward.py.hangs")
    asker = Isolated("hanging_reward:fn", {}, answer_s=0.3, load_s=60.0, max_abs=100.0, memory_bytes=1 << 30)
    desk = RewardDesk(log, asker, now, RewardConfig())
    turns = [turn(i) for i in range(12)]
    await log.append(*turns, a_delivery(*turns))
    now.at = 99.0
    await desk.poll()
    await desk.poll()
    assert log.reasons(Quarantine) == dict.fromkeys(("t3:0", "t7:0"), "reward_hung: no answer in 0.3 s")
    assert len(log.of(Reward)) == 10
    assert [row.name for row in log.of(Alarm)] == ["reward_function"]
    await desk.close()


class Broken:
    """An asker whose function cannot be loaded, until it can."""

    def __init__(self) -> None:
        self.error: Exception | None = Unloadable("reward.function 'x:y': gone")

    async def ask(self, questions):
        if self.error is not None:
            raise self.error
        return [reward(question.turn) for question in questions]

    async def close(self) -> None: ...


async def test_turns_wait_while_a_function_cannot_be_loaded_and_none_is_blamed(log, now, turn):
    asker = Broken()
    desk = RewardDesk(log, asker, now, RewardConfig())
    await log.append(turn(0), turn(1, finish=Finish.ABORT), a_delivery(turn(0)))
    now.at = 99.0
    for _ in range(3):
        await desk.poll()
    (alarm,) = log.of(Alarm)
    assert "gone" in alarm.reason
    assert log.reasons(Holdback) == {"t1:0": "finish:abort"}
    asker.error = None
    await desk.poll()
    assert [row.turn for row in log.of(Reward)] == ["t0:0"]
    asker.error = BadConfig("reward.options.windwo: no such option")
    await log.append(turn(5))
    with pytest.raises(BadConfig, match="windwo"):
        await desk.poll()


async def test_a_turn_that_could_not_be_asked_about_in_time_waits_no_longer(log, now, turn):
    desk = RewardDesk(log, Broken(), now, RewardConfig(longest_wait_s=1000.0))
    await log.append(turn(0), turn(1, ended_at=500.0), turn(2, arm=Arm.CONTROL), a_delivery(turn(0)))
    now.at = 1009.0
    await desk.poll()
    assert log.of(Quarantine) == []
    now.at = 1010.0
    for _ in range(2):
        await desk.poll()
    why = "unasked: reward.longest_wait_s is over"
    assert [(row.turn, row.reason) for row in log.of(Quarantine)] == [("t0:0", why), ("t2:0", why)]
    assert log.reasons(Holdback) == {"t0:0": why, "t2:0": "arm:control"}
    found = await account(log)
    assert (found.waiting, found.balanced, found.alarms) == (1, True, ("reward_function",))


class Slow:
    """An asker that gets round to one question at a time, as if the function always hung."""

    async def ask(self, questions):
        return [Failure(reason="reward_hung: x"), *[None] * (len(questions) - 1)]

    async def close(self) -> None: ...


async def test_a_backlog_of_a_function_that_hangs_ends_too(log, now, turn):
    desk = RewardDesk(log, Slow(), now, RewardConfig(longest_wait_s=1000.0))
    await log.append(*[turn(i) for i in range(10)])
    for now.at in (20.0, 21.0):
        await desk.poll()
    assert len(log.of(Quarantine)) == 2
    now.at = 1010.0
    await desk.poll()
    kinds = [row.reason.partition(":")[0] for row in log.of(Quarantine)]
    assert kinds == ["reward_hung"] * 3 + ["unasked"] * 7
    assert (await recount(log)).waiting == 0


async def test_a_function_that_has_no_reward_says_why(log, now, open_desk, turn):
    await log.append(turn(0), turn(1, arm=Arm.CONTROL), a_delivery(turn(0), turn(1)))
    now.at = 99.0
    await open_desk(log, fn=lambda turn, signals, now: NoReward(reason="silence")).poll()
    assert log.reasons(Quarantine) == dict.fromkeys(("t0:0", "t1:0"), "no_reward:silence")
    assert log.reasons(Holdback) == {"t0:0": "no_reward:silence", "t1:0": "arm:control"}
    assert log.of(Alarm) == [], "that is no failure"


async def test_a_function_that_never_decides_is_asked_a_last_time(log, now, open_desk, turn):
    config = RewardConfig(longest_wait_s=1000.0, settle_s=0.0)
    desk = open_desk(log, fn=lambda turn, signals, now: Pending(until=now + 1e9), config=config)
    await log.append(turn(0), a_delivery(turn(0)))
    for now.at in (20.0, 1009.0):
        await desk.poll()
        assert log.of(Quarantine) == []
    now.at = 1010.0
    await desk.poll()
    assert log.reasons(Holdback) == {"t0:0": "pending: reward.longest_wait_s is over"}
    assert (await recount(log)).waiting == 0


# ---------------------------------------------------------------- delivered or not


async def test_only_answers_that_somebody_got_are_learned_from(log, now, open_desk, turn):
    sent, spoken, lost = turn(0), turn(1), turn(2)
    kept, judged = turn(3, arm=Arm.CONTROL), turn(4, arm=Arm.EVAL)
    await log.append(sent, spoken, lost, kept, judged, a_delivery(sent), a_signal(spoken, "rejected"))
    desk = open_desk(log, config=RewardConfig(delivery_s=60.0))
    now.at = 41.0
    await desk.poll()
    assert {row.turn for row in log.of(Reward)} == {"t0:0", "t1:0"}
    assert log.of(Quarantine) == [], "the record of a delivery may still be on its way"
    now.at = 70.6
    await desk.poll()
    assert log.reasons(Quarantine) == dict.fromkeys(("t2:0", "t3:0"), "undelivered")
    assert log.reasons(Holdback) == {"t2:0": "undelivered", "t3:0": "arm:control", "t4:0": "arm:eval"}
    assert len(await desk.ready(0, 2)) == 2


async def test_a_delivery_that_is_recorded_late_counts_until_it_was_missed(log, now, open_desk, turn):
    await log.append(turn(0), turn(1))
    desk = open_desk(log)
    now.at = 50.0
    await desk.poll()
    await log.append(a_delivery(turn(0), at=49.0))
    await desk.poll()
    assert [row.turn for row in log.of(Reward)] == ["t0:0"]
    now.at = 71.0
    await desk.poll()
    await log.append(a_delivery(turn(1), at=72.0))
    await desk.poll()
    assert [row.turn for row in log.of(Reward)] == ["t0:0"]


# ---------------------------------------------------------------- late and retracted


async def test_a_retraction_before_training_keeps_the_turn_out_and_after_it_is_counted(log, now, open_desk, turn):
    turns = [turn(i) for i in range(3)]
    await log.append(*turns, *[a_signal(each, id=f"s{i}") for i, each in enumerate(turns)])
    await log.append(a_signal(turns[2], "rejected", at=12.0))
    now.at = 41.0
    desk = open_desk(log)
    await desk.poll()
    await log.append(a_signal(turns[0], "sorry", id="r0", at=42.0, retracts="s0"))
    await desk.poll()
    assert log.reasons(Holdback) == {"t0:0": "retracted"}
    assert await desk.batch(1, 2, V0)
    await log.append(a_signal(turns[1], "sorry", id="r1", at=50.0, retracts="s1"), a_signal(turns[1], at=51.0))
    await desk.poll()
    found = await account(log)
    assert (found.late, found.retracted, found.trained, found.held["retracted"]) == (3, 1, 2, 1)
    assert len(log.of(Reward)) == 3, "what was decided stays decided"
    assert found.balanced
