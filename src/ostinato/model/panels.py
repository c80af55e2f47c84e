"""Matrix products by our own bf16 kernel: finds those that it computes with oneDNN's bits, and lays weights out for it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import llvmlite.binding as llvm
import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ostinato.model import linear
from ostinato.model.kernels.chains import PANEL
from ostinato.model.kernels.decoder import project
from ostinato.model.kernels.turns import COLUMNS
from ostinato.model.paged import array
from ostinato.model.threads import team, together

_CHAINS = (512, 1024, 256, 2048, 4096, 128, 384, 768, 64)  # the commonest first
_ROWS = (2, 4, 8, 12, 31, 64, 200)  # at which products are compared
_OUTPUTS = 4096  # distinct outputs compared at most: all of a wide matrix's are computed alike
_NONE = np.empty((1, 0), np.uint16)


def able() -> bool:
    """True if the CPU has the kernel's instructions, and LLVM may use them."""
    free = numba.config.CPU_NAME is None and numba.config.CPU_FEATURES is None  # pyright: ignore[reportAttributeAccessIssue]
    return bool(linear.ONEDNN and free and llvm.get_host_cpu_features().get("avx512bf16", False))


def in_panels(weight: Tensor, beside: Tensor | None = None) -> Tensor:
    """A bf16 weight [N, K] in the kernel's layout; with `beside`, of the same shape, half of each panel's outputs are from `beside`."""
    outputs, inputs = weight.shape
    pairs = weight.detach().contiguous().view(torch.int32)
    if beside is None:
        return pairs.view(outputs // PANEL, PANEL, inputs // 2).transpose(1, 2).contiguous()
    both = torch.stack(
        [each.view(-1, PANEL // 2, inputs // 2) for each in (pairs, beside.detach().contiguous().view(torch.int32))], 1
    )
    return both.view(-1, PANEL, inputs // 2).transpose(1, 2).contiguous()


def multiply(x_MK: Tensor, panels: Tensor, chain: int, bias: NDArray[np.uint16] = _NONE) -> Tensor:
    """bf16 rows times a weight from `in_panels`, in chains of `chain`, on as many threads as torch may use."""
    out_MN = x_MK.new_empty(len(x_MK), len(panels) * PANEL)
    counters, xs, outs, weight = np.zeros((1, COLUMNS), np.int64), array(x_MK), array(out_MN), panels.data_ptr()
    together(lambda: project(counters, xs, weight, chain, bias, outs))
    return out_MN


@lru_cache
@torch.inference_mode()
def chain_of(inputs: int, outputs: int, *, bias: bool = False) -> int | None:
    """The length of oneDNN's chains for a matrix [outputs, inputs]; None if it adds in another order.

    Tested on numbers most of which cancel in pairs: the remainder shows the order in which they were added.
    """
    if not able() or inputs % 2 or outputs % PANEL:
        return None
    source = torch.Generator().manual_seed(inputs)
    weight = torch.randn(min(outputs, _OUTPUTS), inputs, generator=source).bfloat16()
    weight = weight.repeat(-(-outputs // len(weight)), 1)[:outputs].contiguous()
    x = torch.randn(max(_ROWS), inputs, generator=source).bfloat16()
    one, two = torch.randperm(inputs, generator=source)[: inputs // 2 * 2].view(2, -1)
    weight[:, two], x[:, two] = weight[:, one], -x[:, one]
    x[:, one[: inputs // 16]] *= 1 + 2.0**-6
    added = torch.randn(outputs, generator=source).bfloat16() if bias else None
    with team(1):
        wanted = [linear.product(x[:rows], weight, added) for rows in _ROWS]
        panels = in_panels(weight)
        for chain in dict.fromkeys(min(chain, inputs) for chain in _CHAINS):
            if chain % 2 == 0 and _same(x, panels, chain, added, wanted):
                return chain
    return None


def _same(x: Tensor, panels: Tensor, chain: int, bias: Tensor | None, wanted: Sequence[Tensor]) -> bool:
    biases = _NONE if bias is None else array(bias)[None]
    return all(torch.equal(multiply(x[: len(want)], panels, chain, biases), want) for want in wanted)
