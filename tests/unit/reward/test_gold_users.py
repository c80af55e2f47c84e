"""Gold people: they get rewards, which say what those who teach do not see, and nothing is ever learned from them."""

import pytest

from ostinato.core.records import Batch, Holdback, PolicyVersion, Reward
from ostinato.reward.accounting import account
from ostinato.testing.log import MemoryFolds
from ostinato.testing.records import a_delivery, a_signal

V0 = PolicyVersion(number=0, hash="00")


def gold(tenant, user):
    return (tenant, user) == ("default", "u2")


@pytest.fixture
async def served(log, turn):
    """Twenty turns of five users, every other one accepted."""
    turns = [turn(i) for i in range(20)]
    await log.append(
        *turns,
        a_delivery(*turns),
        *(a_signal(each, "accepted" if i % 2 else "rejected") for i, each in enumerate(turns)),
    )
    return turns


async def test_a_gold_users_turns_are_rewarded_and_held_back_with_that_reason(log, now, open_desk, served):
    desk = open_desk(log, gold=gold)
    now.at = 100.0
    await desk.poll()
    theirs = {each.id for each in served if each.user == "u2"}
    assert log.reasons(Holdback) == dict.fromkeys(theirs, "gold")
    assert {row.turn for row in log.of(Reward)} == {each.id for each in served}
    await desk.batch(1, 16, V0)
    (batch,) = log.of(Batch)
    assert len(batch.turns) == 16
    assert not theirs & set(batch.turns)
    found = await account(log)
    assert found.balanced
    assert found.held == {"gold": 4}


async def test_the_baseline_learns_nothing_of_them(log, now, open_desk, served):
    """What a batch teaches is the same as if they had never been there."""
    from ostinato.testing.log import MemoryLog

    without = MemoryLog()
    kept = [each for each in served if each.user != "u2"]
    ids = {each.id for each in kept}
    await without.append(
        *kept,
        a_delivery(*kept),
        *(row for row in log.rows if getattr(row, "turn", None) in ids and hasattr(row, "name")),
    )
    batches = []
    for rows, people in ((log, gold), (without, lambda tenant, user: False)):
        desk = open_desk(rows, gold=people)
        now.at = 100.0
        await desk.poll()
        batches.append(await desk.batch(1, 10, V0))
    assert [sample.turn.id for sample in batches[0].samples] == [sample.turn.id for sample in batches[1].samples]
    assert [sample.advantages for sample in batches[0].samples] == [sample.advantages for sample in batches[1].samples]


async def test_who_becomes_gold_later_or_is_no_more_is_so_from_the_next_turn_on(log, now, open_desk, served, turn):
    folds = MemoryFolds()
    desk = open_desk(log, folds=folds)
    await desk.poll()
    await desk.close()
    desk = open_desk(log, folds=folds, gold=gold)
    later = turn(42)
    assert later.user == "u2"
    await log.append(later, a_delivery(later))
    now.at = 100.0
    await desk.poll()
    assert log.reasons(Holdback) == {later.id: "gold"}
    await desk.batch(1, 10, V0)
    assert (await account(log)).balanced
