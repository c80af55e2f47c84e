"""A demo's run observed from outside, by following its log and its workers' progress lines; and the figures of the report on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ostinato.core.records import Arm, Holdback, PolicyVersion, ReleaseEvent, Reward, Signal, Turn
from ostinato.core.report import ItemScore, headline
from ostinato.core.seams import Log
from ostinato.evaluate.acceptance import Rated, by_arm, live_minus_control
from ostinato.evaluate.statistics import Estimate, mean_difference, paired_items, suite_mean
from ostinato.reward.accounting import Accounting
from ostinato.run_directory import Home
from ostinato.status import arms
from ostinato.status.progress_lines import Lines
from ostinato.status.run_report import Curve, Delta, Gate, HeldOut, Mark, Pause, RunReport
from ostinato.status.summary import rated_turn


@dataclass(slots=True)
class Observed:
    """Everything seen so far, in order."""

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
        """Releases after the starting model."""
        return [event for event in self.releases if event.action == "shipped" and event.previous is not None]

    def between(self, start: float, end: float) -> list[Rated]:
        """Rated turns that started in [start, end)."""
        return [each for each in self.rated if start <= each[0].started_at < end]


class RunObserver:
    """Follows one run. `look` reads new rows and lines."""

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
    """Acceptance per arm in equal windows from `start` to `end` (Unix seconds)."""
    return arms.curves((rated_turn(*each) for each in seen.between(start, end)), start, end)


def marks(seen: Observed, start: float) -> tuple[Mark, ...]:
    """Releases and rollbacks."""
    events = [*seen.shipped(), *(event for event in seen.releases if event.action == "rolled_back")]
    return tuple(
        Mark(t=max(0.0, event.at - start) / 60, label=f"v{event.policy.number}", action=event.action)
        for event in sorted(events, key=lambda event: event.at)
    )


def gates(seen: Observed, start: float) -> tuple[Gate, ...]:
    """Every look of the gate."""
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
    """Releases that the gate called better than the best before them."""
    better: dict[str, bool] = {}
    for event in seen.releases:
        if event.action == "evaluated":
            better[event.policy.hash] = bool(event.detail["report"].get("better", False))
    return [event for event in seen.shipped() if better.get(event.policy.hash, False)]


def resolution(seen: Observed) -> float | None:
    """The suite's smallest total margin, at the spread of the last look; None before the first look, or if it recorded none."""
    looks = [event.detail["report"] for event in seen.releases if event.action == "evaluated"]
    return looks[-1].get("smallest_margin") if looks else None


def deltas(seen: Observed) -> tuple[Delta, ...]:
    """The size of each published delta."""
    return tuple(
        Delta(version=f"v{line['number']}", bytes=line["bytes"], full_bytes=line["full_bytes"])
        for line in seen.published
        if line["form"] == "delta"
    )


def pauses(seen: Observed) -> tuple[Pause, ...]:
    """Swaps of the live slot, except the first load, for which nobody was waiting."""
    live = [each for each in seen.swaps if each["slot"] == "live"][1:]
    return tuple(Pause(version=f"v{each['number']}", seconds=each["pause_s"], streams=each["streams"]) for each in live)


def held_out(label: str, score: Estimate, items: int) -> HeldOut:
    """One version's score."""
    return HeldOut(label=label, mean=score.mean, lower=max(0.0, score.lower), upper=min(1.0, score.upper), items=items)


def accounting_rows(found: Accounting) -> tuple[tuple[str, int], ...]:
    """Where every turn ended."""
    held = [(f"held back: {reason}", count) for reason, count in found.held.items()]
    return (("served turns", found.ingested), ("trained on", found.trained), *held, ("still waiting", found.waiting))


def acceptance_rows(seen: Observed, start: float, end: float) -> list[tuple[str, str]]:
    """Acceptance per arm and their difference over the last third of the run, adjusted for prompts and as it is: label, value."""
    last = last_third(seen, start, end)
    rows = [
        (f"acceptance, {arm.value} arm, last third", f"{100 * point.acceptance:.1f}% of {point.turns}")
        for arm, point in sorted(by_arm(last).items(), key=lambda pair: pair[0] is Arm.CONTROL)
    ]
    adjusted = _difference(live_minus_control(last, before_releases(seen, start, end)))
    return [
        *rows,
        ("live minus control, last third", f"{adjusted}, less each prompt's acceptance before the first release"),
        ("the same, unadjusted", _difference(live_minus_control(last))),
    ]


