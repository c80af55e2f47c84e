"""What dials cost a busy engine: tokens per second of leaning streams beside streams of the base model, on the same engine in turn.

    python -m benchmarks.adaptation.throughput MODEL [--streams 128] [--tokens 64] [--rounds 5]

MODEL is a model's directory. Every stream has its own prompt of random tokens and none ends early. A leaning one has the dials of somebody
for whom the cap binds on some tokens: eight directions over 384 tokens, of about the size that
`ostinato adapt fit` gives. Each round runs both, in turn, and the ratio is that of the round.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from pathlib import Path

import numpy as np
from benchmarks.engine.ours import first_snapshot, make_engine, stream
from numpy.typing import NDArray

from ostinato.core.generation import Generate
from ostinato.core.records import Sampling
from ostinato.core.steering import Basis, Steering
from ostinato.engine.embedded.engine import TorchEngine

PROMPT, DIALS = 64, 8


async def sample(
    engine: TorchEngine, prompts: NDArray[np.int64], tokens: int, steering: Steering | None, name: str
) -> float:
    """Tokens per second of one stream for each prompt."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    requests = [
        Generate(
            id=f"{name}-{number}",
            slot="live",
            prompt_ids=tuple(ids.tolist()),
            sampling=Sampling(max_tokens=tokens, seed=number),
            cache_salt=name,  # so that no prompt is computed once for both
            steering=steering,
        )
        for number, ids in enumerate(prompts)
    ]
    done = await asyncio.gather(*(stream(engine, request, started) for request in requests))
    return sum(count for _, count in done) / (loop.time() - started)


async def main() -> None:
    """Print tokens per second of both, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    first, rng = first_snapshot(options.model), np.random.default_rng(0)
    engine = make_engine(
        options.model,
        "exact",
        kv_tokens=options.streams * (PROMPT + options.tokens + 64),
        rows=options.streams,
        stops=False,
    )
    await engine.start()
    try:
        await engine.load("live", first)
        vocabulary = engine.capabilities().vocab_size
        prompts = rng.integers(300, vocabulary, (options.streams, PROMPT))
        tokens_M = np.sort(rng.choice(np.arange(300, vocabulary), 384, replace=False))
        directions_KM = rng.normal(size=(DIALS, 384)).astype(np.float32)
        basis = Basis(tuple(f"dial {k}" for k in range(DIALS)), tokens_M, directions_KM, first.policy.hash)
        leaning = Steering(basis=basis, dials=(0.5,) * DIALS, cap=0.1, budget=1e6)
        await sample(engine, prompts, 8, leaning, "warm")
        ratios = []
        for number in range(options.rounds):
            base, leans = [
                await sample(engine, prompts, options.tokens, steering, f"{number} {steering is None}")
                for steering in (None, leaning)
            ]
            ratios.append(leans / base)
            print(f"round {number}: base {base:.0f} tokens/s, leaning {leans:.0f}, ratio {ratios[-1]:.3f}", flush=True)
        print(
            f"{options.streams} streams: median ratio {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}"
        )
    finally:
        await engine.close()


if __name__ == "__main__":
    asyncio.run(main())
