"""Turns of simulated worlds in the desk: decided by verdicts at once, in whole groups, and by nobody else's word."""

import json
from dataclasses import replace

import pytest
from tests.oracles.turn_accounting import recount

from ostinato.core.errors import NoSignal
from ostinato.core.records import (
    Arm,
    Batch,
    Holdback,
    PolicyVersion,
    Purpose,
    Quarantine,
    Reward,
    Signal,
    Source,
    Span,
)
from ostinato.core.verdicts import BELIEF, CLOSED, FAILED, GRADED, MEASURED, TORN
from ostinato.launch.commands.status import accounts
from ostinato.record.folds import FileFolds
from ostinato.reward import ledger
from ostinato.reward.accounting import account
from ostinato.reward.config import BeliefConfig, RewardConfig
from ostinato.reward.ledger_entries import Taught
from ostinato.reward.log_fold import restored
from ostinato.testing.log import MemoryFolds
from ostinato.testing.records import a_delivery, a_signal, a_turn
from ostinato.worlds.rollout.groups import SpentGroups

V0 = PolicyVersion(number=0, hash="00")
NOW = 12.0
WORLDS = Taught(people=False, groups=1)


def rollout(
    episode: str, turns: int = 1, *, group: str | None = "g", arm: Arm = Arm.WORLD, version: int = 0, **changes
):
    made = [a_turn(f"{episode}-{n}:0", arm=arm, version=version, user="world") for n in range(turns)]
    return [replace(turn, episode=episode, group=group, **changes) for turn in made]


def said(turn, name: str, value: float = 1.0, **changes) -> Signal:
    made = Signal(
        id=f"{name}:{turn.id}",
        tenant=turn.tenant,
        turn=turn.id,
        name=name,
        value=value,
        source=Source.CODE,
        occurred_at=NOW,
        received_at=NOW,
    )
    return replace(made, **changes)


def graded(*turns, grade: float) -> list[Signal]:
    return [said(turn, GRADED, grade if turn is turns[-1] else 0.0) for turn in turns]


def refuse(turn, signals, now):
    raise AssertionError("nobody asks people's reward function about a world")


@pytest.fixture
def desk(log, now, open_desk):
    def open_(taught: Taught | None = WORLDS, folds=None, log=log, **config):
        now.at = NOW
        return open_desk(log, refuse, RewardConfig(user_cap=1.0, **config), taught=taught, folds=folds)

    return open_


async def test_a_grade_is_the_reward_at_once_and_people_see_no_difference(log, desk):
    turns = rollout("e", 3)
    await log.append(*turns)
    made = desk()
    await made.poll()
    assert log.of(Reward) == []
    await log.append(*graded(*turns, grade=1.0))
    await made.poll()
    assert [(reward.turn, reward.value, reward.function, reward.at) for reward in log.of(Reward)] == [
        ("e-0:0", 0.0, "world@1", NOW),
        ("e-1:0", 0.0, "world@1", NOW),
        ("e-2:0", 1.0, "world@1", NOW),
    ]
    assert (await recount(log)).balanced


async def test_a_group_goes_into_a_batch_only_when_it_was_closed_and_then_whole(log, desk):
    made = desk()
    one, two = rollout("one", 2), rollout("two")
    await log.append(*one, *graded(*one, grade=1.0))
    await made.poll()
    assert await made.batch(1, 1, V0) is None, "its other members may not even have begun"
    await log.append(*two)
    assert await made.batch(1, 1, V0) is None
    await log.append(*graded(*two, grade=0.0), said(two[-1], CLOSED))
    batch = await made.batch(1, 1, V0)
    assert batch is not None
    assert [sample.turn.id for sample in batch.samples] == ["one-0:0", "one-1:0", "two-0:0"]
    assert [sample.advantages[0] for sample in batch.samples] == [0.5, 0.5, -0.5]
    assert [(sample.weight, sample.summed) for sample in batch.samples] == [(0.5, True), (0.5, True), (1.0, True)]


BELIEVES = BeliefConfig(strength=1.0, most=8.0)


async def credited(log, desk, *beliefs: Signal, **config):
    """The advantages of a success of two turns and a failure of two, after these were said."""
    made = desk(**config)
    good, bad = rollout("good", 2), rollout("bad", 2)
    await log.append(*good, *bad, *beliefs, *graded(*good, grade=1.0), *graded(*bad, grade=0.0))
    await log.append(said(bad[-1], CLOSED, 2.0))
    batch = await made.batch(1, 1, V0)
    assert batch is not None
    return [sample.advantages[0] for sample in batch.samples]


