"""Engine and trainer compared bit for bit: tokens sampled under traffic, and the primitives of a forward pass.

    python -m tests.examinations.exactness.run [--tokens 10000] [--models smollm2 llama qwen3_moe olmoe] [--threads 1 2] [--cache DIR]
    python -m tests.examinations.exactness.run --sweeps-only [--elements 300000] [--longest 2048]

Per model, dtype and thread count an engine samples at least --tokens tokens under traffic (random admission, clients that go away,
a cache that is too small, chunks of 16, 37 and 256 tokens, blocks of 16, 32 and 64, shared prompts, several samples) and every
logprob is computed again: packed, each turn alone, right-padded, in a training step, micro-batched, with recomputed activations;
then after an optimizer step, after a publication through a weight store, and across hot swaps. The counts are of logprobs with
different bits and of routers with another choice; both must be 0. "moved" and "kept" are controls that must not be 0: the first turns
under the next weights, and tokens sampled after a swap that kept the old keys. Writes tests/examinations/results/exactness.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tests.examinations.exactness import sweeps
from tests.examinations.exactness.measures import Examination, Findings, Subject

from ostinato.model.load import resolve
from ostinato.testing.tiny import tiny_model, tiny_moe

RESULT = Path(__file__).parents[1] / "results" / "exactness.json"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TINY: dict[str, Any] = {"hidden": 128, "layers": 3, "context": 512}
STAGES = (
    "packed",
    "alone",
    "padded",
    "step",
    "micro",
    "recompute",
    "after step",
    "after publish",
    "swap",
    "swap, kept",
    "moved (control)",
    "kept (control)",
)


def model(name: str, work: Path, cache: Path) -> Path:
    if name == "llama":
        return tiny_model(work / name, **TINY)
    if name in ("qwen3_moe", "olmoe"):
        return tiny_moe(work / name, name, experts=16, top_k=4, **TINY)  # pyright: ignore[reportArgumentType]
    return resolve(name, cache)


def examined(name: str, kind: str, threads: int, args: argparse.Namespace, say: Callable[[str], object]) -> Findings:
    with tempfile.TemporaryDirectory(prefix="ostinato-exactness-") as scratch:
        work = Path(scratch)
        real = name not in ("llama", "qwen3_moe", "olmoe")
        subject = Subject(
            path=model(name, work, args.cache),
            dtype=DTYPES[kind],
            tokens=args.tokens,
            work=work / "run",
            threads=threads,
            clients=args.clients,
            answer=150 if real else 50,
            lowest=300 if real else 0,
            highest=40_000 if real else 256,
            learning_rate=2e-5 if real else 1e-3,
        )
        return asyncio.run(Examination(subject, say).run())


def row(name: str, kind: str, threads: int, findings: Findings, seconds: float) -> dict[str, Any]:
    return {
        "model": name,
        "dtype": kind,
        "threads": threads,
        "sampled": findings.sampled,
        "prefix_hits": findings.prefix_hits,
        "preemptions": findings.preemptions,
        "cancelled": findings.cancelled,
        "differing": findings.total("differing"),
        "flips": findings.total("flips"),
        "routed": findings.total("routed"),
        "weights_differing": findings.total("weights_differing"),
        "seconds": seconds,
        "stages": findings.stages,
    }


def print_models(rows: list[dict[str, Any]]) -> None:
    print(
        "\ndiffering logprobs / compared, by the way in which they were computed again; the last two columns are controls"
    )
    heads = ("model", "dtype", "threads", "sampled", "prefix hits", "preempted", "cancelled", "router flips")
    print("  ".join(f"{head:>12}" for head in (*heads, *STAGES)))
    for found in rows:
        flips = f"{found['flips']}/{found['routed']}" if found["routed"] else "-"
        names = ("model", "dtype", "threads", "sampled", "prefix_hits", "preemptions", "cancelled")
        cells = [str(found[name]) for name in names] + [flips]
        cells += [f"{int(s['differing'])}/{int(s['tokens'])}" for s in (found["stages"][stage] for stage in STAGES)]
        print("  ".join(f"{cell:>12}" for cell in cells))


def sweep(args: argparse.Namespace, say: Callable[[str], object]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []

    def add(what: str, kind: str, threads: int, cases: list[sweeps.Case]) -> None:
        if cases:  # packing exists for bf16 only
            bad = [name for name, _, wrong in cases if wrong]
            most = max(wrong / compared for _, compared, wrong in cases)
            rows.append(
                {
                    "what": what,
                    "dtype": kind,
                    "threads": threads,
                    "cases": len(cases),
                    "compared": sum(case[1] for case in cases),
                    "differing": sum(case[2] for case in cases),
                    "worst_share": most,
                    "bad": bad,
                }
            )

    for threads in args.threads:
        torch.set_num_threads(threads)
        for kind, dtype in DTYPES.items():
            for inputs in sweeps.WIDTHS:
                for form in ("", ", in panels", ", torch's own (control)"):
                    name = f"linear {inputs}{form}"
                    say(f"{name} {kind} x{threads}")
                    cases = sweeps.linear(
                        dtype, inputs, packed="panels" in form, stock="own" in form, elements=args.elements
                    )
                    add(name, kind, threads, list(cases))
            for length in (n for n in sweeps.LENGTHS if n <= args.longest):
                say(f"attention {length} {kind} x{threads}")
                add(f"attention {length}", kind, threads, list(sweeps.attention(dtype, length)))
            add("attention 513, window 100", kind, threads, list(sweeps.attention(dtype, 513, window=100)))
            for vocab in (1003, 49152, 50257):
                say(f"log-softmax {vocab} {kind} x{threads}")
                add(f"log-softmax {vocab}", kind, threads, list(sweeps.log_softmax(dtype, vocab)))
    return rows


def print_sweeps(rows: list[dict[str, Any]]) -> None:
    print(f"\n{'primitive':<42}{'dtype':>6}{'threads':>8}{'cases':>6}{'compared':>12}{'differing':>11}  worst cases")
    for found in rows:
        bad = f"{found['worst_share']:.2%}: {', '.join(found['bad'][:9])}" if found["bad"] else ""
        print(
            f"{found['what']:<42}{found['dtype']:>6}{found['threads']:>8}{found['cases']:>6}{found['compared']:>12,}"
            f"{found['differing']:>11,}  {bad}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tokens", type=int, default=10_000, help="sampled before the first comparison; half as many later"
    )
    parser.add_argument("--clients", type=int, default=12, help="that ask at the same time")
    parser.add_argument("--models", nargs="+", default=["smollm2", "llama", "qwen3_moe", "olmoe"])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--threads", nargs="+", type=int, default=[1])
    parser.add_argument("--elements", type=int, default=300_000, help="compared per row count of a linear sweep")
    parser.add_argument("--longest", type=int, default=2048, help="longest sequence of the attention sweep")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "ostinato", help="where models lie")
    parser.add_argument("--models-only", action="store_true")
    parser.add_argument("--sweeps-only", action="store_true")
    parser.add_argument("--result", type=Path, default=RESULT)
    args = parser.parse_args()
    chosen = [] if args.sweeps_only else [(n, k, t) for n in args.models for k in args.dtypes for t in args.threads]
    rows: list[dict[str, Any]] = []
    primitives: list[dict[str, Any]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress:
        bar = progress.add_task("", total=len(chosen) + (not args.models_only))
        began = time.perf_counter()

        def say(what: str) -> None:
            progress.update(bar, description=what)
            if not progress.console.is_terminal:  # an hour's work without a screen still says where it is
                print(f"{time.perf_counter() - began:7.0f} s  {what}", flush=True)

        for name, kind, threads in chosen:
            started = time.perf_counter()
            label = f"{name} {kind} x{threads}"
            found = examined(name, kind, threads, args, lambda stage, label=label: say(f"{label}: {stage}"))
            rows.append(row(name, kind, threads, found, time.perf_counter() - started))
            progress.advance(bar)
        if not args.models_only:
            primitives = sweep(args, say)
            progress.advance(bar)
    print_models(rows) if rows else None
    print_sweeps(primitives) if primitives else None
    args.result.parent.mkdir(exist_ok=True)
    result = {"torch": torch.__version__, "tokens": args.tokens, "models": rows, "primitives": primitives}
    args.result.write_text(json.dumps(result, indent=1) + "\n")
    promised = [*rows, *(found for found in primitives if "control" not in found["what"])]
    broken = sum(found["differing"] + found.get("flips", 0) for found in promised)
    raise SystemExit(f"{broken} differences where none may be" if broken else None)


if __name__ == "__main__":
    main()
