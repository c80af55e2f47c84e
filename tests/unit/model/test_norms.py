import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from ostinato.model.norms import RMSNorm, replace_norms


def pair(width, dtype):
    torch.manual_seed(0)
    theirs = LlamaRMSNorm(width, 1e-5)
    nn.init.normal_(theirs.weight)
    theirs = theirs.to(dtype)
    return theirs, RMSNorm(nn.Parameter(theirs.weight.detach().clone()), 1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_value_and_gradients_are_the_library_s(dtype, tolerance):
    theirs, ours = pair(64, dtype)
    x = (torch.randn(2, 7, 64) * torch.rand(2, 7, 1) * 5).to(dtype)
    grad = torch.randn(2, 7, 64).to(dtype)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outs = [norm(y) for norm, y in zip((theirs, ours), inputs, strict=True)]
    for out in outs:
        out.backward(grad)
    torch.testing.assert_close(outs[1], outs[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=tolerance, atol=4 * tolerance)
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=tolerance, atol=10 * tolerance)


def test_a_row_s_bits_do_not_depend_on_its_company_or_layout():
    _, norm = pair(96, torch.bfloat16)
    x = torch.randn(33, 96).bfloat16()
    whole = norm(x)
    assert torch.equal(norm(x[5:6]), whole[5:6])
    assert torch.equal(norm(x.t().contiguous().t()), whole)


def test_only_norms_of_this_kind_are_replaced_and_keep_their_names():
    model = nn.ModuleDict(
        {
            "a": LlamaRMSNorm(32),
            "b": Qwen3RMSNorm(32),
            "gemma": Gemma3RMSNorm(32),
            "odd": LlamaRMSNorm(24),
            "n": nn.LayerNorm(32),
        }
    )
    weight = model["a"].weight
    names = [name for name, _ in model.named_parameters()]
    assert replace_norms(model) == 2
    assert [name for name, _ in model.named_parameters()] == names
    assert model["a"].weight is weight
    assert isinstance(model["gemma"], Gemma3RMSNorm)
    assert replace_norms(model) == 0
