"""How to make each architecture tiny: sizes that most classes of configuration understand, and the exceptions, as data."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 260
WINDOW = 16
"""Positions that a token of a windowed or chunked layer sees, wherever a configuration has a setting for it."""
LAYERS = 2

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 320,
    "head_dim": 8,
    "bos_token_id": 257,
    "eos_token_id": 258,
    "pad_token_id": 259,
    "is_decoder": True,
    "use_cache": False,
    "sliding_window": WINDOW,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "window_size": WINDOW,
    "attention_window_size": WINDOW,
    "attention_chunk_size": WINDOW,
    "local_attention": 2 * WINDOW,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_layers": LAYERS,
    "num_heads": 4,
    "n_embd": 32,
    "n_layer": LAYERS,
    "n_head": 4,
    "n_positions": 320,
    "n_ctx": 320,
    "max_seq_len": 320,
    "max_target_positions": 320,
    "rotary_dim": 4,
    "embedding_size": 32,
    "logits_scaling": 3.0,
    "state_size": 4,
    "conv_kernel": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_d_state": 4,
    "mamba_d_head": 8,
    "mamba_n_heads": 8,
    "mamba_n_groups": 1,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "index_topk": 8,
}
"""Given to a class as far as it has a setting of that name."""

_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
_LATENT = {"head_dim": ..., "num_key_value_heads": 4}  # the rotary part of a key is its own setting
SPECIAL: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"layer_types": ["full_attention", "sliding_attention"]},
    "dbrx": {
        "n_heads": 4,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "dots1": {"n_shared_experts": 1},
    "axk1": _LATENT,
    "axk2": _LATENT,
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _LATENT,
    "minicpm3": _LATENT,
    "youtu": _LATENT,
    "dots3_note": {"text_config": {"num_key_value_heads": 4}},
    "dots3_note_text": {"num_key_value_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3": {"vision_config": _VISION},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
    },
    "gemma4": {"text_config": {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}},
    "gemma4_text": {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8},
    "git": {"vision_config": _VISION},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 320},
    "kimi_linear": {"linear_head_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "zero_expert_num": 2, "head_dim": ...},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [16, 20], "attention_head_size": 8},
    "phi4_multimodal": {
        "vision_config": _VISION,
        "audio_config": {"hidden_size": 32, "intermediate_size": 48, "num_blocks": 1, "num_attention_heads": 4},
    },
    "roc_bert": {
        "pad_token_id": 0,
        "pronunciation_embed_dim": 8,
        "pronunciation_vocab_size": 16,
        "shape_embed_dim": 8,
        "shape_vocab_size": 16,
    },
    "zamba": {
        "num_hidden_layers": 3,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "layers_block_type": ["mamba", "hybrid", "mamba"],
    },
    "zamba2": {"layers_block_type": ["mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}
"""By architecture: what is added to `SIZES` (`...`: left at the class's own value)."""


_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "factor": 2.0,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3_text, capped logits": ("gemma3_text", {"final_logit_softcapping": 1.0}),
    "llama, rotary of kind dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "llama, rotary of kind llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama, rotary of kind longrope": ("llama", {"rope_parameters": _LONG | {"original_max_position_embeddings": 64}}),
    "llama, rotary of kind yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "phimoe, no window": ("phimoe", {"sliding_window": None}),
    "qwen2_moe, no window": ("qwen2_moe", {"use_sliding_window": False}),
}
"""Settings of an architecture that checkpoints have, and that decide otherwise than `SIZES` and `SPECIAL` do: by name, what is added."""


def every_kind() -> list[str]:
    """The model types that transformers knows a causal language model of, and the variants, in alphabetical order."""
    return sorted([*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS])


def tiny_config(kind: str) -> PreTrainedConfig:
    """A configuration of this architecture or variant, as small as the tables make it. Raises whatever its class does."""
    kind, more = VARIANTS.get(kind, (kind, {}))
    known: Any = CONFIG_MAPPING[kind]
    given = SPECIAL.get(kind, {}) | more
    text = given.pop("text_config", None)
    parts: dict[str, type[PreTrainedConfig]] = dict(getattr(known, "sub_configs", None) or {})
    if hasattr(parts.get("text_config"), "__dataclass_fields__"):
        given["text_config"] = _sizes(parts["text_config"], text or {})
    else:
        given = _sizes(known, given)
    return known(**given)


def _sizes(known: Any, given: dict[str, Any]) -> dict[str, Any]:
    names = settings_of(known)
    made = {name: value for name, value in SIZES.items() if name in names} | given
    return {name: value for name, value in made.items() if value is not ...}


def settings_of(known: Any) -> set[str]:
    """The names that a class of configuration has settings under; of a setting with two names only the one that its class uses."""
    fields = set(known.__dataclass_fields__)
    aliases: dict[str, str] = known.attribute_map
    return fields | {alias for alias, name in aliases.items() if name not in fields}
