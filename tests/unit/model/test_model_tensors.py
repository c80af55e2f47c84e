import numpy as np
import pytest
import torch

from ostinato.core.errors import BadWeights
from ostinato.core.weights import WeightArray
from ostinato.model.load import build, empty_model, load_model, put_weights, weights_of
from ostinato.model.tensors import check_finite
from ostinato.testing.tiny import tiny_model

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tensors") / "tiny")


def copied(weights):
    return {name: WeightArray(a.dtype, a.shape, a.data.copy()) for name, a in weights.items()}


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip_keeps_every_bit(tmp_path, dtype):
    path = tiny_model(tmp_path / "m", dtype=dtype, seed=3)
    model = load_model(path, DTYPES[dtype])
    weights = copied(weights_of(model))
    other = empty_model(path, DTYPES[dtype])
    put_weights(other, weights)
    back = weights_of(other)
    assert list(back) == list(weights)
    assert all(back[n].dtype == weights[n].dtype and back[n].shape == weights[n].shape for n in back)
    assert all(np.array_equal(back[n].data, weights[n].data) for n in back)
    assert sum(a.data.nbytes for a in back.values()) == sum(p.numel() * p.element_size() for p in model.parameters())


def test_built_model_gives_the_same_logits_and_shares_no_memory(tiny):
    model = load_model(tiny, torch.float32)
    weights = weights_of(model)
    other = build(tiny)(weights)
    assert not other.training
    assert not any(p.requires_grad for p in other.parameters())
    with torch.no_grad():
        next(model.parameters()).zero_()
    assert np.count_nonzero(weights_of(other)["model.embed_tokens.weight"].data) > 0


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_a_wider_model_takes_narrower_weights_to_the_bit_and_never_the_other_way(tiny, stored):
    kind = getattr(torch, stored)
    narrow = {}
    for name, array in weights_of(load_model(tiny, torch.float32)).items():
        values = torch.from_numpy(array.data.copy()).view(torch.float32).to(kind)
        code = {"bfloat16": "BF16", "float16": "F16"}[stored]
        narrow[name] = WeightArray(code, array.shape, values.view(torch.uint8).numpy())
    model = build(tiny, torch.float32)(narrow)
    assert model.dtype is torch.float32
    for name, tensor in model.state_dict().items():
        if name in narrow:
            assert torch.equal(tensor.reshape(-1), torch.from_numpy(narrow[name].data).view(kind).float())
    with pytest.raises(BadWeights, match="has dtype F32; the model's is"):
        build(tiny, kind)(weights_of(load_model(tiny, torch.float32)))


def test_tied_tensors_are_counted_once_and_stay_tied(tiny, tmp_path):
    tied = build(tiny)(weights_of(load_model(tiny, torch.float32)))
    assert "lm_head.weight" not in weights_of(tied)
    assert tied.get_output_embeddings().weight is tied.get_input_embeddings().weight
    untied = load_model(tiny_model(tmp_path / "untied", tied=False), torch.float32)
    assert "lm_head.weight" in weights_of(untied)


def test_views_are_read_only_and_not_copies(tiny):
    model = load_model(tiny, torch.float32)
    array = weights_of(model)["model.norm.weight"]
    with pytest.raises(ValueError, match="read-only"):
        array.data[0] = 1
    with torch.no_grad():
        model.model.norm.weight.fill_(7.0)
    assert array.data.view(np.float32)[0] == 7.0


@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bad_value_is_refused_by_name_and_changes_nothing(tmp_path, dtype, value):
    model = load_model(tiny_model(tmp_path / "m", dtype=dtype), DTYPES[dtype])
    before = copied(weights_of(model))
    bad = dict(before)
    name = "model.layers.1.mlp.up_proj.weight"
    tensor = torch.from_numpy(before[name].data.copy()).view(DTYPES[dtype])
    tensor[17] = value
    bad[name] = WeightArray(before[name].dtype, before[name].shape, tensor.view(torch.uint8).numpy())
    bad["model.embed_tokens.weight"] = WeightArray(
        before[name].dtype,
        before["model.embed_tokens.weight"].shape,
        np.zeros_like(before["model.embed_tokens.weight"].data),
    )
    with pytest.raises(BadWeights, match=r"layers\.1\.mlp\.up_proj.*NaN or infinity"):
        put_weights(model, bad)
    assert all(np.array_equal(weights_of(model)[n].data, before[n].data) for n in before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_finite_check_agrees_with_torch_on_every_exponent(dtype):
    name = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}[dtype]
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    values = patterns.view(dtype) if dtype != torch.float32 else (patterns.to(torch.int32) << 16).view(dtype)
    refused = []
    for value in values[::7]:
        array = WeightArray(name, (2,), torch.stack([torch.zeros((), dtype=dtype), value]).view(torch.uint8).numpy())
        try:
            check_finite({"w": array})
        except BadWeights:
            refused.append(True)
        else:
            refused.append(False)
    assert refused == (~torch.isfinite(values[::7])).tolist()


def test_misfits_are_named(tiny):
    model = load_model(tiny, torch.float32)
    good = weights_of(model)
    norm = good["model.norm.weight"]
    without = {name: array for name, array in good.items() if name != "model.norm.weight"}
    with pytest.raises(BadWeights, match=r"missing model\.norm\.weight"):
        put_weights(model, without)
    with pytest.raises(BadWeights, match="extra surprise"):
        put_weights(model, {**good, "surprise": norm})
    with pytest.raises(BadWeights, match=r"model\.norm\.weight.*shape"):
        put_weights(model, {**good, "model.norm.weight": WeightArray("F32", (32,), norm.data[:128])})
    with pytest.raises(BadWeights, match=r"model\.norm\.weight.*dtype F64"):
        put_weights(model, {**good, "model.norm.weight": WeightArray("F64", norm.shape, norm.data[:128])})
    with pytest.raises(BadWeights, match=r"model\.norm\.weight.*bytes"):
        put_weights(model, {**good, "model.norm.weight": WeightArray("F32", norm.shape, norm.data[:-4])})
    with pytest.raises(BadWeights, match="no tensor"):
        build(tiny)({})
