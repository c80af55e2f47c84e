"""One policy-gradient step of SmolLM2-135M over two processes, by our trainer, by accelerate and by torch's FSDP2.

    python -m benchmarks.peers trl
    python -m benchmarks.training.ranks --steps 5        # about ten minutes on two idle cores

The same turns (windows of Python's language reference, 40 to 110 prompt tokens and 100 to 200 sampled ones), fp32, one torch thread for
each process, AdamW, no clipping, no reference model. Ours also checks the batch against the recorded log-probabilities, keeps the published
bf16 rounding beside its fp32 masters and lays out the weights to publish. Peers pad rows to the longest of a micro-batch. They are run
with several micro-batch sizes, of which the best counts. Writes benchmarks/results/ranks.json.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.contender import PEERS, RESULTS, Contender, end_on_sigterm, machine, texts

from ostinato.model.load import resolve
from ostinato.model.renderer import HFRenderer

RATE = 1e-6
CONTENDERS = ("ours-512", "ours-1024", "accelerate-2", "accelerate-4", "fsdp2-2", "fsdp2-4")


def turns(path: Path, count: int) -> list[dict[str, Any]]:
    draw = random.Random(0)
    found: list[dict[str, Any]] = []
    for text in texts(count, 2000, seed=0):
        ids = list(HFRenderer(path).encode(text))
        cut = draw.randrange(40, 110)
        end = cut + draw.randrange(100, 200)
        found.append({"prompt": ids[:cut], "sampled": ids[cut:end], "advantage": draw.choice((1.0, -0.7))})
    return found


def start(name: str, model: Path, file: Path, logs: Path, trl: Path) -> Contender:
    how, size = name.rsplit("-", 1)
    settings = {"turns": str(file), "rate": RATE, "how": how, "rows": int(size), "microbatch": int(size)}
    python, script = (sys.executable, "ours_ranks") if how == "ours" else (str(trl), "peer_ranks")
    command = [python, "-m", f"benchmarks.training.{script}", str(model), json.dumps(settings)]
    return Contender(name, command, log=logs / f"{name}.log", env={"OMP_NUM_THREADS": "1"})


def measure(model: Path, args: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Run one contender after the other, each alone in memory, because a rank's peak memory is measured too."""
    file = place / "turns.json"
    drawn = turns(model, args.turns)
    file.write_text(json.dumps(drawn))
    tokens = sum(len(turn["prompt"]) + len(turn["sampled"]) for turn in drawn)
    rows: dict[str, Any] = {}
    for name in args.contenders:
        contender = start(name, model, file, place, args.trl_python)
        try:
            steps = [contender.ask(do="step") for _ in range(args.steps + 1)]
        finally:
            contender.close()
        seconds = [step["seconds"] for step in steps[1:]]
        middle = statistics.median(seconds)
        rows[name] = {
            "about": contender.about,
            "losses": [step["loss"] for step in steps],
            "seconds": seconds,
            "tokens_per_s": tokens / middle,
            "spread": (max(seconds) - min(seconds)) / middle,
            "peaks_gib": steps[-1]["peaks_gib"],
            "phases": steps[-1].get("phases", {}),
        }
        shown = rows[name]
        print(
            f"{name:<14} {middle:6.2f} s a step, {shown['tokens_per_s']:6.0f} tokens/s, spread {shown['spread']:.0%}, "
            f"first loss {shown['losses'][0]:.6f}, peaks {shown['peaks_gib']} GiB",
            flush=True,
        )
    return {"tokens": tokens, "turns": len(drawn), "rows": rows}


def main() -> None:
    end_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/ostinato"))
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--trl-python", type=Path, default=PEERS / "trl" / "bin" / "python")
    parser.add_argument("--out", type=Path, default=RESULTS / "ranks.json")
    args = parser.parse_args()
    before = machine()
    with tempfile.TemporaryDirectory() as place:
        found = measure(resolve(args.model, args.cache), args, Path(place))
    args.out.write_text(json.dumps(found | {"machine": before, "after": machine()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
