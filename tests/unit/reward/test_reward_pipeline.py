"""The desk: every turn gets one outcome, batches are recorded before they are used, a restart decides alike."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from tests.grids import first
from tests.oracles.turn_accounting import recount

from ostinato.core.errors import Conflict, NoSignal, StorageFull
from ostinato.core.notices import Alarm, AlarmState
from ostinato.core.records import Arm, Batch, Finish, Holdback, PolicyVersion, Reward, Sampling, Span, Turn
from ostinato.core.samples import Sample
from ostinato.reward.accounting import account
from ostinato.reward.baseline import context_of
from ostinato.reward.config import RewardConfig
from ostinato.testing.log import MemoryLog
from ostinato.testing.records import a_delivery, a_signal, a_turn

V0 = PolicyVersion(number=0, hash="00")


def made_by(version: int) -> dict:
    return {"spans": (Span(policy=PolicyVersion(number=version, hash="aa"), tokens=1),)}


async def fill(log: MemoryLog, turn: Callable, n: int, start: int = 0, version: int = 0) -> list[Turn]:
    """n turns that were seen, every third one accepted, interleaved with turns that are held back."""
    turns = [turn(i, ended_at=10.0 + i / 100, **made_by(version)) for i in range(start, start + n)]
    for i, each in enumerate(turns, start):
        other = turn(i + 10_000, arm=Arm.CONTROL)
        await log.append(each, other, a_delivery(each, other))
        if i % 3 == 0:
            await log.append(a_signal(each))
    return turns


async def test_every_kind_of_turn_gets_the_outcome_and_reward_it_should(log, now, open_desk, turn):
    cases = [
        (turn(0), None, True),
        (turn(1, finish=Finish.LENGTH), None, True),
        (turn(2, finish=Finish.TOOL_CALLS, arm=Arm.CANARY), None, True),
        (turn(13, arm=Arm.LEARNER), None, True),
        (turn(3, finish=Finish.ABORT), "finish:abort", False),
        (turn(12, finish=Finish.LEFT), None, True),
        (turn(4, finish=Finish.ERROR, arm=Arm.CONTROL), "finish:error", False),
        (turn(5, arm=Arm.CONTROL), "arm:control", True),
        (turn(6, arm=Arm.EVAL), "arm:eval", False),
        (turn(7, sampled_ids=(), logprobs=(), spans=()), "empty", True),
        (turn(8, sampling=Sampling(max_tokens=8, temperature=0.0)), "greedy", True),
        (turn(9, sampling=Sampling(max_tokens=8, top_p=0.95)), "top_p", True),
        (turn(10, sampling=Sampling(max_tokens=8, temperature=0.05)), "cold", True),
        (turn(11, sampling=Sampling(max_tokens=8, temperature=0.2)), None, True),
    ]
    whole = [each for each, _, _ in cases if each.finish is not Finish.LEFT]  # nobody records the delivery of a part
    await log.append(*[each for each, _, _ in cases], a_delivery(*whole))
    desk = open_desk(log)
    now.at = 41.0
    await desk.poll()
    assert log.reasons(Holdback) == {t.id: why for t, why, _ in cases if why}
    assert [row.turn for row in log.of(Reward)] == [t.id for t, _, rewarded in cases if rewarded]
    learnable = [t.id for t, why, _ in cases if why is None]
    assert [each.id for each in await desk.ready(0, 6)] == learnable
    assert await desk.ready(0, 7) == []
    found = await recount(log)
    assert found.balanced
    assert (found.ingested, found.waiting, found.rewarded) == (14, 6, 11)
    assert found.held == {
        "arm:control": 1, "arm:eval": 1, "cold": 1, "empty": 1, "finish:abort": 1, "finish:error": 1, "greedy": 1, "top_p": 1,
    }  # fmt: skip


async def test_reasons_are_written_at_once_and_rewards_when_the_window_has_closed_and_settled(
    log, now, open_desk, turn
):
    await log.append(turn(0), turn(1, arm=Arm.CONTROL), a_signal(turn(0)), a_delivery(turn(1)))
    desk = open_desk(log)
    now.at = 40.2
    await desk.poll()
    assert log.of(Reward) == []
    assert log.reasons(Holdback) == {"t1:0": "arm:control"}
    # received within the window, on disk only after it: still counted
    await log.append(a_signal(turn(0), "undone", at=39.99))
    now.at = 40.5
    await desk.poll()
    first, second = log.of(Reward)
    assert (first.turn, first.value, first.at) == ("t0:0", -0.25, 40.0)
    assert (second.turn, second.value) == ("t1:0", 0.0)
    assert first.upto == second.upto == 6, "the last row that had been read"


async def test_feedback_may_come_before_its_turn_and_for_no_turn_at_all(log, now, open_desk, turn):
    desk = open_desk(log)
    await log.append(a_signal(turn(0)), a_signal(turn(99)))
    await desk.poll()
    await log.append(turn(0))
    now.at = 50.0
    await desk.poll()
    assert [reward.value for reward in log.of(Reward)] == [0.75]
    # what comes later changes nothing
    await log.append(a_signal(turn(0), "undone", at=51.0))
    await desk.poll()
    assert len(log.of(Reward)) == 1
    found = await account(log)
    assert (found.late, found.orphans) == (1, 1)


async def test_a_batch_is_recorded_before_it_is_returned_and_holds_the_newest(log, now, open_desk, turn):
    turns = [turn(i) for i in range(7)]
    await log.append(*turns, *[a_signal(t) for t in turns[::2]], a_delivery(*turns))
    desk = open_desk(log)
    now.at = 30.0
    assert await desk.batch(1, 4, V0) is None
    now.at = 41.0
    made = await desk.batch(1, 4, V0)
    assert made is not None
    batch, samples = made.row, made.samples
    assert log.of(Batch) == [batch]
    assert batch.turns == ("t3:0", "t4:0", "t5:0", "t6:0")
    assert batch.reference == V0
    assert [(s.turn, s.reward, s.advantages, s.weight) for s in samples] == [
        (turns[i], (0.75, 0.0)[i % 2], batch.credits[i - 3], 1.0) for i in range(3, 7)
    ]
    assert await desk.batch(2, 4, V0) is None  # three are left
    assert desk.last_step == 1


async def test_asking_again_gives_the_recorded_batch_and_skipping_is_refused(log, now, open_desk, turn):
    await fill(log, turn, 12)
    now.at = 41.0
    desk = open_desk(log)
    first, second = await desk.batch(1, 4, V0), await desk.batch(2, 4, V0)
    now.at = 99.0
    restarted = open_desk(log)
    assert await restarted.batch(1, 4, V0) == first
    assert await restarted.batch(2, 4, V0) == second
    with pytest.raises(Conflict, match="step 4 was asked for, but the log's last batch is 2"):
        await restarted.batch(4, 4, V0)
    assert [item async for item in open_desk(log).history()] == [first, second]
    assert [item async for item in restarted.history(1)] == [second]
    assert [item async for item in restarted.history(2)] == []


async def test_the_baseline_predicts_a_batch_before_it_learns_from_it(log, now, open_desk, turn):
    turns = [turn(i) for i in range(4)]
    await log.append(*turns, a_delivery(*turns), a_signal(turns[0]), a_signal(turns[1], "rejected"))
    now.at = 41.0
    desk = open_desk(log)
    made = await desk.batch(1, 4, V0)
    assert made is not None
    rms = np.sqrt((0.75**2 + 0.25**2) / 4)  # the first batch meets a baseline of 0
    assert [each[0] for each in made.row.credits] == pytest.approx([0.75 / rms, -0.25 / rms, 0.0, 0.0])
    await log.append(turn(5), a_signal(turn(5)), turn(6), a_signal(turn(6), "rejected"))
    second = await desk.batch(2, 2, V0)
    assert second is not None
    assert abs(second.row.credits[0][0]) != pytest.approx(3 * abs(second.row.credits[1][0])), "measured against 0 again"


async def test_what_is_too_stale_is_held_back_and_the_rest_is_not(log, now, open_desk, turn):
    turns = [turn(i, **made_by(v)) for i, v in enumerate([5, 0, 2, 1, 6])]
    two = {"sampled_ids": (1, 2), "logprobs": (-0.5, -0.5)}
    mixed = turn(8, spans=(*made_by(6)["spans"], *made_by(1)["spans"]), **two)
    older = turn(9, spans=(*made_by(2)["spans"], *made_by(1)["spans"]), **two)
    await log.append(*turns, mixed, older, a_delivery(*turns, mixed, older))
    now.at = 41.0
    desk = open_desk(log, config=RewardConfig(max_staleness=4))
    await desk.poll()
    assert [each.id for each in await desk.ready(6, 3)] == ["t2:0", "t4:0", "t8:0"], (
        "its tokens are 2.5 steps old on average"
    )
    assert log.reasons(Holdback) == {"t1:0": "stale:6", "t3:0": "stale:5", "t9:0": "stale:5"}, "4.5, rounded up"
    assert (await recount(log)).balanced
    assert (await recount(log)).held == {"stale:6": 1, "stale:5": 2}


async def test_long_answers_over_which_weights_change_are_learned_from_as_often_as_short_ones(
    log, now, open_desk, turn
):
    """A release every four steps, answers of up to two steps' time, each asked for by the trainer one step after its end."""
    rng, turns, step = np.random.default_rng(4), [], 24
    for i in range(400):
        tokens, ended = int(rng.integers(1, 61)), rng.uniform(20.0, 24.0)
        made = Counter(4 * int((ended - k / 30) / 4) + step - int(ended + 1.0) for k in range(tokens))
        spans = tuple(Span(policy=PolicyVersion(number=n, hash="aa"), tokens=made[n]) for n in sorted(made))
        turns.append(turn(i, sampled_ids=(7,) * tokens, logprobs=(-0.5,) * tokens, spans=spans))
    await log.append(*turns, a_delivery(*turns))
    now.at = 41.0
    desk = open_desk(log, config=RewardConfig(max_staleness=4))
    await desk.poll()
    await desk.ready(step, 400)
    held = log.reasons(Holdback)
    assert {why.partition(":")[0] for why in held.values()} == {"stale"}
    kept = [each for each in turns if each.id not in held]
    served, trained = (np.mean([len(each.sampled_ids) for each in some]) for some in (turns, kept))
    assert trained > 0.95 * served


