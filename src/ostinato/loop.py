"""The whole idea on one screen: people use it, it learns, it proves itself, it ships.

`cycle` is the loop in its simplest form. `ostinato up` runs its two halves as separate workers that overlap: the trainer takes the
next `step` while it stores the previous step's weights, and the release worker evaluates a candidate through the gateway, as real
traffic is served.
"""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.core.records import PolicyVersion, ReleaseEvent
from ostinato.core.seams import Evals, Publisher, Releases, Rewards, Trainer, TurnSource
from ostinato.core.weights import Learned


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """The components of learning: the source of turns, the reward pipeline, the trainer, and the publisher of its weights."""

    source: TurnSource
    rewards: Rewards
    trainer: Trainer
    publisher: Publisher


@dataclass(frozen=True, slots=True, kw_only=True)
class Prover:
    """The components of a release: the evaluation and the decision to ship."""

    evals: Evals
    releases: Releases


async def step(p: Learner) -> Learned:
    """Take one optimizer step on the latest turns."""
    turns = await p.source.collect()  # people, or simulated worlds
    batch = await p.rewards.score(turns)  # signals -> reward -> advantage
    return await p.trainer.step(batch)  # drops or down-weights turns that are too stale, and says so


async def learn(p: Learner) -> PolicyVersion:
    """Take a step and publish its weights as a version that is not yet live."""
    return await p.publisher.publish(await step(p))  # delta + hashes


async def prove(p: Prover, candidate: PolicyVersion) -> ReleaseEvent:
    """Evaluate a candidate against live, the best so far and the anchor on the same items. Ship it or record why not."""
    report = await p.evals.run(candidate, against=p.releases.incumbents(candidate))
    return await p.releases.decide(candidate, report)


async def cycle(learner: Learner, prover: Prover) -> ReleaseEvent:
    """Learn a candidate from the latest turns, then evaluate it and ship it or not."""
    return await prove(prover, await learn(learner))
