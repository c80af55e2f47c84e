from dataclasses import replace

import numpy as np
import pytest
import torch

from ostinato.core import nucleus
from ostinato.core.generation import Generate
from ostinato.core.records import PolicyVersion, Sampling
from ostinato.core.weights import Snapshot, WeightArray
from ostinato.engine.embedded.sampler import Draw, draw, key_of, uniform
from ostinato.testing.tiny_engine import tiny_engine, tiny_snapshot


def way(u=0.5, temperature=1.0, top_p=1.0):
    return Draw(temperature=temperature, top_p=top_p, u=u)


def test_uniform_is_even_and_depends_on_each_argument():
    numbers = [uniform(s, i, t) for s in range(10) for i in range(10) for t in range(100)]
    assert len(set(numbers)) == len(numbers)
    counts = torch.histc(torch.tensor(numbers, dtype=torch.float64), 20, 0, 1)
    assert float(((counts - 500) ** 2 / 500).sum()) < 43.8  # chi-square, 19 degrees of freedom, p = 0.001


@pytest.mark.parametrize("vocab", [5, 256, 1000])
def test_draws_follow_the_softmax(vocab):
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(1)) * 2
    grid = [(i + 0.5) / 20_000 for i in range(20_000)]
    tokens: list[int] = []
    for start in range(0, len(grid), 500):
        us = grid[start : start + 500]
        tokens += draw(logits.expand(len(us), -1), [way(u, temperature=0.7) for u in us]).tokens
    share = torch.bincount(torch.tensor(tokens), minlength=vocab).double() / len(tokens)
    expected = (logits[0].double() / 0.7).softmax(-1)
    assert (
        float((share - expected).abs().max()) < 2 / 20_000 + 1e-6
    )  # stratified: each token's share is exact to the grid


def test_logprob_is_of_the_distribution_that_was_drawn_from():
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(2)).bfloat16()
    drawn = draw(logits.clone(), [way(temperature=0.5, top_p=0.3), way(temperature=2.0), way(temperature=0.0)])
    for row, temperature in enumerate((0.5, 2.0, 1.0)):
        shaped = logits[row].float() / temperature
        if nuclei := drawn.nuclei[row]:
            (ids,) = nucleus.decode(nuclei, 1)
            shut = torch.ones(300, dtype=torch.bool)
            shut[torch.from_numpy(ids)] = False
            shaped = shaped.masked_fill(shut, -torch.inf)
        assert bool(nuclei) == (row == 0)
        expected = shaped.log_softmax(-1)[drawn.tokens[row]]
        assert drawn.logprobs[row] == pytest.approx(float(expected), abs=1e-5)
    assert drawn.tokens[2] == int(logits[2].argmax())


@pytest.mark.parametrize(("scale", "vocab"), [(3.0, 400), (0.01, 3000)])  # the second needs more than the likeliest 512
def test_top_p_keeps_the_smallest_sufficient_set(scale, vocab):
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(3)) * scale
    order = logits[0].double().softmax(-1).sort(descending=True)
    size = int((order.values.cumsum(0) < 0.8).sum()) + 1
    us = [i / 4000 for i in range(4000)]
    seen = {
        t
        for start in range(0, 4000, 400)
        for t in draw(logits.repeat(400, 1), [way(u, 1.0, 0.8) for u in us[start : start + 400]]).tokens
    }
    assert seen <= set(order.indices[: size + 1].tolist())  # one either side of the threshold in float32
    assert len(seen) >= 0.7 * size


def test_a_row_does_not_depend_on_its_neighbours():
    logits = torch.randn(40, 777, generator=torch.Generator().manual_seed(4))
    ways = [way(uniform(1, 0, i), (0.0, 1.0, 0.6)[i % 3], (1.0, 0.9)[i % 2]) for i in range(40)]
    together = draw(logits.clone(), ways)
    for i in range(40):
        alone = draw(logits[i : i + 1], ways[i : i + 1])
        assert (alone.tokens[0], alone.logprobs[0]) == (together.tokens[i], together.logprobs[i])
        assert alone.nuclei[0] == together.nuclei[i]


