"""Tiny random models with a byte-level tokenizer: complete model directories, written in well under a second without a network.

`tiny_model` writes a Llama, `tiny_moe` the mixtures of experts whose routing must be exact, `tiny_of` the other supported architectures,
and some that must be refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.utils import logging as library_logging

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
"""Control tokens, ids 256 to 259. Ids 0 to 255 are single bytes in the order of the byte-level alphabet."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_model(
    path: Path,
    *,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    context: int = 512,
    dtype: Literal["float32", "bfloat16"] = "float32",
    tied: bool = True,
) -> Path:
    """Write a model directory (safetensors, config, tokenizer, ChatML template) and return its path.

    The same arguments give the same bytes. The weights are random: the model's answers make no sense, but all code that loads, serves,
    trains or publishes a model works on it. Example: ``tiny_model(tmp_path / "tiny", seed=1)``.
    """
    own = (("intermediate_size", 2 * hidden), ("tie_word_embeddings", tied))
    return _write_files(path, _files("Llama", seed, dtype, hidden, layers, heads, kv_heads, context, own))


def _write_files(path: Path, files: Mapping[str, bytes]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (path / name).write_bytes(data)
    return path


@lru_cache(maxsize=32)  # tests write the same few models repeatedly
def _files(
    kind: str,
    seed: int,
    dtype: Literal["float32", "bfloat16"],
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    context: int,
    own: tuple[tuple[str, int], ...],
) -> Mapping[str, bytes]:
    """Return a model directory's files by name. `kind`: transformers' name of the architecture; `own`: its architecture's own settings."""
    library_logging.disable_progress_bar()
    make_config, make_model = getattr(transformers, f"{kind}Config"), getattr(transformers, f"{kind}ForCausalLM")
    config = make_config(
        vocab_size=256 + len(SPECIALS),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        bos_token_id=257,
        eos_token_id=258,
        pad_token_id=259,
        initializer_range=0.1,  # large enough that logits depend on positions and neighbours, and routers prefer some experts
        **dict(own),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make_model(config)
    return files_of(model.bfloat16() if dtype == "bfloat16" else model, byte_tokenizer(context))


def files_of(*parts: transformers.PreTrainedModel | transformers.PreTrainedTokenizerFast) -> Mapping[str, bytes]:
    """Return the files that `save_pretrained` of a model and a tokenizer writes, by name."""
    with TemporaryDirectory() as directory:
        for part in parts:
            part.save_pretrained(directory)
        return {file.name: file.read_bytes() for file in Path(directory).iterdir()}


def byte_tokenizer(context: int = 512) -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer with one token per UTF-8 byte and the four control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        unk_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


# ---------------------------------------------------------------- mixtures of experts


Kind = Literal["qwen3_moe", "olmoe", "mixtral"]
_MIXTURES = {
    "qwen3_moe": ("Qwen3Moe", "moe_intermediate_size", "num_experts"),
    "olmoe": ("Olmoe", "intermediate_size", "num_experts"),
    "mixtral": ("Mixtral", "intermediate_size", "num_local_experts"),
}
"""transformers' name of each architecture, and its names of the settings for the experts' width and number."""


def tiny_moe(
    path: Path,
    kind: Kind = "qwen3_moe",
    *,
    seed: int = 0,
    hidden: int = 64,
    intermediate: int = 32,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    experts: int = 8,
    top_k: int = 3,
    context: int = 512,
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> Path:
    """Write a model directory (safetensors, config, byte tokenizer, ChatML template) and return its path.

    `intermediate` is the width of one expert. The same arguments give the same bytes.
    Example: ``tiny_moe(tmp_path / "moe", "olmoe", experts=16, top_k=4)``.
    """
    name, width, count = _MIXTURES[kind]
    own = [(width, intermediate), (count, experts), ("num_experts_per_tok", top_k)]
    own += [("norm_topk_prob", True)] if kind == "qwen3_moe" else []
    return _write_files(path, _files(name, seed, dtype, hidden, layers, heads, kv_heads, context, tuple(own)))


# ---------------------------------------------------------------- other architectures


WINDOW = 8
"""Positions to which a token of a sliding-window layer attends."""

_COMMON: dict[str, Any] = {
    "vocab_size": 256 + len(SPECIALS),
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # large enough that neighbours and positions matter to the logits
    "bos_token_id": 257,
    "eos_token_id": 258,
    "pad_token_id": 259,
}
_DENSE: dict[str, Any] = {**_COMMON, "intermediate_size": 48}
_WIDE_HEADS: dict[str, Any] = {**_DENSE, "head_dim": 16}  # not hidden_size / heads
_EXPERTS: dict[str, Any] = {**_COMMON, "num_experts": 8, "num_experts_per_tok": 3}
_LATENT: dict[str, Any] = {**_COMMON, "num_key_value_heads": 4}
_LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
_ROPE = {"rope_theta": 10000.0}
_SHORT: dict[str, Any] = {**_WIDE_HEADS, "max_position_embeddings": 96}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 24,
    "max_position_embeddings": 96,
    "llama_4_scaling_beta": 0.5,
}


def _gemma3(**changes: Any) -> transformers.Gemma3TextConfig:
    return transformers.Gemma3TextConfig(
        **_WIDE_HEADS, sliding_window=WINDOW, layer_types=list(_LAYER_TYPES), query_pre_attn_scalar=24, **changes
    )


SUPPORTED: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**_WIDE_HEADS),
    "llama-tied-bias": lambda: transformers.LlamaConfig(
        **_DENSE, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "qwen2": lambda: transformers.Qwen2Config(**_DENSE),
    "qwen2-window": lambda: transformers.Qwen2Config(
        **_DENSE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**_WIDE_HEADS),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **_EXPERTS, intermediate_size=48, moe_intermediate_size=16, norm_topk_prob=True, mlp_only_layers=[1]
    ),
    "olmoe": lambda: transformers.OlmoeConfig(**_EXPERTS, intermediate_size=16),
    "gemma3": _gemma3,
    "mistral": lambda: transformers.MistralConfig(**_WIDE_HEADS, sliding_window=WINDOW),
    "ministral3": lambda: transformers.Ministral3Config(**_SHORT, rope_parameters=_ROPE | _YARN),
    "granite": lambda: transformers.GraniteConfig(**_DENSE, logits_scaling=0.7),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=256 + len(SPECIALS), n_embd=32, n_layer=3, n_head=4, n_positions=128, initializer_range=0.2
    ),
}
"""Architectures that our attention function supports. Qwen3-MoE has a dense layer among its sparse ones, Ministral 3 scales its queries
from position 24 on, Granite divides its logits."""

