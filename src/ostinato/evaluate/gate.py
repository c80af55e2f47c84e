"""The gate: the items of a round, the resolution of a suite, the quality bars, and the verdict on a candidate. Pure functions.

The rule is non-inferiority within stated margins, not "no significant difference": a small suite that finds nothing has proven nothing. A
candidate ships only if it clears every bar, is not significantly worse than live, and rules out, on every suite, a loss of `margin` against
live and of `total_margin` against the best release so far and against the anchor. Comparisons with live alone would let many small losses
add up. The best release so far never gets worse, so all releases together lose little more than `total_margin`.

Every suite must hold, so the bounds need no correction for the number of suites: a candidate that is too bad on one of them passes with at
most that suite's error probability. Where one suite out of several suffices for a conclusion (worse, or better), Holm's procedure applies.
Looks at growing numbers of draws share one error budget (Bonferroni), so extending gives no extra chances.

Bars are absolute levels, whatever version serves users. All must be cleared, so no correction for their number is needed: a candidate below
one of them passes all with at most the probability of passing that one.

A round keeps no state. A worker that was killed and starts again draws the same numbers for the same candidate and round, so a restart
gives no extra look. Every other candidate or round gets numbers of its own, unless versions share draws (`evaluation`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from ostinato.core.errors import BadConfig
from ostinato.core.records import PolicyVersion
from ostinato.core.report import BarResult, Comparison, Incumbent, Incumbents, ItemScore, Report, Verdict
from ostinato.evaluate.config import BarConfig, GateConfig
from ostinato.evaluate.statistics import Spread, bounds, holm, mcnemar, mean_lower, paired_items, power, spread_of
from ostinato.evaluate.suites import Item, Suite

# ---------------------------------------------------------------- what a suite can resolve


PASSING = 0.94
"""The share of equally good candidates whose bound must hold at the smallest margin. A few more are blocked because they look worse than
live by chance, and live was itself chosen on these items: nine in ten ship in the simulation of benchmarks/release/gate.py."""


def assumed_error(items: int, gate: GateConfig) -> float:
    """Return the standard error of a difference at the last look, from the assumed spreads: sqrt(2 (item^2 + draw^2 / draws) / items).

    Example: ``assumed_error(1000, GateConfig())`` is 0.0067.
    """
    return math.sqrt(2.0 * (gate.item_spread**2 + gate.draw_spread**2 / gate.max_draws) / items)


def smallest_margin(error: float, level: float) -> float:
    """Return the margin that an equally good candidate's bound holds with probability `PASSING`.

    It is (z(1 - level) + z(0.94)) standard errors: the power formula of a non-inferiority test (Chow, Shao and Wang 2008, section 4.2),
    solved for the margin.
    """
    normal = NormalDist()
    return (normal.inv_cdf(1.0 - level) + normal.inv_cdf(PASSING)) * error


def smallest_total_margin(items: int, gate: GateConfig) -> float:
    """Return the smallest total margin for a suite with `items` items in a round, by the assumed spreads.

    Example: ``smallest_total_margin(500, GateConfig())`` is 0.038.
    """
    return smallest_margin(assumed_error(items, gate), gate.total_alpha_at(gate.max_draws))


def items_for(margin: float, level: float, gate: GateConfig) -> int:
    """Return the number of items in a round that a margin needs at a level: the inverse of `smallest_margin` over `assumed_error`."""
    return math.ceil((smallest_margin(assumed_error(1, gate), level) / margin) ** 2)


def check_margins(suite: str, items: int, gate: GateConfig, measured: float | None = None) -> None:
    """Raise BadConfig if a margin is below `smallest_margin`: the suite is too small, and too many equally good candidates are blocked.

    `measured`: the standard deviation of a draw, once the anchor's draws have shown it; until then `gate.draw_spread` is assumed.
    """
    if measured is not None:
        gate = gate.model_copy(update={"draw_spread": measured})
    looks = {"margin": gate.alpha_at(gate.max_draws), "total_margin": gate.total_alpha_at(gate.max_draws)}
    for name, level in looks.items():
        margin, smallest = getattr(gate, name), smallest_margin(assumed_error(items, gate), level)
        if margin < smallest:
            enough = math.ceil(1000.0 * smallest) / 1000.0
            raise BadConfig(
                f"suite {suite!r} draws {items} items x {gate.max_draws} for a candidate: the smallest evaluate.gate.{name} that "
                f"it can hold is {100 * smallest:.1f} pp, and {100 * margin:.1f} pp is set. Give it "
                f"{items_for(margin, level, gate)} items in a round, or set evaluate.gate.{name}={enough:g} and live with that "
                f"resolution ({_spreads(gate, measured)})"
            )


def _spreads(gate: GateConfig, measured: float | None) -> str:
    assumed = f"assumed: a version's effect on an item varies by {gate.item_spread:g}"
    if measured is not None:
        return f"measured: a draw varies by {measured:.3g}; {assumed}"
    return f"{assumed} and a draw by {gate.draw_spread:g}; evaluate.gate.item_spread and draw_spread say so"


def check_bars(bars: Sequence[tuple[BarConfig, str, int]]) -> None:
    """Raise BadConfig for a bar that not even perfect answers could clear. Each bar comes with its suite's name and items in a round."""
    for bar, suite, items in bars:
        if BAR_ALPHA ** (1.0 / items) < bar.wanted:
            needed = math.ceil(math.log(BAR_ALPHA) / math.log(bar.wanted))
            raise BadConfig(
                f"evaluate.bars: no candidate can clear the bar on {bar.axis} of suite {suite!r}: with {items} items even faultless "
                f"answers prove no more than {BAR_ALPHA ** (1.0 / items):.4f} of the {bar.wanted:g} that is wanted; give it {needed} "
                "items or lower the bar"
            )


