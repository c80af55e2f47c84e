"""The trainer's input: turns with credit, and the batch of one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ostinato.core.records import Advantages, Batch, Turn

EpisodeKey = tuple[str, str]
"""A tenant and the name of one of its episodes."""


def call_of(turn: str) -> str:
    """Return the call of which a turn is a choice, by ids."""
    return turn.rpartition(":")[0] or turn


class LaterReturns(NamedTuple):
    """The return of an episode at the call after the last turn here, in parts that reach earlier turns in different ways.

    `fading`: from rewards that are discounted. `lines_sum`, `lines_weight` and `lines_mean`: the discounted sum of the values of lines,
    their total weight, and their mean. `outcomes_sum`, `outcomes_weight` and `outcomes_mean`: the same for rewards that reach the whole
    episode, undiscounted. With a weight of 0 the mean is only a prediction. `decided`: the part of all this that comes from rewards; the
    rest is the baseline's prediction. `expected` and `expected_outcome`: its prediction for that call, whatever is known about it.

    Example: ``LaterReturns(fading=0.6, decided=0.6)``
    """

    fading: float = 0.0
    lines_sum: float = 0.0
    lines_weight: float = 0.0
    lines_mean: float = 0.0
    outcomes_sum: float = 0.0
    outcomes_weight: float = 0.0
    outcomes_mean: float = 0.0
    decided: float = 0.0
    expected: float = 0.0
    expected_outcome: float = 0.0

    @property
    def total(self) -> float:
        """The whole return."""
        return self.fading + self.lines_mean + self.outcomes_mean

    @property
    def unknown(self) -> LaterReturns:
        """The value if nothing were known about that call."""
        return LaterReturns(
            fading=self.expected,
            outcomes_mean=self.expected_outcome,
            expected=self.expected,
            expected_outcome=self.expected_outcome,
        )

    def divided(self, unit: float) -> LaterReturns:
        """Return a copy with all values, but not the weights, divided by `unit`."""
        return LaterReturns(*(value / unit for value in self))._replace(
            lines_weight=self.lines_weight, outcomes_weight=self.outcomes_weight
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """The turns of one task or session that are credited together, oldest first.

    `group` names the rollouts of one task that are compared with each other; None for an episode that stands alone. `after`: the return
    of the turns that follow these; None if none does.

    Example: ``Episode(id="e1", tenant="default", turns=(first, second))``
    """

    id: str
    tenant: str
    turns: tuple[Turn, ...]
    group: str | None = None
    after: LaterReturns | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A turn with its credit, ready for the trainer.

    `advantages` has one entry per sampled token. `weight` is the turn's part of the loss's normaliser: a batch's weights sum to its number
    of episodes. `summed`: the turn's tokens still enter the loss with a weight of 1. `shown`: a demonstration, which the policy did not
    sample: its log-likelihood is raised, weighted token by token by its advantages, and it is no part of the normaliser. `hinted`: the
    turn's prompt with a hint in it. The turn is then in the batch a second time, and its tokens' distributions are drawn towards those
    given this prompt, weighted by its advantages; it is no part of the normaliser either.
    `scale`: the factor by which its person is scaled down, already included in its advantages; 1 if it was not recorded. `cut`: its episode
    continues after it, and nothing is known about that part.

    Example: ``Sample(turn=turn, reward=0.75, advantages=(0.9,) * len(turn.sampled_ids), weight=0.5)``
    """

    turn: Turn
    reward: float
    advantages: Advantages
    weight: float = 1.0
    summed: bool = False
    shown: bool = False
    hinted: tuple[int, ...] = ()
    scale: float = 1.0
    cut: bool = False

    @property
    def beside(self) -> bool:
        """True for a demonstration and for a turn with a hint, which are learned from in addition to the batch's turns."""
        return self.shown or bool(self.hinted)

    @property
    def factor(self) -> float:
        """The weight of its tokens in the loss."""
        return 1.0 if self.summed else self.weight


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBatch:
    """The input of one optimizer step: the batch's row in the log, and its samples in the row's order, followed by demonstrations and
    turns with hints, if any.
    """

    row: Batch
    samples: tuple[Sample, ...]

    @property
    def tokens(self) -> int:
        """An upper bound on the tokens that a trainer computes: those that a turn shares with its parent here are counted once."""
        hinted = sum(len(each.hinted) + len(each.turn.sampled_ids) for each in self.samples if each.hinted)
        lengths = {each.turn.id: len(each.turn.prompt_ids) + len(each.turn.sampled_ids) for each in self.samples}
        parents = (each.turn.parent for each in self.samples if not each.hinted)
        shared = sum(lengths.get(parent, 0) for parent in parents if parent is not None)
        return sum(lengths.values()) - shared + 2 * hinted  # with and without the hint