async def test_another_contract_is_held_back_only_where_it_is_refused(log, now, open_desk, turn):
    mine, other = "a" * 16, "b" * 16
    turns = [turn(i, numerics=stamp) for i, stamp in enumerate([mine, other, "", mine])]
    await log.append(*turns, a_delivery(*turns))
    now.at = 41.0
    lenient, strict = open_desk(log), open_desk(log, numerics=mine)
    await lenient.poll()
    assert len(await lenient.ready(0, 4)) == 4
    await strict.poll()
    assert [each.id for each in await strict.ready(0, 2)] == ["t0:0", "t3:0"]
    assert log.reasons(Holdback) == {"t1:0": f"numerics:{other}", "t2:0": "numerics:unknown"}
    assert (await recount(log)).balanced


async def test_a_recorded_batch_outlives_a_change_of_the_trainers_contract(log, now, open_desk, turn):
    await fill(log, turn, 4)
    now.at = 41.0
    made = await open_desk(log).batch(1, 4, V0)
    later = open_desk(log, numerics="c" * 16)
    await later.poll()
    assert await later.batch(1, 4, V0) == made
    assert not [why for why in log.reasons(Holdback).values() if why.startswith("numerics")]


async def test_going_back_to_a_release_counts_staleness_from_it(log, now, open_desk, turn):
    await fill(log, turn, 8)
    now.at = 41.0
    config = RewardConfig(max_staleness=1)
    desk = open_desk(log, config=config)
    assert await desk.batch(1, 4, V0)
    assert await desk.batch(2, 4, V0)
    await fill(log, turn, 4, start=100)  # made by v0, two steps behind, but not from where step 3 starts
    now.at = 99.0
    back = await desk.batch(3, 4, V0, base=V0)
    assert back is not None
    assert back.row.base == V0
    late = open_desk(log, config=config)
    # v2 was left behind: two steps from v0, which is one from now
    await log.append(turn(200), turn(201, **made_by(2)), a_delivery(turn(200), turn(201)))
    await late.poll()
    assert [each.id for each in await late.ready(3, 1)] == ["t200:0"]
    assert (await recount(log)).held["stale:3"] == 1


