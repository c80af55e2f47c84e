"""TRL's GRPOTrainer as a contender of step.py. It runs in an environment that `python -m benchmarks.peers` makes.

One optimizer step per command: the trainer runs its own loop, and at the end of each step waits for the next command. It
generates with transformers, its default. `dtype` applies to weights, gradients, moments and arithmetic:
bf16 needs a CPU that multiplies it natively, and fp32 is faster on all others. All rollouts of a step are generated at once;
`batch` is the number of rollouts per forward and backward pass.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from typing import Any

import torch
import trl
from benchmarks.contender import THREADS, gpu_peak_gib, quiet_stdout, reward
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback


class Timed(trl.GRPOTrainer):
    """Adds up the seconds of generation and of everything up to the loss."""

    spent: dict[str, float]

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        made = super()._generate_single_turn(*args, **kwargs)
        self.spent["rollout"] += time.perf_counter() - started
        self.spent["sampled"] += sum(map(len, made[0]))
        return made

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        scored = super()._generate_and_score_completions(*args, **kwargs)
        self.spent["made"] += time.perf_counter() - started
        return scored

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        loss = super().compute_loss(*args, **kwargs)
        self.spent["forward"] += time.perf_counter() - started
        return loss


class Turnstile(TrainerCallback):
    """Answers at the end of each step, then waits for the next command."""

    def __init__(self, answers: Any) -> None:
        self._answers, self.trainer = answers, None
        self._started = self._updating = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.spent = dict.fromkeys(("rollout", "made", "forward", "optimizer", "sampled"), 0.0)
        self._started = time.perf_counter()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._updating = time.perf_counter()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.spent["optimizer"] += time.perf_counter() - self._updating

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds, spent = time.perf_counter() - self._started, self.trainer.spent
        phases = {
            "rollout": spent["rollout"],
            "reward": spent["made"] - spent["rollout"],
            "forward": spent["forward"],
            "backward": seconds - spent["made"] - spent["forward"] - spent["optimizer"],
            "optimizer": spent["optimizer"],
        }
        answer = {
            "seconds": seconds,
            "phases": phases,
            "sampled": int(spent["sampled"]),
            "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
            "peak_gpu_gib": gpu_peak_gib(),
        }
        print(json.dumps(answer), file=self._answers, flush=True)
        if not sys.stdin.readline():
            control.should_training_stop = True
        return control


def even(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [reward(ids) for ids in completion_ids]


def main() -> None:
    answers = quiet_stdout()
    torch.set_num_threads(THREADS)
    path, settings = sys.argv[1], json.loads(sys.argv[2])
    rollouts = len(settings["prompts"]) * settings["samples"]
    batch, dtype = settings["batch"], settings["dtype"]
    turnstile = Turnstile(answers)
    with tempfile.TemporaryDirectory() as scratch:
        config = trl.GRPOConfig(
            output_dir=scratch,
            use_cpu=settings["device"] == "cpu",
            bf16=dtype == "bfloat16",
            model_init_kwargs={"dtype": dtype},
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=rollouts // batch,
            num_generations=settings["samples"],
            max_completion_length=settings["tokens"],
            generation_kwargs={"min_new_tokens": settings["tokens"]},  # every sample has full length, as ours have
            temperature=1.0,
            beta=0.0,
            loss_type="dr_grpo",
            scale_rewards="none",
            gradient_checkpointing=settings["recompute"],
            learning_rate=1e-5,
            lr_scheduler_type="constant",
            max_steps=1_000_000,
            save_strategy="no",
            report_to=[],
            logging_steps=1_000_000,
            disable_tqdm=True,
            dataloader_pin_memory=False,
            shuffle_dataset=False,
        )
        turnstile.trainer = Timed(
            model=path,
            args=config,
            reward_funcs=even,
            train_dataset=Dataset.from_dict({"prompt": settings["prompts"]}),
            processing_class=AutoTokenizer.from_pretrained(path, padding_side="left"),
            callbacks=[turnstile],
        )
        about = {"version": trl.__version__, "torch": torch.__version__, "batch": batch}
        about |= {"dtype": str(turnstile.trainer.model.dtype), "optimizer": str(config.optim)}
        print(json.dumps(about), file=answers, flush=True)
        if sys.stdin.readline():
            turnstile.trainer.train()


if __name__ == "__main__":
    main()
