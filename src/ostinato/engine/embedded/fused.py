"""A decoder layer in eleven calls instead of some sixty: what a token costs beside its arithmetic is mostly calls.

The layer that it stands for is the library's, x + attention(norm(x)) followed by x + mlp(norm(x)), and so are its bits: each kind of
layer is compared with the library's own when the engine is built, and one that differs in any bit stays as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ostinato.engine.embedded.packed import CHECK_ROWS, PackedLinear, can_pack
from ostinato.model.attention import Attend
from ostinato.model.gated import GatedMLP, gated
from ostinato.model.kernels.norm import add_norm, rms_norm
from ostinato.model.kernels.rotary import rotate
from ostinato.model.norms import RMSNorm
from ostinato.model.paged import array

Sources = dict[PackedLinear, list[nn.Linear]]
"""Which layers' weights each packed one takes, in order."""
Rotary = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""The model's rotary module: (any tensor of the dtype, positions [1, N]) -> cosines and sines [1, N, D]."""


@dataclass(frozen=True, slots=True)
class Reach:
    """What a layer asks of attention beside its queries, keys and values; see `model.attention.Attend`."""

    scale: float
    window: int


class FusedMLP(nn.Module):
    """`GatedMLP` with both of its first products as one."""

    def __init__(self, mlp: GatedMLP, sources: Sources) -> None:
        super().__init__()
        self.gate_up, self.down = PackedLinear(), PackedLinear()
        sources |= {self.gate_up: [mlp.gate_proj, mlp.up_proj], self.down: [mlp.down_proj]}

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return self.down(gated(*self.gate_up(x).chunk(2, -1)))


class FusedLayer(nn.Module):
    """A decoder layer; see `how_to_fuse` for which. `layer` gives its settings and its norms."""

    def __init__(self, layer: Any, reach: Reach, sources: Sources) -> None:
        super().__init__()
        attention: Any = layer.self_attn
        self.input_layernorm: RMSNorm = layer.input_layernorm
        self.post_attention_layernorm: RMSNorm = layer.post_attention_layernorm
        self.q_norm: RMSNorm | None = getattr(attention, "q_norm", None)
        self.k_norm: RMSNorm | None = getattr(attention, "k_norm", None)
        self.qkv, self.out = PackedLinear(), PackedLinear()
        sources |= {self.qkv: [attention.q_proj, attention.k_proj, attention.v_proj], self.out: [attention.o_proj]}
        self.mlp: nn.Module = fused_mlp(layer.mlp, sources)
        self._flat = isinstance(self.mlp, FusedMLP)  # the library's own take [1, N, D]
        self._layer: int = attention.layer_idx
        self._reach = reach
        self._dim: int = attention.head_dim
        self._heads = attention.q_proj.out_features // self._dim
        self._kv_heads = attention.k_proj.out_features // self._dim

    def forward(
        self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], attend: Attend, **_: Any
    ) -> Tensor:
        """[1, N, D] -> [1, N, D]. What is given is written to."""
        x_ND = hidden_states[0]
        normed_ND = torch.empty_like(x_ND)
        rms_norm(array(x_ND), *_terms(self.input_layernorm), array(normed_ND), np.empty(len(x_ND), np.float32))
        q_NHD, k_NKD, v_NKD = self._heads_of(self.qkv(normed_ND), position_embeddings)
        seen_NHD = attend(self._layer, q_NHD, k_NKD, v_NKD, self._reach.scale, self._reach.window)
        out_ND = self.out(seen_NHD.view(len(x_ND), -1))
        add_norm(array(x_ND), array(out_ND), *_terms(self.post_attention_layernorm), array(normed_ND))
        more_ND = self.mlp(normed_ND) if self._flat else self.mlp(normed_ND.unsqueeze(0)).squeeze(0)
        return x_ND.add_(more_ND).unsqueeze(0)

    def _heads_of(self, qkv_NW: Tensor, positions: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Normed and rotated queries [N, H, D] and keys [N, KV, D], and values [N, KV, D]."""
        rows, first_value = len(qkv_NW), (self._heads + self._kv_heads) * self._dim
        packed, cos, sin = array(qkv_NW), array(positions[0][0]), array(positions[1][0])
        q_NX, k_NX = (qkv_NW.new_empty(rows, count * self._dim) for count in (self._heads, self._kv_heads))
        rotate(packed, 0, self._heads, cos, sin, *_terms(self.q_norm, packed), array(q_NX))
        rotate(packed, self._heads * self._dim, self._kv_heads, cos, sin, *_terms(self.k_norm, packed), array(k_NX))
        values_NX = qkv_NW[:, first_value:]
        return tuple(x_NX.view(rows, -1, self._dim) for x_NX in (q_NX, k_NX, values_NX))  # pyright: ignore[reportReturnType]


def _terms(norm: RMSNorm | None, like: NDArray[Any] | None = None) -> tuple[NDArray[Any], np.float32]:
    """A norm's weight [1, D] and epsilon for the kernels; nothing [1, 0] in `like`'s dtype where there is none."""
    if norm is None:
        assert like is not None
        return np.empty((1, 0), like.dtype), np.float32(0.0)
    return array(norm.weight)[None], np.float32(norm.eps)


def fused_mlp(mlp: nn.Module, sources: Sources) -> nn.Module:
    """The layer with its first products as one, or itself where its kind cannot be."""
    packable = isinstance(mlp, GatedMLP) and all(can_pack(part) for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    return FusedMLP(mlp, sources) if packable else mlp  # pyright: ignore[reportArgumentType]


class _Watch:
    """Stands in for attention: keeps what it was asked last, and answers with the values."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
        self.calls += 1
        self.layer, self.reach, self.seen = layer, Reach(scale, window), [x.contiguous() for x in (q, k, v)]
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)


