"""The matrix product of every model: our own kernels in a defined order of additions (`kernels.product`), for bf16 and fp32 on CPUs.

A row's result depends on that row alone: not on the batch size, not on the number of threads, and, in the order "blocks", not on the kind
of CPU. Other dtypes and devices go to torch.

Weights may also be 8-bit integers: this module quantises them, lays them out for `kernels.int8_product`, and checks that sums of products
are exact on this machine. An exact integer sum is the same with all instructions; the check includes the largest numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from ostinato.core.errors import BadConfig
from ostinato.model.backend import replace_parts
from ostinato.model.cpu import capabilities, split, together
from ostinato.model.kernels.decoder import project
from ostinato.model.kernels.int8_product import (
    INT8,
    INT8_BLOCK,
    INT8_TILES,
    MOST_INPUTS,
    OFFSET,
    int8_panel_products,
    prepare_levels,
)
from ostinato.model.kernels.pairs import HAS_PAIRS
from ostinato.model.kernels.processor import tiles_allowed
from ostinato.model.kernels.product import BLOCK, FUSED, PAIRS, TILES, lay_out
from ostinato.model.kernels.quantize import LEVELS, block, rotate
from ostinato.model.kernels.thread_barrier import COLUMNS
from ostinato.model.kernels.vector import PANEL
from ostinato.model.paged import array

Order = Literal["blocks", "pairs"]
"""The order of additions in bf16 products. Every CPU supports "blocks"; "pairs" needs AVX512-BF16."""

_NO_BIAS: dict[torch.dtype, NDArray[Any]] = {
    torch.bfloat16: np.empty((1, 0), np.uint16),
    torch.float32: np.empty((1, 0), np.float32),
}
_order: Order | None = None


def possible_orders() -> tuple[Order, ...]:
    """Return the orders that this CPU supports, the one that is expected to be faster first."""
    if not HAS_PAIRS:
        return ("blocks",)
    return ("blocks", "pairs") if tiles_allowed() else ("pairs", "blocks")


def use_order(order: Order) -> None:
    """Set the order of this process's bf16 products from now on. Raises BadConfig if the CPU does not support it."""
    global _order
    check_order(order)
    _order = order


def check_order(order: Order) -> None:
    """Raise BadConfig if this CPU does not support the order."""
    if order not in possible_orders():
        raise BadConfig(
            f'model.order = "{order}": this CPU has no AVX512-BF16, or it is masked; set model.order = "blocks", which all CPUs compute'
        )


def order_in_use() -> Order:
    """Return the order of this process's bf16 products: as set by `use_order`, else the first of `possible_orders`."""
    return _order or possible_orders()[0]


@dataclass(frozen=True, slots=True)
class Panels:
    """A weight [outputs, inputs] in the kernels' layout. `dtype`: the dtype of the input rows and of the products."""

    words: Tensor
    inputs: int
    outputs: int
    dtype: torch.dtype
    how: int
    """The kernels' argument `how`: the order in use when the weight was laid out, or the integer format."""

    @property
    def address(self) -> int:
        """The memory address that kernels read; valid as long as this object lives."""
        return self.words.data_ptr()


