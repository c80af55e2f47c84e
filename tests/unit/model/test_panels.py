"""Our own bf16 products: the bits of oneDNN's where they say so, whoever shares the work, and none where the order is another."""

import numpy as np
import pytest
import torch

from ostinato.model import linear, panels
from ostinato.model.kernels.chains import PANEL
from ostinato.model.paged import array
from ostinato.model.panels import able, chain_of, in_panels, multiply
from ostinato.model.threads import team

pytestmark = pytest.mark.skipif(not able(), reason="this CPU has no instruction for pairs of bf16 numbers")


def by_hand(x, weight, chain):
    """The kernel's words in numpy: fp32 chains, two products at a time; exact here, where each product and sum is a small integer."""
    return sum(x[:, k : k + chain].double() @ weight[:, k : k + chain].double().T for k in range(0, x.shape[1], chain))


@pytest.mark.parametrize("rows", [1, 2, 3, 11, 12, 13, 25, 200, 450])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 32), (576, 96), (1536, 64), (2050, 32)])
def test_products_are_those_of_onednn_at_any_number_of_rows_and_threads(inputs, outputs, rows):
    source = torch.Generator().manual_seed(rows)
    weight, x = (torch.randn(count, inputs, generator=source).bfloat16() for count in (outputs, 450))
    bias = torch.randn(outputs, generator=source).bfloat16()
    chain = chain_of(inputs, outputs)
    assert chain is not None
    want = linear.product(x, weight, None)[:rows]
    for threads in (1, 2, 4):
        with team(threads):
            assert torch.equal(multiply(x[:rows].contiguous(), in_panels(weight), chain), want)
            biased = multiply(x[:rows].contiguous(), in_panels(weight), chain, array(bias)[None])
    assert torch.equal(biased, linear.product(x, weight, bias)[:rows])


def test_a_panel_of_two_weights_holds_half_of_each():
    gate, up = torch.arange(2 * 64 * 4).view(2, 64, 4).bfloat16()
    both = in_panels(gate, up)
    assert torch.equal(both[:2], in_panels(torch.cat([gate[:16], up[:16], gate[16:32], up[16:32]])))


def test_sums_of_small_integers_are_exact():
    x, weight = (torch.randint(-3, 4, (count, 1100)).bfloat16() for count in (14, PANEL))
    got = multiply(x, in_panels(weight), 512).double()
    assert torch.equal(got, by_hand(x, weight, 512).bfloat16().double())


def test_a_shape_that_is_added_in_another_order_has_no_chain(monkeypatch):
    chain_of.cache_clear()
    monkeypatch.setattr(panels, "_CHAINS", (64, 384))
    assert chain_of(576, 64) is None
    chain_of.cache_clear()
    monkeypatch.undo()
    assert chain_of(576, 64) == 512
    assert chain_of(575, 64) is None
    assert chain_of(576, 65) is None


def test_numbers_too_small_for_the_cpu_are_zero_as_in_onednn():
    x = torch.full((2, 64), 2.0**-70).bfloat16()
    weight = torch.full((32, 64), 2.0**-70).bfloat16()
    x[:, 1:], weight[:, 1:] = 0, 0
    assert torch.equal(multiply(x, in_panels(weight), 64), linear.product(x, weight, None))
    assert np.all(array(multiply(x, in_panels(weight), 64)) == 0)
