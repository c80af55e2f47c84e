"""The attention function of every model: forwards each call to the `Attend` object that was passed to the forward pass.

Engine and trainer run the same Hugging Face module over N flattened tokens of many sequences. Only the object that they pass knows which
token attends to which: a paged KV cache in the engine, packed prefixes in the trainer, `CausalAttend` for plain scoring.
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
"""Name under which `load` registers `library_attention`. No mask function has this name, so transformers builds no mask."""


class Attend(Protocol):
    """Attention of N flattened tokens in one layer.

    `layer` counts from 0. Rotary embeddings are already applied to `q` [N, H, D] and `k` [N, KV, D]; `v` is [N, KV, D]. The result is
    [N, H, D] in q's dtype. A token at position p reads positions p - window + 1 to p, or all up to p if `window` is 0. Layers are called
    in order, once each per forward pass (again when activations are recomputed).
    """

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor: ...


class UnsupportedArchitecture(BadConfig):
    """An architecture that cannot be computed with an `Attend` object; the message is only the reason, as in "it caps its scores"."""


class AttendMissing(BadConfig):
    """A layer's attention was called without an `Attend` object."""


OWN_ATTENTION = "its layers attend by code of their own, into which Ostinato's attention cannot be put"


class CausalAttend:
    """Plain causal attention over whole concatenated sequences: the reference against which other implementations are tested.

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
    """Compute a layer's attention, as the library calls it: [1, H, N, D] -> [1, N, H, D]."""
    if attend is None:
        raise AttendMissing(
            "this model was loaded with ostinato's attention: run it through ostinato.model.attention.hidden"
        )
    if not getattr(module, "is_causal", True):
        raise UnsupportedArchitecture("its tokens see those after them, so it cannot generate")
    if softcap is not None or s_aux is not None:
        raise UnsupportedArchitecture("it caps its attention scores or uses attention sinks")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    return attend(cast("int", module.layer_idx), q, k, v, scale, sliding_window or 0).unsqueeze(0), None


def hidden(model: PreTrainedModel, ids_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
    """Run one pass over N flattened tokens; return the final normed hidden states [N, hidden].

    `ids_N` and `positions_N` are int64 on the model's device; a position is a token's index in its own sequence. Works under autograd and
    inference_mode.
    """
    out = model.base_model(input_ids=ids_N[None], position_ids=positions_N[None], use_cache=False, attend=attend)
    return out.last_hidden_state[0]


def logits(model: PreTrainedModel, hidden_MD: Tensor) -> Tensor:
    """Apply the output head to M chosen states, with the model's logit scaling: [M, vocab] in the model's dtype."""
    head = cast("nn.Module", model.get_output_embeddings())
    return _scaled(model, head(hidden_MD))


def _scaled(model: PreTrainedModel, logits_MV: Tensor) -> Tensor:
    """Divide by `logits_scaling` (Granite) or multiply by `logit_scale` (Cohere), if the model's configuration has it."""
    config: Any = model.config.get_text_config()
    divisor, factor = getattr(config, "logits_scaling", None), getattr(config, "logit_scale", None)
    if divisor is not None and divisor != 1:
        logits_MV = logits_MV / divisor
    return logits_MV if factor is None or factor == 1 else logits_MV * factor


def check_config(config: Any) -> None:
    """Raise UnsupportedArchitecture unless every layer is causal softmax attention, with positions independent of other sequences.

    Rotary embeddings of type "dynamic" and "longrope" choose their frequencies by the largest position in a call, so a token's numbers
    would depend on the other sequences of its batch.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedArchitecture("it is an encoder with a decoder, not a model that continues a text")
    kinds: set[str] = set(cast("list[str]", getattr(config, "layer_types", None) or []))
    if odd := sorted(kinds - {"full_attention", "sliding_attention"}):
        raise UnsupportedArchitecture(
            f"it has layers of kind {', '.join(odd)}, and every layer must be softmax attention"
        )
    if bound := sorted(kind for kind in _rope_types(config) if "dynamic" in kind or kind == "longrope"):
        raise UnsupportedArchitecture(
            f"a token's rotary embedding, of kind {', '.join(bound)}, depends on the length of what is computed beside it"
        )


def _rope_types(config: Any) -> set[str]:
    """Return the types of rotary embeddings, of the whole model or of each layer type."""
    types: set[str] = set()
    for stated in (getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None)):
        parameters = cast("dict[str, Any]", stated or {})
        for entry in [parameters, *(value for value in parameters.values() if isinstance(value, dict))]:
            entry = cast("dict[str, Any]", entry)
            types |= {str(entry[name]) for name in ("rope_type", "type") if name in entry}
    return types


class _Probe:
    """Records which layers reach our attention, and checks that the kernel supports their heads."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        self._attend = CausalAttend([2])

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
        if q.shape[2] != v.shape[2] or q.shape[2] % 4:
            raise UnsupportedArchitecture(
                f"its heads are {q.shape[2]} wide for keys and {v.shape[2]} for values, and must be of one width that is a multiple of 4"
            )
        self.layers.append(layer)
        return self._attend(layer, q, k, v, scale, window)


def check_forward(model: PreTrainedModel) -> None:
    """Run two tokens through the model: every layer must call our attention once, and `logits` must equal the library's own.

    Detects recurrent layers, capped output heads and other kinds of attention. Raises UnsupportedArchitecture.
    """
    probe = _Probe()
    with torch.inference_mode():
        ids, positions = torch.zeros(2, dtype=torch.long, device=model.device), torch.arange(2, device=model.device)
        try:
            # with the library's shapes, to get the same kernels
            ours = logits(model, hidden(model, ids, positions, probe)[None])[0]
            theirs = model(
                input_ids=ids[None], position_ids=positions[None], use_cache=False, attend=CausalAttend([2])
            ).logits[0]
        except AttendMissing as error:
            raise UnsupportedArchitecture(OWN_ATTENTION) from error
    layers: int = model.config.get_text_config().num_hidden_layers
    if not probe.layers:
        raise UnsupportedArchitecture(OWN_ATTENTION)
    if probe.layers != list(range(layers)):
        raise UnsupportedArchitecture(
            f"its {layers} layers do not attend once each, in order, but as layers {probe.layers[:8]}"
        )
    if not torch.equal(ours, theirs):
        raise UnsupportedArchitecture(
            "it changes its logits after the output head otherwise than by a factor (as by a soft cap), or what it feeds to that head"
        )
