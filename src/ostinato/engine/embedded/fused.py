"""Operator fusion: a decoder layer in eleven calls instead of some sixty, since a token's overhead beyond its arithmetic is mostly calls.

It computes the library's layer, x + attention(norm(x)) followed by x + mlp(norm(x)), or with a norm after each of the two as well, with
the same bits.

Trial: once per configuration a model in another form, fused or `condensed`, is compared with its original form, and if any bit differs
it is left unchanged.
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

# ---------------------------------------------------------------- trial


_LOG = logging.getLogger(__name__)
_COUNTS = (1, 2, 3, 5)  # of tokens, at which models are compared
_LOCK = threading.Lock()
L = TypeVar("L")


@dataclass(frozen=True, slots=True)
class Reach:
    """A layer's attention parameters besides its queries, keys and values; see `model.attention.Attend`."""

    scale: float
    window: int


@dataclass(frozen=True, slots=True)
class EngineForm:
    """What a trial of a form that changes no bit found: each layer's attention parameters.

    Example: ``EngineForm(reaches=(Reach(scale=0.125, window=0),))``
    """

    reaches: tuple[Reach, ...]


Keep = Callable[[str, str, torch.dtype, Callable[[], EngineForm]], EngineForm]
"""Called with a form's name, a configuration, a dtype and a trial. Returns what the trial finds on this machine, or found in an earlier
process. It passes on what the trial raises.
"""


class _NothingToKeep(Exception):
    """The form does not fit, which may have a cause that passes, or the weights do not tell whether it does."""


def count_linears(part: nn.Module) -> int:
    """The number of linear layers in a module."""
    return sum(isinstance(each, nn.Linear) for each in part.modules())


_known: dict[tuple[str, str, torch.dtype], tuple[Reach, ...] | None] = {}
"""`EngineForm.reaches` by form, configuration and dtype; None: the form does not fit."""
_DESCRIBED = {"fused": "fused layers", "condensed": "its layers in one call"}


def tried_once(
    form: str,
    model: PreTrainedModel,
    layers: int,
    exchange: Callable[[Sequence[Reach], L], None],
    restore: Callable[[], None],
    layout: L,
    *,
    panels: L,
    also: Callable[[int], Attend] | None = None,
    keep: Keep | None = None,
) -> None:
    """Bring a model into a form if that changes no bit, which is tried once per process for each configuration.

    Args:
        form: its name in `_DESCRIBED`.
        model: the model.
        layers: how many layers it has, each of which must call our attention.
        exchange: replaces the model's parts, given each layer's attention parameters and a layout of weights.
        restore: undoes it.
        layout: how weights are laid out.
        panels: how they are laid out in the trial, because another layout may give other bits.
        also: makes another attention over a number of tokens with which the bits must be the same.
        keep: knows forms that fitted in earlier processes; None: each process tries it.
    """
    key = (model.config.to_json_string(use_diff=False), model.dtype)
    tried = False

    def trial() -> EngineForm:
        nonlocal tried
        tried = True
        found, telling = _try(form, model, layers, lambda reaches: exchange(reaches, panels), restore, also)
        if found is not None and layout is not panels:
            restore()
            exchange(found, layout)
        if telling:
            _known[form, *key] = found
        if found is None:
            raise _NothingToKeep
        return EngineForm(found)

    with _LOCK, contextlib.suppress(_NothingToKeep):
        if (form, *key) not in _known:
            reaches = (trial() if keep is None else keep(form, *key, trial)).reaches
            if not tried:
                _known[form, *key] = reaches
                exchange(reaches, layout)
                _compute(model)
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
    """Each layer's attention parameters, or None if the model was left unchanged; and whether that is valid for other weights, too."""
    telling = True
    try:
        want, reaches = answers(model)
        telling = is_telling(want)
        if telling and len(reaches) == layers:
            exchange(reaches)
            got, asked = answers(model)
            same = asked == reaches and have_same_bits(want, got)
            if same and (also is None or have_same_bits(want, answers(model, also)[0])):
                return reaches, True
            _LOG.warning(
                "%s is not %s, and slower for it: %s give other bits", type(model).__name__, form, _DESCRIBED[form]
            )
    except (AttributeError, TypeError, ValueError, RuntimeError, IndexError) as error:
        # unsupported parts, or parts with another calling convention, unless it may fit once there is memory
        telling = telling and not is_short(error)
    restore()
    return None, telling


def _compute(model: PreTrainedModel) -> None:
    """Compute some tokens, as a trial does, so that no request waits until the kernels are loaded."""
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


def answers(
    model: PreTrainedModel, attending: Callable[[int], Attend] = RecordedAttention
) -> tuple[list[Tensor], tuple[Reach, ...]]:
    """The model's final states for several runs of tokens, and each layer's attention parameters in the last run.

    `attending` makes the attention over a given number of tokens. The parameters are empty unless it makes a `RecordedAttention`.
    """
    found: list[Tensor] = []
    attend: Attend = RecordedAttention(0)
    with team(1):  # whichever thread this is, so that the compared bits come from equal thread counts
        for first, count in runs_of(model.config.get_text_config()):
            attend = attending(count)
            ids = torch.randint(vocabulary_of(model), (count,), generator=torch.Generator().manual_seed(count))
            found.append(hidden(model, ids, torch.arange(first, first + count), attend))
    return found, tuple(attend.reaches) if isinstance(attend, RecordedAttention) else ()


