"""All layers in one call keep every bit of the library's; a model for which that does not hold stays as it is."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import GemmaConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from ostinato.engine.embedded import condensed, fused
from ostinato.engine.embedded.condensed import condense, is_condensed
from ostinato.engine.embedded.form import prepack
from ostinato.model.attention import CausalAttend, hidden, logits
from ostinato.model.cpu import team
from ostinato.model.linear import PanelLinear
from ostinato.model.load import load_model
from ostinato.model.paged import WholeAttend
from ostinato.model.selftest import bits_of, check_exact
from ostinato.testing.tiny import SUPPORTED, tiny_of

SHAPE = {
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
KINDS = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "bias": lambda: LlamaConfig(**SHAPE, attention_bias=True),
    "bias of some": lambda: Qwen2Config(**SHAPE),
    "norms of heads": lambda: Qwen3Config(**SHAPE, head_dim=64),
    "window": lambda: MistralConfig(**SHAPE, sliding_window=16),
    "gelu": lambda: LlamaConfig(**SHAPE, hidden_act="gelu_pytorch_tanh"),
    "zero-centred norms": lambda: GemmaConfig(**(SHAPE | {"intermediate_size": 48}), head_dim=16),
    "wide": lambda: LlamaConfig(
        **(SHAPE | {"hidden_size": 160, "intermediate_size": 1120, "num_attention_heads": 10, "vocab_size": 260})
    ),
}


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(fused, "_known", {})


@torch.inference_mode()
def answer(model, count, first=0, attend=WholeAttend):
    ids = torch.randint(256, (count,), generator=torch.Generator().manual_seed(count))
    states = hidden(model, ids, torch.arange(first, first + count), attend([count]))
    return bits_of(logits(model, states))


def moved(model):
    """Norms and biases that say something: they are made of ones and zeros."""
    source = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=source) * 0.2)
    return model


@pytest.mark.parametrize(("kind", "dtype"), [*((kind, torch.bfloat16) for kind in KINDS), ("wide", torch.float32)])
def test_all_layers_in_one_call_give_the_same_bits(tmp_path, kind, dtype):
    path = tiny_of(tmp_path / "m", KINDS[kind]())
    plain, engine = (moved(load_model(path, dtype)) for _ in range(2))
    assert prepack(engine) == 2 * 7 + 1
    assert is_condensed(engine)
    assert isinstance(engine.get_output_embeddings(), PanelLinear)
    for count in (1, 4, 7, 33, 100, 230):
        want = answer(plain, count)
        for threads in (1, 2, 3):
            with team(threads):
                assert torch.equal(answer(engine, count), want), (count, threads)
    assert torch.equal(answer(engine, 9, attend=CausalAttend), answer(plain, 9, attend=CausalAttend))


@pytest.mark.parametrize("kind", ["llama", "norms of heads", "zero-centred norms", "wide"])
def test_a_pass_of_the_trainer_has_the_bits_of_the_condensed_engine(tmp_path, kind):
    """One pass under autograd, against all layers in one call with a cache in company: `check_exact` raises on any difference."""
    model = moved(load_model(tiny_of(tmp_path / "m", KINDS[kind]()), torch.bfloat16))
    check_exact(model, pack=prepack)
    assert all(fused._known.values()), "condensed, not fused"


@pytest.mark.parametrize("kind", SUPPORTED)
def test_every_supported_architecture_keeps_its_bits_in_bf16(tmp_path, kind):
    path = tiny_of(tmp_path / "m", SUPPORTED[kind]())
    plain, engine = load_model(path, torch.bfloat16), load_model(path, torch.bfloat16)
    prepack(engine)
    for count in (32, 96):
        assert torch.equal(answer(engine, count), answer(plain, count)), count


def test_a_condensed_model_is_not_copied_whose_copy_would_compute_with_the_first_ones_weights(tmp_path):
    engine = load_model(tiny_of(tmp_path / "m", KINDS["llama"]()), torch.bfloat16)
    prepack(engine)
    with pytest.raises(TypeError, match="condense the copy"):
        copy.deepcopy(engine)


def half(model):
    """Planted: the same parts, but what the first feed-forward layer says counts half."""
    first = model.base_model.layers[0]

    class Half(type(first)):
        def forward(self, hidden_states, **options):
            return hidden_states + (super().forward(hidden_states, **options) - hidden_states) * 0.5

    first.__class__ = Half
    return model


def test_layers_that_compute_something_else_stay_as_they_are_and_it_is_said(tmp_path, caplog):
    model = half(load_model(tiny_of(tmp_path / "m", KINDS["llama"]()), torch.bfloat16))
    want = answer(model, 9)
    assert condense(model) == 0
    assert not is_condensed(model)
    assert torch.equal(answer(model, 9), want)
    assert "LlamaForCausalLM is not condensed" in caplog.text


@pytest.mark.parametrize("far", [0, 5000])
def test_passes_side_by_side_keep_apart(tmp_path, far, monkeypatch):
    """Each with its own positions, and with rotations that are not kept beyond some length."""
    monkeypatch.setattr(condensed, "_TABLE", 4096)
    path = tiny_of(tmp_path / "m", LlamaConfig(**SHAPE, max_position_embeddings=8192))
    plain, engine = load_model(path, torch.bfloat16), load_model(path, torch.bfloat16)
    assert prepack(engine) == 2 * 7 + 1
    firsts = [far, far + 700] * 10
    with ThreadPoolExecutor(2) as lanes:
        found = list(lanes.map(lambda first: answer(engine, 9, first), firsts))
    for first, bits in zip(firsts, found, strict=True):
        assert torch.equal(bits, answer(plain, 9, first)), first


def test_weights_of_zeros_prove_nothing(tmp_path):
    path = tiny_of(tmp_path / "m", KINDS["llama"]())
    model = load_model(path, torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert condense(model) == 0
    assert condense(load_model(path, torch.bfloat16)) == 2 * 7


def test_a_form_that_an_earlier_process_has_tried_is_not_tried_again(tmp_path, monkeypatch):
    path = tiny_of(tmp_path / "m", KINDS["llama"]())
    plain, kept, trials = load_model(path, torch.bfloat16), {}, []

    def keep(form, configuration, dtype, trial):
        if (form, configuration, dtype) not in kept:
            trials.append(form)
            kept[form, configuration, dtype] = trial()
        return kept[form, configuration, dtype]

    for _ in range(2):
        model = load_model(path, torch.bfloat16)
        assert prepack(model, keep=keep) == 2 * 7 + 1
        assert is_condensed(model)
        assert torch.equal(answer(model, 9), answer(plain, 9))
        monkeypatch.setattr(fused, "_known", {})  # as in another process
        monkeypatch.setattr(fused, "final_states", lambda *_: pytest.fail("it was tried"))
    assert trials == ["condensed"]


def test_a_form_that_does_not_fit_is_tried_once_in_each_process(tmp_path, monkeypatch, caplog):
    """And said in each: what kept it from fitting may have passed."""
    path, kept = tiny_of(tmp_path / "m", KINDS["llama"]()), []
    for said in (1, 2):
        for _ in range(2):
            model = half(load_model(path, torch.bfloat16))
            assert condense(model, keep=lambda *about: kept.append(about[-1]()) or kept[-1]) == 0
        assert caplog.text.count("is not condensed") == said
        monkeypatch.setattr(fused, "_known", {})  # as in another process
    assert not kept


def test_a_trial_for_which_memory_was_short_is_made_again(tmp_path, monkeypatch):
    path = tiny_of(tmp_path / "m", KINDS["llama"]())

    def short(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")

    with monkeypatch.context() as patched:
        patched.setattr(condensed, "CondensedBody", short)
        assert condense(load_model(path, torch.bfloat16)) == 0
    assert condense(load_model(path, torch.bfloat16)) == 2 * 7


@pytest.mark.parametrize("value", [0.0, float("nan"), 3e38])
def test_what_is_kept_about_weights_that_tell_nothing_is_nothing(tmp_path, value):
    model = load_model(tiny_of(tmp_path / "m", KINDS["llama"]()), torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    kept = []
    assert condense(model, keep=lambda *about: kept.append(about[-1]()) or kept[-1]) == 0
    assert not kept
    assert not fused._known


def test_widths_that_panels_of_gates_do_not_fill_are_left_to_others(tmp_path):
    odd = load_model(tiny_of(tmp_path / "odd", LlamaConfig(**(SHAPE | {"intermediate_size": 100}))), torch.bfloat16)
    want = answer(odd, 9)
    prepack(odd)
    assert not is_condensed(odd)
    assert torch.equal(answer(odd, 9), want)
