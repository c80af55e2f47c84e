"""TRL's GRPOTrainer on the tasks of `lag.py`, in TRL's environment. Its reward function waits for the slowest rollout of a step.

    .peers/trl/bin/python -m benchmarks.worlds.peer_lag MODEL SEED STEPS RATE TARGET RECENT

AsyncGRPOTrainer is tried too, and its error is reported: it needs a vLLM server, to which it sends weights over NCCL.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
import trl
from benchmarks.contender import THREADS, quiet_stdout
from benchmarks.worlds.lag_world import GROUP, GROUPS, LIKED, TASKS, TOKENS, duration, prompt
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback


def conversations() -> Dataset:
    return Dataset.from_list([{"prompt": [{"role": "user", "content": prompt(n)}]} for n in range(TASKS)])


def asynchronous(model: str) -> str:
    """The error with which AsyncGRPOTrainer fails here, or "starts"."""
    try:
        from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

        config = AsyncGRPOConfig(
            output_dir=tempfile.mkdtemp(), vllm_server_timeout=1.0, bf16=False, report_to=[], use_cpu=True
        )
        AsyncGRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config,
            train_dataset=conversations(),
        )
    except Exception as error:  # noqa: BLE001 - the error is the answer
        return f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"
    return "starts"


class Watched(TrainerCallback):
    """Ends training once the reward is reached."""

    def __init__(self, rewards: list[float], at: list[float], target: float, recent: int) -> None:
        self._rewards, self._at, self._target, self._recent = rewards, at, target, recent
        self._began = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        self._at.append(time.perf_counter() - self._began)
        last = self._rewards[-self._recent :]
        control.should_training_stop = len(last) == self._recent and statistics.fmean(last) >= self._target
        return control


def main() -> None:
    answers = quiet_stdout()
    model, seed, steps, rate, target, recent, scale = sys.argv[1], *map(float, sys.argv[2:])
    torch.set_num_threads(THREADS)
    rewards: list[float] = []
    at: list[float] = []
    count = 0

    def graded(completions: list[Any], **_: Any) -> list[float]:
        nonlocal count
        time.sleep(max(duration(f"{seed:.0f}.{count + n}", scale) for n in range(len(completions))))  # rollouts overlap
        count += len(completions)
        found = [float(re.match(LIKED, said[0]["content"]) is not None) for said in completions]
        rewards.append(statistics.fmean(found))
        return found

    config = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=GROUP * GROUPS,
        num_generations=GROUP,
        max_completion_length=TOKENS,
        max_steps=int(2 * steps),
        learning_rate=rate,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        temperature=1.0,
        loss_type="dr_grpo",
        scale_rewards="none",
        beta=0.0,
        seed=int(seed),
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=graded,
        args=config,
        train_dataset=conversations(),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        callbacks=[Watched(rewards, at, target, int(recent))],
    )
    trainer.train()
    said = asynchronous(model)
    answer = {"version": f"TRL {trl.__version__} GRPOTrainer", "AsyncGRPOTrainer": said, "rewards": rewards, "at": at}
    print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
