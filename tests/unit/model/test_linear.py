"""The one matrix product: right values and gradients, and torch's own where our kernels do not compute."""

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


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_are_torchs_own(dtype):
    x, weight = torch.randn(5, 16).to(dtype), torch.randn(9, 16).to(dtype)
    assert torch.equal(linear(x, weight), F.linear(x, weight))


def test_every_plain_layer_is_exchanged_and_keeps_its_parameters():
    class Own(nn.Linear):
        pass

    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.ModuleList([nn.Linear(4, 2, bias=False), Own(4, 4)])})
    before = dict(model.named_parameters())
    assert replace_linears(model) == 2
    assert [type(module) for module in model.modules() if isinstance(module, nn.Linear)] == [Linear, Linear, Own]
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert replace_linears(model) == 0


@pytest.mark.parametrize("native", [True, False])
def test_gradients_in_bf16_are_those_of_fp32_to_rounding(monkeypatch, native):
    """With and without bf16 products of the CPU's own: without, they are computed in fp32."""
    monkeypatch.setattr(page, "has_bf16_products", lambda: native)
    theirs = nn.Linear(48, 33)
    ours = Linear(copy.deepcopy(theirs).bfloat16())
    x = torch.randn(6, 48)
    for layer, dtype in ((ours, torch.bfloat16), (theirs, torch.float32)):
        (layer(x.to(dtype)) * torch.linspace(-1, 1, 33).to(dtype)).sum().backward()
    torch.testing.assert_close(ours.weight.grad.float(), theirs.weight.grad, rtol=0.02, atol=0.05)
