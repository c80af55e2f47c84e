"""The trainer's settings."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class TrainConfig(BaseModel, frozen=True, extra="forbid"):
    """How one optimizer step is taken. The defaults suit a 135M model learning from a few hundred short turns a step."""

    learning_rate: float = Field(
        default=2e-5, gt=0, description="AdamW's step size after the warm-up, before the ESS scaling."
    )
    warmup_steps: int = Field(
        default=2,
        ge=0,
        description="Steps over which the learning rate rises linearly: AdamW's second moment starts from one sample.",
    )
    beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW's decay of the gradient mean.")
    beta2: float = Field(
        default=0.95,
        ge=0,
        lt=1,
        description="AdamW's decay of the squared gradient: 0.95 forgets in 20 steps, as policies move fast.",
    )
    epsilon: float = Field(default=1e-8, gt=0, description="AdamW's floor under the root of the squared gradient.")
    weight_decay: float = Field(
        default=0.0, ge=0, description="Decay towards zero; 0, because the start model is worth keeping."
    )
    clip: float = Field(default=1.0, gt=0, description="The gradient's global norm is scaled down to this.")
    compute: Literal["auto", "bf16", "fp32"] = Field(
        default="auto",
        description="Arithmetic of forward and backward; auto is the engine's (model.compute).",
    )
    publish: Literal["bf16", "fp32"] = Field(
        default="bf16",
        description="The dtype of published weights, as model.dtype; gradients are taken at this rounding.",
    )
    microbatch_tokens: int = Field(
        default=1024, ge=16, description="Packed tokens computed at once; bounds activation memory."
    )
    turn_tokens: int = Field(
        default=64,
        ge=1,
        description="Token budget of a turn: the constant in the loss's normaliser, turns x this (Dr. GRPO).",
    )
    kl_beta: float = Field(
        default=0.01, ge=0, description="Weight of the k1 KL to the reference release, inside the reward."
    )
    importance_cap: float = Field(default=2.0, ge=1, description="Token importance weights are truncated here.")
    foreign_numerics: Literal["label", "refuse"] = Field(
        default="label",
        description="Turns made under another numerics contract than the trainer's: 'label' trains on them, masked and measured "
        "apart; 'refuse' holds them back.",
    )
    sequence_mask: float | None = Field(
        default=2.0,
        gt=1,
        description="Turns of a foreign contract or of fast mode whose geometric mean ratio lies outside [1/b, b] are left out; "
        "null: none are.",
    )
    router_replay: bool = Field(
        default=True,
        description="Recompute a sampled token through the experts that it was sampled with, if it has routes.",
    )
    plausible: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="A token keeps its live experts in a layer where a recorded one has less than this times the probability of "
        "the last one chosen live; null: recorded experts are always used.",
    )
    min_ess: float = Field(default=0.1, ge=0, le=1, description="A batch whose ESS/n is below this is refused.")
    threads: int = Field(default=1, ge=1, description="torch threads of the trainer.")
    seed: int = Field(
        default=0, description="Seeds torch at the start, for models that draw; later the checkpoint holds the RNG."
    )
    recompute: bool = Field(
        default=False, description="Recompute layer activations in the backward pass: less memory, 1.3x time."
    )
