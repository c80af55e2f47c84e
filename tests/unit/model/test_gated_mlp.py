"""activation(gate) * up: the values and gradients of torch to rounding, and bits that depend on nothing but the number itself."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.activations import ACT2FN

from ostinato.model.experts import GatedMLP, fill_gradients, gated, replace_mlps
from ostinato.model.load import load_model
from ostinato.testing.tiny import SUPPORTED, tiny_of

DTYPES = [torch.float32, torch.bfloat16]
TORCHS = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
each_activation = pytest.mark.parametrize("activation", TORCHS)


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_those_of_torch(dtype):
    gate, up = (numbers(9, 50, seed=i).to(dtype) for i in range(2))
    with torch.no_grad():
        got = gated(gate, up, "silu")
        exact = F.silu(gate.double()) * up.double()
    assert got.dtype == dtype
    torch.testing.assert_close(
        got.double(), exact, rtol={torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype], atol=1e-30
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_is_that_of_torch(dtype):
    gate, up = (numbers(9, 50, seed=i).to(dtype) for i in range(2))
    with torch.no_grad():
        got = gated(gate, up, "gelu_tanh")
        exact = TORCHS["gelu_tanh"](gate.double()) * up.double()
    assert got.dtype == dtype
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance)


@each_activation
def test_rounding_is_once_after_the_activation_and_once_after_the_product(activation):
    gate, up = (numbers(64, 32, seed=i).bfloat16() for i in range(2))
    with torch.no_grad():
        twice = (gated(gate.float(), torch.ones(64, 32), activation).bfloat16().float() * up.float()).bfloat16()
        assert torch.equal(gated(gate, up, activation), twice)


@each_activation
@pytest.mark.parametrize("width", [8, 16])
def test_the_ends_of_the_scale(activation, width):
    gate = torch.tensor([[0.0, -0.0, 100.0, -100.0, 3e38, -3e38, float("inf"), float("nan")]]).repeat(1, width // 8)
    with torch.no_grad():
        got = gated(gate, torch.ones_like(gate), activation)[0].tolist()
    assert got[:7] == [0.0, -0.0, 100.0, -0.0, pytest.approx(3e38), -0.0, float("inf")]
    assert got[7] != got[7]


@each_activation
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 15, 16, 48, 50])
def test_a_number_keeps_its_bits_wherever_it_stands(dtype, width, activation):
    """In a vector or after the last whole one, beside other rows, in a slice of a wider tensor, on two threads."""
    both = numbers(200, 2 * width).to(dtype)
    gate, up = both.chunk(2, -1)
    with torch.no_grad():
        one_by_one = torch.cat(
            [gated(g.reshape(-1, 1), u.reshape(-1, 1), activation).view(1, -1) for g, u in zip(gate, up, strict=True)]
        )
        assert torch.equal(gated(gate, up, activation), one_by_one)
        assert torch.equal(gated(gate.contiguous(), up.contiguous(), activation)[3:5], one_by_one[3:5])
        torch.set_num_threads(2)
        try:
            assert torch.equal(gated(gate[None], up[None], activation)[0], one_by_one)
        finally:
            torch.set_num_threads(1)
    assert torch.equal(gated(gate, up, activation).detach(), one_by_one)


@each_activation
@pytest.mark.parametrize("dtype", DTYPES)
def test_filled_again_the_layer_has_the_bits_it_had_and_its_gradients_may_stand_where_theirs_came_from(
    dtype, activation
):
    gate, up, grad = (numbers(200, 50, seed=i).to(dtype) for i in range(3))
    with torch.no_grad():
        expected = gated(gate, up, activation)
    again, d_gate, d_up = (torch.empty_like(gate) for _ in range(3))
    fill_gradients(gate, up, grad, activation, again=again, d_gate=d_gate, d_up=d_up)
    in_place = grad.clone()
    other = torch.empty_like(gate)
    fill_gradients(gate, up, in_place, activation, again=other, d_gate=other, d_up=in_place)
    assert torch.equal(again, expected)
    assert torch.equal(other, d_gate)
    assert torch.equal(in_place, d_up)


@each_activation
def test_gradients_are_those_of_torch_in_double_precision(activation):
    """37 numbers: two vectors and five more, which other code computes."""
    leaves = [numbers(6, 37, seed=i).requires_grad_() for i in range(2)]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    (gated(*leaves, activation) * torch.linspace(-1, 1, 37)).sum().backward()
    (TORCHS[activation](wide[0]) * wide[1] * torch.linspace(-1, 1, 37).double()).sum().backward()
    for ours, theirs in zip(leaves, wide, strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-5, atol=1e-6)
        assert theirs.grad.abs().max() > 0.1


@each_activation
@pytest.mark.parametrize("width", [6, 48])
def test_a_gradient_of_large_gates_is_that_of_a_straight_line(activation, width):
    gate = torch.tensor([[100.0, -100.0, 1e4, -1e4, 1e19, -1e19]]).repeat(1, width // 6).requires_grad_()
    gated(gate, torch.ones_like(gate), activation).sum().backward()
    assert gate.grad[0].tolist() == [1.0, 0.0] * (width // 2)


@pytest.mark.parametrize(
    ("kind", "count"), [("llama", 3), ("llama-tied-bias", 3), ("qwen3", 3), ("gemma3", 3), ("qwen3-moe", 1)]
)
def test_layers_that_compute_just_this_are_exchanged_and_no_others(tmp_path, kind, count):
    model = load_model(tiny_of(tmp_path / kind, SUPPORTED[kind]()), torch.float32)
    assert sum(isinstance(module, GatedMLP) for module in model.modules()) == count


@pytest.mark.parametrize(
    ("act_fn", "expected"),
    [
        (nn.SiLU(), "silu"),
        (nn.GELU(approximate="tanh"), "gelu_tanh"),
        (ACT2FN["gelu_pytorch_tanh"], "gelu_tanh"),
        (nn.GELU(), None),
        (ACT2FN["quick_gelu"], None),
    ],
)
def test_a_gate_s_activation_is_told_by_what_it_computes(act_fn, expected):
    """The tanh approximation is within 0.0005 of GELU itself, and still not GELU."""

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(4, 4) for _ in range(3))
            self.act_fn = act_fn

        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    layers = nn.ModuleList([Gated()])
    assert replace_mlps(layers) == (expected is not None)
    assert getattr(layers[0], "activation", None) == expected


def test_a_layer_of_the_same_parts_that_computes_something_else_stays():
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(4, 4) for _ in range(3))
            self.act_fn = nn.SiLU()

        def forward(self, x):
            return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))

    assert replace_mlps(nn.ModuleList([Other()])) == 0


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_another_threads_default_dtype_keeps_no_layer_from_being_exchanged(tmp_path, kind):
    """Who builds another model in the meantime sets it for the whole process."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_of(tmp_path / "m", SUPPORTED[kind]())))
    layers = model.config.get_text_config().num_hidden_layers
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert replace_mlps(model) == layers
    finally:
        torch.set_default_dtype(torch.float32)