_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "factor": 2.0,
    "original_max_position_embeddings": 64,
}

REFUSED: dict[str, tuple[Callable[[], transformers.PreTrainedConfig], str]] = {
    "capped scores": (
        lambda: transformers.Gemma2Config(**_WIDE_HEADS, sliding_window=WINDOW),
        "caps its attention scores",
    ),
    "capped logits": (lambda: _gemma3(final_logit_softcapping=1.0), "changes its logits"),
    "both directions": (lambda: _gemma3(use_bidirectional_attention=True), "see those after them"),
    "latent attention": (
        lambda: transformers.DeepseekV3Config(
            **_LATENT,
            intermediate_size=48,
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=16,
            first_k_dense_replace=3,
        ),
        "24 wide for keys and 16 for values",
    ),
    "dynamic frequencies": (
        lambda: transformers.LlamaConfig(**_DENSE, rope_parameters=_ROPE | {"rope_type": "dynamic", "factor": 2.0}),
        "length of what is computed beside it",
    ),
    "frequencies of two lengths": (
        lambda: transformers.LlamaConfig(**_DENSE, rope_parameters=_ROPE | _LONGROPE),
        "length of what is computed beside it",
    ),
    "recurrent": (
        lambda: transformers.MambaConfig(
            vocab_size=256 + len(SPECIALS), hidden_size=32, num_hidden_layers=2, state_size=4
        ),
        "linear_attention",
    ),
}
"""Architectures that our attention function cannot express, each with a part of the error message."""


def tiny_of(path: Path, config: transformers.PreTrainedConfig, *, seed: int = 0) -> Path:
    """Write a random fp32 model of this configuration with a byte tokenizer, and return its path.

    Norms and biases, which transformers initialises to 1 and 0, are randomised too.
    Example: ``tiny_of(tmp_path / "m", SUPPORTED["gemma3"]())``.
    """
    library_logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path
