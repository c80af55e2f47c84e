import numpy as np
import pytest
import torch

from ostinato.core import nucleus
from ostinato.engine.embedded.sampler import Draw, draw, uniform


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
