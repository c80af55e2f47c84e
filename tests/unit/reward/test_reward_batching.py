"""Episodes and groups go into batches whole, their credit is spread, and none starves."""

from dataclasses import replace

import pytest
from tests.oracles.turn_accounting import recount

from ostinato.core.errors import NoSignal
from ostinato.core.records import Arm, Batch, Holdback, Pending, PolicyVersion, Reward
from ostinato.reward.config import RewardConfig
from ostinato.testing.records import a_delivery, a_signal

V0 = PolicyVersion(number=0, hash="00")


async def talk(log, turn, name: str, numbers, said: dict[int, str], **changes) -> list:
    """Turns of one episode that were seen, and what was said about some."""
    turns = [turn(i, episode=name, user=name, **changes) for i in numbers]
    await log.append(*turns, a_delivery(*turns), *[a_signal(turn(i), verb) for i, verb in said.items()])
    return turns


def batches(log) -> list[set[str]]:
    return [{turn.partition(":")[0] for turn in row.turns} for row in log.of(Batch)]


async def test_an_episode_is_never_split_over_batches(log, now, open_desk, turn):
    for first in range(0, 30, 3):
        verb = "accepted" if first % 2 else "rejected"
        await talk(log, turn, f"e{first}", range(first, first + 3), {first + 2: verb})
    now.at = 41.0
    desk = open_desk(log)
    for step in (1, 2, 3):
        assert await desk.batch(step, 8, V0)  # 8 is no multiple of 3: at least so many
    assert [len(batch) for batch in batches(log)] == [9, 9, 9]
    for batch in batches(log):
        numbers = sorted(int(name[1:]) for name in batch)
        assert [n // 3 for n in numbers] == sorted([n // 3 for n in numbers[::3]] * 3)
    assert batches(log)[0] == {f"t{i}" for i in range(21, 30)}, "the newest first"


async def test_a_terminal_reward_reaches_the_earlier_turns_of_its_episode(log, now, open_desk, turn):
    await talk(log, turn, "good", range(3), {2: "accepted"})
    await talk(log, turn, "bad", range(10, 13), {12: "rejected"})
    now.at = 41.0
    made = await open_desk(log).batch(1, 6, V0)
    assert made is not None
    first, second, third, *bad = [sample.advantages[0] for sample in made.samples]
    assert (first / third, second / third) == pytest.approx((0.81, 0.9))
    assert third > 0
    assert max(bad) < 0
    assert [sample.reward for sample in made.samples] == [0.0, 0.0, 0.75, 0.0, 0.0, -0.25]
    assert [sample.weight for sample in made.samples] == pytest.approx([1 / 3] * 6)


async def test_an_episode_waits_for_its_open_turns_and_then_goes_as_a_whole(log, now, open_desk, turn):
    await talk(log, turn, "e", [0, 1], {1: "accepted"})
    await talk(log, turn, "other", [5], {5: "rejected"})
    now.at = 39.0
    await talk(log, turn, "e", [2], {}, ended_at=38.0)
    desk = open_desk(log)
    now.at = 60.0
    assert await desk.batch(1, 4, V0) is None, "the first two are decided, the third is not"
    assert len(log.of(Reward)) == 3
    now.at = 69.0
    assert await desk.batch(1, 4, V0)
    assert batches(log) == [{"t0", "t1", "t2", "t5"}]


async def test_an_episode_that_goes_on_is_taken_in_parts_from_its_beginning(log, now, open_desk, turn):
    config = RewardConfig(episode_wait_s=100.0, user_cap=1.0)
    desk = open_desk(log, config=config)
    await talk(log, turn, "other", [900], {900: "rejected"}, ended_at=300.0)
    taken: list[set[str]] = []
    for i in range(60):  # a turn every ten seconds, without end
        await talk(log, turn, "e", [i], {i: "accepted"} if i % 2 else {}, ended_at=10.0 * i)
        now.at = 10.0 * i + 1.0
        made = await desk.batch(desk.last_step + 1, 5, V0)
        if made:
            taken.append({each.partition(":")[0] for each in made.row.turns} - {"t900"})
    assert len(taken) >= 4
    parts = [sorted(int(name[1:]) for name in part) for part in taken]
    flat = [number for part in parts for number in part]
    assert flat == list(range(len(flat))), "in order, without a gap, each once"


async def test_a_very_long_episode_is_parted(log, now, open_desk, turn):
    await talk(log, turn, "e", range(100), {i: "accepted" if i % 3 else "rejected" for i in range(100)})
    now.at = 99.0
    desk = open_desk(log, config=RewardConfig(episode_turns=40))
    sizes = [len((await desk.batch(step, 10, V0)).row.turns) for step in (1, 2, 3)]
    assert sizes == [40, 40, 20]
    assert batches(log)[0] == {f"t{i}" for i in range(40)}


async def test_a_turn_that_is_held_back_does_not_hold_up_its_episode(log, now, open_desk, turn):
    now.at = 35.0
    await talk(log, turn, "e", [0], {0: "accepted"})
    await log.append(turn(1, episode="e", arm=Arm.CONTROL, ended_at=34.0))  # reward open, outcome known
    await talk(log, turn, "f", [5], {5: "rejected"})
    now.at = 41.0
    assert await open_desk(log).batch(1, 2, V0)
    assert batches(log) == [{"t0", "t5"}]


async def test_episodes_of_one_name_with_two_tenants_are_apart(log, now, open_desk, turn):
    await talk(log, turn, "e", [0], {}, tenant="acme")
    await log.append(a_signal(turn(0, tenant="acme")))
    now.at = 35.0
    await talk(log, turn, "e", [1], {}, tenant="rival", ended_at=34.0)  # open
    now.at = 41.0
    desk = open_desk(log)
    await desk.poll()
    assert [each.id for each in await desk.ready(0, 1)] == ["t0:0"]


# ---------------------------------------------------------------- groups


async def rollouts(log, turn, group: str, numbers, ended_at: float) -> None:
    for i in numbers:
        await talk(log, turn, f"{group}-{i}", [i], {}, group=group, ended_at=ended_at)
        await log.append(a_signal(turn(i), "accepted" if i % 2 else "rejected", at=ended_at))


async def test_a_group_is_never_split_and_waits_until_no_member_is_open(log, now, open_desk, turn):
    desk = open_desk(log, config=RewardConfig(group_wait_s=60.0))
    await rollouts(log, turn, "g", range(4), ended_at=10.0)
    now.at = 60.0
    assert await desk.batch(1, 2, V0) is None, "decided, but another member may yet come"
    await rollouts(log, turn, "g", range(4, 8), ended_at=60.0)
    now.at = 80.0
    assert await desk.batch(1, 2, V0) is None
    now.at = 121.0
    made = await desk.batch(1, 2, V0)
    assert made is not None
    assert batches(log) == [{f"t{i}" for i in range(8)}], "all eight, though two would do"
    assert {sample.weight for sample in made.samples} == {1.0}, "each rollout is an episode"


async def test_a_member_that_comes_after_its_group_was_learned_from_is_held_back(log, now, open_desk, turn):
    desk = open_desk(log)
    await rollouts(log, turn, "g", range(4), ended_at=10.0)
    now.at = 99.0
    assert await desk.batch(1, 2, V0)
    await rollouts(log, turn, "g", [9], ended_at=98.0)
    await rollouts(log, turn, "h", [11], ended_at=98.0)
    now.at = 300.0
    await desk.poll()
    assert log.reasons(Holdback) == {"t9:0": "late_group"}
    assert [each.id for each in await desk.ready(1, 1)] == ["t11:0"]
    assert (await recount(log)).balanced


async def test_a_group_that_taught_nothing_is_closed_too(log, now, open_desk, turn):
    desk = open_desk(log)
    for i in range(4):
        await talk(log, turn, f"g-{i}", [i], {i: "accepted"}, group="g")
    now.at = 99.0
    with pytest.raises(NoSignal):
        await desk.batch(1, 4, V0)
    await rollouts(log, turn, "g", [9], ended_at=98.0)
    now.at = 300.0
    await desk.poll()
    assert log.reasons(Holdback)["t9:0"] == "late_group"


async def test_nothing_starves(log, now, open_desk, turn):
    """Turns of every kind, some pending for long: in the end each was trained on or held back."""

    def slow(turn, signals, now):
        number = int(turn.id[1:].partition(":")[0])
        until = turn.ended_at + (500.0 if number % 7 == 0 else 5.0)
        value = 1.0 if number % 2 else -1.0
        return (
            Reward(turn=turn.id, value=value, function="s@1", signals=(), at=until)
            if now >= until
            else Pending(until=until)
        )

    config = RewardConfig(max_staleness=10**6, episode_wait_s=50.0, user_cap=1.0)
    desk = open_desk(log, fn=slow, config=config)
    for i in range(200):
        each = turn(i, episode=f"e{i // 9}", ended_at=10.0 * i, group="g" if i in (50, 60, 70) else None)
        await log.append(each, replace(a_delivery(each), at=10.0 * i))
        now.at = 10.0 * i + 1
        await desk.batch(desk.last_step + 1, 6, V0)
    now.at += 10_000.0
    while await desk.batch(desk.last_step + 1, 1, V0):
        pass
    found = await recount(log)
    assert (found.waiting, found.trained) == (0, 200)
    assert found.balanced


# ---------------------------------------------------------------- a batch that never fills

WAITS = RewardConfig(batch_wait_s=1000.0, episode_wait_s=10**6, user_cap=1.0)


async def test_turns_for_which_too_few_others_come_are_held_back_in_the_end(log, now, open_desk, turn):
    await talk(log, turn, "e", range(3), {2: "accepted"})
    desk = open_desk(log, config=WAITS)
    for now.at in (41.0, 1039.9):
        assert await desk.batch(1, 8, V0) is None
        assert log.of(Holdback) == []
    now.at = 1040.0  # the window closed at 40
    assert await desk.batch(1, 8, V0) is None
    reason = "too_few: no batch of 8 in 1000 s (reward.batch_wait_s)"
    assert log.reasons(Holdback) == {f"t{i}:0": reason for i in range(3)}
    found = await recount(log)
    assert (found.waiting, found.held, found.balanced) == (0, {"too_few": 3}, True)


async def test_old_turns_are_learned_from_if_there_are_enough(log, now, open_desk, turn):
    await talk(log, turn, "e", range(3), {2: "accepted"})
    await talk(log, turn, "f", range(5, 9), {6: "rejected"})
    now.at = 1e6  # nobody trained for days
    assert await open_desk(log, config=WAITS).batch(1, 7, V0)
    assert log.of(Holdback) == []


async def test_a_unit_is_given_up_as_a_whole_and_not_while_a_turn_of_it_is_open(log, now, open_desk, turn):
    await talk(log, turn, "e", [0], {0: "accepted"})
    await rollouts(log, turn, "g", [1], ended_at=10.0)
    await talk(log, turn, "e", [2], {}, ended_at=900.0)
    await rollouts(log, turn, "g", [3], ended_at=1020.0)
    desk = open_desk(log, config=WAITS)
    now.at = 1041.0
    assert await desk.batch(1, 8, V0) is None
    assert log.of(Holdback) == [], "the first is old, but not its unit"
    now.at = 1931.0
    assert await desk.batch(1, 8, V0) is None
    assert set(log.reasons(Holdback)) == {"t0:0", "t2:0"}
    now.at = 2051.0
    await rollouts(log, turn, "g", [5], ended_at=2040.0)
    assert await desk.batch(1, 8, V0) is None
    assert set(log.reasons(Holdback)) == {"t0:0", "t2:0"}, "one of the group is open"
    now.at = 3100.0
    assert await desk.batch(1, 8, V0) is None
    assert set(log.reasons(Holdback)) == {f"t{i}:0" for i in (0, 1, 2, 3, 5)}


async def test_a_group_that_was_given_up_is_closed(log, now, open_desk, turn):
    await rollouts(log, turn, "g", range(4), ended_at=10.0)
    desk = open_desk(log, config=WAITS)
    now.at = 2000.0
    assert await desk.batch(1, 8, V0) is None
    await rollouts(log, turn, "g", range(10, 18), ended_at=1999.0)
    now.at = 2100.0
    assert await desk.batch(1, 8, V0) is None
    assert {log.reasons(Holdback)[f"t{i}:0"] for i in range(10, 18)} == {"late_group"}


async def test_a_rewards_own_date_cannot_make_its_turn_wait_for_ever(log, now, open_desk, turn):
    def dated(at: float):
        return lambda turn, signals, now: Reward(turn=turn.id, value=1.0, function="d@1", signals=(), at=at)

    config = RewardConfig(batch_wait_s=1000.0, longest_wait_s=500.0)
    await talk(log, turn, "far", [0], {})
    now.at = 20.0
    await open_desk(log, fn=dated(1e300), config=config).poll()
    await talk(log, turn, "past", [1], {})
    desk = open_desk(log, fn=dated(-1e300), config=config)
    now.at = 1009.0
    assert await desk.ready(0, 8) == []
    await desk.poll()
    for now.at, gone in ((1009.9, set()), (1010.0, {"t1:0"}), (1509.9, {"t1:0"}), (1510.0, {"t0:0", "t1:0"})):
        assert await desk.ready(0, 8) == []
        assert set(log.reasons(Holdback)) == gone


# ---------------------------------------------------------------- a trainer that waits for the gate


async def test_a_trainer_that_may_take_no_step_keeps_a_batch_and_what_is_not_old(log, now, open_desk, turn):
    desk = open_desk(log, config=WAITS)
    most = 0
    for day in range(20):  # turns come as ever, a step is never taken
        await talk(log, turn, f"e{day}", range(4 * day, 4 * day + 4), {4 * day: "accepted"}, ended_at=500.0 * day)
        now.at = 500.0 * day + 31.0
        await desk.poll()
        ready = await desk.ready(0, 4)
        assert [each.id for each in ready] == [f"t{i}:0" for i in range(4 * day, 4 * day + 4)]
        most = max(most, len(desk._reading.ledger.matured))
    assert most <= 12, "three episodes: one now, and those of the last 1000 s"
    reasons = set(log.reasons(Holdback).values())
    assert reasons == {"untaken: no batch took it in 1000 s (reward.batch_wait_s)"}
    now.at += 1e6
    await desk.ready(0, 4)
    found = await recount(log)
    assert (found.waiting, found.held, found.balanced) == (4, {"untaken": 76}, True)
    assert await desk.batch(1, 4, V0), "and then it may"


async def test_a_trainer_that_takes_steps_loses_nothing_by_its_turns_age(log, now, open_desk, turn):
    for i in range(12):
        await talk(log, turn, f"e{i}", [i], {i: "accepted" if i % 2 else "rejected"}, ended_at=10.0 + i)
    now.at = 1e6  # nobody trained for days, and people were served all the while
    desk = open_desk(log, config=WAITS)
    for step in (1, 2, 3):
        await desk.poll()
        assert len(await desk.turns(step - 1, 4)) == 4
        assert await desk.batch(step, 4, V0)
    assert log.of(Holdback) == []


async def test_a_group_that_no_batch_took_is_closed_and_one_of_which_a_part_is_taken_is_not_given_up(
    log, now, open_desk, turn
):
    desk = open_desk(log, config=WAITS.model_copy(update={"episode_turns": 2}))
    await rollouts(log, turn, "g", range(4), ended_at=10.0)
    await talk(log, turn, "e", range(20, 25), {20: "accepted"}, ended_at=20.0)
    now.at = 2000.0
    await desk.poll()
    assert [each.id for each in await desk.ready(0, 2)] == ["t20:0", "t21:0"]
    assert set(log.reasons(Holdback)) == {f"t{i}:0" for i in range(4)}
    await rollouts(log, turn, "g", [9], ended_at=1999.0)
    await desk.poll()
    assert log.reasons(Holdback)["t9:0"] == "late_group"
