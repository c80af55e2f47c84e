"""A ladder of candidates that are each a little worse than live: the total loss at the end, and the candidates that a gate ships.

Every candidate's true mean lies `step` above live's. Live, best and anchor follow the gate's own verdicts over a hundred
candidates, in 200 seeded runs. The judge is the gate itself (`evaluate.gate.verdict.weigh`, with the check of margins that it makes at
its start), at the smallest total margin that each suite can hold and at the defaults where the suite holds them. For comparison, with
the same seeds, a gate against live alone (`AgainstLive`): up to three looks, reusing the draws by which live was judged.

An item's score is the sum of the version's true mean, a fixed effect of that version on that item (standard deviation 0.122) and the
noise of its draws (0.245 each). This is a model of a suite, not a measurement of one. Only the means over items are drawn, and the
standard error that a sample of that many items would show; the property tests draw item by item.

    python -m benchmarks.release.gate
    python -m benchmarks.release.gate --runs 20 --sizes 500
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

import numpy as np
from benchmarks.contender import RESULTS

from ostinato.core.errors import BadConfig
from ostinato.core.records import PolicyVersion
from ostinato.core.report import Incumbent, Verdict
from ostinato.evaluate.config import GateConfig
from ostinato.evaluate.gate import Paired, check_margins, smallest_total_margin, weigh
from ostinato.evaluate.statistics import Spread, bounds

SIZES, STEPS, CANDIDATES = (164, 500, 1000, 2000), (-0.005, -0.01, 0.0), 100
RESULT = RESULTS / "release_gate.json"
NOBODY = PolicyVersion(number=0, hash="00")
NOTHING_I = np.zeros(0)


@dataclass(eq=False)
class Simulated:
    """A version: its true mean above the first version's, the mean of its effects on the suite's items, and its kept draws."""

    mean: float
    effect: float
    kept: dict[int, float] = field(default_factory=dict[int, float])


class Suite:
    """Makes versions and draws them on `items` items."""

    def __init__(self, rng: np.random.Generator, items: int, config: GateConfig) -> None:
        self.rng, self.items, self.config = rng, items, config

    def version(self, mean: float) -> Simulated:
        return Simulated(mean, self.rng.normal(0.0, self.config.item_spread / math.sqrt(self.items)))

    def draw(self, version: Simulated, draws: int) -> float:
        """The mean score over the items with `draws` fresh draws of each."""
        noise = self.rng.normal(0.0, self.config.draw_spread / math.sqrt(draws * self.items))
        return version.mean + version.effect + noise

    def spread(self, difference: float, draws: int) -> Spread:
        """The spread that a sample of the suite's items would show for a difference of means."""
        variance = 2.0 * (self.config.item_spread**2 + self.config.draw_spread**2 / draws) / self.items
        df = self.items - 1
        error = math.sqrt(variance * self.rng.chisquare(df) / df)
        return Spread(mean=difference, centre=difference, error=error, n=self.items, df=df, constant=False)


class Gate:
    """Ostinato's gate: every incumbent is drawn afresh for every candidate. A version that holds two places is drawn once."""

    def __init__(self, config: GateConfig) -> None:
        self.config = config
        draws = config.max_draws
        self.sides = {
            who: Paired(suite="ladder", against=who, policy=NOBODY, differences_I=NOTHING_I, draws=draws)
            for who in Incumbent
        }

    def judge(self, suite: Suite, candidate: Simulated, stand: dict[Incumbent, Simulated]) -> tuple[bool, bool]:
        """Whether the candidate ships, and whether it is proven better."""
        draws, mean = self.config.max_draws, suite.draw(candidate, self.config.max_draws)
        shown = {
            id(version): suite.spread(mean - suite.draw(version, draws), draws)
            for version in dict.fromkeys(stand.values())
        }
        found = weigh([(self.sides[who], shown[id(version)]) for who, version in stand.items()], (), self.config)
        return found.verdict is Verdict.SHIP, found.better


