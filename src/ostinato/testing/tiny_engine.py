"""The real torch engine with a tiny model, for tests that need real sampling, KV cache and weight swaps."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import PreTrainedModel

from ostinato.core.numerics import Contract
from ostinato.core.records import PolicyVersion
from ostinato.core.weights import Snapshot, Weights
from ostinato.engine.config import EngineConfig
from ostinato.engine.embedded.engine import TorchEngine
from ostinato.model.backend import OWN, ComputeBackend
from ostinato.model.linear import Integers
from ostinato.model.load import build, load_model
from ostinato.model.renderer import HFRenderer
from ostinato.model.tensors import weights_of
from ostinato.testing.tiny import tiny_model


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyEngine:
    """A started engine with version 0 in slot "live", the module that these weights came from, and its renderer.

    Example: ``async with tiny_engine(tmp_path) as tiny: chunks = [c async for c in tiny.engine.generate(request)]``.
    """

    engine: TorchEngine
    model: PreTrainedModel
    renderer: HFRenderer
    path: Path


def tiny_snapshot(path: Path, number: int, *, seed: int) -> Snapshot:
    """Return the tiny model's weights of another seed as version `number`."""
    tiny_model(path / f"seed{seed}", seed=seed)
    return Snapshot(policy=PolicyVersion(number=number, hash=f"seed{seed}"), weights=_weights(seed))


@lru_cache(maxsize=8)  # loading is the slowest part of a test
def _weights(seed: int) -> Weights:
    with TemporaryDirectory() as directory:
        weights = weights_of(load_model(tiny_model(Path(directory), seed=seed), torch.float32))
    for each in weights.values():
        each.data.flags.writeable = False  # shared by all tests of a process
    return weights


@asynccontextmanager
async def tiny_engine(
    path: Path,
    config: EngineConfig | None = None,
    *,
    context: int = 512,
    integers: Integers | None = None,
    contract: Contract | None = None,
    clock: Callable[[], float] = time.monotonic,
    backend: ComputeBackend = OWN,
    write: Callable[..., Path] = tiny_model,
) -> AsyncGenerator[TinyEngine, None]:
    """Write a tiny model below `path` (with `write`: `tiny_model` or `tiny_moe`), start an engine on it, and load it into "live". The
    engine is closed after the block.
    """
    torch.set_num_threads(1)  # more threads do not speed up such a small model
    directory = write(path / "seed0", seed=0, context=context)
    model, renderer = load_model(directory, torch.float32), HFRenderer(directory)
    config = config or EngineConfig(kv_tokens=4096, block=16)
    engine = TorchEngine(
        build(directory, backend=backend),
        renderer,
        config,
        integers=integers,
        contract=contract,
        grammars=renderer.grammars,
        clock=clock,
    )
    await engine.start()
    try:
        await engine.load("live", Snapshot(policy=PolicyVersion(number=0, hash="seed0"), weights=weights_of(model)))
        yield TinyEngine(engine=engine, model=model, renderer=renderer, path=directory)
    finally:
        await engine.close()
