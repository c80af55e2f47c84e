"""Where a step cannot hold all that people say: turns are drawn by what they tell, weighted so that the gradient's mean is that of all."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.core.records import Batch, Holdback, PolicyVersion, Span
from ostinato.reward.batching import LearnablePart, draw_batch, fair_deal
from ostinato.reward.config import RewardConfig
from ostinato.reward.functions import copilot
from ostinato.reward.ledger_entries import Matured, Taught, TurnFacts
from ostinato.reward.pipeline import RewardDesk, recorded
from ostinato.reward.runners import Inline
from ostinato.testing.records import a_delivery, a_signal, a_turn

V0 = PolicyVersion(number=0, hash="00")
CONFIG = RewardConfig(user_cap=1.0, tenant_cap=1.0, user_steps=0)


def part(number, *, tokens, tenant="default", turns=1):
    """A part whose turns have this many tokens in all, half of them sampled."""
    half = max(1, tokens // turns // 2)
    entries = []
    for i in range(turns):
        turn = replace(
            a_turn(f"{tenant}{number}.{i}", sampled=range(half)), tenant=tenant, prompt_ids=tuple(range(half))
        )
        facts = TurnFacts.of(10 * number + i, turn, CONFIG)
        entries.append(Matured(facts=facts, value=0.0, silent=False, signals=(), since=0.0))
    return LearnablePart(entries=entries, tokens=2 * half * turns)


def name(part):
    return part.entries[0].facts.id


def draw(parts, noises, most, seed=0):
    config = CONFIG.model_copy(update={"batch_tokens": most})
    fair = fair_deal(parts, size=1, config=config, every=True)
    noise = dict(zip(map(name, parts), noises, strict=True))
    return draw_batch(
        parts, {each.facts.id for each in fair}, noise=lambda part: noise[name(part)], most=most, seed=str(seed)
    )


def test_over_many_draws_every_turn_has_the_weight_that_it_would_have_in_a_step_with_all():
    rng = np.random.default_rng(0)
    parts = [part(i, tokens=int(rng.integers(4, 60)), turns=1 + i % 3) for i in range(40)]
    noises = rng.exponential(size=40).tolist()
    runs, weights, sizes = 800, Counter(), []
    for seed in range(runs):
        chosen = draw(parts, noises, 600, seed)
        weights.update(chosen.weights)
        sizes.append(len(chosen.entries))
        assert {each.facts.id for each in chosen.entries} == chosen.weights.keys()
        assert len(chosen.entries) + len(chosen.passed) == sum(len(each.entries) for each in parts)
    share = np.mean(sizes) / sum(len(each.entries) for each in parts)
    for each in parts:
        assert weights[name(each)] / runs == pytest.approx(share, rel=0.35), "the same for loud and for quiet turns"
    assert np.mean([weights[name(each)] / runs for each in parts]) == pytest.approx(share, rel=0.02)


def test_a_draw_by_noise_per_token_lowers_the_variance():
    """Estimates a sum of 300 turns' noise from a third of their tokens; the variance is that over draws."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(4, 80, size=300)
    noises = (
        np.abs(rng.normal(size=300)) * (rng.random(300) < 0.6) * np.sqrt(tokens)
    )  # advantage times the root of the length
    signs = rng.choice([-1.0, 1.0], size=300)
    parts = [part(i, tokens=2 * int(count)) for i, count in enumerate(tokens)]
    values = {name(each): float(noise * sign) for each, noise, sign in zip(parts, noises, signs, strict=True)}

    def spread(by):
        sums = []
        for seed in range(120):
            chosen = draw(parts, by, int(tokens.sum() * 2 / 3), seed)
            whole = math.fsum(chosen.weights.values())
            sums.append(sum(weight * values[turn] for turn, weight in chosen.weights.items()) / whole)
        return float(np.var(sums))

    assert spread(noises.tolist()) < 0.6 * spread(np.sqrt(tokens).tolist())


@given(
    sizes=st.lists(st.tuples(st.integers(2, 100), st.integers(1, 4), st.floats(0, 5)), min_size=1, max_size=40),
    tenants=st.integers(1, 3),
    seed=st.integers(0, 5),
)
def test_a_draw_never_holds_more_than_a_step_can_process(sizes, tenants, seed):
    parts = [
        part(i, tokens=tokens, turns=turns, tenant="abc"[i % tenants]) for i, (tokens, turns, _) in enumerate(sizes)
    ]
    most = 4 * max(each.tokens for each in parts)
    chosen = draw(parts, [noise for _, _, noise in sizes], most, seed)
    by_name = {name(each): each for each in parts}
    taken = [by_name[each.facts.id] for each in chosen.entries if each.facts.id in by_name]
    assert sum(each.tokens for each in taken) <= most
    assert sum(len(each.entries) for each in taken) == len(chosen.entries), "parts are taken whole"
    assert all(weight > 0 for weight in chosen.weights.values())


