"""A tiny random Llama with a byte-level tokenizer: a whole model directory, written in well under a second, no network."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging as library_logging

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
"""Control tokens, ids 256 to 259; ids 0 to 255 stand for single bytes in the order of the byte-level alphabet."""
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

    The same arguments give the same bytes. Weights are random: the model says nothing sensible, but all code that loads, serves,
    trains or publishes a model works on it. Example: ``tiny_model(tmp_path / "tiny", seed=1)``.
    """
    path.mkdir(parents=True, exist_ok=True)
    for name, data in _files(seed, hidden, layers, heads, kv_heads, context, dtype, tied).items():
        (path / name).write_bytes(data)
    return path


@lru_cache(maxsize=16)  # tests write the same few models again and again
def _files(
    seed: int,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    context: int,
    dtype: Literal["float32", "bfloat16"],
    tied: bool,
) -> Mapping[str, bytes]:
    """The directory's files, by name."""
    library_logging.disable_progress_bar()
    config = LlamaConfig(
        vocab_size=256 + len(SPECIALS),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        tie_word_embeddings=tied,
        bos_token_id=257,
        eos_token_id=258,
        pad_token_id=259,
        initializer_range=0.1,  # large enough that positions and neighbours matter to the logits
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return files_of(model.bfloat16() if dtype == "bfloat16" else model, byte_tokenizer(context))


def files_of(*parts: PreTrainedModel | PreTrainedTokenizerFast) -> Mapping[str, bytes]:
    """The files that they save, by name."""
    with TemporaryDirectory() as directory:
        for part in parts:
            part.save_pretrained(directory)
        return {file.name: file.read_bytes() for file in Path(directory).iterdir()}


def byte_tokenizer(context: int = 512) -> PreTrainedTokenizerFast:
    """One token per UTF-8 byte, and the four control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        unk_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )
