"""Whole-decoder fusion: computes all layers of a dense model in one call of our own kernels, if that changes no bit.

With few streams, a token costs the reading of the weights plus the overhead of every call in between. Here there are no such calls, and
the cores share each matrix. Like fused layers (`fused`), which all other models use, this form is tried on the loaded model and dropped if
any bit differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from ostinato.engine.embedded.fused import Reach, TrialCache, convert_if_exact, count_linears, norm_of, sandwich_of
from ostinato.model.attention import Attend
from ostinato.model.cpu import together
from ostinato.model.experts import GatedMLP
from ostinato.model.kernels.decoder import ATTENTION, PHASES, decoder
from ostinato.model.kernels.int8_product import INT8
from ostinato.model.kernels.thread_barrier import COLUMNS
from ostinato.model.kernels.vector import WIDE
from ostinato.model.linear import Panels, in_panels, room_for_levels
from ostinato.model.paged import PagedCache, WholeAttend, array

_TABLE = 1 << 15  # positions whose rotations are cached
_BLOCK = 32  # block size in calls without attention: any works, and the kernel for this one is compiled anyway
LayOut = Callable[..., Panels]
"""Lays out one weight, or two interleaved, as `in_panels` does."""


@dataclass(frozen=True, slots=True)
class BodyOutput:
    """The output of the library's model body, reduced to the field that is used."""

    last_hidden_state: Tensor


