"""Corrections as demonstrations: which texts are imitated, with which weight, and that nobody's can teach more than their turns may."""

from dataclasses import replace

import pytest

from ostinato.core.records import Batch, PolicyVersion, Signal
from ostinato.reward.config import RewardConfig
from ostinato.reward.ledger_entries import Taught
from ostinato.testing.records import a_delivery, a_signal, a_turn

V0 = PolicyVersion(number=0, hash="0" * 64)
CONFIG = RewardConfig(user_cap=1.0, tenant_cap=1.0, user_steps=0)


def answer_ids(turn, text):
    return tuple(text.encode())


def turns_of(users, tokens=8):
    return [
        replace(a_turn(f"t{i}:0", user=user, prompt=(1, i), sampled=range(10, 10 + tokens)), episode=f"e{i}")
        for i, user in enumerate(users)
    ]


def corrected(turn, text, *, at=12.0, **fields):
    return replace(a_signal(turn, "rejected", at=at, **fields), correction=text)


async def batch_of(log, now, open_desk, turns, signals, *, config=CONFIG, weight=0.25, **more):
    await log.append(*turns, a_delivery(*turns), a_signal(turns[0], "accepted"), *signals)
    options = {"taught": Taught(corrections=weight), "answer_ids": answer_ids} | more
    desk = open_desk(log, config=config, **options)
    now.at = 50.0
    await desk.poll()
    made = await desk.batch(step=1, size=len(turns), reference=V0)
    assert made is not None
    return made, desk


def shown(made):
    return {sample.turn.id: sample for sample in made.samples if sample.shown}


async def test_a_correction_is_imitated_beside_the_turns_own_credit(log, now, open_desk):
    turns = turns_of("abc")
    made, desk = await batch_of(log, now, open_desk, turns, [corrected(turns[1], "right")])
    assert [sample.turn.id for sample in made.samples] == ["t0:0", "t1:0", "t2:0", "t1:0~correction"]
    assert made.samples[1].advantages[0] < 0, "the answer itself was rejected"
    (sample,) = shown(made).values()
    assert sample.turn.sampled_ids == tuple(b"right")
    assert sample.turn.prompt_ids == turns[1].prompt_ids
    assert sample.advantages == (0.25,) * 5
    assert (sample.turn.user, sample.turn.tenant, sample.weight) == ("b", "default", made.samples[1].weight)
    (row,) = log.of(Batch)
    assert row.shown == (0.0, 0.25, 0.0)
    assert [each async for each in desk.history()] == [made], "a step is repeated as it was"


async def test_nothing_is_imitated_unless_it_is_asked_for(log, now, open_desk):
    turns = turns_of("ab")
    made, _ = await batch_of(log, now, open_desk, turns, [corrected(turns[1], "right")], weight=0.0)
    assert (shown(made), log.of(Batch)[0].shown) == ({}, ())


@pytest.mark.parametrize("length", [4, 8, 9, 16, 80])
async def test_a_long_correction_weighs_no_more_than_the_answer(log, now, open_desk, length):
    turns = turns_of("ab")
    made, _ = await batch_of(log, now, open_desk, turns, [corrected(turns[1], "y" * length)])
    (sample,) = shown(made).values()
    assert sum(sample.advantages) == pytest.approx(0.25 * min(length, 8))


@pytest.mark.parametrize("text", ["x" * 81, "", " \n", " xxxxxxxx"])
async def test_what_is_no_edit_of_the_answer_is_not_imitated(log, now, open_desk, text):
    turns = turns_of("ab")
    made, _ = await batch_of(log, now, open_desk, turns, [corrected(turns[1], text)])
    assert shown(made) == {}, "too long, nothing, or the answer itself"


async def test_one_persons_corrections_are_cut_as_their_turns_are(log, now, open_desk):
    turns = turns_of("a" * 12 + "bcde")
    config = RewardConfig(user_cap=0.25, tenant_cap=1.0, user_steps=0)
    signals = [corrected(turn, "flooded!", id=f"c{turn.id}") for turn in turns[1:]]
    made, _ = await batch_of(log, now, open_desk, turns, signals, config=config)
    mass = {}
    for sample in shown(made).values():
        mass[sample.turn.user] = mass.get(sample.turn.user, 0.0) + sum(sample.advantages)
    assert mass["b"] == pytest.approx(0.25 * 8)
    # 4 / 6: two in five is the cap of a batch of five people; their twelve turns count as much as 2 / 3 of the other four
    assert mass["a"] <= 0.4 / 0.6 * (mass["b"] + mass["c"] + mass["d"] + mass["e"]) + 1e-9


async def test_the_last_correction_that_counts(log, now, open_desk):
    turns = turns_of("abcde")
    other = replace(corrected(turns[3], "theirs"), tenant="other", id="foreign")
    signals = [
        corrected(turns[1], "later", at=14.0, id="later"),
        corrected(turns[1], "earlier", at=13.0, id="earlier"),
        corrected(turns[2], "wrong", id="wrong"),
        a_signal(turns[2], "rejected", id="back", at=15.0, retracts="wrong"),
        other,
        corrected(turns[4], "too late", at=60.0),
    ]
    made, _ = await batch_of(log, now, open_desk, turns, signals)
    assert {id: sample.turn.text for id, sample in shown(made).items()} == {"t1:0~correction": "later"}


async def test_a_forgotten_text_is_imitated_no_more(log, now, open_desk):
    turns = turns_of("ab")
    made, desk = await batch_of(log, now, open_desk, turns, [corrected(turns[1], "secret")])
    assert len(shown(made)) == 1
    for key, row in list(log._known.items()):
        if isinstance(row, Signal):
            log._known[key] = replace(row, correction=None)
    (again,) = [each async for each in desk.history()]
    assert shown(again) == {}
    assert again.samples == made.samples[:2]


async def test_an_answer_whose_place_a_text_cannot_take(log, now, open_desk):
    turns = turns_of("ab")
    made, _ = await batch_of(
        log, now, open_desk, turns, [corrected(turns[1], "right")], answer_ids=lambda turn, text: ()
    )
    assert shown(made) == {}
