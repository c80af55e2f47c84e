"""Tiny random mixture-of-experts models: complete model directories of the architectures whose routing must be exact."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils import logging as library_logging

from ostinato.testing.tiny import SPECIALS, byte_tokenizer, files_of

Kind = Literal["qwen3_moe", "olmoe", "mixtral"]


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
    path.mkdir(parents=True, exist_ok=True)
    sizes = (seed, hidden, intermediate, layers, heads, kv_heads, experts, top_k, context)
    for name, data in _files(kind, dtype, *sizes).items():
        (path / name).write_bytes(data)
    return path


@lru_cache(maxsize=16)  # tests write the same few models again and again
def _files(
    kind: Kind,
    dtype: Literal["float32", "bfloat16"],
    seed: int,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    experts: int,
    top_k: int,
    context: int,
) -> Mapping[str, bytes]:
    """The directory's files, by name."""
    library_logging.disable_progress_bar()
    common: dict[str, Any] = {
        "vocab_size": 256 + len(SPECIALS),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_experts_per_tok": top_k,
        "max_position_embeddings": context,
        "bos_token_id": 257,
        "eos_token_id": 258,
        "pad_token_id": 259,
        "initializer_range": 0.1,  # large enough that neighbours matter to the logits and routers prefer some experts
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _model(kind, common, intermediate, experts)
    return files_of(model.bfloat16() if dtype == "bfloat16" else model, byte_tokenizer(context))


def _model(kind: Kind, common: dict[str, Any], intermediate: int, experts: int) -> PreTrainedModel:
    if kind == "olmoe":
        return OlmoeForCausalLM(OlmoeConfig(**common, intermediate_size=intermediate, num_experts=experts))
    if kind == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**common, intermediate_size=intermediate, num_local_experts=experts))
    config = Qwen3MoeConfig(**common, moe_intermediate_size=intermediate, num_experts=experts, norm_topk_prob=True)
    return Qwen3MoeForCausalLM(config)
