"""Operator fusion: computes a decoder layer in eleven calls instead of some sixty, because call overhead dominates a token's cost.

A fused layer computes the library's layer, x + attention(norm(x)) followed by x + mlp(norm(x)), optionally with a norm after each of the
two, with the same bits.

Trial: once per model configuration, the model in an optimised form (fused or `condensed`) is compared with its original form. If any bit
differs, the model stays unchanged.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from ostinato.core.memory import is_short
from ostinato.model.attention import Attend, hidden
from ostinato.model.cpu import team
from ostinato.model.experts import Activation, GatedMLP, gated
from ostinato.model.kernels.norm import LANES, add_norm, rms_norm, rotate
from ostinato.model.linear import PanelLinear
from ostinato.model.norms import RMSNorm
from ostinato.model.paged import WholeAttend, array
from ostinato.model.selftest import bits_of, vocabulary_of

# ---------------------------------------------------------------- trials of optimised forms


_LOG = logging.getLogger(__name__)
_COUNTS = (1, 2, 3, 5)  # numbers of tokens at which models are compared
_LOCK = threading.Lock()
L = TypeVar("L")


@dataclass(frozen=True, slots=True)
class Reach:
    """A layer's attention parameters: the scale of its scores and its sliding window; see `model.attention.Attend`."""

    scale: float
    window: int


@dataclass(frozen=True, slots=True)
class EngineForm:
    """The result of a successful trial, in which the form changed no bit: each layer's attention parameters.

    Example: ``EngineForm(reaches=(Reach(scale=0.125, window=0),))``
    """

    reaches: tuple[Reach, ...]


TrialCache = Callable[[str, str, torch.dtype, Callable[[], EngineForm]], EngineForm]
"""A cache of trials on this machine: called with a form's name, a configuration, a dtype and the trial, it returns the trial's result, or
that of an earlier process. It passes on what the trial raises.
"""


class _NotCacheable(Exception):
    """The trial has no result to cache: the form does not fit, perhaps for a transient cause, or these weights make it inconclusive."""


def count_linears(part: nn.Module) -> int:
    """Return the number of linear layers in a module."""
    return sum(isinstance(each, nn.Linear) for each in part.modules())


_known: dict[tuple[str, str, torch.dtype], tuple[Reach, ...] | None] = {}
"""`EngineForm.reaches` by form, configuration and dtype; None: the form does not fit."""
_FORM_TEXTS = {"fused": "fused layers", "condensed": "its layers in one call"}


def convert_if_exact(
    form: str,
    model: PreTrainedModel,
    layers: int,
    exchange: Callable[[Sequence[Reach], L], None],
    restore: Callable[[], None],
    layout: L,
    *,
    panels: L,
    also: Callable[[int], Attend] | None = None,
    keep: TrialCache | None = None,
) -> None:
    """Convert a model to an optimised form if that changes no bit. This is tried once per process and configuration.

    Args:
        form: the form's name in `_FORM_TEXTS`.
        model: the model.
        layers: the number of its layers, each of which must call our attention.
        exchange: replaces the model's parts, given each layer's attention parameters and a weight layout.
        restore: undoes `exchange`.
        layout: the weight layout to use.
        panels: the weight layout of the trial; `layout` may give other bits, as integers do.
        also: makes a second attention, over a given number of tokens, with which the bits must be the same too.
        keep: the cache of trials of earlier processes; None: each process tries the form itself.
    """
    key = (model.config.to_json_string(use_diff=False), model.dtype)
    tried = False

    def trial() -> EngineForm:
        nonlocal tried
        tried = True
        reaches, conclusive = _try(form, model, layers, lambda reaches: exchange(reaches, panels), restore, also)
        if reaches is not None and layout is not panels:
            restore()
            exchange(reaches, layout)
        if conclusive:
            _known[form, *key] = reaches
        if reaches is None:
            raise _NotCacheable
        return EngineForm(reaches)

    with _LOCK, contextlib.suppress(_NotCacheable):
        if (form, *key) not in _known:
            reaches = (trial() if keep is None else keep(form, *key, trial)).reaches
            if not tried:
                _known[form, *key] = reaches
                exchange(reaches, layout)
                _warm_up(model)
        elif (reaches := _known[form, *key]) is not None:
            exchange(reaches, layout)