def believed(**changes: float) -> list[Signal]:
    """What turns changed, by the place of each in `credited`."""
    places = {"g0": "good-0:0", "g1": "good-1:0", "b0": "bad-0:0", "b1": "bad-1:0"}
    return [said(a_turn(places[name], arm=Arm.WORLD), BELIEF, value) for name, value in changes.items()]


async def test_belief_divides_a_rollouts_credit_if_it_is_switched_on(log, desk):
    changes = believed(g0=0.1, g1=0.3, b0=-0.8, b1=0.0)
    assert await credited(log, desk, *changes, belief=BELIEVES) == pytest.approx([0.25, 0.75, -1.0, 0.0])
    assert (await recount(log)).balanced


async def test_by_default_what_is_believed_counts_for_nothing(log, desk):
    assert await credited(log, desk, *believed(g0=0.1, g1=0.3, b0=-0.8, b1=0.0)) == [0.5, 0.5, -0.5, -0.5]


@pytest.mark.parametrize(
    "change", [{"source": Source.HUMAN}, {"name": "accepted"}, {"id": "mine"}, {"turn": "good-1:0"}, {"tenant": "acme"}]
)
async def test_an_event_that_only_looks_like_a_belief_divides_nothing(log, desk, change):
    first, *others = believed(b0=-0.8, g0=0.1, g1=0.3, b1=0.0)
    found = await credited(log, desk, replace(first, **change), *others, belief=BELIEVES)
    assert found == pytest.approx([0.25, 0.75, -0.5, -0.5])


async def test_a_belief_beyond_its_range_counts_as_its_end(log, desk):
    found = await credited(log, desk, *believed(g0=1e9, g1=1.0, b0=0.0, b1=-0.1), belief=BELIEVES)
    assert found == pytest.approx([0.5, 0.5, 0.0, -1.0])


async def test_rollouts_at_the_same_prompt_are_compared_if_it_is_switched_on(log, desk):
    """Three of four come to the second prompt, and two of them succeed."""
    members = [rollout(name, 2) for name in ("a", "b", "c")] + [rollout("d", 1)]
    members = [[replace(turn, prompt_ids=(1, *range(n))) for n, turn in enumerate(each)] for each in members]
    for equal, expected in ((False, [0.5] * 4 + [-0.5] * 3), (True, [0.5, 1 / 3, 0.5, 1 / 3, -0.5, -2 / 3, -0.5])):
        own = type(log)()
        made = desk(equal_states=equal, log=own)
        await own.append(*(turn for each in members for turn in each))
        for each, grade in zip(members, (1.0, 1.0, 0.0, 0.0), strict=True):
            await own.append(*graded(*each, grade=grade))
        await own.append(said(members[-1][-1], CLOSED, 4.0))
        batch = await made.batch(1, 1, V0)
        assert batch is not None
        assert [sample.advantages[0] for sample in batch.samples] == pytest.approx(expected)


def chain(episode: str, purposes: str):
    """A rollout with memory: `t` is a turn of the task, `c` a summary or a refused try at one."""
    named = {"t": Purpose.TASK, "c": Purpose.COMPACTION}
    return [
        replace(turn, purpose=named[purpose])
        for turn, purpose in zip(rollout(episode, len(purposes)), purposes, strict=True)
    ]


async def test_summaries_and_refused_tries_get_their_chains_return_and_a_chain_counts_once(log, desk):
    made = desk(purposes=tuple(Purpose))
    long, short, other = chain("long", "tcctct"), chain("short", "t"), chain("other", "ct")
    await log.append(*long, *short, *other)
    await log.append(*graded(*long, grade=1.0), *graded(*short, grade=0.0), *graded(*other, grade=0.0))
    await log.append(said(other[-1], CLOSED, 3.0))
    batch = await made.batch(1, 1, V0)
    assert batch is not None
    advantages = {sample.turn.id: sample.advantages for sample in batch.samples}
    # the mean is that of three chains, not of nine turns
    assert {round(advantages[turn.id][0], 12) for turn in long} == {round(2 / 3, 12)}
    assert {round(advantages[turn.id][0], 12) for turn in (*short, *other)} == {round(-1 / 3, 12)}
    weights = {sample.turn.id: sample.weight for sample in batch.samples}
    assert [sum(weights[turn.id] for turn in each) for each in (long, short, other)] == [pytest.approx(1.0)] * 3
    assert log.reasons(Holdback) == {}
    assert (await recount(log)).balanced