def in_panels(weight: Tensor, beside: Tensor | None = None) -> Panels:
    """Lay out a bf16 or fp32 weight [N, K] in panels. With `beside`, of the same shape, half of each panel's outputs are from `beside`."""
    inputs, weight = weight.shape[1], interleaved(weight, beside)
    if inputs % BLOCK:
        weight = F.pad(weight, (0, -inputs % BLOCK))
    weight = weight.contiguous()
    rows, address = len(weight), weight.data_ptr()
    words = torch.empty(-(-rows // PANEL), weight.shape[1] * weight.itemsize // 4, PANEL, dtype=torch.int32)
    out = array(words)
    split(len(words), lambda a, b: lay_out(address, rows, a, b, out))
    return Panels(words, inputs, rows, weight.dtype, how_multiplied(weight.dtype))


def interleaved(weight: Tensor, beside: Tensor | None) -> Tensor:
    """Return a weight [N, K] in the panels' order of outputs; with `beside`, of the same shape, half of each panel's are from `beside`."""
    if beside is None:
        return weight.detach()
    both = [each.detach().view(-1, PANEL // 2, weight.shape[1]) for each in (weight, beside)]
    return torch.stack(both, 1).view(2 * len(weight), weight.shape[1])


def multiply(x: Tensor, panels: Panels, bias: Tensor | None = None) -> Tensor:
    """Multiply [..., K] by a weight in panels and add a bias [N]: [..., N]. Without gradients, on torch's number of threads.

    Raises RuntimeError, as torch would, for shapes, dtypes or devices that do not match.
    """
    fits = bias is None or (bias.shape == (panels.outputs,) and bias.dtype == panels.dtype and bias.is_cpu)
    if not (fits and x.is_cpu and x.dtype == panels.dtype and x.dim() and x.shape[-1] == panels.inputs > 0):
        raise RuntimeError(
            f"{x.dtype} {tuple(x.shape)} cannot be multiplied by a {panels.dtype} weight {(panels.outputs, panels.inputs)}"
            + ("" if bias is None else f" with a bias {tuple(bias.shape)}")
        )
    x_MK = x.reshape(-1, panels.inputs).contiguous()
    out = x.new_empty(*x.shape[:-1], panels.outputs)
    if len(x_MK):
        counters, how = np.zeros((2, COLUMNS), np.int64), panels.how
        levels = room_for_levels(len(x_MK) if how >= INT8 else 0, panels.inputs)
        biases = _NO_BIAS[panels.dtype] if bias is None else array(bias.detach().clone())[None]
        xs, outs = array(x_MK), array(out.view(-1, panels.outputs))
        # a late thread may still call the lambda, which keeps the panels alive
        together(lambda: project(counters, xs, levels, panels.address, how, biases, outs))
    return out


def room_for_levels(rows: int, inputs: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Allocate the kernels' buffers for the 8-bit levels of `rows` rows, and for their scales."""
    blocks = -(-inputs // INT8_BLOCK) | 1  # an odd number of cache lines, so that rows map to different cache sets
    return np.empty((rows, blocks * INT8_BLOCK), np.uint8), np.empty(rows, np.float32)


def how_multiplied(dtype: torch.dtype) -> int:
    """Return the kernels' argument `how` for weights of this dtype."""
    if dtype != torch.bfloat16:
        return FUSED
    if order_in_use() == "pairs":
        return PAIRS
    return TILES if tiles_allowed() else FUSED


def can_lay_out(weight: Tensor) -> bool:
    """Return whether our kernels support this weight: bf16 or fp32, on the CPU."""
    return weight.is_cpu and weight.dtype in _NO_BIAS


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply [..., in] by a weight [out, in] and add a bias [out]: [..., out]. Works under autograd and inference_mode."""
    if not (can_lay_out(weight) and x.is_cpu and x.dtype == weight.dtype):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled():
        result: Tensor = _Linear.apply(x, weight, bias)  # pyright: ignore[reportAssignmentType]
        return result
    return multiply(x, in_panels(weight), bias)


class Linear(nn.Linear):
    """`nn.Linear` with this module's product. Shares the weight and bias of the layer that it replaces."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return linear(input, self.weight, self.bias)


class PanelLinear(nn.Module):
    """A linear layer for inference with a copy of its weight in panels: the same bits, without a layout at each call."""

    def __init__(self, layers: Sequence[nn.Linear | Conv1D], lay_out: Callable[[Tensor], Panels] = in_panels) -> None:
        """Combine `layers` into one layer with concatenated outputs. Raises ValueError if they cannot be combined."""
        super().__init__()
        biases = [layer.bias.detach() for layer in layers if cast("Tensor | None", layer.bias) is not None]
        weights = [layer.weight.t() if isinstance(layer, Conv1D) else layer.weight.detach() for layer in layers]
        if len(biases) not in (0, len(layers)) or not all(map(can_lay_out, weights)):
            raise ValueError("these layers cannot be one in panels")
        self._panels = lay_out(torch.cat(weights) if len(weights) > 1 else weights[0])
        self._bias = torch.cat(biases) if biases else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return multiply(x, self._panels, self._bias)


@torch.inference_mode()
def replace_by_panels(model: nn.Module) -> int:
    """Replace the model's bf16 and fp32 linear layers on the CPU by `PanelLinear`, in place; return how many.

    Subclasses stay, because they may compute something else, as routers do.
    """

    def ours(child: nn.Module) -> PanelLinear | None:
        plain = type(child) in (nn.Linear, Linear) or isinstance(child, Conv1D)
        return PanelLinear([cast("nn.Linear", child)]) if plain and can_lay_out(cast("Tensor", child.weight)) else None

    return replace_parts(model, ours)


def replace_linears(model: nn.Module) -> int:
    """Replace every plain linear layer of the model by `Linear`, keeping its parameters; return how many."""
    return replace_parts(model, lambda child: Linear(child) if type(child) is nn.Linear else None)


def gradient_product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply [N, K] by [K, M] for gradients, in no defined order: by torch, in fp32 if the CPU has no bf16 instructions.

    Without them, torch's bf16 product converts every number repeatedly, at a fifth of the speed.
    """
    if a.dtype == torch.bfloat16 and a.is_cpu and not has_bf16_products():
        return (a.float() @ b.float()).to(torch.bfloat16)
    return a @ b


@lru_cache
def has_bf16_products() -> bool:
    """Return whether the CPU has bf16 instructions for torch's products."""
    flags = capabilities()
    return any(flags.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return multiply(x, in_panels(weight), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        wanted: tuple[bool, bool, bool] = ctx.needs_input_grad
        grad_NO = grads[0].reshape(-1, len(weight))
        return (
            gradient_product(grad_NO, weight).view(x.shape) if wanted[0] else None,
            gradient_product(grad_NO.t(), x.reshape(-1, x.shape[-1])) if wanted[1] else None,
            grad_NO.sum(0) if wanted[2] else None,
        )


# ---------------------------------------------------------------- 8-bit integers


_TRIAL_ROWS = (1, 5, 64)
_TRIAL_OUTPUTS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Integers:
    """How this process computes integer products. `how`: the kernels' argument, INT8 or INT8_TILES.

    Example: ``Integers(how=INT8)``
    """

    how: int

    @property
    def name(self) -> str:
        """The name in a numerics contract, without the instructions, because exact sums do not depend on them."""
        return f"int8 weights by output, activations of {2 * LEVELS + 1} levels by row, both rotated"


def quantised(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a weight: int8 levels [O, I] in [-127, 127] and fp32 scales [O]; level x scale is within half a scale of the rotated weight.

    The returned scales are also divided by the rotation's block size, because rotated products are too large by that factor.
    """
    weight = torch.empty(weight_OI.shape, dtype=torch.float32)
    rotate(array(weight_OI.contiguous()), weight.numpy())
    scales_O = weight.abs().amax(1) / LEVELS
    factors_O = torch.where(scales_O > 0, scales_O, 1.0).reciprocal()
    levels_OI = (weight * factors_O[:, None]).round_().clamp_(-LEVELS, LEVELS).to(torch.int8)
    return levels_OI, scales_O / block(weight.shape[1])


def in_int8_panels(integers: Integers, weight: Tensor, beside: Tensor | None = None) -> Panels:
    """Quantise a bf16 or fp32 weight [N, K] to 8-bit integers and lay it out in panels; `beside` as in `in_panels`."""
    whole = interleaved(weight, beside)
    levels_NK, scales_N = quantised(whole)
    return Panels(int8_words(levels_NK, scales_N), weight.shape[1], len(whole), weight.dtype, integers.how)


def int8_words(levels_NK: Tensor, scales_N: Tensor) -> Tensor:
    """Return panels of 32-bit words: each output's offset and scale, then its levels, four per word, padded with zeros."""
    outputs, inputs = levels_NK.shape
    offsets_N = (-OFFSET * levels_NK.sum(1, dtype=torch.int64)).to(torch.int32)
    head = [each.view(torch.int8).view(outputs, 4) for each in (offsets_N, scales_N.float().contiguous())]
    rows = torch.cat([*head, F.pad(levels_NK, (0, -inputs % INT8_BLOCK))], 1)
    words = torch.empty(-(-outputs // PANEL), rows.shape[1] // 4, PANEL, dtype=torch.int32)
    address, out = rows.data_ptr(), array(words)
    split(len(words), lambda a, b: lay_out(address, outputs, a, b, out))
    return words


def choose_integers(widths: Iterable[int]) -> Integers:
    """Return the fastest integer products that are exact in this process for all numbers of inputs in `widths`.

    Raises BadConfig if none is exact, or if the sums over so many inputs could overflow 32 bits.
    """
    widths = sorted(set(widths))
    if widths and widths[-1] > MOST_INPUTS:
        raise BadConfig(
            f"engine.products = 'int8' sums products in 32 bits, which hold {MOST_INPUTS:,} inputs, and a layer of this model has "
            f"{widths[-1]:,}: set engine.products = 'plain'"
        )
    for how in (INT8_TILES, INT8) if tiles_allowed() else (INT8,):
        if all(is_exact(how, inputs) for inputs in widths):
            return Integers(how=how)
    raise BadConfig(
        "engine.products = 'int8' cannot be used on this machine: its sums of products of bytes are not exact here; set "
        "engine.products = 'plain'"
    )


@torch.inference_mode()
def is_exact(how: int, inputs: int) -> bool:
    """Return whether the kernels' sums are exact, for random levels and for the largest ones."""
    weight = _drawn(_TRIAL_OUTPUTS, inputs, seed=inputs)
    words = int8_words(weight.to(torch.int8), torch.ones(_TRIAL_OUTPUTS))
    for rows in _TRIAL_ROWS:
        levels = _drawn(rows, inputs, seed=rows)
        want = (levels.double() @ weight.double().t()).float()  # fp64 is exact for integers below 2^53
        if not torch.equal(sums(levels, words, how), want):
            return False
    return True


def sums(levels_MK: Tensor, words: Tensor, how: int) -> Tensor:
    """Return the products of activation levels [M, K] and all panels of a weight: [M, PANEL x panels] in fp32."""
    rows, inputs = levels_MK.shape
    whole = -(-inputs // INT8_BLOCK) * INT8_BLOCK
    raised = (F.pad(levels_MK, (0, whole - inputs)) + OFFSET).to(torch.uint8).numpy()
    ones, line = np.ones(rows, np.float32), np.empty((rows, whole), np.float32)
    out = np.empty((len(words), rows, PANEL), np.float32)
    x, step = prepare_levels(raised, 0, rows, whole, how, line)
    for panel in range(len(words)):
        int8_panel_products(x, step, ones, 0, rows, whole, words[panel].data_ptr(), how, out[panel])
    return torch.from_numpy(out).movedim(0, 1).reshape(rows, -1)


def _drawn(rows: int, columns: int, *, seed: int) -> Tensor:
    """Return random levels. The first row has only the largest level; the third, if there are three, only the smallest."""
    drawn = torch.randint(-LEVELS, LEVELS + 1, (rows, columns), generator=torch.Generator().manual_seed(seed))
    for row, sign in zip(range(0, rows, 2), (1, -1), strict=False):
        drawn[row] = sign * LEVELS
    return drawn
