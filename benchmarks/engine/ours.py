"""Our engine as a contender of throughput.py, and the only place where the benchmarks set up the engine and the trainer."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from benchmarks.contender import THREADS, quiet_stdout, serve
from torch import nn
from transformers import PreTrainedModel

import ostinato
from ostinato.app import numerics
from ostinato.config import load
from ostinato.core.generation import Generate
from ostinato.core.numerics import Contract
from ostinato.core.records import PolicyVersion, Sampling
from ostinato.core.weights import Snapshot, Weights
from ostinato.engine.config import EngineConfig
from ostinato.engine.embedded import form
from ostinato.engine.embedded.engine import TorchEngine
from ostinato.engine.embedded.form import Int8Linear, prepack
from ostinato.model.backend import OWN, ComputeBackend
from ostinato.model.linear import Integers, choose_integers
from ostinato.model.load import build, empty_model, load_model
from ostinato.model.numerics import contract
from ostinato.model.renderer import HFRenderer
from ostinato.model.selftest import examine, shapes_of
from ostinato.model.tensors import weights_of
from ostinato.train.config import TrainConfig
from ostinato.train.trainer import PolicyTrainer
from ostinato.weights.version.content import weights_root

Mode = Literal["exact", "fast", "int8", "fp8"]
"""int8, fp8: like fast, with the engine's decoder in 8-bit integers or floats."""
BLOCK = EngineConfig().block


def backend_on(device: str, mode: Mode = "fast") -> ComputeBackend:
    """Our kernels on the CPU, torch's on any other device and for 8-bit floats."""
    return OWN if device == "cpu" and mode != "fp8" else ComputeBackend(device=device, kernels="torch")


@cache
def compute_on(device: str, path: Path) -> torch.dtype:
    """What model.compute = "auto" computes in on a device, for the model in a directory; weights are in bf16."""
    return numerics.compute(load(None, [f"model.source='{path}'", f"model.device={device}"]))


def make_engine(
    path: Path,
    mode: Mode,
    *,
    kv_tokens: int,
    rows: int = 128,
    stops: bool = True,
    head: bool = False,
    device: str = "cpu",
) -> TorchEngine:
    """An engine in one mode for `rows` concurrent streams. Without `stops` no token ends a stream. `head`: output head in int8, too."""
    renderer = HFRenderer(path)
    if not stops:
        renderer.stop_ids = frozenset  # type: ignore[method-assign] # every stream is to be of full length
    products = mode if mode in ("int8", "fp8") else "plain"
    config = EngineConfig(threads=THREADS, max_batch=rows, kv_tokens=kv_tokens, products=products)
    integers = whole(path) if mode == "int8" else None
    make = build(path, compute_on(device, path), backend_on(device, mode))
    if integers is not None and head:
        make = _with_head(make, integers)
    own = arithmetic(path, mode, device)
    return TorchEngine(make, renderer, config, integers=integers, contract=own, wide=True, device=device)


def _with_head(make: Callable[[Weights], PreTrainedModel], integers: Integers) -> Callable[[Weights], PreTrainedModel]:
    def rounded(weights: Weights) -> PreTrainedModel:
        model = make(weights)
        head = cast("nn.Linear", model.get_output_embeddings())
        model.set_output_embeddings(Int8Linear([head], integers))
        return model

    return rounded


def make_trainer(path: Path, mode: Mode, device: str = "cpu", **settings: Any) -> PolicyTrainer:
    """A trainer in one mode. The thread count belongs to the process: call `torch.set_num_threads` first."""
    compute = "bf16" if compute_on(device, path).itemsize == 2 else "fp32"
    config = TrainConfig(threads=THREADS, compute=compute, kl_beta=0.0, **settings)
    return PolicyTrainer(path, config, contract=arithmetic(path, mode, device), backend=backend_on(device))


@cache
def arithmetic(path: Path, mode: Mode, device: str = "cpu") -> Contract:
    """The numerics contract of engine and trainer. In exact mode the self-test must find equal bits at 1 and THREADS threads."""
    quantisation = whole(path).name if mode == "int8" else form.FP8_NAME if mode == "fp8" else "none"
    compute, backend = compute_on(device, path), backend_on(device, mode)
    if mode == "exact":
        if backend != OWN:
            raise SystemExit("exact numerics holds for our own kernels on the CPU only: leave ours-exact out")
        found = examine(path, compute, (1, THREADS), prepack)
        if not found.exact:
            raise SystemExit(found.reason)
    promised = "exact" if mode == "exact" else "fast"
    return contract(compute, promised, 1, block=BLOCK, quantisation=quantisation, backend=backend)


@cache
def whole(path: Path) -> Integers:
    """The integer kernels that the engine's int8 products use."""
    return choose_integers(
        shape.inputs for shape in shapes_of(empty_model(path, torch.float32, shallow=True).base_model)
    )


def first_snapshot(path: Path) -> Snapshot:
    weights = weights_of(load_model(path, torch.bfloat16))
    return Snapshot(policy=PolicyVersion(number=0, hash=weights_root(weights)), weights=weights)


def _load(loop: asyncio.AbstractEventLoop, engine: TorchEngine, first: Snapshot, number: int) -> float:
    """Seconds to load these weights as a new version: building the model, packing, rounding and swapping."""
    version = Snapshot(policy=PolicyVersion(number=number, hash=f"{first.policy.hash}.{number}"), weights=first.weights)
    began = time.perf_counter()
    loop.run_until_complete(engine.load("live", version))
    return time.perf_counter() - began


def _resident_mb() -> float:
    """This process's resident memory, including freed memory that the allocator keeps."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


async def stream(engine: TorchEngine, request: Generate, started: float) -> tuple[float, int]:
    """Seconds to the first token, and the number of tokens received."""
    first, count = 0.0, 0
    async for chunk in engine.generate(request):
        first = first or time.perf_counter() - started
        count += len(chunk.ids)
    return first, count


async def run(engine: TorchEngine, command: dict[str, Any]) -> dict[str, Any]:
    sampling = Sampling(max_tokens=command["tokens"])
    started = time.perf_counter()
    requests = [
        Generate(id=f"r{i}", slot="live", prompt_ids=tuple(ids), sampling=sampling, n=command["group"])
        for i, ids in enumerate(command["prompts"])
    ]
    done = await asyncio.gather(*(stream(engine, request, started) for request in requests))
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "tokens": sum(count for _, count in done), "first_s": [first for first, _ in done]}


def main() -> None:
    answers = quiet_stdout()
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("mode", choices=get_args(Mode))
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--length", type=int, required=True, help="tokens of the longest stream, its prompt included")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    kv_tokens = args.streams * (-(-args.length // BLOCK) + 1) * BLOCK
    loop = asyncio.new_event_loop()
    engine = make_engine(args.model, args.mode, kv_tokens=kv_tokens, rows=args.streams, stops=False, device=args.device)
    loop.run_until_complete(engine.start())
    first = first_snapshot(args.model)
    swaps = [_load(loop, engine, first, number) for number in range(2)]  # the first load tries the model's forms
    about = {"version": ostinato.__version__, "torch": torch.__version__, "mode": args.mode, "load_s": swaps[-1]}
    about["resident_mb"] = _resident_mb()
    serve(about, lambda command: loop.run_until_complete(run(engine, command)), answers)
    loop.run_until_complete(engine.close())


if __name__ == "__main__":
    main()