@torch.inference_mode()
def how_to_fuse(layer: nn.Module, rotary: Rotary, rows: int) -> Reach | None:
    """What `FusedLayer` needs to give this layer's bits, at several multiples of `rows` rows; None if it cannot.

    The layer's weights are not looked at: a copy of it, with numbers of the test's own, is compared.
    """
    trial: Any = copy.deepcopy(layer)
    for seed, tensor in enumerate([*trial.parameters(), *trial.buffers()]):
        drawn = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
        tensor.copy_(drawn * tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else drawn * 0.1 + 1)
    sources: Sources = {}
    try:
        x = torch.zeros(1, rows, len(trial.input_layernorm.weight), dtype=trial.input_layernorm.weight.dtype)
        reach = _run(trial, x, rotary)[1].reach
        fused = FusedLayer(trial, reach, sources)
        if not all(can_pack(part) for group in sources.values() for part in group):
            return None
        _fill(sources)
        counts = [-(-count // rows) * rows for count in CHECK_ROWS]
        return reach if all(_alike(trial, fused, rotary, count) for count in counts) else None
    except (AttributeError, TypeError, ValueError, RuntimeError, IndexError):
        return None  # a layer of other parts, or one that is called in another way


def _run(layer: nn.Module, x_1ND: Tensor, rotary: Rotary) -> tuple[Any, _Watch]:
    watch = _Watch()
    positions = rotary(x_1ND, torch.arange(3, 3 + x_1ND.shape[1])[None])
    return layer(x_1ND.clone(), attention_mask=None, position_embeddings=positions, attend=watch), watch


def _alike(trial: Any, fused: FusedLayer, rotary: Rotary, count: int) -> bool:
    weight = trial.input_layernorm.weight
    x_1ND = torch.randn(1, count, len(weight), generator=torch.Generator().manual_seed(count)).to(weight.dtype)
    (want, asked), (got, also_asked) = (_run(layer, x_1ND, rotary) for layer in (trial, fused))
    return (
        isinstance(want, Tensor)
        and (asked.calls, asked.layer, asked.reach) == (1, also_asked.layer, also_asked.reach)
        and all(torch.equal(a, b) for a, b in zip([want, *asked.seen], [got, *also_asked.seen], strict=True))
    )


def _fill(sources: Sources) -> None:
    """Pack the present weights of the layers that each packed one stands for."""
    for packed, layers in sources.items():
        own = biases(layers)
        packed.pack(torch.cat([layer.weight for layer in layers]), torch.cat(own) if own else None)


def biases(layers: Sequence[nn.Linear]) -> list[Tensor]:
    """The layers' biases; none if they have none. Raises ValueError if only some have one: their products cannot be one."""
    found = [layer.bias for layer in layers if cast("Tensor | None", layer.bias) is not None]
    if len(found) not in (0, len(layers)):
        raise ValueError("some of these layers have a bias and some have none")
    return found
