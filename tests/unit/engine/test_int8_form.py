"""The engine's form in whole numbers: what is rounded and what is not, who may use it, and what a swap does to it."""

import pytest
import torch
from torch import nn

from ostinato.core.errors import BadConfig
from ostinato.core.generation import Generate
from ostinato.core.records import Sampling
from ostinato.engine.embedded.form import prepack, times_as_fast
from ostinato.engine.embedded.forms.fused import FusedLayer, fuse
from ostinato.engine.embedded.forms.int8 import Int8Linear, quantise
from ostinato.model import integers as arithmetic
from ostinato.model import routing
from ostinato.model.attention import CausalAttend, hidden, logits
from ostinato.model.integers import Integers, Matrix, find
from ostinato.model.linear import replace_by_panels
from ostinato.model.load import load_model
from ostinato.testing.tiny import tiny_model
from ostinato.testing.tiny_engine import tiny_engine, tiny_snapshot
from ostinato.testing.tiny_moe import tiny_moe
from ostinato.testing.tiny_zoo import SUPPORTED, tiny_of

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def integers():
    return find([64, 128])


@torch.inference_mode()
def states(model, count=50):
    ids = torch.arange(count)
    return hidden(model, ids, ids, CausalAttend([count]))


class Saturating(Matrix):
    """Sums of neighbours' products are cut off at 16 bits, as vpmaddubsw does with bytes from 0 to 255 and from -128 to 127."""

    def __init__(self, weight_OI):
        self._weight = weight_OI.int()

    def sums(self, levels_ND, most):
        raised = (levels_ND + most + 1).int()
        pairs = (raised[:, None] * self._weight[None]).unflatten(-1, (-1, 2)).sum(-1).clamp(-(1 << 15), (1 << 15) - 1)
        return (pairs.sum(-1) - (most + 1) * self._weight.sum(1)).float()

    @staticmethod
    def room(rows, inputs, most):
        return torch.empty(rows, inputs), 0


class Wrong(Saturating):
    def sums(self, levels_ND, most):
        return super().sums(levels_ND, most) + 1


def test_a_product_that_saturates_gets_fewer_levels_and_one_that_is_wrong_is_refused(monkeypatch):
    monkeypatch.setattr(arithmetic, "LIBRARIES", {"fbgemm": Saturating, "onednn": Wrong})
    assert find([64]) == Integers(library="fbgemm", most=63)
    monkeypatch.setattr(arithmetic, "LIBRARIES", {"fbgemm": Wrong, "onednn": Wrong})
    with pytest.raises(BadConfig, match=r"engine\.products = 'int8' cannot be used .* set engine\.products = 'plain'"):
        find([64])


def test_the_decoder_is_rounded_and_the_head_is_not(tmp_path, integers):
    model = load_model(tiny_model(tmp_path / "tiny"), torch.float32)
    plain = states(model)
    head = model.get_output_embeddings()
    assert quantise(model, integers) == 2 * 7
    assert all(isinstance(layer, FusedLayer) for layer in model.base_model.layers)
    assert sum(isinstance(part, Int8Linear) for part in model.modules()) == 2 * 4
    assert model.get_output_embeddings() is head
    rounded = states(model)
    assert not torch.equal(rounded, plain)
    assert float((rounded - plain).norm() / plain.norm()) < 0.05
    with torch.inference_mode():
        before = logits(model, rounded)
    assert replace_by_panels(model) == 1, "what is left is laid out, with the bits that it had"
    with torch.inference_mode():
        assert torch.equal(logits(model, rounded), before)


