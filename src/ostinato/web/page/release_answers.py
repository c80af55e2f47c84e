"""Answers to four questions about a release, in sentences, for the page, the command line and the report. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.core.records import PolicyVersion
from ostinato.status import releases
from ostinato.web.page.templates import count, points, size

VERDICTS = {"SHIP": "not worse than the margin", "BLOCK": "did not pass", "EXTEND": "undecided"}
_ACCEPTED = "accepted"
_VOID_ODDS = 1000.0  # odds against the configured shares from which a trial is void, if the ledger does not say
_OF_LIVE = frozenset({"shipped", "better", "confirmed", "faded", "verified"})  # states of a version that was live
_DECISIONS = {"shipped": "Shipped", "blocked": "Refused", "rolled_back": "Rolled back"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseAnswer:
    """A question, its answer in a few words (`verdict`) and the evidence for it (`details`). `state` is good, wait or bad.

    Example: ``ReleaseAnswer(question="Is v17 better than v16?", verdict="not worse than 2 pp", state="wait", details=("...",))``
    """

    question: str
    verdict: str
    state: str
    details: tuple[str, ...]


def answers(found: releases.ReleaseDetail, run: str = "") -> tuple[ReleaseAnswer, ...]:
    """Return the answers: is it better, how sure is that, what changed, how is it rolled back. `run`: options that select the run."""
    return (_better(found), _certainty(found), _changed(found), _how_to_roll_back(found, f" {run}" if run else ""))


def sentence(line: releases.ReleaseLine) -> str:
    """Return the gate's finding about a version, in a few words."""
    if line.difference is None or line.lower is None or line.upper is None:
        return "no data: the gate has not looked at it"
    if line.lower > 0:
        return "better"
    if line.upper < 0:
        return "worse"
    if line.verdict == "SHIP" and line.margin is not None:
        return f"not worse than {100 * line.margin:g} pp"
    return VERDICTS.get(line.verdict, "undecided")


def interval(look: releases.MeasureLook | releases.ReleaseLine | releases.GateLook) -> str:
    """Return a difference with its bounds. Example: ``+2.1 pp [+0.4, +3.8]``; "no feedback yet" without one."""
    if look.difference is None:
        return "no feedback yet"
    return f"{points(look.difference)} pp [{points(look.lower)}, {points(look.upper)}]"


# ---------------------------------------------------------------- is it better?


def _better(found: releases.ReleaseDetail) -> ReleaseAnswer:
    against, line = found.evidence.against, found.line
    question = f"Is {_name(line.policy)} better than {'what was live' if against is None else _name(against)}?"
    last = found.evidence.trial[-1] if found.evidence.trial else None
    if last is not None:
        verdict, state = _trial_verdict(last, found.evidence)
        details = [f"{each.name} is worse: {_own_units(each)}." for each in last.measures if each.finding == "worse"]
        details += [] if line.difference is None else [f"On the suite: {sentence(line)}, {interval(line)}."]
        return ReleaseAnswer(question=question, verdict=verdict, state=state, details=tuple(details))
    if line.difference is None and against is None:
        return ReleaseAnswer(question=question, verdict="it is the first release", state="wait", details=())
    if line.difference is None:
        tried = found.evidence.rules is not None
        details = (
            _no_trial(found.evidence)
            if tried
            else "It was not judged on a suite (evaluate.suite), and it was not tried on users first.",
        )
        return ReleaseAnswer(question=question, verdict="unknown: it was never compared", state="wait", details=details)
    finding = sentence(line)
    state = {"better": "good", "worse": "bad", "did not pass": "bad"}.get(finding, "wait")
    if line.verdict == "BLOCK":  # for another reason than this difference, such as a quality bar
        finding, state = f"{finding}, and it did not pass" if finding == "better" else finding, "bad"
    verdict = f"on the suite {finding}: {interval(line)}"
    details = (_no_trial(found.evidence), *_accepted(found.evidence.rates))
    return ReleaseAnswer(question=question, verdict=verdict, state=state, details=details)


def _trial_verdict(look: releases.TrialLook, evidence: releases.ReleaseEvidence) -> tuple[str, str]:
    """Return the verdict of the trial's last interim analysis, and its state."""
    margin = "the margin" if evidence.rules is None else f"{100 * evidence.rules.margin:g} pp"
    said, state = {
        "better": ("better (provisional)", "good"),
        "better, confirmed": ("better, and again in the days after that finding", "good"),
        "better at first": ("better at first, but not in the days after that finding", "wait"),
        "not worse": (f"not worse than {margin}", "good"),
        "worse": ("worse", "bad"),
        "undecided": ("undecided", "wait"),
    }.get(look.finding, ("not known yet: too few people", "wait"))
    return f"in the trial with users {said}: {interval(look.goal)} in the {look.goal.name}", state


