"""What an evaluation found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ostinato.core.records import PolicyVersion


class Verdict(StrEnum):
    """The gate's answer. EXTEND means: not enough evidence yet, draw more."""

    SHIP = "SHIP"
    BLOCK = "BLOCK"
    EXTEND = "EXTEND"


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemScore:
    """One graded sample of one suite item: `score` in [0, 1]. Items are paired across policies by (item, draw)."""

    item: str
    draw: int
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Candidate against live on the same items. Differences are candidate minus live, in [-1, 1]."""

    suite: str
    suite_hash: str
    candidate: PolicyVersion
    live: PolicyVersion
    candidate_mean: float
    live_mean: float
    difference: float
    lower: float
    upper: float
    items: int
    draws: int
    margin: float
    power: float
    verdict: Verdict
    reason: str
