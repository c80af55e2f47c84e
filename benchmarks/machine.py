"""This machine on one page: its CPU, what was chosen for it, and the speed of products, memory, engine and training step.

    python -m benchmarks.machine                    # 5 to 10 minutes on an idle machine; writes results/machine_<class>.json
    python -m benchmarks.machine --only products    # a minute, without engine and step; nothing is written
    python -m benchmarks.machine --table            # docs/machines.md from all results/machine_*.json; measures nothing

Products are those of the model's largest matrices, by the function that engine and trainer call (`ours`) and by torch's `F.linear`
(oneDNN in bf16, MKL in fp32), on one thread; the engine and the step are those of `benchmarks.engine.throughput` and
`benchmarks.training.step`.
The class is the best instruction set that the CPU has and no switch masks; --name gives another.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.contender import RESULTS, ROOT, machine
from benchmarks.training.step import BUSY
from torch.nn import functional as F

from ostinato.app import numerics
from ostinato.app.storage import model_path
from ostinato.config import Config, load
from ostinato.model.cpu import team
from ostinato.model.linear import linear
from ostinato.model.load import empty_model
from ostinato.model.selftest import shapes_of

ROWS = (1, 8, 32, 128, 512, 2048)
STREAMS = (1, 8, 32, 128)
DTYPES = ("bfloat16", "float32")
_PATIENCE_S = 300.0  # for a machine to become idle again
PAGE = ROOT / "docs" / "machines.md"
_CLASSES = (
    ("amx", "amx_bf16"),
    ("avx512_bf16", "avx512_bf16"),
    ("avx512", "avx512f"),
    ("avx2", "avx2"),
    ("neon", "asimd"),
)
_MASKS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
_SLICE_S = 0.3  # per product
_MOVED = 256 << 20  # bytes that are copied to measure the memory


def class_of(flags: Sequence[str], masks: dict[str, str]) -> str:
    """The name of the best instruction set. A mask is added. Example: ``class_of(["avx2"], {}) == "avx2"``"""
    best = next((name for name, flag in _CLASSES if flag in flags), "other")
    return "_".join([best, *(f"held_to_{value}" for value in dict.fromkeys(map(str.lower, masks.values())))])


def about() -> dict[str, Any]:
    """The machine, its flags and the switches that mask some."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith(("flags", "Features"))), [])
    masks = {name: os.environ[name] for name in _MASKS if name in os.environ}
    known = [flag for flag in flags if flag.startswith(("avx", "amx", "fma", "asimd", "bf16", "i8mm", "sve"))]
    return machine() | {"class": class_of(flags, masks), "flags": known, "masks": masks, "torch": torch.__version__}


def choices(config: Config) -> dict[str, Any]:
    """What `ostinato doctor` says was chosen."""
    mode, found = numerics.numerics_mode(config), numerics.choice(config)
    return {
        "numerics": mode.mode,
        "why": mode.why,
        "dtype": str(numerics.compute(config)).removeprefix("torch."),
        "bf16_times_fp32": found.bf16,
        "engine_threads": numerics.engine_threads(config),
        "times_one_thread": {str(count): factor for count, factor in found.teams.items()},
    }


def products(path: Path) -> list[dict[str, Any]]:
    """GFLOP/s of each product, on one thread: [shape x rows], by way and dtype."""
    model = empty_model(path, torch.float32, shallow=True)
    shapes = sorted(
        {(each.inputs, each.outputs) for each in shapes_of(model.base_model)}, key=lambda at: -at[0] * at[1]
    )
    found: list[dict[str, Any]] = []
    for inputs, outputs in shapes[:2]:
        for rows in ROWS:
            speeds: dict[str, float] = {}
            for name in DTYPES:
                dtype = getattr(torch, name)
                x, weight = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
                for way, multiply in (("ours", linear), ("torch", F.linear)):
                    seconds = _fastest(lambda m=multiply, x=x, weight=weight: m(x, weight))
                    speeds[f"{way} {name}"] = 2 * rows * inputs * outputs / seconds / 1e9
            found.append({"inputs": inputs, "outputs": outputs, "rows": rows, "gflops": speeds})
    return found


def _fastest(run: Callable[[], object]) -> float:
    best, end = float("inf"), time.perf_counter() + _SLICE_S
    with team(1), torch.inference_mode():
        run()
        while True:
            began = time.perf_counter()
            run()
            now = time.perf_counter()
            best = min(best, now - began)
            if now >= end:
                return best


