"""Samples new turns under different arithmetic modes and measures how far the trainer's logprobs are from the engine's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from benchmarks.contender import texts
from benchmarks.engine.ours import Mode, first_snapshot, make_engine, make_trainer

from ostinato.core.generation import Generate
from ostinato.core.records import Sampling, Turn
from ostinato.core.weights import Snapshot
from ostinato.engine.embedded.engine import TorchEngine
from ostinato.model.renderer import HFRenderer
from ostinato.testing.records import a_turn
from ostinato.train.losses import drift

MODES = ("exact", "fast", "int8", "int8-head", "fp8")
TOKENS, PROMPT, CAP = 64, 64, 2.0
AT_ONCE = 32


def measure_modes(
    path: Path, modes: Sequence[str], count: int, summary: Callable[[list[float]], dict[str, float]], device: str
) -> list[dict[str, Any]]:
    """A row for each mode: `summary` of d, and the measures that a training step uses (`drift`). Prompts and seeds are the same for all."""
    first, renderer = first_snapshot(path), HFRenderer(path)
    prompts = [renderer.encode(text)[:PROMPT] for text in texts(count, PROMPT * 8, 0)]
    rows: list[dict[str, Any]] = []
    for mode in modes:
        own = cast("Mode", mode.partition("-")[0])

        turns = asyncio.run(sample(path, own, prompts, first, head=mode == "int8-head", device=device))
        trainer = make_trainer(path, "exact" if own == "exact" else "fast", device)
        trainer.go_back(first.weights)
        scored = trainer.score(turns)
        d = [a - b for turn, ours in zip(turns, scored, strict=True) for a, b in zip(ours, turn.logprobs, strict=True)]
        theirs = torch.tensor([logprob for turn in turns for logprob in turn.logprobs])
        whose = torch.tensor([i for i, turn in enumerate(turns) for _ in turn.sampled_ids])
        worth = drift(theirs + torch.tensor(d), theirs, cap=CAP, prefix="", turns_M=whose)
        rows.append({"mode": mode, "turns": len(turns)} | worth | summary(d))
    return rows


async def sample(
    path: Path, mode: Mode, prompts: Sequence[Sequence[int]], first: Snapshot, *, head: bool, device: str
) -> list[Turn]:
    """One turn for each prompt, all sampled concurrently."""
    engine = make_engine(path, mode, kv_tokens=AT_ONCE * (PROMPT + TOKENS + 64), rows=AT_ONCE, head=head, device=device)
    await engine.start()
    await engine.load("live", first)
    turns = await asyncio.gather(*(answer(engine, number, prompt) for number, prompt in enumerate(prompts)))
    await engine.close()
    return list(turns)


async def answer(engine: TorchEngine, number: int, prompt: Sequence[int]) -> Turn:
    """One answer at temperature 1."""
    sampling = Sampling(max_tokens=TOKENS, seed=number)
    request = Generate(id=f"r{number}", slot="live", prompt_ids=tuple(prompt), sampling=sampling)
    ids: list[int] = []
    logprobs: list[float] = []
    async for chunk in engine.generate(request):
        ids += chunk.ids
        logprobs += chunk.logprobs
    made = a_turn(f"t{number}:0", prompt=prompt, sampled=ids, numerics=engine.numerics())
    return replace(made, logprobs=tuple(logprobs), sampling=sampling)