async def test_a_batch_that_teaches_nothing_is_held_back_and_the_step_goes_on(log, now, open_desk, turn):
    await fill(log, turn, 4, start=50)
    flat = [turn(i) for i in range(4)]
    await log.append(*flat, *[a_signal(t, "rejected") for t in flat])
    now.at = 99.0
    desk = open_desk(log)
    with pytest.raises(NoSignal, match=r"all 4 rewards are -0\.25"):
        await desk.batch(1, 4, V0)
    held = [row for row in log.of(Holdback) if row.reason.startswith("no_signal: all 4 rewards are -0.25")]
    assert [row.turn for row in held] == [t.id for t in flat]
    assert await desk.batch(1, 4, V0)
    found = await recount(log)
    assert found.balanced
    assert (found.trained, found.held["no_signal"], found.waiting) == (4, 4, 0)


async def test_a_batch_that_teaches_nothing_teaches_the_baseline(log, now, open_desk, turn):
    desk = open_desk(log)
    now.at = 99.0
    for start in (0, 10, 20):
        flat = [turn(start + i) for i in range(8)]
        await log.append(*flat, *[a_signal(t) for t in flat])
        with pytest.raises(NoSignal):
            await desk.batch(1, 8, V0)
    ledger = desk._reading.ledger
    ledger.teaching.catch_up()
    assert ledger.baseline.predict(context_of(a_turn("new:0", user="new"))) > 0.4
    await log.append(turn(30), turn(31), a_signal(turn(30)), a_signal(turn(31), "rejected"))
    for each in (desk, restarted := open_desk(log)):
        await each.poll()
        assert [t.id for t in await each.ready(0, 2)] == ["t30:0", "t31:0"]
    restarted._reading.ledger.teaching.catch_up()
    assert restarted._reading.ledger.baseline.snapshot() == ledger.baseline.snapshot()
    made = await restarted.batch(1, 2, V0)
    assert made is not None
    good, bad = (each[0] for each in made.row.credits)
    assert -bad > 1.2 * good, "where all else is praised, a rejection says more than praise"


