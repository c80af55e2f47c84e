"""While the trainer takes its next step, nothing keeps the weights of the step before once they are stored."""

import asyncio
import weakref

import numpy as np
from tests.deadlines import PATIENT_S

from ostinato.core.records import Batch, PolicyVersion
from ostinato.core.samples import TrainingBatch
from ostinato.core.weights import Learned, WeightArray
from ostinato.testing.store import MemoryStore
from ostinato.train.stepper import Stepper
from ostinato.weights.config import PublisherConfig
from ostinato.weights.publish.publisher import Candidates, Overlapped, VersionPublisher

BATCH = TrainingBatch(
    row=Batch(step=1, turns=(), credits=(), reference=PolicyVersion(number=0, hash="0" * 64), at=0.0), samples=()
)


class Trainer:
    """Learns made-up weights, and sees whether earlier ones are still in memory."""

    def __init__(self):
        self.made: list[weakref.ref] = []

    def step(self, samples, references, stop):
        number = len(self.made) + 1
        data = np.full(600, number, np.uint8)
        self.made.append(weakref.ref(data))
        weights = {"w": WeightArray("BF16", (300,), data)}
        return Learned(step=number, policy_number=number, weights=weights, metrics={})


async def test_what_is_stored_is_let_go_of(tmp_path):
    trainer, done = Trainer(), []
    publisher = VersionPublisher(MemoryStore(), PublisherConfig(scratch=tmp_path))
    stepper = Stepper(trainer, None, lambda learned: None)
    stored = Overlapped(Candidates(publisher, "r", 1, lambda published: done.append(published.policy.number)))
    for number in (1, 2):
        await stored.begin(await stepper.step(BATCH))  # as the training worker does
        async with asyncio.timeout(PATIENT_S):
            while trainer.made[-1]() is not None:
                await asyncio.sleep(0.001)
        assert done[-1] == number
