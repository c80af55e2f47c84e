"""Writes trl_losses.json: tensors, and what TRL 1.16's own code makes of them. Run by hand in a venv with trl==1.16.0.

    python tests/oracles/trl_losses.py

TRL's trainers are not started: an object of the trainer's class, with just the settings that the loss reads, has its
`_compute_loss` called with given log-probabilities in place of a model's. Each case stores the loss, its gradient with respect to the
log-probabilities, and the settings. The tests compare ostinato.train.losses with the file; they never import TRL.

Cases, and why they coincide with ostinato's loss (w detached, A per turn, constant normaliser):
    cispo           -min(pi/mu, cap) A log pi summed over tokens: value and gradient are the same formula
    dr_grpo_tis     on-policy ratio 1 times TRL's truncated sampler/trainer correction, over turns x max length: same gradient
    rloo            on-policy sequence ratio: same gradient with a normaliser of one per turn
    kl_k3           the mean of the k3 estimator that GRPO logs as `kl`
    logprobs        selective_log_softmax(logits / T)
"""

from __future__ import annotations

import json
import types
from collections import defaultdict
from pathlib import Path

import torch
import trl
from accelerate import Accelerator
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer
from trl.trainer.utils import selective_log_softmax

TURNS, LENGTH, MAX_LENGTH, CAP = 6, 9, 16, 2.0


def trainer(kind: type, logps: torch.Tensor, **settings: object) -> object:
    made = object.__new__(kind)
    defaults = {
        "accelerator": Accelerator(cpu=True),
        "model": types.SimpleNamespace(training=True),
        "args": types.SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": MAX_LENGTH,
        "_entropy_bonus_enabled": False,
    }
    for name, value in (defaults | settings).items():
        object.__setattr__(made, name, value)
    made._get_per_token_logps_and_entropies = lambda *args, **kwargs: (logps, torch.zeros_like(logps), None)
    return made


def tensors() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(7)
    logps = -3 * torch.rand(TURNS, LENGTH, generator=draw)
    mask = torch.ones(TURNS, LENGTH)
    for turn, length in enumerate((9, 4, 1, 7, 9, 5)):
        mask[turn, length:] = 0
    return {
        "logps": logps,
        "behaviour": logps + 0.6 * torch.randn(TURNS, LENGTH, generator=draw),  # some ratios above the cap
        "reference": logps + 0.3 * torch.randn(TURNS, LENGTH, generator=draw),
        "advantages": torch.randn(TURNS, generator=draw),
        "mask": mask,
    }


def compute(kind: type, given: dict[str, torch.Tensor], extra: dict[str, torch.Tensor], **settings: object) -> dict:
    logps = given["logps"].clone().requires_grad_(True)
    made = trainer(kind, logps, **settings)
    ids = torch.ones(TURNS, LENGTH, dtype=torch.long)
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": ids,
        "completion_ids": ids,
        "completion_mask": given["mask"],
        "advantages": given["advantages"],
        "num_items_in_batch": given["mask"].sum(),
        **extra,
    }
    loss = made._compute_loss(None, inputs)
    (grad,) = torch.autograd.grad(loss, logps)
    return {
        "loss": loss.item(),
        "grad": grad.tolist(),
        "metrics": {k: v[-1] for k, v in made._metrics["train"].items()},
    }


def main() -> None:
    given = tensors()
    ratio = (given["logps"] - given["behaviour"]).exp().clamp(max=CAP)
    cases = {
        "cispo": compute(
            GRPOTrainer, given, {"old_per_token_logps": given["behaviour"]}, loss_type="cispo", epsilon_high=CAP
        ),
        "dr_grpo_tis": compute(
            GRPOTrainer,
            given,
            {"importance_sampling_ratio": ratio},
            loss_type="dr_grpo",
            use_vllm=True,
            vllm_importance_sampling_correction=True,
        ),
        "rloo": compute(RLOOTrainer, given, {"old_logps": (given["logps"] * given["mask"]).sum(1)}),
        "kl_k3": compute(
            GRPOTrainer, given, {"ref_per_token_logps": given["reference"]}, loss_type="dr_grpo", beta=0.1
        ),
    }
    draw = torch.Generator().manual_seed(8)
    logits = 4 * torch.randn(5, 11, generator=draw)
    targets = torch.randint(0, 11, (5,), generator=draw)
    logits.requires_grad_(True)
    chosen = selective_log_softmax(logits[None] / 0.7, targets[None])[0]
    (grad,) = torch.autograd.grad(chosen.sum(), logits)
    cases["logprobs"] = {
        "logits": logits.tolist(),
        "targets": targets.tolist(),
        "temperature": 0.7,
        "logprobs": chosen.tolist(),
        "grad": grad.tolist(),
    }
    out = {
        "trl": trl.__version__,
        "torch": torch.__version__,
        "max_length": MAX_LENGTH,
        "cap": CAP,
        "inputs": {name: tensor.tolist() for name, tensor in given.items()},
        "cases": cases,
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
