"""Answers of which some kinds get a reward less often than others: what is learned from those that do."""

import math
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from ostinato.core.records import (
    Arm,
    Batch,
    Consent,
    ConsentGiven,
    NoReward,
    PolicyVersion,
    Purpose,
    Quarantine,
    Reward,
)
from ostinato.reward.baseline import Baseline, context_of
from ostinato.reward.config import RewardConfig
from ostinato.reward.credit import SingleRollout, by_episode
from ostinato.reward.functions import copilot
from ostinato.reward.ledger import TurnLedger
from ostinato.reward.response_propensity import ResponsePropensity
from ostinato.testing.log import MemoryFolds
from ostinato.testing.records import a_delivery, a_signal, a_turn

V0 = PolicyVersion(number=0, hash="00")
REWARD = Reward(turn="t:0", value=0.0, function="f@1", signals=(), at=1.0)
SILENT = Quarantine(turn="t:0", reason="no_reward:silence", at=1.0)


def known(shares, *, cap=4.0, each=400, tenant="acme"):
    """Propensities after `each` turns of each length, of which these shares were rewarded."""
    propensity = ResponsePropensity(cap)
    for i in range(each):
        for tokens, share in shares.items():
            rewarded = int((i + 1) * share) > int(i * share)
            propensity.see(tenant, tokens, REWARD if rewarded else SILENT)
    return propensity


def test_rewarded_turns_stand_for_the_silent_ones_of_their_length():
    propensity = known({1: 1.0, 40: 0.5})
    assert propensity.weight("acme", 40) / propensity.weight("acme", 1) == pytest.approx(2.0, rel=0.05)
    assert propensity.weight("acme", 33) == propensity.weight("acme", 40), "of the same power of two"
    mean = (propensity.weight("acme", 40) * 0.5 + propensity.weight("acme", 1)) / 1.5
    assert mean == pytest.approx(1.0, rel=0.02), "on average the tenant's turns weigh what they did"


def test_where_nobody_or_everybody_is_silent_alike_all_weigh_exactly_the_same():
    for share in (1.0, 0.5):
        assert known({1: share, 40: share}).weight("acme", 40) == 1.0
    assert known({40: 0.0}).weight("acme", 40) == 1.0
    assert known({1: 1.0, 40: 0.5}).weight("bolt", 40) == 1.0, "another tenant's silence"


def test_no_weight_is_beyond_the_cap_nor_made_of_a_few_turns():
    assert known({1: 1.0, 40: 0.01}, each=2_000).weight("acme", 40) == 4.0
    assert known({1: 1.0, 40: 0.5}, cap=1.0).weight("acme", 40) == 1.0
    few = known({1: 1.0})
    few.see("acme", 40, SILENT)
    assert few.weight("acme", 40) < 1.1


def test_rewards_that_failed_say_nothing_of_silence():
    propensity = known({1: 1.0, 40: 1.0})
    for _ in range(500):
        propensity.see("acme", 40, replace(SILENT, reason="reward_failed: ValueError"))
        propensity.see("acme", 40, replace(SILENT, reason="undelivered"))
    assert propensity.weight("acme", 40) == 1.0


@pytest.mark.parametrize(
    "without",
    [{"purpose": Purpose.SIDE}, {"consent": Consent.AGGREGATE}, {"arm": Arm.CONTROL}, {"user": "gold"}, {}],
    ids=["side call", "aggregate", "control", "gold", "withdrawn"],
)
def test_turns_that_may_not_be_learned_from_weigh_nobodys(without):
    def fold(*, held):
        ledger, place = TurnLedger(RewardConfig(), gold=lambda tenant, user: user == "gold"), count(1)
        for i in range(60):
            for name, sampled, row in (
                (f"short{i}:0", 1, REWARD),
                (f"long{i}:0", 40, REWARD),
                (f"held{i}:0", 40, SILENT),
            ):
                theirs = {"user": f"u{i}", **without} if row is SILENT else {}
                turn = replace(a_turn(name, sampled=range(sampled), ended_at=1.0), **theirs)
                leaves = ConsentGiven(id=name, tenant=turn.tenant, user=turn.user, level=Consent.NEVER, at=1.5)
                rows = [turn, a_delivery(turn), *([] if without or row is REWARD else [leaves])]
                for each in [*rows, replace(row, turn=name, at=2.0)] if held or row is REWARD else []:
                    ledger.apply(next(place), each)
        return ledger.propensity.snapshot()

    assert fold(held=True) == fold(held=False) != {}


