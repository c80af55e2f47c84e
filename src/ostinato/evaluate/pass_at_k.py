"""pass@1, best-of-k and answer diversity of a suite's scores, with intervals: whether a release only got surer of what it could do before.

Reinforcement learning can improve the first try at the expense of the others: pass@1 rises and best-of-k falls. Lost coverage does not come
back with further training. An earlier sign is that answers become alike: the entropy of a policy falls (Cui et al., arXiv 2505.22617), and
two answers to one prompt are more often the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import NormalDist

from ostinato.core.records import PolicyVersion
from ostinato.core.report import AnswerDiversity, Incumbent, ItemMean, ItemScore, PassRates, Sharpening
from ostinato.evaluate.statistics import scores_by_item

LEAST_ITEMS = 10


def best_of(scores_N: Sequence[float], k: int) -> float:
    """Return the expected best of k draws without replacement from an item's N scores in [0, 1]: unbiased for the best of k fresh answers.

    For scores of 0 and 1 of which c are 1, this is 1 - C(N - c, k) / C(N, k), pass@k (Chen et al. 2021, arXiv 2107.03374, equation 1).

    Raises:
        ValueError: k is below 1 or above N.

    Example: ``best_of([1.0, 0.0, 0.0, 0.0], 2) == 0.5``
    """
    n = len(scores_N)
    if not 1 <= k <= n:
        raise ValueError(f"the best of {k} cannot be estimated from {n} draws; draw at least {max(k, 1)}")
    chances = math.comb(n, k)
    ranked = enumerate(sorted(scores_N))
    return math.fsum(score * (math.comb(rank, k - 1) / chances) for rank, score in ranked if rank >= k - 1)


def pass_rates(scores: Iterable[ItemScore], k: int, confidence: float = 0.95) -> PassRates:
    """Return pass@1 and best-of-k of one release, with items as clusters.

    Raises:
        ValueError: no items, or one with fewer than k draws.
    """
    items = scores_by_item(scores)
    return PassRates(
        k=k,
        first=_mean([best_of(draws, 1) for draws in items.values()], confidence),
        best=_mean([best_of(draws, k) for draws in items.values()], confidence),
    )


def sharpening(
    candidate: Iterable[ItemScore],
    incumbent: Iterable[ItemScore],
    k: int,
    confidence: float,
    *,
    against: Incumbent,
    policy: PolicyVersion,
) -> Sharpening | None:
    """Return how the candidate's rates differ, item by item; None with fewer than ten common items that have k draws on both sides.

    The intervals are normal intervals of the item differences. Their standard error is computed with one item at +1 and one at -1 added, so
    that identical differences alone prove nothing.
    """
    earlier, later = scores_by_item(incumbent), scores_by_item(candidate)
    shared = [item for item in earlier if item in later and min(len(earlier[item]), len(later[item])) >= k]
    if len(shared) < LEAST_ITEMS:
        return None
    differences = {
        each: [best_of(later[item], each) - best_of(earlier[item], each) for item in shared] for each in (1, k)
    }
    return Sharpening(
        against=against,
        policy=policy,
        k=k,
        first=_mean(differences[1], confidence, cautious=True),
        best=_mean(differences[k], confidence, cautious=True),
    )


_TOLERATED_FALL = 1.0 / 3.0


def answer_diversity(
    candidate: Iterable[ItemScore], anchor: Iterable[ItemScore], confidence: float
) -> AnswerDiversity | None:
    """Return how often two of an item's answers differ, candidate against anchor, item by item.

    None with fewer than ten common items that have two answers of known text on both sides. The share of an item's pairs of draws that
    differ is unbiased for two fresh answers, however many draws there are (Simpson's index).
    """
    sides = [_pairs_that_differ(scores) for scores in (candidate, anchor)]
    shared = [item for item in sides[0] if item in sides[1]]
    if len(shared) < LEAST_ITEMS:
        return None
    later, earlier = ([side[item] for item in shared] for side in sides)
    excess = [own[0] - (1.0 - _TOLERATED_FALL) * other[0] for own, other in zip(later, earlier, strict=True)]
    return AnswerDiversity(
        draws=min(draws for _, draws in (*later, *earlier)),
        candidate=math.fsum(rate for rate, _ in later) / len(shared),
        anchor=math.fsum(rate for rate, _ in earlier) / len(shared),
        excess=_mean(excess, confidence, cautious=True),
    )


def _pairs_that_differ(scores: Iterable[ItemScore]) -> dict[str, tuple[float, int]]:
    """Return, by item, the share of pairs of known answers that differ, and the number of these answers."""
    items: dict[str, Counter[str]] = {}
    for score in scores:
        if score.answer:
            items.setdefault(score.item, Counter())[score.answer] += 1
    return {
        item: (1.0 - sum(math.comb(n, 2) for n in counts.values()) / math.comb(counts.total(), 2), counts.total())
        for item, counts in items.items()
        if counts.total() > 1
    }


def _mean(values_I: Sequence[float], confidence: float, *, cautious: bool = False) -> ItemMean:
    """Return the mean with a normal interval: of differences in [-1, 1] if `cautious`, otherwise of values in [0, 1]."""
    n = len(values_I)
    if n == 0:
        raise ValueError("no items: run the suite first")
    mean = math.fsum(values_I) / n
    sample = [*values_I, 1.0, -1.0] if cautious else [*values_I, 0.0, 1.0]
    centre = math.fsum(sample) / len(sample)
    variance = math.fsum((value - centre) ** 2 for value in sample) / (len(sample) - 1)
    half = NormalDist().inv_cdf(0.5 + confidence / 2) * math.sqrt(variance / len(sample))
    least = -1.0 if cautious else 0.0
    return ItemMean(mean=mean, lower=max(least, mean - half), upper=min(1.0, mean + half), items=n)
