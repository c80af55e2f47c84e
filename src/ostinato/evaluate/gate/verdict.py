"""The verdict: paired differences between a candidate and its incumbents -> a `Report`. Pure maths.

The rule is non-inferiority within stated margins, not "no significant difference": a small suite that finds nothing has proven nothing.
A candidate ships only if it clears every bar, is not significantly worse than live, and rules out, on every suite, a loss of `margin`
against live and of `total_margin` against the best release so far and against the anchor. Pairwise rules alone let many small losses add
up. The best release so far never gets worse, so all releases together lose little more than `total_margin`.

Every suite must hold, so the bounds need no correction for the number of suites: a candidate that is too bad on one of them passes with at
most that suite's error probability. Where one suite out of several suffices for a conclusion, worse or better, Holm's rule applies.
Looks at growing numbers of draws share one error budget (Bonferroni), so extending gives no extra chances.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ostinato.core.records import PolicyVersion
from ostinato.core.report import BarResult, Comparison, Incumbent, Incumbents, ItemScore, Report, Verdict
from ostinato.evaluate.config import GateConfig
from ostinato.evaluate.gate.resolution import smallest_margin
from ostinato.evaluate.statistics import Spread, bounds, holm, mcnemar, paired_items, power, spread_of

HARM_SHARE = 0.5
"""Part of alpha at which a loss against live counts as significant: one side of a two-sided test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The versions and the suite that are compared, and the mean scores of candidate and live. Of several suites, the first.

    Example: ``Match(suite="held-out", suite_hash="9f2c", candidate=v9, incumbents=incumbents, candidate_mean=0.5, live_mean=0.4)``
    """

    suite: str
    suite_hash: str
    candidate: PolicyVersion
    incumbents: Incumbents
    candidate_mean: float
    live_mean: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Paired:
    """Candidate minus one incumbent, item by item; `only_harm` for items on which only a significant loss counts.

    Example: ``Paired(suite="held-out", against=Incumbent.LIVE, policy=v7, differences_I=np.array([0.5, 0.0]), draws=2)``
    """

    suite: str
    against: Incumbent
    policy: PolicyVersion
    differences_I: NDArray[np.float64]
    draws: int
    only_harm: bool = False


def pair_up(
    suite: str, candidate: Sequence[ItemScore], others: Mapping[Incumbent, tuple[PolicyVersion, Sequence[ItemScore]]],
    sealed: frozenset[str] = frozenset(),
) -> list[Paired]:  # fmt: skip
    """Pairs a candidate's scores with each incumbent's; sealed items, if there are any, are also paired with live's by themselves.

    Raises:
        ValueError: two sides do not hold the same (item, draw) pairs, or there are none.
    """
    found: list[Paired] = []
    for against, (policy, scores) in others.items():
        items, differences_I, draws = paired_items(candidate, scores)
        found.append(Paired(suite=suite, against=against, policy=policy, differences_I=differences_I, draws=draws))
        kept_I = np.array([item in sealed for item in items], dtype=bool)
        if against is Incumbent.LIVE and kept_I.any():
            found.append(
                Paired(
                    suite=f"{suite} (sealed)",
                    against=against,
                    policy=policy,
                    differences_I=differences_I[kept_I],
                    draws=draws,
                    only_harm=True,
                )
            )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """A verdict without its report: `why` in a few words, and whether a candidate that ships is proven better than the best so far.

    Example: ``Weighed(comparisons=comparisons, verdict=Verdict.SHIP, why="not worse than the margins", better=False)``
    """

    comparisons: tuple[Comparison, ...]
    verdict: Verdict
    why: str
    better: bool


def weigh(spreads: Sequence[tuple[Paired, Spread]], bars: Sequence[BarResult], config: GateConfig) -> Weighed:
    """The decision rule, applied to the spread of each pair's differences (see `decide`)."""
    draws = min(pair.draws for pair, _ in spreads)
    comparisons = tuple(_compare(pair, found, config, draws) for pair, found in spreads)
    worse = _worse(spreads, config.alpha_at(draws) * HARM_SHARE)
    better = bool(_better(spreads, config.total_alpha_at(draws)))
    verdict, why = _verdict(comparisons, bars, worse, better, draws, config)
    return Weighed(comparisons=comparisons, verdict=verdict, why=why, better=better and verdict is Verdict.SHIP)


def decide(paired: Sequence[Paired], bars: Sequence[BarResult], config: GateConfig, match: Match) -> Report:
    """Judge a candidate. `Report.difference`, `lower` and `upper` are those against live on the first suite.

    BLOCK when a bar is missed or a loss against live is significant; SHIP when every comparison holds (and, for `require` "win", the
    candidate is proven better than the best so far); otherwise EXTEND until `max_draws`, then BLOCK.

    Raises:
        ValueError: nothing to compare with live, or no items.
    """
    weighed = weigh([(pair, spread_of(pair.differences_I)) for pair in paired], bars, config)
    comparisons = weighed.comparisons
    against_live = next(found for found in comparisons if found.against is Incumbent.LIVE)
    chance = min(_chance(found, config) for found in comparisons if found.margin is not None)
    smallest = _smallest(comparisons, config)
    first = next(pair for pair in paired if pair.against is Incumbent.LIVE)
    return Report(
        suite=match.suite,
        suite_hash=match.suite_hash,
        candidate=match.candidate,
        live=match.incumbents.live,
        candidate_mean=match.candidate_mean,
        live_mean=match.live_mean,
        difference=against_live.difference,
        lower=against_live.lower,
        upper=against_live.upper,
        items=against_live.items,
        draws=against_live.draws,
        margin=config.margin,
        power=chance,
        verdict=weighed.verdict,
        reason=f"{weighed.why}{_told(comparisons, match.incumbents, first, chance, smallest, config)}",
        comparisons=comparisons,
        bars=tuple(bars),
        better=weighed.better,
        smallest_margin=smallest,
        round=match.incumbents.round,
    )