def test_what_was_long_ago_is_forgotten():
    propensity = known({40: 0.1, 1: 1.0}, each=2_000)
    for _ in range(12_000):
        propensity.see("acme", 40, REWARD)
    assert propensity.weight("acme", 40) == pytest.approx(1.0, abs=0.02)


def suggests(heard, cap, *, steps=40, size=100, seed=0):
    """The chance with which a learned policy suggests something where that is never welcome.

    Four prompts in five welcome suggestions, which the baseline cannot know of a prompt that never came before. An answer without a
    suggestion is always rewarded, with 0; a suggestion in a share `heard`.
    """
    rng = np.random.default_rng(seed)
    config, propensity = RewardConfig(user_steps=0), ResponsePropensity(cap)
    baseline, logits, number = Baseline(config.baseline), np.zeros(2), 0
    for _ in range(steps):
        turns, values, pushes = [], {}, {}
        while len(turns) < size:
            number += 1
            unwelcome, chances = int(rng.random() < 0.2), 1.0 / (1.0 + np.exp(-logits))
            suggested = rng.random() < chances[unwelcome]
            turn = replace(
                a_turn(
                    f"t{number}:0", user=f"u{number % 200}", prompt=(number,), sampled=range(12 if suggested else 1)
                ),
                started_at=float(number),
            )
            accepted = rng.random() < (0.05 if unwelcome else 0.9)
            silent = suggested and rng.random() >= heard
            propensity.see("default", len(turn.sampled_ids), SILENT if silent else REWARD)
            if silent:
                continue
            turns.append(turn)
            values[turn.id] = (0.75 if accepted else -0.25) if suggested else 0.0
            pushes[turn.id] = unwelcome, suggested - chances[unwelcome]
        weights = {turn.id: propensity.weight("default", len(turn.sampled_ids)) for turn in turns}
        credit = SingleRollout(config, baseline, weights=weights)(by_episode(turns), values)
        for turn in turns:
            unwelcome, push = pushes[turn.id]
            logits[unwelcome] += 6.0 * weights[turn.id] * credit[turn.id][0] * push / math.fsum(weights.values())
            baseline.observe(context_of(turn), values[turn.id], len(turn.sampled_ids))
    return 1.0 / (1.0 + math.exp(-logits[1]))


def test_silence_about_suggestions_teaches_nobody_to_suggest():
    assert suggests(0.7, cap=1.0) > 0.4, "without weights the policy is pushed towards what is missing"
    assert suggests(0.7, cap=4.0) < 0.1


def said_or_nothing(turn, signals, now):
    """`copilot` with a window of 30 s; a turn of several tokens about which nobody said anything has no reward."""
    silence = 0.0 if len(turn.sampled_ids) == 1 else None
    found = copilot(turn, signals, now, window=30.0, silence=silence)
    assert not isinstance(found, NoReward) or found.reason == "silence"
    return found


async def test_the_desk_records_the_weights_and_a_restarted_one_gives_the_same(log, now, open_desk):
    config, folds = RewardConfig(user_cap=1.0, tenant_cap=1.0, user_steps=0), MemoryFolds()
    desk = open_desk(log, said_or_nothing, config, folds=folds)
    for i in range(120):
        turn = replace(a_turn(f"t{i}:0", user=f"u{i}", prompt=(i,), sampled=range(1 if i % 2 else 12), ended_at=1.0))
        said = [a_signal(turn, "accepted" if i % 3 else "rejected", at=2.0)] if i % 2 or i % 4 == 0 else []
        await log.append(turn, a_delivery(turn), *said)
    now.at = 100.0
    await desk.poll()
    await desk.save()
    again = open_desk(log, said_or_nothing, config, folds=folds)
    made = await again.batch(1, 60, V0)
    row = log.of(Batch)[0]
    assert row.weights
    by_length = {len(sample.turn.sampled_ids): weight for sample, weight in zip(made.samples, row.weights, strict=True)}
    assert by_length[12] / by_length[1] == pytest.approx(2.0, rel=0.2), "half of them were silent; shrunk"
    assert math.fsum(row.weights) == pytest.approx(len(row.turns)), "episodes of one turn"
    assert log.reasons(Quarantine)[f"t{2}:0"] == "no_reward:silence"
