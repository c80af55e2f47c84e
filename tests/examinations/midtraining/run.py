"""Continued pre-training at three log-spaced budgets: is the held-out loss log-linear in compute?

    python -m tests.examinations.midtraining.run --corpus DIR [--work DIR] [--budgets 65536 262144 1048576] [--source smollm2]

DIR is the output of `ostinato corpus build stdlib PACKAGES... --out DIR --against SUITES...`; `learning.run --tasksets` writes the tasks of
the worlds, for --against. Each budget is a separate course from the same start, with its own schedule, so that each ends at its
lowest learning rate. Compute is 6 x parameters x tokens (Kaplan et al. 2020, 2001.08361); the fit is least squares of the loss on log10 of
it, over the ends of the courses. The models stay in the work directory, for `rewards`, which measures their rewards. An interrupted run
continues where it stopped. Writes tests/examinations/results/midtraining.json. Exits with 1 if the loss does not fall with compute.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from ostinato.app.storage import model_path
from ostinato.app.supervised import Course, ReadingStep, read_into
from ostinato.config import Config, load
from ostinato.corpus.order import Phase
from ostinato.corpus.shards import read_manifest

RESULT = Path(__file__).parents[1] / "results" / "midtraining.json"


def parameters(path: Path) -> int:
    total = 0
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "np") as opened:
            total += sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118
    return total


def fitted(compute: list[float], losses: list[float]) -> dict[str, float]:
    """Fit loss = intercept + slope x log10(compute). Returns the coefficients, r2 (explained share of variance) and largest residual."""
    x, y = np.log10(compute), np.array(losses)
    slope, intercept = np.polyfit(x, y, 1)
    left = y - (intercept + slope * x)
    spread = ((y - y.mean()) ** 2).sum()
    return {
        "slope": float(slope),
        "intercept": float(intercept),
        "r2": float(1 - (left**2).sum() / spread) if spread else 0.0,
        "largest_residual": float(np.abs(left).max()),
    }


def course_of(args: argparse.Namespace, tokens: int) -> Course:
    steps = max(1, tokens // args.batch_tokens)
    return Course(
        corpora=(args.corpus,),
        weights=(1.0,),
        tokens=tokens,
        phases=tuple(Phase(length=length, share=share) for length, share in ((512, 3), (1024, 1))),
        batch_tokens=args.batch_tokens,
        learning_rate=args.learning_rate,
        held_out=args.held_out,
        measured_tokens=args.measured_tokens,
        measure_every=max(1, steps // 4),
        keep_every=max(1, min(25, steps // 4)),
    )


def one(config: Config, args: argparse.Namespace, tokens: int) -> dict[str, Any]:
    out, note = args.work / f"budget-{tokens}", args.work / f"budget-{tokens}.json"
    if note.exists() and out.exists():
        return json.loads(note.read_text())
    rates: list[float] = []

    def tell(at: ReadingStep) -> None:
        if at.metrics:
            rates.append(at.metrics["tokens_per_second"])
        if at.held_out is not None:
            print(f"{tokens:>9} tokens  step {at.step}/{at.steps}  held out {at.held_out:.4f}", flush=True)

    started = time.perf_counter()
    losses = read_into(config, course_of(args, tokens), out, tell)
    found = {
        "budget": tokens,
        "tokens": course_of(args, tokens).steps * args.batch_tokens,
        "losses": losses,
        "seconds": time.perf_counter() - started,
        "tokens_per_second": float(np.median(rates)),
    }
    note.write_text(json.dumps(found))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/midtraining"))
    parser.add_argument("--budgets", type=int, nargs="+", default=[65_536, 262_144, 1_048_576])
    parser.add_argument("--source", default="smollm2")
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--held-out", type=float, default=0.02)
    parser.add_argument("--measured-tokens", type=int, default=16_384)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--result", type=Path, default=RESULT)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    config = load(None, [f"model.source='{args.source}'", "model.numerics=fast", f"train.threads={args.threads}"])
    courses = [one(config, args, tokens) for tokens in sorted(args.budgets)]
    size = parameters(model_path(config))
    compute = [6.0 * size * each["tokens"] for each in courses]
    ends = [each["losses"][-1][1] for each in courses]
    manifest = read_manifest(args.corpus)
    result = {
        "parameters": size,
        "source": args.source,
        "corpus": {"documents": manifest.documents, "tokens": manifest.tokens, "against": manifest.against},
        "before": courses[0]["losses"][0][1],
        "courses": [
            {**each, "compute": flops, "loss": end} for each, flops, end in zip(courses, compute, ends, strict=True)
        ],
        "fit": fitted(compute, ends) if len(set(compute)) > 1 else None,
    }
    args.result.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["fit"], indent=1))
    return int(result["fit"] is not None and result["fit"]["slope"] >= 0)


if __name__ == "__main__":
    raise SystemExit(main())