def _try(
    form: str,
    model: PreTrainedModel,
    layers: int,
    exchange: Callable[[Sequence[Reach]], None],
    restore: Callable[[], None],
    also: Callable[[int], Attend] | None,
) -> tuple[tuple[Reach, ...] | None, bool]:
    """Return each layer's attention parameters, None if the model was left unchanged; and whether the result holds for other weights."""
    conclusive = True
    try:
        want, reaches = final_states(model)
        conclusive = is_conclusive(want)
        if conclusive and len(reaches) == layers:
            exchange(reaches)
            got, got_reaches = final_states(model)
            same = got_reaches == reaches and have_same_bits(want, got)
            if same and (also is None or have_same_bits(want, final_states(model, also)[0])):
                return reaches, True
            _LOG.warning(
                "%s is not %s, and slower for it: %s give other bits", type(model).__name__, form, _FORM_TEXTS[form]
            )
    except (AttributeError, TypeError, ValueError, RuntimeError, IndexError) as error:
        # unsupported parts or another calling convention; not conclusive if only memory was short
        conclusive = conclusive and not is_short(error)
    restore()
    return None, conclusive


def _warm_up(model: PreTrainedModel) -> None:
    """Compute some tokens, as a trial does, to load the kernels before the first request."""
    first, count = runs_of(model.config.get_text_config())[-1]
    with team(1):
        hidden(model, torch.zeros(count, dtype=torch.long), torch.arange(first, first + count), WholeAttend([count]))


class RecordedAttention:
    """Attention over one whole sequence that records each layer's attention parameters."""

    def __init__(self, tokens: int) -> None:
        self._whole = WholeAttend([tokens])
        self.reaches: list[Reach] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
        self.reaches.append(Reach(scale, window))
        return self._whole(layer, q, k, v, scale, window)


def final_states(
    model: PreTrainedModel, attending: Callable[[int], Attend] = RecordedAttention
) -> tuple[list[Tensor], tuple[Reach, ...]]:
    """Return the model's final hidden states for several runs of tokens, and each layer's attention parameters in the last run.

    `attending` makes the attention over a given number of tokens. The parameters are empty unless it makes a `RecordedAttention`.
    """
    states: list[Tensor] = []
    attend: Attend = RecordedAttention(0)
    with team(1):  # equal thread counts for the compared bits, whichever thread calls
        for first, count in runs_of(model.config.get_text_config()):
            attend = attending(count)
            ids = torch.randint(vocabulary_of(model), (count,), generator=torch.Generator().manual_seed(count))
            states.append(hidden(model, ids, torch.arange(first, first + count), attend))
    return states, tuple(attend.reaches) if isinstance(attend, RecordedAttention) else ()


def is_conclusive(states: Sequence[Tensor]) -> bool:
    """Return whether equal bits prove anything: with zero weights all states are equal, and an overflow hides other differences."""
    return all(bool(each.isfinite().all()) for each in states) and len(torch.unique(states[-1], dim=0)) > 1


