"""The whole idea on one screen: people use it, it learns, it proves itself, it ships.

`cycle` is the loop as one would say it. `ostinato up` runs its two halves as separate workers that overlap: the trainer is at the
next `step` while the last one's weights are stored, and the release worker measures a candidate on real traffic's path.
"""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.core.records import PolicyVersion, ReleaseEvent
from ostinato.core.seams import Evals, Publisher, Releases, Rewards, Trainer, TurnSource
from ostinato.core.weights import Learned


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """What it takes to learn: where turns come from, what they are worth, who learns, where the weights go."""

    source: TurnSource
    rewards: Rewards
    trainer: Trainer
    publisher: Publisher


@dataclass(frozen=True, slots=True, kw_only=True)
class Prover:
    """What it takes to ship: someone who measures and someone who decides."""

    evals: Evals
    releases: Releases


async def step(p: Learner) -> Learned:
    """One optimizer step on what people just did."""
    turns = await p.source.collect()  # people, or simulated worlds
    batch = await p.rewards.score(turns)  # signals -> reward -> advantage
    return await p.trainer.step(batch)  # drops or weights what is too stale, and says so


async def learn(p: Learner) -> PolicyVersion:
    """A step, and its weights as a version that is published and not yet live."""
    return await p.publisher.publish(await step(p))  # delta + hashes


async def prove(p: Prover, candidate: PolicyVersion) -> ReleaseEvent:
    """Measure a candidate against live, the best so far and the anchor, on the same items, and ship it or say why not."""
    report = await p.evals.run(candidate, against=p.releases.incumbents)
    return await p.releases.decide(candidate, report)


async def cycle(learner: Learner, prover: Prover) -> ReleaseEvent:
    """Learn, then prove: from what people did to what they are served next."""
    return await prove(prover, await learn(learner))
