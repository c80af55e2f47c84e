"""The trainer's settings."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, model_validator


class TrainConfig(BaseModel, frozen=True, extra="forbid"):
    """How one optimizer step is taken. The defaults suit a 135M model learning from a few hundred short turns a step."""

    learning_rate: float = Field(
        default=2e-5,
        gt=0,
        description="AdamW's learning rate after the warm-up, for a batch that the trainer trusts fully. It is lower where the policy "
        "has drifted from the one that sampled the batch.",
    )
    base_turns: int | None = Field(
        default=None,
        ge=1,
        description="Turns per step for which `learning_rate` is set. A step with k times as many turns uses sqrt(k) times the learning "
        "rate, but at most twice the rate. null: the same learning rate for every step; or, where steps take all turns that are ready, "
        "the least number of turns of such a step.",
    )
    signal_share: float | None = Field(
        default=0.2,
        gt=0,
        le=1,
        description="Share of the squared gradient that must be signal rather than noise for the full learning rate. Below it, the "
        "learning rate falls with the square root of the share, but not below a quarter: AdamW takes equally large steps on noise. null: "
        "it does not fall.",
    )
    warmup_steps: int = Field(
        default=2,
        ge=0,
        description="Optimizer steps over which the learning rate rises linearly: AdamW's second moment starts from one sample.",
    )
    beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW's decay rate of the mean gradient.")
    beta2: float = Field(
        default=0.95,
        ge=0,
        lt=1,
        description="AdamW's decay rate of the mean squared gradient. The default of 0.95 forgets in 20 steps, because policies change "
        "fast.",
    )
    epsilon: float = Field(
        default=1e-8, gt=0, description="AdamW's epsilon, which is added to the root of the mean squared gradient."
    )
    weight_decay: float = Field(
        default=0.0,
        ge=0,
        description="AdamW's weight decay, applied to matrices but not to norms and biases. The default is 0, because the start model is "
        "worth keeping.",
    )
    clip: float = Field(
        default=1.0,
        gt=0,
        description="Largest global norm of the gradient. A gradient with a larger norm is scaled down to it.",
    )
    compute: Literal["auto", "bf16", "fp32"] = Field(
        default="auto", description="Arithmetic of the forward and backward pass. auto: the engine's (model.compute)."
    )
    publish: Literal["auto", "bf16", "fp32"] = Field(
        default="auto",
        description="Dtype of published weights. Gradients are taken at weights rounded to it. auto: model.dtype, or bf16 in a trainer by "
        "itself. Another one than model.dtype rounds what version 0 holds, so that its turns are not the trainer's own.",
    )
    microbatch_tokens: int = Field(
        default=1024,
        ge=16,
        description="Packed tokens per micro-batch. A micro-batch has more where a cut would recompute much of a shared prefix. Episodes "
        "are never cut.",
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
        description="Tokens per rank beyond which a micro-batch recomputes its activations: it keeps only each layer's input for the "
        "backward pass. That takes a fraction of the memory and 1.3x the time. 0: every micro-batch does so.",
    )
    value_lambda: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Train on each turn's credit beyond the value of its state, which a linear head learns from the model's hidden "
        "states. With 1 that is the turn's return less its value. Below 1, later values stand in for later rewards, as in generalised "
        "advantage estimation with this lambda per turn. It costs a forward pass over the prompts and needs `ranks` = 1. null: credit as "
        "recorded.",
    )
    turn_tokens: int = Field(
        default=64,
        ge=1,
        description="Token budget of a turn. The loss is normalised by turns x this, a constant (Dr. GRPO).",
    )
    kl_beta: float = Field(
        default=0.01,
        ge=0,
        description="Weight of the KL penalty (k1 estimator) towards the reference release. The penalty is part of the reward.",
    )
    anchor_kl: float | None = Field(
        default=0.2,
        gt=0,
        description="KL divergence, in nats per token, by which the policy may drift from the first release (the frozen control) before "
        "drift is penalised. null: drift is neither measured nor bounded.",
    )
    anchor_beta: float = Field(
        default=0.1,
        ge=0,
        description="Penalty per nat of divergence from the anchor at twice `anchor_kl`. It is 0 at `anchor_kl` and grows with the "
        "excess.",
    )
    anchor_limit: float = Field(
        default=2.0,
        gt=0,
        description="KL divergence from the anchor, in nats per token, beyond which no step is taken.",
    )
    anchor_tokens: int = Field(
        default=512,
        ge=1,
        description="Sampled tokens per batch on which the distance to the anchor is measured. Once that distance is penalised, all "
        "tokens are used.",
    )
    importance_cap: float = Field(
        default=2.0, ge=1, description="Largest importance weight of a token. Larger ones are truncated to it."
    )
    turn_ess: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Least ESS/n of a turn, estimated from its own drift, at which the turn is weighted as a whole, which leaves less bias "
        "and more noise: try 0.3 where batches are so large that the metric `signal` stays near 1. Other turns are weighted token by "
        "token. null: all turns are.",
    )
    turn_cap: float = Field(
        default=4.0, ge=1, description="Largest importance weight of a whole turn. Larger ones are truncated to it."
    )
    min_ess: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Least ESS/n, of tokens and of turns, of a batch that is trained on. A batch below it is refused, because too little "
        "of it would teach.",
    )
    ess_horizon: int = Field(
        default=64,
        ge=1,
        description="Length, in tokens, beyond which a turn's weight in the ESS of turns shrinks no further. A longer turn counts as "
        "this many of its tokens would on average.",
    )
    mean_weight: float = Field(
        default=2.0,
        gt=1,
        description="Bound b on a batch's mean importance weight: a batch whose mean lies outside [1/b, b] is refused. The mean is 1 in "
        "expectation for any samples that were drawn as recorded; 100 tokens that have drifted far (chi2 of 1) give it an error of 0.1.",
    )
    max_k3: float = Field(
        default=1.0,
        gt=0,
        description="Largest KL(sampler || trainer) of a batch, in nats per token. A batch above it is refused: at 1, a token was on "
        "average e times likelier when it was drawn. PPO stops an epoch at 0.015 to 0.05.",
    )
    foreign_numerics: Literal["label", "refuse"] = Field(
        default="label",
        description="What happens to turns that were sampled under another numerics contract than the trainer's. 'label': they are "
        "trained on, masked and measured separately. 'refuse': they are held back.",
    )
    broken_promise: Literal["fast", "refuse"] = Field(
        default="fast",
        description="What happens if engine and trainer compute different log-probabilities for tokens of the same weights and the same "
        "exact contract. 'fast': the step is taken as in fast mode, with every turn under the sequence mask, and an alarm is raised. "
        "'refuse': the step is not taken.",
    )
    sequence_mask: float | None = Field(
        default=2.0,
        gt=1,
        description="Bound b on the geometric mean ratio of turns of a foreign contract or of fast mode. Turns outside [1/b, b] are left "
        "out. null: none are left out.",
    )
    router_replay: bool = Field(
        default=True,
        description="Recompute each sampled token with the experts that sampled it, if its routes were recorded.",
    )
    plausible: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Least probability of a recorded expert, relative to that of the last expert that the trainer would choose now. If a "
        "recorded expert of a token has less in a layer, the token keeps the trainer's own choice there. null: recorded experts are "
        "always used.",
    )
    threads: int = Field(default=1, ge=1, description="torch threads per rank of the trainer.")
    ranks: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Processes on this machine that train together. Each holds a part of the master weights, gradients and moments. With "
        "model.device 'cuda' each has a GPU of its own.",
    )
    context_ranks: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Ranks that compute each micro-batch together, each a part of its tokens (context parallelism). Raise it for "
        "episodes whose activations exceed one rank's memory. It must divide `ranks`.",
    )
    seed: int = Field(
        default=0,
        description="Seed of torch's random numbers at the start, for models that draw at random. Later, the generator's state comes "
        "from the checkpoint.",
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
