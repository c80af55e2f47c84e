"""Async wrapper of the synchronous trainer: runs its steps in a thread, with the weights that a batch names."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from ostinato.core.errors import BadWeights, Cancelled, NoSignal
from ostinato.core.records import PolicyVersion, SteeringBasis
from ostinato.core.samples import TrainingBatch
from ostinato.core.weights import Learned, Snapshot, Weights
from ostinato.train.references import References

if TYPE_CHECKING:
    from ostinato.train.sharding.trainer import ShardedTrainer
    from ostinato.train.trainer import PolicyTrainer

_CANCEL_POLL_S = 0.2  # seconds between two checks for cancellation while weights are being fetched


class Stepper:
    """Takes the step that a batch describes.

    Args:
        trainer: takes steps.
        snapshot: fetches the weights of a version: a reference, or the release that training goes back to. Called when they are
            needed; they are not kept here.
        on_learned: called with each step's result.
        anchor: returns the fixed release that training is kept near; called for the first step, and again after each return to other
            weights, as when a branch starts anew. None, or a result of None: there is no anchor.
        bases: finds steering bases in the log by their hashes; None: steered turns are left out.
    """

    def __init__(
        self,
        trainer: PolicyTrainer | ShardedTrainer,
        snapshot: Callable[[PolicyVersion], Awaitable[Snapshot]],
        on_learned: Callable[[Learned], None],
        anchor: Callable[[], Awaitable[PolicyVersion | None]] | None = None,
        bases: Callable[[Sequence[str]], Awaitable[Sequence[SteeringBasis]]] | None = None,
    ) -> None:
        self._bases = bases
        self._trainer, self._snapshot, self._on_learned = trainer, snapshot, on_learned
        self._anchor, self._anchored = anchor, False
        self._anchor_policy: PolicyVersion | None = None
        self._base: PolicyVersion | None = None  # the release to go back to; kept until that succeeds
        # always the same thread, since each thread's heap keeps the memory that a step freed
        self._pool = ThreadPoolExecutor(1)

    async def step(self, batch: TrainingBatch) -> Learned:
        """Take the step. A refused step is counted but leaves the weights unchanged; if the release that it goes back to was refused,
        the next step goes back first. Raises NoSignal, BadWeights.

        If the task is cancelled, the call ends within the time of one layer, or of the optimizer and the rounding if it has come that far.
        A step that was cut short has changed nothing and is not counted.
        """
        try:
            return await self._step(batch)
        except (NoSignal, BadWeights):
            self._trainer.skip_step()
            raise

    async def _step(self, batch: TrainingBatch) -> Learned:
        row = batch.row
        self._base = row.base or self._base
        if self._base is not None:
            weights = (await self._snapshot(self._base)).weights
            await asyncio.wrap_future(self._pool.submit(self._trainer.go_back, weights, self._base.number))
            self._base, self._anchored = None, False
        steered = {sample.turn.steered.basis for sample in batch.samples if sample.turn.steered is not None}
        if steered and self._bases is not None:
            rows = await self._bases(sorted(steered))
            await asyncio.wrap_future(self._pool.submit(self._trainer.set_bases, rows))
        stop = threading.Event()
        references = References(release=row.reference, anchor=await self._anchor_version(), fetch=self._fetcher(stop))
        work = asyncio.wrap_future(self._pool.submit(self._trainer.step, batch.samples, references, stop.is_set))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            stop.set()
            await asyncio.wait([work])  # the thread must not outlive this call, or the process could not exit
            if not work.exception():
                self._on_learned(work.result())
            raise
        self._on_learned(work.result())
        return work.result()

    async def _anchor_version(self) -> PolicyVersion | None:
        if self._anchor is not None and not self._anchored:
            self._anchor_policy, self._anchored = await self._anchor(), True
        return self._anchor_policy

    def _fetcher(self, stop: threading.Event) -> Callable[[PolicyVersion], Weights]:
        """Return a function for the trainer's thread that fetches weights on this event loop, unless `stop` is set first."""
        loop = asyncio.get_running_loop()

        async def snapshot(policy: PolicyVersion) -> Snapshot:
            return await self._snapshot(policy)

        def fetch(policy: PolicyVersion) -> Weights:
            fetching = asyncio.run_coroutine_threadsafe(snapshot(policy), loop)
            while not stop.is_set():
                if wait([fetching], _CANCEL_POLL_S).done:
                    return fetching.result().weights
            fetching.cancel()
            raise Cancelled(f"the step was cancelled while it waited for the weights of {policy}")

        return fetch
