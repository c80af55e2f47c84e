"""A token's expert output is a function of that token alone, to the bit, and the right function."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.integrations import use_experts_implementation

from ostinato.core.errors import BadConfig
from ostinato.model.experts import experts, experts_of
from ostinato.model.load import empty_model, load_model
from ostinato.testing.tiny import tiny_model, tiny_moe

torch.set_num_threads(1)
E, K, D, WIDTH = 16, 4, 96, 40


def _same(a, b):
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _plain(gate=True, bias=False, transposed=False, norm=False):
    """An experts class of the library's making, with a naive forward of its own to compare with."""

    @use_experts_implementation(has_gate=gate, has_bias=bias, is_transposed=transposed, has_post_expert_norm=norm)
    class Experts(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.num_experts, self.act_fn = E, nn.SiLU()
            up = (2 if gate else 1) * WIDTH
            names = {"gate_up_proj" if gate else "up_proj": (up, D), "down_proj": (D, WIDTH)}
            for name, (out, into) in names.items():
                shape = (E, into, out) if transposed else (E, out, into)
                setattr(self, name, nn.Parameter(torch.randn(shape) * 0.1))
                if bias:
                    setattr(self, f"{name}_bias", nn.Parameter(torch.randn(E, out) * 0.1))
            if norm:
                self.post_expert_norm = nn.RMSNorm(D)

        def forward(self, x, ids, gates):
            out = torch.zeros_like(x)
            for token in range(len(x)):
                for expert, share in zip(ids[token].tolist(), gates[token], strict=True):
                    out[token] = out[token] + self.one(x[token], expert) * share
            return out

        def one(self, x, expert):
            first = "gate_up_proj" if gate else "up_proj"
            x = self.project(first, x, expert)
            x = self._apply_gate(x) if gate else self.act_fn(x)
            x = self.project("down_proj", x, expert)
            return self.post_expert_norm(x) if norm else x

        def project(self, name, x, expert):
            weight = getattr(self, name)[expert]
            x = x @ (weight if transposed else weight.T)
            return x + getattr(self, f"{name}_bias")[expert] if bias else x

    torch.manual_seed(0)
    return Experts(SimpleNamespace(_experts_implementation="ostinato"))


def _routed(n, seed=1, dtype=torch.float32):
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(n, D, generator=source)
    gates, ids = torch.softmax(torch.randn(n, E, generator=source), -1).topk(K)
    return x.to(dtype), ids, gates.to(dtype)


@pytest.mark.parametrize(
    "layout", [{}, {"gate": False}, {"bias": True}, {"transposed": True, "bias": True}, {"norm": True}], ids=str
)
def test_answer_and_gradients_are_those_of_a_naive_loop(layout):
    module = _plain(**layout)
    x, ids, gates = _routed(13)
    found = []
    for function in (type(module).forward, type(module).forward.__wrapped__):
        module.zero_grad()
        leaves = x.clone().requires_grad_(), gates.clone().requires_grad_()
        out = function(module, leaves[0], ids, leaves[1])
        (out * torch.linspace(-1, 1, D)).sum().backward()
        found.append([out.detach(), *(leaf.grad for leaf in leaves), *(p.grad.clone() for p in module.parameters())])
    for ours, naive in zip(*found, strict=True):
        torch.testing.assert_close(ours, naive, rtol=2e-5, atol=2e-6)
        assert naive.abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_keeps_its_bits_whatever_else_is_in_the_call(dtype):
    module = _plain().to(dtype)
    x, ids, gates = _routed(70, dtype=dtype)
    with torch.inference_mode():
        whole = experts(module, x, ids, gates)
        shuffled = torch.randperm(70, generator=torch.Generator().manual_seed(2))
        assert _same(experts(module, x[shuffled], ids[shuffled], gates[shuffled]), whole[shuffled])
        for size in (1, 2, 3, 5, 8, 33):
            parts = [
                experts(module, *part) for part in zip(x.split(size), ids.split(size), gates.split(size), strict=True)
            ]
            assert _same(torch.cat(parts), whole)
    with torch.enable_grad():
        assert _same(experts(module, x, ids, gates).detach(), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_order_of_the_slots_does_not_matter(dtype):
    module = _plain().to(dtype)
    x, ids, gates = _routed(20, dtype=dtype)
    whole = experts(module, x, ids, gates)
    for slots in (torch.tensor([3, 2, 1, 0]), torch.tensor([2, 0, 3, 1])):
        assert _same(experts(module, x, ids[:, slots], gates[:, slots]), whole)


def test_slots_are_added_by_ascending_expert_in_fp32():
    module = _plain().bfloat16()
    x, ids, gates = _routed(6, dtype=torch.bfloat16)
    alone = [experts(module, x, ids[:, j : j + 1], torch.ones(6, 1)).float() for j in range(K)]  # each slot, rounded
    order = ids.argsort(-1)
    expected = torch.zeros(6, D)
    for rank in range(K):
        for token in range(6):
            j = int(order[token, rank])
            expected[token] += alone[j][token] * gates[token, j].float()
    assert _same(experts(module, x, ids, gates), expected.bfloat16())


def test_no_tokens_and_no_fit():
    module = _plain()
    assert experts(module, torch.zeros(0, D), torch.zeros(0, K, dtype=torch.long), torch.zeros(0, K)).shape == (0, D)
    with pytest.raises(BadConfig, match="chose expert 16 of 16"):
        experts(module, torch.zeros(1, D), torch.tensor([[0, 1, 2, 16]]), torch.ones(1, K))


def test_experts_of_another_make_are_refused_with_a_remedy():
    split = _plain()
    split._is_expert_parallel = True
    unstacked = _plain()
    unstacked.gate_up_proj = None
    quantised = _plain()
    del quantised.down_proj, quantised.gate_up_proj
    quantised.down_proj = quantised.gate_up_proj = torch.zeros(E, D, D, dtype=torch.int8)
    for module, words in ((split, "without expert"), (unstacked, "unquantised"), (quantised, "as bfloat16")):
        with pytest.raises(BadConfig, match=words):
            experts(module, *_routed(2))


@pytest.mark.parametrize("kind", ["qwen3_moe", "olmoe", "mixtral"])
def test_every_way_of_building_a_model_uses_our_function(tmp_path, kind):
    path = tiny_moe(tmp_path, kind)
    for model in (load_model(path, torch.float32), empty_model(path, torch.float32)):
        assert [module.config._experts_implementation for module in experts_of(model)] == ["ostinato"] * 2


def test_a_dense_model_has_no_experts(tmp_path):
    assert experts_of(load_model(tiny_model(tmp_path), torch.float32)) == []
