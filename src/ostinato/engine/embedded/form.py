"""The engine's optimised form of a model: whole-decoder fusion, or fused layers, if that changes no bit; else linear layers in panels.

Quantisation: on request, the linear layers of a dense decoder are rounded to 8 bits, in the same forms: to integers on CPUs, to floats
(e4m3) on GPUs that support them. The trainer does not round. Weights have one scale per output channel. Activations have one scale per
row, computed at run time, so that an answer does not depend on the rest of its batch. The output head keeps its precision by default,
because its errors would go directly into the logits.

Integers: weights and activations are rotated by the same Hadamard matrix, which spreads an outlier channel over many (`kernels.quantize`).
Sums are exact (`model.linear`); only the quantisation and the final conversion to floats round. Weights take a quarter of fp32's memory.
Floats: `torch.nn.functional.scaled_mm` multiplies and scales.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ostinato.core.errors import BadConfig
from ostinato.engine.embedded.condensed import condense
from ostinato.engine.embedded.fused import TrialCache, fuse
from ostinato.model import routing
from ostinato.model.attention import hidden
from ostinato.model.backend import replace_parts
from ostinato.model.cpu import team
from ostinato.model.experts import lay_out_experts
from ostinato.model.linear import Integers, PanelLinear, in_int8_panels, replace_by_panels
from ostinato.model.load import empty_model
from ostinato.model.paged import WholeAttend
from ostinato.model.selftest import filled, vocabulary_of

_TIMED_ROWS = (1, 8, 32, 128)
_REPEATS = 5


def prepack(model: nn.Module, integers: Integers | None = None, keep: TrialCache | None = None) -> int:
    """Convert a model, or a part of one, to the engine's form, in place. Returns how many linear layers were laid out anew.

    Results keep their bits, unless the decoder is rounded to `integers`. `keep`: the cache of trials of the forms. Raises BadConfig for a
    model that cannot be rounded.
    """
    if not isinstance(model, PreTrainedModel):
        return replace_by_panels(model)
    taken = (
        (condense(model, keep=keep) or fuse(model, keep=keep))
        if integers is None
        else quantise(model, integers, keep=keep)
    )
    lay_out_experts(model)
    return taken + replace_by_panels(model)


@torch.inference_mode()
def times_as_fast(path: Path, dtype: torch.dtype, integers: Integers) -> dict[int, float]:
    """Return by number of rows the speedup of decoder layers rounded to `integers` over the engine's usual form, on one thread.

    Each row is the next token of a sequence of its own, as in decoding with that many streams. The model in the directory `path` provides
    the layers, one of each kind. The measurement is short, so other work on the machine affects it. Raises BadConfig for a model that
    cannot be rounded.
    """
    forms = [filled(empty_model(path, dtype, shallow=True)) for _ in range(2)]
    prepack(forms[0])
    prepack(forms[1], integers)
    speedups: dict[int, float] = {}
    with team(1):
        for rows in _TIMED_ROWS:
            plain, rounded = _seconds(forms, rows)
            speedups[rows] = plain / rounded
    return speedups


def _seconds(models: list[PreTrainedModel], rows: int) -> list[float]:
    """Return the fastest of several calls of each model, in alternation."""
    ids, positions = torch.arange(rows) % vocabulary_of(models[0]), torch.zeros(rows, dtype=torch.long)
    best = [float("inf")] * len(models)
    for _ in range(1 + _REPEATS):  # the first call compiles and lays out, so it is not the fastest
        for number, model in enumerate(models):
            attend = WholeAttend([1] * rows)
            began = time.perf_counter()
            hidden(model, ids, positions, attend)
            best[number] = min(best[number], time.perf_counter() - began)
    return best


# ---------------------------------------------------------------- layers rounded to 8 bits

NO_LINEARS = (
    "engine.products = 'int8' rounds linear layers, and this model's decoder has none: set engine.products = 'plain'"
)


class Int8Linear(PanelLinear):
    """`nn.Linear` for inference, rounded to `integers`. May combine several layers, with concatenated outputs. Keeps the input's dtype."""

    def __init__(self, layers: Sequence[nn.Linear], integers: Integers) -> None:
        super().__init__(layers, partial(in_int8_panels, integers))


