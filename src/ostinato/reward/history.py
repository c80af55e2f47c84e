"""Reads recorded batches and their turns back from the log by id, without a scan."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from ostinato.core.errors import Corrupt
from ostinato.core.records import Batch, Reward, Turn
from ostinato.core.samples import Sample, TrainingBatch
from ostinato.core.seams import Log
from ostinato.reward.credit.episodes import parts_of_episodes
from ostinato.reward.credit.origin import of_world


async def recorded(log: Log, first: int, last: int) -> AsyncIterator[TrainingBatch]:
    """The batches of steps `first` to `last`, in order. Raises Corrupt if a batch, or a turn or reward of it, is not in the log."""
    for step in range(first, last + 1):
        found = await log.find(Batch, [(step,)])
        if not found:
            raise Corrupt(
                f"batch {step} is not in the log any more: resume from a checkpoint of step {step} or later, or restore the log"
            )
        identities = [(turn,) for turn in found[0].turns]
        yield training_batch(found[0], await log.find(Turn, identities), await log.find(Reward, identities))


def training_batch(batch: Batch, turns: Sequence[Turn], rewards: Sequence[Reward]) -> TrainingBatch:
    """A batch's row with its samples, in the row's order. Raises Corrupt if one of its turns or rewards is missing."""
    values = {reward.turn: reward.value for reward in rewards}
    known = {turn.id: turn for turn in turns if turn.id in values}
    missing = [turn_id for turn_id in batch.turns if turn_id not in known]
    if missing:
        raise Corrupt(f"batch {batch.step} names turn {missing[0]}, which the log does not hold; restore the log")
    ordered = [known[turn_id] for turn_id in batch.turns]
    samples = (
        Sample(turn=turn, reward=values[turn.id], advantages=advantages, weight=weight, summed=of_world(turn))
        for turn, advantages, weight in zip(ordered, batch.credits, parts_of_episodes(ordered), strict=True)
    )
    return TrainingBatch(row=batch, samples=tuple(samples))
