"""Which model stands behind the product, as configuration. Imports no torch until asked, so that the command line starts fast."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, Field

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
        default="bfloat16", description="The dtype that weights are published and served in."
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


def served_dtype(config: ModelConfig) -> torch.dtype:
    """`dtype` as torch knows it."""
    import torch

    return torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
