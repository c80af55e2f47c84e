"""The compute backend: the device of a model's tensors and the kernels that compute on them, recorded on the loaded model.

Other kernels are put into a model by replacing its modules (`replace_parts`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeBackend:
    """A device, as torch names it, and kernels: "own" reads CPU memory through numpy, "torch" works on any device.

    Example: ``ComputeBackend(device="cuda", kernels="torch")``.
    """

    device: str = "cpu"
    kernels: Literal["own", "torch"] = "own"


OWN = ComputeBackend()
"""The default: our own kernels on the CPU."""


def mark(model: nn.Module, backend: ComputeBackend) -> None:
    """Record on a model the backend that it was built for."""
    cast("Any", model).ostinato_backend = backend


def backend_of(model: nn.Module) -> ComputeBackend:
    """Return the backend that a model was built for; the default for a model without a record."""
    return getattr(model, "ostinato_backend", OWN)


def replace_parts(model: nn.Module, make: Callable[[nn.Module], nn.Module | None]) -> int:
    """Replace, in place, each submodule for which `make` returns another module; return how many."""
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if (new := make(child)) is not None:
                setattr(parent, name, new)
                count += 1
    return count
