"""Operations that libraries compute otherwise on other CPUs: ours are correctly rounded or in a stated order, and the rest is reported."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig

from ostinato.model.kernels.arithmetic import log64
from ostinato.model.linear import PanelLinear, in_panels, multiply, replace_by_panels
from ostinato.model.load import load_model
from ostinato.model.portable import PortableOperations, has_layer_types, library_operations
from ostinato.testing.tiny import SUPPORTED, tiny_of


def rounded(x):
    return torch.from_numpy(np.asarray(x, np.float64).astype(np.float32))


def test_cosines_sines_and_powers_are_the_correctly_rounded_ones():
    x = torch.from_numpy(np.random.default_rng(0).random(20_000, np.float32) * 8192)
    exponents = torch.arange(0, 128, 2).float() / 128
    wide = x.numpy().astype(np.float64)
    with PortableOperations():
        assert torch.equal(x.cos(), rounded(np.cos(wide)))
        assert torch.equal(torch.sin(x), rounded(np.sin(wide)))
        for base in (10000.0, 500000.0, 1e6):
            assert torch.equal(base**exponents, rounded(base ** exponents.numpy().astype(np.float64)))


def test_logarithms_are_right_to_the_last_bit_but_one():
    numbers = np.exp(np.random.default_rng(0).uniform(-5, 14, 2000))
    assert max(abs(log64(x) - math.log(x)) / np.spacing(abs(math.log(x))) for x in numbers) <= 1
    assert log64(0.0) == -math.inf
    assert log64(math.inf) == math.inf
    assert math.isnan(log64(-1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_softmax_a_sigmoid_and_a_sum_are_torchs_to_rounding_with_their_gradients(dtype):
    x = torch.randn(7, 33, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = []
    for ours in (True, False):
        leaf = x.clone().requires_grad_()
        with PortableOperations() if ours else torch.enable_grad():
            made = [
                torch.softmax(leaf, -1, dtype=torch.float32),
                torch.sigmoid(leaf),
                leaf[:, :8].sum(-1, keepdim=True),
            ]
        sum((part.float() ** 2).sum() for part in made).backward()
        found.append([part.detach().float() for part in (*made, leaf.grad)])
    near = 1e-2 if dtype is torch.bfloat16 else 1e-5
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=near, atol=near)


def test_of_equal_numbers_the_first_are_chosen():
    with PortableOperations():
        values, ids = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0]]).topk(3, dim=-1)
    assert (values.tolist(), ids.tolist()) == ([[3.0, 3.0, 2.0]], [[1, 3, 2]])


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("add", lambda x: torch.add(x, x, alpha=0.3)),
        ("exp", lambda x: torch.arange(5).exp()),
        ("pow", lambda x: torch.pow(2.5, torch.arange(4))),
        ("index_put", lambda x: x.index_put((torch.tensor([0, 0]),), torch.ones(2), accumulate=True)),
        ("topk", lambda x: x.topk(2)),
        ("sort", lambda x: x.sort()),
        ("matmul", lambda x: x[:, None] @ x[None]),
        ("gelu", F.gelu),
    ],
)
def test_what_may_differ_on_another_cpu_is_reported(name, run):
    assert library_operations(lambda: run(torch.ones(5))) == (name,)


def test_what_is_the_same_everywhere_is_not():
    x = torch.ones(5)
    assert (
        library_operations(lambda: (x + x, x * x / 3, x.sort(stable=True), torch.arange(5).sort(), x.bfloat16())) == ()
    )


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "olmoe"])
def test_a_rotary_embeddings_frequencies_are_our_own(tmp_path, kind):
    config = SUPPORTED[kind]()
    model = load_model(tiny_of(tmp_path / "m", config), torch.float32)
    rotary = model.base_model.rotary_emb
    assert rotary.own_frequencies
    dim = 2 * len(rotary.inv_freq)
    base = model.config.rope_parameters["rope_theta"]
    with PortableOperations():
        assert torch.equal(rotary.inv_freq, 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim)))


def test_so_are_those_of_a_model_with_other_frequencies_for_each_type_of_layer(tmp_path):
    model = load_model(tiny_of(tmp_path / "m", SUPPORTED["gemma3"]()), torch.float32)
    rotary = model.base_model.rotary_emb
    assert rotary.own_frequencies
    assert has_layer_types(rotary)
    for kind in ("full_attention", "sliding_attention"):
        found = getattr(rotary, f"{kind}_inv_freq")
        dim, base = 2 * len(found), model.config.rope_parameters[kind]["rope_theta"]
        with PortableOperations():
            assert torch.equal(found, 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim)))
        run = partial(rotary, torch.ones(1, 4, dim), torch.arange(4)[None], kind)
        assert library_operations(run) == ()


def test_a_layer_of_the_librarys_that_computes_something_else_keeps_it():
    """As a router that is a linear layer and returns more than its product."""

    class Router(nn.Linear):
        def forward(self, x):
            return super().forward(x), "and more"

    model = nn.ModuleDict({"router": Router(8, 4), "plain": nn.Linear(8, 4)})
    assert replace_by_panels(model) == 1
    assert isinstance(model["plain"], PanelLinear)
    assert type(model["router"]) is Router


def test_a_product_of_what_does_not_fit_is_refused_before_memory_is_touched():
    panels = in_panels(torch.ones(48, 32))
    for x, bias in (
        (torch.ones(4, 64), None),
        (torch.ones(4, 32).bfloat16(), None),
        (torch.ones(4, 32), torch.ones(1)),
        (torch.ones(4, 32), torch.ones(48).bfloat16()),
        (torch.tensor(1.0), None),
    ):
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            multiply(x, panels, bias)


def test_an_activation_of_the_librarys_is_named_in_the_contract_of_its_model(tmp_path):
    from ostinato.model.selftest import examine

    path = tiny_of(tmp_path / "m", LlamaConfig(**SUPPORTED["llama"]().to_diff_dict() | {"hidden_act": "gelu"}))
    assert "gelu" in examine(path, torch.float32).library
