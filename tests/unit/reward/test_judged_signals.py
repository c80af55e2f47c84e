"""A judge's word beside the rules', through the desk: same rewards, same coverage, same outcomes."""

from dataclasses import replace

import pytest
from tests.oracles.turn_accounting import recount

from ostinato.core.records import Holdback, Quarantine, Reward
from ostinato.reward.accounting import account
from ostinato.reward.functions import agent
from ostinato.testing.records import a_delivery, a_signal


def within_30_s(turn, signals, now):
    return agent(turn, signals, now, window=30.0)


@pytest.fixture
def settled(now, open_desk, turn):
    async def settle(log, judged):
        """Nine turns: about a third each nothing is said, they are followed up, and they displeased."""
        turns = [turn(i, ended_at=10.0) for i in range(9)]
        await log.append(*turns, a_delivery(*turns))
        for each, name in zip(turns, 3 * [None, "followed_up", "dissatisfied"], strict=True):
            if name is not None:
                rules = a_signal(each, name, id=f"next-{each.id}")
                await log.append(rules, *judged(each, rules))
        now.at = 100.0
        await open_desk(log, within_30_s).poll()
        rewards = {row.turn: row.value for row in log.of(Reward)}
        return rewards, log.reasons(Quarantine), log.reasons(Holdback), await account(log), await recount(log)

    return settle


async def test_a_word_beside_the_rules_changes_no_outcome(log, settled):
    def beside(turn, rules):
        name = "judged_praised" if rules.name == "dissatisfied" else "judged_dissatisfied"
        return [replace(rules, id=f"judged-{rules.id}", name=name, received_at=12.0)]

    found = await settled(type(log)(), beside)
    assert found == await settled(log, lambda turn, rules: [])
    assert set(found[0].values()) == {0.0, -0.5}


async def test_a_word_in_the_rules_place_is_what_counts(log, settled):
    def instead(turn, rules):
        name = "praised" if rules.name == "dissatisfied" else "dissatisfied"
        word = replace(rules, id=f"judge-{rules.id}", name=name, received_at=12.0)
        return [word, replace(rules, id=f"{word.id}-r", value=0.0, received_at=12.0, retracts=rules.id)]

    rewards, *_ = await settled(type(log)(), instead)
    before, *_ = await settled(log, lambda turn, rules: [])
    assert {turn: -0.5 - value for turn, value in before.items()} == rewards
