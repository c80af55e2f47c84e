"""Models with random weights in the shapes of published ones, for measuring speed and rounding where no hub can be reached.

    python -m benchmarks.engine.drawn_model DIRECTORY --shape qwen3-0.6b --tokenizer MODEL_DIRECTORY

The tokenizer is any model's that has at most as many tokens.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

QWEN3 = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "vocab_size": 151936,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "initializer_range": 0.04,
}
SHAPES: dict[str, Any] = {
    # huggingface.co/Qwen/Qwen3-0.6B, config.json
    "qwen3-0.6b": lambda: Qwen3Config(
        intermediate_size=3072,
        num_hidden_layers=28,
        num_key_value_heads=8,
        **QWEN3,
    ),
    # a small mixture of experts of the same kind
    "moe-1b": lambda: Qwen3MoeConfig(
        moe_intermediate_size=512,
        num_hidden_layers=12,
        num_key_value_heads=4,
        num_experts=64,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        **QWEN3,
    ),
}
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def draw(directory: Path, shape: str, tokenizer: Path) -> Path:
    """Write the model directory. The same arguments give the same weights on the same kind of device."""
    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model: Any = AutoModelForCausalLM.from_config(SHAPES[shape](), dtype=torch.bfloat16)
    model.save_pretrained(directory)
    for name in TOKENIZER:
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, directory / name)
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a model's directory")
    args = parser.parse_args()
    path = draw(args.directory, args.shape, args.tokenizer)
    weights = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    print(f"{path}: {args.shape}, {weights / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
