"""Weights as 8-bit integers: rounding, their layout for `kernels.int8_product`, and the check that sums of products are exact here.

Sums of whole numbers have one value, by whichever instructions; that this process computes it is tried, with the largest numbers too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.core.errors import BadConfig
from ostinato.model.cpu import split
from ostinato.model.kernels.int8_product import (
    INT8,
    INT8_BLOCK,
    INT8_TILES,
    MOST_INPUTS,
    OFFSET,
    int8_panel_products,
    levels_in_line,
)
from ostinato.model.kernels.processor import tiles_allowed
from ostinato.model.kernels.product import lay_out
from ostinato.model.kernels.quantize import LEVELS, block, rotate
from ostinato.model.kernels.vector import PANEL
from ostinato.model.linear import Panels, interleaved
from ostinato.model.paged import array

_ROWS = (1, 5, 64)  # of a trial
_OUTPUTS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Integers:
    """This process's integer products. `how`: the kernels' argument, INT8 or INT8_TILES.

    Example: ``Integers(how=INT8)``
    """

    how: int

    @property
    def name(self) -> str:
        """The name in a numerics contract. It leaves the instructions out, because exact sums have one value."""
        return f"int8 weights by output, activations of {2 * LEVELS + 1} levels by row, both rotated"


def quantised(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Levels [O, I] in int8, in [-127, 127], and scales [O] in fp32: level x scale is within half a scale of the rotated weight.

    The scales are divided by the rotation's block size, as its products are that many times too large.
    """
    weight = torch.empty(weight_OI.shape, dtype=torch.float32)
    rotate(array(weight_OI.contiguous()), weight.numpy())
    scales_O = weight.abs().amax(1) / LEVELS
    factors_O = torch.where(scales_O > 0, scales_O, 1.0).reciprocal()
    levels_OI = (weight * factors_O[:, None]).round_().clamp_(-LEVELS, LEVELS).to(torch.int8)
    return levels_OI, scales_O / block(weight.shape[1])


def in_int8_panels(integers: Integers, weight: Tensor, beside: Tensor | None = None) -> Panels:
    """A bf16 or fp32 weight [N, K] rounded to 8-bit integers and in panels; `beside` as in `in_panels`."""
    whole = interleaved(weight, beside)
    levels_NK, scales_N = quantised(whole)
    return Panels(int8_words(levels_NK, scales_N), weight.shape[1], len(whole), weight.dtype, integers.how)


def int8_words(levels_NK: Tensor, scales_N: Tensor) -> Tensor:
    """Panels of 32-bit words: an output's offset and scale, and its levels, four in a word, filled up with zeros."""
    outputs, inputs = levels_NK.shape
    offsets_N = (-OFFSET * levels_NK.sum(1, dtype=torch.int64)).to(torch.int32)
    head = [each.view(torch.int8).view(outputs, 4) for each in (offsets_N, scales_N.float().contiguous())]
    rows = torch.cat([*head, F.pad(levels_NK, (0, -inputs % INT8_BLOCK))], 1)
    words = torch.empty(-(-outputs // PANEL), rows.shape[1] // 4, PANEL, dtype=torch.int32)
    address, out = rows.data_ptr(), array(words)
    split(len(words), lambda a, b: lay_out(address, outputs, a, b, out))
    return words


def find(widths: Iterable[int]) -> Integers:
    """This process's fastest integer products, tried with every number of inputs in `widths`.

    Raises BadConfig if their sums are not exact, or if there are more inputs than 32 bits hold the sums of.
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
    """Whether the sums equal exact integer sums, for random levels and for the largest ones."""
    weight = _drawn(_OUTPUTS, inputs, seed=inputs)
    words = int8_words(weight.to(torch.int8), torch.ones(_OUTPUTS))
    for rows in _ROWS:
        levels = _drawn(rows, inputs, seed=rows)
        want = (levels.double() @ weight.double().t()).float()  # whole numbers below 2^53 are exact in it
        if not torch.equal(sums(levels, words, how), want):
            return False
    return True


def sums(levels_MK: Tensor, words: Tensor, how: int) -> Tensor:
    """The products of levels of activations and all panels of a weight: [M, PANEL x panels] in fp32."""
    rows, inputs = levels_MK.shape
    whole = -(-inputs // INT8_BLOCK) * INT8_BLOCK
    raised = (F.pad(levels_MK, (0, whole - inputs)) + OFFSET).to(torch.uint8).numpy()
    ones, line = np.ones(rows, np.float32), np.empty((rows, whole), np.float32)
    out = np.empty((len(words), rows, PANEL), np.float32)
    x, step = levels_in_line(raised, 0, rows, whole, how, line)
    for panel in range(len(words)):
        int8_panel_products(x, step, ones, 0, rows, whole, words[panel].data_ptr(), how, out[panel])
    return torch.from_numpy(out).movedim(0, 1).reshape(rows, -1)


def _drawn(rows: int, columns: int, *, seed: int) -> Tensor:
    """Random levels; one row is the largest everywhere, and another row, if there are three, the smallest."""
    drawn = torch.randint(-LEVELS, LEVELS + 1, (rows, columns), generator=torch.Generator().manual_seed(seed))
    for row, sign in zip(range(0, rows, 2), (1, -1), strict=False):
        drawn[row] = sign * LEVELS
    return drawn
