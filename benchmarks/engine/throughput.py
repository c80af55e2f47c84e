"""Tokens per second of one small model on one CPU or GPU: our engine, vLLM and transformers' `generate`.

    python -m benchmarks.peers vllm
    python -m benchmarks.engine.throughput [--streams 1 8 32 128] [--repeats 5] [--contenders ...] [--cache DIR]

All get the same prompts (about 64 tokens of real English, all different, new ones each round; with --group, that many samples of
each), sample the same number of tokens at temperature 1, and use the same two threads. Rounds alternate, A B C A B C, and an idle
contender is stopped. Prints medians, and writes benchmarks/results/engine.json. To compare int8 with the engine's other modes:

    python -m benchmarks.engine.throughput --contenders ours-exact ours-fast ours-int8 [vllm] --out benchmarks/results/engine_int8.json
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.contender import PEERS, RESULTS, THREADS, Contender, end_on_sigterm, machine, texts

from ostinato.model.load import resolve
from ostinato.model.renderer import HFRenderer

NAMES = ("ours-exact", "ours-fast", "ours-int8", "ours-fp8", "generate", "vllm")
CHARACTERS = 8  # more than an English token has
_GPU_SHARE = 0.4  # of a GPU's memory for vLLM, which otherwise takes nearly all of it


def prompts(renderer: HFRenderer, streams: int, tokens: int, seed: int) -> list[list[int]]:
    """Distinct prompts of `tokens` tokens, plus or minus an eighth."""
    draw = random.Random(seed)
    found = [renderer.encode(text) for text in texts(streams, tokens * CHARACTERS, seed)]
    return [ids[: draw.randint(tokens - tokens // 8, tokens + tokens // 8)] for ids in found]


def vllm_environment(python: Path, args: argparse.Namespace) -> dict[str, str]:
    """The settings that vLLM's CPU guide asks for: explicit cores, allocator and OpenMP runtime preloaded, a bounded KV cache.

    By default vLLM keeps one core free for its scheduler, which would halve its speed on two cores, so all cores are listed instead.
    """
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:THREADS])
    preload = [str(path) for path in args.vllm_preload]
    if not args.vllm_preload:
        wanted = [str(python.parent.parent / "lib" / "libiomp5.so"), "/usr/lib/*/libtcmalloc_minimal.so.4"]
        preload = [found for pattern in wanted for found in sorted(glob.glob(pattern))[:1]]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": str(args.vllm_kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": cores if args.vllm_bind == "cores" else args.vllm_bind,
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(args.vllm_processes)),
        "LD_PRELOAD": ":".join(preload),
    }
    if not args.vllm_processes:
        # vLLM sets these for its worker processes; its own process needs them from outside
        environment |= {"KMP_BLOCKTIME": "5", "KMP_TPAUSE": "0"}
    return environment


def start(name: str, model: Path, args: argparse.Namespace, logs: Path) -> Contender:
    log, most = logs / f"{name}.log", max(args.streams)
    if name == "vllm":
        if not args.vllm_python.exists():
            raise SystemExit(
                f"{args.vllm_python} does not exist: run `python -m benchmarks.peers vllm`, or leave vllm out of --contenders"
            )
        command = [str(args.vllm_python), "-m", "benchmarks.engine.peer_vllm", str(model), "--streams", str(most)]
        command += ["--dtype", args.vllm_dtype]
        command += ["--compile"] if args.vllm_compile else []
        command += ["--share"] if args.group > 1 else []
        if args.device != "cpu":
            return Contender(name, [*command, "--gpu-share", str(_GPU_SHARE)], log=log)
        return Contender(name, command, log=log, env=vllm_environment(args.vllm_python, args))
    if name == "generate":
        command = [sys.executable, "-m", "benchmarks.engine.peer_generate", str(model), args.device]
        return Contender(name, command, log=log)
    length = args.prompt + args.prompt // 8 + args.tokens
    command = [sys.executable, "-m", "benchmarks.engine.ours", str(model), name.removeprefix("ours-")]
    command += ["--device", args.device]
    return Contender(name, [*command, "--streams", str(most), "--length", str(length)], log=log)


def measure(contenders: list[Contender], renderer: HFRenderer, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every single run: contender, number of streams, seconds, tokens, and the seconds to each stream's first token."""
    runs: list[dict[str, Any]] = []
    for streams in args.streams:
        group = min(args.group, streams)
        for each in contenders:  # warm-up: kernels are chosen and caches filled
            first = prompts(renderer, streams // group, args.prompt, seed=streams)
            each.ask(prompts=first, tokens=8, group=group)
        for repeat in range(max(args.repeats, args.generate_repeats)):
            these = prompts(renderer, streams // group, args.prompt, seed=1000 * streams + repeat)
            for each in contenders:
                if repeat >= (args.generate_repeats if each.name == "generate" else args.repeats):
                    continue
                answer = each.ask(prompts=these, tokens=args.tokens, group=group)
                if answer["tokens"] != streams * args.tokens:
                    raise SystemExit(f"{each.name} made {answer['tokens']} tokens, not {streams * args.tokens}")
                runs.append({"contender": each.name, "streams": streams, "repeat": repeat, **answer})
                rate = answer["tokens"] / answer["seconds"]
                print(f"  {streams:>4} streams, {each.name:<11}{rate:>9,.1f} tokens/s", file=sys.stderr, flush=True)
    return runs


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per stream count and contender. Spread is (largest - smallest) / median."""
    rows: list[dict[str, Any]] = []
    for streams, name in dict.fromkeys((run["streams"], run["contender"]) for run in runs):
        mine = [run for run in runs if (run["streams"], run["contender"]) == (streams, name)]
        rates = [run["tokens"] / run["seconds"] for run in mine]
        firsts = [first for run in mine for first in run["first_s"]]
        rows.append(
            {
                "streams": streams,
                "contender": name,
                "repeats": len(mine),
                "tokens_per_second": float(np.median(rates)),
                "spread": float((max(rates) - min(rates)) / np.median(rates)),
                "first_token_p50_s": float(np.quantile(firsts, 0.5)),
                "first_token_p95_s": float(np.quantile(firsts, 0.95)),
            }
        )
    for row in rows:
        peers = {other["contender"]: other for other in rows if other["streams"] == row["streams"]}
        for peer in ("vllm", "generate", "ours-exact"):
            if peer in peers:
                row[f"times_{peer}"] = row["tokens_per_second"] / peers[peer]["tokens_per_second"]
    return rows


def report(rows: list[dict[str, Any]]) -> None:
    columns = (
        "streams",
        "contender",
        "tokens/s",
        "spread",
        "x vLLM",
        "x generate",
        "x exact",
        "first p50",
        "first p95",
    )
    print("".join(f"{column:>12}" for column in columns))
    for row in rows:
        ratios = "".join(
            f"{row[key]:>12.2f}" if (key := f"times_{peer}") in row else f"{'-':>12}"
            for peer in ("vllm", "generate", "ours-exact")
        )
        firsts = f"{row['first_token_p50_s']:>11.2f}s{row['first_token_p95_s']:>11.2f}s"
        rate = f"{row['tokens_per_second']:>12,.1f}{row['spread']:>12.1%}"
        print(f"{row['streams']:>12}{row['contender']:>12}{rate}{ratios}{firsts}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per stream")
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens per stream, give or take an eighth")
    parser.add_argument("--group", type=int, default=1, help="samples of each prompt; streams are still samples")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--generate-repeats", type=int, default=None, help="fewer for the slow one (default: --repeats)"
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--device", default="cpu", help="cuda: without ours-exact and ours-int8; vLLM's own build for GPUs"
    )
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/ostinato"))
    parser.add_argument("--out", type=Path, default=RESULTS / "engine.json")
    parser.add_argument("--logs", type=Path, default=None, help="where contenders log (default: a temporary directory)")
    parser.add_argument("--vllm-python", type=Path, default=PEERS / "vllm" / "bin" / "python")
    parser.add_argument("--vllm-bind", default="cores", help="VLLM_CPU_OMP_THREADS_BIND; 'cores': every core by name")
    parser.add_argument(
        "--vllm-dtype", default="bfloat16", help="float32 is the faster one where the CPU has no bf16 of its own"
    )
    parser.add_argument("--vllm-kv-gib", type=int, default=2)
    parser.add_argument("--vllm-processes", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--vllm-compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--vllm-preload", type=Path, nargs="*", default=[], help="libraries (default: what is found)")
    args = parser.parse_args()
    args.generate_repeats = args.repeats if args.generate_repeats is None else args.generate_repeats
    return args


def main() -> None:
    args = arguments()
    end_on_sigterm()
    model = resolve(args.model, args.cache)
    logs = args.logs or Path(tempfile.mkdtemp(prefix="ostinato-engine-"))
    before, contenders = machine(), []
    try:
        for name in args.contenders:
            contenders.append(start(name, model, args, logs))
        runs = measure(contenders, HFRenderer(model), args)
    finally:
        for each in contenders:
            each.close()
    rows = summary(runs)
    report(rows)
    settings = {key: value for key, value in vars(args).items() if isinstance(value, int | str | bool)}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    about = {"machine": before, "settings": settings, "contenders": {each.name: each.about for each in contenders}}
    args.out.write_text(json.dumps({**about, "rows": rows, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
