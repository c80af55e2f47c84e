"""Our trainer over two processes as a contender of ranks.py: it repeats the same step for each command."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.contender import quiet_stdout, serve

import ostinato
from ostinato.core.records import PolicyVersion, Span
from ostinato.core.samples import Sample
from ostinato.testing.records import a_turn
from ostinato.train.config import TrainConfig
from ostinato.train.sharding.trainer import ShardedTrainer, return_freed_memory
from ostinato.train.trainer import PolicyTrainer


def peak_gib(pid: int | str) -> float:
    """A process's peak resident memory so far."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**20


def samples(path: Path, turns: list[dict[str, Any]], config: TrainConfig) -> list[Sample]:
    """Samples with the unchanged model's log-probabilities, so that no importance correction takes effect."""
    held = PolicyVersion(number=0, hash="0" * 64)
    made = [a_turn(f"{n}:0", prompt=turn["prompt"], sampled=turn["sampled"]) for n, turn in enumerate(turns)]
    scored = PolicyTrainer(path, config.model_copy(update={"ranks": 1})).score(made)
    return [
        Sample(
            turn=replace(turn, logprobs=tuple(own), spans=(Span(policy=held, tokens=len(own)),)),
            reward=1.0,
            advantages=(given["advantage"],) * len(own),
        )
        for turn, own, given in zip(made, scored, turns, strict=True)
    ]


def main() -> None:
    answers = quiet_stdout()
    return_freed_memory()  # as the training worker does
    torch.set_num_threads(1)
    path, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    config = TrainConfig(
        compute="fp32", publish="bf16", learning_rate=settings["rate"], warmup_steps=0, clip=1e9, ranks=2,
        microbatch_tokens=settings["microbatch"], max_k3=1e6, kl_beta=0.0, importance_cap=1e6, mean_weight=1e6,
    )  # fmt: skip
    given = samples(path, json.loads(Path(settings["turns"]).read_text()), config)
    trainer = ShardedTrainer(path, config)
    pids = ["self", *(process.pid for process in trainer.others)]

    def answer(command: dict[str, Any]) -> dict[str, Any]:
        del command
        started = time.perf_counter()
        made = trainer.step(given).metrics
        found = {"loss": made["loss"], "seconds": time.perf_counter() - started, "tokens": made["tokens"]}
        phases = {name: made[key] for key in made if (name := key.removeprefix("seconds_")) != key}
        return found | {"phases": phases, "peaks_gib": [round(peak_gib(pid), 3) for pid in pids]}

    serve({"version": ostinato.__version__, "torch": torch.__version__}, answer, answers)


if __name__ == "__main__":
    main()