async def test_summaries_that_are_not_learned_from_leave_their_chain_what_it_is_worth(log, desk):
    made = desk(purposes=(Purpose.TASK,))
    long, short = chain("long", "tcctct"), chain("short", "t")
    await log.append(*long, *short, *graded(*long, grade=1.0), *graded(*short, grade=0.0), said(short[0], CLOSED, 2.0))
    batch = await made.batch(1, 1, V0)
    assert [(sample.turn.id, sample.advantages[0]) for sample in batch.samples] == [
        *[(f"long-{n}:0", 0.5) for n in (0, 3, 5)],
        ("short-0:0", -0.5),
    ]
    assert log.reasons(Holdback) == {f"long-{n}:0": "purpose:compaction" for n in (1, 2, 4)}


async def test_what_nobody_knows_of_when_the_group_ends_is_torn_and_what_comes_after_is_late(log, desk):
    made = desk()
    lost, one, two = rollout("lost", 2), rollout("one"), rollout("two")
    await log.append(*lost, *one, *two, *graded(*one, grade=1.0))
    await log.append(*graded(*two, grade=0.0), said(two[-1], CLOSED, 2.0))
    batch = await made.batch(1, 1, V0)
    assert [sample.turn.id for sample in batch.samples] == ["one-0:0", "two-0:0"]
    after = rollout("after")
    await log.append(*after)
    await made.poll()
    assert log.reasons(Holdback) == dict.fromkeys(["lost-0:0", "lost-1:0"], "world:rollout_torn") | {
        "after-0:0": "late_group"
    }


@pytest.mark.parametrize("flat_groups", ["hold_back", "train"])
async def test_a_group_without_contrast_is_counted_and_leaves_its_place_in_the_batch(flat_groups, log, desk):
    made = desk(Taught(people=False, groups=2), flat_groups=flat_groups)
    for group, grades in {"flat": (1.0, 1.0), "first": (1.0, 0.0), "second": (0.0, 1.0)}.items():
        one, two = rollout(f"{group}1", 2, group=group), rollout(f"{group}2", 1, group=group)
        await log.append(*one, *two, *graded(*one, grade=grades[0]), *graded(*two, grade=grades[1]))
        await log.append(said(two[-1], CLOSED, 2.0))
    batch = await made.batch(1, 1, V0)
    assert batch is not None
    held = "flat: all 2 rollouts of the group are worth the same"
    flat = {"flat1-0:0", "flat1-1:0", "flat2-0:0"}
    left_out = flat_groups == "hold_back"
    assert log.reasons(Holdback) == (dict.fromkeys(flat, held) if left_out else {})
    assert (flat <= set(batch.row.turns)) is not left_out
    assert len({sample.turn.group for sample in batch.samples}) == 2
    assert (await recount(log)).balanced
    assert (await account(log)).held == ({"flat": 3} if left_out else {})


@pytest.mark.parametrize("name", [FAILED, TORN, MEASURED])
async def test_a_rollout_without_a_grade_is_held_back_with_the_reason(name, log, desk):
    turns = rollout("e", 2, group=None if name == MEASURED else "g")
    await log.append(*turns, *[said(turn, name) for turn in turns])
    await desk().poll()
    assert log.of(Reward) == []
    assert log.reasons(Quarantine) == log.reasons(Holdback) == {turn.id: f"world:{name}" for turn in turns}
    assert (await recount(log)).balanced


@pytest.mark.parametrize(
    "changes",
    [
        {"tenant": "acme"},
        {"source": Source.HUMAN},
        {"source": Source.IMPLICIT},
        {"source": Source.LLM},
        {"name": "accepted"},
    ],
    ids=lambda changes: " ".join(map(str, changes.values())),
)
async def test_nobody_but_the_worlds_own_program_is_believed(changes, log, desk):
    (turn,) = rollout("e")
    false = replace(said(turn, GRADED, 1.0, id="false"), **changes)
    await log.append(turn, false, said(turn, CLOSED, id="closed", tenant="acme"))
    made = desk()
    await made.poll()
    assert log.of(Reward) == []
    await log.append(*graded(turn, grade=0.25))
    await made.poll()
    assert [reward.value for reward in log.of(Reward)] == [0.25]


