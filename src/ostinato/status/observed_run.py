"""Observes a demo's run from outside, by following its log and its workers' progress lines, and computes the figures of its report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ostinato.core.records import Arm, Holdback, ReleaseEvent, Reward, Signal, Turn
from ostinato.core.seams import Log
from ostinato.evaluate.acceptance import Rated, by_arm, live_minus_control
from ostinato.evaluate.statistics import Estimate
from ostinato.reward.accounting import Accounting
from ostinato.run_directory import Home
from ostinato.status import arms
from ostinato.status.progress_lines import Lines
from ostinato.status.run_report import Curve, Delta, Gate, HeldOut, Mark, Pause
from ostinato.status.summary import rated_turn


@dataclass(slots=True)
class Observed:
    """All rows and lines seen so far, in order."""

    rated: list[Rated] = field(default_factory=list[Rated])
    releases: list[ReleaseEvent] = field(default_factory=list[ReleaseEvent])
    steps: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    published: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    swaps: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    refused: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    numerics: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    held: Counter[str] = field(default_factory=Counter[str])
    turns: int = 0
    tokens: int = 0
    signals: int = 0

    def shipped(self) -> list[ReleaseEvent]:
        """Return the releases after the starting model."""
        return [event for event in self.releases if event.action == "shipped" and event.previous is not None]

    def between(self, start: float, end: float) -> list[Rated]:
        """Return the rated turns that started in [start, end)."""
        return [each for each in self.rated if start <= each[0].started_at < end]


class RunObserver:
    """Follows one run; `look` reads new rows and lines."""

    def __init__(self, place: Home, log: Log) -> None:
        self.seen = Observed()
        self._log = log
        self._cursor = 0
        self._unrated: dict[str, Turn] = {}
        self._lines = [Lines(place.progress("train")), Lines(place.progress("serve"))]

    async def look(self) -> Observed:
        kinds: set[type] = {Turn, Signal, Reward, Holdback, ReleaseEvent}
        async for cursor, row in self._log.read(self._cursor, kinds):
            self._cursor = cursor
            self._row(row)
        lists = {
            "step": self.seen.steps,
            "published": self.seen.published,
            "swapped": self.seen.swaps,
            "refused": self.seen.refused,
            "numerics": self.seen.numerics,
        }
        for lines in self._lines:
            for line in lines.new():
                if line["kind"] in lists:
                    lists[line["kind"]].append(line)
        return self.seen

    def _row(self, row: object) -> None:
        seen = self.seen
        match row:
            case Turn():
                seen.turns += 1
                seen.tokens += sum(span.tokens for span in row.spans)
                if row.arm.people and row.counts:
                    self._unrated[row.id] = row
            case Reward():
                turn = self._unrated.pop(row.turn, None)
                if turn is not None:
                    seen.rated.append((turn, row))
            case Holdback():
                seen.held[row.reason.partition(": ")[0].partition(":")[0]] += 1
            case Signal():
                seen.signals += 1
            case ReleaseEvent():
                seen.releases.append(row)
            case _:
                pass


# ---------------------------------------------------------------- figures


def curves(seen: Observed, start: float, end: float) -> tuple[Curve, ...]:
    """Return acceptance per arm in equal windows from `start` to `end` (Unix seconds)."""
    return arms.curves((rated_turn(*each) for each in seen.between(start, end)), start, end)


def marks(seen: Observed, start: float) -> tuple[Mark, ...]:
    """Return releases and rollbacks."""
    events = [*seen.shipped(), *(event for event in seen.releases if event.action == "rolled_back")]
    return tuple(
        Mark(t=max(0.0, event.at - start) / 60, label=f"v{event.policy.number}", action=event.action)
        for event in sorted(events, key=lambda event: event.at)
    )


def gates(seen: Observed, start: float) -> tuple[Gate, ...]:
    """Return every look of the gate."""
    return tuple(_gate(event, start) for event in seen.releases if event.action == "evaluated")


def _gate(event: ReleaseEvent, start: float) -> Gate:
    report = event.detail["report"]
    named = ("difference", "lower", "upper", "margin", "power", "items", "draws", "verdict")
    live = f"v{event.previous.number}" if event.previous else "-"
    return Gate(
        t=max(0.0, event.at - start) / 60,
        candidate=f"v{event.policy.number}",
        live=live,
        **{name: report[name] for name in named},
    )


def proven(seen: Observed) -> list[ReleaseEvent]:
    """Return the releases that the gate found better than the best release before them."""
    better: dict[str, bool] = {}
    for event in seen.releases:
        if event.action == "evaluated":
            better[event.policy.hash] = bool(event.detail["report"].get("better", False))
    return [event for event in seen.shipped() if better.get(event.policy.hash, False)]


def resolution(seen: Observed) -> float | None:
    """Return the smallest total margin that the suite can show at the spread of the last look; None if there is none on record."""
    looks = [event.detail["report"] for event in seen.releases if event.action == "evaluated"]
    return looks[-1].get("smallest_margin") if looks else None


def deltas(seen: Observed) -> tuple[Delta, ...]:
    """Return the size of each published delta."""
    return tuple(
        Delta(version=f"v{line['number']}", bytes=line["bytes"], full_bytes=line["full_bytes"])
        for line in seen.published
        if line["form"] == "delta"
    )


def pauses(seen: Observed) -> tuple[Pause, ...]:
    """Return the hot swaps of the live slot except the first load, for which nobody waited."""
    live = [each for each in seen.swaps if each["slot"] == "live"][1:]
    return tuple(Pause(version=f"v{each['number']}", seconds=each["pause_s"], streams=each["streams"]) for each in live)


def held_out(label: str, score: Estimate, items: int) -> HeldOut:
    """Return one version's score on held-out tasks."""
    return HeldOut(label=label, mean=score.mean, lower=max(0.0, score.lower), upper=min(1.0, score.upper), items=items)


