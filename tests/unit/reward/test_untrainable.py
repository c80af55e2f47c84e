"""Why some turns cannot teach, with exact expectations over a small vocabulary."""

import numpy as np
import pytest

from ostinato.core.nucleus import decode, encode
from ostinato.core.records import Arm, Batch, Consent, ConsentGiven, Finish, Holdback, PolicyVersion, Reward, Sampling
from ostinato.reward import ledger_entries
from ostinato.reward.accounting import account
from ostinato.reward.config import RewardConfig
from ostinato.reward.ledger import TurnLedger
from ostinato.testing.log import MemoryFolds
from ostinato.testing.records import a_signal

LOGITS_V = np.linspace(1.0, -1.0, 8)
V0 = PolicyVersion(number=0, hash="00")


def softmax(logits_V: np.ndarray) -> np.ndarray:
    p = np.exp(logits_V - logits_V.max())
    return p / p.sum()


def nucleus(p_V: np.ndarray, top_p: float) -> np.ndarray:
    """What is drawn from with top_p: the fewest likeliest tokens whose mass reaches it, renormalised."""
    order = np.argsort(-p_V)
    size = int(np.searchsorted(np.cumsum(p_V[order]), top_p)) + 1
    q_V = np.zeros_like(p_V)
    q_V[order[:size]] = p_V[order[:size]]
    return q_V / q_V.sum()


def expected_gradient(drawn_V: np.ndarray, recorded_V: np.ndarray, advantage: float, temperature: float = 1.0):
    """E[w A d log pi / d logits] for tokens drawn from `drawn_V`, with the weight pi / recorded."""
    p_V = softmax(LOGITS_V / temperature)
    scores_VV = (np.eye(len(p_V)) - p_V) / temperature  # row a: d log pi(a) / d logits
    return (drawn_V * (p_V / recorded_V) * advantage) @ scores_VV


def test_praise_for_everything_moves_the_policy_if_tokens_were_drawn_from_the_nucleus():
    p_V = softmax(LOGITS_V)
    whole = expected_gradient(p_V, p_V, 1.0)
    assert np.linalg.norm(whole) < 1e-15, "a constant advantage has no gradient where the record is right"
    cut = expected_gradient(nucleus(p_V, 0.8), p_V, 1.0)
    assert np.linalg.norm(cut) > 0.1, "the record is of the whole distribution"


@pytest.mark.parametrize(
    ("top_p", "kept", "trained"), [(1.0, False, 2), (0.8, False, 0), (0.999, False, 0), (0.8, True, 2)]
)
async def test_such_a_turn_reaches_a_batch_only_with_its_nucleus(
    log, now, open_desk, turn, top_p: float, kept: bool, trained: int
):
    sampling, ids = Sampling(max_tokens=8, top_p=top_p), np.flatnonzero(nucleus(softmax(LOGITS_V), top_p))
    turns = [turn(i, sampling=sampling, nucleus=encode(ids) if kept else b"") for i in range(2)]
    await log.append(*turns, a_signal(turns[0]), a_signal(turns[1], "rejected"))
    now.at = 99.0
    desk = open_desk(log)
    made = await desk.batch(1, 2, V0)
    samples = made.samples if made else ()
    assert len(samples) == trained
    p_V, gradient = softmax(LOGITS_V), np.zeros(8)
    for sample in samples:
        drawn_V, seen_V = nucleus(p_V, sample.turn.sampling.top_p), p_V.copy()
        if sample.turn.nucleus:  # the trainer's distribution is then renormalised over the same tokens
            (ids,) = decode(sample.turn.nucleus, 1)
            seen_V[np.setdiff1d(np.arange(8), ids)] = 0.0
            seen_V /= seen_V.sum()
        gradient += drawn_V @ (np.eye(8) - seen_V)
    assert np.linalg.norm(gradient) < 1e-14
    assert set(log.reasons(Holdback).values()) == (set() if trained else {"top_p"})


def worst_score(temperature: float) -> float:
    """The largest d log pi / d logits of any token."""
    p_V = softmax(LOGITS_V / temperature)
    return max(np.linalg.norm((np.eye(8)[a] - p_V) / temperature) for a in range(8))


def test_a_cold_turns_gradient_grows_as_one_over_its_temperature():
    assert worst_score(0.1) / worst_score(1.0) > 10.0
    assert worst_score(0.01) / worst_score(1.0) > 100.0
    lowest = RewardConfig().min_temperature
    assert worst_score(lowest) <= np.sqrt(2) / lowest < 15.0, "no token weighs more than this"


@pytest.mark.parametrize(("temperature", "reason"), [(0.0, "greedy"), (0.09, "cold"), (0.1, None), (1.0, None)])
async def test_cold_turns_are_held_back(log, now, open_desk, turn, temperature: float, reason: str | None):
    await log.append(turn(0, sampling=Sampling(max_tokens=8, temperature=temperature)))
    await open_desk(log).poll()
    assert log.reasons(Holdback).get("t0:0") == reason