async def test_a_verdict_about_what_a_person_was_answered_is_no_reward_of_theirs(log, now, open_desk):
    (turn,) = rollout("e", arm=Arm.LIVE)
    await log.append(turn, said(turn, GRADED), said(turn, CLOSED), a_delivery(turn))
    now.at = 99.0
    desk = open_desk(log, taught=Taught(people=True, groups=1), config=RewardConfig(group_wait_s=0.0))
    await desk.poll()
    assert [(reward.value, reward.function) for reward in log.of(Reward)] == [(0.0, "copilot@1")]


async def test_a_nonsensical_grade_is_quarantined(log, desk):
    (turn,) = rollout("e")
    await log.append(turn, said(turn, GRADED, 1e6))
    await desk().poll()
    assert log.reasons(Quarantine)[turn.id].startswith("reward_nonsense: the value 1000000.0")


async def test_a_rollout_about_which_nothing_is_ever_said_ends_when_its_time_is_over(log, now, desk):
    (turn,) = rollout("e")
    await log.append(turn)
    made = desk(longest_wait_s=100.0)
    await made.poll()
    now.at = turn.ended_at + 101.0
    await made.poll()
    assert log.reasons(Holdback) == {turn.id: "pending: reward.longest_wait_s is over"}


# ---------------------------------------------------------------- who is taught


async def closed_group(log, name: str, version: int = 0, **changes):
    one, two = (rollout(f"{name}{i}", group=name, version=version, **changes) for i in (1, 2))
    await log.append(*one, *two, *graded(*one, grade=1.0), *graded(*two, grade=0.0), said(two[-1], CLOSED))
    return [*one, *two]


async def test_where_only_people_teach_worlds_are_held_back(log, desk):
    turns = await closed_group(log, "g")
    made = desk(None)
    await made.poll()
    assert log.reasons(Holdback) == {turn.id: "arm:world" for turn in turns}
    assert await made.batch(1, 1, V0) is None


async def test_a_desk_starts_from_what_it_saved_while_a_closed_group_waits(log, desk):
    """As after retention has dropped what was said before: without the saving that would be lost."""
    folds = MemoryFolds()
    await closed_group(log, "g")
    made = desk(Taught(people=False, groups=2), folds)
    await made.poll()
    await made.save()
    state = folds.kept["desk"]
    found = restored(json.loads(state[1])["ledger"], RewardConfig())
    assert found is not None
    assert list(found.closed) == [("world", "default", "g")]


def test_groups_that_lost_all_their_turns_are_not_remembered_for_ever(monkeypatch):
    monkeypatch.setattr(ledger, "GROUPS", 10)
    found = ledger.TurnLedger(RewardConfig())
    for number in range(100):
        (torn,) = rollout(f"e{number}", group=f"g{number}")
        row = Quarantine(turn=torn.id, reason=f"world:{TORN}", at=NOW)
        held = Holdback(turn=torn.id, reason=row.reason, at=NOW)
        for seq, each in enumerate((torn, said(torn, CLOSED), row, held), 4 * number + 1):
            found.apply(seq, each)
    assert len(found.closed) == 10


async def test_where_only_worlds_teach_people_get_a_reward_and_are_held_back(log, now, open_desk):
    person = a_turn("p:0")
    await log.append(person, a_signal(person))
    now.at = 99.0
    desk = open_desk(log, taught=WORLDS)
    await desk.poll()
    assert log.reasons(Holdback) == {"p:0": "arm:live"}
    assert [reward.value for reward in log.of(Reward)] == [0.75]


async def test_a_step_takes_so_many_groups_the_longest_waiting_first(log, desk):
    made = desk(Taught(people=False, groups=2))
    await closed_group(log, "a")
    assert await made.batch(1, 1, V0) is None
    for name in "bcd":
        await closed_group(log, name)
    batch = await made.batch(1, 1, V0)
    assert {sample.turn.group for sample in batch.samples} == {"a", "b"}
    batch = await made.batch(2, 1, V0)
    assert {sample.turn.group for sample in batch.samples} == {"c", "d"}


async def test_people_and_worlds_share_a_step(log, now, open_desk):
    now.at = 99.0
    config = RewardConfig(user_cap=1.0)
    desk = open_desk(log, config=config, taught=Taught(people=True, groups=3))
    await closed_group(log, "g")
    assert await desk.batch(1, 2, V0) is None
    people = [a_turn(f"p{i}:0", user=f"u{i}") for i in range(2)]
    await log.append(*people, a_signal(people[0]), a_signal(people[1], "rejected"))
    batch = await desk.batch(1, 2, V0)
    assert [sample.turn.id for sample in batch.samples] == ["g1-0:0", "g2-0:0", "p0:0", "p1:0"]
    assert [sample.summed for sample in batch.samples] == [True, True, False, False]
    for name in "abc":
        await closed_group(log, name)
    batch = await desk.batch(2, 2, V0)
    assert {sample.turn.group for sample in batch.samples} == {"a", "b", "c"}, "enough of one side is a step"


