"""The report of `ostinato demo worlds`: success in the world before and after training, then users' acceptance compared with the base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ostinato.core.records import Arm, PolicyVersion, ReleaseEvent
from ostinato.core.report import ItemScore, headline
from ostinato.evaluate.acceptance import Rated, by_arm, live_minus_control
from ostinato.evaluate.statistics import mean_difference, paired_items, suite_mean
from ostinato.reward.accounting import Accounting
from ostinato.status import observed_run
from ostinato.status.run_report import HeldOut, RunReport

NOTES = (
    "The users are simulated: programs that run the suggested body against hidden tests, with 5% wrong labels.",
    "They ask for functions of the families that the world trained on; the held-out families are neither trained on nor asked for.",
    "The control arm is the starting model without training in the world. Nothing was learned from users in this run.",
    "Success in the world is measured with seeds that neither training, bar nor gate saw; intervals are 95%, tasks or users as clusters.",
)

_REPORTED = ("evaluated", "blocked", "canary", "shipped", "better", "rolled_back")


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """When each part of the demo ended, in Unix seconds. Users were served from `judged` to `ended`."""

    began: float
    trained: float
    judged: float
    ended: float
    measured: float

    def told(self) -> str:
        """Describe how many minutes each part took."""
        names = ("world", "bar and gate", "users", "last measurement")
        ends = (self.began, self.trained, self.judged, self.ended, self.measured)
        parts = [f"{name} {(end - start) / 60:.1f}" for name, start, end in zip(names, ends, ends[1:], strict=False)]
        return f"{', '.join(parts)}; {(self.measured - self.began) / 60:.1f} in all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """The base model's and the candidate's scores on held-out tasks, with the same tasks and seeds for both."""

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
            observed_run.held_out("held-out tasks, base", suite_mean(self.before), items),
            observed_run.held_out(f"held-out tasks, v{candidate.number}", suite_mean(self.after), items),
        )


def worlds_report(
    seen: observed_run.Observed,
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
    """Return the demo's report. `measured`: the rollout worker's progress lines. `asked`: the users' requests, and the failed ones."""
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
        curves=observed_run.curves(seen, phases.judged, phases.ended) if served else (),
        releases=observed_run.marks(seen, phases.judged),
        gates=observed_run.gates(seen, phases.judged),
        deltas=observed_run.deltas(seen),
        pauses=observed_run.pauses(seen),
        held_out=solved.bars(candidate),
        accounting=observed_run.accounting_rows(found),
        summary=tuple(rows),
        notes=NOTES,
    )


def last_word(seen: observed_run.Observed, candidate: PolicyVersion) -> str:
    """Return the headline of the candidate's last release event."""
    reasons = [event.reason for event in seen.releases if event.policy == candidate]
    return headline(reasons[-1]) if reasons else "it was not judged"


def went_live(seen: observed_run.Observed, candidate: PolicyVersion) -> ReleaseEvent | None:
    """Return the ledger event that shipped the candidate; None if there is none."""
    return next((event for event in seen.shipped() if event.policy == candidate), None)


def beside_control(seen: observed_run.Observed, candidate: PolicyVersion, start: float, end: float) -> list[Rated]:
    """Return the turns to compare, started in [start, end): of the live arm those that the candidate alone answered, and all of control."""

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


def _way(seen: observed_run.Observed, candidate: PolicyVersion, phases: Phases) -> list[tuple[str, str]]:
    """Return the rows about the candidate's way to release: bars, verdict, canary."""
    rows: list[tuple[str, str]] = []
    for event in seen.releases:
        if event.policy != candidate:
            continue
        for bar in event.detail.get("report", {}).get("bars", ()) if event.action == "evaluated" else ():
            told = f"99% bound {100 * bar['bound']:.1f}% of {100 * bar['wanted']:.1f}% wanted, {bar['n']} items"
            rows.append(
                (f"bar on {bar['axis']} of {bar['suite']}", f"{'cleared' if bar['holds'] else 'MISSED'}: {told}")
            )
        if event.action in _REPORTED:
            # only the deciding part, because the gate's words before it have a row of their own
            why = event.reason.rpartition("; canary ")[2]
            told = f"at {(event.at - phases.began) / 60:.1f} min: {headline(why)}"
            rows.append((f"v{candidate.number} {event.action.replace('_', ' ')}", told))
    return rows


def _arms(seen: observed_run.Observed, candidate: PolicyVersion, phases: Phases) -> list[tuple[str, str]]:
    """Return the rows about acceptance before and after the candidate went live."""
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
    return [*rows, ("live minus control", observed_run.difference(live_minus_control(compared)))]


def _shares(rated: Sequence[Rated], names: Mapping[Arm, str]) -> list[tuple[str, str]]:
    users = {arm: len({turn.person for turn, _ in rated if turn.arm is arm}) for arm in Arm}
    return [
        (
            names.get(arm, f"{arm.value} arm"),
            f"{100 * point.acceptance:.1f}% [{100 * point.lower:.1f}, {100 * point.upper:.1f}] of {point.turns}, {users[arm]} users",
        )
        for arm, point in sorted(by_arm(rated).items(), key=lambda pair: pair[0] is Arm.CONTROL)
    ]