def have_same_bits(states: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return whether two models' final states agree in every bit."""
    return all(torch.equal(bits_of(a), bits_of(b)) for a, b in zip(states, others, strict=True))


def runs_of(config: Any) -> list[tuple[int, int]]:
    """Return runs (first position, tokens): short ones from position 0, and longer ones where a model may compute differently.

    Some models depend on the absolute position: Ministral 3 scales its queries beyond its original training length.
    """
    longest = _COUNTS[-1]
    ends = cast("int | None", getattr(config, "max_position_embeddings", None)) or 0
    far = {length - longest // 2 for length in _first_lengths(config)} | {ends - longest}
    return [(0, count) for count in _COUNTS] + [(first, longest) for first in sorted(far) if first > 0]


def _first_lengths(config: Any) -> set[int]:
    """Return the configured training lengths before the rotary embeddings were stretched."""
    rope = cast("dict[str, Any]", getattr(config, "rope_parameters", None) or {})
    settings = [vars(config), rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    lengths = (cast("dict[str, Any]", each).get("original_max_position_embeddings") for each in settings)
    return {length for length in lengths if isinstance(length, int)}


# ---------------------------------------------------------------- fused layers


_NO_SCALES = np.empty(0, np.float32)  # a norm's scales are only needed for a backward pass
Make = Callable[[Sequence[nn.Linear]], nn.Module]
"""Combines linear layers into one with concatenated outputs. Raises ValueError if they cannot be combined."""


class FusedMLP(nn.Module):
    """`GatedMLP` with its gate and up projections combined into one product."""

    def __init__(self, mlp: GatedMLP, make: Make) -> None:
        super().__init__()
        gate, up, down = (cast("nn.Linear", part) for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        self.gate_up, self.down = make([gate, up]), make([down])
        self._activation: Activation = mlp.activation

    def forward(self, x: Tensor) -> Tensor:
        """[N, D] -> [N, D]."""
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(gated(gate, up, self._activation))


class Rotations:
    """A per-thread cache of the current forward pass's cosines and sines as arrays, shared by all layers."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[Tensor, Tensor, tuple[NDArray[Any], NDArray[Any]]]] = {}

    def arrays(self, cos_1ND: Tensor, sin_1ND: Tensor) -> tuple[NDArray[Any], NDArray[Any]]:
        """Convert cosines and sines: [1, N, D] -> [N, D] each."""
        thread = threading.get_ident()
        held = self._held.get(thread)
        if held is None or held[0] is not cos_1ND or held[1] is not sin_1ND:
            held = self._held[thread] = cos_1ND, sin_1ND, (array(cos_1ND[0]), array(sin_1ND[0]))
        return held[2]


class FusedLayer(nn.Module):
    """A fused decoder layer: copies another layer's matrices, by `make`, and shares the memory of its norms. Layers share `rotations`.

    Raises ValueError or AttributeError for a layer with unsupported parts.
    """

    def __init__(self, layer: Any, reach: Reach, rotations: Rotations, make: Make) -> None:
        super().__init__()
        attention: Any = layer.self_attn
        self._layer: int = attention.layer_idx
        self._reach, self._rotations, self._dim = reach, rotations, cast("int", attention.head_dim)
        self.input_layernorm = norm_of(layer.input_layernorm)
        self.post_attention_layernorm = norm_of(layer.post_attention_layernorm)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = sandwich_of(layer) or (None, None)
        self.q_norm, self.k_norm = (
            None if norm is None else norm_of(norm, self._dim)
            for norm in (getattr(attention, "q_norm", None), getattr(attention, "k_norm", None))
        )
        # views, so that later writes to a norm's weight take effect
        self._before, self._after = _terms(self.input_layernorm), _terms(self.post_attention_layernorm)
        self._sandwich = [_terms(norm) for norm in sandwich_of(layer) or ()]
        like = array(attention.q_proj.weight)
        self._of_queries, self._of_keys = _terms(self.q_norm, like), _terms(self.k_norm, like)
        self.qkv = make([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out = make([attention.o_proj])
        self._flat = isinstance(layer.mlp, GatedMLP)  # the library's own MLPs take [1, N, D]
        self.mlp: nn.Module = FusedMLP(layer.mlp, make) if isinstance(layer.mlp, GatedMLP) else layer.mlp
        self._heads = attention.q_proj.out_features // self._dim
        self._kv_heads = attention.k_proj.out_features // self._dim
        self.attention_type: str = getattr(layer, "attention_type", "full_attention")

    def forward(
        self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], attend: Attend, **_: Any
    ) -> Tensor:
        """[1, N, D] -> [1, N, D]. Overwrites its input."""
        x_ND = hidden_states[0]
        normed_ND = torch.empty_like(x_ND)
        rms_norm(array(x_ND), *self._before, array(normed_ND), _NO_SCALES)
        q_NHD, k_NKD, v_NKD = self._heads_of(self.qkv(normed_ND), *position_embeddings)
        seen_NHD = attend(self._layer, q_NHD, k_NKD, v_NKD, self._reach.scale, self._reach.window)
        out_ND = self.out(seen_NHD.view(len(x_ND), -1))
        if self._sandwich:
            rms_norm(array(out_ND), *self._after, array(out_ND), _NO_SCALES)
        add_norm(array(x_ND), array(out_ND), *(self._sandwich[0] if self._sandwich else self._after), array(normed_ND))
        more_ND = self.mlp(normed_ND) if self._flat else self.mlp(normed_ND.unsqueeze(0)).squeeze(0)
        if self._sandwich:
            rms_norm(array(more_ND), *self._sandwich[1], array(more_ND), _NO_SCALES)
        return x_ND.add_(more_ND).unsqueeze(0)

    def _heads_of(self, qkv_NW: Tensor, cos_1ND: Tensor, sin_1ND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the normed and rotated queries [N, H, D] and keys [N, KV, D], and the values [N, KV, D]."""
        rows, dim, heads, kv_heads = len(qkv_NW), self._dim, self._heads, self._kv_heads
        if cos_1ND.shape != (1, rows, dim):
            raise ValueError("only a part of each head is rotated")  # the kernel does not check this
        packed, (cos, sin) = array(qkv_NW), self._rotations.arrays(cos_1ND, sin_1ND)
        q_NX, k_NX = (qkv_NW.new_empty(rows, count * dim) for count in (heads, kv_heads))
        rotate(packed, 0, heads, cos, sin, *self._of_queries, array(q_NX))
        rotate(packed, heads * dim, kv_heads, cos, sin, *self._of_keys, array(k_NX))
        v_NX = qkv_NW[:, (heads + kv_heads) * dim :]
        return q_NX.view(rows, heads, dim), k_NX.view(rows, kv_heads, dim), v_NX.view(rows, kv_heads, dim)


def norm_of(norm: object, width: int = 0) -> RMSNorm:
    """Return the norm. Raises ValueError if the kernels do not support it, or if it does not have `width` weights (0: any number)."""
    if not isinstance(norm, RMSNorm) or (width and len(norm.weight) != width) or len(norm.weight) % LANES:
        raise ValueError("a norm of another kind")
    return norm


def sandwich_of(layer: Any) -> tuple[RMSNorm, RMSNorm] | None:
    """Return the norms before and after the feed-forward layer of a layer that has both, as in Gemma 3; None for the usual layer.

    With them, `post_attention_layernorm` comes directly after the attention. Raises ValueError for norms that the kernels do not support.
    """
    before, after = (getattr(layer, f"{place}_feedforward_layernorm", None) for place in ("pre", "post"))
    return None if before is None and after is None else (norm_of(before), norm_of(after))


def _terms(norm: RMSNorm | None, like: NDArray[Any] | None = None) -> tuple[NDArray[Any], np.float32, bool]:
    """Return a norm's weight [1, D], epsilon, and whether it is zero-centred; without a norm, an empty weight [1, 0] of `like`'s dtype."""
    if norm is None:
        assert like is not None
        return np.empty((1, 0), like.dtype), np.float32(0.0), False
    return array(norm.weight)[None], np.float32(norm.eps), norm.zero_centered


@torch.inference_mode()
def fuse(model: PreTrainedModel, make: Make = PanelLinear, keep: TrialCache | None = None) -> int:
    """Replace the decoder layers of a CPU model by fused ones, in place; return how many linear layers they replaced.

    All or none: a model with unsupported parts, or one that would give other bits, stays unchanged. `keep` as for `convert_if_exact`.
    """
    body: Any = model.base_model
    layers: Any = getattr(body, "layers", None)
    if not isinstance(layers, nn.ModuleList) or model.device.type != "cpu":
        return 0
    before, plain = count_linears(layers), list(layers)

    def exchange(reaches: Sequence[Reach], layout: Make) -> None:
        rotations = Rotations()
        for number, reach in enumerate(reaches):
            layers[number] = FusedLayer(layers[number], reach, rotations, layout)

    def restore() -> None:
        for number, layer in enumerate(plain):
            layers[number] = layer

    convert_if_exact("fused", model, len(plain), exchange, restore, make, panels=PanelLinear, keep=keep)
    return before - count_linears(layers)
