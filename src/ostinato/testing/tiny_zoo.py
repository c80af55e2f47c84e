"""Tiny random models of the supported architectures, and of some that must be refused: whole model directories."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MambaConfig,
    Ministral3Config,
    MistralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.utils import logging as library_logging

from ostinato.testing.tiny import SPECIALS, byte_tokenizer

WINDOW = 8
"""Positions that a token of a sliding-window layer sees."""

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
_WIDE: dict[str, Any] = {**_DENSE, "head_dim": 16}  # heads that are not hidden_size / heads
_EXPERTS: dict[str, Any] = {**_COMMON, "num_experts": 8, "num_experts_per_tok": 3}
_LATENT: dict[str, Any] = {**_COMMON, "num_key_value_heads": 4}
_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
_ROPE = {"rope_theta": 10000.0}
_SHORT: dict[str, Any] = {**_WIDE, "max_position_embeddings": 96}
_STRETCHED: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 24,
    "max_position_embeddings": 96,
    "llama_4_scaling_beta": 0.5,
}


def _gemma3(**changes: Any) -> Gemma3TextConfig:
    return Gemma3TextConfig(
        **_WIDE, sliding_window=WINDOW, layer_types=list(_KINDS), query_pre_attn_scalar=24, **changes
    )


SUPPORTED: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_WIDE),
    "llama-tied-bias": lambda: LlamaConfig(**_DENSE, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**_DENSE),
    "qwen2-window": lambda: Qwen2Config(**_DENSE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen3": lambda: Qwen3Config(**_WIDE),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **_EXPERTS, intermediate_size=48, moe_intermediate_size=16, norm_topk_prob=True, mlp_only_layers=[1]
    ),
    "olmoe": lambda: OlmoeConfig(**_EXPERTS, intermediate_size=16),
    "gemma3": _gemma3,
    "mistral": lambda: MistralConfig(**_WIDE, sliding_window=WINDOW),
    "ministral3": lambda: Ministral3Config(**_SHORT, rope_parameters=_ROPE | _STRETCHED),
    "granite": lambda: GraniteConfig(**_DENSE, logits_scaling=0.7),
    "gpt2": lambda: GPT2Config(
        vocab_size=256 + len(SPECIALS), n_embd=32, n_layer=3, n_head=4, n_positions=128, initializer_range=0.2
    ),
}
"""Architectures whose forward pass our attention expresses. Qwen3-MoE has a dense layer among its sparse ones, and Ministral 3 scales its
queries from position 24 on; Granite divides its logits."""

_LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "factor": 2.0,
    "original_max_position_embeddings": 64,
}

REFUSED: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "capped scores": (lambda: Gemma2Config(**_WIDE, sliding_window=WINDOW), "caps its attention scores"),
    "capped logits": (lambda: _gemma3(final_logit_softcapping=1.0), "changes its logits"),
    "both directions": (lambda: _gemma3(use_bidirectional_attention=True), "see those after them"),
    "latent attention": (
        lambda: DeepseekV3Config(
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
        lambda: LlamaConfig(**_DENSE, rope_parameters=_ROPE | {"rope_type": "dynamic", "factor": 2.0}),
        "length of what is computed beside it",
    ),
    "frequencies of two lengths": (
        lambda: LlamaConfig(**_DENSE, rope_parameters=_ROPE | _LONG),
        "length of what is computed beside it",
    ),
    "recurrent": (
        lambda: MambaConfig(vocab_size=256 + len(SPECIALS), hidden_size=32, num_hidden_layers=2, state_size=4),
        "linear_attention",
    ),
}
"""Architectures that our attention cannot express, each with a part of the refusal's message."""


def tiny_of(path: Path, config: PreTrainedConfig, *, seed: int = 0) -> Path:
    """Write a random fp32 model of this configuration with a byte tokenizer, and return its path.

    Norms and biases, which the library initialises to 1 and 0, are random too.
    Example: ``tiny_of(tmp_path / "m", SUPPORTED["gemma3"]())``.
    """
    library_logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path
