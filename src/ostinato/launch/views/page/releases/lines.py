"""The details of a ledger line beside its reason: looks of the gate, looks at users, and the rest cut to a readable size. Pure.

An earlier or later version may have written a line: incomplete details are left out and never raise an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, cast

from ostinato.core.notices import Alarm
from ostinato.core.records import PolicyVersion, ReleaseEvent
from ostinato.core.report import BarResult, Comparison, Incumbent
from ostinato.web.page.release_evidence import MeasureLook, TrialLook
from ostinato.web.page.sources import GateLook

_DEEP, _LONG, _MANY = 6, 400, 60
_RAW = frozenset({"evidence", "salt"})
"""Left out: every single score, which only a restarted controller needs, and the salt by which users are dealt to arms."""


def gate_looks(events: Iterable[ReleaseEvent]) -> tuple[GateLook, ...]:
    """The gate's looks, oldest first. An incomplete report, written by an earlier or later version, is left out."""
    found: list[GateLook] = []
    for event in events:
        report = event.detail.get("report")
        if event.action == "evaluated" and isinstance(report, Mapping) and event.previous is not None:
            look = _look(event, event.previous, cast("Mapping[str, Any]", report))
            found += [] if look is None else [look]
    return tuple(sorted(found, key=lambda look: look.at))


def _look(event: ReleaseEvent, against: PolicyVersion, report: Mapping[str, Any]) -> GateLook | None:
    try:
        return GateLook(
            at=event.at,
            against=against,
            suite=str(report["suite"]),
            items=int(report["items"]),
            draws=int(report["draws"]),
            candidate=float(report["candidate_mean"]),
            live=float(report["live_mean"]),
            difference=float(report["difference"]),
            lower=float(report["lower"]),
            upper=float(report["upper"]),
            margin=float(report["margin"]),
            power=float(report["power"]),
            verdict=str(report["verdict"]),
        )
    except (KeyError, TypeError, ValueError):
        return None


def last_report(events: Iterable[ReleaseEvent]) -> tuple[tuple[Comparison, ...], tuple[BarResult, ...]]:
    """The comparisons of the gate's newest look, and the quality bars that it judged."""
    evaluated = [event for event in events if event.action == "evaluated"]
    if not evaluated:
        return (), ()
    report = _mapping(max(evaluated, key=lambda event: event.at).detail.get("report"))
    comparisons = [_comparison(_mapping(each)) for each in _list(report.get("comparisons"))]
    bars = [_bar(_mapping(each)) for each in _list(report.get("bars"))]
    return tuple(each for each in comparisons if each), tuple(each for each in bars if each)


def _comparison(told: Mapping[str, Any]) -> Comparison | None:
    try:
        policy = PolicyVersion(number=int(told["policy"]["number"]), hash=str(told["policy"]["hash"]))
        known = {each.name: told[each.name] for each in fields(Comparison) if each.name not in ("policy", "against")}
        return Comparison(**known, policy=policy, against=Incumbent(told["against"]))
    except (KeyError, TypeError, ValueError):
        return None


def _bar(told: Mapping[str, Any]) -> BarResult | None:
    try:
        return BarResult(**{each.name: told[each.name] for each in fields(BarResult)})
    except (KeyError, TypeError):
        return None


GOAL = "share of good turns"
"""The metric of a reading that names none."""


def trial_looks(events: Iterable[ReleaseEvent], root: str) -> tuple[TrialLook, ...]:
    """The looks at users who tried this version, oldest first. A rollback's line is about the version that it took back."""
    found: list[TrialLook] = []
    lasting = ""
    for event in sorted(events, key=lambda event: event.at):
        reading = _mapping(event.detail.get("reading"))
        about = event.previous if event.action == "rolled_back" else event.policy
        if not reading or about is None or about.hash != root:
            continue
        lasting = event.action if event.action in _LASTING else lasting
        found.append(_trial_look(event, reading, lasting))
    return tuple(found)


