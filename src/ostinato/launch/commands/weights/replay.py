"""`ostinato weights replay`: train again from the log alone and compare every version bit for bit."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import cast

from rich.console import Console

from ostinato.app.learning import open_learning
from ostinato.app.numerics import trainer_contract
from ostinato.app.storage import Run, model_path, open_run
from ostinato.config import Config
from ostinato.core.errors import BadWeights, Corrupt, NoSignal
from ostinato.core.records import Batch
from ostinato.launch.views.progress import Lines
from ostinato.reward.pipeline import recorded
from ostinato.weights.version.content import weights_root


async def replay_run(config: Config, console: Console) -> None:
    """Train again from the log and compare every published version's root. Raises Corrupt at the first that differs."""
    path = await asyncio.to_thread(model_path, config)
    with open_run(config) as run, console.status("taking every recorded step again"):
        published = {
            line["number"]: line["hash"]
            for line in Lines(run.home.progress("train")).new()
            if line["kind"] == "published"
        }
        roots = await replay(run, path)
    for step, root in roots.items():
        if published.get(step, root) != root:
            raise Corrupt(f"step {step} gives {root[:16]}, but {published[step][:16]} was published")
    console.print(f"{len(roots)} steps taken again, every version bit for bit the same", highlight=False)


async def replay(run: Run, path: Path) -> dict[int, str]:
    """Take every recorded step again, from the starting model, and return step -> root of its weights.

    Needs the same machine type, torch, thread and rank count to give the same bits. Nothing is written.
    """
    import torch

    torch.set_num_threads(run.config.train.threads)
    base = await run.follower.resolve("base")
    assert base is not None
    contract = trainer_contract(run.config)
    parts = open_learning(run, path, base, contract, on_learned=lambda _: None, on_published=lambda _: None)
    roots: dict[int, str] = {}
    last = run.log.tail(1, {Batch})
    try:
        async for batch in recorded(run.log, 1, cast(Batch, last[0][1]).step if last else 0):
            with contextlib.suppress(NoSignal, BadWeights):  # a batch that was refused then is refused now
                await parts.learner.trainer.step(batch)
                roots[batch.row.step] = weights_root(await asyncio.to_thread(parts.trainer.weights))
    finally:
        parts.trainer.close()
    return roots
