"""A trainer over 1, 2 and 4 ranks on a real model: loss, gradient, bits, memory, seconds, versions of which each rank publishes a
part, and a checkpoint that is resumed at other rank counts.

``python -m tests.examinations.sharding.run --model smollm2 --out DIR`` (SmolLM2-135M; 8 GiB for four ranks).
With ``--episode 4096`` it measures something else: the cost of one episode of that many tokens on ranks that share its tokens and on ranks
that do not, on a wide model of four layers (`episode.py`; 6 GiB). Every run is a separate process, so that its peak is its own.
Exits with 1 if the first loss, the gradient, the bits, a follower's root or a peak is not as promised.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tests.e2e.sharded_runs import difference, gradients, masters
from tests.examinations.sharding import episode as long

from ostinato.core.records import PolicyVersion, Span
from ostinato.core.samples import Sample
from ostinato.core.weights import Learned
from ostinato.model.load import resolve
from ostinato.model.renderer import HFRenderer
from ostinato.testing.records import a_turn
from ostinato.train.config import TrainConfig
from ostinato.train.sharding.trainer import RankProgram, ShardedTrainer, return_freed_memory
from ostinato.train.trainer import PolicyTrainer
from ostinato.weights.config import BucketConfig, PublisherConfig
from ostinato.weights.follow.follower import Follower
from ostinato.weights.publish.publisher import VersionPublisher
from ostinato.weights.publish.ranks import RankSettings, Together
from ostinato.weights.store.directory import DirectoryStore
from ostinato.weights.version.content import version_ref, weights_root

# no clipping, so that the moments of the first step are the gradient itself, whatever its computed norm
CONFIG = TrainConfig(compute="bf16", learning_rate=2e-5, warmup_steps=0, microbatch_tokens=512, clip=1e9)
TEXT = Path(__file__).read_text()
SAME = ("loss equal to one process", "followers at the trainer's root")
AGAIN = "equal bits at 2 ranks"
GRADIENT = "gradient, largest relative difference of a tensor"
SHARE = "peak of each rank over its ideal share"
MOST_SHARE = 1.15
APART = {"fp32": 1e-5, "bf16": 2e-2}
"""The largest difference of gradients: sums in another order, and bf16's 8 bits."""


def turns(path: Path, count: int) -> list[Any]:
    """Pieces of this program's own source, as prompts of 40 to 109 tokens and answers of 41 to 169."""
    ids = HFRenderer(path).encode(TEXT)
    draw = random.Random(0)
    found = []
    for index in range(count):
        at = draw.randrange(len(ids) - 220)
        cut, end = at + draw.randrange(40, 110), at + draw.randrange(150, 210)
        found.append(a_turn(f"{index}:0", prompt=ids[at:cut], sampled=ids[cut:end]))
    return found


def score(path: Path, config: TrainConfig, count: int, out: Path) -> None:
    """Write the log-probabilities that the sampler would have recorded, once for all runs."""
    drawn = turns(path, count)
    (out / "logprobs.json").write_text(json.dumps(PolicyTrainer(path, config).score(drawn)))


def batch(path: Path, out: Path) -> list[Sample]:
    scored = json.loads((out / "logprobs.json").read_text())
    held = PolicyVersion(number=0, hash="0" * 64)
    return [
        Sample(
            turn=replace(turn, logprobs=tuple(own), spans=(Span(policy=held, tokens=len(own)),)),
            reward=1.0,
            advantages=(1.0 if number % 2 else -0.7,) * len(own),
        )
        for number, (turn, own) in enumerate(zip(turns(path, len(scored)), scored, strict=True))
    ]


def peaks(pids: list[int]) -> list[float]:
    """Peak resident GiB of processes."""
    found = []
    for pid in pids:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        found.append(round(next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**20, 3))
    return found


