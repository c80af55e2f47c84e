"""The loop's `Trainer`: the synchronous trainer in a thread of its own, with the weights that a batch names."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from ostinato.core.errors import BadWeights, NoSignal
from ostinato.core.records import PolicyVersion
from ostinato.core.samples import TrainingBatch
from ostinato.core.weights import Learned, Snapshot
from ostinato.train.trainer import PolicyTrainer


class Stepper:
    """Takes the step that a batch describes.

    Args:
        trainer: takes steps.
        snapshot: fetches the weights of the reference release, and of the release that training goes back to.
        on_learned: told of each step.
    """

    def __init__(
        self,
        trainer: PolicyTrainer,
        snapshot: Callable[[PolicyVersion], Awaitable[Snapshot]],
        on_learned: Callable[[Learned], None],
    ) -> None:
        self._trainer, self._snapshot, self._on_learned = trainer, snapshot, on_learned
        self._pool = ThreadPoolExecutor(1)  # always the same one: each thread's heap keeps what a step freed

    async def step(self, batch: TrainingBatch) -> Learned:
        """Take the step. A refused one counts, and leaves the weights alone. Raises NoSignal, BadWeights."""
        row = batch.row
        if row.base is not None:
            self._trainer.go_back((await self._snapshot(row.base)).weights, row.base.number)
        reference = await self._snapshot(row.reference)
        try:
            learned = await asyncio.wrap_future(self._pool.submit(self._trainer.step, batch.samples, reference))
        except (NoSignal, BadWeights):
            self._trainer.skip_step()
            raise
        self._on_learned(learned)
        return learned
