"""What cannot stop or bend learning: other tenants, bad reward functions, floods, answers that nobody got."""

import random
import string
import sys
from dataclasses import replace

import pytest

from ostinato.core.errors import BadConfig
from ostinato.core.records import (
    Alarm,
    AlarmState,
    Arm,
    Finish,
    Holdback,
    NoReward,
    Pending,
    PolicyVersion,
    Quarantine,
    Reward,
    Signal,
)
from ostinato.reward.accounting import account, recount
from ostinato.reward.asking.isolated import Isolated
from ostinato.reward.asking.question import Unloadable
from ostinato.reward.config import RewardConfig
from ostinato.reward.desk import RewardDesk
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
    asker = Isolated("hanging_reward:fn", {}, answer_s=0.3, load_s=60.0, max_abs=100.0)
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


# ---------------------------------------------------------------- when it is asked


async def test_a_turn_is_asked_about_once_per_deadline_and_when_something_is_said(log, now, open_desk, turn):
    asked: list[tuple[str, int]] = []

    def fn(turn, signals, now):
        asked.append((turn.id, len(signals)))
        return Pending(until=500.0) if now < 500.0 else reward(turn)

    desk = open_desk(log, fn=fn)
    turns = [turn(i) for i in range(5)]
    await log.append(*turns, a_delivery(*turns))
    for now.at in range(20, 499):
        await desk.poll()
    assert asked == [(each.id, 0) for each in turns], "one question each, in 479 polls"
    await log.append(a_signal(turns[2]))
    await desk.poll()
    await desk.poll()
    assert asked[5:] == [("t2:0", 1)]
    for now.at in (500.4, 500.5, 600.0):
        await desk.poll()
    assert sorted(asked[6:]) == [("t0:0", 0), ("t1:0", 0), ("t2:0", 1), ("t3:0", 0), ("t4:0", 0)]


async def test_a_function_that_needs_no_window_decides_at_once(log, now, open_desk, turn):
    def eager(turn, signals, now):
        return reward(turn) if signals else Pending(until=1000.0)

    desk = open_desk(log, fn=eager)
    await log.append(turn(0))
    now.at = 12.0
    await desk.poll()
    await log.append(a_signal(turn(0)))
    await desk.poll()
    assert len(log.of(Reward)) == 1


class Counting:
    """A log that counts the rows that are fetched by name."""

    def __init__(self, log) -> None:
        self._log = log
        self.found = 0

    def __getattr__(self, name: str):
        return getattr(self._log, name)

    async def find(self, kind, identities):
        rows = await self._log.find(kind, identities)
        self.found += len(rows)
        return rows


async def test_a_poll_costs_what_is_due_and_not_what_is_open(log, now, open_desk, turn):
    counting = Counting(log)
    desk = open_desk(counting)
    many = [turn(i, ended_at=1000.0 + i) for i in range(1000)]
    await log.append(*many, a_delivery(*many))
    now.at = 1000.0
    await desk.poll()
    assert counting.found == 1000, "each is asked about once, to learn when"
    counting.found = 0
    for _ in range(50):
        await desk.poll()
    assert counting.found == 0
    now.at = 1040.6  # 11 windows of 30 s have closed
    await desk.poll()
    assert (counting.found, len(log.of(Reward))) == (11, 11)


# ---------------------------------------------------------------- floods


async def test_signals_about_no_turn_are_bounded_in_number_bytes_and_time(log, now, open_desk, turn):
    config = RewardConfig(max_orphans=100, orphan_bytes=20_000, orphan_s=60.0)
    desk = open_desk(log, config=config)
    dice = random.Random(5)

    def forged(i: int, size: int, at: float) -> Signal:
        comment = "".join(dice.choices(string.printable, k=60_000))
        name = f"{i}".rjust(size, "x")
        return replace(a_signal(turn(0), at=at), id=f"s{name}", turn=f"none{name}", comment=comment)

    await log.append(*[forged(i, 4, 1.0 + i / 1000) for i in range(400)])
    await desk.poll()
    orphans = desk._reading.ledger.orphans
    assert (orphans.count, orphans.dropped) == (100, 300)
    await log.append(*[forged(1000 + i, 200, 2.0) for i in range(100)])
    await desk.poll()
    assert orphans.bytes <= 20_000
    assert orphans.count < 50
    # real feedback that comes before its turn is still heard, if not for long
    await log.append(a_signal(turn(0), at=3.0), a_signal(turn(1), at=3.0))
    await log.append(turn(0, ended_at=30.0))
    await desk.poll()
    await log.append(turn(2, ended_at=63.5), turn(1, ended_at=64.0))
    now.at = 999.0
    await desk.poll()
    assert {row.turn: row.value for row in log.of(Reward)} == {"t0:0": 0.75}
    assert log.reasons(Quarantine) == dict.fromkeys(("t1:0", "t2:0"), "undelivered")
    found = await account(log, config=config)
    assert found.orphans == 0
    assert found.forgotten == 501


async def test_only_so_many_signals_of_one_turn_count_and_none_is_held_whole(log, now, open_desk, turn):
    asked: list[int] = []

    def fn(turn, signals, now):
        asked.append(len(signals))
        return Pending(until=50.0) if now < 50.0 else reward(turn)

    desk = open_desk(log, fn=fn, config=RewardConfig(max_signals=10))
    await log.append(turn(0), *[replace(a_signal(turn(0), id=f"s{i}"), comment="x" * 60_000) for i in range(500)])
    now.at = 60.0
    await desk.poll()
    assert asked == [10]
    assert (await account(log, config=RewardConfig(max_signals=10))).excess == 490


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
