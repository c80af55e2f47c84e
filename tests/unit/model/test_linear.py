"""The one matrix product: right values and gradients, the same bits at any row count under its rule, packed or divided."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ostinato.model import linear as page
from ostinato.model.linear import Linear, linear, replace_linears

torch.set_num_threads(1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 48), (1, 5, 48), (2, 3, 48)])
def test_values_and_gradients_are_torchs_own_to_rounding(shape, bias):
    torch.manual_seed(0)
    theirs = nn.Linear(48, 33, bias=bias)
    ours = Linear(copy.deepcopy(theirs))
    found = []
    x = torch.randn(shape)
    for layer in (ours, theirs):
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        (y * torch.linspace(-1, 1, 33)).sum().backward()
        found.append([y.detach(), leaf.grad, *(p.grad for p in layer.parameters())])
    assert len(found[0]) == len(found[1]) == 3 + bias
    for mine, other in zip(*found, strict=True):
        assert mine.shape == other.shape
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
        assert other.abs().max() > 0


def test_gradients_are_made_only_for_who_wants_them():
    layer = Linear(nn.Linear(8, 4))
    layer.weight.requires_grad_(False)
    x = torch.randn(3, 8)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    assert layer.bias.grad is not None
    assert not linear(x, layer.weight).requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_are_torchs_own(dtype):
    x, weight = torch.randn(5, 16).to(dtype), torch.randn(9, 16).to(dtype)
    assert torch.equal(linear(x, weight), F.linear(x, weight))


def test_without_onednn_it_is_torchs_own(monkeypatch):
    monkeypatch.setattr(page, "ONEDNN", False)
    x, weight = torch.randn(5, 600), torch.randn(9, 600)
    assert torch.equal(linear(x, weight), F.linear(x, weight))


@pytest.mark.skipif(not page.ONEDNN, reason="this torch has no oneDNN")
def test_outputs_may_be_divided_and_the_bits_stay():
    """So a product may be shared by two threads, and several products of one input may be one."""
    x, weight = torch.randn(64, 700), torch.randn(96, 700)
    for rows in (2, 8, 64):
        with torch.inference_mode():
            whole = linear(x[:rows], weight)
            assert torch.equal(torch.cat([linear(x[:rows], part) for part in weight.split([32, 16, 48])], -1), whole)


def test_every_plain_layer_is_exchanged_and_keeps_its_parameters():
    class Own(nn.Linear):
        pass

    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.ModuleList([nn.Linear(4, 2, bias=False), Own(4, 4)])})
    before = dict(model.named_parameters())
    assert replace_linears(model) == 2
    assert [type(module) for module in model.modules() if isinstance(module, nn.Linear)] == [Linear, Linear, Own]
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert replace_linears(model) == 0


@pytest.mark.skipif(not page.ONEDNN, reason="this torch has no oneDNN")
def test_few_row_counts_reach_onednn_which_keeps_memory_for_each(monkeypatch):
    inner, seen = page._PRODUCT, set()
    monkeypatch.setattr(page, "_PRODUCT", lambda x, *rest: seen.add(len(x)) or inner(x, *rest))
    weight, bias = torch.randn(9, 16), torch.randn(9)
    for rows in range(1, 2049):
        assert page.product(torch.ones(rows, 16), weight, bias).shape == (rows, 9)
    assert len(seen) <= 110


@pytest.mark.skipif(not page.ONEDNN, reason="this torch has no oneDNN")
@pytest.mark.parametrize("rows", [33, 127, 129, 500, 513])
def test_the_rows_that_are_added_change_no_bit(rows):
    x, weight, bias = torch.randn(1, rows, 96), torch.randn(80, 96), torch.randn(80)
    plain = page._PRODUCT(x, weight, bias, "none", [], "")
    assert torch.equal(page.product(x, weight, bias), plain)
    assert page.product(x, weight, bias).is_contiguous()