def test_each_tenant_has_as_much_of_a_batch_as_in_a_fair_deal():
    parts = [part(i, tokens=10, tenant="loud") for i in range(900)] + [
        part(i, tokens=10, tenant="small") for i in range(20)
    ]
    chosen = draw(parts, [1.0 + i % 7 for i in range(920)], 1_000)
    counts = Counter(each.facts.tenant for each in chosen.entries)
    assert counts["small"] == 20
    assert 77 <= counts["loud"] <= 80
    mass = sum(weight for turn, weight in chosen.weights.items() if turn.startswith("loud"))
    assert mass == pytest.approx(79, rel=0.15), "the weight of its turns in the batch, and not of all that it sent"


async def test_the_desk_draws_once_records_the_weights_and_repeats_the_step(log, now):
    config = CONFIG.model_copy(update={"batch_tokens": 200})

    def reward(turn, signals, at):
        return copilot(turn, signals, at, window=30.0)

    def desk():
        return RewardDesk(log, Inline(reward, max_abs=100.0), now, config, taught=Taught(every=True))

    turns = [
        replace(
            a_turn(f"t{i}:0", user=f"u{i}", prompt=(i, 1), sampled=range(3 + i % 8)),
            episode=f"e{i}",
            spans=(Span(policy=V0, tokens=3 + i % 8),),
        )
        for i in range(60)
    ]
    said = [a_signal(turn, "accepted" if i % 3 else "rejected") for i, turn in enumerate(turns)]
    await log.append(*turns, a_delivery(*turns), *said)
    now.at = 50.0
    made = await desk().batch(1, 8, V0)
    assert made is not None
    passed = {row.turn for row in log.of(Holdback) if row.reason.startswith("passed_over: step 1")}
    assert len(made.samples) + len(passed) == 60
    assert len(passed) > 30
    weights = {sample.turn.id: sample.weight for sample in made.samples}
    assert len(set(weights.values())) > 3
    assert math.fsum(weights.values()) == pytest.approx(len(weights)), "one for each episode"
    (row,) = log.of(Batch)
    assert row.weights == tuple(weights.values())
    again = await desk().batch(1, 8, V0)
    assert again == made
    assert [batch async for batch in recorded(log, 1, 1)] == [made]
    assert await desk().batch(2, 8, V0) is None, "what was passed over has had its chance"


@pytest.mark.parametrize("accepted", [0.1, 0.9])
async def test_the_caps_cut_good_and_bad_turns_alike(log, now, accepted):
    """The weights of rare kinds are small and those of common ones large; a cap by them would cut what is common and so bias the step."""
    config = RewardConfig(batch_tokens=1_200, group_wait_s=0.0)
    rng, turns = np.random.default_rng(2), []
    for i in range(900):
        turn = replace(a_turn(f"t{i}:0", user=f"u{i}", prompt=(i, 1), sampled=range(6)), episode=f"e{i}")
        turns.append(replace(turn, spans=(Span(policy=V0, tokens=6),)))
    said = [a_signal(turn, "accepted" if rng.random() < accepted else "rejected") for turn in turns]
    await log.append(*turns, a_delivery(*turns), *said)
    now.at = 50.0

    def reward(turn, signals, at):
        return copilot(turn, signals, at, window=30.0)

    made = await RewardDesk(log, Inline(reward, max_abs=100.0), now, config, taught=Taught(every=True)).batch(1, 8, V0)
    sums = {True: 0.0, False: 0.0}
    for sample in made.samples:
        sums[sample.reward > 0] += sample.weight * sample.advantages[0]
    rewards = {turn.id: signal.name == "accepted" for turn, signal in zip(turns, said, strict=True)}
    share = sum(rewards.values()) / len(rewards)
    assert sums[True] / -sums[False] == pytest.approx(share * 0.75 / ((1 - share) * 0.25), rel=0.35)


def test_where_parts_are_too_long_for_a_draw_the_fair_deal_is_taken():
    parts = [part(0, tokens=600), part(1, tokens=600), part(2, tokens=10)]
    chosen = draw(parts, [1.0, 1.0, 1.0], 700)
    assert [each.facts.id for each in chosen.entries] == ["default1.0", "default2.0"]
    assert not chosen.weights
    assert not chosen.passed, "what is left waits for the next step"


def test_a_long_part_that_is_taken_for_certain_takes_no_room_from_the_others():
    parts = [part(i, tokens=10) for i in range(400)] + [part(400, tokens=500)]
    chosen = draw(parts, [1.0] * 400 + [1e6], 2_000)
    assert 148 <= len(chosen.entries) <= 151