def accounting_rows(found: Accounting) -> tuple[tuple[str, int], ...]:
    """Return how many turns ended in each way."""
    held = [(f"held back: {reason}", count) for reason, count in found.held.items()]
    return (("served turns", found.ingested), ("trained on", found.trained), *held, ("still waiting", found.waiting))


def acceptance_rows(seen: Observed, start: float, end: float) -> list[tuple[str, str]]:
    """Return (label, value): acceptance per arm and their difference over the run's last third, adjusted for prompts and unadjusted."""
    last = last_third(seen, start, end)
    rows = [
        (f"acceptance, {arm.value} arm, last third", f"{100 * point.acceptance:.1f}% of {point.turns}")
        for arm, point in sorted(by_arm(last).items(), key=lambda pair: pair[0] is Arm.CONTROL)
    ]
    adjusted = difference(live_minus_control(last, before_releases(seen, start, end)))
    return [
        *rows,
        ("live minus control, last third", f"{adjusted}, less each prompt's acceptance before the first release"),
        ("the same, unadjusted", difference(live_minus_control(last))),
    ]


def difference(gap: Estimate) -> str:
    """Describe an estimated difference of acceptance shares."""
    return f"{100 * gap.mean:+.1f} pp, 95% [{100 * gap.lower:+.1f}, {100 * gap.upper:+.1f}], users as clusters"


def before_releases(seen: Observed, start: float, end: float) -> list[Rated]:
    """Return the rated turns that started before the run's last third and ended before the first release, with one version on both arms."""
    first = min((event.at for event in seen.shipped()), default=end)
    last = seen.between(start, end - (end - start) / 3)
    return [each for each in last if each[0].ended_at < first]


def last_third(seen: Observed, start: float, end: float) -> list[Rated]:
    """Return the rated turns of the run's last third, on which the demo's result is based."""
    return seen.between(end - (end - start) / 3, end)


def mismatch_rows(seen: Observed) -> list[tuple[str, str]]:
    """Return (label, value): the engine's mode, and how far the trainer's log-probabilities are from those at sampling, over all steps.

    If the engine has the trainer's numerics contract, the only group is the tokens sampled with the trainer's own weights. Otherwise all
    tokens are foreign, and those sampled with the trainer's own weights show the effect of the different numerics alone.
    """
    groups = (
        ("mismatch_", "trainer against engine, same weights"),
        ("foreign_", "trainer against a foreign engine"),
        ("foreign_same_", "of these, same weights"),
    )
    rows = [("numerics", ": ".join(filter(None, (line["mode"], line["why"])))) for line in seen.numerics[-1:]]
    return rows + [(label, line) for prefix, label in groups if (line := _mismatch(seen, prefix))]


def _mismatch(seen: Observed, prefix: str) -> str:
    steps = [step for step in seen.steps if step.get(f"{prefix}tokens")]
    tokens = sum(step[f"{prefix}tokens"] for step in steps)
    if not tokens:
        return ""
    if not any(step[f"{prefix}differing"] for step in steps):
        return f"0 of {tokens:.0f} tokens differ"
    k3, cut = (
        sum(step[f"{prefix}{name}"] * step[f"{prefix}tokens"] for step in steps) / tokens
        for name in ("k3", "truncated")
    )
    largest = max(step[f"{prefix}max_abs"] for step in steps)
    return f"k3 {k3:.2g} nats per token over {tokens:.0f}, at most {largest:.2g} apart, {100 * cut:.2g}% of weights cut"


def summary(
    seen: Observed, about_arms: Sequence[tuple[str, str]], extra: Sequence[tuple[str, str]]
) -> tuple[tuple[str, str], ...]:
    """Return the table that ends the demo as (label, value). `about_arms`: the rows about the arms, as the scenario measures them."""
    sizes = [delta.full_bytes / max(1, delta.bytes) for delta in deltas(seen)]
    waits = sorted(pause.seconds for pause in pauses(seen))
    rows = {
        "releases shipped": f"{len(seen.shipped())}, of these proven better than the best before: {len(proven(seen))}",
        "candidates blocked": str(sum(event.action == "blocked" for event in seen.releases)),
        "optimizer steps": str(len(seen.steps)),
        "turns, tokens sampled": f"{seen.turns}, {seen.tokens}",
    }
    if resolved := resolution(seen):
        rows["smallest total loss that the gate can rule out"] = f"{100 * resolved:.1f} pp, at the spread measured last"
    rows |= dict(mismatch_rows(seen))
    if sizes:
        middle = sorted(sizes)[len(sizes) // 2]
        rows["delta, median and range"] = f"{middle:.0f}x smaller, {min(sizes):.0f}x to {max(sizes):.0f}x"
    if waits:
        rows["swap pause, median and longest"] = f"{1e3 * waits[len(waits) // 2]:.2f} ms, {1e3 * waits[-1]:.2f} ms"
    return (*about_arms, *rows.items(), *extra)
