"""Configuration of the served model. Imports torch only when needed, so that the command line starts fast."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, Field, field_validator

from ostinato.core.errors import BadConfig

if TYPE_CHECKING:
    import torch

    from ostinato.model.backend import ComputeBackend


class ModelConfig(BaseModel, frozen=True, extra="forbid"):
    """Settings of the model that is served and trained."""

    source: str = Field(
        default="smollm2",
        description="The model: 'smollm2', a directory, or a Hugging Face hub name such as Qwen/Qwen3-0.6B.",
    )
    name: str = Field(
        default="",
        description="Model name that clients send. Empty: the hub name, or the last part of the directory's path.",
    )
    cache: Path = Field(
        default=Path("~/.cache/ostinato"),
        description="Directory for converted and downloaded models. The default is below XDG_CACHE_HOME if that is set, and in the run's "
        "directory if the home directory cannot be written.",
    )
    dtype: Literal["bfloat16", "float32"] = Field(
        default="bfloat16", description="Dtype in which weights are published and stored."
    )
    compute: Literal["auto", "bf16", "fp32"] = Field(
        default="auto",
        description="Arithmetic of the engine, and of the trainer unless train.compute overrides it. auto: whichever is faster for "
        "matrix products on this machine, as measured at the first start (`ostinato doctor` shows it); bf16 on GPUs; fp32 for weights "
        "stored in float32.",
    )
    device: str = Field(
        default="cpu",
        description="Device of engine and trainer: 'cpu', 'cuda', 'cuda:1'. 'auto': a CUDA GPU if torch sees one and "
        "numerics is not 'exact', else the CPU. Tried on one H100.",
    )
    kernels: Literal["auto", "own", "torch"] = Field(
        default="auto",
        description="Which kernels compute the model. 'own': Ostinato's compiled kernels, on the CPU only. 'torch': torch's operations, "
        "on any device, with fast numerics. auto: own on the CPU, else torch.",
    )
    numerics: Literal["auto", "exact", "fast"] = Field(
        default="auto",
        description="Whether engine and trainer compute the same bits. 'exact': they do, as checked at the first start; the run refuses "
        "to start where that fails. 'fast': not checked; the trainer corrects for the difference and reports it. 'auto': exact where the "
        "check passes, else fast, and a message says why.",
    )

    order: Literal["auto", "blocks", "pairs"] = Field(
        default="auto",
        description="Order of the additions in bf16 matrix products. 'blocks' is the same on every CPU. 'pairs' is faster on CPUs with "
        "AVX512-BF16 and without tiles (AMX), and impossible on others. auto: the faster one. For a fleet of different CPUs, set 'blocks'.",
    )

    @field_validator("device")
    @classmethod
    def _known(cls, device: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", device):
            raise ValueError("no such device; set 'cpu', 'cuda', 'cuda:1' or 'auto'")
        return device

    @property
    def served_as(self) -> str:
        """The name that clients send. Example: source "/models/Qwen3-0.6B" is served as "Qwen3-0.6B"."""
        path = os.path.expanduser(self.source)
        return self.name or (os.path.basename(os.path.abspath(path)) if os.path.isdir(path) else self.source)


def stored_dtype(config: ModelConfig) -> torch.dtype:
    """Return `dtype` as a torch dtype."""
    import torch

    return torch.bfloat16 if config.dtype == "bfloat16" else torch.float32


def compute_dtype(config: ModelConfig, quick: Callable[[], str]) -> torch.dtype:
    """Return `compute` as a torch dtype. `quick` returns the name of the faster dtype on this machine; called only if that decides.

    Raises BadConfig for bf16 arithmetic on fp32 weights, which it would round.
    """
    import torch

    if config.compute == "bf16" and config.dtype == "float32":
        raise BadConfig(
            'model.compute = "bf16" would round the weights, which are stored in float32: set model.dtype = "bfloat16", '
            'or model.compute = "fp32"'
        )
    if config.compute == "auto":
        if config.dtype == "float32":
            return torch.float32
        named = "bfloat16" if backend(config).device != "cpu" else quick()
        return torch.bfloat16 if named == "bfloat16" else torch.float32
    return torch.bfloat16 if config.compute == "bf16" else torch.float32


def backend(config: ModelConfig) -> ComputeBackend:
    """Resolve "auto" in `device` and `kernels`. Raises BadConfig for a choice that this machine, or `numerics`, does not support."""
    from ostinato.model.backend import ComputeBackend

    device = config.device
    if device == "auto":
        device = "cuda" if config.numerics != "exact" and config.kernels != "own" and _gpus() else "cpu"
    if device != "cpu":
        _check_gpu(device)
    if device != "cpu" and config.kernels == "own":
        raise BadConfig(
            f'model.kernels = "own" computes on the CPU only, and model.device is "{config.device}": set model.kernels = "torch", '
            'or model.device = "cpu"'
        )
    kernels = "own" if config.kernels == "own" or (config.kernels == "auto" and device == "cpu") else "torch"
    if kernels == "torch" and config.numerics == "exact":
        raise BadConfig(
            f'model.numerics = "exact" holds for our own kernels on the CPU only, and model.device is "{config.device}", '
            f'model.kernels "{config.kernels}": set model.numerics = "fast", or model.device = "cpu" and model.kernels = "own"'
        )
    return ComputeBackend(device=device, kernels=kernels)


def _gpus() -> int:
    """Return the number of CUDA GPUs that torch sees."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _check_gpu(device: str) -> None:
    import torch

    found, wanted = _gpus(), int(device.partition(":")[2] or 0)
    if wanted < found:
        return
    built = f"torch {torch.__version__}" + ("" if torch.version.cuda else ", which is built without CUDA,")
    raise BadConfig(
        f'model.device = "{device}": {built} sees {found or "no"} CUDA GPU{"s" * (found > 1)} here; set model.device = "cpu"'
        + (f' or one of "cuda:0" to "cuda:{found - 1}"' if found else ", or install a GPU and a torch built for it")
    )
