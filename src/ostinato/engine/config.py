"""The choice of the engine, and its sizes."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, model_validator


class EngineConfig(BaseModel, frozen=True, extra="forbid"):
    """The choice of the engine, and its sizes. vLLM servers are sized by their own options: with them only `max_waiting`,
    `recompute_on_swap`, `urls`, `replicas`, `connect_s`, `silence_s` and `weights_seen_as` apply.
    """

    kind: Literal["embedded", "vllm"] = Field(
        default="embedded",
        description="'embedded': in the serving worker; 'vllm': servers of yours, named by engine.urls.",
    )
    urls: tuple[str, ...] = Field(
        default=(),
        description="vLLM servers. Each holds one version, so as many versions can be loaded at once (live, control, canary, "
        "evaluation); slots that hold the same version share a server.",
    )
    replicas: dict[str, Annotated[int, Field(ge=1)]] = Field(
        default={},
        description="How many of the vLLM servers hold a slot's version, by slot (live = 2); 1 where nothing is said. Requests are "
        "routed among them by what was sent there before and by how much they have to do.",
    )
    connect_s: float = Field(default=600.0, gt=0, description="Longest wait for the vLLM servers at the start.")
    silence_s: float = Field(
        default=300.0, gt=0, description="A vLLM server that says nothing for so long is given up on."
    )
    weights_seen_as: str = Field(
        default="",
        description="How the vLLM servers name the weight store, if not as we do: a directory as they see it, or a URL.",
    )
    max_batch: int = Field(default=128, ge=1, le=4096, description="samples decoded together")
    prefill_chunk: int = Field(
        default=256, ge=16, description="prompt tokens computed per step and thread; more delays the open streams"
    )
    kv_tokens: int = Field(
        default=32768,
        ge=64,
        description="tokens that the KV cache holds, shared by all slots; no answer has more with its prompt",
    )
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
    products: Literal["plain", "int8"] = Field(
        default="plain",
        description="Matrix products of the embedded engine. 'int8': the decoder's linear layers in whole numbers of eight bits, with "
        "model.numerics = 'fast'. Quicker on some CPUs, as `ostinato doctor` measures; the trainer corrects for what it changes.",
    )
    max_waiting: int = Field(
        default=1024, ge=1, description="samples that may be open at once; more are refused with 503"
    )
    threads: int = Field(
        default=1,
        ge=1,
        description="CPU cores that the engine uses: parts of the batch run side by side, each on one torch thread; a batch too small to "
        "be parted runs on all where that changes no bit",
    )

    @model_validator(mode="after")
    def _check_urls(self) -> Self:
        if self.kind == "vllm" and not self.urls:
            raise ValueError("engine.kind 'vllm' needs at least one server in engine.urls")
        if self.kind == "vllm" and self.products != "plain":
            raise ValueError("engine.products = 'int8' is the embedded engine's: leave it out with engine.kind 'vllm'")
        if len(set(self.urls)) != len(self.urls) or any(
            not url.startswith(("http://", "https://")) for url in self.urls
        ):
            raise ValueError("engine.urls: name each server once, as http://host:port")
        if self.kind == "vllm" and max(self.replicas.values(), default=1) > len(self.urls):
            raise ValueError("engine.replicas: a slot wants more servers than engine.urls names")
        return self
