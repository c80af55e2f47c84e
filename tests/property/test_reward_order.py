"""Permutations and duplications of one feedback stream give the same rewards."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from tests.grids import first

from ostinato.core.records import Arm, Reward, Row, Signal, Source, Turn
from ostinato.core.seams import Log
from ostinato.record.log import SqlLog
from ostinato.reward.pipeline import RewardDesk
from ostinato.reward.protocol import load
from ostinato.reward.runners import Inline
from ostinato.testing.log import MemoryLog
from ostinato.testing.records import a_delivery, a_turn

COPILOT = Inline(load("ostinato.reward.functions:copilot", {"window": 30.0}), max_abs=100.0)
TURN = a_turn("")


def stream(seed: int) -> tuple[list[Turn], list[Signal]]:
    """12 turns and about 40 signals: several per turn, equal times, retractions, some for no turn."""
    rng = random.Random(seed)
    turns = [replace(TURN, id=f"t{i}:0", arm=rng.choice([Arm.LIVE, Arm.CONTROL, Arm.CANARY])) for i in range(12)]
    signals: list[Signal] = []
    for i in range(40):
        turn = f"t{rng.randrange(13)}:0"
        earlier = [signal.id for signal in signals if signal.turn == turn]
        at = 10.0 + rng.randrange(8)
        signals.append(
            Signal(
                id=f"s{i}",
                turn=turn,
                name=rng.choice(["accepted", "rejected", "undone", "ignored", "followed_up"]),
                value=rng.choice([1.0, 1.0, 0.0]),
                source=Source.HUMAN,
                occurred_at=at,
                received_at=at + rng.random() * 30,
                retracts=rng.choice(earlier) if earlier and rng.random() < 0.4 else None,
            )
        )
    return turns, signals


async def rewards(log: Log, turns: list[Turn], signals: list[Signal], rng: random.Random) -> list[Reward]:
    """What the desk makes of the rows in a random order, signals repeated at random, polled in between at random."""
    rows: list[Row] = [*turns, *signals, *rng.choices(signals, k=rng.randrange(30))]
    rng.shuffle(rows)
    now = [10.0]
    desk = RewardDesk(log, COPILOT, lambda: now[0])
    while rows:
        cut = rng.randrange(1, len(rows) + 1)
        await log.append(*rows[:cut])
        del rows[:cut]
        if rng.random() < 0.3:
            now[0] += rng.random()  # never past the windows: every signal arrives in time, as its received_at claims
            await desk.poll()
    await log.append(a_delivery(*turns))
    now[0] = 40.5 + rng.random() * 1000
    await desk.poll()
    found = [row async for _, row in log.read(0, {Reward})]
    rewards = (
        replace(row, upto=0) for row in found if isinstance(row, Reward)
    )  # where the log stood is another matter
    return sorted(rewards, key=lambda reward: reward.turn)


@pytest.mark.parametrize("permutations", first([250, 1_000]))
async def test_permutations_and_duplications_give_identical_rewards(permutations):
    values: set[float] = set()
    for seed in range(10):
        turns, signals = stream(seed)
        expected = await rewards(MemoryLog(), turns, signals, random.Random(0))
        assert len(expected) == 12
        values |= {reward.value for reward in expected}
        for shuffle in range(permutations // 10):
            assert await rewards(MemoryLog(), turns, signals, random.Random(shuffle)) == expected
    assert values == {0.75, 0.0, -0.25}


async def test_the_same_on_the_real_log(tmp_path: Path):
    turns, signals = stream(3)
    expected = await rewards(MemoryLog(), turns, signals, random.Random(0))
    for shuffle in range(8):
        with SqlLog.open(tmp_path / f"{shuffle}.sqlite") as log:
            assert await rewards(log, turns, signals, random.Random(shuffle)) == expected
