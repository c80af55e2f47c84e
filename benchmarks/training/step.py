"""One step of reinforcement learning, end to end on this CPU: our loop and TRL's GRPOTrainer, on the same prompts.

    python -m benchmarks.peers trl
    python -m benchmarks.training.step [--repeats 3] [--contenders ours-exact trl] [--cache DIR]
    python -m benchmarks.training.step --contenders ours-exact --tokens 512 --ignore-eos --repeats 1    # peak memory of long rollouts

A step is 24 prompts x 6 samples of up to 36 tokens, a trivial reward, one optimizer step, and (ours) the new weights rounded
and swapped into the engine. Steps alternate, and whoever is not asked is stopped. "least" is what the phase's matrix products
take on this CPU when nothing else runs, measured in the same run; "share" is least / seconds. Writes benchmarks/results/step.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.contender import PEERS, RESULTS, Contender, end_on_sigterm, machine, texts

from ostinato.model.load import resolve

NAMES = ("ours-exact", "ours-fast", "trl")


def start(name: str, model: Path, settings: dict[str, Any], args: argparse.Namespace, logs: Path) -> Contender:
    python, script, mode = (sys.executable, "benchmarks.training.ours", name.removeprefix("ours-"))
    if name == "trl":
        python, script, mode = str(args.trl_python), "benchmarks.training.peer_trl", ""
        if not args.trl_python.exists():
            raise SystemExit(
                f"{python} does not exist: run `python -m benchmarks.peers trl`, or leave trl out of --contenders"
            )
    command = [python, "-m", script, str(model), json.dumps(settings | {"mode": mode})]
    return Contender(name, command, log=logs / f"{name}.log")


def middle(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer with the median time (the lower of two), with the largest peak memory of all."""
    chosen = sorted(answers, key=lambda answer: answer["seconds"])[(len(answers) - 1) // 2]
    return chosen | {
        "peak_rss_gib": max(answer["peak_rss_gib"] for answer in answers),
        "all_seconds": [answer["seconds"] for answer in answers],
    }


def report(rows: dict[str, dict[str, Any]]) -> None:
    for name, row in rows.items():
        print(f"{name}: {row['seconds']:.2f} s, {row['sampled']} tokens sampled, peak {row['peak_rss_gib']:.2f} GiB")
        print(f"{'':>20}{'seconds':>10}{'GFLOP':>10}{'GFLOP/s':>10}{'least s':>10}{'share':>8}")
        for phase, seconds in row["phases"].items():
            line = f"{phase:>20}{seconds:>10.2f}"
            if work := row.get("work", {}).get(phase):
                line += f"{work['gflop']:>10,.0f}{work['gflop'] / seconds:>10,.0f}{work['least_s']:>10.2f}"
                line += f"{work['least_s'] / seconds:>8.0%}"
            print(line)
        for shape, rate in row.get("work", {}).get("rates_gflop_per_s", {}).items():
            print(f"{'':>20}{shape}: {rate:,.0f} GFLOP/s")
    if "trl" in rows:
        for name in rows.keys() - {"trl"}:
            print(f"{name} takes 1/{rows['trl']['seconds'] / rows[name]['seconds']:.2f} of the time of TRL")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--repeats", type=int, default=3, help="measured steps")
    parser.add_argument("--warmups", type=int, default=1, help="steps before them")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--samples", type=int, default=6, help="samples per prompt")
    parser.add_argument("--tokens", type=int, default=36, help="new tokens per sample, at most")
    parser.add_argument(
        "--characters", type=int, default=360, help="length of a prompt; about 4 characters make a token"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="ours only: every sample is of full length")
    parser.add_argument("--microbatch", type=int, default=1024, help="ours: tokens per micro-batch")
    parser.add_argument("--trl-batch", type=int, default=24, help="TRL's per-device batch; all at once needs > 16 GiB")
    parser.add_argument(
        "--recompute", action="store_true", help="recompute activations in the backward pass, all sides"
    )
    parser.add_argument("--roofline", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/ostinato"))
    parser.add_argument("--trl-python", type=Path, default=PEERS / "trl" / "bin" / "python")
    parser.add_argument("--logs", type=Path, default=None, help="where contenders log (default: a temporary directory)")
    parser.add_argument("--out", type=Path, default=RESULTS / "step.json")
    args = parser.parse_args()
    if args.ignore_eos and "trl" in args.contenders:
        parser.error("--ignore-eos is for ours only: leave trl out of --contenders")
    return args


def main() -> None:
    args = arguments()
    end_on_sigterm()
    model = resolve(args.model, args.cache)
    logs = args.logs or Path(tempfile.mkdtemp(prefix="ostinato-step-"))
    names = ("samples", "tokens", "ignore_eos", "microbatch", "trl_batch", "recompute", "roofline")
    settings = {name: getattr(args, name) for name in names}
    settings["prompts"] = texts(args.prompts, args.characters, seed=0)
    before, contenders = machine(), []
    taken: dict[str, list[dict[str, Any]]] = {name: [] for name in args.contenders}
    try:
        for name in args.contenders:
            contenders.append(start(name, model, settings, args, logs))
        for number in range(args.warmups + args.repeats):
            for each in contenders:
                answer = each.ask(step=number)
                print(f"  step {number}, {each.name:<11}{answer['seconds']:>8.2f} s", file=sys.stderr, flush=True)
                if number >= args.warmups:
                    taken[each.name].append(answer)
    finally:
        for each in contenders:
            each.close()
    rows = {name: middle(answers) for name, answers in taken.items()}
    report(rows)
    spread = {
        name: (max(row["all_seconds"]) - min(row["all_seconds"])) / statistics.median(row["all_seconds"])
        for name, row in rows.items()
    }
    about = {"machine": before, "contenders": {each.name: each.about for each in contenders}, "spread": spread}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({**about, "settings": settings, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
