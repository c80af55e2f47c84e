"""Where a model's tensors lie and whose kernels compute on them; a loaded model knows it, and nobody else has to be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """`device` as torch names it; `kernels`: "own" reads the CPU's memory through numpy, "torch" takes any device's tensors.

    Example: ``Backend(device="cuda", kernels="torch")``.
    """

    device: str = "cpu"
    kernels: Literal["own", "torch"] = "own"


OWN = Backend()
"""The usual one: the CPU, by our own kernels."""


def mark(model: nn.Module, backend: Backend) -> None:
    """Write down what a model was made for."""
    cast("Any", model).ostinato_backend = backend


def backend_of(model: nn.Module) -> Backend:
    """What a model was made for; the usual one for a model that somebody else made."""
    return getattr(model, "ostinato_backend", OWN)
