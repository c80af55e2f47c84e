"""Continued pretraining by our trainer and by TRL's SFTTrainer: the same tokens in the same order, the same held-out tokens, alternating.

    ostinato corpus build stdlib --out corpus
    python -m benchmarks.peers trl
    python -m benchmarks.training.reading --corpus corpus               # 8 steps of 8192 tokens each: half an hour
    python -m benchmarks.training.reading --corpus corpus --dry-run     # does it run? one small step each; nothing is written

Both take each step on the same tokens with the same batch, length, learning rate (constant), AdamW and clipping. Ours keeps texts
apart and has fp32 masters beside bf16 compute. TRL packs texts into consecutive rows, as it does without flash
attention, with mixed precision ("trl-mixed": fp32 weights under bf16 autocast) or all in bf16 ("trl-bfloat16"). Held-out losses are of
the same pieces, each on its own, and before the first step must be equal but for the arithmetic. Writes
benchmarks/results/reading.json, with the load before and after.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.contender import PEERS, RESULTS, Contender, end_on_sigterm, machine

from ostinato.corpus.order import Phase
from ostinato.corpus.shards import CorpusReader, ShardSet
from ostinato.model.load import resolve

NAMES = ("ours", "trl-mixed", "trl-bfloat16", "trl-float32")


def write_texts(args: argparse.Namespace, file: Path) -> None:
    """Write the pieces of every step and the held-out pieces, for contenders in any environment."""
    reader = CorpusReader(
        [ShardSet(args.corpus)], [1.0], [Phase(length=args.length)], batch_tokens=args.batch_tokens, steps=args.steps,
        share=0.02, seed=0,
    )  # fmt: skip
    steps = [reader.batch(step) for step in range(args.steps)]
    file.write_text(json.dumps({"steps": steps, "held_out": reader.held_out(args.measured_tokens)}))


def start(name: str, model: Path, texts: Path, args: argparse.Namespace, logs: Path) -> Contender:
    settings = {key: getattr(args, key) for key in ("length", "batch_tokens", "learning_rate", "microbatch")}
    settings |= {"texts": str(texts), "rows": max(1, args.microbatch // args.length)}
    python, script = sys.executable, "benchmarks.training.ours_reading"
    if name != "ours":
        settings["dtype"] = name.removeprefix("trl-")
        python, script = str(args.trl_python), "benchmarks.training.peer_trl_reading"
    return Contender(name, [python, "-m", script, str(model), json.dumps(settings)], log=logs / f"{name}.log")


def measure(model: Path, args: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Alternate steps of all contenders, and measure their held-out losses before, in between and after."""
    texts = place / "texts.json"
    write_texts(args, texts)
    contenders: list[Contender] = []
    rows: dict[str, dict[str, Any]] = {name: {"steps": [], "held_out": []} for name in args.contenders}
    try:
        for name in args.contenders:
            contenders.append(start(name, model, texts, args, place))
        for step in range(args.steps + 1):
            for each in contenders:
                row = rows[each.name]
                if step:
                    row["steps"].append(each.ask(do="step"))
                if step % args.measure_every == 0 or step == args.steps:
                    row["held_out"].append((step, each.ask(do="measure")["held_out"]))
                said = [f"step {step}", f"{each.name:<13}"]
                if step:
                    said.append(f"loss {row['steps'][-1]['loss']:.4f}  {row['steps'][-1]['seconds']:7.2f} s")
                print("  ".join([*said, f"held out {row['held_out'][-1][1]:.4f}"]), file=sys.stderr, flush=True)
    finally:
        for each in contenders:
            each.close()
    for each in contenders:
        row = rows[each.name]
        rates = [args.batch_tokens / step["seconds"] for step in row["steps"][args.warmups :]]
        row |= {"about": each.about, "tokens_per_second": statistics.median(rates), "spread": [min(rates), max(rates)]}
        row["peak_rss_gib"] = max(step["peak_rss_gib"] for step in row["steps"])
    return rows


def report(rows: dict[str, dict[str, Any]], warmups: int) -> None:
    print(f"{'':<14}{'tokens/s':>10}{'slowest, fastest':>20}{'peak GiB':>10}  held out by step")
    for name, row in rows.items():
        low, high = row["spread"]
        curve = "  ".join(f"{step}: {loss:.4f}" for step, loss in row["held_out"])
        print(
            f"{name:<14}{row['tokens_per_second']:>10.0f}{f'{low:.0f}, {high:.0f}':>20}{row['peak_rss_gib']:>10.2f}  {curve}"
        )
    for name in rows.keys() - {"ours"} if "ours" in rows else ():
        pairs = list(zip(rows["ours"]["steps"], rows[name]["steps"], strict=True))[warmups:]
        ratios = [theirs["seconds"] / ours["seconds"] for ours, theirs in pairs]
        print(
            f"ours beside {name}: {statistics.median(ratios):.2f} times the tokens/s, step by step {min(ratios):.2f} to {max(ratios):.2f}"
        )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--contenders", nargs="+", choices=NAMES, default=["ours", "trl-mixed", "trl-bfloat16"])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmups", type=int, default=1, help="steps whose time does not count")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument(
        "--microbatch", type=int, default=1024, help="tokens that go through a pass together, on either side"
    )
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--measured-tokens", type=int, default=8192)
    parser.add_argument("--measure-every", type=int, default=2, help="steps between two held-out losses")
    parser.add_argument("--dry-run", action="store_true", help="one small step each; writes nothing")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/ostinato"))
    parser.add_argument("--trl-python", type=Path, default=PEERS / "trl" / "bin" / "python")
    parser.add_argument("--out", type=Path, default=RESULTS / "reading.json")
    args = parser.parse_args()
    if any(name != "ours" for name in args.contenders) and not args.trl_python.exists():
        parser.error(
            f"{args.trl_python} does not exist: run `python -m benchmarks.peers trl`, or name --contenders ours"
        )
    if args.dry_run:
        args.steps, args.warmups, args.batch_tokens, args.length, args.microbatch = 1, 0, 256, 128, 256
        args.measured_tokens = 256
    return args


def main() -> None:
    args = arguments()
    end_on_sigterm()
    before = machine()
    with tempfile.TemporaryDirectory(prefix="ostinato-reading-") as place:
        rows = measure(resolve(args.model, args.cache), args, Path(place))
    report(rows, args.warmups)
    if args.dry_run:
        return
    settings = {
        name: str(value) for name, value in sorted(vars(args).items()) if name not in ("out", "cache", "trl_python")
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    about = {"machine": before, "load_after": machine()["load"], "settings": settings}
    args.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
