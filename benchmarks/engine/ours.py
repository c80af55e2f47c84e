"""Our engine as a contender of engine.py, and the one place where the benchmarks choose how engine and trainer are set up."""

from __future__ import annotations

import argparse
import asyncio
import time
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from benchmarks.contender import THREADS, quiet_stdout, serve

import ostinato
import ostinato.model.config
from ostinato.core.generation import Generate
from ostinato.core.numerics import Contract
from ostinato.core.records import PolicyVersion, Sampling
from ostinato.core.weights import Snapshot
from ostinato.engine.config import EngineConfig
from ostinato.engine.embedded.engine import TorchEngine
from ostinato.engine.embedded.form import prepack
from ostinato.model.load import build, load_model
from ostinato.model.numerics import contract
from ostinato.model.renderer import HFRenderer
from ostinato.model.selftest import examine
from ostinato.model.tensors import weights_of
from ostinato.train.config import TrainConfig
from ostinato.train.trainer import PolicyTrainer
from ostinato.weights.version.content import weights_root

Mode = Literal["exact", "fast"]
BLOCK = EngineConfig().block
COMPUTE = ostinato.model.config.quick_dtype()  # as model.compute = "auto" has it; weights are in bf16


def make_engine(path: Path, mode: Mode, *, kv_tokens: int, rows: int = 128, stops: bool = True) -> TorchEngine:
    """An engine of one mode for `rows` streams at once; without `stops` no token ends a stream."""
    renderer = HFRenderer(path)
    if not stops:
        renderer.stop_ids = frozenset  # type: ignore[method-assign] # every stream is to be of full length
    config = EngineConfig(threads=THREADS, max_batch=rows, kv_tokens=kv_tokens)
    return TorchEngine(build(path, COMPUTE), renderer, config, contract=arithmetic(path, mode), wide=True)


def make_trainer(path: Path, mode: Mode, **settings: Any) -> PolicyTrainer:
    """A trainer of one mode. The thread count is the process's: call `torch.set_num_threads` before."""
    compute = "bf16" if COMPUTE.itemsize == 2 else "fp32"
    config = TrainConfig(threads=THREADS, compute=compute, kl_beta=0.0, **settings)
    return PolicyTrainer(path, config, contract=arithmetic(path, mode))


@cache
def arithmetic(path: Path, mode: Mode) -> Contract:
    """Under what both compute; in exact mode the self-test finds the row rule, the same bits at one thread and at all."""
    rows = 1
    if mode == "exact":
        found = examine(path, COMPUTE, (1, THREADS), prepack)
        if not found.exact:
            raise SystemExit(found.reason)
        rows = found.rows
    return contract(COMPUTE, mode, 1, rows=rows, block=BLOCK)


def first_snapshot(path: Path) -> Snapshot:
    weights = weights_of(load_model(path, torch.bfloat16))
    return Snapshot(policy=PolicyVersion(number=0, hash=weights_root(weights)), weights=weights)


async def stream(engine: TorchEngine, request: Generate, started: float) -> tuple[float, int]:
    """Seconds to the first token, and how many tokens came."""
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
    parser.add_argument("mode", choices=["exact", "fast"])
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--length", type=int, required=True, help="tokens of the longest stream, its prompt included")
    args = parser.parse_args()
    kv_tokens = args.streams * (-(-args.length // BLOCK) + 1) * BLOCK
    loop = asyncio.new_event_loop()
    engine = make_engine(args.model, args.mode, kv_tokens=kv_tokens, rows=args.streams, stops=False)
    loop.run_until_complete(engine.start())
    loop.run_until_complete(engine.load("live", first_snapshot(args.model)))
    about = {"version": ostinato.__version__, "torch": torch.__version__, "mode": args.mode}
    serve(about, lambda command: loop.run_until_complete(run(engine, command)), answers)
    loop.run_until_complete(engine.close())


if __name__ == "__main__":
    main()