def copy_gb_per_s() -> float:
    """Bytes read and written per second, in GB, by one thread that copies more than a cache holds."""
    source = torch.ones(_MOVED, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * _MOVED / _fastest(lambda: target.copy_(source)) / 1e9


def engine(mode: str, repeats: int) -> dict[str, float]:
    """The engine's tokens/s by number of streams."""
    rows = _run("benchmarks.engine.throughput", "--contenders", f"ours-{mode}", "--repeats", str(repeats))["rows"]
    return {str(row["streams"]): row["tokens_per_second"] for row in rows}


def step(mode: str, repeats: int) -> dict[str, Any]:
    """A training step of short answers: its seconds, whole and by phase. Waits until the load of what was measured before is over."""
    end = time.monotonic() + _PATIENCE_S
    while os.getloadavg()[0] >= BUSY / 2 and time.monotonic() < end:  # its own imports are a load, too
        time.sleep(1.0)
    words = ["--contenders", f"ours-{mode}", "--workloads", "short", "--no-roofline", "--repeats", str(repeats)]
    row = _run("benchmarks.training.step", *words)["workloads"]["short"]["rows"][f"ours-{mode}"]
    return {"seconds": row["seconds"], "phases": row["phases"]}


def _run(module: str, *words: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "found.json"
        subprocess.run(
            [sys.executable, "-m", module, *words, "--out", str(out)], cwd=ROOT, check=True, stdout=sys.stderr
        )
        return json.loads(out.read_text())


def report(found: dict[str, Any]) -> list[str]:
    """The page, line by line."""
    here, chosen = found["machine"], found["choices"]
    lines = [
        f"{here['cpu']}, {here['cores']} cores, class {here['class']}, load {here['load'][0]}, torch {here['torch']}",
        f"flags: {' '.join(here['flags'])}" + "".join(f"; {name}={value}" for name, value in here["masks"].items()),
        f"chosen: {chosen['numerics']} numerics, {chosen['dtype']} (bf16 at {chosen['bf16_times_fp32']:.2f}x of fp32), "
        f"engine on {chosen['engine_threads']} thread(s)" + (f"; {chosen['why']}" if chosen["why"] else ""),
        f"memory: {found['copy_gb_per_s']:.1f} GB/s copied by one thread",
        "",
        f"{'GFLOP/s, one thread':<24}" + "".join(f"{rows:>9}" for rows in ROWS),
    ]
    for inputs, outputs in dict.fromkeys((each["inputs"], each["outputs"]) for each in found["products"]):
        mine = [each["gflops"] for each in found["products"] if (each["inputs"], each["outputs"]) == (inputs, outputs)]
        lines.append(f"{inputs} -> {outputs}")
        lines += [f"  {way:<22}" + "".join(f"{each[way]:>9.1f}" for each in mine) for way in mine[0]]
    if "engine" in found:
        shown = ", ".join(f"{rate:.0f} at {streams}" for streams, rate in found["engine"].items())
        lines += ["", f"engine, tokens/s by streams: {shown}", f"training step: {found['step']['seconds']:.2f} s"]
    return lines


def table(all_found: Sequence[dict[str, Any]]) -> str:
    """docs/machines.md: a row per machine."""
    lines = [
        "# Machines",
        "",
        "What was measured by `python -m benchmarks.machine`, and is written by it (`--table`). SmolLM2-135M; products on one thread,",
        "of its largest matrix, by the function that engine and trainer call, in the dtype that was chosen.",
        "",
        "| class | CPU, cores | chosen | GFLOP/s at " + ", ".join(map(str, ROWS)) + " rows | copy, GB/s | tokens/s at "
        + ", ".join(map(str, STREAMS)) + " streams | step, s |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for found in sorted(all_found, key=lambda each: each["machine"]["class"]):
        here, chosen, first = found["machine"], found["choices"], found["products"][0]
        same = [each for each in found["products"] if each["inputs"] == first["inputs"]][: len(ROWS)]
        way = f"ours {chosen['dtype']}"
        speeds = ", ".join(f"{each['gflops'][way]:.0f}" for each in same)
        rates = ", ".join(f"{found['engine'][str(streams)]:.0f}" for streams in STREAMS)
        lines.append(
            f"| {here['class']} | {here['cpu']}, {here['cores']} | {chosen['numerics']}, {chosen['dtype']} | {speeds} "
            f"| {found['copy_gb_per_s']:.1f} | {rates} | {found['step']['seconds']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["products"], help="without engine and step")
    parser.add_argument("--table", action="store_true", help="write docs/machines.md")
    parser.add_argument("--name", help="instead of the class, in the file's name")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if args.table:
        PAGE.write_text(table([json.loads(path.read_text()) for path in sorted(RESULTS.glob("machine_*.json"))]))
        return
    config = load(None, [])
    here = about()
    found: dict[str, Any] = {"machine": here, "choices": choices(config), "copy_gb_per_s": copy_gb_per_s()}
    found["products"] = products(model_path(config))
    if not args.only:
        mode = found["choices"]["numerics"]
        found |= {"engine": engine(mode, args.repeats), "step": step(mode, args.repeats)}
    print("\n".join(report(found)))
    if not args.only:
        (RESULTS / f"machine_{args.name or here['class']}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
