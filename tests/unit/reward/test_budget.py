"""A batch has so many tokens at most: what a turn costs, what is cut, what is parted, what is too long."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.deadlines import PATIENT_S
from tests.oracles.turn_accounting import recount

from ostinato.core.records import Batch, Holdback, PolicyVersion, Turn
from ostinato.reward.batching import costs
from ostinato.reward.config import RewardConfig
from ostinato.reward.ledger_entries import Matured, TurnFacts
from ostinato.reward.pipeline import DeskSource
from ostinato.testing.log import MemoryFolds
from ostinato.testing.records import a_delivery, a_signal, a_turn
from ostinato.train.packing import TokenTurn, pack

V0 = PolicyVersion(number=0, hash="00")
CONFIG = RewardConfig(batch_tokens=400, user_cap=1.0)  # a part: 100


@pytest.fixture
def long(turn) -> Callable[..., Turn]:
    def long_(i: int, tokens: int, **changes) -> Turn:
        """Turn number i of so many tokens, ten of them sampled, like no other from its first one on."""
        made = replace(turn(i), prompt_ids=(1000 + i, *range(tokens - 11)), sampled_ids=tuple(range(10)))
        made = replace(made, logprobs=(-0.5,) * 10, spans=(replace(made.spans[0], tokens=10),))
        return replace(made, **changes)

    return long_


async def said(log, *turns: Turn, at: float = 10.0) -> None:
    """Turns that were seen and judged, every second one well."""
    await log.append(*turns, a_delivery(*turns, at=at))
    await log.append(*[a_signal(each, "accepted" if i % 2 else "rejected", at=at) for i, each in enumerate(turns)])


def numbers(batch) -> list[int]:
    return [int(name[1:].partition(":")[0]) for name in batch.row.turns]


# ---------------------------------------------------------------- what a turn costs


def talk(*lengths: int) -> list[Turn]:
    """An episode: each prompt is all that came before and some more."""
    turns: list[Turn] = []
    for i, length in enumerate(lengths):
        before = turns[-1].prompt_ids + turns[-1].sampled_ids if turns else ()
        made = a_turn(f"t{i}:0", prompt=(*before, *range(100 * i, 100 * i + length)), sampled=range(5))
        turns.append(replace(made, episode="e", parent=turns[-1].id if turns else None))
    return turns


def cost(turns: list[Turn]) -> int:
    facts = [TurnFacts.of(seq, each, CONFIG) for seq, each in enumerate(turns, 1)]
    return list(costs(Matured(facts=each, value=0.0, silent=False, signals=(), since=0.0) for each in facts))[-1]


def test_an_episode_costs_its_last_turn_and_a_call_with_many_samples_its_prompt_once():
    assert cost(talk(20, 10, 10)) == 20 + 5 + 10 + 5 + 10 + 5
    samples = [replace(a_turn(f"s{i}:0", prompt=range(50), sampled=(i, 7)), episode="e") for i in range(8)]
    assert cost(samples) == 50 + 8 * 2
    strangers = [a_turn(f"x{i}:0", prompt=(i, *range(9)), sampled=(1, 2)) for i in range(4)]
    assert cost(strangers) == 4 * 12
    assert cost(talk(20, 10, 10)[1:]) == 35 + 5 + 15, "a parent that is elsewhere is computed again"


def test_a_parent_that_cannot_be_the_beginning_of_its_child_saves_nothing():
    parent = a_turn("a:0", prompt=range(50), sampled=(1, 2))
    child = replace(a_turn("b:0", prompt=range(9), sampled=(1, 2)), parent="a:0")
    assert cost([parent, child]) == 52 + 11


@pytest.mark.parametrize("lengths", [(20,), (20, 10, 10), (20, 0, 10), (1, 1, 1, 1), (90, 3)])
def test_it_is_what_packing_computes(lengths: tuple[int, ...]):
    turns = talk(*lengths)
    turns += [replace(turns[-1], id=f"again{i}:0", sampled_ids=(50 + i, 0, 0, 0, 0)) for i in range(3)]
    packed = pack([TokenTurn(prompt=each.prompt_ids, sampled=each.sampled_ids) for each in turns]).tokens
    assert cost(turns) == packed + 4, "but for the last tokens, of which nothing follows"


def test_an_erased_turn_still_counts_what_it_sampled():
    whole = a_turn("a:0", prompt=range(50), sampled=range(7))
    erased = replace(whole, prompt_ids=(), sampled_ids=(), logprobs=(), text="")
    assert (TurnFacts.of(1, whole, CONFIG).tokens, TurnFacts.of(1, erased, CONFIG).tokens) == (57, 7)


# ---------------------------------------------------------------- at the desk


async def test_a_batch_ends_where_no_more_tokens_fit(log, now, open_desk, long):
    await said(log, *[long(i, 90) for i in range(10)])
    now.at = 99.0
    desk = open_desk(log, config=CONFIG)
    sizes = []
    for step in (1, 2):
        made = await desk.batch(step, 8, V0)
        sizes.append(numbers(made))
    assert sizes == [[6, 7, 8, 9], [2, 3, 4, 5]], "four of 90 in 400, the newest first, without waiting for eight"
    assert await desk.batch(3, 8, V0) is None, "two that would fit wait for others"
    assert await desk.batch(3, 2, V0)


async def test_what_does_not_fit_is_passed_over_for_what_does(log, now, open_desk, long):
    await said(log, *[long(i, length) for i, length in enumerate([20, 95, 95, 95, 95, 90])])
    now.at = 99.0
    assert numbers(await open_desk(log, config=CONFIG).batch(1, 6, V0)) == [0, 2, 3, 4, 5]


async def test_a_group_or_a_turn_beyond_a_quarter_is_held_back_and_the_rest_is_learned_from(log, now, open_desk, long):
    group = [long(i, 30, group="g") for i in range(4)]
    fits = [long(i, 30, group="h") for i in range(10, 13)]
    giant = long(20, 101)
    await said(log, *group, *fits, giant, long(21, 100))
    now.at = 99.0
    desk = open_desk(log, config=CONFIG)
    made = await desk.batch(1, 4, V0)
    assert numbers(made) == [10, 11, 12, 21]
    reasons = log.reasons(Holdback)
    assert set(reasons) == {*(each.id for each in group), giant.id}
    assert reasons["t0:0"] == (
        "too_long: 120 tokens that must be learned from together, and the most is 100, a quarter of reward.batch_tokens"
    )
    await said(log, long(30, 20, group="g", ended_at=98.0), at=98.0)
    now.at = 200.0
    await desk.poll()
    assert log.reasons(Holdback)["t30:0"] == "late_group"
    assert (await recount(log)).balanced


async def test_a_long_episode_is_parted_by_its_tokens(log, now, open_desk):
    await said(log, *talk(*[10] * 6))  # 15 more each
    now.at = 99.0
    desk = open_desk(log, config=CONFIG.model_copy(update={"batch_tokens": 200}))  # a part: 50
    parts = [made.row.turns async for made in batches(desk)]
    assert parts == [("t0:0", "t1:0", "t2:0")], "and the fourth turn is 60 by itself"
    assert set(log.reasons(Holdback)) == {"t3:0", "t4:0", "t5:0"}
    assert (await recount(log)).waiting == 0


async def batches(desk):
    """Batches of one turn and more, until nothing waits."""
    for _ in range(9):
        if made := await desk.batch(desk.last_step + 1, 1, V0):
            yield made


async def test_nobodys_long_prompts_take_the_tokens_of_a_batch(log, now, open_desk, long):
    await said(log, *[long(i, 13, tenant="short") for i in range(40)])
    await said(log, *[long(i, 97, tenant="long") for i in range(40, 80)])
    now.at = 99.0
    made = await open_desk(log, config=CONFIG).batch(1, 24, V0)
    tenants = [sample.turn.tenant for sample in made.samples]
    assert tenants.count("short") == 15
    assert tenants.count("long") == 2


async def test_a_batch_that_is_cut_is_what_the_trainer_gets(log, now, open_desk, long):
    await said(log, *[long(i, 90) for i in range(10)])
    now.at = 99.0
    source = DeskSource(open_desk(log, config=CONFIG), live, size=8, poll_s=0.001)
    async with asyncio.timeout(PATIENT_S):
        turns = await source.collect()
    assert numbers(await source.score(turns)) == [6, 7, 8, 9]
    assert len(log.of(Batch)) == 1


async def live() -> PolicyVersion:
    return V0


async def test_a_saving_of_before_turns_were_measured_is_read_anew(log, now, open_desk, long):
    folds = MemoryFolds()
    await said(log, *[long(i, 90) for i in range(5)])
    now.at = 99.0
    desk = open_desk(log, config=CONFIG, folds=folds)
    await desk.poll()
    await desk.save()
    cursor, text = folds.kept["desk"]
    state = json.loads(text)
    assert [entry["facts"]["tokens"] for entry in state["ledger"]["matured"]] == [90] * 5
    state["ledger"]["format"] = "ledger@2"
    for entry in state["ledger"]["matured"]:
        del entry["facts"]["tokens"], entry["facts"]["parent"]
    folds.kept["desk"] = (cursor, json.dumps(state))
    later = open_desk(log, config=CONFIG, folds=folds)
    await later.poll()
    assert len(await later.ready(0, 5)) == 4
