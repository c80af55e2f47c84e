"""One optimizer step on a real model: seconds per phase, tokens per second, peak memory, and the share that packing saves.

    python benchmarks/train_step.py --threads 1 2

The workload is the copilot demo's: 144 turns, prompts of 100 tokens of which 35 are the same for all, 40 distinct prompts, 30
sampled tokens each. The named peer is the same step without packing (each turn computed whole). Each row is its own process.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from ostinato.core.records import Arm, Finish, PolicyVersion, Sample, Sampling, Span, Turn
from ostinato.model.load import resolve
from ostinato.train import checkpoint
from ostinato.train import packing as packing_module
from ostinato.train.config import TrainConfig
from ostinato.train.trainer import PolicyTrainer

RESULT = Path(__file__).parent / "results" / "train_step.json"
START = PolicyVersion(number=0, hash="0" * 64)


def workload(turns: int, *, prompts: int = 40, head: int = 35, prompt: int = 100, sampled: int = 30) -> list[Turn]:
    draw = random.Random(0)
    common = [draw.randrange(1000, 40000) for _ in range(head)]
    known = [common + [draw.randrange(1000, 40000) for _ in range(prompt - head)] for _ in range(prompts)]
    return [
        Turn(
            id=f"t{index}:0",
            episode=f"t{index}",
            parent=None,
            user="simulated",
            tenant="default",
            arm=Arm.LIVE,
            propensity=1.0,
            prompt_ids=tuple(known[index % prompts]),
            sampled_ids=tuple(draw.randrange(1000, 40000) for _ in range(sampled)),
            logprobs=(0.0,) * sampled,
            spans=(Span(policy=START, tokens=sampled),),
            sampling=Sampling(max_tokens=sampled),
            finish=Finish.LENGTH,
            text="",
            started_at=0.0,
            ended_at=0.0,
        )
        for index in range(turns)
    ]


def measure(args: argparse.Namespace) -> dict[str, float]:
    torch.set_num_threads(args.threads[0])
    if args.unpacked:
        packing_module.shared = lambda one, other: 0  # no two turns share a token
    trainer = PolicyTrainer(
        resolve(args.model, Path(args.cache)), TrainConfig(compute=args.compute, microbatch_tokens=args.microbatch)
    )
    turns = workload(args.turns)
    started = time.perf_counter()
    scores = trainer.score(turns)
    scored = time.perf_counter() - started
    samples = [
        Sample(
            turn=Turn(**{name: getattr(turn, name) for name in Turn.__dataclass_fields__} | {"logprobs": logprobs}),
            reward=float(index % 2),
            advantage=1.0 if index % 2 else -1.0,
        )
        for index, (turn, logprobs) in enumerate(zip(turns, scores, strict=True))
    ]
    if args.profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            trainer.step(samples)
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=40, max_name_column_width=45))
    figures = {"seconds": float("inf")}
    for _ in range(args.steps):
        cpu = time.process_time()
        taken = dict(trainer.step(samples).metrics)
        taken["cpu_seconds"] = time.process_time() - cpu
        figures = min(figures, taken, key=lambda one: one["seconds"])
    figures["peak_rss_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    figures["score_seconds"] = scored
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        started = time.perf_counter()
        path = checkpoint.save(Path(scratch), trainer.state())
        figures["checkpoint_save_seconds"] = time.perf_counter() - started
        figures["checkpoint_bytes"] = float(sum(file.stat().st_size for file in path.iterdir()))
        started = time.perf_counter()
        found = checkpoint.load(Path(scratch))
        assert found is not None
        trainer.restore(found)
        figures["checkpoint_load_seconds"] = time.perf_counter() - started
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--cache", default=str(Path("~/.cache/ostinato").expanduser()))
    parser.add_argument(
        "--scratch", default=None, help="where the checkpoint is written (default: the temporary directory)"
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--turns", type=int, default=144)
    parser.add_argument("--steps", type=int, default=2, help="steps to take; the fastest is reported")
    parser.add_argument("--microbatch", type=int, default=2048)
    parser.add_argument("--compute", default="auto")
    parser.add_argument("--unpacked", action="store_true", help="measure the peer only")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one or args.profile:
        print(json.dumps(measure(args)))
        return
    rows: dict[str, dict[str, float]] = {}
    for threads in args.threads:
        for peer in (False, True) if not args.no_peer else (args.unpacked,):
            name = f"{'unpacked' if peer else 'packed'}, {threads} thread{'s' if threads > 1 else ''}"
            command = [
                sys.executable,
                __file__,
                "--one",
                "--threads",
                str(threads),
                "--model",
                args.model,
                "--cache",
                args.cache,
            ]
            command += ["--turns", str(args.turns), "--steps", str(args.steps), "--microbatch", str(args.microbatch)]
            command += ["--compute", args.compute, *(["--unpacked"] if peer else [])]
            command += ["--scratch", args.scratch] if args.scratch else []
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            rows[name] = json.loads(done.stdout.splitlines()[-1])
    report(rows)
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps({"turns": args.turns, "torch": torch.__version__, "rows": rows}, indent=1) + "\n")


def report(rows: dict[str, dict[str, float]]) -> None:
    keys = [
        "seconds",
        "cpu_seconds",
        "seconds_prepare",
        "seconds_forward",
        "seconds_backward",
        "seconds_optimizer",
        "seconds_publish",
    ]
    keys += ["tokens", "tokens_saved", "tokens_per_second", "score_seconds", "checkpoint_save_seconds"]
    keys += ["checkpoint_load_seconds", "checkpoint_bytes", "peak_rss_gib"]
    print(f"{'':26}" + "".join(f"{name:>24}" for name in rows))
    for key in keys:
        print(f"{key:26}" + "".join(f"{row[key]:>24,.2f}" for row in rows.values()))
    packed = next((row for name, row in rows.items() if name.startswith("packed")), None)
    peer = next((row for name, row in rows.items() if name.startswith("unpacked")), None)
    if packed and peer:
        print(f"packed is {peer['seconds'] / packed['seconds']:.2f} times as fast as unpacked")


if __name__ == "__main__":
    main()
