"""The norm of a gradient with any number of entries."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_ROW = 1024


def sum_of_squares(parts: Iterable[Tensor]) -> Tensor:
    """Sum over all entries of all fp32 tensors, as a float64 scalar; NaN or infinite if any entry is.

    Summed in short rows, because torch accumulates a norm in fp32, which came out 1.7% too small on 135M entries.
    """
    total = torch.zeros((), dtype=torch.float64)
    for part in parts:
        flat = part.reshape(-1)
        whole = len(flat) - len(flat) % _ROW
        for rows in (flat[:whole].view(-1, _ROW), flat[whole:].view(1, -1)):
            total += torch.linalg.vector_norm(rows, dim=1).double().square().sum().to(total.device)
    return total