@torch.inference_mode()
def quantise(model: PreTrainedModel, integers: Integers, *, head: bool = False, keep: TrialCache | None = None) -> int:
    """Replace the linear layers of a dense model's decoder by integer ones, in place; return how many were replaced.

    The decoder is condensed if possible (`condensed`), else its layers are fused (`fused`). With `head` the output head is replaced too.
    `keep` as for `prepack`. Raises BadConfig for a mixture of experts, whose experts are not linear layers, and for a decoder without
    linear layers.
    """
    check_dense(model)
    linears = [part for part in model.modules() if isinstance(part, nn.Linear)]
    top = model.get_output_embeddings()

    def make(layers: Sequence[nn.Linear]) -> nn.Module:
        return Int8Linear(layers, integers)

    if not condense(model, partial(in_int8_panels, integers), keep):
        fuse(model, make, keep)
    replace_parts(model, lambda child: make([child]) if isinstance(child, nn.Linear) and child is not top else None)
    if head and isinstance(top, nn.Linear):
        model.set_output_embeddings(make([top]))
    left = {id(part) for part in model.modules()}
    replaced = sum(id(part) not in left for part in linears)
    if not replaced:
        raise BadConfig(NO_LINEARS)
    return replaced


def check_dense(model: PreTrainedModel, products: str = "int8") -> None:
    """Raise BadConfig for a mixture of experts."""
    if routing.of(model) is not None:
        raise BadConfig(
            f"engine.products = {products!r} is for dense models, and this one is a mixture of experts: set engine.products = 'plain'"
        )


# ---------------------------------------------------------------- 8-bit floats


FP8_NAME = "fp8 e4m3 weights by output, activations by row"
"""Its name in a numerics contract."""
_E4M3_MAX = 448.0
_MULTIPLE = 16  # the GPU's product needs input and output sizes that are multiples of it
_MIN_CAPABILITY = (8, 9)  # first CUDA compute capability with e4m3 products


def rounded(x_NI: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows to e4m3 numbers [N, I] and fp32 scales [N, 1]: number x scale is within 1/16 of each element, or 2^-10 of a scale."""
    scales_N1 = x_NI.abs().amax(-1, keepdim=True).float() / _E4M3_MAX
    scales_N1 = torch.where(scales_N1 == 0, 1.0, scales_N1)  # a NaN stays a NaN
    return (x_NI.float() / scales_N1).clamp_(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn), scales_N1


class Fp8Linear(nn.Module):
    """`nn.Linear` for inference in 8-bit floats. Keeps the input's dtype."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        numbers_OI, scales_O1 = rounded(layer.weight.detach())
        self._weight_IO, self._scales_1O = numbers_OI.t(), scales_O1.t()
        bias = cast("Tensor | None", layer.bias)
        self._bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        numbers, scales = rounded(x.reshape(-1, x.shape[-1]))
        by_row = F.ScalingType.RowWise
        dtype = torch.bfloat16 if x.is_cuda else x.dtype  # on a GPU, row-wise scaling supports bf16 output only
        out = F.scaled_mm(
            numbers, self._weight_IO, scales, by_row, self._scales_1O, by_row, output_dtype=dtype, use_fast_accum=False
        ).to(x.dtype)
        out = out if self._bias is None else out + self._bias
        return out.view(*x.shape[:-1], -1)


@torch.inference_mode()
def round_to_fp8(model: PreTrainedModel) -> int:
    """Replace the linear layers of a dense model's decoder by fp8 ones, in place; return how many. Layers of unsupported sizes stay.

    Raises BadConfig for a mixture of experts, whose experts are not linear layers, for a model without a layer of a supported size, and for
    a GPU or a torch version without fp8 products.
    """
    check_dense(model, "fp8")
    if not hasattr(F, "scaled_mm"):
        raise BadConfig(
            f"engine.products = 'fp8' needs torch.nn.functional.scaled_mm, which torch {torch.__version__} lacks: "
            "pip install --upgrade torch, or set engine.products = 'plain'"
        )
    if model.device.type == "cuda" and torch.cuda.get_device_capability(model.device) < _MIN_CAPABILITY:
        raise BadConfig(
            f"engine.products = 'fp8': {torch.cuda.get_device_name(model.device)} has no products of 8-bit floats: set "
            "engine.products = 'plain'"
        )
    top = model.get_output_embeddings()

    def ours(child: nn.Module) -> Fp8Linear | None:
        if not isinstance(child, nn.Linear) or child is top or any(n % _MULTIPLE for n in child.weight.shape):
            return None
        return Fp8Linear(child)

    replaced = replace_parts(model, ours)
    if not replaced:
        raise BadConfig(
            f"engine.products = 'fp8' rounds linear layers whose sizes are multiples of {_MULTIPLE}, and this model's decoder has none: "
            "set engine.products = 'plain'"
        )
    return replaced