def _compare(pair: Paired, found: Spread, config: GateConfig, draws: int) -> Comparison:
    if pair.against is Incumbent.LIVE:
        lower_alpha, margin = config.alpha_at(draws), None if pair.only_harm else config.margin
        upper_alpha = lower_alpha * HARM_SHARE
    else:
        lower_alpha, margin = config.total_alpha_at(draws), config.total_margin
        upper_alpha = lower_alpha
    estimate = bounds(found, lower_alpha=lower_alpha, upper_alpha=upper_alpha)
    return Comparison(
        suite=pair.suite,
        against=pair.against,
        policy=pair.policy,
        difference=estimate.mean,
        lower=estimate.lower,
        upper=estimate.upper,
        error=estimate.error,
        margin=margin,
        items=estimate.n,
        draws=pair.draws,
    )


def _worse(spreads: Sequence[tuple[Paired, Spread]], alpha: float) -> frozenset[str]:
    """The suites on which the candidate is significantly worse than live."""
    sides = {pair.suite: found for pair, found in spreads if pair.against is Incumbent.LIVE}

    def falls(suite: str, level: float) -> bool:
        return bounds(sides[suite], lower_alpha=level, upper_alpha=level).upper < 0.0

    return holm(list(sides), falls, alpha)


def _better(spreads: Sequence[tuple[Paired, Spread]], alpha: float) -> frozenset[str]:
    """The suites on which the candidate is proven better than the best so far; none if it looks worse on another."""
    sides = {pair.suite: found for pair, found in spreads if pair.against is Incumbent.BEST}

    def wins(suite: str, level: float) -> bool:
        return bounds(sides[suite], lower_alpha=level, upper_alpha=level).lower > 0.0

    looks_worse = any(found.mean < 0.0 for found in sides.values())
    return frozenset() if looks_worse else holm(list(sides), wins, alpha)


def _verdict(
    comparisons: Sequence[Comparison], bars: Sequence[BarResult], worse: frozenset[str], better: bool, draws: int, config: GateConfig
) -> tuple[Verdict, str]:  # fmt: skip
    missed = [bar for bar in bars if not bar.holds]
    if missed:
        return Verdict.BLOCK, f"below a quality bar ({'; '.join(_bar(bar) for bar in missed)})"
    if worse:
        return Verdict.BLOCK, f"significantly worse than live on {', '.join(sorted(worse))}"
    open_ = [found for found in comparisons if not found.holds]
    if not open_ and (better or config.require == "no_loss"):
        return Verdict.SHIP, "proven better than the best so far" if better else "not worse than the margins"
    if draws < config.max_draws:
        return Verdict.EXTEND, "not enough evidence yet"
    if not open_:
        return Verdict.BLOCK, "not proven better than the best so far"
    names = dict.fromkeys(f"{found.against} on {found.suite}" for found in open_)
    return Verdict.BLOCK, f"not proven within the margin against {' and '.join(names)}"


def _bar(bar: BarResult) -> str:
    if not bar.n:
        return f"{bar.axis} of {bar.suite}: no answers"
    return f"{bar.axis} of {bar.suite}: bound {bar.bound:.3f}, wanted {bar.wanted:g}, {bar.n} items"


def _level(found: Comparison, config: GateConfig) -> float:
    at = config.alpha_at if found.against is Incumbent.LIVE else config.total_alpha_at
    return at(found.draws)


def _chance(found: Comparison, config: GateConfig) -> float:
    """The probability that an equally good candidate would have passed this comparison, at the spread seen here."""
    assert found.margin is not None
    return power(found.items, found.error**2 * found.items, found.margin, alpha=_level(found, config))


def _smallest(comparisons: Sequence[Comparison], config: GateConfig) -> float:
    """The smallest total margin that every suite can hold, at the spreads seen here."""
    total = [found for found in comparisons if found.against is not Incumbent.LIVE]
    return max((smallest_margin(found.error, _level(found, config)) for found in total), default=1.0)


def _told(
    comparisons: Sequence[Comparison], incumbents: Incumbents, first: Paired, chance: float, smallest: float, config: GateConfig
) -> str:  # fmt: skip
    several = len({found.suite for found in comparisons}) > 1
    parts = [
        f"against {found.against} {f'on {found.suite} ' if several else ''}{100 * found.difference:+.1f} pp, "
        f"bounds {100 * found.lower:+.1f} to {100 * found.upper:+.1f}"
        + ("" if found.margin is None else f", margin {100 * found.margin:.1f} pp")
        for found in comparisons
    ]
    gained, lost = int((first.differences_I > 0).sum()), int((first.differences_I < 0).sum())
    parts.append(
        f"{first.differences_I.size} items x {first.draws} draws, {gained} items better than live and {lost} worse "
        f"(p={mcnemar(gained, lost):.2g}), power {chance:.2f}"
    )
    parts.append(f"smallest total margin at this spread {100 * smallest:.1f} pp")
    if smallest > config.total_margin:
        parts.append(
            "low power: more than one in ten equally good candidates is blocked; add items or draws, or widen evaluate.gate.total_margin"
        )
    if incumbents.best is None:
        parts.append("the best release was not sampled (evaluate.gate.sample_best)")
    return ": " + "; ".join(parts)
