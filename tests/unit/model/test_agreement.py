"""An architecture that would be computed otherwise than the library does is refused before its weights are read."""

import json
import os
import re

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DogeConfig,
    FalconConfig,
    GPTJConfig,
    LlamaConfig,
    MistralConfig,
    MptConfig,
    NemotronConfig,
    PhimoeConfig,
    Qwen3Config,
    StableLmConfig,
)

from ostinato.core.errors import BadConfig
from ostinato.model import load
from ostinato.model.load import WINDOW, cut, depth_of, empty_model, load_model, miniatures
from ostinato.testing.tiny import tiny_model, tiny_of

SMALL = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 257,
    "eos_token_id": 258,
    "pad_token_id": 259,
}
EXPERTS = {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}
OWN_ATTENTION = "attend by code of their own"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, as on a new machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(load, "_PASSED", set())
    return tmp_path / "cache" / "ostinato" / "architectures"


REFUSED = {
    "phimoe": (lambda: PhimoeConfig(**EXPERTS, sliding_window=WINDOW), f"from token {WINDOW + 1} of a sequence on"),
    "phimoe-wide": (lambda: PhimoeConfig(**EXPERTS, sliding_window=100), f"from token {WINDOW + 1} of a sequence on"),
    "doge": (lambda: DogeConfig(**SMALL, sliding_window=WINDOW), "gives other logits"),
    "falcon": (lambda: FalconConfig(**SMALL), OWN_ATTENTION),
    "gptj": (lambda: GPTJConfig(vocab_size=260, n_embd=32, n_layer=1, n_head=4, rotary_dim=8), OWN_ATTENTION),
    "mpt": (lambda: MptConfig(vocab_size=260, d_model=32, n_heads=4, n_layers=1), "NoneType"),
    "nemotron": (lambda: NemotronConfig(**SMALL, head_dim=8), OWN_ATTENTION),
    "stablelm": (lambda: StableLmConfig(**SMALL), OWN_ATTENTION),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_be_computed_otherwise_is_refused_by_name_in_one_line(tmp_path, kind):
    make, why = REFUSED[kind]
    path = tiny_of(tmp_path / "m", make())
    for use in (lambda: load_model(path, torch.float32), lambda: empty_model(path, torch.bfloat16)):
        with pytest.raises(BadConfig, match=why) as refusal:
            use()
        message = str(refusal.value)
        assert f"models of type '{kind.removesuffix('-wide')}' are not supported" in message
        assert "table of models" in message
        assert "\n" not in message


def test_a_window_that_no_sequence_outgrows_is_no_reason_to_refuse(tmp_path):
    for window in (None, SMALL["max_position_embeddings"]):
        load_model(tiny_of(tmp_path / str(window), PhimoeConfig(**EXPERTS, sliding_window=window)), torch.float32)


@pytest.mark.parametrize("layers", [3, 40])
def test_a_mechanism_in_one_layer_is_found(tmp_path, layers):
    """Only the last layer has the window, and our attention is made to ignore it."""
    kinds = ["full_attention"] * (layers - 1) + ["sliding_attention"]
    config = Qwen3Config(
        **SMALL | {"num_hidden_layers": layers}, use_sliding_window=True, sliding_window=50, layer_types=kinds
    )
    path = tmp_path / "m"
    config.save_pretrained(path)

    def blind(small):
        model = empty(small)
        for layer in model.model.layers:
            layer.self_attn.sliding_window = None
        return model

    with pytest.raises(BadConfig, match=f"from token {WINDOW + 1}"):
        load.check_agreement(path / "config.json", config, blind)
    load.check_agreement(path / "config.json", config, empty)


def empty(config):
    from ostinato.model.backend import OWN
    from ostinato.model.load import _empty

    return _empty(config, torch.float32, backend=OWN)


class Makes:
    """Counts how often a miniature was made."""

    def __init__(self):
        self.count = 0

    def __call__(self, config):
        self.count += 1
        return empty(config)


def checked(path, makes, **more):
    """The check in a new process."""
    load._PASSED.clear()
    load.check_agreement(path / "config.json", AutoConfig.from_pretrained(path), makes, **more)
    return makes.count


def test_what_agreed_is_kept_for_the_content_and_the_versions(tmp_path, cache, monkeypatch):
    path, makes = tiny_model(tmp_path / "m", layers=1), Makes()
    assert [checked(path, makes), checked(path, makes)] == [1, 1]
    assert len(list(cache.iterdir())) == 1
    assert checked(path, makes, kernels="torch") == 2
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "rms_norm_eps": 1e-5}))
    assert checked(path, makes) == 3
    monkeypatch.setattr(load, "__version__", "99")
    assert [checked(path, makes), checked(path, makes)] == [4, 4]


