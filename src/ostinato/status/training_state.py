"""The state of training and weights, from the progress lines of trainer and gateway: figures per step, publications, hot swaps, followers.

Times are Unix seconds, sizes are bytes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from ostinato.core.records import PolicyVersion
from ostinato.reward.accounting import Accounting
from ostinato.status.log_index import finite
from ostinato.status.progress_lines import Lines
from ostinato.status.releases import LedgerEvent
from ostinato.status.run_state import RunNow

# ---------------------------------------------------------------- weights


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedLine:
    """One publication: the bytes sent, the size of the full weights, and the time that it took."""

    number: int
    hash: str
    form: str
    bytes: int
    full_bytes: int
    seconds: float
    at: float
    changed: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapLine:
    """One hot swap of a slot: how long no token could be sampled, and how many streams continued."""

    slot: str
    number: int
    pause_s: float
    streams: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerNow:
    """A gateway slot's loaded version, and the one that its ref names. `lag_s`: time from when a version was wanted until it was loaded, or
    until now.
    """

    slot: str
    number: int
    loaded_at: float
    wanted: PolicyVersion | None
    lag_s: float | None
    behind: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsNow:
    """The weight store: refs, the newest publications, hot swaps, followers, sizes on disk."""

    refs: Mapping[str, PolicyVersion]
    published: tuple[PublishedLine, ...]
    swaps: tuple[SwapLine, ...]
    disk: Mapping[str, int]
    free: int
    followers: tuple[FollowerNow, ...] = ()


# ---------------------------------------------------------------- training steps


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeries:
    """One figure per optimizer step."""

    name: str
    title: str
    unit: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningNow:
    """The state of training: figures per step, refused batches, and why turns were held back. For `batch` and `every` see `RunNow`."""

    series: tuple[StepSeries, ...]
    steps: int
    marks: tuple[tuple[float, str], ...]
    refused: tuple[tuple[int, str, float], ...]
    accounts: Accounting
    batch: int
    every: bool = False


STEPS = 5_000
"""How many of the newest steps are kept in memory."""
SHOWN = 50

FIGURES: Mapping[str, tuple[str, str]] = {
    "reward_mean": ("Mean reward of the batch's turns", "reward"),
    "advantage_abs": ("Advantage, mean absolute value", "advantage"),
    "push_people": ("People's part of the gradient", "norm of the tokens' advantages"),
    "push_worlds": ("Worlds' part of the gradient", "norm of the tokens' advantages"),
    "on_policy": ("Tokens that the present policy sampled", "share of the batch"),
    "ess": ("Effective sample size", "share of the batch"),
    "kl_k1": ("KL from the reference release", "nats per token"),
    "anchor_kl": ("KL from the anchor", "nats per token"),
    "drift_k3": ("Trainer against engine, k3", "nats per token"),
    "masked_share": ("Masked tokens", "share"),
    "entropy_proxy": ("Entropy, estimated from the sampled tokens", "nats per token"),
    "grad_norm": ("Gradient norm before clipping", "norm"),
    "signal": ("Signal in the squared gradient", "share"),
    "loss": ("Loss", "nats"),
    "tokens_per_second": ("Training throughput", "tokens a second"),
    "seconds": ("Duration of a step", "seconds"),
    "learning_rate": ("Learning rate", "per step"),
}
"""The figures to draw if the progress lines have them, in this order, with title and unit."""


L = TypeVar("L", PublishedLine, SwapLine)


class TrainLines:
    """The newest lines of two progress files. Its methods may run on threads; call `look` first."""

    def __init__(self, train: Path, serve: Path) -> None:
        self._files = [Lines(train), Lines(serve)]
        self._lock = threading.Lock()
        self._steps: deque[dict[str, Any]] = deque(maxlen=STEPS)
        self._published: deque[dict[str, Any]] = deque(maxlen=SHOWN)
        self._swaps: deque[dict[str, Any]] = deque(maxlen=SHOWN)
        self._refused: deque[dict[str, Any]] = deque(maxlen=SHOWN)

    def look(self) -> TrainLines:
        kept = {"step": self._steps, "published": self._published, "swapped": self._swaps, "refused": self._refused}
        with self._lock:
            for lines in self._files:
                for line in lines.new():
                    if line["kind"] in kept:
                        kept[line["kind"]].append(line)
        return self

    def learning(self, events: Iterable[LedgerEvent], run: RunNow) -> LearningNow:
        """Return the figures per step. A step that was repeated after a kill counts once, with its last values."""
        steps = {int(line["step"]): line for line in list(self._steps) if isinstance(line.get("step"), int)}
        series = [
            StepSeries(name=name, title=title, unit=unit, points=points)
            for name, (title, unit) in FIGURES.items()
            if (points := _points(steps, name))
        ]
        marks = tuple(
            (float(event.policy.number), f"{'↩ ' if event.action == 'rolled_back' else ''}v{event.policy.number}")
            for event in events
            if event.policy.number in steps
        )
        return LearningNow(
            series=tuple(series),
            steps=len(steps),
            marks=marks,
            refused=tuple((int(line["step"]), str(line["why"]), float(line["at"])) for line in [*self._refused][::-1]),
            accounts=run.accounts,
            batch=run.batch,
            every=run.every,
        )

    def published(self) -> tuple[PublishedLine, ...]:
        return tuple(_typed(PublishedLine, line) for line in [*self._published][::-1])

    def swaps(self) -> tuple[SwapLine, ...]:
        return tuple(_typed(SwapLine, line) for line in [*self._swaps][::-1])


def followers(
    swaps: Iterable[SwapLine],
    refs: Mapping[str, PolicyVersion],
    published: Iterable[PublishedLine],
    released: Iterable[LedgerEvent],
    now: float,
) -> tuple[FollowerNow, ...]:
    """Return each slot's last loaded version, beside its ref's. A version is wanted from its publication on; in the live slot from its
    release on. `swaps`, `published`: newest first.
    """
    made = {line.number: line.at for line in reversed([*published])}  # of a number that was published again, the newest
    shipped = [(event.policy.number, event.at) for event in released]
    newest: dict[str, SwapLine] = {}
    for line in swaps:
        newest.setdefault(line.slot, line)
    found: list[FollowerNow] = []
    for slot, line in sorted(newest.items()):
        wanted = refs.get(slot)
        behind = wanted is not None and wanted.number != line.number
        number, until = (wanted.number, now) if behind and wanted is not None else (line.number, line.at)
        moves = [at for each, at in shipped if each == number and at <= until] if slot == "live" else []
        since = max(moves, default=made.get(number))
        lag_s, at = None if since is None else max(0.0, until - since), line.at
        each = FollowerNow(slot=slot, number=line.number, loaded_at=at, wanted=wanted, lag_s=lag_s, behind=behind)
        found.append(each)
    return tuple(found)


def _typed(kind: type[L], line: Mapping[str, Any]) -> L:
    return kind(**{each.name: line[each.name] for each in fields(kind) if each.name in line})


def _points(steps: Mapping[int, Mapping[str, Any]], name: str) -> tuple[tuple[float, float], ...]:
    return tuple(
        (float(step), float(line[name])) for step, line in sorted(steps.items()) if finite(line.get(name)) is not None
    )
