"""The trainer's input: turns with credit, and the batch of one step."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.core.records import Advantages, Batch, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """The turns of one task or session that are credited together, oldest first.

    `group` names the rollouts of one task that are compared with each other; None for an episode that stands alone.

    Example: ``Episode(id="e1", tenant="default", turns=(first, second))``
    """

    id: str
    tenant: str
    turns: tuple[Turn, ...]
    group: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A turn with its credit, ready for the trainer.

    `advantages` has one entry per sampled token. `weight` is the turn's part of the loss's normaliser: a batch's weights sum to its number
    of episodes. `summed`: the turn's tokens enter the loss's sum in full all the same. `shown`: a demonstration, which the policy did not
    sample: its log-likelihood is raised, token by token as its advantages say, and it is no part of the normaliser.

    Example: ``Sample(turn=turn, reward=0.75, advantages=(0.9,) * len(turn.sampled_ids), weight=0.5)``
    """

    turn: Turn
    reward: float
    advantages: Advantages
    weight: float = 1.0
    summed: bool = False
    shown: bool = False

    @property
    def factor(self) -> float:
        """The weight of its tokens in the loss's sum."""
        return 1.0 if self.summed else self.weight


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBatch:
    """The input of one optimizer step: the batch's row in the log, and its samples in the row's order, before demonstrations, if any."""

    row: Batch
    samples: tuple[Sample, ...]