def test_a_refusal_is_not_kept(tmp_path, cache):
    path = tiny_of(tmp_path / "m", StableLmConfig(**SMALL))
    for _ in range(2):
        with pytest.raises(BadConfig, match="stablelm"):
            load_model(path, torch.float32)
    assert not cache.exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"agrees": false}', b"\xff\xfe"])
def test_a_damaged_file_of_the_cache_counts_for_nothing(tmp_path, cache, content):
    path, makes = tiny_model(tmp_path / "m", layers=1), Makes()
    checked(path, makes)
    (kept,) = cache.iterdir()
    kept.write_bytes(content)
    assert [checked(path, makes), checked(path, makes)] == [2, 2]


def test_a_link_a_pipe_or_another_users_file_is_not_believed(tmp_path, cache, monkeypatch):
    path, makes = tiny_model(tmp_path / "m", layers=1), Makes()
    checked(path, makes)
    (kept,) = cache.iterdir()
    kept.rename(tmp_path / "elsewhere.json")
    kept.symlink_to(tmp_path / "elsewhere.json")
    assert checked(path, makes) == 2
    kept.unlink()
    os.mkfifo(kept)
    assert [checked(path, makes), checked(path, makes)] == [3, 3]
    real = os.fstat

    def owned(descriptor):
        values = list(real(descriptor))
        values[4] = os.geteuid() + 1
        return os.stat_result(values)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", owned)
        assert checked(path, makes) == 4
    assert checked(path, makes) == 4


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, cache):
    path, makes = tiny_model(tmp_path / "m", layers=1), Makes()
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where the directory should be")
    assert [checked(path, makes), checked(path, makes)] == [1, 2]


def test_a_lack_of_memory_is_no_fault_of_the_architecture(tmp_path):
    path = tiny_model(tmp_path / "m", layers=1)

    def short(_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes")

    with pytest.raises(RuntimeError, match="allocate"):
        checked(path, short)


@pytest.mark.parametrize("config", [{"model_type": "qwen9"}, {"model_type": ""}, {}])
def test_an_unknown_architecture_is_named_with_what_it_may_need(tmp_path, config):
    path = tiny_model(tmp_path / "m", layers=1)
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadConfig, match=r"needs a newer transformers than \d+\.\S+, or is not supported") as refusal:
        load_model(path, torch.float32)
    assert repr(config.get("model_type", "")) in str(refusal.value)
    assert "could be because" not in str(refusal.value)


def test_a_model_that_writes_nothing_is_named(tmp_path):
    path = tiny_model(tmp_path / "m", layers=1)
    (path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(BadConfig, match="no causal language model of type 'vit'"):
        load_model(path, torch.float32)


def test_a_miniature_keeps_what_mechanisms_depend_on():
    large = LlamaConfig(hidden_size=4096, intermediate_size=11008, num_attention_heads=32, num_key_value_heads=8)
    small, *_, real = miniatures(large)
    assert (small.head_dim, small.num_attention_heads, small.num_key_value_heads) == (128, 4, 2)
    assert small.hidden_size == 4 * 128
    assert small.vocab_size < large.vocab_size
    assert (real.hidden_size, real.vocab_size) == (4096, large.vocab_size)
    assert large.hidden_size == 4096  # unchanged


def test_windows_are_narrow_in_every_miniature():
    for small in miniatures(MistralConfig(sliding_window=4096, max_position_embeddings=32768)):
        assert small.sliding_window == WINDOW
    for small in miniatures(MistralConfig(sliding_window=4096, max_position_embeddings=4096)):
        assert small.sliding_window == 4096


def test_layers_that_differ_in_a_switch_alone_are_different_kinds():
    config = AutoConfig.for_model("smollm3", **SMALL | {"num_hidden_layers": 8}, no_rope_layer_interval=4)
    with torch.device("meta"):
        assert depth_of(AutoModelForCausalLM.from_config(config)) == 4
    cut(config, 4)
    assert config.no_rope_layers == [1, 1, 1, 0]


def test_a_message_of_the_library_becomes_part_of_a_line():
    line = load._in_a_line(ValueError("first\n\n  second " + "x" * 500))
    assert re.fullmatch(r"ValueError: first second x+\.\.\.", line)
    assert len(line) < 160