def _difference(gap: Estimate) -> str:
    return f"{100 * gap.mean:+.1f} pp, 95% [{100 * gap.lower:+.1f}, {100 * gap.upper:+.1f}], users as clusters"


def before_releases(seen: Observed, start: float, end: float) -> list[Rated]:
    """The rated turns that ended before the first release, when both arms had the same version, and not in the last third of the run."""
    first = min((event.at for event in seen.shipped()), default=end)
    last = seen.between(start, end - (end - start) / 3)
    return [each for each in last if each[0].ended_at < first]


def last_third(seen: Observed, start: float, end: float) -> list[Rated]:
    """The rated turns of the run's last third, which the demo's result is about."""
    return seen.between(end - (end - start) / 3, end)


def mismatch_rows(seen: Observed) -> list[tuple[str, str]]:
    """The engine's mode, and the distance between the trainer's log-probabilities and those at sampling time, over all steps: label, value.

    If the engine keeps the trainer's contract, the only group is the tokens sampled with the trainer's own weights. Otherwise all tokens
    are foreign, and those of them sampled with the trainer's own weights show the effect of the different arithmetic alone.
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
    seen: Observed, arms: Sequence[tuple[str, str]], extra: Sequence[tuple[str, str]]
) -> tuple[tuple[str, str], ...]:
    """The table that ends the demo: label, value. `arms` are the rows about the arms, as the scenario measures them."""
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
    return (*arms, *rows.items(), *extra)


# ---------------------------------------------------------------- from a simulated world to users


NOTES = (
    "The users are simulated: programs that run the suggested body against hidden tests, with 5% wrong labels.",
    "They ask for functions of the families that the world trained on; the held-out families are neither trained on nor asked for.",
    "The control arm is the starting model without training in the world. Nothing was learned from users in this run.",
    "Success in the world is measured with seeds that neither training, bar nor gate saw; intervals are 95%, tasks or users as clusters.",
)

_TOLD = ("evaluated", "blocked", "canary", "shipped", "better", "rolled_back")


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """When each part of the demo ended, in Unix seconds. Users worked from `judged` to `ended`."""

    began: float
    trained: float
    judged: float
    ended: float
    measured: float

    def told(self) -> str:
        """The minutes that each part took."""
        names = ("world", "bar and gate", "users", "last measurement")
        ends = (self.began, self.trained, self.judged, self.ended, self.measured)
        parts = [f"{name} {(end - start) / 60:.1f}" for name, start, end in zip(names, ends, ends[1:], strict=False)]
        return f"{', '.join(parts)}; {(self.measured - self.began) / 60:.1f} in all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """The first and the last model's scores on held-out tasks, with the same tasks and seeds for both."""

    before: Sequence[ItemScore]
    after: Sequence[ItemScore]

    def row(self) -> tuple[str, str]:
        _, differences_I, draws = paired_items(self.after, self.before)
        gain = mean_difference(differences_I, lower_alpha=0.025, upper_alpha=0.025)
        before, after = (100 * suite_mean(scores).mean for scores in (self.before, self.after))
        told = f"{before:.1f}% -> {after:.1f}%, {100 * gain.mean:+.1f} pp, 95% [{100 * gain.lower:+.1f}, {100 * gain.upper:+.1f}]"
        return "solved in the world, held-out tasks", f"{told}, {len(differences_I)} tasks x {draws}"

    def bars(self, candidate: PolicyVersion) -> tuple[HeldOut, HeldOut]:
        items = len({score.item for score in self.before})
        return (
            held_out("held-out tasks, base", suite_mean(self.before), items),
            held_out(f"held-out tasks, v{candidate.number}", suite_mean(self.after), items),
        )


def worlds_report(
    seen: Observed,
    candidate: PolicyVersion,
    phases: Phases,
    solved: Solved,
    *,
    measured: Sequence[Mapping[str, Any]],
    found: Accounting,
    asked: tuple[int, int],
    seed: int,
    model: str,
) -> RunReport:
    """The demo's page. `measured` are the rollout worker's progress lines; `asked` counts the users' requests and the failed ones."""
    rows = [
        solved.row(),
        ("held-out tasks while it trained", _course(measured)),
        ("steps in the world", str(len(seen.steps))),
        *_way(seen, candidate, phases),
        *_arms(seen, candidate, phases),
        ("user requests, failed", f"{asked[0]}, {asked[1]}"),
        ("minutes", phases.told()),
        ("turns accounted for", "all, once each" if found.balanced else f"NOT BALANCED: {found}"),
    ]
    users = {turn.person for turn, _ in seen.rated}
    served = asked[0] > 0
    return RunReport(
        title="From a simulated world to simulated users",
        seed=seed,
        minutes=round((phases.measured - phases.began) / 60, 1),
        model=model,
        users=len(users),
        curves=curves(seen, phases.judged, phases.ended) if served else (),
        releases=marks(seen, phases.judged),
        gates=gates(seen, phases.judged),
        deltas=deltas(seen),
        pauses=pauses(seen),
        held_out=solved.bars(candidate),
        accounting=accounting_rows(found),
        summary=tuple(rows),
        notes=NOTES,
    )


