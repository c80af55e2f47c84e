"""One long episode over ranks that share its tokens or not: bytes saved for the backward pass, and each process's peak memory.

Every run is a process of its own. `run.py --episode TOKENS` starts them.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tests.e2e.sharded_runs import difference, gradients
from torch import Tensor

from ostinato.core.records import PolicyVersion, Span
from ostinato.core.samples import Sample
from ostinato.testing.records import a_turn
from ostinato.testing.tiny import tiny_model
from ostinato.train.config import TrainConfig
from ostinato.train.sharding.trainer import ShardedTrainer
from ostinato.train.trainer import PolicyTrainer

CONFIG = TrainConfig(compute="fp32", learning_rate=1e-5, warmup_steps=0, microbatch_tokens=512, clip=1e9)
RUNS = {"one": (1, 1), "two": (2, 1), "together": (2, 2)}  # (ranks, ranks that share an episode)


def model(out: Path, tokens: int) -> Path:
    """A model with few layers, but as wide as a small model: 36M parameters, outweighed by its activations from 1,000 tokens on."""
    return tiny_model(out / "model", hidden=1024, layers=4, heads=16, kv_heads=4, context=tokens)


def episode(tokens: int) -> list[Any]:
    """Two turns of one session, the second with the first as its prefix, with a quarter of all tokens sampled."""
    draw = random.Random(0)
    ids = [draw.randrange(256) for _ in range(tokens + 1)]
    cuts = [(tokens // 2, tokens * 5 // 8), (tokens * 7 // 8, tokens + 1)]
    return [a_turn(f"{number}:0", prompt=ids[:a], sampled=ids[a:b]) for number, (a, b) in enumerate(cuts)]


class Kept:
    """Counts the bytes that this process saves for the backward pass, without parameters, counting each storage once."""

    def __init__(self, trainer: PolicyTrainer) -> None:
        self._model = trainer._policy.model  # pyright: ignore[reportPrivateUsage]
        self._sizes: dict[int, int] = {}

    @property
    def gib(self) -> float:
        return round(sum(self._sizes.values()) / 2**30, 4)

    def _pack(self, tensor: Tensor) -> Tensor:
        at = tensor.untyped_storage().data_ptr()
        if at not in {parameter.untyped_storage().data_ptr() for parameter in _plain(self._model)}:
            self._sizes[at] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    @contextmanager
    def counting(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield


def _plain(whole: torch.nn.Module) -> list[Tensor]:
    """The parameters that are in memory now; FSDP2 gathers a layer's parameters during its pass."""
    return [each for each in whole.parameters() if type(each.data) is Tensor and each.untyped_storage().nbytes()]


def one(out: Path, tokens: int, name: str, recompute_tokens: int) -> dict[str, Any]:
    """Take one step of a trainer. Returns its loss, memory and seconds."""
    from tests.examinations.sharding.run import peaks

    torch.set_num_threads(1)
    ranks, context_ranks = RUNS[name]
    config = TrainConfig.model_validate(
        CONFIG.model_dump() | {"ranks": ranks, "context_ranks": context_ranks, "recompute_tokens": recompute_tokens}
    )
    path, held = out / "model", PolicyVersion(number=0, hash="0" * 64)
    logprobs = json.loads((out / "logprobs.json").read_text())
    samples = [
        Sample(
            turn=replace(turn, logprobs=tuple(own), spans=(Span(policy=held, tokens=len(own)),)),
            reward=1.0,
            advantages=(1.0 - 1.5 * number,) * len(own),
        )
        for number, (turn, own) in enumerate(zip(episode(tokens), logprobs, strict=True))
    ]
    trainer = PolicyTrainer(path, config) if ranks == 1 else ShardedTrainer(path, config)
    others = [process.pid for process in trainer.others] if isinstance(trainer, ShardedTrainer) else []
    kept = Kept(trainer if isinstance(trainer, PolicyTrainer) else trainer._own)  # pyright: ignore[reportPrivateUsage]
    loaded = peaks([os.getpid(), *others])
    started = time.perf_counter()
    with kept.counting():
        metrics = trainer.step(samples).metrics
    seconds, peak = time.perf_counter() - started, peaks([os.getpid(), *others])
    trainer.save(out / f"{name}-{recompute_tokens}", cursor=0, keep=1)
    trainer.close()
    return {
        "ranks": ranks,
        "context_ranks": context_ranks,
        "recompute_tokens": recompute_tokens,
        "tokens": metrics["tokens"],
        "loss": metrics["loss"],
        "kept_gib_of_the_first_rank": kept.gib,
        "loaded_gib": loaded,
        "peak_gib": peak,
        "seconds": round(seconds, 1),
        **{name: round(value, 1) for name, value in metrics.items() if name.startswith("seconds_")},
    }


def examine(out: Path, tokens: int) -> None:
    """Run all cases, with activations kept and with activations recomputed."""
    path = model(out, tokens)
    drawn = episode(tokens)
    torch.set_num_threads(1)
    scored = PolicyTrainer(path, CONFIG).score(drawn)
    (out / "logprobs.json").write_text(json.dumps(scored))
    found: dict[str, Any] = {}
    for recompute_tokens in (1 << 30, 0):
        for name in RUNS:
            task = json.dumps({"tokens": tokens, "name": name, "recompute_tokens": recompute_tokens})
            command = [
                sys.executable,
                "-m",
                "tests.examinations.sharding.run",
                "--out",
                str(out),
                "--one-episode",
                task,
            ]
            told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            found[f"{name}-{recompute_tokens}"] = json.loads(told.splitlines()[-1])
            print(told.splitlines()[-1], flush=True)
        alone = gradients(out / f"one-{recompute_tokens}")
        for name in ("two", "together"):
            key = f"{name}-{recompute_tokens}"
            found[key]["gradient_difference"] = difference(alone, gradients(out / key))
            found[key]["same_loss"] = found[key]["loss"] == found[f"one-{recompute_tokens}"]["loss"]
            print(key, found[key]["gradient_difference"], found[key]["same_loss"], flush=True)
    (out / "episode.json").write_text(json.dumps(found, indent=1))