async def test_turns_that_came_too_late_for_a_batch_teach_the_baseline(log, now, open_desk, turn):
    config = RewardConfig(max_staleness=2, user_cap=1.0)
    desk = open_desk(log, config=config)
    for start in (0, 20):
        now.at += 99.0
        late = [turn(start + i, ended_at=now.at - 40, **made_by(i % 3)) for i in range(12)]
        await log.append(*late, a_delivery(*late), *[a_signal(t, at=now.at - 35) for t in late])
        await desk.poll()
        assert await desk.ready(5, 1) == []
    assert {why.partition(":")[0] for why in log.reasons(Holdback).values()} == {"stale"}
    ledger, restarted = desk._reading.ledger, open_desk(log, config=config)
    await restarted.poll()
    for each in (ledger, restarted._reading.ledger):
        each.teaching.catch_up()
        assert each.baseline.predict(context_of(a_turn("new:0", user="new"))) > 0.3
    assert restarted._reading.ledger.baseline.snapshot() == ledger.baseline.snapshot()


@pytest.mark.parametrize(
    ("sampling", "told"),
    [
        ({"temperature": 0.0}, r"0% of .* \(100% greedy\): clients ask for temperature 0, .* serve.sampling"),
        ({"top_p": 0.9}, r"0% of .* \(100% top_p\): clients ask for a top_p below 1: override it in serve.sampling"),
    ],
)
async def test_turns_of_which_none_can_teach_raise_an_alarm_until_they_can(log, now, open_desk, turn, sampling, told):
    desk = open_desk(log)
    turns = [turn(i, sampling=Sampling(max_tokens=8, **sampling)) for i in range(120)]
    for some in (turns[:90], turns[90:]):
        assert log.of(Alarm) == []
        await log.append(*some)
        await desk.poll()
        await desk.poll()
    (alarm,) = log.of(Alarm)
    assert (alarm.name, alarm.state) == ("unused", AlarmState.RAISED)
    assert re.match(told, alarm.reason)
    assert (await account(log)).used == 0.0
    now.at = 99.0
    for start in range(200, 500, 60):
        teaching = [turn(start + i, ended_at=40.0) for i in range(60)]
        await log.append(*teaching, a_delivery(*teaching), *[a_signal(each) for each in teaching[::2]])
        await desk.batch(desk.last_step + 1, 60, V0)
    await desk.poll()
    restarted = open_desk(log)
    await restarted.poll()
    assert [each.state for each in log.of(Alarm)] == [AlarmState.RAISED, AlarmState.CLEARED]
    assert (await account(log)).used > 0.6


