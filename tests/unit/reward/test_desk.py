"""The desk: every turn gets one outcome, batches are recorded before they are used, a restart decides alike."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from ostinato.core.errors import BadConfig, Conflict, NoSignal, StorageFull
from ostinato.core.records import (
    Arm,
    Batch,
    Finish,
    Holdback,
    Pending,
    PolicyVersion,
    Reward,
    Sampling,
    Signal,
    Source,
    Span,
    Turn,
)
from ostinato.core.samples import Sample
from ostinato.core.seams import RewardFn
from ostinato.reward.config import RewardConfig
from ostinato.reward.desk import RewardDesk
from ostinato.reward.ledger import Accounting, account
from ostinato.reward.loader import load
from ostinato.testing.log import MemoryLog

COPILOT = load("ostinato.reward.functions:copilot", {"window": 30.0})
V0 = PolicyVersion(number=0, hash="00")
ALL: set[type] = {Turn, Signal, Reward, Holdback, Batch}


class Now:
    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at


def turn(i: int, *, user: str = "", arm: Arm = Arm.LIVE, version: int = 0, ended_at: float = 10.0) -> Turn:
    return Turn(
        id=f"t{i}:0",
        episode=f"e{i}",
        parent=None,
        user=user or f"u{i % 5}",
        tenant="t",
        arm=arm,
        propensity=1.0,
        prompt_ids=tuple(range(i % 7 + 1)),
        sampled_ids=(7,),
        logprobs=(-0.5,),
        spans=(Span(policy=PolicyVersion(number=version, hash="aa"), tokens=1),),
        sampling=Sampling(max_tokens=8),
        finish=Finish.STOP,
        text="x",
        started_at=ended_at - 1,
        ended_at=ended_at,
    )


def said(turn: Turn, name: str, at: float = 11.0) -> Signal:
    return Signal(
        id=f"{turn.id}/{name}/{at}",
        turn=turn.id,
        name=name,
        value=1.0,
        source=Source.HUMAN,
        occurred_at=at,
        received_at=at,
    )


def desk_on(log: MemoryLog, now: Now, fn: RewardFn = COPILOT, config: RewardConfig | None = None) -> RewardDesk:
    return RewardDesk(log, fn, now, config)


def rows(log: MemoryLog, kind: type) -> list:
    return [row for row in log.rows if type(row) is kind]


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog()


@pytest.fixture
def now() -> Now:
    return Now()


async def test_every_kind_of_turn_gets_the_outcome_and_reward_it_should(log: MemoryLog, now: Now):
    plain = turn(0)
    cases = [
        (plain, None, True),
        (replace(turn(1), finish=Finish.LENGTH), None, True),
        (replace(turn(2), finish=Finish.TOOL_CALLS, arm=Arm.CANARY), None, True),
        (replace(turn(3), finish=Finish.ABORT), "finish:abort", False),
        (replace(turn(4), finish=Finish.ERROR, arm=Arm.CONTROL), "finish:error", False),
        (turn(5, arm=Arm.CONTROL), "arm:control", True),
        (turn(6, arm=Arm.EVAL), "arm:eval", False),
        (replace(turn(7), sampled_ids=(), logprobs=(), spans=()), "empty", True),
        (replace(turn(8), sampling=Sampling(max_tokens=8, temperature=0.0)), "greedy", True),
    ]
    await log.append(*[each for each, _, _ in cases])
    desk = desk_on(log, now)
    now.at = 41.0
    await desk.poll()
    await desk.poll()
    assert {row.turn: row.reason for row in rows(log, Holdback)} == {t.id: why for t, why, _ in cases if why}
    assert [row.turn for row in rows(log, Reward)] == [t.id for t, _, rewarded in cases if rewarded]
    ready = await desk.ready(0, 10)
    assert [entry.turn.id for entry in ready] == [t.id for t, why, _ in cases if why is None]
    reckoning = await account(log)
    assert reckoning == Accounting(
        ingested=9,
        trained=0,
        held={"arm:control": 1, "arm:eval": 1, "empty": 1, "finish:abort": 1, "finish:error": 1, "greedy": 1},
        waiting=3,
        rewarded=6,
    )
    assert reckoning.balanced


async def test_reasons_are_written_at_once_and_rewards_when_the_window_has_closed_and_settled(log: MemoryLog, now: Now):
    await log.append(turn(0), turn(1, arm=Arm.CONTROL), said(turn(0), "accepted"))
    desk = desk_on(log, now)
    now.at = 40.2
    assert await desk.poll() == []
    assert len(rows(log, Holdback)) == 1
    # received within the window, on disk only after it: still counted
    await log.append(said(turn(0), "undone", at=39.99))
    now.at = 40.5
    (first, second) = await desk.poll()
    assert (first.turn, first.value, first.at) == ("t0:0", -0.25, 40.0)
    assert (second.turn, second.value) == ("t1:0", 0.0)


async def test_feedback_may_come_before_its_turn_and_for_no_turn_at_all(log: MemoryLog, now: Now):
    desk = desk_on(log, now)
    await log.append(said(turn(0), "accepted"), said(turn(99), "accepted"))
    await desk.poll()
    await log.append(turn(0))
    now.at = 50.0
    assert [reward.value for reward in await desk.poll()] == [0.75]
    # what comes later changes nothing
    await log.append(said(turn(0), "undone", at=51.0))
    assert await desk.poll() == []
    assert len(rows(log, Reward)) == 1


async def test_a_batch_is_recorded_before_it_is_returned_and_holds_the_newest(log: MemoryLog, now: Now):
    turns = [turn(i) for i in range(7)]
    await log.append(*turns, *[said(t, "accepted") for t in turns[::2]])
    desk = desk_on(log, now)
    now.at = 30.0
    assert await desk.batch(1, 4, V0) is None
    now.at = 41.0
    made = await desk.batch(1, 4, V0)
    assert made is not None
    batch, samples = made.row, made.samples
    assert rows(log, Batch) == [batch]
    assert batch.turns == ("t3:0", "t4:0", "t5:0", "t6:0")
    assert batch.reference == V0
    assert [(s.turn, s.reward, s.advantages) for s in samples] == [
        (turns[i], (0.75, -0.0)[i % 2], batch.credits[i - 3]) for i in range(3, 7)
    ]
    assert await desk.batch(2, 4, V0) is None  # three are left
    assert desk.last_step == 1


async def test_asking_again_gives_the_recorded_batch_and_skipping_is_refused(log: MemoryLog, now: Now):
    await fill(log, 12)
    now.at = 41.0
    desk = desk_on(log, now)
    first, second = await desk.batch(1, 4, V0), await desk.batch(2, 4, V0)
    now.at = 99.0
    restarted = desk_on(log, now)
    assert await restarted.batch(1, 4, V0) == first
    assert await restarted.batch(2, 4, V0) == second
    with pytest.raises(Conflict, match="step 4 was asked for, but the log's last batch is 2"):
        await restarted.batch(4, 4, V0)
    assert [item async for item in restarted.history()] == [first, second]
    assert [item async for item in restarted.history(1)] == [second]


async def fill(log: MemoryLog, n: int, start: int = 0, version: int = 0) -> list[Turn]:
    """n turns, every second one accepted, interleaved with turns that are held back."""
    turns = [turn(i, version=version, ended_at=10.0 + i / 100) for i in range(start, start + n)]
    for each in turns:
        await log.append(each, turn(each_id(each) + 10_000, arm=Arm.CONTROL))
        if each_id(each) % 3 == 0:
            await log.append(said(each, "accepted"))
    return turns


def each_id(each: Turn) -> int:
    return int(each.id[1:].partition(":")[0])


async def test_a_desk_restarted_at_every_step_decides_as_one_that_never_stopped(now: Now):
    steady_log, broken_log = MemoryLog(), MemoryLog()
    steady = desk_on(steady_log, now)
    for step in range(1, 8):
        for log in (steady_log, broken_log):
            await fill(log, 10, start=step * 100, version=step - 1)
        now.at = 50.0 * step
        broken = desk_on(broken_log, now)
        assert await broken.batch(step, 8, V0) == await steady.batch(step, 8, V0)
        assert broken.baseline.snapshot() == steady.baseline.snapshot()
    assert broken_log.rows == steady_log.rows
    assert len(rows(steady_log, Batch)) == 7


async def test_the_baseline_predicts_a_batch_before_it_learns_from_it(log: MemoryLog, now: Now):
    turns = [turn(i) for i in range(4)]
    await log.append(*turns, said(turns[0], "accepted"), said(turns[1], "rejected"))
    now.at = 41.0
    desk = desk_on(log, now, config=RewardConfig(user_cap=1.0))
    made = await desk.batch(1, 4, V0)
    assert made is not None
    rms = np.sqrt((0.75**2 + 0.25**2) / 4)  # the first batch meets a baseline of 0
    assert [turn[0] for turn in made.row.credits] == pytest.approx([0.75 / rms, -0.25 / rms, 0.0, 0.0])
    assert desk.baseline.predict(turns[0]) != 0.0


async def test_what_is_too_stale_is_held_back_and_the_rest_is_not(log: MemoryLog, now: Now):
    await log.append(*[turn(i, version=v) for i, v in enumerate([5, 0, 2, 1, 6])])
    mixed = replace(
        turn(9), sampled_ids=(1, 2), logprobs=(-0.5, -0.5), spans=(*turn(9, version=6).spans, *turn(9, version=1).spans)
    )
    await log.append(mixed)
    now.at = 41.0
    desk = desk_on(log, now, config=RewardConfig(max_staleness=4))
    await desk.poll()
    assert [entry.turn.id for entry in await desk.ready(6, 10)] == ["t0:0", "t2:0", "t4:0"]
    assert {row.turn: row.reason for row in rows(log, Holdback)} == {
        "t1:0": "stale:6",
        "t3:0": "stale:5",
        "t9:0": "stale:5",
    }
    assert (await account(log)).balanced


async def test_another_contract_is_held_back_only_where_it_is_refused(log: MemoryLog, now: Now):
    mine, other = "a" * 16, "b" * 16
    await log.append(*[replace(turn(i), numerics=stamp) for i, stamp in enumerate([mine, other, "", mine])])
    now.at = 41.0
    lenient, strict = desk_on(log, now), RewardDesk(log, COPILOT, now, numerics=mine)
    await lenient.poll()
    assert len(await lenient.ready(0, 10)) == 4
    await strict.poll()
    assert [entry.turn.id for entry in await strict.ready(0, 10)] == ["t0:0", "t3:0"]
    assert {row.turn: row.reason for row in rows(log, Holdback)} == {
        "t1:0": f"numerics:{other}",
        "t2:0": "numerics:unknown",
    }
    assert (await account(log)).balanced


async def test_a_recorded_batch_outlives_a_change_of_the_trainers_contract(log: MemoryLog, now: Now):
    await fill(log, 4)
    now.at = 41.0
    made = await desk_on(log, now).batch(1, 4, V0)
    later = RewardDesk(log, COPILOT, now, numerics="c" * 16)
    await later.poll()
    assert await later.batch(1, 4, V0) == made
    assert not [row for row in rows(log, Holdback) if row.reason.startswith("numerics")]


async def test_going_back_to_a_release_counts_staleness_from_it(log: MemoryLog, now: Now):
    await fill(log, 8)
    now.at = 41.0
    config = RewardConfig(max_staleness=1)
    desk = desk_on(log, now, config=config)
    assert await desk.batch(1, 4, V0)
    assert await desk.batch(2, 4, V0)
    await fill(log, 4, start=100)  # made by v0, two steps behind, but not from where step 3 starts
    now.at = 99.0
    back = await desk.batch(3, 4, V0, base=V0)
    assert back is not None
    assert back.row.base == V0
    late = desk_on(log, now, config=config)
    await log.append(turn(200), turn(201, version=2))  # v2 was left behind: two steps from v0, which is one from now
    await late.poll()
    assert [entry.turn.id for entry in await late.ready(3, 4)] == ["t200:0"]
    assert (await account(log)).held["stale:3"] == 1


async def test_a_batch_that_teaches_nothing_is_held_back_and_the_step_goes_on(log: MemoryLog, now: Now):
    await fill(log, 4, start=50)
    flat = [turn(i) for i in range(4)]
    await log.append(*flat, *[said(t, "rejected") for t in flat])
    now.at = 99.0
    desk = desk_on(log, now)
    with pytest.raises(NoSignal, match=r"all 4 rewards are -0\.25"):
        await desk.batch(1, 4, V0)
    held = [row for row in rows(log, Holdback) if row.reason.startswith("no_signal: all 4 rewards are -0.25")]
    assert [row.turn for row in held] == [t.id for t in flat]
    assert await desk.batch(1, 4, V0)
    reckoning = await account(log)
    assert reckoning.balanced
    assert (reckoning.trained, reckoning.held["no_signal"], reckoning.waiting) == (4, 4, 0)


async def test_a_full_log_loses_nothing_and_the_desk_goes_on_when_there_is_room(log: MemoryLog, now: Now):
    await fill(log, 4)
    now.at = 41.0
    desk = desk_on(log, now)
    log.full = True
    for _ in range(3):
        with pytest.raises(StorageFull):
            await desk.batch(1, 4, V0)
    log.full = False
    assert await desk.batch(1, 4, V0)
    assert len({row.turn for row in rows(log, Reward)}) == len(rows(log, Reward)) == 8


async def test_two_desks_cannot_write_the_same_step(log: MemoryLog, now: Now):
    await fill(log, 4)
    now.at = 41.0
    mine = desk_on(log, now)
    await mine.poll()
    real_append = log.append

    async def raced(*new):  # another trainer's batch lands just before ours
        if isinstance(new[0], Batch):
            await real_append(replace(new[0], reference=PolicyVersion(number=9, hash="other")))
        return await real_append(*new)

    log.append = raced
    with pytest.raises(Conflict, match="only one trainer"):
        await mine.batch(1, 4, V0)


@pytest.mark.parametrize(("turn_id", "value"), [("other:0", 1.0), ("t0:0", float("nan")), ("t0:0", float("inf"))])
async def test_a_reward_function_that_answers_nonsense_is_named(log: MemoryLog, now: Now, turn_id: str, value: float):
    def broken(turn: Turn, signals: Sequence[Signal], now: float) -> Reward | Pending:
        return Reward(turn=turn_id, value=value, function="broken@3", signals=(), at=now)

    await log.append(turn(0))
    with pytest.raises(BadConfig, match="broken@3"):
        await desk_on(log, now, fn=broken).poll()
    assert rows(log, Reward) == []


async def test_a_function_that_needs_no_window_is_asked_when_a_signal_comes_and_not_in_between(
    log: MemoryLog, now: Now
):
    asked: list[int] = []

    def eager(turn: Turn, signals: Sequence[Signal], now: float) -> Reward | Pending:
        asked.append(len(signals))
        if signals:
            return Reward(turn=turn.id, value=1.0, function="eager@1", signals=(), at=now)
        return Pending(until=1000.0)

    desk = desk_on(log, now, fn=eager)
    await log.append(turn(0))
    for now.at in (10.0, 20.0, 30.0):
        await desk.poll()
    assert asked == [0]
    await log.append(said(turn(0), "accepted"))
    assert len(await desk.poll()) == 1
    assert asked == [0, 1]


async def test_ingested_is_trained_plus_held_back_plus_waiting_at_every_moment(log: MemoryLog, now: Now):
    rng = np.random.default_rng(3)
    desk = desk_on(log, now, config=RewardConfig(max_staleness=2))
    step, trained, samples = 1, 0, list[Sample]()
    for i in range(300):
        fate = rng.random()
        each = turn(
            i,
            arm=[Arm.LIVE, Arm.CONTROL, Arm.EVAL, Arm.CANARY][int(rng.integers(4))],
            version=max(0, step - int(rng.integers(5))),
        )
        await log.append(replace(each, finish=Finish.ABORT if fate < 0.1 else Finish.STOP, ended_at=float(i)))
        if fate > 0.5:
            await log.append(replace(said(each, "accepted"), received_at=float(i)))
        now.at = float(i)
        if i % 10 == 0:
            try:
                made = await desk.batch(step, 8, V0)
            except NoSignal:
                made = None
            if made:
                step += 1
                samples += made.samples
        reckoning = await account(log)
        assert reckoning.balanced
        assert reckoning.trained >= trained
        trained = reckoning.trained
    assert trained == len(samples) >= 60
    assert {"arm:control", "arm:eval", "finish:abort", "stale:3"} <= set(reckoning.held)
    assert all(sample.turn.arm in (Arm.LIVE, Arm.CANARY) for sample in samples)
