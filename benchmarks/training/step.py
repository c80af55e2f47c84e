"""One step of reinforcement learning, end to end on one CPU or GPU: our loop and TRL's GRPOTrainer, on the same prompts.

    python -m benchmarks.peers trl
    python -m benchmarks.training.step                      # both sides, short and long completions: 10 to 15 minutes
    python -m benchmarks.training.step --contenders ours-exact --workloads short
    python -m benchmarks.training.step --dry-run            # does it run? one tiny step each, on a busy machine too; nothing is written

A step is rollouts, a trivial reward, one optimizer step, and (ours) the new weights rounded and swapped into the engine. TRL gets
its best setting: weights in bf16 and in fp32 are tried, and then the other batch sizes with the faster dtype. Steps alternate, and an
idle contender is stopped. "least" is the time of the phase's matrix products on this device when nothing else runs, measured in the same
run; "share" is least / seconds. Refuses to start on a busy machine. Writes benchmarks/results/step.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.contender import PEERS, RESULTS, Contender, end_on_sigterm, machine, texts

from ostinato.model.load import resolve

NAMES = ("ours-exact", "ours-fast", "trl")
DTYPES = ("float32", "bfloat16")
BUSY = 0.5  # load above which nothing is measured
HOPELESS = 1.5  # times the best so far


@dataclass(frozen=True)
class Workload:
    """One setting of the benchmark. `batches` are the batch sizes to try for TRL; the first is tried in both dtypes."""

    prompts: int
    samples: int
    tokens: int
    batches: tuple[int, ...]

    @property
    def rollouts(self) -> int:
        return self.prompts * self.samples


WORKLOADS = {
    "short": Workload(prompts=4, samples=4, tokens=36, batches=(8, 16, 4)),
    "long": Workload(prompts=2, samples=2, tokens=512, batches=(4, 2)),
}


class Bench:
    """Starts contenders of one workload."""

    def __init__(self, work: Workload, model: Path, args: argparse.Namespace, logs: Path) -> None:
        self._work, self._model, self._args, self._logs = work, model, args, logs
        self._settings = {
            "prompts": texts(work.prompts, args.characters, seed=0),
            "samples": work.samples,
            "tokens": work.tokens,
            "microbatch": args.microbatch,
            "recompute": args.recompute,
            "roofline": args.roofline,
            "device": args.device,
        }

    def start(self, name: str, **more: Any) -> Contender:
        python, script = sys.executable, "benchmarks.training.ours"
        if name == "trl":
            python, script = str(self._args.trl_python), "benchmarks.training.peer_trl"
        else:
            more = {"mode": name.removeprefix("ours-")}
        command = [python, "-m", script, str(self._model), json.dumps(self._settings | more)]
        return Contender(name, command, log=self._logs / f"{name}.log")

    def search(self) -> list[dict[str, Any]]:
        """Try TRL's settings. Returns them with the seconds of a step, fastest first."""
        first, *others = self._work.batches
        found: list[dict[str, Any]] = []
        for dtype in DTYPES:
            found.append(self._try(dtype, first, found))
        best = min(found, key=_seconds)["dtype"]
        for batch in others:
            found.append(self._try(best, batch, found))
        return sorted(found, key=_seconds)

    def _try(self, dtype: str, batch: int, others: list[dict[str, Any]]) -> dict[str, Any]:
        """Time one setting. The second step counts, or the first if it is already hopelessly slow."""
        contender = self.start("trl", dtype=dtype, batch=batch)
        try:
            answer = contender.ask()
            if answer["seconds"] < HOPELESS * min(map(_seconds, others), default=math.inf):
                answer = contender.ask()
        finally:
            contender.close()
        say(f"TRL, {dtype}, batches of {batch}: {answer['seconds']:.2f} s")
        return {"dtype": dtype, "batch": batch} | answer


def _seconds(answer: dict[str, Any]) -> float:
    return answer["seconds"]


