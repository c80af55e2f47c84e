"""Hot swaps of the real model under open streams: how long are the streams paused, and does every token name its policy version?

    python -m benchmarks.engine.swap [--streams 32] [--swaps 50] [--cache DIR]

Two versions of SmolLM2-135M (the second differs in one weight) are swapped alternately while all streams sample. Prints the pause, the
longest gap between two tokens of any stream with and without swaps, and writes benchmarks/results/swap.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from benchmarks.contender import RESULTS

from ostinato.core.generation import Chunk, Generate
from ostinato.core.interpreter import settle
from ostinato.core.records import PolicyVersion, Sampling
from ostinato.core.weights import Snapshot, WeightArray
from ostinato.engine.config import EngineConfig
from ostinato.engine.embedded.engine import TorchEngine
from ostinato.model.load import build, load_model, resolve
from ostinato.model.renderer import HFRenderer
from ostinato.model.tensors import weights_of
from ostinato.weights.version.content import weights_root

RESULT = RESULTS / "swap.json"
TOKENS = 4096


def versions(path: Path) -> list[Snapshot]:
    first = dict(weights_of(load_model(path, torch.bfloat16)))
    name = next(iter(first))
    data = first[name].data.copy()
    data[0] ^= 1
    second = first | {name: WeightArray(first[name].dtype, first[name].shape, data)}
    return [
        Snapshot(policy=PolicyVersion(number=number, hash=weights_root(weights)), weights=weights)
        for number, weights in enumerate((first, second))
    ]


async def stream(engine: TorchEngine, number: int, prompt: list[int], seen: list[tuple[float, Chunk]]) -> None:
    sampling = Sampling(max_tokens=TOKENS, seed=number)
    async for chunk in engine.generate(
        Generate(id=f"s{number}", slot="live", prompt_ids=tuple(prompt), sampling=sampling)
    ):
        seen.append((time.perf_counter(), chunk))


def longest_gap(streams: list[list[tuple[float, Chunk]]], start: float, end: float) -> float:
    gaps = [b - a for seen in streams for (a, _), (b, _) in pairwise(seen) if start <= a and b <= end]
    return max(gaps, default=0.0)


async def measure(cache: Path, count: int, swaps: int) -> dict[str, float]:
    path = resolve("smollm2", cache)
    renderer = HFRenderer(path)
    renderer.stop_ids = frozenset  # type: ignore[method-assign] # streams must not end by themselves
    first, second = versions(path)
    engine = TorchEngine(build(path), renderer, EngineConfig(kv_tokens=1 << 17))
    await engine.start()
    await engine.load("live", first)
    settle()  # as the serving worker does
    prompt = renderer.encode("Once upon a time")
    seen: list[list[tuple[float, Chunk]]] = [[] for _ in range(count)]
    tasks = [asyncio.create_task(stream(engine, i, prompt, seen[i])) for i in range(count)]
    while not all(seen):
        await asyncio.sleep(0.1)
    calm = time.perf_counter()
    await asyncio.sleep(10)
    start = time.perf_counter()
    history, pauses = [first.policy], []
    for number in range(swaps):
        snapshot = (second, first)[number % 2]
        swap = await engine.load("live", snapshot)
        assert swap.streams == count, f"{count - swap.streams} streams were dropped"
        pauses.append(swap.pause_s)
        history.append(snapshot.policy)
        await asyncio.sleep(0.1)
    end = time.perf_counter()
    await asyncio.sleep(2)
    open_at_the_end = sum(not task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await engine.close()
    for chunks in seen:
        made = [chunk.policy for _, chunk in chunks if chunk.ids]
        changes = [made[0]] + [b for a, b in pairwise(made) if a != b]
        places = iter(history)
        assert all(any(policy == place for place in places) for policy in changes), "a token names weights out of order"
    return {
        "streams": count,
        "swaps": swaps,
        "dropped": count - open_at_the_end,
        "pause_p50_us": 1e6 * float(np.quantile(pauses, 0.5)),
        "pause_p99_us": 1e6 * float(np.quantile(pauses, 0.99)),
        "longest_gap_calm_s": longest_gap(seen, calm, start),
        "longest_gap_swapping_s": longest_gap(seen, start, end),
        "tokens": sum(len(chunk.ids) for chunks in seen for _, chunk in chunks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--swaps", type=int, default=50)
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/ostinato"))
    args = parser.parse_args()
    result = asyncio.run(measure(args.cache, args.streams, args.swaps))
    for name, value in result.items():
        print(f"{name:>24}  {value:,.3f}" if isinstance(value, float) else f"{name:>24}  {value}")
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
