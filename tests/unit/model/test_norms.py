import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from ostinato.model.norms import RMSNorm, replace_norms

KINDS = {"plain": LlamaRMSNorm, "zero-centred": Gemma3RMSNorm}
each_kind = pytest.mark.parametrize("kind", KINDS)


def pair(width, dtype, kind):
    torch.manual_seed(0)
    theirs = KINDS[kind](width, 1e-5)
    nn.init.normal_(theirs.weight)
    theirs = theirs.to(dtype)
    weight = nn.Parameter(theirs.weight.detach().clone())
    return theirs, RMSNorm(weight, 1e-5, zero_centered=kind == "zero-centred")


@each_kind
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_value_and_gradients_are_the_library_s(dtype, tolerance, kind):
    theirs, ours = pair(64, dtype, kind)
    x = (torch.randn(2, 7, 64) * torch.rand(2, 7, 1) * 5).to(dtype)
    grad = torch.randn(2, 7, 64).to(dtype)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outs = [norm(y) for norm, y in zip((theirs, ours), inputs, strict=True)]
    for out in outs:
        out.backward(grad)
    torch.testing.assert_close(outs[1], outs[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=tolerance, atol=4 * tolerance)
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=tolerance, atol=10 * tolerance)


@each_kind
def test_a_bf16_norm_rounds_where_the_library_s_does(kind):
    """All but the few numbers that an error in fp32 moves over the middle between two; of the other order of roundings many differ."""
    theirs, ours = pair(64, torch.bfloat16, kind)
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert (ours(x) == theirs(x)).float().mean() > 0.99
    normed = x.float() * (x.float().pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    weight = theirs.weight.float()
    other = weight * normed if kind == "plain" else (weight + 1) * normed.bfloat16()
    assert (ours(x) == other.bfloat16()).float().mean() < 0.9


@each_kind
def test_a_row_s_bits_do_not_depend_on_its_company_or_layout(kind):
    _, norm = pair(96, torch.bfloat16, kind)
    x = torch.randn(33, 96).bfloat16()
    whole = norm(x)
    assert torch.equal(norm(x[5:6]), whole[5:6])
    assert torch.equal(norm(x.t().contiguous().t()), whole)


class Narrow(Gemma3RMSNorm):
    """One that adds its weight and 1 in the weight's dtype."""

    def forward(self, x):
        return (self._norm(x.float()) * (1 + self.weight).float()).type_as(x)


def test_only_norms_of_this_kind_are_replaced_and_keep_their_names():
    model = nn.ModuleDict(
        {
            "a": LlamaRMSNorm(32),
            "b": Qwen3RMSNorm(32),
            "gemma": Gemma3RMSNorm(32),
            "once": Gemma4RMSNorm(32),
            "narrow": Narrow(32),
            "torch": nn.RMSNorm(32, 1e-6),
            "odd": LlamaRMSNorm(24),
            "n": nn.LayerNorm(32),
        }
    )
    weight, of_gemma = model["a"].weight, model["gemma"].weight
    names = [name for name, _ in model.named_parameters()]
    assert replace_norms(model) == 3
    assert [name for name, _ in model.named_parameters()] == names
    assert model["a"].weight is weight
    assert model["gemma"].weight is of_gemma
    assert [model[name].zero_centered for name in ("a", "b", "gemma")] == [False, False, True]
    assert not any(isinstance(model[name], RMSNorm) for name in ("once", "narrow", "torch", "odd", "n"))
    assert replace_norms(model) == 0
