"""How far are the trainer's logprobs from the engine's, for stored turns, at the version that made them?

    python -m benchmarks.engine.mismatch [RUN_DIRECTORY] [--turns 1000]
    python -m benchmarks.engine.mismatch --fresh exact fast int8 int8-head fp8 [--turns 64]

RUN_DIRECTORY is the directory of a run of `ostinato demo` or `ostinato up` (default: the newest in runs/). Turns are spread evenly over the
run, without those during which weights were swapped. d = trainer - engine, per sampled token, in nats. Prints a table and writes
benchmarks/results/mismatch.json.

With --fresh no run is read: an engine in each of these modes samples new turns, and the model's trainer scores them (int8, fp8: the decoder
in 8-bit integers or floats; int8-head: its output head too). Writes benchmarks/results/mismatch_modes.json, with the drift measures of such
a batch.
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
from benchmarks.contender import RESULTS, machine
from benchmarks.engine.fresh import MODES, measure_modes

from ostinato.app.numerics import training
from ostinato.app.storage import model_path, open_log, open_store
from ostinato.config import load
from ostinato.core.records import PolicyVersion, Turn
from ostinato.model.load import resolve
from ostinato.record.rowlog import RowLog
from ostinato.train.trainer import PolicyTrainer
from ostinato.weights.follow.follower import Follower

RESULT = RESULTS / "mismatch.json"


async def chosen(log: RowLog, count: int) -> dict[PolicyVersion, list[Turn]]:
    """`count` turns, evenly spread over the log and grouped by version. Each was sampled from a single version."""
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
    parser.add_argument("--turns", type=int, default=None, help="1000 stored ones, or 64 fresh ones")
    parser.add_argument("--fresh", nargs="+", choices=MODES, default=None)
    parser.add_argument("--model", default="smollm2", help="with --fresh")
    parser.add_argument("--device", default="cpu", help="with --fresh; cuda: with fast alone")
    parser.add_argument("--out", type=Path, default=RESULTS / "mismatch_modes.json", help="with --fresh")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/ostinato"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.fresh:
        made = measure_modes(resolve(args.model, args.cache), args.fresh, args.turns or 64, summary, args.device)
        table("mode", [{"mode": row["mode"], "turns": row["turns"]} | row for row in made])
        _write(args.out, {"modes": made, "torch": torch.__version__, "machine": machine()})
        return
    turns = args.turns or 1000
    runs = sorted(Path("runs").glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    if args.run is None and not runs:
        print("nothing to measure: no run in runs/; `make demo` leaves one")
        return
    result = asyncio.run(measure(args.run or runs[-1].parent, turns))
    table("version", [*result["versions"], {"version": "all", "turns": turns} | result["all"]])
    _write(RESULT, result)


def table(key: str, rows: list[dict[str, Any]]) -> None:
    columns = ("tokens", "equal_bits", "mean", "p50_abs", "p99_abs", "p99.9_abs", "max_abs", "k3")
    print(f"{key:>9}  turns  " + "  ".join(f"{name:>10}" for name in columns))
    for row in rows:
        print(f"{row[key]!s:>9}  {row['turns']:>5}  " + "  ".join(f"{row[name]:>10.3g}" for name in columns))


def _write(place: Path, result: dict[str, Any]) -> None:
    place.parent.mkdir(exist_ok=True)
    place.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
