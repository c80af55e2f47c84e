"""How far are the trainer's logprobs from the engine's, for stored turns, at the version that made them?

    python -m benchmarks.engine.mismatch [RUN_DIRECTORY] [--turns 1000]

RUN_DIRECTORY is what `ostinato demo` or `ostinato up` left behind (default: the newest in runs/).
Turns are spread over the run; those that met a swap are left
out. d = trainer - engine, per sampled token, in nats. Prints a table and writes benchmarks/results/mismatch.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.contender import RESULTS

from ostinato.app.numerics import training
from ostinato.app.storage import model_path, open_log, open_store
from ostinato.config import load
from ostinato.core.records import PolicyVersion, Turn
from ostinato.record.rowlog import RowLog
from ostinato.train.trainer import PolicyTrainer
from ostinato.weights.follow.follower import Follower

RESULT = RESULTS / "mismatch.json"


async def chosen(log: RowLog, count: int) -> dict[PolicyVersion, list[Turn]]:
    """`count` turns of one version each, evenly spread over the log, by version."""
    whole = [
        row
        async for _, row in log.read(0, {Turn})
        if isinstance(row, Turn) and row.sampled_ids and len(row.spans) == 1 and row.finish.trainable
    ]
    picks = np.linspace(0, len(whole) - 1, min(count, len(whole))).astype(int)
    found: dict[PolicyVersion, list[Turn]] = defaultdict(list)
    for pick in picks:
        found[whole[pick].spans[0].policy].append(whole[pick])
    return found


async def measure(directory: Path, count: int) -> dict[str, Any]:
    config = load(directory / "config.json")
    config = config.model_copy(update={"run": config.run.model_copy(update={"directory": directory})})
    follower = Follower(open_store(config))
    trainer = PolicyTrainer(model_path(config), training(config))
    rows: list[dict[str, Any]] = []
    every: list[float] = []
    with open_log(config) as log:
        for policy, turns in sorted((await chosen(log, count)).items()):
            trainer.go_back(await follower.fetch(policy))
            differences = [
                ours - theirs
                for scored, turn in zip(trainer.score(turns), turns, strict=True)
                for ours, theirs in zip(scored, turn.logprobs, strict=True)
            ]
            every += differences
            rows.append({"version": policy.number, "turns": len(turns)} | summary(differences))
    return {"turns": count, "versions": rows, "all": summary(every), "torch": torch.__version__}


def summary(differences: list[float]) -> dict[str, float]:
    d = np.array(differences)
    size = np.abs(d)
    return {
        "tokens": len(d),
        "equal_bits": float((d == 0).mean()),
        "mean": float(d.mean()),
        "p50_abs": float(np.quantile(size, 0.5)),
        "p99_abs": float(np.quantile(size, 0.99)),
        "p99.9_abs": float(np.quantile(size, 0.999)),
        "max_abs": float(size.max()),
        "k3": float((np.exp(d) - 1 - d).mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("--turns", type=int, default=1000)
    args = parser.parse_args()
    runs = sorted(Path("runs").glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    if args.run is None and not runs:
        print("nothing to measure: no run in runs/; `make demo` leaves one")
        return
    torch.set_num_threads(1)
    result = asyncio.run(measure(args.run or runs[-1].parent, args.turns))
    columns = ("tokens", "equal_bits", "mean", "p50_abs", "p99_abs", "p99.9_abs", "max_abs", "k3")
    print("version  turns  " + "  ".join(f"{name:>10}" for name in columns))
    for row in [*result["versions"], {"version": "all", "turns": args.turns} | result["all"]]:
        print(f"{row['version']!s:>7}  {row['turns']:>5}  " + "  ".join(f"{row[name]:>10.3g}" for name in columns))
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