def _trial_look(event: ReleaseEvent, reading: Mapping[str, Any], lasting: str) -> TrialLook:
    effect = _mapping(reading.get("effect"))
    measured = finite(effect.get("variance")) is not None
    goal = MeasureLook(
        name=str(reading.get("metric", GOAL))[:_LONG],
        role="goal",
        difference=finite(effect.get("difference")) if measured else None,
        lower=finite(reading.get("lower")),
        upper=finite(reading.get("upper")),
        people=finite(effect.get("people")),
    )
    measures = _measures(_mapping(reading.get("metrics")))
    harmed = any(each.role == "guardrail" and each.finding == "worse" for each in measures)
    return TrialLook(
        at=event.at,
        action=event.action,
        share=finite(event.detail.get("share")),
        goal=goal,
        turns=finite(effect.get("turns")) or 0.0,
        sees=finite(reading.get("sees")),
        finding="worse" if harmed else _finding(reading, lasting),
        reason=event.reason,
        measures=measures,
    )


_LASTING = {"better": "better", "confirmed": "better, confirmed", "faded": "better at first"}
"""The finding that holds from each ledger action on. Odds alone are not enough: a new version may please for a day."""


def _finding(reading: Mapping[str, Any], lasting: str) -> str:
    """The trial's conclusion. `lasting` is the last action, or "", about the candidate against the version that it replaced."""
    if not reading.get("enough"):
        return "too few people"
    if reading.get("worse"):
        return "worse"
    if lasting:
        return _LASTING[lasting]
    return "not worse" if reading.get("not_worse") else "undecided"


def _measures(told: Mapping[str, Any]) -> tuple[MeasureLook, ...]:
    found: list[MeasureLook] = []
    for name, each in list(told.items())[:_MANY]:
        one = _mapping(each)
        effect = _mapping(one.get("effect")) or one
        found.append(
            MeasureLook(
                name=name[:_LONG],
                role=str(one.get("role", ""))[:_LONG],
                difference=finite(effect.get("difference", effect.get("estimate"))),
                lower=finite(one.get("lower")),
                upper=finite(one.get("upper")),
                people=finite(effect.get("people", effect.get("n"))),
                better="lower" if one.get("direction") == "lower" else "higher",
                finding=_finding(one, "better" if one.get("better") else "") if one else "",
            )
        )
    return tuple(found)


def finite(value: object) -> float | None:
    """A number that can be drawn, or None."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(cast("float", value)) if known else None


def _mapping(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def _list(value: object) -> Sequence[Any]:
    return cast("Sequence[Any]", value) if isinstance(value, list | tuple) else ()


def carried(event: ReleaseEvent | Alarm) -> Mapping[str, Any]:
    """A row's details without the raw scores, cut in depth, length and number to what a page can hold."""
    return {str(name): _cut(value, 1) for name, value in list(event.detail.items())[:_MANY] if name not in _RAW}


def _cut(value: Any, depth: int) -> Any:
    if isinstance(value, Mapping):
        items = list(cast("Mapping[Any, Any]", value).items())
        if depth >= _DEEP:
            return f"{len(items)} entries"
        kept = {str(name)[:_LONG]: _cut(each, depth + 1) for name, each in items[:_MANY] if name not in _RAW}
        return kept if len(items) <= _MANY else {**kept, "…": f"{len(items) - _MANY} more"}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        listed = list(cast("Sequence[Any]", value))
        if depth >= _DEEP:
            return f"{len(listed)} entries"
        kept_items = [_cut(each, depth + 1) for each in listed[:_MANY]]
        return kept_items if len(listed) <= _MANY else [*kept_items, f"… {len(listed) - _MANY} more"]
    if value is None or isinstance(value, bool | int | float):
        return value
    text = str(value)
    return text if len(text) <= _LONG else text[:_LONG] + "…"
