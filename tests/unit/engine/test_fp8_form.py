"""The engine's form in 8-bit floats, on the CPU by the call that a GPU gets: what is rounded, by how much, and who may use it."""

import asyncio

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ostinato.core.errors import BadConfig
from ostinato.core.generation import Generate
from ostinato.core.records import Sampling
from ostinato.engine.config import EngineConfig
from ostinato.engine.embedded import form
from ostinato.engine.embedded.form import FP8_NAME, Fp8Linear, round_to_fp8, rounded
from ostinato.model.attention import CausalAttend, hidden
from ostinato.model.backend import ComputeBackend
from ostinato.model.load import load_model
from ostinato.model.numerics import contract
from ostinato.testing.tiny import tiny_model, tiny_moe
from ostinato.testing.tiny_engine import tiny_engine

TORCH = ComputeBackend(kernels="torch")


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(seed=st.integers(0, 1 << 30), scale=st.floats(-20, 20), spread=st.floats(0, 6))
def test_each_element_is_kept_to_a_sixteenth_or_to_a_tiny_part_of_its_row(seed, scale, spread):
    x = drawn(3, 64, seed=seed) * 10**scale * torch.exp(spread * drawn(3, 64, seed=seed + 1))
    numbers, scales = rounded(x)
    off = (numbers.float() * scales - x).abs()
    assert bool((off <= torch.maximum(x.abs() / 16, scales / 1024) * (1 + 1e-5)).all())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_multiplies_what_was_rounded(dtype, bias):
    plain = nn.Linear(64, 48, bias=bias, dtype=dtype)
    layer, x = Fp8Linear(plain), drawn(2, 5, 64, dtype=dtype)
    (a, a_scales), (b, b_scales) = rounded(x.view(10, 64)), rounded(plain.weight.detach())
    want = (a.float() * a_scales) @ (b.float() * b_scales).t()
    with torch.inference_mode():
        out, exact = layer(x), plain(x).float()
        want += plain.bias.float() if bias else 0
    assert (out.dtype, out.shape) == (dtype, (2, 5, 48))
    within = 1 / 64 if dtype == torch.bfloat16 else 1e-5
    assert torch.allclose(out.float().view(10, 48), want, rtol=within, atol=within)
    assert float((out.float() - exact).norm() / exact.norm()) < 0.07, "two operands of 1/16 / sqrt(3) each: 0.05"


def test_a_nan_and_a_row_of_zeros_stay_in_their_rows():
    layer, x = Fp8Linear(nn.Linear(64, 48, bias=False)), drawn(4, 64)
    x[1], x[2, 5] = 0.0, float("nan")
    with torch.inference_mode():
        out = layer(x)
        assert torch.allclose(out[0], layer(x[:1])[0], rtol=1e-5, atol=1e-5)
    assert bool((out[1] == 0).all())
    assert bool(out[2].isnan().all())
    assert bool(out[[0, 3]].isfinite().all())


def test_the_decoder_is_rounded_and_the_head_is_not(tmp_path):
    model = load_model(tiny_model(tmp_path / "tiny"), torch.float32, backend=TORCH)
    ids = torch.arange(50)
    with torch.inference_mode():
        plain = hidden(model, ids, ids, CausalAttend([50]))
        head = model.get_output_embeddings()
        assert round_to_fp8(model) == 2 * 7
        near = hidden(model, ids, ids, CausalAttend([50]))
    assert sum(isinstance(part, Fp8Linear) for part in model.modules()) == 2 * 7
    assert model.get_output_embeddings() is head
    assert 0 < float((near - plain).norm() / plain.norm()) < 0.2


def test_layers_of_odd_sizes_stay_and_a_model_without_others_is_refused(tmp_path, monkeypatch):
    path = tiny_model(tmp_path / "tiny", hidden=64, heads=4, kv_heads=2)
    monkeypatch.setattr(form, "_MULTIPLE", 64)
    assert round_to_fp8(load_model(path, torch.float32, backend=TORCH)) == 2 * 5, "all but keys and values, 32 wide"
    monkeypatch.setattr(form, "_MULTIPLE", 1024)
    with pytest.raises(BadConfig, match=r"has none: set engine\.products = 'plain'"):
        round_to_fp8(load_model(path, torch.float32, backend=TORCH))


def test_a_mixture_of_experts_is_refused(tmp_path):
    with pytest.raises(BadConfig, match=r"engine\.products = 'fp8' is for dense models"):
        round_to_fp8(load_model(tiny_moe(tmp_path / "moe"), torch.float32, backend=TORCH))


def test_a_gpu_without_such_products_is_refused_by_name(monkeypatch):
    class Old(nn.Module):
        device = torch.device("cuda:0")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(BadConfig, match=r"NVIDIA A100 has no products of 8-bit floats: set engine\.products = 'plain'"):
        round_to_fp8(Old())


async def test_an_engine_samples_in_eight_bits_under_a_contract_of_its_own(tmp_path):
    own = contract(torch.float32, "fast", 1, 16, FP8_NAME, backend=TORCH)
    assert own.id != contract(torch.float32, "fast", 1, 16, backend=TORCH).id

    async def said(products):
        config = EngineConfig(kv_tokens=4096, block=16, products=products)
        async with tiny_engine(tmp_path, config, backend=TORCH, contract=own) as tiny:

            async def one(seed):
                sampling = Sampling(max_tokens=12, seed=seed, temperature=0.0)
                request = Generate(id="r", slot="live", prompt_ids=tuple(b"def f(x"), sampling=sampling)
                chunks = [chunk async for chunk in tiny.engine.generate(request)]
                return [p for chunk in chunks for p in chunk.logprobs]

            return await asyncio.gather(*(one(seed) for seed in range(3)))

    plain, eight = await said("plain"), await said("fp8")
    assert eight[1] == pytest.approx(eight[0], abs=1e-4)
    assert 1e-3 < abs(eight[0][0] - plain[0][0]) < 0.2
