"""What the trainer sees: the batches that come out of `DeskSource`, with episodes, groups and weights as promised."""

import asyncio
from collections.abc import Callable

import pytest
from tests.deadlines import PATIENT_S

from ostinato.core.errors import NoSignal
from ostinato.core.records import Batch, PolicyVersion, Turn
from ostinato.core.samples import TrainingBatch
from ostinato.reward.config import RewardConfig
from ostinato.reward.pipeline import DeskSource
from ostinato.testing.log import MemoryLog
from ostinato.testing.records import a_delivery, a_signal

V0 = PolicyVersion(number=0, hash="00")


async def live() -> PolicyVersion:
    return V0


@pytest.fixture
def source(log, now, open_desk) -> Callable[..., DeskSource]:
    def source_(size: int, **changes) -> DeskSource:
        now.at = 99.0
        desk = open_desk(log, config=RewardConfig(user_cap=1.0, tenant_cap=1.0, **changes))
        return DeskSource(desk, live, size=size, poll_s=0.001)

    return source_


async def talk(log, turn, name: str, numbers, verb: str, **changes) -> list[Turn]:
    """An episode of which only the last turn is spoken about."""
    turns = [turn(i, episode=name, user=name, ended_at=10.0 + i / 1000, **changes) for i in numbers]
    await log.append(*turns, a_delivery(*turns), a_signal(turns[-1], verb))
    return turns


async def learn(source: DeskSource) -> TrainingBatch:
    return await source.score(await source.collect())


async def test_an_episodes_last_reward_reaches_its_earlier_turns(log, turn, source):
    await talk(log, turn, "good", range(3), "accepted")
    await talk(log, turn, "bad", range(10, 13), "rejected")
    made = await learn(source(6, discount=0.5))
    first, second, third, *bad = [sample.advantages for sample in made.samples]
    assert third[0] > 0
    assert first == pytest.approx([each / 4 for each in third])
    assert second == pytest.approx([each / 2 for each in third])
    assert all(each < 0 for advantages in bad for each in advantages)
    assert made.row == log.of(Batch)[0], "on record before the trainer sees it"


async def test_a_turn_weighs_the_same_whatever_its_episodes_length(log, turn, source):
    """What a step is made of, weight x |advantage| x tokens, with the same praise for every turn."""
    for i in range(20):
        long = turn(i, episode="long", user="long")
        await log.append(long, a_signal(long, "accepted"))
    short = turn(50, episode="short", user="short", prompt_ids=(50, 51))
    await log.append(short, a_signal(short, "rejected", at=12.0))
    made = await learn(source(21, discount=0.0))
    mass = {"long": 0.0, "short": 0.0}
    for sample in made.samples:
        mass[sample.turn.episode] += sample.weight * abs(sample.advantages[0]) * len(sample.turn.sampled_ids)
    assert made.row.even
    assert sum(sample.weight for sample in made.samples) == pytest.approx(2.0)
    assert mass["long"] / mass["short"] == pytest.approx(20 * 0.75 / 0.25), "twenty praised turns against one rejected"


async def test_a_group_comes_in_one_batch_though_fewer_would_do(log, now, turn, source):
    for i in range(8):
        await talk(log, turn, f"g{i}", [i], "accepted" if i % 2 else "rejected", group="g")
    for i in range(20, 24):
        await talk(log, turn, f"h{i}", [i], "accepted" if i % 2 else "rejected", group="h")
    feed = source(3)
    first, second = await learn(feed), await learn(feed)
    assert {sample.turn.group for sample in first.samples} == {"h"}
    assert {sample.turn.group for sample in second.samples} == {"g"}
    assert [len(first.samples), len(second.samples)] == [4, 8]


async def test_it_waits_until_there_are_enough(log, turn, source):
    feed = source(2)
    await talk(log, turn, "a", [0], "accepted")
    waiting = asyncio.ensure_future(feed.collect())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await talk(log, turn, "b", [1], "rejected")
    async with asyncio.timeout(PATIENT_S):
        assert [each.id for each in await waiting] == ["t0:0", "t1:0"]


async def test_the_release_to_go_back_to_is_named_once(log, turn, source):
    for i in range(4):
        await talk(log, turn, f"e{i}", [i], "accepted" if i % 2 else "rejected")
    feed = source(2)
    feed.base = V0
    assert [(await learn(feed)).row.base, (await learn(feed)).row.base] == [V0, None]


async def test_turns_that_are_taken_back_between_the_look_and_the_step_are_no_fault(log, turn, source):
    feed = source(2)
    (praised,) = await talk(log, turn, "a", [0], "accepted")
    await talk(log, turn, "b", [1], "rejected")
    turns = await feed.collect()
    await log.append(a_signal(praised, "sorry", at=98.0, id="r", retracts=f"{praised.id}/accepted/11"))
    with pytest.raises(NoSignal, match="held back since"):
        await feed.score(turns)
    await talk(log, turn, "c", [2], "accepted")
    assert [sample.turn.id for sample in (await learn(feed)).samples] == ["t1:0", "t2:0"]


class Counting(MemoryLog):
    """A log that counts the turns that are fetched by name."""

    turns_found = 0

    async def find(self, kind, identities):
        self.turns_found += len(identities) if kind is Turn else 0
        return await super().find(kind, identities)


async def test_a_look_without_a_step_reads_no_turn(now, turn, open_desk):
    log = Counting()
    for i in range(6):
        await talk(log, turn, f"e{i}", [i], "accepted" if i % 2 else "rejected")
    now.at = 99.0
    feed = DeskSource(open_desk(log), live, size=4, poll_s=0.001)
    assert await feed.look() == 4
    log.turns_found = 0  # each was read once, for its reward
    assert [await feed.look() for _ in range(5)] == [4] * 5
    assert log.turns_found == 0
    assert len(await feed.collect()) == 4
    assert log.turns_found == 4
