"""The choice of the engine, and its sizes."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, model_validator

_CHUNK, _GPU_CHUNK = 256, 4096  # on a GPU a step with few tokens takes as long as its launches


class EngineConfig(BaseModel, frozen=True, extra="forbid"):
    """The choice of the engine, and its sizes. vLLM servers are sized by their own options: with them only `max_waiting`,
    `recompute_on_swap`, `urls`, `replicas`, `connect_s`, `silence_s` and `weights_seen_as` apply.
    """

    kind: Literal["embedded", "vllm"] = Field(
        default="embedded",
        description="'embedded': inside the serving worker. 'vllm': your own vLLM servers, named by engine.urls.",
    )
    urls: tuple[str, ...] = Field(
        default=(),
        description="URLs of vLLM servers. Each holds one version, so give as many as versions are loaded at once "
        "(live, control, canary, evaluation); slots with the same version share a server.",
    )
    replicas: dict[str, Annotated[int, Field(ge=1)]] = Field(
        default={},
        description="How many vLLM servers hold a slot's version, by slot (live = 2). Default: 1 per slot. Requests "
        "are routed by the prompts that a server has seen and by its load.",
    )
    connect_s: float = Field(
        default=600.0, gt=0, description="Longest wait for the vLLM servers at the start, in seconds."
    )
    silence_s: float = Field(
        default=300.0, gt=0, description="Seconds without data after which a request to a vLLM server is given up."
    )
    weights_seen_as: str = Field(
        default="",
        description="The weight store's directory or URL as the vLLM servers see it. Empty: the same as here.",
    )
    max_batch: int = Field(default=128, ge=1, le=4096, description="Samples decoded together.")
    prefill_chunk: int | None = Field(
        default=None,
        ge=16,
        description=f"Prompt tokens computed per step and thread; more delays the open streams. Default: {_CHUNK}, on a "
        f"GPU {_GPU_CHUNK}.",
    )
    kv_tokens: int = Field(
        default=32768,
        ge=64,
        description="Tokens in the KV cache, shared by all slots; a prompt and its answer together cannot have more.",
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
        description="Recompute the KV cache of open streams when weights change: each token's log-probability is then "
        "the new version's own, at the cost of a pause. Otherwise tokens after a swap read the old version's keys and "
        "values.",
    )
    products: Literal["plain", "int8", "fp8"] = Field(
        default="plain",
        description="Matrix products of the embedded engine. 'int8': the decoder's linear layers use 8-bit integers, "
        "which is faster on some CPUs, as `ostinato doctor` measures. 'fp8': 8-bit floats, for GPUs with instructions "
        "for them, with model.kernels = 'torch'. Numerics are then fast, and the trainer corrects for the difference; "
        "model.numerics = 'exact' is refused.",
    )
    max_waiting: int = Field(default=1024, ge=1, description="Samples that may be open at once; more get 503.")
    threads: int = Field(
        default=0,
        ge=0,
        description="CPU cores that the engine uses: parts of the batch run in parallel, each on one torch thread; a "
        "batch too small to be split runs on all cores where that changes no bit. 0: as many as the trainer leaves "
        "and as pay, as measured at the first start (`ostinato doctor` shows it).",
    )

    def chunk_on(self, device: str) -> int:
        """`prefill_chunk`, or its default on this device."""
        return self.prefill_chunk or (_CHUNK if device == "cpu" else _GPU_CHUNK)

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
