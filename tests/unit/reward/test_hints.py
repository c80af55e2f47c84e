"""Hints: which feedback becomes one, that the outcome must have been bad, and that forgetting, consent and caps hold for it."""

from dataclasses import replace

import pytest
from benchmarks.reward.bad_turn import plain, single, until_fixed

from ostinato.core.records import (
    Arm,
    Batch,
    Consent,
    PolicyVersion,
    Purpose,
    Reward,
    RewardReach,
    Signal,
    Source,
    TurnHint,
)
from ostinato.core.verdicts import CLOSED, GRADED
from ostinato.reward.config import HintsConfig, RewardConfig
from ostinato.reward.erasure import CreditRefold, erased_people
from ostinato.reward.hints import FRAME
from ostinato.reward.ledger_entries import Taught
from ostinato.testing.records import a_delivery, a_signal, a_turn

V0 = PolicyVersion(number=0, hash="0" * 64)
CONFIG = RewardConfig(user_cap=1.0, tenant_cap=1.0, user_steps=0, hints=HintsConfig(weight=0.5))


class Bytes:
    """A tokenizer whose tokens are bytes, and a template without anything between messages."""

    def hinted_ids(self, turn, note):
        return (*turn.prompt_ids, *note.encode()) if turn.prompt_ids else ()

    def said_between(self, turn, following):
        known = (*turn.prompt_ids, *turn.sampled_ids)
        assert following.prompt_ids[: len(known)] == known
        return bytes(following.prompt_ids[len(known) :]).decode()


def turns_of(users, tokens=4):
    return [
        replace(a_turn(f"t{i}:0", user=user, prompt=(1, i), sampled=range(10, 10 + tokens)), episode=f"e{i}")
        for i, user in enumerate(users)
    ]


def commented(turn, words, name="rejected", **fields):
    return replace(a_signal(turn, name, at=fields.pop("at", 12.0), **fields), comment=words)


def after(turn, words, **fields):
    prompt = (*turn.prompt_ids, *turn.sampled_ids, *words.encode())
    made = a_turn("next-" + turn.id, user=turn.user, prompt=prompt, sampled=(7,))
    return replace(made, episode=turn.episode, parent=turn.id, **fields)


async def batch_of(log, now, open_desk, turns, signals, *, config=CONFIG, size=None, **more):
    await log.append(*turns, a_delivery(*turns), *signals)
    desk = open_desk(log, config=config, hint_tokens=Bytes(), **more)
    now.at = 50.0
    await desk.poll()
    made = await desk.batch(step=1, size=size or len(turns), reference=V0)
    assert made is not None
    return made, desk


def hints(made):
    """By turn, what was put before its answer."""
    found = {}
    for sample in made.samples:
        if sample.hinted:
            prompt = sample.turn.prompt_ids
            assert sample.hinted[: len(prompt)] == prompt
            found[sample.turn.id] = bytes(sample.hinted[len(prompt) :]).decode()
    return found


def replace_config(**changes):
    return CONFIG.model_copy(update=changes)


async def test_a_comment_on_a_rejection_is_a_hint_beside_the_turns_own_credit(log, now, open_desk):
    turns = turns_of("abc")
    signals = [a_signal(turns[0], "accepted"), commented(turns[1], "use pathlib"), a_signal(turns[2], "accepted")]
    made, desk = await batch_of(log, now, open_desk, turns, signals)
    assert hints(made) == {"t1:0": FRAME.format("use pathlib")}
    *own, hinted = made.samples
    assert [sample.turn for sample in own] == turns
    assert own[1].advantages[0] < 0
    assert (hinted.turn, hinted.advantages, hinted.weight) == (turns[1], (0.5,) * 4, own[1].weight)
    (row,) = log.of(Batch)
    assert row.hints == (TurnHint(turn="t1:0", weight=0.5, signal=signals[1].id),)
    assert [each async for each in desk.history()] == [made], "a step is repeated as it was"
    assert [each async for each in open_desk(log, hint_tokens=Bytes()).history()] == [made], "whatever is set by then"


async def test_nothing_is_learned_from_hints_unless_it_is_asked_for(log, now, open_desk):
    turns = turns_of("ab")
    signals = [a_signal(turns[0], "accepted"), commented(turns[1], "no")]
    made, _ = await batch_of(log, now, open_desk, turns, signals, config=RewardConfig(user_cap=1.0))
    assert hints(made) == {}
    assert log.of(Batch)[0].hints == ()


async def test_the_outcome_decides_what_was_bad(log, now, open_desk):
    """A comment on an answer that did better than expected says how to be better still: it is no hint."""
    turns = turns_of("abc")

    def graded(turn, signals, now):
        value = {"t0:0": 1.0, "t1:0": 0.9, "t2:0": -1.0}[turn.id]
        return Reward(turn=turn.id, value=value, function="f@1", signals=tuple(each.id for each in signals), at=now)

    signals = [commented(turn, "hm") for turn in turns]
    made, _ = await batch_of(log, now, open_desk, turns, signals, fn=graded)
    assert set(hints(made)) == {"t2:0"}


@pytest.mark.parametrize("signal", ["tool_error", "tool_rejected", "dissatisfied"])
async def test_what_followed_an_answer_is_a_hint_if_a_signal_says_that_it_failed(log, now, open_desk, signal):
    turns = turns_of("ab")
    followed = after(turns[1], "No such file: a.txt")
    other = after(turns[0], "thanks")
    signals = [a_signal(turns[0], "accepted"), a_signal(turns[1], "rejected", at=12.0), a_signal(turns[1], signal)]
    everything = [*turns, followed, other]
    made, desk = await batch_of(log, now, open_desk, everything, signals)
    assert hints(made) == {"t1:0": FRAME.format("No such file: a.txt")}
    assert log.of(Batch)[0].hints == (TurnHint(turn="t1:0", weight=0.5, following=followed.id),)
    assert [each async for each in desk.history()] == [made]


async def test_without_such_a_signal_what_followed_is_none(log, now, open_desk):
    turns = turns_of("ab")
    signals = [a_signal(turns[0], "accepted"), a_signal(turns[1], "rejected", at=12.0)]
    made, _ = await batch_of(log, now, open_desk, [*turns, after(turns[1], "and now b.txt")], signals)
    assert hints(made) == {}


async def test_an_answer_to_which_its_person_does_not_allow_to_be_learned_from_gives_no_hint(log, now, open_desk):
    """Neither its comment nor, as what followed another, its prompt; nor one with a secret."""
    turns = turns_of("abcd")
    turns[2] = replace(turns[2], consent=Consent.ADAPT)
    followed = [after(turns[1], "err", consent=Consent.AGGREGATE), after(turns[3], "pw", secret=True)]
    signals = [a_signal(turns[0], "accepted"), commented(turns[2], "mine")]
    signals += [a_signal(turn, name, at=12.0) for turn in (turns[1], turns[3]) for name in ("rejected", "tool_error")]
    made, _ = await batch_of(log, now, open_desk, [*turns, *followed], signals, size=3)
    assert {sample.turn.id for sample in made.samples} == {"t0:0", "t1:0", "t3:0"}
    assert hints(made) == {}


async def test_a_worlds_turns_have_none(log, now, open_desk):
    """Whoever graded them knows what the model must not: the comment on a grade is never a hint, whatever is set."""
    turns = [replace(turn, arm=Arm.WORLD, group="g", user="world") for turn in turns_of("ab")]
    grades = [
        replace(a_signal(turn, GRADED), value=value, source=Source.CODE, comment="wants 7")
        for turn, value in zip(turns, (1.0, 0.0), strict=True)
    ]
    signals = [*grades, a_signal(turns[1], "tool_error")]
    signals.append(replace(a_signal(turns[1], CLOSED), value=2.0, source=Source.CODE))
    config = replace_config(hints=HintsConfig(weight=0.5, comments=(GRADED,)))
    made, _ = await batch_of(log, now, open_desk, turns, signals, taught=Taught(people=False, groups=1), config=config)
    assert made.samples[1].advantages[0] < 0
    assert hints(made) == {}


@pytest.mark.parametrize(
    ("signals", "said"),
    [
        ([("first", 12.0, {}), ("last", 14.0, {})], "last"),
        ([("taken back", 12.0, {"id": "x"}), ("", 13.0, {"retracts": "x"})], None),
        ([(" \n", 12.0, {})], None),
        ([("another tenant's", 12.0, {"tenant": "other"})], None),
        ([("too late", 60.0, {})], None),
        ([("it did not happen", 12.0, {"value": 0.0})], None),
    ],
)
async def test_the_last_comment_that_counts(log, now, open_desk, signals, said):
    turns = turns_of("ab")
    rows = [
        replace(commented(turns[1], words, at=at, id=fields.get("id", f"s{n}")), **fields)
        for n, (words, at, fields) in enumerate(signals)
    ]
    rejected = a_signal(turns[1], "rejected", at=11.0, id="plain")
    made, _ = await batch_of(log, now, open_desk, turns, [a_signal(turns[0], "accepted"), rejected, *rows])
    assert hints(made) == ({} if said is None else {"t1:0": FRAME.format(said)})


async def test_a_long_text_is_cut_in_its_middle(log, now, open_desk):
    turns = turns_of("ab")
    config = replace_config(hints=HintsConfig(weight=0.5, chars=20))
    words = "begins like this" + "x" * 500 + "Error: 7"
    signals = [a_signal(turns[0], "accepted"), commented(turns[1], words)]
    made, _ = await batch_of(log, now, open_desk, turns, signals, config=config)
    assert hints(made)["t1:0"] == FRAME.format("begins lik \u2026 xxError: 7")


