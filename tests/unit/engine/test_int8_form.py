"""The engine's form in whole numbers: what is rounded and what is not, who may use it, and what a swap does to it."""

from itertools import product

import pytest
import torch
from torch import nn

from ostinato.core.errors import BadConfig
from ostinato.core.generation import Generate
from ostinato.core.records import Sampling
from ostinato.engine.embedded import form, fused
from ostinato.engine.embedded.condensed import condense, is_condensed
from ostinato.engine.embedded.form import Int8Linear, prepack, quantise, times_as_fast
from ostinato.engine.embedded.fused import FusedLayer, fuse
from ostinato.model import linear as arithmetic
from ostinato.model import routing
from ostinato.model.attention import CausalAttend, hidden, logits
from ostinato.model.cpu import team
from ostinato.model.kernels.int8_product import INT8, INT8_TILES, MOST_INPUTS
from ostinato.model.linear import Integers, choose_integers, replace_by_panels
from ostinato.model.load import load_model
from ostinato.model.paged import WholeAttend
from ostinato.testing.tiny import SUPPORTED, tiny_model, tiny_moe, tiny_of
from ostinato.testing.tiny_engine import tiny_engine, tiny_snapshot

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def integers():
    return choose_integers([64, 128])


@torch.inference_mode()
def states(model, count=50, attend=CausalAttend):
    ids = torch.arange(count)
    return hidden(model, ids, ids, attend([count]))


def saturating(levels_MK, weights_NK):
    """Sums of neighbours' products are cut off at 16 bits, as vpmaddubsw does with bytes from 0 to 255 and from -128 to 127."""
    pairs = ((levels_MK[:, None] + 128) * weights_NK[None]).unflatten(-1, (-1, 2)).sum(-1)
    return (pairs.clamp(-(1 << 15), (1 << 15) - 1).sum(-1) - 128 * weights_NK.sum(1)).float()


def wrong(levels_MK, weights_NK):
    return (levels_MK @ weights_NK.T + 1).float()


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("summed", [saturating, wrong])
def test_a_product_that_saturates_or_is_wrong_is_refused(monkeypatch, tiles, summed):
    assert arithmetic.is_exact(INT8, 64)
    monkeypatch.setattr(arithmetic, "tiles_allowed", lambda: tiles)
    monkeypatch.setattr(arithmetic, "int8_words", lambda levels, scales: levels.long())
    monkeypatch.setattr(arithmetic, "sums", lambda levels, words, how: summed(levels, words))
    with pytest.raises(BadConfig, match=r"engine\.products = 'int8' cannot be used .* set engine\.products = 'plain'"):
        choose_integers([64])


def test_tiles_are_used_if_their_sums_are_exact(monkeypatch):
    exact = {INT8: True, INT8_TILES: True}
    monkeypatch.setattr(arithmetic, "tiles_allowed", lambda: True)
    monkeypatch.setattr(arithmetic, "is_exact", lambda how, inputs: exact[how])
    assert choose_integers([64]) == Integers(how=INT8_TILES)
    assert Integers(how=INT8_TILES).name == Integers(how=INT8).name
    exact[INT8_TILES] = False
    assert choose_integers([64]) == Integers(how=INT8)


def test_more_inputs_than_a_sum_can_hold_are_refused():
    assert 127 * 127 * MOST_INPUTS < 1 << 31
    with pytest.raises(BadConfig, match=r"hold 132,104 inputs, .* 132,105: set engine\.products = 'plain'"):
        choose_integers([64, MOST_INPUTS + 1])


def test_the_decoder_is_rounded_and_the_head_is_not(tmp_path, integers):
    model = load_model(tiny_model(tmp_path / "tiny"), torch.float32)
    plain = states(model)
    head = model.get_output_embeddings()
    assert quantise(model, integers) == 2 * 7
    assert is_condensed(model)
    assert [isinstance(part, nn.Linear) for part in model.modules()].count(True) == 1
    assert model.get_output_embeddings() is head
    rounded = states(model)
    assert not torch.equal(rounded, plain)
    assert float((rounded - plain).norm() / plain.norm()) < 0.05
    with torch.inference_mode():
        before = logits(model, rounded)
    assert replace_by_panels(model) == 1, "what is left is laid out, with the bits that it had"
    with torch.inference_mode():
        assert torch.equal(logits(model, rounded), before)


@pytest.fixture
def layer_by_layer(monkeypatch):
    monkeypatch.setattr(form, "condense", lambda model, lay_out, keep: 0)


@pytest.mark.usefixtures("layer_by_layer")
def test_without_the_form_of_one_call_the_layers_are_fused(tmp_path, integers):
    model = load_model(tiny_model(tmp_path / "tiny"), torch.float32)
    assert quantise(model, integers) == 2 * 7
    assert all(isinstance(layer, FusedLayer) for layer in model.base_model.layers)
    assert sum(isinstance(part, Int8Linear) for part in model.modules()) == 2 * 4


@pytest.mark.parametrize("tried", ["condensed", "fused"])
def test_the_form_is_tried_once_on_a_machine(tmp_path, integers, monkeypatch, tried):
    path, kept, trials, found = tiny_model(tmp_path / "tiny"), {}, [], []

    def keep(form, configuration, dtype, trial):
        if form not in kept:
            trials.append(form)
            kept[form] = trial()
        return kept[form]

    if tried == "fused":
        monkeypatch.setattr(form, "condense", lambda model, lay_out, keep: 0)
    for _ in range(2):
        monkeypatch.setattr(fused, "_known", {})  # as in another process
        model = load_model(path, torch.float32)
        prepack(model, integers, keep)
        found.append(states(model))
    assert trials == [tried]
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", SUPPORTED)
def test_one_call_gives_the_bits_of_one_layer_after_another(tmp_path, integers, monkeypatch, kind, dtype):
    """At any number of tokens and threads."""
    path = tiny_of(tmp_path / "m", SUPPORTED[kind]())
    one = load_model(path, dtype)
    if not condense(load_model(path, dtype)):
        pytest.skip("this architecture has no form of one call")
    assert quantise(one, integers)
    assert is_condensed(one)
    monkeypatch.setattr(form, "condense", lambda model, lay_out, keep: 0)
    each = load_model(path, dtype)
    quantise(each, integers)
    assert any(isinstance(part, Int8Linear) for part in each.modules())
    for count, attend in product((1, 7, 50), (CausalAttend, WholeAttend)):  # the second is computed in the same call
        want = states(each, count, attend)
        for threads in (1, 2):
            with team(threads):
                assert torch.equal(states(one, count, attend), want), (count, threads)


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


def test_another_threads_default_dtype_changes_nothing(integers):
    """Who builds the next version beside the decoding sets it for the whole process."""
    layer, x = nn.Linear(64, 48), torch.randn(3, 64)
    expected = Int8Linear([layer], integers)(x)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(Int8Linear([layer], integers)(x), expected)
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
