"""Fused layers keep every bit of the library's, for every architecture that they take; the others stay as they are."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from transformers import Gemma3TextConfig, LlamaConfig, Ministral3Config, Qwen3Config

from ostinato.engine.embedded import fused
from ostinato.engine.embedded.form import prepack
from ostinato.engine.embedded.fused import FusedLayer, fuse
from ostinato.model.attention import hidden, logits
from ostinato.model.linear import replace_by_panels
from ostinato.model.load import load_model
from ostinato.model.norms import RMSNorm
from ostinato.model.paged import WholeAttend
from ostinato.model.selftest import bits_of, check_exact
from ostinato.testing.tiny import SUPPORTED, tiny_of

SHAPE = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
FUSED = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "bias": lambda: LlamaConfig(**SHAPE, attention_bias=True),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=64),
    "sandwich of norms": lambda: Gemma3TextConfig(
        **SHAPE, head_dim=16, sliding_window=16, layer_types=["sliding_attention", "full_attention"]
    ),
    "odd heads": lambda: LlamaConfig(**(SHAPE | {"num_attention_heads": 8, "head_dim": 12, "num_key_value_heads": 4})),
}


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(fused, "_known", {})


@torch.inference_mode()
def answer(model, count, first=0):
    ids = torch.randint(260, (count,), generator=torch.Generator().manual_seed(count))
    states = hidden(model, ids, torch.arange(first, first + count), WholeAttend([count]))
    return bits_of(logits(model, states))


def layers_of(model):
    return [type(layer) is FusedLayer for layer in model.base_model.layers]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", FUSED)
def test_a_fused_model_gives_the_same_bits(tmp_path, kind, dtype):
    path = tiny_of(tmp_path / "m", FUSED[kind]())
    plain, engine = load_model(path, dtype), load_model(path, dtype)
    assert fuse(engine) == 2 * 7
    assert replace_by_panels(engine) == 1
    assert layers_of(engine) == [True, True]
    for count in (1, 4, 7, 33, 100):
        assert torch.equal(answer(engine, count), answer(plain, count)), count


@pytest.mark.parametrize("kind", ["llama", "qwen3", "sandwich of norms"])
def test_a_pass_of_the_trainer_has_the_bits_of_the_fused_engine(tmp_path, kind):
    """One pass under autograd, against the fused form cut up with a cache in company: `check_exact` raises on any difference."""
    model = load_model(tiny_of(tmp_path / "m", FUSED[kind]()), torch.float32)
    seen = []

    def pack(part):
        seen.append(fuse(part) + replace_by_panels(part))

    check_exact(model, pack=pack)
    assert seen == [2 * 7 + 1]


@pytest.mark.parametrize("kind", SUPPORTED)
def test_every_supported_architecture_keeps_its_bits_fused_or_not(tmp_path, kind):
    path = tiny_of(tmp_path / "m", SUPPORTED[kind]())
    plain, engine = load_model(path, torch.float32), load_model(path, torch.float32)
    fuse(engine)
    for count in (1, 9, 40):
        assert torch.equal(answer(engine, count), answer(plain, count)), count


def test_a_trial_for_which_memory_was_short_is_made_again(tmp_path, monkeypatch):
    path = tiny_of(tmp_path / "m", FUSED["llama"]())

    def short(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")

    with monkeypatch.context() as patched:
        patched.setattr(fused, "FusedLayer", short)
        assert fuse(load_model(path, torch.float32)) == 0
    assert fuse(load_model(path, torch.float32)) == 2 * 7


def planted(model, kind):
    """The first layer becomes one of this class, a subclass of its own."""
    first = model.base_model.layers[0]
    first.__class__ = kind(type(first))
    return model


@pytest.mark.parametrize("late", [4088, 8191], ids=["where it was first trained up to", "at its end"])
def test_a_layer_that_computes_something_else_at_far_positions_stays_as_it_is(tmp_path, late):
    """Planted: from some position on the layer says half. What changes at neither place could not be known before."""

    def half_late(kind):
        class Late(kind):
            def forward(self, hidden_states, *, position_ids, **options):
                y = super().forward(hidden_states, position_ids=position_ids, **options)
                return torch.where(position_ids[..., None] >= late, hidden_states + (y - hidden_states) * 0.5, y)

        return Late

    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 4096}
    path = tiny_of(tmp_path / "m", LlamaConfig(**SHAPE, max_position_embeddings=8192, rope_parameters=rope))
    model = planted(load_model(path, torch.float32), half_late)
    want = answer(model, 9, late - 4)
    assert fuse(model) == 0
    assert torch.equal(answer(model, 9, late - 4), want)
    fused._known.clear()
    assert fuse(load_model(path, torch.float32)) == 2 * 7


def test_queries_that_are_scaled_from_some_length_on_keep_their_scale(tmp_path):
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
        "llama_4_scaling_beta": 0.1,
    }
    config = Ministral3Config(**SHAPE, head_dim=16, max_position_embeddings=16384, rope_parameters=rope)
    path = tiny_of(tmp_path / "m", config)
    plain, engine = load_model(path, torch.float32), load_model(path, torch.float32)
    fuse(engine)
    for first in (0, 4090, 8190, 16384 - 9):
        assert torch.equal(answer(engine, 9, first), answer(plain, 9, first)), first


def test_a_layer_that_computes_something_else_stays_as_it_is_and_it_is_said(tmp_path, caplog):
    """Planted: the same parts, but what the feed-forward layer says counts half."""

    def half(kind):
        class Half(kind):
            def forward(self, hidden_states, **options):
                return hidden_states + (super().forward(hidden_states, **options) - hidden_states) * 0.5

        return Half

    model = planted(load_model(tiny_of(tmp_path / "m", FUSED["llama"]()), torch.float32), half)
    want = answer(model, 9)
    assert fuse(model) == 0
    assert layers_of(model) == [False, False]
    assert torch.equal(answer(model, 9), want)
    assert "LlamaForCausalLM is not fused" in caplog.text


def test_models_are_compared_at_one_thread_whatever_the_caller_has(tmp_path, monkeypatch):
    """And in as few passes as it takes: each run of tokens once as the model was and once fused."""
    seen = []

    def watched(*args, **named):
        seen.append(torch.get_num_threads())
        return hidden(*args, **named)

    monkeypatch.setattr(fused, "hidden", watched)
    model = load_model(tiny_of(tmp_path / "m", FUSED["llama"]()), torch.float32)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert fuse(model) == 2 * 7
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == [1] * 2 * len(fused.runs_of(model.config))


def test_weights_of_zeros_prove_nothing(tmp_path):
    path = tiny_of(tmp_path / "m", FUSED["llama"]())
    model = load_model(path, torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert fuse(model) == 0
    assert fuse(load_model(path, torch.float32)) == 2 * 7


def test_what_was_found_once_is_not_tried_again(tmp_path, monkeypatch):
    path = tiny_of(tmp_path / "m", FUSED["llama"]())
    assert fuse(load_model(path, torch.float32)) == 2 * 7
    monkeypatch.setattr(fused, "_try", None)
    again = load_model(path, torch.float32)
    assert fuse(again) == 2 * 7
    monkeypatch.undo()
    assert torch.equal(answer(again, 9), answer(load_model(path, torch.float32), 9))


def test_what_is_the_same_for_every_layer_is_made_once(tmp_path, monkeypatch):
    """The terms of norms when a layer is made, the arrays of a pass's rotations in its first layer."""
    model = load_model(tiny_of(tmp_path / "m", Qwen3Config(**SHAPE, head_dim=16)), torch.float32)
    assert fuse(model) == 2 * 7
    made, real = [], fused.array

    def counted(x):
        made.append(tuple(x.shape))
        return real(x)

    monkeypatch.setattr(fused, "array", counted)
    want = answer(model, 9)
    assert made.count((9, 16)) == 2  # cosines and sines
    assert not [shape for shape in made if len(shape) == 1]
    assert torch.equal(answer(model, 9), want)


def test_lanes_of_one_model_rotate_by_their_own_positions(tmp_path):
    """Two passes side by side, as far apart as they can be: neither sees the other's cosines."""
    path = tiny_of(tmp_path / "m", FUSED["llama"]())
    plain, engine = load_model(path, torch.float32), load_model(path, torch.float32)
    fuse(engine)
    firsts = [0, 700] * 10
    with ThreadPoolExecutor(2) as lanes:
        found = list(lanes.map(lambda first: answer(engine, 9, first), firsts))
    for first, bits in zip(firsts, found, strict=True):
        assert torch.equal(bits, answer(plain, 9, first)), first


def test_a_fused_layer_reads_the_norms_own_memory(tmp_path):
    path = tiny_of(tmp_path / "m", FUSED["qwen3"]())
    plain, engine = load_model(path, torch.float32), load_model(path, torch.float32)
    fuse(engine)
    for model in (plain, engine):
        for module in model.modules():
            if isinstance(module, RMSNorm):
                module.weight.mul_(0.5)
    assert torch.equal(answer(engine, 9), answer(plain, 9))


def test_a_part_of_a_model_is_packed_only():
    assert prepack(nn.Sequential(nn.Linear(32, 48))) == 1