def _own_units(measure: releases.MeasureLook) -> str:
    """Return a metric's difference in its own units. Example: ``+0.12 [+0.03, +0.4], lower is better``"""
    bounds = ", ".join("unknown" if end is None else f"{end:+.3g}" for end in (measure.lower, measure.upper))
    known = "unknown" if measure.difference is None else f"{measure.difference:+.3g}"
    return f"{known} [{bounds}], {measure.better} is better"


def _no_trial(evidence: releases.ReleaseEvidence) -> str:
    if evidence.rules is None:
        return "It was not tried on a share of the users (release.canary is off): the suite is the only evidence."
    return "The ledger has no look at users yet."


def _accepted(rates: tuple[releases.RateShift, ...]) -> tuple[str, ...]:
    rate = next((each for each in rates if each.name == _ACCEPTED), None)
    if rate is None or rate.before is None or rate.after is None or rate.lower is None:
        return ()
    moved = f"{points(rate.after - rate.before)} pp [{points(rate.lower)}, {points(rate.upper)}]"
    shares = f"{100 * rate.after:.1f}% of its newest rated turns and {100 * rate.before:.1f}% before"
    return (f"People accepted {shares}, {moved}; measured at different times, so other things may have changed, too.",)


# ---------------------------------------------------------------- how sure is that?


def _certainty(found: releases.ReleaseDetail) -> ReleaseAnswer:
    evidence, looks = found.evidence, found.looks
    details: list[str] = []
    verdict, state = "no evidence yet", "wait"
    if looks:
        last = looks[-1]
        verdict, state = f"{last.items} items × {last.draws} draws of the suite, no users", "wait"  # noqa: RUF001
        details.append(
            f"Suite {last.suite}: {last.items} items × {last.draws} draws, look {len(looks)}; all looks share one error budget. "  # noqa: RUF001
            f"An equally good candidate passes such a look with a chance of {100 * last.power:.0f}%."
        )
        if evidence.gate_alpha is not None:
            details.append(
                f"A candidate that is worse than live by the margin of {100 * last.margin:g} pp passes with a chance of at most "
                f"{100 * evidence.gate_alpha:g}%, all looks together."
            )
    details += _comparisons(evidence)
    if evidence.trial:
        verdict, state, said = _trial_certainty(evidence, evidence.trial[-1])
        details = [*said, *details]
    return ReleaseAnswer(question="How sure is that?", verdict=verdict, state=state, details=tuple(details))


def _trial_certainty(evidence: releases.ReleaseEvidence, last: releases.TrialLook) -> tuple[str, str, list[str]]:
    """Return how sure the trial's last interim analysis is: verdict, state and details."""
    people = "no" if not last.goal.people else count(last.goal.people)
    verdict = f"{people} effective users on the smaller side, {count(last.turns)} turns"
    state = "wait" if last.finding == "undecided" or not last.goal.people else "good"
    details: list[str] = []
    if evidence.rules is not None:
        sure = f"{100 * (1 - evidence.rules.alpha):g}%"
        details.append(f"Each bound holds at all looks together with {sure} confidence, however many looks there are.")
    if last.sees is not None:
        details.append(f"The smallest loss that this many people could reveal by now: {100 * last.sees:.1f} pp.")
    if evidence.dealt is not None:
        said, sound = dealt_as_set(evidence.dealt, evidence.rules)
        details.append(said)
        state = state if sound else "bad"
    return verdict, state, details


def dealt_as_set(dealt: releases.Dealt, rules: releases.TrialRules | None) -> tuple[str, bool]:
    """Return a sentence on the sample ratio, and False if it contradicts the configured shares, so that the trial is void."""
    counted = (
        f"{count(dealt.candidate)} people on the new side where {count(dealt.expected)} were expected, "
        f"{count(dealt.others)} on the other"
    )
    part = "" if dealt.whole else f" (the first {count(dealt.turns)} turns)"
    if dealt.odds >= (_VOID_ODDS if rules is None else rules.void_odds):
        return (
            f"VOID: people were not assigned in the configured shares: {counted}{part}; odds {dealt.odds:.3g} to 1 against them.",
            False,
        )
    return f"The assignment of people fits the configured shares: {counted}{part}.", True


def _comparisons(evidence: releases.ReleaseEvidence) -> list[str]:
    failed = [f"{each.against.value} on {each.suite}" for each in evidence.comparisons if not each.holds]
    below = [f"{bar.suite} {bar.axis}" for bar in evidence.bars if not bar.holds]
    said: list[str] = []
    if evidence.comparisons:
        held = "a loss of each margin is ruled out" if not failed else f"not ruled out against {', '.join(failed)}"
        said.append(f"Against live, the best release and the anchor ({len(evidence.comparisons)} comparisons): {held}.")
    if evidence.bars:
        cleared = "all cleared" if not below else f"not cleared: {', '.join(below)}"
        said.append(f"Quality bars, {len(evidence.bars)}: {cleared}.")
    return said


# ---------------------------------------------------------------- what changed?


