"""The page's data on the weight store and its followers. Times are Unix seconds, sizes are bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ostinato.core.records import PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedLine:
    """One publication: the bytes sent, the size of the full weights, and the time that it took."""

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
    """A gateway slot's loaded version, and the version that its ref names. `lag_s`: from when a version was wanted to its load, or to now.

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
    """The weight store: refs, the newest publications, swaps, followers, sizes on disk."""

    refs: Mapping[str, PolicyVersion]
    published: tuple[PublishedLine, ...]
    swaps: tuple[SwapLine, ...]
    disk: Mapping[str, int]
    free: int
    followers: tuple[FollowerNow, ...] = ()
