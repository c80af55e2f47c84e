"""The models of `run` under the same learning from rewards: does the order of their losses predict the order of their rewards?

    python -m tests.examinations.midtraining.run --corpus DIR
    python -m tests.examinations.midtraining.rewards [--work DIR] [--seeds 0 1 2] [--steps 12] [--start]

For each budget and seed it does the same as `tests.examinations.learning.run` with the functions: `ostinato train --world` on the taught
tasks, then `ostinato worlds run` on the held-out ones, before and after. `--start` adds the model before pre-training. Writes rewards and
losses, and Spearman's rank correlation with bootstrap intervals over seeds and families of tasks, to results/midtraining_rewards.json.
About ten minutes a model and seed on two idle cores; finished parts are not repeated.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from tests.examinations.learning.run import STEPS, train, tried_in, write_tasks
from tests.examinations.midtraining.ranks import ranked
from tests.examinations.midtraining.run import RESULT as LOSSES

from ostinato.worlds.rollout.finished import read_finished

WORLD = "functions"
RESULT = LOSSES.with_name("midtraining_rewards.json")


def models(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Each model's directory, the tokens that it read, and its held-out loss."""
    found = json.loads(args.losses.read_text())
    rows = [{"tokens": 0, "loss": found["before"], "source": found["source"]}] if args.start else []
    for course in found["courses"]:
        source = (args.work / f"budget-{course['budget']}").resolve()
        rows.append({"tokens": course["tokens"], "loss": course["loss"], "source": str(source)})
    return rows


def taught(model: dict[str, Any], file: Path, seed: int, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Mean success by family, before and after training. The result is saved beside the run."""
    place = args.work / f"rewards-{model['tokens']}-{args.steps}"
    note = place / f"{WORLD}-{seed}.json"
    if note.exists():
        return json.loads(note.read_text())
    place.mkdir(parents=True, exist_ok=True)
    row = train(WORLD, file, {"model.source": model["source"]}, "exact", seed, args.steps, place)
    kept, _ = read_finished(tried_in(place, WORLD, "exact", seed).read_text().splitlines())
    found: dict[str, dict[str, float]] = {}
    for name, last in (("before", False), ("after", True)):
        solved: dict[str, list[bool]] = {}
        for each in kept:
            if each.policy is not None and (each.policy.number == row["steps"]) is last:
                solved.setdefault(each.family, []).append(each.solved)
        found[name] = {family: float(np.mean(each)) for family, each in sorted(solved.items())}
    note.write_text(json.dumps(found, indent=1) + "\n")
    return found


def report(result: dict[str, Any]) -> None:
    table = Table("tokens read", "held-out loss", "solved before RL", "solved after RL")
    for number, model in enumerate(result["models"]):
        shares = [result[name]["rewards"][number] for name in ("before", "after")]
        words = [f"{100 * each['mean']:.1f}% [{100 * each['lower']:.1f}, {100 * each['upper']:.1f}]" for each in shares]
        table.add_row(f"{model['tokens']:,}", f"{model['loss']:.4f}", *words)
    console = Console()
    console.print(table)
    for name in ("before", "after"):
        each = result[name]
        console.print(
            f"{name}: rank correlation of (minus) loss and reward {each['rank_correlation']:+.2f} "
            f"[{each['lower']:+.2f}, {each['upper']:+.2f}], the same order in {100 * each['in_order']:.0f}% of draws"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/midtraining"))
    parser.add_argument("--losses", type=Path, default=LOSSES, help="what `run` wrote")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS[WORLD])
    parser.add_argument("--start", action="store_true", help="the model that was read on from, too")
    parser.add_argument("--result", type=Path, default=RESULT)
    args = parser.parse_args()
    file, rows = write_tasks(WORLD, args.work), models(args)
    found = [[taught(model, file, seed, args) for seed in args.seeds] for model in rows]
    losses_C = np.array([model["loss"] for model in rows])
    result: dict[str, Any] = {"world": WORLD, "seeds": args.seeds, "steps": args.steps}
    result["models"] = [{**row, "source": Path(row["source"]).name} for row in rows]
    for name in ("before", "after"):
        rewards_CSF = np.array([[[*each[name].values()] for each in seeds] for seeds in found])
        result[name] = {"families": rewards_CSF.shape[2], **ranked(losses_C, rewards_CSF)}
    args.result.write_text(json.dumps(result, indent=1) + "\n")
    report(result)


if __name__ == "__main__":
    main()
