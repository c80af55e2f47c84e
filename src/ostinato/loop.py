"""The whole idea on one screen: people use it, it learns, it proves itself, it ships.

`cycle` is the loop in its simplest form. `ostinato up` runs its two halves as separate workers that overlap: the trainer takes the
next `step` while the previous step's weights are stored, and the release worker measures a candidate on the path of real traffic.
"""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.core.records import PolicyVersion, ReleaseEvent
from ostinato.core.seams import Evals, Publisher, Releases, Rewards, Trainer, TurnSource
from ostinato.core.weights import Learned


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """The parts of learning: the source of turns, their rewards, the trainer, and the publisher of its weights."""

    source: TurnSource
    rewards: Rewards
    trainer: Trainer
    publisher: Publisher


@dataclass(frozen=True, slots=True, kw_only=True)
class Prover:
    """The parts of shipping: the evaluation, and the release decision."""

    evals: Evals
    releases: Releases


async def step(p: Learner) -> Learned:
    """One optimizer step on what people just did."""
    turns = await p.source.collect()  # people, or simulated worlds
    batch = await p.rewards.score(turns)  # signals -> reward -> advantage
    return await p.trainer.step(batch)  # drops or down-weights turns that are too stale, and says so


async def learn(p: Learner) -> PolicyVersion:
    """Take a step and publish its weights as a version that is not yet live."""
    return await p.publisher.publish(await step(p))  # delta + hashes


async def prove(p: Prover, candidate: PolicyVersion) -> ReleaseEvent:
    """Measure a candidate against live, the best so far and the anchor, on the same items, and ship it or say why not."""
    report = await p.evals.run(candidate, against=p.releases.incumbents(candidate))
    return await p.releases.decide(candidate, report)


async def cycle(learner: Learner, prover: Prover) -> ReleaseEvent:
    """Learn, then prove: from what people did to what they are served next."""
    return await prove(prover, await learn(learner))