@pytest.mark.parametrize("waits", ["for its reward", "for a batch"])
async def test_what_an_undecided_turn_led_to_does_not_teach_the_baseline(log, now, open_desk, turn, waits):
    """The second turn of an episode is stale, and its first, made by newer weights after the trainer went back, may yet be trained on."""
    first = turn(0, episode="long", ended_at=90.0 if waits == "for its reward" else 10.0, **made_by(5))
    second = turn(1, episode="long", id="t0:1", parent="t0:0", ended_at=10.0, **made_by(0))
    alone = turn(2, ended_at=10.0, **made_by(0))
    await log.append(first, second, alone, a_delivery(first, second, alone), a_signal(second), a_signal(alone))
    now.at = 95.0
    desk = open_desk(log, config=RewardConfig(max_staleness=2, user_cap=1.0))
    await desk.poll()
    await desk.ready(5, 2)
    assert log.reasons(Holdback) == {second.id: "stale:5", alone.id: "stale:5"}
    ledger = desk._reading.ledger
    ledger.teaching.catch_up()
    assert [row[1] for row in ledger.baseline.snapshot()["users"]] == [alone.user]


async def test_a_full_log_loses_nothing_and_the_desk_goes_on_when_there_is_room(log, now, open_desk, turn):
    await fill(log, turn, 4)
    now.at = 41.0
    desk = open_desk(log)
    log.full = True
    for _ in range(3):
        with pytest.raises(StorageFull):
            await desk.batch(1, 4, V0)
    log.full = False
    assert await desk.batch(1, 4, V0)
    assert len({row.turn for row in log.of(Reward)}) == len(log.of(Reward)) == 8
    assert (await recount(log)).balanced


async def test_two_desks_cannot_write_the_same_step(log, now, open_desk, turn):
    await fill(log, turn, 4)
    now.at = 41.0
    mine = open_desk(log)
    await mine.poll()
    real_append = log.append

    async def raced(*new):  # another trainer's batch lands just before ours
        if isinstance(new[0], Batch):
            await real_append(replace(new[0], reference=PolicyVersion(number=9, hash="other")))
        return await real_append(*new)

    log.append = raced
    with pytest.raises(Conflict, match="only one trainer"):
        await mine.batch(1, 4, V0)


@pytest.mark.parametrize("apart", first([13, 1]))
async def test_ingested_is_trained_plus_held_back_plus_waiting_at_every_moment(log, now, open_desk, turn, apart):
    """Counted anew, from the log's beginning, at each of the first hundred turns and then at every so many."""
    rng = np.random.default_rng(3)
    desk = open_desk(log, config=RewardConfig(max_staleness=2, delivery_s=5.0))
    step, trained, samples = 1, 0, list[Sample]()
    for i in range(400):
        fate = rng.random()
        each = turn(
            i,
            arm=[Arm.LIVE, Arm.CONTROL, Arm.EVAL, Arm.CANARY][int(rng.integers(4))],
            finish=Finish.ABORT if fate < 0.1 else Finish.STOP,
            ended_at=float(i),
            episode=f"e{i // int(rng.integers(1, 4))}",
            **made_by(max(0, step - int(rng.integers(5)))),
        )
        await log.append(each)
        if fate > 0.3:
            await log.append(a_delivery(each))
        if fate > 0.5:
            await log.append(a_signal(each, at=float(i)))
        now.at = float(i)
        if i % 10 == 0:
            try:
                made = await desk.batch(step, 8, V0)
            except NoSignal:
                made = None
            if made:
                step += 1
                samples += made.samples
        if i >= 100 and i % apart:
            continue
        found = await recount(log)
        assert found.balanced, found.contradictions
        assert found.trained >= trained
        trained = found.trained
        fast = await account(log, config=RewardConfig(max_staleness=2))
        for name in ("ingested", "trained", "held", "waiting", "rewarded", "quarantined", "oldest_wait"):
            assert getattr(fast, name) == getattr(found, name), name
        assert fast.balanced
    assert trained == len(samples) >= 60
    assert {"arm:control", "arm:eval", "finish:abort", "stale:3", "undelivered"} <= set(found.held)
    assert all(sample.turn.arm in (Arm.LIVE, Arm.CANARY) for sample in samples)
    now.at += 1000.0
    await desk.poll()
    await desk.ready(step + 10, 8)
    assert (await recount(log)).waiting == 0, "in the end every turn has its outcome"
