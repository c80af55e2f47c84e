import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from ostinato.core.errors import BadConfig
from ostinato.model.attention import CausalAttend, hidden, logits
from ostinato.model.load import load_model
from ostinato.testing.tiny import byte_tokenizer, tiny_model

SMALL = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": None,
}
LENGTHS = [5, 1, 9]


def random_model(path, config):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


CONFIGS = {
    "llama": lambda: LlamaConfig(**SMALL),
    "llama-tied-bias": lambda: LlamaConfig(**SMALL, attention_bias=True, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**{k: v for k, v in SMALL.items() if k != "head_dim"}),
    "qwen3": lambda: Qwen3Config(**SMALL),
    "mistral-wide-window": lambda: MistralConfig(**SMALL, sliding_window=64),
    "gemma3-wide-window": lambda: Gemma3TextConfig(**SMALL, sliding_window=64),
    "mistral-narrow-window": lambda: MistralConfig(**SMALL, sliding_window=4),
    "gemma3-narrow-window": lambda: Gemma3TextConfig(**SMALL, sliding_window=4),
}


def batch():
    torch.manual_seed(1)
    ids = torch.randint(0, 260, (sum(LENGTHS),))
    return ids, torch.cat([torch.arange(n) for n in LENGTHS])


@pytest.mark.parametrize("kind", CONFIGS)
def test_hidden_is_the_library_s_own_forward(tmp_path, kind):
    path = random_model(tmp_path / kind, CONFIGS[kind]())
    ours = load_model(path, torch.float32)
    ids, positions = batch()
    with torch.inference_mode():
        got = logits(ours, hidden(ours, ids, positions, CausalAttend(LENGTHS)))
    for implementation in ("eager", "sdpa"):
        stock = AutoModelForCausalLM.from_pretrained(path, attn_implementation=implementation).eval()
        with torch.inference_mode():
            want = torch.cat([stock(part[None]).logits[0] for part in ids.split(LENGTHS)])
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
        assert want.std() > 0.1  # else anything would be close


def test_sequences_do_not_see_each_other(tmp_path):
    model = load_model(tiny_model(tmp_path / "m"), torch.float32)
    ids, positions = batch()
    with torch.inference_mode():
        one = hidden(model, ids, positions, CausalAttend(LENGTHS))
        ids[:5] = 7
        two = hidden(model, ids, positions, CausalAttend(LENGTHS))
    assert torch.equal(one[5:], two[5:])
    assert not torch.equal(one[:5], two[:5])


@pytest.mark.parametrize("kind", CONFIGS)
def test_gradients_reach_every_parameter_and_equal_the_library_s(tmp_path, kind):
    path = random_model(tmp_path / kind, CONFIGS[kind]())
    ids, positions = batch()
    ours = load_model(path, torch.float32, train=True)
    assert ours.training
    logits(ours, hidden(ours, ids, positions, CausalAttend(LENGTHS))).logsumexp(-1).sum().backward()
    stock = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").train()
    sum(stock(part[None]).logits.logsumexp(-1).sum() for part in ids.split(LENGTHS)).backward()
    for (name, got), want in zip(ours.named_parameters(), stock.parameters(), strict=True):
        assert got.grad is not None, name
        assert got.grad.abs().sum() > 0, name
        torch.testing.assert_close(
            got.grad, want.grad, rtol=2e-3, atol=2e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_attend_is_called_once_per_layer_with_flat_shapes(tmp_path):
    model = load_model(tiny_model(tmp_path / "m", layers=3), torch.bfloat16)
    calls = []

    def attend(layer, q, k, v, scale, window):
        calls.append((layer, tuple(q.shape), tuple(k.shape), tuple(v.shape), scale, q.dtype))
        return q

    out = hidden(model, torch.arange(6), torch.arange(6), attend)
    assert out.shape == (6, 64)
    assert calls == [(i, (6, 4, 16), (6, 2, 16), (6, 2, 16), 0.25, torch.bfloat16) for i in range(3)]


def test_a_stock_call_says_what_to_do_instead(tmp_path):
    model = load_model(tiny_model(tmp_path / "m"), torch.float32)
    with pytest.raises(BadConfig, match=r"attention\.hidden"):
        model(torch.arange(4)[None])
    assert model.config.use_cache is False


REFUSED = {
    "capped scores": (lambda: Gemma2Config(**SMALL, sliding_window=64), "caps its attention"),
    "capped logits": (
        lambda: Gemma3TextConfig(**SMALL, sliding_window=64, final_logit_softcapping=1.0),
        "changes its logits",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_attend_otherwise_are_refused_at_load(tmp_path, kind):
    make, why = REFUSED[kind]
    path = random_model(tmp_path / "m", make())
    with pytest.raises(BadConfig, match=why):
        load_model(path, torch.float32)


def test_learned_positions_work_too(tmp_path):
    config = GPT2Config(vocab_size=260, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2)
    path = random_model(tmp_path / "gpt2", config)
    ours, stock = load_model(path, torch.float32), AutoModelForCausalLM.from_pretrained(path).eval()
    ids, positions = batch()
    with torch.inference_mode():
        got = logits(ours, hidden(ours, ids, positions, CausalAttend(LENGTHS)))
        want = torch.cat([stock(part[None]).logits[0] for part in ids.split(LENGTHS)])
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