def test_impossible_tokens_are_never_drawn():
    logits = torch.full((1, 600), float("-inf"))
    logits[0, 17], logits[0, 599] = 0.0, 0.0
    edge = (0.0, 0.4999999, 0.5, 0.5000001, 1 - 2**-53)
    assert set(draw(logits.expand(5, -1), [way(u) for u in edge]).tokens) == {17, 599}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("kernels", ["own", "torch"])
def test_unsound_logits_are_reported_and_harm_no_other_row(bad, top_p, kernels):
    logits = torch.randn(2, 50)
    logits[0, 3 if bad > 0 or bad != bad else slice(None)] = bad
    drawn = draw(logits, [way(top_p=top_p), way(top_p=top_p)], kernels)
    assert drawn.sound == [False, True]
    assert 0 <= drawn.tokens[1] < 50


@pytest.mark.parametrize("vocab", [1024, 1500])
@pytest.mark.parametrize("kernels", ["own", "torch"])
def test_a_nucleus_too_small_for_any_token_keeps_the_likeliest(vocab: int, kernels):
    logits_MV = torch.randn(3, vocab, generator=torch.Generator().manual_seed(0))
    likeliest = logits_MV.argmax(-1).tolist()
    rows = [Draw(temperature=1.0, top_p=1e-50, u=u) for u in (0.0, 0.5, 1 - 1e-16)]
    assert draw(logits_MV, rows, kernels).tokens == likeliest


def test_nucleus_sets_are_read_back_and_nothing_else_is():
    sets = [np.array([0]), np.array([3, 4, 150_000]), np.arange(1000)]
    packed = b"".join(map(nucleus.encode, sets))
    for found, made in zip(nucleus.decode(packed, 3), sets, strict=True):
        np.testing.assert_array_equal(found, made)
    for wrong, tokens in ((packed, 2), (packed[:-4], 3), (packed[:-1], 3), (b"", 1), (b"\0\0\0\0", 1)):
        with pytest.raises(ValueError, match="nucleus"):
            nucleus.decode(wrong, tokens)


# ---------------------------------------------------------------- races: draws of versions that are compared


def raced(logits, seeds, kernels="own", temperature=1.0, top_p=1.0):
    rows = [Draw(temperature=temperature, top_p=top_p, u=uniform(s, 0, 3), race=key_of(s, 0, 3)) for s in seeds]
    return draw(logits.expand(len(rows), -1).clone(), rows, kernels)


def drawn_by_sum(logits, seeds):
    return draw(logits.expand(len(seeds), -1).clone(), [way(uniform(s, 0, 3)) for s in seeds])


@pytest.mark.parametrize("kernels", ["own", "torch"])
def test_a_races_winners_follow_the_softmax(kernels):
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(1)) * 1.5
    tokens = torch.tensor(raced(logits, range(20_000), kernels, temperature=0.7).tokens)
    expected = (logits[0].double() / 0.7).softmax(-1) * 20_000
    often = expected > 20
    counts = torch.bincount(tokens, minlength=40).double()
    chi = float(((counts - expected) ** 2 / expected)[often].sum())
    assert chi < 2.0 * int(often.sum()), (chi, int(often.sum()))


def test_both_kernels_name_the_same_winner_and_its_own_logprob():
    logits = torch.randn(1, 1500, generator=torch.Generator().manual_seed(2))
    for top_p in (1.0, 0.8):
        own, torchs = (raced(logits, range(300), kernels, top_p=top_p) for kernels in ("own", "torch"))
        assert own.tokens == torchs.tokens
        assert own.nuclei == torchs.nuclei
        assert len(set(own.tokens)) > 100
    found = raced(logits, range(300))
    expected = logits[0].double().log_softmax(-1)[found.tokens]
    assert torch.allclose(torch.tensor(found.logprobs, dtype=torch.float64), expected, atol=1e-5)


