"""The one attention function of every model: a call is handed on to the `Attend` object that came with the forward pass.

Engine and trainer run the same Hugging Face module over N flattened tokens of many sequences; who attends to whom is known
only to the object they pass (paged KV in the engine, packed prefixes in the trainer, `CausalAttend` for plain scoring).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel

from ostinato.core.errors import BadConfig

IMPLEMENTATION = "ostinato"
"""Name under which the function is registered. No mask function goes by this name, so transformers builds no mask at all."""


class Attend(Protocol):
    """Attention of N flattened tokens in one layer.

    `layer` counts from 0; `q` [N, H, D] and `k`, `v` [N, KV, D] carry rotary positions already; the answer is [N, H, D] in
    q's dtype. Layers are called in order, once each per forward pass (again when activations are recomputed).
    """

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor: ...


class CausalAttend:
    """Plain causal attention over whole sequences that stand one after another; the reference that others are tested against.

    Example: ``hidden(model, ids_N, positions_N, CausalAttend([5, 3]))`` for a sequence of 5 tokens and one of 3.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = list(lengths)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        parts: list[Tensor] = []
        for q_HTD, k_KTD, v_KTD in zip(*(self._sequences(x) for x in (q, k, v)), strict=True):
            out = F.scaled_dot_product_attention(q_HTD, k_KTD, v_KTD, is_causal=True, scale=scale, enable_gqa=True)
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _sequences(self, x_NHD: Tensor) -> list[Tensor]:
        return [part.transpose(0, 1).unsqueeze(0) for part in x_NHD.split(self._lengths)]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    attend: Attend | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What the library calls in each layer: [1, H, N, D] in, [1, N, H, D] out."""
    if attend is None:
        raise BadConfig(
            "this model was loaded with ostinato's attention: run it through ostinato.model.attention.hidden"
        )
    if softcap is not None or s_aux is not None:
        raise BadConfig("this model caps its attention scores or uses attention sinks, which is not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    return attend(cast("int", module.layer_idx), q, k, v, scale).unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, _attention)


def hidden(model: PreTrainedModel, ids_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
    """One pass over N flattened tokens; returns the final normed hidden states [N, hidden].

    `ids_N`, `positions_N` are int64 on the model's device; a position is a token's index in its own sequence. Works under
    autograd and under inference_mode.
    """
    out = model.base_model(input_ids=ids_N[None], position_ids=positions_N[None], use_cache=False, attend=attend)
    return out.last_hidden_state[0]


def logits(model: PreTrainedModel, hidden_MD: Tensor) -> Tensor:
    """The output head over M chosen positions: [M, vocab] in the model's dtype."""
    return cast("nn.Module", model.get_output_embeddings())(hidden_MD)


def check_config(config: Any) -> None:
    """Raise BadConfig for a model whose layers do not all attend to the whole past."""
    kinds: set[str] = set(cast("list[str]", getattr(config, "layer_types", None) or []))
    window = getattr(config, "sliding_window", None)
    if kinds - {"full_attention", "sliding_attention"}:
        raise BadConfig(f"layers of kind {sorted(kinds)} are not supported: every layer must be softmax attention")
    slides = "sliding_attention" in kinds or (not kinds and getattr(config, "use_sliding_window", True))
    if slides and window is not None and window < config.max_position_embeddings:
        raise BadConfig(
            f"sliding-window attention ({window} of {config.max_position_embeddings} positions) is not supported: "
            f"lower max_position_embeddings in config.json to {window} or choose a model with full attention"
        )


class _Probe:
    """Counts the layers that reach our attention."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        self._attend = CausalAttend([2])

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        self.layers.append(layer)
        return self._attend(layer, q, k, v, scale)


def check_forward(model: PreTrainedModel) -> None:
    """Two tokens through the model: every layer must call our attention once and `logits` must be the library's own.

    Catches recurrent layers, capped or scaled output heads and attention of another kind. Raises BadConfig.
    """
    probe = _Probe()
    with torch.inference_mode():
        ids, positions = torch.zeros(2, dtype=torch.long, device=model.device), torch.arange(2, device=model.device)
        ours = logits(model, hidden(model, ids, positions, probe)[None])[0]  # the library's shapes, so the same kernels
        theirs = model(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, attend=CausalAttend([2])
        ).logits[0]
    layers = model.config.get_text_config().num_hidden_layers
    if probe.layers != list(range(layers)):
        raise BadConfig(
            f"only layers {probe.layers} of {layers} use plain attention: this architecture is not supported"
        )
    if not torch.equal(ours, theirs):
        raise BadConfig(
            "this model changes its logits after the output head (soft-capping or scaling), which is not supported"
        )