class CondensedBody(nn.Module):
    """A model body with copies of another body's matrices. Raises ValueError or AttributeError for an unsupported architecture."""

    def __init__(self, body: Any, reaches: Sequence[Reach], lay_out: LayOut = in_panels) -> None:
        super().__init__()
        self.embed_tokens: nn.Module = body.embed_tokens
        self._rotary: nn.Module = body.rotary_emb
        layers = list(body.layers)
        first = layers[0].self_attn
        self._dim: int = first.head_dim
        self._heads, self._kv_heads = (part.out_features // self._dim for part in (first.q_proj, first.k_proj))
        self._width, self._inner = body.embed_tokens.weight.shape[1], layers[0].mlp.gate_proj.out_features
        self._reaches = tuple(reaches)
        packed = [_pack(layer, lay_out) for layer in layers]
        self._weights = [weights for weights, _ in packed]  # keeps alive the tensors whose addresses the kernel uses
        self._levels = max(panels.inputs for panels in self._weights[0]) if self._weights[0][0].how >= INT8 else 0
        self._model = _constants(body, layers, packed, self._dim)
        self._scales = np.array([reach.scale for reach in reaches], np.float32)
        self._windows = np.array([reach.window for reach in reaches], np.int64)
        self._table: tuple[Tensor, Tensor] | None = None

    def forward(self, input_ids: Tensor, *, position_ids: Tensor, attend: Attend, **_: Any) -> BodyOutput:
        """Compute what the library's body does: [1, N] -> [1, N, D]."""
        x_ND: Tensor = self.embed_tokens(input_ids[0])
        rows, heads, dim = len(x_ND), self._heads, self._dim
        make = x_ND.new_empty
        normed, qkv = make(rows, self._width), make(rows, (heads + 2 * self._kv_heads) * dim)
        q, k, seen = make(rows, heads, dim), make(rows, self._kv_heads * dim), make(rows, heads, dim)
        cos, sin = self._rotations(x_ND, position_ids)
        parts = (x_ND, normed, qkv, q, k, seen, make(rows, self._inner))
        levels = room_for_levels(rows if self._levels else 0, self._levels)
        state = (*map(array, parts), np.empty((rows, heads), np.float32), array(cos), array(sin), levels)
        count = len(self._reaches) * PHASES
        pages = getattr(attend, "pages", None)
        if pages is not None:
            held: PagedCache = pages(len(self._reaches), self._kv_heads, dim, x_ND.dtype)
            self._run(0, count + 1, held, state)
            return BodyOutput(normed[None])
        for layer, reach in enumerate(self._reaches):
            at = layer * PHASES
            self._run(at, at + ATTENTION, None, state)
            v = qkv[:, -self._kv_heads * dim :].view(rows, self._kv_heads, dim)
            seen.copy_(attend(layer, q, k.view(rows, self._kv_heads, dim), v, reach.scale, reach.window))
            self._run(at + ATTENTION + 1, at + PHASES, None, state)
        self._run(count, count + 1, None, state)
        return BodyOutput(normed[None])

    def __deepcopy__(self, _: object) -> NoReturn:
        raise TypeError(
            "a condensed body holds the addresses of its weights; copy the model first, then condense the copy"
        )

    def _run(self, first: int, last: int, held: PagedCache | None, state: tuple[Any, ...]) -> None:
        block = _BLOCK if held is None else held.reads.block
        kernel = decoder(self._dim, block, self._heads // self._kv_heads)
        counters = np.zeros((last - first, COLUMNS), np.int64)
        cache = _empty_cache() if held is None else _cache_arguments(held)
        cache = (*cache[:-1], self._scales, self._windows, cache[-1])
        together(lambda: kernel(first, last, counters, self._model, cache, state))

    def _rotations(self, x_ND: Tensor, positions_1N: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [N, dim], computed by the library and cached for the first `_TABLE` positions."""
        last = int(positions_1N.max())
        if last >= _TABLE:
            cos, sin = self._rotary(x_ND[None], positions_1N)
            return _whole_heads(cos, self._dim), _whole_heads(sin, self._dim)
        table = self._table
        if table is None or len(table[0]) <= last:
            every = torch.arange(1 << max(10, last.bit_length()))
            cos, sin = self._rotary(x_ND[None], every[None])
            self._table = table = _whole_heads(cos, self._dim), _whole_heads(sin, self._dim)
        return table[0][positions_1N[0]], table[1][positions_1N[0]]


def _whole_heads(x_1ND: Tensor, dim: int) -> Tensor:
    """Drop the batch axis. Raises ValueError for partial rotary embeddings."""
    if x_1ND.shape[0] != 1 or x_1ND.shape[2] != dim:
        raise ValueError("only a part of each head is rotated")
    return x_1ND[0].contiguous()


def _empty_cache() -> tuple[Any, ...]:
    """Return the kernel's argument `cache` for calls without attention."""
    empty = np.empty(0, np.int64)
    return (
        np.empty((0, 2), np.int64),
        0,
        np.empty((3, 0), np.int64),
        np.empty((0, 3), np.int64),
        empty,
        empty,
        empty,
        16,
    )


def _cache_arguments(held: PagedCache) -> tuple[Any, ...]:
    places = held.places
    return (
        np.array([(blocks.keys.data_ptr(), blocks.values.data_ptr()) for blocks in held.layers], np.int64),
        len(held.layers[0].keys),
        np.stack([places.tokens, places.blocks, places.offsets]),
        *held.reads.queries,
        held.reads.longest,
    )


def _pack(layer: Any, lay_out: LayOut) -> tuple[tuple[Panels, ...], tuple[Tensor | None, Tensor | None]]:
    """Return a layer's four weights in panels, and two biases: of its queries, keys and values, and of its attention output."""
    attention, mlp = layer.self_attn, layer.mlp
    if not isinstance(mlp, GatedMLP) or any(getattr(part, "bias", None) is not None for part in mlp.children()):
        raise ValueError("a feed-forward layer of another kind")
    if sandwich_of(layer) is not None:
        raise ValueError("norms after the attention and the feed-forward layer")
    three = [attention.q_proj, attention.k_proj, attention.v_proj]
    biases = [part.bias.detach() for part in three if part.bias is not None]
    if len(biases) not in (0, 3):
        raise ValueError("biases of some")
    gate, up, down = (cast("nn.Linear", part).weight for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    if len(gate) % WIDE:
        raise ValueError("a feed-forward layer of a width that panels of gates do not fill")
    out = attention.o_proj
    weights = (
        lay_out(torch.cat([part.weight.detach() for part in three])),
        lay_out(out.weight),
        lay_out(gate, up),
        lay_out(down),
    )
    return weights, (torch.cat(biases) if biases else None, None if out.bias is None else out.bias.detach())


def _constants(body: Any, layers: list[Any], packed: list[Any], dim: int) -> tuple[Any, ...]:
    """Return the kernel's argument `model`; see `decoder`."""
    norms = [norm_of(norm) for layer in layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    norms.append(norm_of(body.norm))
    heads = [[getattr(layer.self_attn, name, None) for layer in layers] for name in ("q_norm", "k_norm")]
    none = np.empty((len(layers), 0), array(norms[0].weight).dtype)
    biases = [none if packed[0][1][i] is None else array(torch.stack([each[1][i] for each in packed])) for i in (0, 1)]
    if len({norm.zero_centered for kind in (norms, *heads) for norm in kind if norm is not None}) > 1:
        raise ValueError("norms of two kinds")
    activations = {layer.mlp.activation for layer in layers}
    if len(activations) > 1:
        raise ValueError("activations of two kinds")
    of_heads = [none if kind[0] is None else _stacked([norm_of(norm, dim) for norm in kind]) for kind in heads]
    eps = [0.0 if kind[0] is None else kind[0].eps for kind in heads]
    addresses = np.array([[panels.address for panels in weights] for weights, _ in packed], np.int64)
    scales = np.array([norm.eps for norm in norms], np.float32)
    return (
        addresses, packed[0][0][0].how, *biases, none, _stacked(norms), scales, *of_heads, np.array(eps, np.float32),
        norms[0].zero_centered, activations == {"gelu_tanh"},
    )  # fmt: skip


def _stacked(norms: list[Any]) -> NDArray[Any]:
    return array(torch.stack([norm.weight.detach() for norm in norms]))


@torch.inference_mode()
def condense(model: PreTrainedModel, lay_out: LayOut = in_panels, keep: TrialCache | None = None) -> int:
    """Replace a CPU model's body by a condensed one, in place; return how many linear layers it replaced.

    A model with unsupported parts or another dtype, or one that would give other bits, stays unchanged. `keep` as for `convert_if_exact`.
    """
    plain: Any = model.base_model
    if (
        model.dtype not in (torch.bfloat16, torch.float32)
        or model.device.type != "cpu"
        or not isinstance(getattr(plain, "layers", None), nn.ModuleList)
    ):
        return 0
    before = count_linears(model)

    def exchange(reaches: Sequence[Reach], layout: LayOut) -> None:
        setattr(model, model.base_model_prefix, CondensedBody(plain, reaches, layout))

    def restore() -> None:
        setattr(model, model.base_model_prefix, plain)

    convert_if_exact(
        "condensed",
        model,
        len(plain.layers),
        exchange,
        restore,
        lay_out,
        panels=in_panels,
        also=_whole_attend,
        keep=keep,
    )
    return before - count_linears(model)


def is_condensed(model: PreTrainedModel) -> bool:
    """Return whether all layers of the model run in one call, which parallelises its own work."""
    return isinstance(model.base_model, CondensedBody)


def _whole_attend(tokens: int) -> WholeAttend:
    return WholeAttend([tokens])
