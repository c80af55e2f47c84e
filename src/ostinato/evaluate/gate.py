"""The gate: paired scores of candidate and live in, a `Report` with a verdict out. Pure maths.

The rule is non-inferiority within a stated margin, not "no significant difference": a small suite that finds nothing has
proven nothing. Looks at growing numbers of draws share one error budget (Bonferroni), so extending does not buy luck.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.core.records import PolicyVersion
from ostinato.core.report import ItemScore, Report, Verdict
from ostinato.evaluate.config import GateConfig
from ostinato.evaluate.statistics import Estimate, mcnemar, mean_difference, paired_items, power, required_items


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Who is compared on what.

    Example: ``Match(suite="held-out", suite_hash="9f2c", candidate=v9, live=v7)``
    """

    suite: str
    suite_hash: str
    candidate: PolicyVersion
    live: PolicyVersion


def decide(
    scores_candidate: Sequence[ItemScore], scores_live: Sequence[ItemScore], config: GateConfig, match: Match
) -> Report:
    """Judge a candidate. `Report.lower` is the one-sided bound the verdict used; `upper` is that of a two-sided test.

    BLOCK when the drop is significant (upper bound below 0) or the mean drop exceeds the margin; SHIP when the lower bound
    is above -margin; otherwise EXTEND until `max_draws`, then BLOCK. `Report.power` is the chance that an equally good
    candidate would have passed this look, at the variance seen here.

    Raises:
        ValueError: the two sides do not hold the same (item, draw) pairs, or there are none.
    """
    items, differences_I, draws = paired_items(scores_candidate, scores_live)
    alpha = config.alpha_at(draws)
    estimate = mean_difference(differences_I, lower_alpha=alpha, upper_alpha=alpha / 2)
    variance = estimate.error**2 * len(items)
    chance = power(len(items), variance, config.margin, alpha=alpha)
    verdict, why = _verdict(estimate, draws, config)
    gained, lost = int((differences_I > 0).sum()), int((differences_I < 0).sum())
    reason = (
        f"{why}: {100 * estimate.mean:+.1f} pp, bounds {100 * estimate.lower:+.1f} to {100 * estimate.upper:+.1f}, "
        f"margin {100 * config.margin:.1f} pp, {len(items)} items x {draws} draws, "
        f"{gained} items better and {lost} worse (p={mcnemar(gained, lost):.2g}), power {chance:.2f}"
    )
    if chance < 0.8:
        wanted = required_items(variance, config.margin, power=0.8, alpha=alpha)
        reason += f"; low power: 0.80 needs {wanted} items at this variance"
    return Report(
        suite=match.suite,
        suite_hash=match.suite_hash,
        candidate=match.candidate,
        live=match.live,
        candidate_mean=_mean(scores_candidate),
        live_mean=_mean(scores_live),
        difference=estimate.mean,
        lower=estimate.lower,
        upper=estimate.upper,
        items=len(items),
        draws=draws,
        margin=config.margin,
        power=chance,
        verdict=verdict,
        reason=reason,
    )


def _verdict(estimate: Estimate, draws: int, config: GateConfig) -> tuple[Verdict, str]:
    if estimate.upper < 0.0:
        return Verdict.BLOCK, "significantly worse"
    if estimate.mean < -config.margin:
        return Verdict.BLOCK, "worse by more than the margin"
    if estimate.lower > -config.margin:
        return Verdict.SHIP, "not worse than the margin"
    if draws < config.max_draws:
        return Verdict.EXTEND, "not enough evidence yet"
    return Verdict.BLOCK, "not proven within the margin"


def _mean(scores: Sequence[ItemScore]) -> float:
    return sum(score.score for score in scores) / len(scores)
