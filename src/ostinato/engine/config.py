"""Configuration of the engine: which kind generates tokens, and its sizes."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, model_validator

_CHUNK, _GPU_CHUNK = 256, 4096  # on a GPU, kernel launches dominate a step with few tokens


class EngineConfig(BaseModel, frozen=True, extra="forbid"):
    """Settings of the engine. vLLM servers take their sizes from their own options; with them only `max_waiting`, `recompute_on_swap`,
    `urls`, `replicas`, `connect_s`, `silence_s` and `weights_seen_as` apply.
    """

    kind: Literal["embedded", "vllm"] = Field(
        default="embedded",
        description="Where tokens are generated. 'embedded': inside the serving worker. 'vllm': on your own vLLM servers, which "
        "engine.urls names.",
    )
    urls: tuple[str, ...] = Field(
        default=(),
        description="URLs of vLLM servers. Each server holds one version, so name as many as there are versions loaded at once (live, "
        "control, canary, evaluation). Slots with the same version share a server.",
    )
    replicas: dict[str, Annotated[int, Field(ge=1)]] = Field(
        default={},
        description="Number of vLLM servers that hold a slot's version, by slot (live = 2). Default: 1 per slot. Requests are routed by "
        "the prompts that a server has already seen and by its load.",
    )
    connect_s: float = Field(
        default=600.0, gt=0, description="Longest wait for the vLLM servers at the start, in seconds."
    )
    silence_s: float = Field(
        default=300.0, gt=0, description="Seconds without data after which a request to a vLLM server is given up."
    )
    weights_seen_as: str = Field(
        default="",
        description="Directory or URL at which the vLLM servers reach the weight store. Empty: the same as on this machine.",
    )
    max_batch: int = Field(default=128, ge=1, le=4096, description="Samples that are decoded together.")
    prefill_chunk: int | None = Field(
        default=None,
        ge=16,
        description="Prompt tokens computed per step and thread. A larger chunk delays the open streams for longer. "
        f"Default: {_CHUNK}, on a GPU {_GPU_CHUNK}.",
    )
    kv_tokens: int = Field(
        default=32768,
        ge=64,
        description="Tokens in the KV cache, which all slots share. A prompt and its answer together cannot have more.",
    )
    block: int = Field(
        default=32,
        ge=16,
        le=256,
        multiple_of=16,
        description="Tokens per KV block, the unit of sharing and prefix reuse.",
    )
    recompute_on_swap: bool = Field(
        default=False,
        description="Recompute the KV cache of open streams when weights change. Each token's log-probability is then the new version's "
        "own, at the cost of a pause. False: tokens after a swap read the old version's keys and values.",
    )
    products: Literal["plain", "int8", "fp8"] = Field(
        default="plain",
        description="How the embedded engine computes matrix products. 'plain': in the engine's arithmetic. 'int8': the decoder's linear "
        "layers use 8-bit integers, which is faster on some CPUs, as `ostinato doctor` measures. 'fp8': they use 8-bit floats, on GPUs "
        "with instructions for them, with model.kernels = 'torch'. With 'int8' and 'fp8' numerics are fast: the trainer corrects for the "
        "difference, and model.numerics = 'exact' is refused.",
    )
    max_waiting: int = Field(
        default=1024,
        ge=1,
        description="Samples that may be open at once. More get 503, and a request for more of its own 413.",
    )
    threads: int = Field(
        default=0,
        ge=0,
        description="CPU cores that the engine uses. Parts of the batch run in parallel, each on one torch thread. A batch too small to "
        "be split runs on all cores where that changes no bit. 0: as many as the trainer leaves free and as make the engine faster, as "
        "measured at the first start (`ostinato doctor` shows it).",
    )

    def chunk_on(self, device: str) -> int:
        """Return `prefill_chunk`, or its default for this device."""
        return self.prefill_chunk or (_CHUNK if device == "cpu" else _GPU_CHUNK)

    @model_validator(mode="after")
    def _check_blocks(self) -> Self:
        if self.kv_tokens < self.block:
            raise ValueError(
                f"kv_tokens = {self.kv_tokens} hold no block of {self.block}: raise it, or lower engine.block"
            )
        return self

    @model_validator(mode="after")
    def _check_urls(self) -> Self:
        if self.kind == "vllm" and not self.urls:
            raise ValueError("engine.kind 'vllm' needs at least one server in engine.urls")
        if self.kind == "vllm" and self.products != "plain":
            raise ValueError(
                f"engine.products = {self.products!r} is the embedded engine's: leave it out with engine.kind 'vllm'"
            )
        if len(set(self.urls)) != len(self.urls) or any(
            not url.startswith(("http://", "https://")) for url in self.urls
        ):
            raise ValueError("engine.urls: name each server once, as http://host:port")
        if self.kind == "vllm" and max(self.replicas.values(), default=1) > len(self.urls):
            raise ValueError("engine.replicas: a slot needs more servers than engine.urls names")
        return self
