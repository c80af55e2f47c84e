"""The release controller's state beyond its ledger lines, in sentences: what waits for approval, what this traffic can carry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ostinato.core.durations import ago
from ostinato.release.config import ReleaseConfig
from ostinato.release.ledger import Proposal, State
from ostinato.release.pace import WEEKS, brake


def releasing(state: State, rules: ReleaseConfig, lines: Sequence[Mapping[str, Any]], now: float) -> list[str]:
    """The sentences; a candidate that waits for a person comes first. `lines` are the release worker's progress lines."""
    said = [] if state.proposal is None else [_waits(state.proposal, now)]
    held = brake(state.rollbacks, cooldown_s=rules.cooldown_s, a_day=rules.rollbacks_a_day, now=now)
    if held is not None and held.until is not None:
        said.append(f"{held.reason}: {ago(held.until - now)} to go")
    return said + carries(newest_pace(lines), rules)


def newest_pace(lines: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The newest pace line, with the fields of `release.pace.budget.Pace`; None if there is none."""
    return next((line for line in reversed(lines) if line["kind"] == "pace"), None)


def carries(pace: Mapping[str, Any] | None, rules: ReleaseConfig) -> list[str]:
    """How many releases a week the traffic can verify, and what the last weeks' decisions may have got wrong."""
    if pace is None:
        return []
    said = [] if pace["cadence"] is None or not pace["traffic"]["turns"] else [_cadence(pace, rules)]
    spent = pace["spent"]
    if pace["tried"] and spent["trials"]:
        said.append(
            f"of {spent['trials']} trials in {WEEKS} weeks at most {spent['false_ships']:.2f} are expected to have shipped a loss of the "
            f"margin; of comparisons of harmless versions at most {spent['false_stops']:.2f} are expected to have ended as harmful "
            f"(release.trial.false_stops allows {spent['stops_allowed']:g} at release.trial.trials_a_week)"
        )
    elif not pace["tried"] and spent["verdicts"]:
        said.append(
            f"of {spent['verdicts']} verdicts of the gate in {WEEKS} weeks at most {spent['false_ships']:.2f} are expected to have passed "
            "a candidate that loses the margin against live"
        )
    if spent.get("false_rollbacks"):  # lines of earlier versions lack it
        said.append(
            f"of harmless releases at most {spent['false_rollbacks']:.2f} are expected to have been rolled back in {WEEKS} weeks "
            "by the guard or by the comparison with the best release"
        )
    return said


def releasing_json(state: State, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The same for scripts. `awaits_approval` is null if nothing waits; `approved_by` is set once approved, until the candidate is live."""
    proposal, pace = state.proposal, newest_pace(lines)
    return {
        "awaits_approval": proposal
        and {
            "number": proposal.candidate.number,
            "hash": proposal.candidate.hash,
            "against": proposal.against.number,
            "reason": proposal.reason,
            "since": proposal.at,
            "approved_by": proposal.actor,
        },
        "pace": pace and {name: value for name, value in pace.items() if name != "kind"},
    }


def _waits(proposal: Proposal, now: float) -> str:
    said = f"v{proposal.candidate.number} has passed and waits for approval since {ago(now - proposal.at)}"
    if proposal.actor is not None:
        return f"{said}; {proposal.actor} approved it, and the release worker is about to ship it"
    return f"{said} (`ostinato approve` ships it, `ostinato refuse` blocks it): {proposal.reason}"


def _cadence(pace: Mapping[str, Any], rules: ReleaseConfig) -> str:
    found, traffic = pace["cadence"], pace["traffic"]
    use, margin = f"{traffic['people']:,} people with {traffic['turns']:,} rated turns a day", 100 * found["margin"]
    off = "" if pace["tried"] else "; trials are off (release.canary), so the suite alone decides"
    if found["trial_s"] is None:
        return (
            f"{use} are too few for trials: in {ago(rules.trial.limit_s)} they rule out no loss below {100 * found['sees']:.1f} pp, and "
            f"release.trial.margin is {margin:.1f}{off}"
        )
    if found["measured"]:
        why = f"the last {found['measured']} trials that passed took {ago(found['trial_s'])} each (median)"
    else:
        why = f"a trial takes about {ago(found['trial_s'])} to rule out a loss of {margin:.1f} pp"
    return f"{use} carry about {found['a_week']:.1f} verified releases a week: {why}; candidates beyond that are skipped{off}"