def _changed(found: releases.ReleaseDetail) -> ReleaseAnswer:
    evidence = found.evidence
    parts: list[str] = []
    if evidence.steps is not None:
        learned = "" if evidence.turns is None else f" on {_counted(evidence.turns, 'turn')}"
        parts.append(f"{_counted(evidence.steps, 'optimizer step')}{learned}")
    if evidence.weights is not None:
        sent = evidence.weights
        parts.append(
            f"{size(sent.bytes)} of {size(sent.full_bytes)} of weights sent in {_counted(sent.versions, 'version')}"
        )
    moved = [rate for rate in evidence.rates if rate.moved and rate.name != _ACCEPTED]
    details = [_moved(rate) for rate in moved]
    judged = sum(rate.lower is not None for rate in evidence.rates)
    if judged and not moved:
        details.append(f"None of {_counted(judged, 'behaviour rate')} moved beyond its bounds (95%, all together).")
    elif not judged:
        details.append("Behaviour: too few people on both versions to say.")
    harmful = any(rate.harmful for rate in moved)
    if moved:
        parts.insert(0, f"{', '.join(rate.name for rate in moved)} moved")
    verdict = "; ".join(parts) or "nothing is recorded"
    return ReleaseAnswer(
        question="What changed?", verdict=verdict, state="bad" if harmful else "good", details=tuple(details)
    )


def _moved(rate: releases.RateShift) -> str:
    assert rate.before is not None
    assert rate.after is not None
    how = "up" if rate.after > rate.before else "down"
    watched = "; a change in this direction is watched as harm" if rate.harmful else ""
    return f"{rate.name} is {how}: {100 * rate.before:.1f}% to {100 * rate.after:.1f}% ({rate.means}){watched}."


# ---------------------------------------------------------------- how is it rolled back?


def _how_to_roll_back(found: releases.ReleaseDetail, run: str) -> ReleaseAnswer:
    policy, previous = found.line.policy, found.previous
    decided = _decided(found)
    question = "How do I roll it back?"
    if found.line.live and previous is not None:
        verdict = f'ostinato rollback{run} --reason "..." makes {_name(previous)} live again'
        details = (
            f"Engines follow within seconds, no stream is dropped; {_name(policy)} never ships again by itself.",
            *decided,
        )
        return ReleaseAnswer(question=question, verdict=verdict, state="good", details=details)
    if found.line.live:
        return ReleaseAnswer(
            question=question, verdict="there is no earlier release to go back to", state="wait", details=decided
        )
    if found.awaits:
        approve, refuse = (
            f"ostinato approve {_name(policy)}{run}",
            f'ostinato refuse {_name(policy)}{run} --reason "..."',
        )
        verdict = f"{approve} ships it; {refuse} blocks it"
        why = next((event.reason for event, _ in found.events if event.action == "awaits_approval"), "")
        details = (f"It has passed and waits for a person: {why or 'release.approval is manual'}",)
        return ReleaseAnswer(question="How is it decided?", verdict=verdict, state="wait", details=details)
    return _not_live(found, run, decided)


def _not_live(found: releases.ReleaseDetail, run: str, decided: tuple[str, ...]) -> ReleaseAnswer:
    """Return why a version that does not wait for approval is not live, and how to ship it nevertheless."""
    line, live = found.line, found.live
    ships = f'ostinato ship {_name(line.policy)}{run} --reason "..." ships it without a check by the gate.'
    way = ships if found.kept else "Its weights are not in the store any more, so it cannot be shipped."
    now = f"{'Nothing' if live is None else _name(live)} is live, and there is nothing to roll back."
    if line.state in ("blocked", "rolled_back"):
        question = "Why did it not ship?" if line.state == "blocked" else "Why is it not live any more?"
        why = decided[0] if decided else line.reason
        return ReleaseAnswer(question=question, verdict=why, state="bad", details=(now, way))
    if line.state in _OF_LIVE:
        verdict = "it was live; another release has replaced it"
        return ReleaseAnswer(
            question="Why is it not live any more?", verdict=verdict, state="wait", details=(*decided, now, way)
        )
    holds = (
        "What holds back a version that has passed stands in `ostinato status`: an alarm, if release.monitors.pauses is set, or a "
        "pause after a rollback. A newer candidate may also have overtaken it."
    )
    verdict = f"nothing has been decided: its last line says {line.state.replace('_', ' ')}"
    return ReleaseAnswer(
        question="Why is it not live?", verdict=verdict, state="wait", details=(*decided, holds, now, way)
    )


def _decided(found: releases.ReleaseDetail) -> tuple[str, ...]:
    """Return a sentence on the last decision about the release, its actor and its reason; empty if there is none."""
    for event, detail in found.events:
        if event.action in _DECISIONS:
            actor = f" by {detail['actor']}" if detail.get("actor") else " by the release worker"
            where = f", to {_name(event.policy)}" if event.action == "rolled_back" else ""
            return (f"{_DECISIONS[event.action]}{actor}{where}: {event.reason}",)
    return ()


def _name(policy: PolicyVersion) -> str:
    return f"v{policy.number}"


def _counted(number: int, noun: str) -> str:
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"