async def test_the_baseline_and_the_shares_of_people_learn_nothing_of_worlds(log, desk):
    made = desk()
    await closed_group(log, "g")
    await made.batch(1, 1, V0)
    ledger = made._reading.ledger
    assert ledger.baseline.snapshot()["count"] == 0
    assert ledger.recent.snapshot()["shares"] == []
    assert ledger.alarms.coverages == {}


async def test_a_group_in_which_all_did_alike_is_held_back_if_nothing_else_is_there(log, desk):
    one, two = rollout("one"), rollout("two")
    await log.append(*one, *two, *graded(*one, grade=1.0), *graded(*two, grade=1.0), said(two[-1], CLOSED))
    with pytest.raises(NoSignal, match="in none of 1 groups"):
        await desk(flat_groups="train").batch(1, 1, V0)
    assert {reason.partition(":")[0] for reason in log.reasons(Holdback).values()} == {"no_signal"}


# ---------------------------------------------------------------- staleness


async def steps(log, desk, count: int) -> None:
    for number in range(1, count + 1):
        await closed_group(log, f"s{number}", version=number - 1)
        assert await desk.batch(number, 1, V0) is not None


def swapped_midway(turn):
    """The turn with its first token three steps behind a trainer that took four."""
    spans = (
        Span(policy=PolicyVersion(number=1, hash="01"), tokens=1),
        Span(policy=PolicyVersion(number=4, hash="04"), tokens=1),
    )
    return replace(turn, spans=spans)


@pytest.mark.parametrize(("bound", "taken"), [(3, True), (2, False)])
async def test_the_bound_is_kept_by_the_oldest_token_of_a_whole_group(bound: int, taken: bool, log, desk):
    made = desk(world_staleness=bound, max_staleness=0)
    await steps(log, made, 4)
    fresh, swapped = rollout("fresh", version=4), rollout("swapped", 2, version=4)
    swapped[-1] = swapped_midway(swapped[-1])
    await log.append(*fresh, *swapped, *graded(*fresh, grade=1.0), *graded(*swapped, grade=0.0))
    await log.append(said(swapped[-1], CLOSED))
    batch = await made.batch(5, 1, V0)
    if taken:
        assert len(batch.samples) == 3
    else:
        assert batch is None
        assert log.reasons(Holdback) == dict.fromkeys(["fresh-0:0", "swapped-0:0", "swapped-1:0"], "stale:3")
    assert (await recount(log)).balanced


async def test_a_turn_before_the_last_falls_alone_and_its_rollout_counts_as_before(log, desk, tmp_path):
    made = desk(world_staleness=2, max_staleness=0, folds=FileFolds(tmp_path))
    await steps(log, made, 4)
    fresh, swapped = rollout("fresh", version=4), rollout("swapped", 6, version=4)
    swapped[:3] = map(swapped_midway, swapped[:3])
    await log.append(*fresh, *swapped, *graded(*fresh, grade=0.0), *graded(*swapped, grade=1.0)[:3])
    assert await made.batch(5, 1, V0) is None, "its last turn has no verdict yet"
    alone = {"swapped-0:0": "stale_turn:3", "swapped-1:0": "stale_turn:3", "swapped-2:0": "stale_turn:3"}
    assert log.reasons(Holdback) == alone, "nor is the last one known the last"
    spending = SpentGroups(log, after=0)
    spending.expect(9, [turn.id for turn in (*fresh, *swapped)])
    assert await spending.look() == [], "their group is still to be learned from"
    await made.save()
    made = desk(world_staleness=2, max_staleness=0, folds=FileFolds(tmp_path))
    await log.append(*graded(*swapped, grade=1.0)[3:], said(swapped[-1], CLOSED))
    batch = await made.batch(5, 1, V0)
    assert log.reasons(Holdback) == alone
    assert await spending.look() == [9]
    found = {sample.turn.id: (sample.advantages[0], sample.summed) for sample in batch.samples}
    assert found == {"fresh-0:0": (-0.5, True)} | {f"swapped-{n}:0": (0.5, True) for n in (3, 4, 5)}
    assert (await recount(log)).balanced
    counted = await account(log)
    # of turns 1 to 4: three of the swapped one's, and eight of the four earlier groups beside two of this one
    shares = {"1-4": 3 / (3 + 4 * 2 + 2), "5-16": 0.0}
    assert counted.stale == pytest.approx(shares)
    assert "23% of turns 1-4, 0% of turns 5-16" in "\n".join(accounts(counted, 0.0))


