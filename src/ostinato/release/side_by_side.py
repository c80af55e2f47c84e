"""Two arms' tallies over the same hours, weighted by time slot so that they can be compared directly. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

from ostinato.core.records import Person
from ostinato.release.guard import Tally

SlotTallies = Mapping[tuple[int, Person], tuple[float, int]]
"""Time slot and person -> (sum of outcomes in [0, 1], number of outcomes)."""


def side_by_side(treated: SlotTallies, control: SlotTallies) -> tuple[Tally, Tally]:
    """The tallies of both arms, weighted so that every slot j has the same weight w_j = n_T n_C / (n_T + n_C) on both sides.

    The difference of the weighted means is ``D = sum_j w_j (mean_Tj - mean_Cj) / sum_j w_j``, the estimator that trials use
    (`trial/contrast.py`): shares that change while the hours differ do not bias it. In each slot the mean over both arms is replaced by
    the mean of all slots, so that differences between hours add nothing to the spread between people. This is skipped if all outcomes of
    an arm are alike, since a comparison must be able to tell that. A slot without one of the arms tells nothing and is left out.
    """
    turns: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    good: dict[int, float] = defaultdict(float)
    for side, tallies in enumerate((treated, control)):
        for (slot, _), (value, count) in tallies.items():
            turns[slot][side] += count
            good[slot] += value
    weights = {slot: one * other / (one + other) for slot, (one, other) in turns.items() if one and other}
    means = {slot: good[slot] / sum(turns[slot]) for slot in weights}
    if min(_varies(treated, weights), _varies(control, weights)):
        middle = sum(weights[slot] * mean for slot, mean in means.items()) / sum(weights.values())
        added = {slot: middle - mean for slot, mean in means.items()}
    else:
        added = dict.fromkeys(means, 0.0)
    sides: list[dict[Person, tuple[float, float]]] = []
    for side, tallies in enumerate((treated, control)):
        made: dict[Person, tuple[float, float]] = {}
        for (slot, person), (value, count) in tallies.items():
            if slot in weights:
                each = weights[slot] / turns[slot][side]
                before = made.get(person, (0.0, 0.0))
                made[person] = before[0] + each * (value + count * added[slot]), before[1] + each * count
        sides.append(made)
    return sides[0], sides[1]


def _varies(tallies: SlotTallies, slots: Collection[int]) -> bool:
    """True if some outcomes in these slots are good, and some are not."""
    within = [tally for (slot, _), tally in tallies.items() if slot in slots]
    return 0.0 < sum(value for value, _ in within) < sum(count for _, count in within)