def last_word(seen: Observed, candidate: PolicyVersion) -> str:
    """The headline of the candidate's last release event."""
    reasons = [event.reason for event in seen.releases if event.policy == candidate]
    return headline(reasons[-1]) if reasons else "it was not judged"


def went_live(seen: Observed, candidate: PolicyVersion) -> ReleaseEvent | None:
    """The ledger line that shipped the candidate, or None."""
    return next((event for event in seen.shipped() if event.policy == candidate), None)


def beside_control(seen: Observed, candidate: PolicyVersion, start: float, end: float) -> list[Rated]:
    """The turns to compare, started in [start, end): those of the live arm that only the candidate answered, and all of the control arm."""

    def counts(each: Rated) -> bool:
        turn, _ = each
        return turn.arm is Arm.CONTROL or (
            turn.arm is Arm.LIVE and {span.policy.hash for span in turn.spans} == {candidate.hash}
        )

    return [each for each in seen.between(start, end) if counts(each)]


def _course(lines: Sequence[Mapping[str, Any]]) -> str:
    shares = [
        f"{100 * line['solved'] / line['of']:.0f}%"
        for line in lines
        if line["kind"] == "measured" and line["split"] == "held_out" and line["of"]
    ]
    return ", ".join(shares) or "never measured"


def _way(seen: Observed, candidate: PolicyVersion, phases: Phases) -> list[tuple[str, str]]:
    """The candidate's way to release: bars, verdict, canary."""
    rows: list[tuple[str, str]] = []
    for event in seen.releases:
        if event.policy != candidate:
            continue
        for bar in event.detail.get("report", {}).get("bars", ()) if event.action == "evaluated" else ():
            told = f"99% bound {100 * bar['bound']:.1f}% of {100 * bar['wanted']:.1f}% wanted, {bar['n']} items"
            rows.append(
                (f"bar on {bar['axis']} of {bar['suite']}", f"{'cleared' if bar['holds'] else 'MISSED'}: {told}")
            )
        if event.action in _TOLD:
            # the deciding part; the gate's words before it have their own row
            why = event.reason.rpartition("; canary ")[2]
            told = f"at {(event.at - phases.began) / 60:.1f} min: {headline(why)}"
            rows.append((f"v{candidate.number} {event.action.replace('_', ' ')}", told))
    return rows


def _arms(seen: Observed, candidate: PolicyVersion, phases: Phases) -> list[tuple[str, str]]:
    """Acceptance before and after the candidate went live."""
    live = went_live(seen, candidate)
    until = phases.ended if live is None else live.at
    rows = [
        (f"acceptance before it was live, {name}", told)
        for name, told in _shares(seen.between(phases.judged, until), {})
    ]
    if live is None:
        return [*rows, ("live minus control", "it did not go live")]
    compared = beside_control(seen, candidate, live.at, phases.ended)
    names = {Arm.LIVE: "live arm, trained in the world", Arm.CONTROL: "control arm, not trained in it"}
    rows += [(f"acceptance, {name}", told) for name, told in _shares(compared, names)]
    return [*rows, ("live minus control", _difference(live_minus_control(compared)))]


def _shares(rated: Sequence[Rated], names: Mapping[Arm, str]) -> list[tuple[str, str]]:
    users = {arm: len({turn.person for turn, _ in rated if turn.arm is arm}) for arm in Arm}
    return [
        (
            names.get(arm, f"{arm.value} arm"),
            f"{100 * point.acceptance:.1f}% [{100 * point.lower:.1f}, {100 * point.upper:.1f}] of {point.turns}, {users[arm]} users",
        )
        for arm, point in sorted(by_arm(rated).items(), key=lambda pair: pair[0] is Arm.CONTROL)
    ]
