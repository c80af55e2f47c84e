"""Whose turns a batch is made of: tenants in turn, each one's newest first, whole units."""

from collections import Counter
from dataclasses import replace

import pytest
from tests.oracles.turn_accounting import recount

from ostinato.core.records import Batch, Holdback, PolicyVersion, Span
from ostinato.reward.batching import fair_deal, ready_parts
from ostinato.reward.config import RewardConfig
from ostinato.reward.ledger_entries import Matured, TurnFacts
from ostinato.testing.records import a_delivery, a_signal, a_turn

V0 = PolicyVersion(number=0, hash="00")
CONFIG = RewardConfig(group_wait_s=0.0)


class Waiting:
    """Turns that may be learned from, in the order of the log."""

    def __init__(self) -> None:
        self.turns: list[Matured] = []

    def add(self, tenant: str, sizes: list[int]) -> None:
        """One episode of each size."""
        for size in sizes:
            episode = f"e{len(self.turns)}"
            for _ in range(size):
                seq = len(self.turns) + 1
                turn = replace(a_turn(f"{tenant}{seq}"), tenant=tenant, episode=episode)
                facts = TurnFacts.of(seq, turn, CONFIG)
                self.turns.append(Matured(facts=facts, value=0.0, silent=False, signals=(), since=0.0))

    def deal(self, size: int, **changes) -> Counter[str]:
        """How many turns of each tenant a batch of now takes."""
        config = CONFIG.model_copy(update=changes)
        parts = ready_parts(self.turns, lambda unit: None, now=1e9, config=config)
        return Counter(entry.facts.tenant for entry in fair_deal(parts, size=size, config=config))


@pytest.fixture
def waiting() -> Waiting:
    return Waiting()


def test_one_call_with_many_samples_does_not_take_a_batch(waiting: Waiting):
    for tenant in "abc":
        waiting.add(tenant, [1] * 100)
    waiting.add("loud", [1] * 50 + [128])  # the newest of all
    assert waiting.deal(144) == {"a": 36, "b": 36, "c": 36, "loud": 36}


def test_a_flood_takes_no_more_than_others_want(waiting: Waiting):
    waiting.add("small", [1] * 10)
    waiting.add("middle", [1] * 40)
    waiting.add("loud", [1] * 1000)
    assert waiting.deal(144) == {"small": 10, "middle": 40, "loud": 94}


def test_two_with_equal_wants_get_half_each_whatever_their_units(waiting: Waiting):
    waiting.add("talks", [1] * 500)
    waiting.add("samples", [128] * 3)
    assert waiting.deal(144) == {"talks": 127, "samples": 128}, "the batch grows, the share does not"
    waiting.add("samples", [30] * 5)
    assert waiting.deal(144) == {"talks": 84, "samples": 60}, "what fits comes before what does not"


def test_a_unit_larger_than_a_share_is_taken_where_others_leave_room(waiting: Waiting):
    waiting.add("talks", [1] * 20)
    waiting.add("samples", [128])
    assert waiting.deal(144) == {"talks": 20, "samples": 128}
    assert waiting.deal(149) == {}, "nobody waits for others in vain, but a batch has its size"


def test_a_tenant_that_is_alone_gets_the_newest_whole_units(waiting: Waiting):
    sizes = [3, 1, 128, 2, 5, 70]
    waiting.add("alone", sizes)
    for size, taken in ((1, 70), (70, 70), (71, 75), (76, 77), (78, 205), (206, 206), (207, 209), (210, 0)):
        assert waiting.deal(size, tenant_cap=0.1)["alone"] == taken


def test_the_same_turns_are_dealt_alike_in_whatever_order_they_are_held(waiting: Waiting):
    for tenant, sizes in (("a", [1] * 30), ("b", [4] * 9), ("c", [20, 1, 1])):
        waiting.add(tenant, sizes)
    parts = ready_parts(waiting.turns, lambda unit: None, now=1e9, config=CONFIG)
    found = fair_deal(parts, size=40, config=CONFIG)
    assert [entry.facts.seq for entry in found] == sorted(entry.facts.seq for entry in found)
    assert (
        fair_deal(parts[::-1], size=40, config=CONFIG)
        == fair_deal(sorted(parts, key=lambda part: part.tenant), size=40, config=CONFIG)
        == found
    )


# ---------------------------------------------------------------- at the desk


async def test_a_neighbours_turns_do_not_go_stale_while_another_sends_large_calls(log, now, open_desk, turn):
    """Each step a call with as many samples as a batch, after six turns of the neighbour's; both are learned from all the time."""
    desk = open_desk(log, config=RewardConfig(max_staleness=2, user_cap=1.0))
    number = 0
    for step in range(1, 11):
        made = (Span(policy=PolicyVersion(number=step - 1, hash="aa"), tokens=1),)
        for tenant, count in (("quiet", 6), ("loud", 12)):
            for i in range(count):
                episode = f"{tenant}{step}" if tenant == "loud" else f"q{number}"
                each = turn(number, tenant=tenant, episode=episode, spans=made, ended_at=100.0 * step)
                said = a_signal(each, "accepted" if i % 2 else "rejected", at=100.0 * step)
                await log.append(each, a_delivery(each, at=100.0 * step), said)
                number += 1
        now.at = 100.0 * step + 60.0
        assert await desk.batch(step, 12, V0)
    trained = Counter(name for batch in log.of(Batch) for name in batch.turns)
    quiet = {row.id for row in log.turns() if row.tenant == "quiet"}
    assert sum(trained[name] for name in quiet) == len(quiet) == 60
    assert not quiet & log.reasons(Holdback).keys()
    assert (await recount(log)).balanced


async def test_a_recorded_batch_is_read_back_as_it_was_dealt(log, now, open_desk, turn):
    for i in range(24):
        each = turn(i, tenant=f"tenant{i % 3}", ended_at=10.0)
        await log.append(each, a_signal(each, "accepted" if i % 2 else "rejected"))
    now.at = 99.0
    desk = open_desk(log)
    made = [await desk.batch(step, 9, V0) for step in (1, 2)]
    for batch in made:
        assert Counter(sample.turn.tenant for sample in batch.samples) == {f"tenant{i}": 3 for i in range(3)}
    later = open_desk(log, config=RewardConfig(tenant_cap=0.01))
    assert [batch async for batch in later.history()] == made


def test_what_fills_a_batch_to_its_last_token_is_taken(waiting: Waiting):
    waiting.add("a", [1] * 9)  # of 5 tokens each
    assert waiting.deal(9, batch_tokens=20) == {"a": 4}
    assert waiting.deal(9, batch_tokens=24) == {"a": 4}
    assert waiting.deal(9, batch_tokens=25) == {"a": 5}
