"""A reward function tried on a log says what the desk would have written, and whatever it does, it is reported and stops nothing."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from scipy import special, stats
from tests.unit.reward.hanging import time_begins_with_a_hang

from ostinato.core.errors import BadConfig
from ostinato.core.records import Arm, Finish, NoReward, Pending, Quarantine, Reward, Source
from ostinato.core.verdicts import LATE_REWARD, late_id
from ostinato.reward.backtest import RewardOutcome, backtest, compare, past_turns
from ostinato.reward.config import RewardConfig
from ostinato.reward.functions import considered, copilot
from ostinato.reward.ledger import TurnLedger
from ostinato.reward.runners import Inline, Isolated
from ostinato.testing.records import a_delivery, a_signal, a_turn

CONFIG = RewardConfig(settle_s=0.0, user_cap=1.0, coverage={"enabled": False})
LONG_AFTER = 1e7


def waits(turn, signals, now):
    """The last word within 30 s decides; silence is no reward."""
    return copilot(turn, signals, now, window=30.0, silence=None)


def eager(turn, signals, now):
    """Decides at once, on what is known then."""
    kept = considered(signals, now)
    return Reward(turn=turn.id, value=float(len(kept)), function="eager@1", signals=tuple(s.id for s in kept), at=now)


def listens(turn, signals, now):
    """Waits for a first signal, however long that takes."""
    if not signals:
        return Pending(until=now + 1e6)
    return Reward(turn=turn.id, value=signals[-1].value, function="listens@1", signals=(), at=now)


def traffic(rng: random.Random, count: int = 60) -> list[tuple[float, object]]:
    """Rows with the times at which they are written."""
    rows: list[tuple[float, object]] = []
    for i in range(count):
        ended = 10.0 * i + 10.0
        finish = Finish.LEFT if rng.random() < 0.2 else Finish.STOP
        turn = replace(a_turn(f"t{i}:0", user=f"u{i % 7}", ended_at=ended, finish=finish), episode=f"e{i}")
        rows.append((ended, turn))
        if rng.random() < 0.8:
            rows.append((ended + 0.5, a_delivery(turn, at=ended + 0.5)))
        for _ in range(rng.randrange(3)):
            at = ended + rng.choice([0.25, 1.0, 7.0, 29.0, 45.0, 90.0]) + rng.random() / 10.0
            name = rng.choice(["accepted", "rejected", "undone"])
            rows.append((at, a_signal(turn, name, at=at, value=rng.choice([1.0, 0.0]))))
    return sorted(rows, key=lambda each: each[0])


@pytest.mark.parametrize("function", [waits, eager, listens])
async def test_it_gives_what_the_desk_wrote(function, log, now, open_desk):
    desk = open_desk(log, function, CONFIG)
    for at, row in traffic(random.Random(5)):
        now.at = at
        await log.append(row)
        await desk.poll()
    for now.at in (*np.arange(600.0, 800.0, 5.0), LONG_AFTER):
        await desk.poll()
    past = await past_turns(log, CONFIG, since=0.0, limit=0)
    found = await backtest(log, past, Inline(function, max_abs=100.0), CONFIG, now.at)
    written = {row.turn: RewardOutcome(value=row.value) for row in log.of(Reward)}
    written |= {row.turn: RewardOutcome(reason=row.reason) for row in log.of(Quarantine)}
    assert len(written) == 60
    assert found == written
    assert {each.id: each.recorded for each in past} == written
    assert len({(each.value, each.reason) for each in found.values()}) >= 3


async def test_nothing_is_written_and_open_windows_wait(log):
    turn = a_turn("a:0", ended_at=10.0)
    await log.append(turn, a_delivery(turn))
    rows = list(log.rows)
    past = await past_turns(log, CONFIG, since=0.0, limit=0)
    asker = Inline(waits, max_abs=100.0)
    assert await backtest(log, past, asker, CONFIG, now=39.0) == {"a:0": RewardOutcome(reason="waiting")}
    assert await backtest(log, past, asker, CONFIG, now=40.0) == {"a:0": RewardOutcome(reason="no_reward:silence")}
    assert log.rows == rows


async def test_the_newest_turns_of_people_are_taken(log, turn):
    people = [turn(i, ended_at=100.0 + i) for i in range(8)]
    others = [turn(100 + i, arm=Arm.EVAL if i % 2 else Arm.WORLD) for i in range(30)]
    await log.append(*people, *others)
    newest = await past_turns(log, CONFIG, since=0.0, limit=3)
    assert [each.id for each in newest] == ["t5:0", "t6:0", "t7:0"], "found behind thirty turns of programs"
    assert [each.id for each in await past_turns(log, CONFIG, since=106.0, limit=0)] == ["t6:0", "t7:0"]
    held = await past_turns(log, CONFIG, since=0.0, limit=0, gold=lambda tenant, user: user == "u1")
    assert [each.id for each in held if each.hold == "gold"] == ["t1:0", "t6:0"]


async def test_only_signals_of_the_turns_own_tenant_are_shown_to_it(log):
    turn = a_turn("a:0")
    foreign = replace(a_signal(turn, at=12.0), tenant="other")
    await log.append(replace(a_signal(turn, "early", at=9.0), id="e"), foreign, turn, a_signal(turn), foreign)
    (past,) = await past_turns(log, CONFIG, since=0.0, limit=0)
    assert [signal.name for signal in past.signals] == ["early", "accepted"]


async def test_an_early_signal_counts_if_the_desk_would_still_have_remembered_it(log):
    config = RewardConfig(orphan_s=60.0)
    forgotten, kept, meanwhile = (
        a_turn("a:0", ended_at=100.0),
        a_turn("b:0", ended_at=100.0),
        a_turn("c:0", ended_at=99.0),
    )
    rows = [a_signal(forgotten, at=39.0), a_signal(kept, at=40.0), meanwhile, forgotten, kept]
    await log.append(*rows)
    ledger = TurnLedger(config)
    for place, row in enumerate(rows, 1):
        ledger.apply(place, row)
    found = await past_turns(log, config, since=0.0, limit=0)
    assert {past.id: len(past.signals) for past in found} == {"a:0": 0, "b:0": 1, "c:0": 0}
    assert {id: len(entry.said) for id, entry in ledger.open.items()} == {"a:0": 0, "b:0": 1, "c:0": 0}


NAUGHTY = """
import os, time
from ostinato.core.records import Reward