def is_telling(states: Sequence[Tensor]) -> bool:
    """Whether equal bits mean something: by weights of zeros every token gets the same state, and what overflows hides the rest."""
    return all(bool(each.isfinite().all()) for each in states) and len(torch.unique(states[-1], dim=0)) > 1


def have_same_bits(states: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether two models' answers agree in each bit."""
    return all(torch.equal(bits_of(a), bits_of(b)) for a, b in zip(states, others, strict=True))


def runs_of(config: Any) -> list[tuple[int, int]]:
    """(first position, tokens): short runs from the beginning, and long runs at positions where a model may compute differently.

    Some models change with the position: Ministral 3 scales its queries from the length at which it was first trained.
    """
    longest = _COUNTS[-1]
    ends = cast("int | None", getattr(config, "max_position_embeddings", None)) or 0
    far = {length - longest // 2 for length in _first_lengths(config)} | {ends - longest}
    return [(0, count) for count in _COUNTS] + [(first, longest) for first in sorted(far) if first > 0]


def _first_lengths(config: Any) -> set[int]:
    """The lengths at which a model was trained before its rotary embeddings were stretched, according to its configuration."""
    rope = cast("dict[str, Any]", getattr(config, "rope_parameters", None) or {})
    told = [vars(config), rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    lengths = (cast("dict[str, Any]", each).get("original_max_position_embeddings") for each in told)
    return {length for length in lengths if isinstance(length, int)}


# ---------------------------------------------------------------- fused layers


_UNREAD = np.empty(0, np.float32)  # a norm's scales are only for a backward pass, and there is none
Make = Callable[[Sequence[nn.Linear]], nn.Module]
"""Makes one layer of several, with concatenated outputs. Raises ValueError if they cannot be combined."""


class FusedMLP(nn.Module):
    """`GatedMLP` with its first two products combined into one."""

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
    """The cosines and sines of a forward pass as arrays, made once for all of its layers. Each thread runs its own pass."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[Tensor, Tensor, tuple[NDArray[Any], NDArray[Any]]]] = {}

    def arrays(self, cos_1ND: Tensor, sin_1ND: Tensor) -> tuple[NDArray[Any], NDArray[Any]]:
        """Cosines and sines: [1, N, D] -> [N, D] each."""
        thread = threading.get_ident()
        held = self._held.get(thread)
        if held is None or held[0] is not cos_1ND or held[1] is not sin_1ND:
            held = self._held[thread] = cos_1ND, sin_1ND, (array(cos_1ND[0]), array(sin_1ND[0]))
        return held[2]


class FusedLayer(nn.Module):
    """A decoder layer over copies of another's matrices, made by `make`, and the memory of its norms. The model's layers share `rotations`.

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
        # views, so that later writes to a norm's weight are seen
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
        rms_norm(array(x_ND), *self._before, array(normed_ND), _UNREAD)
        q_NHD, k_NKD, v_NKD = self._heads_of(self.qkv(normed_ND), *position_embeddings)
        seen_NHD = attend(self._layer, q_NHD, k_NKD, v_NKD, self._reach.scale, self._reach.window)
        out_ND = self.out(seen_NHD.view(len(x_ND), -1))
        if self._sandwich:
            rms_norm(array(out_ND), *self._after, array(out_ND), _UNREAD)
        add_norm(array(x_ND), array(out_ND), *(self._sandwich[0] if self._sandwich else self._after), array(normed_ND))
        more_ND = self.mlp(normed_ND) if self._flat else self.mlp(normed_ND.unsqueeze(0)).squeeze(0)
        if self._sandwich:
            rms_norm(array(more_ND), *self._sandwich[1], array(more_ND), _UNREAD)
        return x_ND.add_(more_ND).unsqueeze(0)

    def _heads_of(self, qkv_NW: Tensor, cos_1ND: Tensor, sin_1ND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normed and rotated queries [N, H, D] and keys [N, KV, D], and values [N, KV, D]."""
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
    """The norm, checked to have `width` weights if that is given. Raises ValueError for a norm that the kernels do not support."""
    if not isinstance(norm, RMSNorm) or (width and len(norm.weight) != width) or len(norm.weight) % LANES:
        raise ValueError("a norm of another kind")
    return norm


def sandwich_of(layer: Any) -> tuple[RMSNorm, RMSNorm] | None:
    """The norms before and after the feed-forward layer if a layer has both, as in Gemma 3: its `post_attention_layernorm` then stands
    directly after the attention. None for the usual layer. Raises ValueError for norms that the kernels do not support.
    """
    before, after = (getattr(layer, f"{place}_feedforward_layernorm", None) for place in ("pre", "post"))
    return None if before is None and after is None else (norm_of(before), norm_of(after))


def _terms(norm: RMSNorm | None, like: NDArray[Any] | None = None) -> tuple[NDArray[Any], np.float32, bool]:
    """A norm's weight [1, D], its epsilon, and whether it is zero-centred; without a norm, an empty weight [1, 0] in `like`'s dtype."""
    if norm is None:
        assert like is not None
        return np.empty((1, 0), like.dtype), np.float32(0.0), False
    return array(norm.weight)[None], np.float32(norm.eps), norm.zero_centered


@torch.inference_mode()
def fuse(model: PreTrainedModel, make: Make = PanelLinear, keep: Keep | None = None) -> int:
    """Replace the decoder layers of a CPU model by fused ones, in place; returns how many linear layers they took over.

    All or none: a model with unsupported parts, or a model that gives other bits, stays as it is; `keep` as for `tried_once`.
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

    tried_once("fused", model, len(plain), exchange, restore, make, panels=PanelLinear, keep=keep)
    return before - count_linears(layers)