def test_the_head_can_be_rounded_too(tmp_path, integers):
    model = load_model(tiny_model(tmp_path / "tiny"), torch.float32)
    assert quantise(model, integers, head=True) == 2 * 7 + 1
    assert isinstance(model.get_output_embeddings(), Int8Linear)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_company(integers, dtype):
    layer = Int8Linear([nn.Linear(64, 48, dtype=dtype), nn.Linear(64, 16, dtype=dtype)], integers)
    x = torch.randn(150, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.inference_mode():
        whole = layer(x)
        assert whole.dtype == dtype
        assert whole.shape == (150, 64)
        for count in (1, 2, 5, 33, 129):
            assert torch.equal(layer(x[:count]), whole[:count])
        assert torch.equal(layer(x[None])[0], whole)


def test_a_model_that_was_rounded_first_does_not_keep_others_from_their_bits(tmp_path, integers):
    path = tiny_model(tmp_path / "tiny", layers=3)
    want = states(load_model(path, torch.float32), 64)
    for _ in range(2):
        assert prepack(load_model(path, torch.float32), integers) == 3 * 7 + 1
        plain = load_model(path, torch.float32)
        assert fuse(plain) == 3 * 7
        assert torch.equal(states(plain, 64), want)


def test_a_mixture_of_experts_is_refused(tmp_path, integers):
    with pytest.raises(BadConfig, match=r"engine\.products = 'int8' is for dense models"):
        quantise(load_model(tiny_moe(tmp_path / "moe"), torch.float32), integers)


@pytest.mark.parametrize("kind", SUPPORTED)
def test_every_supported_architecture_is_rounded_whole_or_refused(tmp_path, integers, kind):
    path = tiny_of(tmp_path / "m", SUPPORTED[kind]())
    plain, rounded = (load_model(path, torch.float32) for _ in range(2))
    if routing.of(plain) is not None or not any(isinstance(each, nn.Linear) for each in plain.base_model.modules()):
        with pytest.raises(BadConfig, match=r"set engine\.products = 'plain'"):
            quantise(rounded, integers)
        return
    assert quantise(rounded, integers) == sum(isinstance(each, nn.Linear) for each in plain.base_model.modules())
    assert not torch.equal(states(plain), states(rounded))


@pytest.mark.parametrize("library", arithmetic.LIBRARIES)
def test_another_threads_default_dtype_changes_nothing(library):
    """Who builds the next version beside the decoding sets it for the whole process."""
    layer, x = nn.Linear(64, 48), torch.randn(3, 64)
    chosen = Integers(library=library, most=63)
    expected = Int8Linear([layer], chosen)(x)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(Int8Linear([layer], chosen)(x), expected)
    finally:
        torch.set_default_dtype(torch.float32)


async def test_a_swap_rounds_the_new_weights(tmp_path, integers):
    request = Generate(id="r", slot="live", prompt_ids=tuple(b"some prompt"), sampling=Sampling(max_tokens=8, seed=1))
    ids = list(b"some prompt and what comes after it")

    async def answer(engine):
        chunks = [chunk async for chunk in engine.generate(request)]
        return [(chunk.ids, chunk.logprobs) for chunk in chunks], await engine.score("live", ids, 11)

    other = tiny_snapshot(tmp_path, 1, seed=1)
    async with tiny_engine(tmp_path / "one", integers=integers) as one, tiny_engine(tmp_path / "two") as plain:
        first = await answer(one.engine)
        await one.engine.load("live", other)
        await plain.engine.load("live", other)
        second, unrounded = await answer(one.engine), await answer(plain.engine)
        assert first[1] != second[1]
        assert second[1] != unrounded[1], "the new weights are rounded, too"
        assert second[1] == pytest.approx(unrounded[1], abs=0.5)
        async with tiny_engine(tmp_path / "three", integers=integers) as fresh:
            await fresh.engine.load("live", other)
            assert await answer(fresh.engine) == second, "nothing is left of the version before"


def test_the_pace_is_looked_at_for_each_number_of_streams(tmp_path, integers):
    found = times_as_fast(tiny_model(tmp_path / "tiny"), torch.float32, integers)
    assert list(found) == [1, 8, 32, 128]
    assert all(factor > 0 for factor in found.values())
