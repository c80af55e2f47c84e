"""Any turns of any tenants: parts are whole, the budget is kept, nobody is passed over for another's more, alone nothing changes."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.reward.batching import LEAST_PARTS, LearnablePart, fair_deal
from ostinato.reward.config import RewardConfig
from ostinato.reward.ledger_entries import Matured, TurnFacts
from ostinato.testing.records import a_turn

TURN = TurnFacts.of(1, a_turn(), RewardConfig())
LARGE = 1 << 40


def parts_of(wants: list[tuple[str, int, int]]) -> list[LearnablePart]:
    """Parts of (tenant, turns, tokens), oldest first."""
    made: list[LearnablePart] = []
    seq = 0
    for tenant, turns, tokens in wants:
        entries: list[Matured] = []
        for _ in range(turns):
            seq += 1
            facts = replace(TURN, seq=seq, id=f"t{seq}", tenant=tenant)
            entries.append(Matured(facts=facts, value=0.0, silent=False, signals=(), since=0.0))
        made.append(LearnablePart(entries=entries, tokens=tokens))
    return made


wants = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 40), st.integers(1, 100)), max_size=40)
sizes = st.integers(1, 150)
caps = st.floats(0.05, 1.0)


def taken_of(parts: list[LearnablePart], found: list[Matured]) -> list[LearnablePart]:
    ids = {entry.facts.id for entry in found}
    for part in parts:
        assert len({entry.facts.id for entry in part.entries} & ids) in (0, len(part.entries)), "whole parts"
    return [part for part in parts if part.entries[0].facts.id in ids]


@settings(max_examples=200)
@given(wants, sizes, caps, st.booleans())
def test_a_batch_keeps_to_its_budget_and_to_everybodys_share(wanted, size: int, cap: float, scarce: bool):
    config = RewardConfig(tenant_cap=cap, batch_tokens=400 if scarce else LARGE)
    parts = parts_of(wanted)
    found = fair_deal(parts, size=size, config=config)
    taken = taken_of(parts, found)
    left = [part for part in parts if part.newest not in {each.newest for each in taken}]
    total, tokens = len(found), sum(part.tokens for part in taken)
    assert [entry.facts.seq for entry in found] == sorted(entry.facts.seq for entry in found)
    assert tokens <= config.batch_tokens
    if not found:
        assert sum(len(part.entries) for part in parts) < size
        assert sum(part.tokens for part in parts) <= config.batch_tokens
        return
    if total < size:
        assert all(tokens + part.tokens > config.batch_tokens for part in left), "nothing more would have fitted"
        assert len(taken) >= LEAST_PARTS
    if not scarce:
        had = {tenant: sum(len(part.entries) for part in taken if part.tenant == tenant) for tenant in "abcd"}
        for other in {part.tenant for part in left}:
            most = had[other] + max(len(part.entries) for part in left if part.tenant == other)
            assert all(turns <= most for turns in had.values()), f"{other} would have had less"


@settings(max_examples=200)
@given(wants, sizes, caps)
def test_a_tenant_that_is_alone_gets_the_newest_until_there_are_enough(wanted, size: int, cap: float):
    parts = parts_of([("a", turns, tokens) for _, turns, tokens in wanted])
    expected: list[Matured] = []
    for part in reversed(parts):
        if len(expected) < size:
            expected = [*part.entries, *expected]
    if len(expected) < size:
        expected = []
    assert fair_deal(parts, size=size, config=RewardConfig(tenant_cap=cap, batch_tokens=LARGE)) == expected