def say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def middle(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer with the median time (the lower of two), with the largest peak memory of all answers."""
    every = [answer["seconds"] for answer in answers]
    return sorted(answers, key=_seconds)[(len(answers) - 1) // 2] | {
        "peak_rss_gib": max(answer["peak_rss_gib"] for answer in answers),
        "all_seconds": every,
        "spread": (max(every) - min(every)) / statistics.median(every),
    }


def measure(work: Workload, model: Path, args: argparse.Namespace, logs: Path) -> dict[str, Any]:
    """Measure all contenders on one workload, alternating their steps."""
    bench, searched = Bench(work, model, args, logs), []
    contenders: list[Contender] = []
    taken: dict[str, list[dict[str, Any]]] = {name: [] for name in args.contenders}
    try:
        if "trl" in args.contenders:
            searched = bench.search()
        for name in args.contenders:
            best = {key: searched[0][key] for key in ("dtype", "batch")} if name == "trl" else {}
            contenders.append(bench.start(name, **best))
        for number in range(args.warmups + args.repeats):
            for each in contenders:
                answer = each.ask(step=number)
                say(f"step {number}, {each.name:<11}{answer['seconds']:>8.2f} s")
                if number >= args.warmups:
                    taken[each.name].append(answer)
    finally:
        for each in contenders:
            each.close()
    return {
        "workload": asdict(work),
        "contenders": {each.name: each.about for each in contenders},
        "searched": searched,
        "rows": {name: middle(answers) for name, answers in taken.items()},
    }


def report(name: str, found: dict[str, Any]) -> None:
    work, rows = found["workload"], found["rows"]
    print(f"\n{name}: {work['prompts']} prompts x {work['samples']} samples of {work['tokens']} tokens")
    for contender, row in rows.items():
        print(
            f"{contender}: {row['seconds']:.2f} s (spread {row['spread']:.0%}), peak {row['peak_rss_gib']:.2f} GiB"
            + (f", GPU {row['peak_gpu_gib']:.2f} GiB" if row["peak_gpu_gib"] else "")
        )
        print(f"{'':>20}{'seconds':>10}{'GFLOP':>10}{'GFLOP/s':>10}{'least s':>10}{'share':>8}")
        for phase, seconds in row["phases"].items():
            line = f"{phase:>20}{seconds:>10.2f}"
            if made := row.get("work", {}).get(phase):
                line += f"{made['gflop']:>10,.0f}{made['gflop'] / seconds:>10,.0f}{made['least_s']:>10.2f}"
                line += f"{made['least_s'] / seconds:>8.0%}"
            print(line)
        for shape, rate in row.get("work", {}).get("rates_gflop_per_s", {}).items():
            print(f"{'':>20}{shape}: {rate:,.0f} GFLOP/s")
    if "trl" in rows:
        best = found["searched"][0]
        for contender in rows.keys() - {"trl"}:
            ratio = rows["trl"]["seconds"] / rows[contender]["seconds"]
            print(
                f"{contender} takes 1/{ratio:.2f} of the time of TRL ({best['dtype']}, batches of {best['batch']}: its best)"
            )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", choices=NAMES, default=["ours-exact", "trl"])
    parser.add_argument("--workloads", nargs="+", choices=[*WORKLOADS], default=[*WORKLOADS])
    parser.add_argument("--repeats", type=int, default=5, help="measured steps")
    parser.add_argument("--warmups", type=int, default=1, help="steps before them")
    parser.add_argument("--prompts", type=int, help="instead of the workload's own number")
    parser.add_argument("--samples", type=int, help="per prompt, instead of the workload's own number")
    parser.add_argument("--tokens", type=int, help="new tokens per sample, instead of the workload's own number")
    parser.add_argument("--batches", type=int, nargs="+", help="TRL's, instead of the workload's own choice")
    parser.add_argument("--characters", type=int, default=360, help="length of a prompt; about 4 make a token")
    parser.add_argument("--microbatch", type=int, default=1024, help="ours: tokens per micro-batch")
    parser.add_argument("--recompute", action="store_true", help="ours: compute activations again in the backward pass")
    parser.add_argument("--roofline", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--dry-run", action="store_true", help="one tiny step each, whatever else runs; writes nothing")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cpu", help="cuda: with --contenders ours-fast trl")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/ostinato"))
    parser.add_argument("--trl-python", type=Path, default=PEERS / "trl" / "bin" / "python")
    parser.add_argument("--logs", type=Path, default=None, help="where contenders log (default: a temporary directory)")
    parser.add_argument("--out", type=Path, default=RESULTS / "step.json")
    args = parser.parse_args()
    if "trl" in args.contenders and not (args.trl_python.exists() or shutil.which(args.trl_python)):
        parser.error(f"{args.trl_python} does not exist: run `python -m benchmarks.peers trl`, or leave trl out")
    if args.dry_run:
        args.repeats, args.warmups, args.roofline = 1, 0, False
    elif args.device == "cpu" and os.getloadavg()[0] > BUSY:
        parser.error(
            f"the load is {os.getloadavg()[0]:.2f}, above {BUSY}: times would say little. Wait until the machine is idle"
        )
    return args


def chosen(args: argparse.Namespace) -> dict[str, Workload]:
    """The workloads with the command line's changes. TRL needs batches that divide the rollouts and hold whole groups or parts of them."""
    if args.dry_run:
        return {name: Workload(prompts=1, samples=2, tokens=4, batches=(2, 1)) for name in args.workloads}
    changes = {name: getattr(args, name) for name in ("prompts", "samples", "tokens") if getattr(args, name)}
    works = {name: replace(WORKLOADS[name], **changes) for name in args.workloads}
    if args.batches or changes:
        works = {name: replace(work, batches=tuple(args.batches or [work.rollouts])) for name, work in works.items()}
    for name, work in works.items():
        if wrong := [batch for batch in work.batches if work.rollouts % batch]:
            raise SystemExit(
                f"{name}: batches of {wrong} do not divide {work.rollouts} rollouts: give others with --batches"
            )
    return works


def main() -> None:
    args = arguments()
    end_on_sigterm()
    model = resolve(args.model, args.cache)
    logs = args.logs or Path(tempfile.mkdtemp(prefix="ostinato-step-"))
    before = machine()
    found = {name: measure(work, model, args, logs / name) for name, work in chosen(args).items()}
    for name, each in found.items():
        report(name, each)
    if args.dry_run:
        return
    settings = {
        name: getattr(args, name) for name in ("device", "characters", "microbatch", "recompute", "repeats", "warmups")
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    about = {"machine": before, "load_after": machine()["load"], "settings": settings}
    args.out.write_text(json.dumps({**about, "workloads": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
