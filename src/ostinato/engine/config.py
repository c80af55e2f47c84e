"""Sizes of the embedded engine."""

from __future__ import annotations

from pydantic import BaseModel, Field


class EngineConfig(BaseModel, frozen=True, extra="forbid"):
    """Sizes of the embedded engine."""

    max_batch: int = Field(default=128, ge=1, le=4096, description="samples decoded together")
    prefill_chunk: int = Field(
        default=256, ge=16, description="prompt tokens computed per step and thread; more delays the open streams"
    )
    kv_tokens: int = Field(default=32768, ge=64, description="tokens that the KV cache holds, shared by all slots")
    block: int = Field(
        default=32,
        ge=16,
        le=256,
        multiple_of=16,
        description="tokens per KV block: the grain of sharing and of prefix reuse",
    )
    recompute_on_swap: bool = Field(
        default=False,
        description="Compute the past of open streams again when weights change under them: each token's logprob is then the new "
        "version's own, at the price of a pause; otherwise tokens after a swap read keys and values of the old version.",
    )
    max_waiting: int = Field(
        default=1024, ge=1, description="samples that may be open at once; more are refused with 503"
    )
    threads: int = Field(
        default=1,
        ge=1,
        description="CPU cores that the engine uses: parts of the batch run side by side, each on one torch thread",
    )
