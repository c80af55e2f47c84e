"""Shallow and narrow copies of a model's configuration that keep every mechanism of it: what can be tried in a fraction of a second."""

from __future__ import annotations

import copy
import re
from collections.abc import Generator
from typing import Any, cast

from torch import nn

WINDOW = 16
"""The most positions that a token of a sliding-window or chunked layer sees in a miniature."""
_WINDOWS = re.compile(r"window|chunk")
_INNER = re.compile(r"intermediate_size|ffn_dim|ffn_hidden_size|n_inner")
_VOCABULARY, _INNER_WIDTH = 512, 64
_HEADS, _SHARING = 2, 2  # heads for keys and values, and the heads for queries that share one


def miniatures(config: Any) -> Generator[Any]:
    """Copies of `config` with narrow windows, from the smallest to one of the real width.

    A class of configuration may not allow the smaller ones: the caller takes the first that the library itself can compute. Neither
    heads' width nor the number of experts changes, so that what depends on them stays. All are as deep as `config`: see `cut`.
    """
    for shrink in ((_narrow, _thin), (_thin,), ()):
        made = copy.deepcopy(config)
        text = made.get_text_config()
        try:
            for change in (_cut_windows, *shrink):
                change(text)
        except Exception:  # noqa: BLE001 (no such settings, or a class that checks them: a larger copy may do)
            continue
        for name in getattr(made, "sub_configs", None) or ():
            part = getattr(made, name, None)
            if part is not None and part is not text and isinstance(getattr(part, "num_hidden_layers", None), int):
                cut(part, 1)  # of an image's or sound's encoder, which no text goes through
        yield made


def depth_of(model: Any) -> int:
    """How many layers include every kind of layer; a kind is a layer's modules, their settings, shapes and attention type."""
    text = model.config.get_text_config()
    count: int = text.num_hidden_layers
    layers = next((part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part) == count), None)
    if layers is None:
        return count
    reach: list[str] = getattr(text, "layer_types", None) or [""] * count
    kinds: dict[Any, int] = {}
    for i, layer in enumerate(layers):
        parts = tuple((name, type(part), _settings(part)) for name, part in layer.named_modules())
        shapes = tuple((name, tuple(weight.shape)) for name, weight in layer.named_parameters())
        kinds.setdefault((reach[i], parts, shapes), i)
    return max(kinds.values()) + 1


def cut(config: Any, depth: int) -> None:
    """Shorten a configuration to its first `depth` layers, lists of one entry per layer included."""
    text = config.get_text_config()
    count: int = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == count:
            setattr(text, name, value[:depth])
    text.num_hidden_layers = depth


def _settings(part: nn.Module) -> tuple[tuple[str, Any], ...]:
    """A module's own numbers, strings and switches, but for its place in the model."""
    own = sorted((name, value) for name, value in vars(part).items() if isinstance(value, int | float | str))
    return tuple((name, value) for name, value in own if name not in ("layer_idx", "layer_id", "layer_index"))


def _cut_windows(text: Any) -> None:
    """Narrow each window that the model's context can outgrow."""
    context = getattr(text, "max_position_embeddings", None) or float("inf")
    for name, value in list(vars(text).items()):
        if _WINDOWS.search(name) and name != "chunk_size_feed_forward" and _is_number(value):
            setattr(text, name, value if value >= context else min(value, WINDOW))


def _thin(text: Any) -> None:
    """Shrink the vocabulary and the width inside the feed-forward layers: no mechanism depends on them."""
    for name, value in list(vars(text).items()):
        if _INNER.search(name) and isinstance(value, list):
            setattr(text, name, [min(cast("int", each), _INNER_WIDTH) for each in value])
        elif _INNER.search(name) and _is_number(value):
            setattr(text, name, min(value, _INNER_WIDTH))
    if _is_number(text.vocab_size) and text.vocab_size > _VOCABULARY:
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            value = getattr(text, name, None)
            setattr(text, name, min(cast("int", value), _VOCABULARY - 1) if _is_number(value) else None)
        text.vocab_size = _VOCABULARY


def _narrow(text: Any) -> None:
    """Leave fewer heads of the same width, and as narrow a stream between the layers as they need."""
    heads: int = text.num_attention_heads
    shared: int = getattr(text, "num_key_value_heads", None) or heads
    left = min(shared, _HEADS)
    kept = left * min(heads // shared, _SHARING)
    width = text.hidden_size // heads * kept
    text.num_attention_heads = kept
    if getattr(text, "num_key_value_heads", None):
        text.num_key_value_heads = left
    text.hidden_size = width


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