@pytest.mark.parametrize("level", [level for level in Consent if level is not Consent.YES])
async def test_without_consent_a_turn_is_held_back_for_that_first(log, now, open_desk, turn, level: Consent):
    turns = [
        turn(0, consent=level),
        turn(1, consent=level, arm=Arm.CONTROL, sampling=Sampling(max_tokens=8, temperature=0.0)),
        turn(2, consent=level, finish=Finish.ABORT),
    ]
    turns = [each.without_words() if level is Consent.NEVER else each for each in turns]
    await log.append(*turns, *map(a_signal, turns))
    now.at = 99.0
    desk = open_desk(log)
    assert await desk.batch(1, 1, V0) is None
    assert log.reasons(Holdback) == dict.fromkeys((each.id for each in turns), f"consent:{level}")
    rewarded = {row.turn for row in log.of(Reward)}
    assert rewarded == (set() if level is Consent.NEVER else {"t0:0", "t1:0"}), (
        "the metrics may count those of the rest"
    )
    found = await account(log, None, RewardConfig())
    assert (found.ingested, found.trained, found.held, found.waiting) == (3, 0, {f"consent:{level}": 3}, 0)


async def test_what_others_refuse_changes_no_credit(log, now, open_desk, turn):
    """Baseline, equal shares and normalisation are of the turns that are learned from alone, to the bit."""
    other = type(log)()
    for step in range(1, 4):
        learned = [turn(10 * step + i, user="ann" if i % 2 else "bob", ended_at=10.0 * step) for i in range(6)]
        said = [a_signal(each, "accepted" if i % 3 else "rejected", at=each.ended_at) for i, each in enumerate(learned)]
        refused = [turn(100 * step + i, user="ann", consent=[*Consent][i % 3], ended_at=10.0 * step) for i in range(9)]
        refused = [each if each.counts else each.without_words() for each in refused]
        await log.append(*learned, *said, *refused, *[a_signal(each, at=each.ended_at) for each in refused])
        await other.append(*learned, *said)
    now.at = 99.0
    for each in (log, other):
        desk = open_desk(each)
        for step in range(1, 4):
            made = await desk.batch(step, 6, V0)
            assert made is not None
            assert len(made.samples) == 6
    assert [(row.turns, row.credits, row.weights) for row in log.of(Batch)] == [
        (row.turns, row.credits, row.weights) for row in other.of(Batch)
    ]


def chosen(number: int, user: str, level: Consent) -> ConsentGiven:
    return ConsentGiven(id=f"c{number}", tenant="default", user=user, level=level, at=1.0)


class Looked(dict):
    """A dictionary that counts how often all of it is looked at."""

    looks = 0

    def values(self):
        self.looks += 1
        return super().values()


def test_choices_of_people_without_turns_cost_no_look_at_others_turns(monkeypatch, turn):
    monkeypatch.setattr(ledger_entries, "_NEW_PEOPLE", 3)
    ledger = TurnLedger(RewardConfig())
    ledger.open = Looked()
    ledger.apply(1, turn(1, user="ann", ended_at=1.0))
    for number in range(100):
        ledger.apply(2 + number, chosen(number, f"invented {number}", Consent.NEVER))
    assert ledger.open.looks <= 1
    for number in range(2, 9):  # more people than were thought of
        ledger.apply(100 + number, turn(number, user=f"user {number}", ended_at=1.0))
    for number, user in enumerate(["ann", "user 2", "user 8"]):
        ledger.apply(200 + number, chosen(200 + number, user, Consent.ADAPT))
    assert {turn: why for turn, why in ledger.to_hold.items() if why == "consent:withdrawn"}.keys() == {
        "t1:0",
        "t2:0",
        "t8:0",
    }


@pytest.mark.parametrize("restarted", [False, True])
async def test_who_takes_the_consent_back_is_not_learned_from_any_more(log, now, open_desk, turn, restarted: bool):
    folds = MemoryFolds()
    desk = open_desk(log, folds=folds)
    turns = {
        name: turn(i, user=name.split()[0], ended_at=0.0) for i, name in enumerate(["ann old", "bob old", "ann new"])
    }
    await log.append(
        turns["ann old"], turns["bob old"], a_signal(turns["ann old"]), a_signal(turns["bob old"], "rejected")
    )
    now.at = 99.0
    await desk.poll()
    assert {row.turn for row in log.of(Reward)} == {"t0:0", "t1:0"}, "they wait for a batch"
    open_ = turn(7, user="ann", ended_at=98.0)
    await log.append(open_, chosen(1, "ann", Consent.ADAPT), turns["ann new"])
    await desk.poll()
    if restarted:
        await desk.close()
        desk = open_desk(log, folds=folds)
    held = {"t0:0", "t2:0", "t7:0"}
    assert log.reasons(Holdback) == dict.fromkeys(held, "consent:withdrawn")
    later = turn(8, user="ann", ended_at=98.0)
    await log.append(chosen(2, "ann", Consent.YES), later, a_signal(later), chosen(3, "bob", Consent.YES))
    now.at = 999.0
    made = await desk.batch(1, 2, V0)
    assert made is not None
    assert set(made.row.turns) == {"t1:0", "t8:0"}
    assert set(log.reasons(Holdback)) == held
