"""A peer's own code on the groups of `estimators.py`. Runs in that peer's environment.

    .peers/trl/bin/python -m benchmarks.worlds.peer_estimators trl MODEL < cases.json

TRL's trainer is built over a tiny model and scores completions that get the given rewards; its loss is called with given log-probabilities.
verl's functions are called directly. If a peer refuses a case, its error message is the answer.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from benchmarks.contender import quiet_stdout

Rewards = Sequence[float | None]
SCALES = ("none", "group", "batch")
LOSSES = ("dr_grpo", "grpo", "dapo")
BETA = 1.0


def attempt(ask: Callable[[], Any]) -> Any:
    """The result, or a text that says why there is none."""
    try:
        return ask()
    except Exception as error:  # noqa: BLE001 - a peer's error is its answer to a case
        return f"refused: {type(error).__name__}: {str(error).splitlines()[0][:160]}"


# ---------------------------------------------------------------- TRL


def trl_trainer(model: str, rewards: Rewards, **settings: Any) -> Any:
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer

    config = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=len(rewards),
        num_generations=len(rewards),
        max_completion_length=8,
        report_to=[],
        use_cpu=True,
        bf16=False,
        **settings,
    )
    return trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: list(rewards),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "say 1"}] * len(rewards)),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
    )


def trl_advantages(model: str, rewards: Rewards, scale: str) -> list[float]:
    trainer = trl_trainer(model, rewards, scale_rewards=scale)
    scored = trainer._generate_and_score_completions([{"prompt": "say 1"}] * len(rewards))
    return scored["advantages"].tolist()


def trl_weights(model: str, lengths: Sequence[int], loss_type: str) -> list[float]:
    """The loss's gradient for the log-probability of a token of each answer. All answers have an advantage of -1."""
    trainer = trl_trainer(model, [0.0] * len(lengths), loss_type=loss_type, beta=0.0)
    trainer.current_gradient_accumulation_steps = 1
    mask = torch.tensor([[place < length for place in range(8)] for length in lengths]).int()
    logps = torch.full(mask.shape, -1.0, requires_grad=True)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logps, torch.zeros_like(logps), None)
    inputs = {
        "prompt_ids": torch.ones(len(lengths), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(lengths), 1, dtype=torch.long),
        "completion_ids": torch.ones(mask.shape, dtype=torch.long),
        "completion_mask": mask,
        "advantages": torch.full((len(lengths),), -1.0),
        "num_items_in_batch": mask.sum(),
    }
    (found,) = torch.autograd.grad(trainer._compute_loss(trainer.model, inputs), logps)
    return found[:, 0].tolist()


def trl_penalty(model: str, logprobs: Sequence[float], reference: Sequence[float]) -> list[float]:
    """The loss's penalty for each token: the loss of a one-token answer with advantage 0, token by token."""
    trainer = trl_trainer(model, [0.0, 0.0], loss_type="dapo", beta=BETA)
    trainer.current_gradient_accumulation_steps = 1
    found: list[float] = []
    for now, then in zip(logprobs, reference, strict=True):
        logps = torch.tensor([[now]])
        trainer._get_per_token_logps_and_entropies = lambda *_, logps=logps, **__: (
            logps,
            torch.zeros_like(logps),
            None,
        )
        one = torch.ones(1, 1, dtype=torch.long)
        inputs = {"prompt_ids": one, "prompt_mask": one, "completion_ids": one, "completion_mask": one.int()}
        inputs |= {"advantages": torch.zeros(1), "num_items_in_batch": torch.tensor(1)}
        inputs["ref_per_token_logps"] = torch.tensor([[then]])
        found.append(float(trainer._compute_loss(trainer.model, inputs)))
    return found


def of_trl(model: str, asked: dict[str, Any]) -> dict[str, Any]:
    import trl

    return {
        "version": f"TRL {trl.__version__}",
        "advantages": {
            f"GRPO, scale_rewards {scale}": {
                name: attempt(lambda rewards=rewards, scale=scale: trl_advantages(model, rewards, scale))
                for name, rewards in asked["groups"].items()
            }
            for scale in SCALES
        },
        "weights": {
            f"loss_type {kind}": attempt(lambda kind=kind: trl_weights(model, asked["lengths"], kind))
            for kind in LOSSES
        },
        "penalties": {"k3, in the loss": attempt(lambda: trl_penalty(model, asked["logprobs"], asked["reference"]))},
    }


# ---------------------------------------------------------------- verl


def verl_advantages(name: str, rewards: Rewards, **more: Any) -> list[float]:
    import numpy as np
    from verl.trainer.ppo import core_algos

    given = torch.tensor(
        [[reward] for reward in rewards if reward is not None]
    )  # verl's caller leaves out ungraded rollouts
    index = np.array(["g"] * len(given), dtype=object)
    found, _ = getattr(core_algos, name)(given, torch.ones_like(given), index, **more)
    graded = iter(found[:, 0].tolist())
    return [0.0 if reward is None else next(graded) for reward in rewards]


def verl_weights(lengths: Sequence[int], mode: str) -> list[float]:
    from verl.trainer.ppo import core_algos

    mask = torch.tensor([[float(place < length) for place in range(8)] for length in lengths])
    logps = torch.zeros(mask.shape, requires_grad=True)
    more = {"loss_scale_factor": 8} if mode == "seq-mean-token-sum-norm" else {}
    (found,) = torch.autograd.grad(core_algos.agg_loss(logps, mask, mode, **more), logps)
    return found[:, 0].tolist()


def of_verl(_: str, asked: dict[str, Any]) -> dict[str, Any]:
    import verl
    from verl.trainer.ppo import core_algos

    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "grpo, norm_adv_by_std False": ("compute_grpo_outcome_advantage", {"norm_adv_by_std_in_grpo": False}),
        "grpo, norm_adv_by_std True": ("compute_grpo_outcome_advantage", {"norm_adv_by_std_in_grpo": True}),
        "rloo": ("compute_rloo_outcome_advantage", {}),
    }
    modes = ("seq-mean-token-sum-norm", "seq-mean-token-mean", "token-mean")
    now, then = torch.tensor(asked["logprobs"]), torch.tensor(asked["reference"])
    return {
        "version": f"verl {verl.__version__}",
        "advantages": {
            label: {
                name: attempt(lambda rewards=rewards, kind=kind, more=more: verl_advantages(kind, rewards, **more))
                for name, rewards in asked["groups"].items()
            }
            for label, (kind, more) in kinds.items()
        },
        "weights": {mode: attempt(lambda mode=mode: verl_weights(asked["lengths"], mode)) for mode in modes},
        "penalties": {
            kind: attempt(lambda kind=kind: core_algos.kl_penalty(now, then, kind).tolist()) for kind in ("k1", "k3")
        },
    }


def main() -> None:
    answers = quiet_stdout()
    peer, model = sys.argv[1:3]
    asked = json.load(sys.stdin)
    torch.manual_seed(0)
    print(json.dumps({"trl": of_trl, "verl": of_verl}[peer](model, asked)), file=answers, flush=True)


if __name__ == "__main__":
    main()
