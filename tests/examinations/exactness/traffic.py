"""Clients of an engine as in a product: they ask, wait, disconnect, share prompts and ask for several samples.

The engines are sized so that chunks, preemption and prefix hits all occur. The result is finished turns, as they would be logged.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ostinato.core.generation import Chunk, Generate
from ostinato.core.numerics import Contract
from ostinato.core.records import Finish, Sampling, Span, Turn
from ostinato.core.weights import Snapshot
from ostinato.engine.config import EngineConfig
from ostinato.engine.embedded.engine import TorchEngine
from ostinato.model.load import build
from ostinato.model.renderer import HFRenderer
from ostinato.testing.records import a_turn

SMALL = EngineConfig(block=16, prefill_chunk=16, kv_tokens=512, max_batch=10)
"""Too small for the traffic, so that streams are preempted and recomputed."""
MIDDLE = EngineConfig(block=32, prefill_chunk=37, kv_tokens=1536, max_batch=16)
LARGE = EngineConfig(block=64, prefill_chunk=256, kv_tokens=8192, max_batch=64)
TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The clients' behaviour: `clients` at once until `tokens` were sampled in finished turns, and, if it is to be `preempted`, the engine
    has preempted a stream; ids in [lowest, highest).

    Example: ``Traffic(tokens=500, seed=3)`` for a model that knows bytes.
    """

    tokens: int
    seed: int = 0
    clients: int = 12
    prompt: int = 130
    answer: int = 50
    lowest: int = 0
    highest: int = 256
    leave: float = 0.1
    preempted: bool = False


@dataclass(slots=True)
class Harvest:
    """The results: finished turns, cancelled streams, all tokens seen, and the engine's own counters."""

    turns: list[Turn] = field(default_factory=list)
    cancelled: int = 0
    seen: int = 0
    stats: Counter[str] = field(default_factory=Counter)

    @property
    def tokens(self) -> int:
        """Sampled tokens of finished turns."""
        return sum(len(turn.sampled_ids) for turn in self.turns)

    def __iadd__(self, other: Harvest) -> Harvest:
        self.turns += other.turns
        self.cancelled += other.cancelled
        self.seen += other.seen
        self.stats += other.stats
        return self


@asynccontextmanager
async def running(
    path: Path, config: EngineConfig, snapshot: Snapshot, contract: Contract
) -> AsyncGenerator[TorchEngine]:
    """A started engine with the snapshot in "live", computing in the contract's dtype; closed at the end."""
    engine = TorchEngine(build(path, getattr(torch, contract.dtype)), HFRenderer(path), config, contract=contract)
    await engine.start()
    try:
        await engine.load("live", snapshot)
        yield engine
    finally:
        await engine.close()


async def drive(
    engine: TorchEngine, traffic: Traffic, *, meanwhile: Callable[[Harvest], Coroutine[Any, Any, None]] | None = None
) -> Harvest:
    """Run the clients. `meanwhile` runs beside them and is cancelled when the last one has finished."""
    rng = random.Random(traffic.seed)
    bases = [[rng.randrange(traffic.lowest, traffic.highest) for _ in range(traffic.prompt)] for _ in range(4)]
    harvest = Harvest()

    async def client(name: int) -> None:
        number = 0
        while harvest.tokens < traffic.tokens or (traffic.preempted and not engine.stats()["preemptions"]):
            number += 1
            await asyncio.sleep(rng.random() * 0.01)
            request = _request(f"{traffic.seed}.{name}.{number}", rng, bases, traffic)
            leave = rng.randrange(1, traffic.answer) if rng.random() < traffic.leave else None
            await ask(engine, request, leave, harvest)

    async with asyncio.timeout(TIMEOUT_S):
        beside = asyncio.create_task(meanwhile(harvest)) if meanwhile is not None else None
        await asyncio.gather(*(client(name) for name in range(traffic.clients)))
        if beside is not None:
            beside.cancel()
            await asyncio.gather(beside, return_exceptions=True)
            if not beside.cancelled() and (error := beside.exception()) is not None:
                raise error
    harvest.stats = Counter(
        {name: int(value) for name, value in engine.stats().items() if name in ("prefix_hit_tokens", "preemptions")}
    )
    return harvest


def _request(name: str, rng: random.Random, bases: Sequence[list[int]], traffic: Traffic) -> Generate:
    base = rng.choice(bases)
    head = base[: rng.choice([len(base), rng.randrange(len(base) + 1)])]
    tail = [rng.randrange(traffic.lowest, traffic.highest) for _ in range(rng.randrange(0 if head else 1, 20))]
    sampling = Sampling(
        max_tokens=rng.randrange(1, traffic.answer + 1),
        temperature=rng.choice([1.0, 1.0, 0.7, 1.3, 0.0]),
        top_p=rng.choice([1.0, 1.0, 0.9]),
        seed=rng.randrange(1 << 40),
    )
    return Generate(
        id=name, slot="live", prompt_ids=tuple(head + tail), sampling=sampling, n=rng.choice([1, 1, 1, 2, 4])
    )


async def ask(engine: TorchEngine, request: Generate, leave: int | None, harvest: Harvest) -> None:
    """One request to its end, or until `leave` chunks have come. Unfinished samples are then discarded."""
    chunks: list[list[Chunk]] = [[] for _ in range(request.n)]
    count = 0
    async with aclosing(engine.generate(request)) as stream:
        async for chunk in stream:
            chunks[chunk.index].append(chunk)
            harvest.seen += len(chunk.ids)
            count += 1
            if count == leave:
                break
    for index, own in enumerate(chunks):
        finish = own[-1].finish if own else None
        if finish is Finish.ERROR:
            raise RuntimeError(f"request {request.id}: the engine answered with an error")
        if finish is None:
            harvest.cancelled += 1
        else:
            harvest.turns.append(_turn(request, index, own, engine.numerics()))


def _turn(request: Generate, index: int, chunks: Sequence[Chunk], numerics: str) -> Turn:
    spans: list[Span] = []
    for chunk in chunks:
        old = spans.pop() if spans and spans[-1].policy == chunk.policy else Span(policy=chunk.policy, tokens=0)
        spans.append(Span(policy=chunk.policy, tokens=old.tokens + len(chunk.ids)))
    sampled = tuple(token for chunk in chunks for token in chunk.ids)
    return replace(
        a_turn(f"{request.id}:{index}", prompt=request.prompt_ids, sampled=sampled, numerics=numerics),
        logprobs=tuple(value for chunk in chunks for value in chunk.logprobs),
        spans=tuple(spans),
        sampling=request.sampling,
        routes=chunks[-1].routes,
        nucleus=b"".join(chunk.nucleus for chunk in chunks),
    )
