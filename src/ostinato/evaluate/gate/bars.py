"""Quality bars: absolute levels that a candidate must reach, whatever version serves users. Pure maths.

All bars must be cleared, so no correction for their number is needed: a candidate below one of them passes all with at most the
probability of passing that one.
"""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.core.report import BarResult, ItemScore
from ostinato.evaluate.config import BarConfig
from ostinato.evaluate.statistics import mean_lower

BAR_ALPHA = 0.01
"""One minus the confidence of the bound that must clear a bar."""


def judge_bar(bar: BarConfig, suite: str, scores: Sequence[ItemScore]) -> BarResult:
    """Judge a candidate's answers to one suite by one bar. Without a single answer the bar is not cleared.

    A mean that must stay low (`at_most`) is judged as its complement; the value reported is then the mean and the bound an upper bound.
    """
    items: dict[str, list[float]] = {}
    for score in scores:
        items.setdefault(score.item, []).append(_good(bar, score))
    if not items:
        return BarResult(suite=suite, axis=bar.axis, value=0.0, bound=0.0, wanted=bar.wanted, n=0, holds=False)
    lower = mean_lower(list(items.values()), BAR_ALPHA)
    value = sum(sum(values) / len(values) for values in items.values()) / len(items)
    holds = lower >= bar.wanted
    if bar.axis != "latency" and bar.at_most is not None:
        value, lower, wanted = 1.0 - value, 1.0 - lower, bar.at_most
    else:
        wanted = bar.wanted
    return BarResult(suite=suite, axis=bar.axis, value=value, bound=lower, wanted=wanted, n=len(items), holds=holds)


def _good(bar: BarConfig, score: ItemScore) -> float:
    """An answer's value for the bar, in [0, 1], the higher the better."""
    if bar.axis == "latency":
        return float(score.seconds <= (bar.at_most or 0.0))
    value = score.score if bar.axis == "score" else float(score.formed)
    return 1.0 - value if bar.at_most is not None else value
