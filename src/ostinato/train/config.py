"""The trainer's settings."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, model_validator


class TrainConfig(BaseModel, frozen=True, extra="forbid"):
    """How one optimizer step is taken. The defaults suit a 135M model learning from a few hundred short turns a step."""

    learning_rate: float = Field(
        default=2e-5, gt=0, description="AdamW's step size after the warm-up, for a fully trusted batch."
    )
    base_turns: int | None = Field(
        default=None,
        ge=1,
        description="Turns in a step that `learning_rate` is meant for: with k times as many it is sqrt(k) times as "
        "large, but no more than twice. null: the same for every step, or the least number of turns where steps take all that are "
        "ready.",
    )
    signal_share: float | None = Field(
        default=0.2,
        gt=0,
        le=1,
        description="Where less than this share of the squared gradient is signal and the rest is noise, the learning rate falls with the "
        "root of the share, to a quarter at most: AdamW takes as large steps on noise. null: it does not.",
    )
    warmup_steps: int = Field(
        default=2,
        ge=0,
        description="Steps over which the learning rate rises linearly: AdamW's second moment starts from one sample.",
    )
    beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW's decay rate of the mean gradient.")
    beta2: float = Field(
        default=0.95,
        ge=0,
        lt=1,
        description="AdamW's decay rate of the squared gradient: 0.95 forgets in 20 steps, as policies move fast.",
    )
    epsilon: float = Field(default=1e-8, gt=0, description="AdamW's term added to the root of the squared gradient.")
    weight_decay: float = Field(
        default=0.0,
        ge=0,
        description="AdamW's weight decay of matrices, but not of norms and biases. 0, because the start model is "
        "worth keeping.",
    )
    clip: float = Field(default=1.0, gt=0, description="A larger global norm of the gradient is scaled down to this.")
    compute: Literal["auto", "bf16", "fp32"] = Field(
        default="auto", description="Arithmetic of the forward and backward pass. auto: the engine's (model.compute)."
    )
    publish: Literal["bf16", "fp32"] = Field(
        default="bf16",
        description="Dtype of published weights, as model.dtype; gradients are taken at weights rounded to it.",
    )
    microbatch_tokens: int = Field(
        default=1024,
        ge=16,
        description="Packed tokens per micro-batch. More if a cut would recompute much of a shared prefix: no episode "
        "is cut.",
    )
    largest_microbatch: int = Field(
        default=1 << 15,
        ge=16,
        description="Packed tokens beyond which a micro-batch is cut even if half of it must be recomputed. A long "
        "episode is never cut.",
    )
    recompute_tokens: int = Field(
        default=2048,
        ge=0,
        description="A micro-batch of more tokens per rank keeps only each layer's input for the backward pass and "
        "recomputes the rest: a fraction of the memory, 1.3x the time. 0: every micro-batch.",
    )
    value_lambda: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Credit beyond the value of a turn's state, which a linear head learns from the model's hidden states: 1 is a turn's "
        "return less its value; below 1 later values count in the place of later rewards, as in generalised advantage estimation with this "
        "lambda per turn. Costs a forward pass over the prompts; needs `ranks` = 1. null: credit as recorded.",
    )
    turn_tokens: int = Field(
        default=64,
        ge=1,
        description="Token budget of a turn: the constant in the loss's normaliser, turns x this (Dr. GRPO).",
    )
    kl_beta: float = Field(
        default=0.01, ge=0, description="Weight of the k1 KL to the reference release, inside the reward."
    )
    anchor_kl: float | None = Field(
        default=0.2,
        gt=0,
        description="Nats per token by which the policy may drift from the first release (the frozen control) before "
        "drift is penalised. null: neither measured nor bounded.",
    )
    anchor_beta: float = Field(
        default=0.1,
        ge=0,
        description="Penalty per nat from the anchor at twice `anchor_kl`; it is 0 at `anchor_kl` and grows with the "
        "excess.",
    )
    anchor_limit: float = Field(
        default=2.0, gt=0, description="Nats per token from the anchor beyond which no step is taken."
    )
    anchor_tokens: int = Field(
        default=512,
        ge=1,
        description="Sampled tokens per batch on which the distance to the anchor is measured; all tokens once it is "
        "penalised.",
    )
    importance_cap: float = Field(
        default=2.0, ge=1, description="Larger importance weights of tokens are truncated to this."
    )
    turn_ess: float | None = Field(
        default=0.3,
        gt=0,
        le=1,
        description="A turn that has an ESS/n of at least this, estimated from its own drift, is weighted as a whole: its gradient is then "
        "that of the present policy. Other turns have a weight per token, which "
        "leaves most of the bias. null: all turns have one per token.",
    )
    turn_cap: float = Field(
        default=4.0, ge=1, description="Larger importance weights of whole turns are truncated to this."
    )
    min_ess: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="A batch whose ESS/n, of tokens or of turns, is below this is refused: too little of it would "
        "teach.",
    )
    ess_horizon: int = Field(
        default=64, ge=1, description="Tokens after which a longer turn weighs no less in the ESS of turns."
    )
    mean_weight: float = Field(
        default=2.0,
        gt=1,
        description="A batch whose mean importance weight lies outside [1/b, b] is refused. It is 1 in expectation for any samples that "
        "were drawn as recorded; 100 tokens that have drifted far (chi2 of 1) give it an error of 0.1.",
    )
    max_k3: float = Field(
        default=1.0,
        gt=0,
        description="A batch whose KL(sampler || trainer), in nats per token, is above this is refused: on average a token was e times "
        "likelier when it was drawn. PPO stops an epoch at 0.015 to 0.05.",
    )
    foreign_numerics: Literal["label", "refuse"] = Field(
        default="label",
        description="Turns made under a numerics contract other than the trainer's: 'label' trains on them, masked "
        "and measured separately; 'refuse' holds them back.",
    )
    broken_promise: Literal["fast", "refuse"] = Field(
        default="fast",
        description="If tokens of the same weights and the same exact contract have other log-probabilities: 'fast' "
        "takes the step as in fast mode, every turn under the sequence mask, and raises an alarm; 'refuse' does not "
        "take it.",
    )
    sequence_mask: float | None = Field(
        default=2.0,
        gt=1,
        description="Turns of a foreign contract or of fast mode whose geometric mean ratio lies outside [1/b, b] are "
        "left out. null: none are.",
    )
    router_replay: bool = Field(
        default=True,
        description="Recompute each sampled token with the experts that sampled it, if its routes were recorded.",
    )
    plausible: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="A token keeps its live experts in a layer where a recorded one has less than this times the "
        "probability of the last one chosen live. null: recorded experts are always used.",
    )
    threads: int = Field(default=1, ge=1, description="torch threads per rank of the trainer.")
    ranks: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Processes on this machine that train together; each holds a part of the masters, gradients and "
        "moments. With model.device 'cuda' each has a GPU of its own.",
    )
    context_ranks: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Ranks that compute each micro-batch together, each a part of its tokens (context parallelism), "
        "for episodes whose activations exceed one rank's memory. Must divide `ranks`.",
    )
    seed: int = Field(
        default=0,
        description="Seeds torch at the start, for models that draw at random; later the checkpoint has the RNG.",
    )

    @model_validator(mode="after")
    def _contexts(self) -> TrainConfig:
        if self.value_lambda is not None and self.ranks > 1:
            raise ValueError(
                f"train.value_lambda is {self.value_lambda}, and train.ranks {self.ranks}: only a trainer of one rank has values of turns; "
                "set train.value_lambda to null or train.ranks to 1"
            )
        if self.context_ranks > 1 and self.ranks == 1:
            raise ValueError(
                f"train.context_ranks is {self.context_ranks}, and train.ranks is 1: one process has nobody to share a micro-batch's "
                f"tokens with; set train.ranks to {self.context_ranks} or a multiple of it, or train.context_ranks to 1"
            )
        if self.ranks % self.context_ranks:
            fitting = [str(each) for each in range(1, self.ranks + 1) if self.ranks % each == 0]
            raise ValueError(
                f"train.context_ranks is {self.context_ranks}, which does not divide train.ranks = {self.ranks}; "
                f"set train.context_ranks to one of {', '.join(fitting)}, or train.ranks to a multiple of {self.context_ranks}"
            )
        return self