def test_near_distributions_part_less_by_a_race_than_by_running_sums():
    """Two versions from the same seeds, on peaked and on flat distributions. No pairing parts less than half of their L1 distance."""
    for scale, nearer in ((4.0, 0.7), (0.5, 0.4)):
        generator = torch.Generator().manual_seed(7)
        parted = {"race": 0.0, "sum": 0.0, "least": 0.0}
        for _ in range(10):
            one = torch.randn(1, 2000, generator=generator) * scale
            two = one + torch.randn(1, 2000, generator=generator) * 0.1
            parted["least"] += float((one.softmax(-1) - two.softmax(-1)).abs().sum()) / 2
            for name, draws in (("race", raced), ("sum", drawn_by_sum)):
                a, b = (draws(each, range(400)).tokens for each in (one, two))
                parted[name] += sum(x != y for x, y in zip(a, b, strict=True)) / 400
        assert 0.8 * parted["least"] < parted["race"] < nearer * parted["sum"], (scale, parted)


def test_a_race_leaves_greedy_rows_other_rows_and_impossible_tokens_alone():
    logits = torch.randn(3, 600, generator=torch.Generator().manual_seed(4))
    rows = [Draw(temperature=0.0, top_p=1.0, u=0.3, race=9), way(0.3), Draw(temperature=1.0, top_p=1.0, u=0.3, race=9)]
    for kernels in ("own", "torch"):
        mixed = draw(logits.clone(), rows, kernels)
        assert mixed.tokens[0] == int(logits[0].argmax())
        assert mixed.tokens[1] == draw(logits[1:2].clone(), [way(0.3)], kernels).tokens[0]
        assert mixed.tokens[2] == draw(logits[2:].clone(), rows[2:], kernels).tokens[0]
    shut = torch.full((1, 600), float("-inf"))
    shut[0, 17], shut[0, 599] = 0.0, 0.0
    for kernels in ("own", "torch"):
        assert set(raced(shut, range(64), kernels).tokens) == {17, 599}


def nudged(weight: WeightArray) -> WeightArray:
    """The same with each number changed by up to three percent."""
    values = weight.data.view(np.float32)
    changed = values * (1.0 + 0.03 * np.sin(np.arange(values.size, dtype=np.float32).reshape(values.shape)))
    return replace(weight, data=changed.view(np.uint8))


async def test_the_engine_draws_an_evaluations_answers_by_races_that_depend_on_seed_and_place_only(tmp_path):
    """The answers of two versions that are nearly the same, from twelve seeds, begin alike for longer in pairs."""
    prompt = tuple(b"What is near?")

    async def answers(engine, paired, n=1):
        found = []
        for seed in range(12):
            sampling = Sampling(max_tokens=24, temperature=1.0, seed=seed)
            request = Generate(id=f"{seed}", slot="live", prompt_ids=prompt, sampling=sampling, n=n, paired=paired)
            ids = [[] for _ in range(n)]
            async for chunk in engine.generate(request):
                ids[chunk.index] += chunk.ids
            found.append(ids)
        return found

    def alike(one, two):
        return sum(
            next((i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), 24)
            for [x], [y] in zip(one, two, strict=True)
        )

    async with tiny_engine(tmp_path) as tiny:
        first = {paired: await answers(tiny.engine, paired) for paired in (True, False)}
        assert first[True] != first[False]
        assert [ids[:1] for ids in await answers(tiny.engine, True, n=3)] == first[True], (
            "whatever else is drawn beside it"
        )
        near = {name: nudged(weight) for name, weight in tiny_snapshot(tmp_path, 0, seed=0).weights.items()}
        await tiny.engine.load("live", Snapshot(policy=PolicyVersion(number=1, hash="near"), weights=near))
        second = {paired: await answers(tiny.engine, paired) for paired in (True, False)}
    told = {paired: alike(first[paired], second[paired]) for paired in (True, False)}
    assert told[True] > 3 * told[False], told