async def test_hints_add_no_more_tokens_than_a_batch_may_have_and_the_worst_come_first(log, now, open_desk):
    turns = turns_of("abcd", tokens=2)

    def graded(turn, signals, now):
        value = {"t0:0": 1.0, "t1:0": -0.2, "t2:0": -0.9, "t3:0": -0.5}[turn.id]
        return Reward(turn=turn.id, value=value, function="f@1", signals=tuple(each.id for each in signals), at=now)

    one = 2 + len(FRAME.format("hm")) + 2
    config = replace_config(batch_tokens=2 * one)
    made, _ = await batch_of(
        log, now, open_desk, turns, [commented(turn, "hm") for turn in turns], fn=graded, config=config
    )
    assert list(hints(made)) == ["t2:0", "t3:0"]


async def test_one_persons_hints_are_cut_as_their_turns_are(log, now, open_desk):
    turns = turns_of("a" * 12 + "bcde")
    config = replace_config(user_cap=0.25)
    signals = [commented(turn, "flooded!", id=f"c{turn.id}") for turn in turns[1:]] + [a_signal(turns[0], "accepted")]
    made, _ = await batch_of(log, now, open_desk, turns, signals, config=config)
    mass = {}
    for sample in made.samples:
        if sample.hinted:
            mass[sample.turn.user] = mass.get(sample.turn.user, 0.0) + sum(sample.advantages)
    assert mass["b"] == pytest.approx(0.5 * 4)
    assert mass["a"] <= 0.4 / 0.6 * (mass["b"] + mass["c"] + mass["d"] + mass["e"]) + 1e-9


async def test_the_request_for_a_summary_is_nobodys_feedback(log, now, open_desk):
    turns = turns_of("abc")
    asked = after(turns[1], "Summarise this.", purpose=Purpose.COMPACTION)
    signals = [a_signal(turns[0], "accepted"), a_signal(turns[1], "tool_error"), a_signal(turns[2], "accepted")]
    made, _ = await batch_of(log, now, open_desk, [*turns, asked], [*signals, a_signal(turns[1], "rejected")])
    assert asked in [sample.turn for sample in made.samples]
    assert hints(made) == {}


@pytest.mark.parametrize("kind", ["comment", "following"])
async def test_a_forgotten_text_is_no_hint_any_more(log, now, open_desk, kind):
    turns = turns_of("ab")
    signals = [a_signal(turns[0], "accepted"), a_signal(turns[1], "tool_error", at=11.0)]
    signals.append(commented(turns[1], "mine" if kind == "comment" else None))
    made, desk = await batch_of(log, now, open_desk, [*turns, after(turns[1], "err")], signals)
    assert set(hints(made)) == {"t1:0"}
    for key, row in list(log._known.items()):
        if kind == "comment" and isinstance(row, Signal):
            log._known[key] = replace(row, comment=None)
        elif kind == "following" and getattr(row, "parent", None) == "t1:0":
            log._known[key] = row.without_words()
    (again,) = [each async for each in desk.history()]
    assert hints(again) == {}
    assert [sample.turn.id for sample in again.samples] == [each.turn.id for each in made.samples if not each.hinted]


async def test_without_a_person_a_batch_has_the_hints_that_are_left(log, now, open_desk):
    """Credits are folded anew: who did worse than expected may change, and with it who has a hint."""
    turns = turns_of("abcd")

    def graded(turn, signals, now):
        value = {"t0:0": 1.0, "t1:0": -1.0, "t2:0": 0.5, "t3:0": -0.1}[turn.id]
        ids = tuple(each.id for each in signals)
        return Reward(turn=turn.id, value=value, function="f@1", signals=ids, at=now, reach=RewardReach.TURN)

    signals = [commented(turn, f"of {turn.user}") for turn in turns]
    made, _ = await batch_of(log, now, open_desk, turns, signals, fn=graded)
    assert set(hints(made)) == {"t1:0", "t3:0"}
    for gone, left in (("nobody", ["t1:0", "t3:0"]), ("b", ["t3:0"]), ("d", ["t1:0"])):
        erased = erased_people({("default", gone): 1 << 40})
        refold = CreditRefold(log, CONFIG, Taught(), erased, hint_tokens=Bytes())
        (batch,) = [each async for each in refold.batches()]
        assert batch.changed == (gone != "nobody")
        assert [hint.turn for hint in batch.row.hints] == left
        again = await refold.samples(batch)
        assert list(hints(again)) == left


def test_comments_fix_a_bad_turn_in_fewer_episodes_than_the_outcome_alone():
    """`python -m benchmarks.reward.bad_turn` in small: ten turns, at the same step size; comments on a fifth of the failures."""

    def episodes(seed, weight):
        credit = single(10, discount=0.9, outcome=True, repeat=False)
        return until_fixed(10, plain(lambda bad: credit, weight), 0.25, seed, drift=0.02, most=288)

    assert [episodes(seed, 0.0) for seed in (0, 1)] == [None, None], "drifted, or not fixed by then"
    assert all(episodes(seed, 30.0) is not None for seed in (0, 1))