# ---------------------------------------------------------------- the verdict


HARM_SHARE = 0.5
"""Fraction of alpha at which a loss against live counts as significant: one side of a two-sided test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The versions and the suite that are compared, and the mean scores of candidate and live. With several suites, the first.

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
    """Candidate minus one incumbent, item by item. `only_harm`: only a significant loss on these items counts.

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
    """Pair a candidate's scores with each incumbent's. Sealed items, if there are any, are also paired with live's on their own.

    Raises:
        ValueError: the two sides do not hold the same (item, draw) pairs, or there are none.
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
    """A verdict without its report: `why` in a few words. `better`: a candidate that ships is proven better than the best so far.

    Example: ``Weighed(comparisons=comparisons, verdict=Verdict.SHIP, why="not worse than the margins", better=False)``
    """

    comparisons: tuple[Comparison, ...]
    verdict: Verdict
    why: str
    better: bool


def weigh(spreads: Sequence[tuple[Paired, Spread]], bars: Sequence[BarResult], config: GateConfig) -> Weighed:
    """Apply the decision rule to the spread of each pair's differences (see `decide`)."""
    draws = min(pair.draws for pair, _ in spreads)
    comparisons = tuple(_compare(pair, found, config, draws) for pair, found in spreads)
    worse = _worse(spreads, config.alpha_at(draws) * HARM_SHARE)
    better = bool(_better(spreads, config.total_alpha_at(draws)))
    verdict, why = _verdict(comparisons, bars, worse, better, draws, config)
    return Weighed(comparisons=comparisons, verdict=verdict, why=why, better=better and verdict is Verdict.SHIP)


def decide(paired: Sequence[Paired], bars: Sequence[BarResult], config: GateConfig, match: Match) -> Report:
    """Judge a candidate. `Report.difference`, `lower` and `upper` are those against live on the first suite.

    BLOCK if a bar is missed or a loss against live is significant; SHIP if every comparison holds (and, for `require` "win", the candidate
    is proven better than the best so far); otherwise EXTEND until `max_draws`, then BLOCK.

    Raises:
        ValueError: nothing to compare with live, or no items.
    """
    config = config.after(match.incumbents.since_s)
    weighed = weigh([(pair, spread_of(pair.differences_I)) for pair in paired], bars, config)
    comparisons = weighed.comparisons
    against_live = next(found for found in comparisons if found.against is Incumbent.LIVE)
    chance = min(_power(found, config) for found in comparisons if found.margin is not None)
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
        reason=f"{weighed.why}{_details(comparisons, match.incumbents, first, chance, smallest, config)}",
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
    """Return the suites on which the candidate is significantly worse than live."""
    sides = {pair.suite: found for pair, found in spreads if pair.against is Incumbent.LIVE}

    def falls(suite: str, level: float) -> bool:
        return bounds(sides[suite], lower_alpha=level, upper_alpha=level).upper < 0.0

    return holm(list(sides), falls, alpha)


