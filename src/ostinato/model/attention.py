"""The one attention function of every model: a call is forwarded to the `Attend` object that was passed to the forward pass.

Engine and trainer run the same Hugging Face module over N flattened tokens of many sequences; only the object that they pass knows
which token attends to which (paged KV in the engine, packed prefixes in the trainer, `CausalAttend` for plain scoring).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ostinato.core.errors import BadConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IMPLEMENTATION = "ostinato"
"""Name under which `load` registers `library_attention`. No mask function goes by this name, so transformers builds no mask at all."""


class Attend(Protocol):
    """Attention of N flattened tokens in one layer.

    `layer` counts from 0; `q` [N, H, D] and `k`, `v` [N, KV, D] already carry rotary positions; the result is [N, H, D] in
    q's dtype. A token at position p reads positions p - window + 1 to p, all up to p if `window` is 0. Layers are called in order,
    once each per forward pass (again when activations are recomputed).
    """

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor: ...


class Inexpressible(BadConfig):
    """Why an architecture cannot be computed with an `Attend` object; the message is the reason alone, as in "it caps its scores"."""


class Unheard(BadConfig):
    """A layer's attention was called without an `Attend` object."""


OF_ITS_OWN = "its layers attend by code of their own, into which Ostinato's attention cannot be put"


class CausalAttend:
    """Plain causal attention over whole sequences, concatenated; the reference that other implementations are tested against.

    Example: ``hidden(model, ids_N, positions_N, CausalAttend([5, 3]))`` for a sequence of 5 tokens and one of 3.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = list(lengths)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
        parts: list[Tensor] = []
        for q_HTD, k_KTD, v_KTD in zip(*(self._sequences(x) for x in (q, k, v)), strict=True):
            T = q_HTD.shape[2]
            near = (
                torch.ones(T, T, dtype=torch.bool, device=q.device).tril().triu(1 - window) if 0 < window < T else None
            )
            out = F.scaled_dot_product_attention(
                q_HTD, k_KTD, v_KTD, attn_mask=near, is_causal=near is None, scale=scale, enable_gqa=True
            )
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _sequences(self, x_NHD: Tensor) -> list[Tensor]:
        return [part.transpose(0, 1).unsqueeze(0) for part in x_NHD.split(self._lengths)]


def library_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    attend: Attend | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function that the library calls in each layer: [1, H, N, D] in, [1, N, H, D] out."""
    if attend is None:
        raise Unheard("this model was loaded with ostinato's attention: run it through ostinato.model.attention.hidden")
    if not getattr(module, "is_causal", True):
        raise Inexpressible("its tokens see those after them, so it cannot generate")
    if softcap is not None or s_aux is not None:
        raise Inexpressible("it caps its attention scores or uses attention sinks")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    return attend(cast("int", module.layer_idx), q, k, v, scale, sliding_window or 0).unsqueeze(0), None


def hidden(model: PreTrainedModel, ids_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
    """Run one pass over N flattened tokens; returns the final normed hidden states [N, hidden].

    `ids_N`, `positions_N` are int64 on the model's device; a position is a token's index in its own sequence. Works under autograd and
    under inference_mode.
    """
    out = model.base_model(input_ids=ids_N[None], position_ids=positions_N[None], use_cache=False, attend=attend)
    return out.last_hidden_state[0]


def logits(model: PreTrainedModel, hidden_MD: Tensor) -> Tensor:
    """The output head over M chosen positions, scaled as the model scales it: [M, vocab] in the model's dtype."""
    head = cast("nn.Module", model.get_output_embeddings())
    return _scaled(model, head(hidden_MD))


def _scaled(model: PreTrainedModel, logits_MV: Tensor) -> Tensor:
    """Divided or multiplied by the number in the model's configuration, in the library's way: Granite states one, Cohere the other."""
    config: Any = model.config.get_text_config()
    divisor, factor = getattr(config, "logits_scaling", None), getattr(config, "logit_scale", None)
    if divisor is not None and divisor != 1:
        logits_MV = logits_MV / divisor
    return logits_MV if factor is None or factor == 1 else logits_MV * factor


def check_config(config: Any) -> None:
    """Raise Inexpressible unless every layer is causal softmax attention, with positions that do not depend on the other sequences.

    Rotary embeddings of the kinds "dynamic" and "longrope" choose their frequencies by the largest position of a call, so a token's
    numbers would depend on the sequences beside it.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise Inexpressible("it is an encoder with a decoder, not a model that continues a text")
    kinds: set[str] = set(cast("list[str]", getattr(config, "layer_types", None) or []))
    if odd := sorted(kinds - {"full_attention", "sliding_attention"}):
        raise Inexpressible(f"it has layers of kind {', '.join(odd)}, and every layer must be softmax attention")
    if bound := sorted(kind for kind in _rope_types(config) if "dynamic" in kind or kind == "longrope"):
        raise Inexpressible(
            f"a token's rotary embedding, of kind {', '.join(bound)}, depends on the length of what is computed beside it"
        )


def _rope_types(config: Any) -> set[str]:
    """The kinds of rotary embeddings: of the whole model, or of each kind of layer."""
    found: set[str] = set()
    for stated in (getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None)):
        parameters = cast("dict[str, Any]", stated or {})
        for entry in [parameters, *(value for value in parameters.values() if isinstance(value, dict))]:
            entry = cast("dict[str, Any]", entry)
            found |= {str(entry[name]) for name in ("rope_type", "type") if name in entry}
    return found


class _Probe:
    """Records the layers that reach our attention, with heads that its kernel supports."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        self._attend = CausalAttend([2])

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
        if q.shape[2] != v.shape[2] or q.shape[2] % 4:
            raise Inexpressible(
                f"its heads are {q.shape[2]} wide for keys and {v.shape[2]} for values, and must be of one width that is a multiple of 4"
            )
        self.layers.append(layer)
        return self._attend(layer, q, k, v, scale, window)


def check_forward(model: PreTrainedModel) -> None:
    """Run two tokens through the model: every layer must call our attention once, and `logits` must equal the library's own.

    Catches recurrent layers, capped output heads and attention of another kind. Raises Inexpressible.
    """
    probe = _Probe()
    with torch.inference_mode():
        ids, positions = torch.zeros(2, dtype=torch.long, device=model.device), torch.arange(2, device=model.device)
        try:
            # the library's shapes, so the same kernels
            ours = logits(model, hidden(model, ids, positions, probe)[None])[0]
            theirs = model(
                input_ids=ids[None], position_ids=positions[None], use_cache=False, attend=CausalAttend([2])
            ).logits[0]
        except Unheard as error:
            raise Inexpressible(OF_ITS_OWN) from error
    layers: int = model.config.get_text_config().num_hidden_layers
    if not probe.layers:
        raise Inexpressible(OF_ITS_OWN)
    if probe.layers != list(range(layers)):
        raise Inexpressible(f"its {layers} layers do not attend once each, in order, but as layers {probe.layers[:8]}")
    if not torch.equal(ours, theirs):
        raise Inexpressible(
            "it changes its logits after the output head otherwise than by a factor (as by a soft cap), or what it feeds to that head"
        )
