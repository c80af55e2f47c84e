"""A run whose log and weights a test fills, with the page's facts about it."""

import numpy as np

from ostinato.core.weights import WeightArray
from ostinato.status.run_facts import RunFacts
from ostinato.weights.publish.publisher import VersionPublisher

NOW = 1000.0


class Observed:
    """A run, and its facts with a fixed clock."""

    def __init__(self, run, log):
        self.run, self.now = run, NOW
        self.facts = RunFacts(run, log, lambda token: bytes([token % 128]), lambda: self.now)

    async def fill(self, *rows):
        await self.run.log.append(*rows)
        while await self.facts.feed.step():
            pass

    async def publish(self, step, ref=None, base=None):
        codes = np.random.default_rng(step).integers(0x3F80, 0x3FFF, 2_000).astype(np.uint16)
        weights = {"w": WeightArray("BF16", (2_000,), codes.view(np.uint8))}
        publisher = VersionPublisher(self.run.store, self.run.config.publish)
        return (await publisher.publish(step, weights, run="r", base=base, ref=ref)).policy