class AgainstLive:
    """One margin, against live alone, with looks at 2, 4 and 8 draws. Live keeps the draws by which it was judged."""

    LOOKS, ALPHA, EARLY = (2, 4, 8), 0.05, 0.5

    def __init__(self, margin: float) -> None:
        self.margin = margin

    def judge(self, suite: Suite, candidate: Simulated, stand: dict[Incumbent, Simulated]) -> tuple[bool, bool]:
        """Whether the candidate ships. It is never called better."""
        live = stand[Incumbent.LIVE]
        for look in self.LOOKS:
            shown = suite.spread(self._kept(suite, candidate, look) - self._kept(suite, live, look), look)
            share = 1 - self.EARLY if look == self.LOOKS[-1] else self.EARLY / (len(self.LOOKS) - 1)
            estimate = bounds(shown, lower_alpha=self.ALPHA * share, upper_alpha=self.ALPHA * share / 2)
            if estimate.upper < 0.0 or estimate.mean < -self.margin:
                return False, False
            if estimate.lower > -self.margin:
                return True, False
        return False, False

    def _kept(self, suite: Suite, version: Simulated, look: int) -> float:
        """The mean over the first `look` draws. Each look adds fresh draws to the earlier ones."""
        if look not in version.kept:
            before = max((known for known in version.kept if known < look), default=0)
            fresh, old = suite.draw(version, look - before), version.kept.get(before, 0.0)
            version.kept[look] = (old * before + fresh * (look - before)) / look
        return version.kept[look]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One cell of the table. Means are in points (0.01 of the score); negative is a loss."""

    rule: str
    items: int
    step_pp: float
    margin_pp: float
    total_margin_pp: float | None
    runs: int
    total_pp: float
    worst_5_percent_pp: float
    shipped_of_100: float
    runs_within_total_margin: float | None
    runs_with_false_best: float | None
    seconds: float


def climb(rule: Gate | AgainstLive, suite: Suite, step: float) -> tuple[float, int, bool]:
    """A run: live's true mean at the end, the number of ships, and whether a version was wrongly called better."""
    first = suite.version(0.0)
    stand, ships, false_best = dict.fromkeys((Incumbent.LIVE, Incumbent.BEST, Incumbent.ANCHOR), first), 0, False
    for _ in range(CANDIDATES):
        candidate = suite.version(stand[Incumbent.LIVE].mean + step)
        ship, better = rule.judge(suite, candidate, stand)
        if ship:
            stand[Incumbent.LIVE], ships = candidate, ships + 1
        if better:
            false_best |= candidate.mean <= stand[Incumbent.BEST].mean
            stand[Incumbent.BEST] = candidate
    return stand[Incumbent.LIVE].mean, ships, false_best


def measure(name: str, rule: Gate | AgainstLive, items: int, step: float, runs: int) -> Row:
    began = time.monotonic()
    spreads = GateConfig()
    found = [climb(rule, Suite(np.random.default_rng((items, run)), items, spreads), step) for run in range(runs)]
    totals = np.array([total for total, _, _ in found])
    own = isinstance(rule, Gate)
    total_margin = rule.config.total_margin if own else None
    return Row(
        rule=name,
        items=items,
        step_pp=100 * step,
        margin_pp=100 * (rule.config.margin if own else rule.margin),
        total_margin_pp=None if total_margin is None else 100 * total_margin,
        runs=runs,
        total_pp=100 * float(totals.mean()),
        worst_5_percent_pp=100 * float(np.quantile(totals, 0.05)),
        shipped_of_100=float(np.mean([ships for _, ships, _ in found])),
        runs_within_total_margin=None if total_margin is None else float((totals > -total_margin - 1e-9).mean()),
        runs_with_false_best=float(np.mean([wrong for _, _, wrong in found])) if own else None,
        seconds=time.monotonic() - began,
    )


def rules(items: int) -> Iterator[tuple[str, Gate | AgainstLive]]:
    """The rules for a suite of this many items. The defaults are included only if they pass the check of margins."""
    defaults = GateConfig(candidates_per_week=56)
    total = smallest_total_margin(items, defaults)
    smallest = defaults.model_copy(update={"margin": max(defaults.margin, total), "total_margin": total})
    yield "gate, smallest margin", Gate(smallest)
    try:
        check_margins("ladder", items, defaults)
        yield "gate, defaults", Gate(defaults)
    except BadConfig:
        print(f"(with {items} items the defaults refuse to start)")
    yield "against live alone, 5 pp", AgainstLive(0.05)
    yield "against live alone, 2 pp", AgainstLive(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    asked = parser.parse_args()
    rows: list[Row] = []
    head = f"{'rule':<26}{'items':>6}{'step':>6}{'margins':>10}{'total [worst 5%]':>19}{'shipped':>9}{'within':>8}{'false best':>11}"
    print(head)
    for items in asked.sizes:
        for name, rule in rules(items):
            for step in STEPS:
                row = measure(name, rule, items, step, asked.runs)
                rows.append(row)
                print(line(row), flush=True)
                about = {"runs": asked.runs, "candidates": CANDIDATES, "python": platform.python_version()}
                RESULT.write_text(json.dumps(about | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n")


def line(row: Row) -> str:
    margins = f"{row.margin_pp:.1f}" + ("" if row.total_margin_pp is None else f"/{row.total_margin_pp:.1f}")
    within = "-" if row.runs_within_total_margin is None else f"{100 * row.runs_within_total_margin:.1f}%"
    wrong = "-" if row.runs_with_false_best is None else f"{100 * row.runs_with_false_best:.1f}%"
    total = f"{row.total_pp:+.1f} [{row.worst_5_percent_pp:+.1f}]"
    return f"{row.rule:<26}{row.items:>6}{row.step_pp:>+6.1f}{margins:>10}{total:>19}{row.shipped_of_100:>9.1f}{within:>8}{wrong:>11}"


if __name__ == "__main__":
    main()