class Versions:
    """Publishes each version as a delta to the one before, during the next step, as the training worker does."""

    def __init__(self, store: DirectoryStore, config: PublisherConfig, lines: Sequence[socket.socket]) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._loop = asyncio.Runner()  # of the pool's thread
        self._publisher = VersionPublisher(store, config, (lambda own: Together(own, lines)) if lines else None)
        self._last: PolicyVersion | None = None
        self._begun: list[Future[dict[str, Any]]] = []

    def begin(self, learned: Learned) -> None:
        """Start publishing a version. The caller must not keep it, because its memory is measured."""
        self._begun.append(self._pool.submit(self._publish, learned))

    def settle(self) -> list[dict[str, Any]]:
        """Wait for all versions. Returns each publication's root, form, size and seconds."""
        return [each.result() for each in self._begun]

    def _publish(self, learned: Learned) -> dict[str, Any]:
        done = self._loop.run(
            self._publisher.publish(learned.policy_number, learned.weights, run="examination", base=self._last)
        )
        self._last = done.policy
        return {
            "hash": done.policy.hash,
            "form": done.kind,
            "bytes": done.bytes,
            "ratio": round(done.ratio, 1),
            "seconds": round(done.seconds, 2),
        }


def begin(path: Path, config: TrainConfig, place: Path) -> tuple[PolicyTrainer | ShardedTrainer, Versions]:
    """A trainer and a publisher of its versions, over the configured ranks."""
    store, publish = DirectoryStore(place), PublisherConfig(scratch=place.parent)
    if config.ranks == 1:
        return PolicyTrainer(path, config), Versions(store, publish, ())
    settings = RankSettings(weights=BucketConfig(url=str(place)), publish=publish)
    program = RankProgram(module="ostinato.app.rank", settings=settings.model_dump_json())
    trainer = ShardedTrainer(path, config, None, program)
    return trainer, Versions(store, publish, trainer.lines)


async def followed(store: DirectoryStore, root: str) -> str:
    """The root of the weights that a follower fetches for a version."""
    follower = Follower(store)
    policy = await follower.resolve(version_ref(root))
    assert policy is not None
    return weights_root(await follower.fetch(policy))


def one(
    path: Path, config: TrainConfig, out: Path, ranks: int, name: str, steps: int, resume: str | None
) -> dict[str, Any]:
    """Take steps at a number of ranks, with a checkpoint after the first, and report the root after the last."""
    if ranks > 1:
        return_freed_memory()  # as the training worker does
    torch.set_num_threads(1)
    samples = batch(path, out)
    gc.collect()
    before = peaks([os.getpid()])[0]
    config = config.model_copy(update={"ranks": ranks})
    place = out / f"{name}-weights"
    trainer, publisher = begin(path, config, place)
    store = DirectoryStore(place)
    pids = [os.getpid()] + ([process.pid for process in trainer.others] if isinstance(trainer, ShardedTrainer) else [])
    loaded = peaks(pids)
    resumed = resume is not None and trainer.resume(out / resume)
    losses, norms, seconds = [], [], []
    publisher.begin(trainer.present())
    for number in range(steps):
        learned = trainer.step(samples)
        metrics = learned.metrics
        losses.append(metrics["loss"])
        norms.append(metrics["grad_norm"])
        seconds.append(round(metrics["seconds"], 2))
        if number == 0:
            started = time.perf_counter()
            trainer.save(out / name, cursor=0, keep=1)
            saved = round(time.perf_counter() - started, 2)
        publisher.begin(learned)
        del learned
    published = publisher.settle()
    found = {
        "ranks": ranks,
        "resumed": resumed,
        "losses": losses,
        "norms": norms,
        "seconds": seconds,
        "save_s": saved,
        "imported_gib": before,
        "loaded_gib": loaded,
        "peak_gib": peaks(pids),
        "published": published,
        "root": asyncio.run(followed(store, published[-1]["hash"])),
        "whole_root": weights_root(trainer.weights()),
    }
    if isinstance(trainer, ShardedTrainer):
        trainer.close()
    return found


