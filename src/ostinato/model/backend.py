"""The device of a model's tensors and the kernels that compute on them; recorded on the loaded model, so it is not passed around.

Other kernels come into a model by replacing parts of it (`replace_parts`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeBackend:
    """`device` as torch names it; `kernels`: "own" reads the CPU's memory through numpy, "torch" takes any device's tensors.

    Example: ``ComputeBackend(device="cuda", kernels="torch")``.
    """

    device: str = "cpu"
    kernels: Literal["own", "torch"] = "own"


OWN = ComputeBackend()
"""The default: the CPU, by our own kernels."""


def mark(model: nn.Module, backend: ComputeBackend) -> None:
    """Record the backend that a model was made for."""
    cast("Any", model).ostinato_backend = backend


def backend_of(model: nn.Module) -> ComputeBackend:
    """The backend that a model was made for; the default for a model without a record."""
    return getattr(model, "ostinato_backend", OWN)


def replace_parts(model: nn.Module, make: Callable[[nn.Module], nn.Module | None]) -> int:
    """Replace each module inside of a model for which `make` gives another, in place; returns how many."""
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if (new := make(child)) is not None:
                setattr(parent, name, new)
                count += 1
    return count