def _better(spreads: Sequence[tuple[Paired, Spread]], alpha: float) -> frozenset[str]:
    """Return the suites on which the candidate is proven better than the best so far; none if it looks worse on another."""
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
        return Verdict.BLOCK, f"below a quality bar ({'; '.join(bar_words(bar) for bar in missed)})"
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


def bar_words(bar: BarResult) -> str:
    """Describe what a bar required and what it got."""
    if not bar.n:
        return f"{bar.axis} of {bar.suite}: no answers"
    return f"{bar.axis} of {bar.suite}: bound {bar.bound:.3f}, wanted {bar.wanted:g}, {bar.n} items"


def _level(found: Comparison, config: GateConfig) -> float:
    at = config.alpha_at if found.against is Incumbent.LIVE else config.total_alpha_at
    return at(found.draws)


def _power(found: Comparison, config: GateConfig) -> float:
    """Return the probability that an equally good candidate would have passed this comparison, at the spread seen here."""
    assert found.margin is not None
    return power(found.items, found.error**2 * found.items, found.margin, alpha=_level(found, config))


def _smallest(comparisons: Sequence[Comparison], config: GateConfig) -> float:
    """Return the smallest total margin that every suite can test, at the spreads seen here."""
    total = [found for found in comparisons if found.against is not Incumbent.LIVE]
    return max((smallest_margin(found.error, _level(found, config)) for found in total), default=1.0)


def _details(
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


# ---------------------------------------------------------------- the bars


BAR_ALPHA = 0.01
"""The level (one minus the confidence) of the bound that must clear a bar."""


def judge_bar(bar: BarConfig, suite: str, scores: Sequence[ItemScore]) -> BarResult:
    """Judge a candidate's answers to one suite by one bar. Without any answer the bar is not cleared.

    A mean that must stay low (`at_most`) is judged as its complement; the reported value is then the mean, and the bound an upper bound.
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
    """Return an answer's value for the bar, in [0, 1], higher is better."""
    if bar.axis == "latency":
        return float(score.seconds <= (bar.at_most or 0.0))
    value = score.score if bar.axis == "score" else float(score.formed)
    return 1.0 - value if bar.at_most is not None else value


# ---------------------------------------------------------------- rounds


@dataclass(frozen=True, slots=True)
class Selection:
    """The items of a round in the suite's order, and the ids of those that are sealed.

    Example: ``Selection((item_a, item_b), frozenset({"b"}))``
    """

    items: tuple[Item, ...]
    sealed: frozenset[str]


def seed_of(suite: Suite, candidate_hash: str, round: int) -> int:
    """Return the seed of all draws of a suite for one candidate in one round; 63 bits."""
    return _number(f"draws\0{suite.hash}\0{candidate_hash}\0{round}") >> 1


def sealed_ids(suite: Suite, share: float) -> frozenset[str]:
    """Return the ids of the sealed items: those that hash below `share`, so that editing other items changes nothing.

    At least one item stays open.
    """
    found = frozenset(item.id for item in suite.items if _number(f"sealed\0{item.id}") < share * 2**64)
    return frozenset() if len(found) == len(suite.items) else found


def select(suite: Suite, gate: GateConfig, candidate_hash: str, round: int) -> Selection:
    """Return the round's items: `items_per_round` of the open items, picked by the seed so that rounds differ.

    Every `sealed_every`-th round also has the sealed items.
    """
    sealed = sealed_ids(suite, gate.sealed_share)
    opened = [item for item in suite.items if item.id not in sealed]
    if 0 < gate.items_per_round < len(opened):
        seed = seed_of(suite, candidate_hash, round)
        opened = sorted(opened, key=lambda item: _number(f"{seed}\0{item.id}"))[: gate.items_per_round]
    chosen = {item.id for item in opened}
    shown = sealed if (round + 1) % gate.sealed_every == 0 else frozenset[str]()
    return Selection(tuple(item for item in suite.items if item.id in chosen or item.id in shown), shown)


def items_in_round(suite: Suite, gate: GateConfig) -> int:
    """Return the least number of items that a round has."""
    opened = len(suite.items) - len(sealed_ids(suite, gate.sealed_share))
    return min(opened, gate.items_per_round or opened)


def _number(text: str) -> int:
    return int.from_bytes(blake3(text.encode()).digest(length=8), "big")