def fate(turn, signals, now):
    print("noise")
    if turn.text == "raise":
        raise KeyError("colour")
    if turn.text == "die":
        os._exit(7)
    if turn.text == "hang":
        open(__file__ + ".hangs", "w").close()
    while turn.text == "hang":
        time.sleep(1)
    if turn.text == "nonsense":
        return "great"
    if turn.text == "huge":
        return Reward(turn=turn.id, value=float("nan"), function="f@1", signals=(), at=now)
    return Reward(turn=turn.id, value=1.0, function="f@1", signals=(), at=now)
"""


@pytest.fixture
def isolated(tmp_path, monkeypatch):
    (tmp_path / "naughty.py").write_text(NAUGHTY)
    monkeypatch.syspath_prepend(tmp_path)
    time_begins_with_a_hang(monkeypatch, tmp_path / "naughty.py.hangs")

    def open_(name: str = "naughty:fate") -> Isolated:
        return Isolated(name, {}, answer_s=0.05, load_s=60.0, max_abs=100.0, memory_bytes=4 << 30)

    return open_


async def outcomes(log, asker, texts):
    for i, text in enumerate(texts):
        turn = replace(a_turn(f"t{i}:0", user=f"u{i % 2}"), text=text, episode=f"e{i}")
        await log.append(turn, a_delivery(turn))
    past = await past_turns(log, CONFIG, since=0.0, limit=0)
    try:
        return past, await backtest(log, past, asker, CONFIG, LONG_AFTER)
    finally:
        await asker.close()


async def test_whatever_a_function_does_the_other_turns_are_asked_about(log, isolated):
    past, found = await outcomes(log, isolated(), ["fine", "raise", "die", "hang", "nonsense", "huge", "raise", "fine"])
    assert [found[each.id].value for each in past] == [1.0, None, None, None, None, None, None, 1.0]
    side = compare(past, ("f", found), ("f", found), examples=3).new
    assert side.failed[0].reason == "reward_failed: KeyError: 'colour'"
    assert (side.failed[0].turns, side.failed[0].example) == (2, "t1:0")
    assert [each.example for each in side.failed[1:]] == ["t2:0", "t3:0", "t4:0", "t5:0"]
    assert side.without == {"reward_failed": 3, "reward_nonsense": 2, "reward_hung": 1}


async def test_a_function_that_always_hangs_is_given_up(log, isolated, monkeypatch):
    monkeypatch.setattr("ostinato.reward.backtest.MOST_LOST", 2)
    _, found = await outcomes(log, isolated(), ["hang"] * 150)
    reasons = [each.reason.partition(":")[0] for each in found.values()]
    assert reasons.count("reward_hung") == 2
    assert reasons.count("given_up") == 150 - reasons.count("reward_hung")


async def test_a_function_that_is_not_there_is_an_error(log, isolated):
    with pytest.raises(BadConfig, match="no fat in it; did you mean fate"):
        await outcomes(log, isolated("naughty:fat"), ["fine"])


async def compared(log, pairs, **more):
    """A comparison of two functions that give these pairs, one turn each, None: no reward."""
    turns = [replace(a_turn(f"t{i}:0", user=f"u{i % 4}"), episode=f"e{i}") for i in range(len(pairs))]
    for turn in turns:
        await log.append(turn, a_delivery(turn))

    def side(at):
        def function(turn, signals, now):
            value = pairs[int(turn.id[1:-2])][at]
            if value is None:
                return NoReward(reason="none")
            return Reward(turn=turn.id, value=value, function="f@1", signals=(), at=now)

        return Inline(function, max_abs=100.0)

    past = await past_turns(log, CONFIG, since=0.0, limit=0)
    old, new = [await backtest(log, past, side(at), CONFIG, LONG_AFTER) for at in (0, 1)]
    return compare(past, ("old", old), ("new", new), examples=2, **more)


async def test_the_comparison_counts_what_changes_and_for_whom(log):
    pairs = [(1.0, 1.0), (1.0, -3.0), (-1.0, 1.0), (0.0, 1.0), (None, 1.0), (1.0, None), (0.0, 0.0), (0.5, 0.0)]
    found = await compared(log, pairs)
    assert (found.turns, found.flipped, found.gained, found.lost) == (8, 2, 1, 1)
    assert [(each.turn, each.old, each.new) for each in found.examples] == [("t1:0", 1.0, -3.0), ("t2:0", -1.0, 1.0)]
    assert [(each.who, each.turns, each.change) for each in found.users] == [
        ("u1", 1, -4.0),
        ("u2", 2, 1.0),
        ("u3", 2, 0.25),
    ]
    assert found.change.turns == 6
    assert found.change.mean == pytest.approx((-4 + 2 + 1 - 0.5) / 6)
    assert (found.old.learnable, found.new.learnable, found.may_teach) == (7, 7, 8)
    assert found.old.without == {"no_reward:none": 1}


async def test_a_scaled_reward_teaches_the_same(log):
    rng = np.random.default_rng(0)
    found = await compared(log, [(value, 3.0 * value) for value in rng.normal(size=40).tolist()])
    assert found.correlation == pytest.approx(1.0)
    for same in (2.0, 0.3):  # the standard deviation of ten times 0.3 is 6e-17
        flat = await compared(type(log)(), [(value, same) for value in rng.normal(size=10).tolist()])
        assert math.isnan(flat.correlation)
        assert flat.new.spread == 0.0


async def test_people_not_turns_are_the_units_of_the_interval(log):
    """Two people who differ, with many turns each: of independent turns the interval would be narrow."""
    found = await compared(log, [(float(i % 4), 0.0) for i in range(400)])
    assert found.old.mean.people == 4
    alone = stats.t.ppf(0.975, 3) * np.std([0.0, 1.0, 2.0, 3.0], ddof=1) / 2.0
    assert found.old.mean.upper - found.old.mean.mean == pytest.approx(alone)


async def test_of_two_people_the_interval_is_as_wide_as_one_degree_of_freedom_makes_it(log):
    found = await compared(log, [(0.0, 0.0), (1.0, 0.0)])
    assert found.old.mean.people == 2
    assert found.old.mean.upper - found.old.mean.mean == pytest.approx(special.stdtrit(1, 0.975) * 0.5)


async def test_late_rewards_are_neither_handed_to_the_function_nor_compared_with(log):
    turn = a_turn("a:0", ended_at=0.0)
    late = replace(a_signal(turn, LATE_REWARD, id=late_id(turn.id), at=20.0), source=Source.CODE)
    predicted = Reward(turn=turn.id, value=0.1, function="f", signals=(), at=5.0, early=(("reward", 0.75),))
    await log.append(turn, a_delivery(turn), predicted, late)
    (past,) = await past_turns(log, CONFIG, since=-1.0, limit=0)
    assert (past.signals, past.recorded) == ([], RewardOutcome(value=0.75))
    found = await backtest(log, [past], Inline(waits, max_abs=100.0), CONFIG, LONG_AFTER)
    assert found == {turn.id: RewardOutcome(reason="no_reward:silence")}