def shares(runs: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
    """Each rank's peak memory over its ideal share: what the imports take, and an equal part of the rest of one process's peak."""
    imported, alone = runs["one"]["imported_gib"], runs["one"]["peak_gib"][0]
    return {
        name: [round(peak / (imported + (alone - imported) / each["ranks"]), 3) for peak in each["peak_gib"]]
        for name, each in runs.items()
        if each["ranks"] > 1
    }


def problems(report: dict[str, Any], compute: str) -> list[str]:
    """What is not as promised."""
    found = [f"{name}: {what}" for what in SAME for name, same in report[what].items() if not same]
    found += [] if report[AGAIN] else [f"not {AGAIN}"]
    found += [f"{name}: {GRADIENT}: {apart:.1e}" for name, apart in report[GRADIENT].items() if apart > APART[compute]]
    return found + [
        f"{name}: {SHARE}: {max(each):.2f}" for name, each in report[SHARE].items() if max(each) > MOST_SHARE
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/ostinato"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--compute", choices=("bf16", "fp32"), default="bf16", help="bf16 needs a CPU that has it")
    parser.add_argument("--recompute", action="store_true", help="keep no activations, as one does to save memory")
    parser.add_argument("--episode", type=int, metavar="TOKENS", help="one long episode instead")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--one-episode", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.one_episode:
        print(json.dumps(long.one(asked.out, **json.loads(asked.one_episode))))
        return 0
    if asked.episode:
        long.examine(asked.out, asked.episode)
        return 0
    path = resolve(asked.model, asked.cache)
    config = CONFIG.model_copy(update={"compute": asked.compute})
    if asked.recompute:
        config = config.model_copy(update={"recompute_tokens": 0})
    if asked.run == "score":
        score(path, config, asked.turns, asked.out)
        return 0
    if asked.run:
        task = json.loads(asked.run)
        (asked.out / f"{task['name']}.json").write_text(json.dumps(one(path, config, asked.out, **task)))
        return 0

    def child(run: str) -> None:
        command = [sys.executable, "-m", "tests.examinations.sharding.run", "--run", run]
        rest = [
            "--model",
            asked.model,
            "--cache",
            str(asked.cache),
            "--out",
            str(asked.out),
            "--turns",
            str(asked.turns),
            "--compute",
            asked.compute,
            *(["--recompute"] if asked.recompute else []),
        ]
        subprocess.run(command + rest, check=True)

    def run(ranks: int, name: str, steps: int, resume: str | None = None) -> dict[str, Any]:
        child(json.dumps({"ranks": ranks, "name": name, "steps": steps, "resume": resume}))
        found = json.loads((asked.out / f"{name}.json").read_text())
        print(name, json.dumps(found), flush=True)
        return found

    child("score")
    runs = {name: run(ranks, name, asked.steps) for ranks, name in ((1, "one"), (2, "two"), (2, "again"), (4, "four"))}
    alone = gradients(asked.out / "one")
    report: dict[str, Any] = {
        SAME[0]: {name: each["losses"][0] == runs["one"]["losses"][0] for name, each in runs.items()},
        GRADIENT: {name: difference(alone, gradients(asked.out / name)) for name in ("two", "four")},
        AGAIN: runs["two"]["root"] == runs["again"]["root"],
        "same published root as one process": {
            name: each["root"] == runs["one"]["root"] for name, each in runs.items()
        },
        SAME[1]: {name: each["root"] == each["whole_root"] for name, each in runs.items()},
        SHARE: shares(runs),
    }
    for name in ("again", "four"):
        shutil.rmtree(asked.out / name)
    run(4, "two_then_four", 1, "two")
    run(1, "then_one", 1, "two_then_four")
    before, after = masters(asked.out / "one"), masters(asked.out / "then_one")
    report["masters after 2, 4 and 1 ranks, moved since step 1"] = difference(before, after)
    report["problems"] = problems(report, asked.compute)
    print(json.dumps(report, indent=1))
    (asked.out / "report.json").write_text(json.dumps({"runs": runs, "report": report}, indent=1))
    return int(bool(report["problems"]))


if __name__ == "__main__":
    raise SystemExit(main())
