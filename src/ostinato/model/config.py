"""Which model stands behind the product, as configuration. Imports no torch until asked, so that the command line starts fast."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, Field

from ostinato.core.errors import BadConfig

if TYPE_CHECKING:
    import torch


class ModelConfig(BaseModel, frozen=True, extra="forbid"):
    """Which model is served and trained."""

    source: str = Field(
        default="smollm2", description="'smollm2', a directory, or a Hugging Face hub name such as Qwen/Qwen3-0.6B."
    )
    name: str = Field(
        default="", description="What clients send as `model`; empty: the hub name, or the directory's last part."
    )
    cache: Path = Field(
        default=Path("~/.cache/ostinato"), description="Where converted and downloaded models are kept."
    )
    dtype: Literal["bfloat16", "float32"] = Field(
        default="bfloat16", description="The dtype that weights are published and stored in."
    )
    compute: Literal["auto", "bf16", "fp32"] = Field(
        default="auto",
        description="Arithmetic of the engine, and of the trainer unless train.compute says another. auto: bf16 where the CPU "
        "multiplies bf16 matrices itself, else fp32 (several times as fast there); fp32 for weights stored in float32.",
    )
    numerics: Literal["exact", "fast"] = Field(
        default="exact",
        description="'exact': engine and trainer compute the same bits, checked at the start. 'fast': unchecked; the "
        "trainer corrects for the difference and reports what it removed.",
    )

    @property
    def served_as(self) -> str:
        """The name that clients send. Example: source "/models/Qwen3-0.6B" is served as "Qwen3-0.6B"."""
        source = Path(self.source).expanduser()
        return self.name or (source.name if source.is_dir() else self.source)


def stored_dtype(config: ModelConfig) -> torch.dtype:
    """`dtype` as torch knows it."""
    import torch

    return torch.bfloat16 if config.dtype == "bfloat16" else torch.float32


def compute_dtype(config: ModelConfig) -> torch.dtype:
    """`compute` as torch knows it. Raises BadConfig for bf16 arithmetic on weights that would have to be rounded for it."""
    import torch

    if config.compute == "bf16" and config.dtype == "float32":
        raise BadConfig(
            'model.compute = "bf16" would round the weights, which are stored in float32: set model.dtype = "bfloat16", '
            'or model.compute = "fp32"'
        )
    if config.compute == "auto":
        return quick_dtype() if config.dtype == "bfloat16" else torch.float32
    return torch.bfloat16 if config.compute == "bf16" else torch.float32


def quick_dtype() -> torch.dtype:
    """bf16 where the CPU multiplies bf16 matrices itself (AVX512-BF16, AMX, Arm's BF16), else fp32.

    Elsewhere oneDNN unpacks every bf16 number first: a fifth of the speed of fp32 on a Cascade Lake at 16 rows and more.
    """
    import torch

    flags = torch.cpu.get_capabilities()
    native = any(flags.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    return torch.bfloat16 if native else torch.float32
