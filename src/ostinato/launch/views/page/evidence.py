"""What a line of the ledger carries besides its reason: looks of the gate, and whatever else, cut to what a person can read. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from ostinato.core.records import PolicyVersion, ReleaseEvent
from ostinato.web.page.sources import GateLook

_DEEP, _LONG, _MANY = 6, 400, 60
_RAW = frozenset({"evidence"})
"""Every single score, which a restarted controller needs and nobody reads."""


def gate_looks(events: Iterable[ReleaseEvent]) -> tuple[GateLook, ...]:
    """The gate's looks, oldest first. A report that is not whole is left out: an earlier or later version wrote it."""
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


def carried(event: ReleaseEvent) -> Mapping[str, Any]:
    """An event's details without the raw scores, no deeper, longer or more than a page can hold."""
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