async def test_people_keep_their_own_bound(log, now, open_desk):
    now.at = 99.0
    config = RewardConfig(user_cap=1.0, max_staleness=0, world_staleness=9)
    desk = open_desk(log, config=config, taught=Taught(people=True, groups=1))
    await closed_group(log, "g")
    await desk.batch(1, 9, V0)
    old = a_turn("old:0", version=0)
    await log.append(old, a_signal(old))
    await closed_group(log, "h", version=0)
    batch = await desk.batch(2, 1, V0)
    assert {sample.turn.group for sample in batch.samples} == {"h"}
    assert log.reasons(Holdback) == {"old:0": "stale:1"}


# ---------------------------------------------------------------- long groups


async def long_group(log, name: str, tokens: int, *, graded_as=(1.0, 0.0)) -> None:
    """A closed group of two rollouts of one turn each, with so many tokens together."""
    made = [
        replace(turn, prompt_ids=tuple(range(100 * i, 100 * i + tokens // 2 - 2)))
        for i in (1, 2)
        for turn in rollout(f"{name}{i}", group=name)
    ]
    for turn, grade in zip(made, graded_as, strict=True):
        await log.append(turn, *graded(turn, grade=grade))
    await log.append(said(made[-1], CLOSED))


async def test_a_group_longer_than_a_batch_is_a_step_of_its_own(log, desk):
    made = desk(Taught(people=False, groups=2), batch_tokens=64, group_tokens=200, world_staleness=99)
    for name, tokens in (("short", 20), ("long", 200), ("tall", 20), ("last", 20), ("giant", 202)):
        await long_group(log, name, tokens)
    taken = []
    while (batch := await made.batch(len(taken) + 1, 1, V0)) is not None:
        taken.append({sample.turn.group for sample in batch.samples})
    assert taken == [{"short"}, {"long"}, {"tall", "last"}]
    reasons = set(log.reasons(Holdback).values())
    assert reasons == {
        "too_long: 202 tokens that must be learned from together, and the most is 200, reward.group_tokens"
    }


async def test_a_long_group_and_people_take_turns(log, now, open_desk):
    now.at = 99.0
    config = RewardConfig(user_cap=1.0, batch_tokens=64, group_tokens=200, max_staleness=99, world_staleness=99)
    desk = open_desk(log, config=config, taught=Taught(people=True, groups=1))
    for n in range(3):
        await long_group(log, f"long{n}", 200)
    turns = [a_turn(f"p{n}:0", user=f"u{n}", prompt=(n,)) for n in range(16)]
    await log.append(*turns, a_delivery(*turns), *(a_signal(turn) for turn in turns[::2]))
    taken = []
    for step in range(1, 6):
        batch = await desk.batch(step, 4, V0)
        taken.append(sorted({sample.turn.group or "people" for sample in batch.samples}))
    assert taken == [["people"], ["long0"], ["people"], ["long1"], ["people"]], "neither waits for the other to end"


# ---------------------------------------------------------------- starting again


async def test_a_desk_that_was_killed_between_any_two_rows_decides_alike(log, now, open_desk, tmp_path):
    """Group of two, one torn turn, closed; the desk starts anew from its saving after every row."""
    lost, one, two = rollout("lost"), rollout("one", 2), rollout("two")
    rows = [*lost, *one, *two, *graded(*one, grade=1.0), *graded(*two, grade=0.0), said(two[-1], CLOSED)]
    now.at, folds = NOW, FileFolds(tmp_path)

    def anew():
        return open_desk(log, refuse, RewardConfig(user_cap=1.0), taught=WORLDS, folds=folds)

    for row in rows:
        await log.append(row)
        made = anew()
        await made.poll()
        await made.save()
    batch = await anew().batch(1, 1, V0)
    assert [sample.turn.id for sample in batch.samples] == ["one-0:0", "one-1:0", "two-0:0"]
    assert (await anew().batch(1, 1, V0)).row == log.of(Batch)[0]
    assert log.reasons(Holdback) == {"lost-0:0": "world:rollout_torn"}
    assert len(log.of(Reward)) == 3
    found = await account(log)
    assert found.balanced
    assert found.trained == 3
