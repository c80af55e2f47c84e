"""What the page shows of the weight store and of who follows it. Times are Unix seconds, sizes are bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ostinato.core.records import PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedLine:
    """One publication: what it sent, of how much, and how long it took."""

    number: int
    hash: str
    form: str
    bytes: int
    full_bytes: int
    changed: float | None
    seconds: float
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapLine:
    """One hot swap of a slot: the time in which no token could be made, and the streams that went on."""

    slot: str
    number: int
    pause_s: float
    streams: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerNow:
    """What a slot of the gateway has loaded, and what its ref names. `lag_s`: from the ref's version to its load, or until now.

    Example: ``FollowerNow(slot="live", number=17, loaded_at=60.0, wanted=v17, lag_s=2.4, behind=False)``
    """

    slot: str
    number: int
    loaded_at: float
    wanted: PolicyVersion | None
    lag_s: float | None
    behind: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsNow:
    """The weight store: refs, the newest publications, swaps, who follows, sizes on disk."""

    refs: Mapping[str, PolicyVersion]
    published: tuple[PublishedLine, ...]
    swaps: tuple[SwapLine, ...]
    disk: Mapping[str, int]
    free: int
    followers: tuple[FollowerNow, ...] = ()
