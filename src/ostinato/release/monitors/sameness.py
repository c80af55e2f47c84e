"""Sameness across users: whether answers to different people become more similar than those of control at the same time.

A policy that collapses to a few answers (mode collapse) can keep every rate in range and please every rater. The estimate is the expected
similarity of two answers to two people of one arm whose prompts begin alike: the Jaccard index of their sets of three-token runs. Live is
compared with control over the same time, whose people are assigned at random and so ask the same. Each person counts with one answer per
release, so pairs are of different people, and the mean over pairs is a U-statistic (Hoeffding 1948) whose variance the jackknife gives
(Arvesen 1969).

No text is kept. An answer is stored as a b-bit minwise hash of its runs (Broder 1997; Li and König 2010, arXiv 0908.4136): sixteen bytes.
Of two answers' bytes, the expected share that agrees is the Jaccard index plus one in 256 of the rest.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ostinato.core.notices import Alarm
from ostinato.core.records import Arm, ReleaseEvent, Turn
from ostinato.release.metrics.facts import tasks_of
from ostinato.release.monitors.active_alarms import GapAlarm
from ostinato.release.monitors.config import MonitorsConfig
from ostinato.release.monitors.proxy_gap import LEAST_PEOPLE, GapWatch, PersonCrowd, dealt_by_chance
from ostinato.release.trial.contrast import lower_bound, upper_bound

USERS_ALIKE = "users_alike"
"""Name of the alarm that answers to different people are more similar on live than on control."""

TOLERATED = 0.02
"""The tolerance for a higher similarity on live."""

MOST_PEOPLE = 2_000  # on each side
# least number of people on live and on control for reading a release by itself; one with fewer is read together with the next
_LEAST_READ = (100, LEAST_PEOPLE)
_LEAST = 10  # least number of people on either side for a group whose prompts begin alike
_READINGS = 20
_RUN, _HASHES, _LONGEST = 3, 16, 1_024
_ODD = np.array(
    [int.from_bytes(blake2b(bytes([k]), digest_size=8).digest()) | 1 for k in range(_RUN + _HASHES)], dtype=np.uint64
)

# ---------------------------------------------------------------- similarity


def answer_hash(ids: Sequence[int]) -> str:
    """Return the minwise hash of an answer's first 1,024 tokens, as 32 hexadecimal digits. An answer below three tokens is one run.

    Example: the share of equal bytes of two hashes is about the Jaccard index of the answers' three-token runs.
    """
    ids_T = np.array(ids[:_LONGEST], dtype=np.uint64)
    width = min(_RUN, ids_T.size)
    runs_N = np.zeros(ids_T.size - width + 1, dtype=np.uint64)
    for place in range(width):
        runs_N = (runs_N + ids_T[place : place + runs_N.size] + np.uint64(1)) * _ODD[place]
    runs_N ^= runs_N >> np.uint64(31)
    hashed_KN = _ODD[_RUN:, None] * runs_N
    hashed_KN ^= hashed_KN >> np.uint64(29)
    return (hashed_KN.min(axis=1) & np.uint64(0xFF)).astype(np.uint8).tobytes().hex()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sameness:
    """The expected similarity of two people's answers, from 0 to 1, on both sides, and live minus control with its variance.

    `live` and `control` count people. `similarity` is that of live, `usual` that of control. `policy`: the release that gave live's
    answers.

    Example: ``Sameness(policy="v7@aa", live=400, control=100, similarity=0.31, usual=0.12, difference=0.19, variance=0.0004)``
    """

    policy: str
    live: int
    control: int
    similarity: float
    usual: float
    difference: float
    variance: float


Answered = tuple[str, str, str]
"""One person's tenant, hash of the prompt's opening, and `answer_hash`."""


def sameness(live: Iterable[Answered], control: Iterable[Answered], policy: str = "") -> Sameness | None:
    """Compare both sides; None with fewer than 20 people on a side.

    Answers are compared within a tenant among people whose prompts begin alike, or among all others of the tenant where those are few.
    """
    sides = [list(live), list(control)]
    counts = [Counter(each[:2] for each in side) for side in sides]
    fewest = counts[0] & counts[1]
    groups: list[dict[tuple[str, str], list[str]]] = [{}, {}]
    for side, grouped in zip(sides, groups, strict=True):
        for tenant, opening, hashed in side:
            key = (tenant, opening if fewest[tenant, opening] >= _LEAST else "")
            grouped.setdefault(key, []).append(hashed)
    shared = [key for key in groups[0] if min(len(group.get(key, ())) for group in groups) >= _LEAST]
    n_SG = np.array([[len(group[key]) for key in shared] for group in groups], dtype=np.float64)
    if n_SG.size == 0 or n_SG.sum(axis=1).min() < LEAST_PEOPLE:
        return None
    found = np.array([[_similarity(group[key]) for key in shared] for group in groups])
    weight_G = n_SG[0] * n_SG[1] / n_SG.sum(axis=0)
    weight_G /= weight_G.sum()
    similarity, usual = found[:, :, 0] @ weight_G
    return Sameness(
        policy=policy,
        live=int(n_SG[0].sum()),
        control=int(n_SG[1].sum()),
        similarity=float(similarity),
        usual=float(usual),
        difference=float(similarity - usual),
        variance=float((found[:, :, 1] @ weight_G**2).sum()),
    )


def _similarity(hashes: Sequence[str]) -> tuple[float, float]:
    """Return the mean similarity over all pairs among three or more answers, and the jackknife's estimate of its variance.

    Answers that are all the same, or have no run in common, do not make the mean certain: one person's counts as if it were like no other,
    or like one.
    """
    n = len(hashes)
    bytes_NK: NDArray[np.uint8] = np.frombuffer(bytes.fromhex("".join(hashes)), dtype=np.uint8).reshape(n, _HASHES)
    agree_N = np.zeros(n)  # each answer's summed similarity to all others
    for column_N in bytes_NK.T:
        agree_N += (np.bincount(column_N, minlength=256)[column_N] - 1) / _HASHES
    total = float(agree_N.sum())
    without_N = (total - 2.0 * agree_N) / ((n - 1) * (n - 2))
    variance = float((n - 1) / n * ((without_N - without_N.mean()) ** 2).sum())
    mean = total / (n * (n - 1))
    return mean, max(variance, (2.0 * max(mean, 1.0 / n) / n) ** 2)


# ---------------------------------------------------------------- the watch


class SamenessWatch(GapWatch):
    """The monitor of similarity: turns and releases in, alarms out.

    Both sides' people are counted anew when live moves, if by then a hundred people of live and twenty of control were counted, or after a
    week (`gold_s`): what people ask changes from day to day, and answers of one day are more alike than those of a week. They are compared
    each hour, by a bound that holds at all looks. The periods that begin in one week share the level `gold_alpha`: each gets half of it
    times the part of a week that the one before it lasted. The alarm pauses nothing, since a model that has learned the one right form of
    answer repeats it, too. It stays raised until a period ends within the tolerance, or a person accepts it. `readings`: those of the last
    twenty periods, oldest first.
    """

    def __init__(self, config: MonitorsConfig) -> None:
        self._live, self._control = (
            PersonCrowd[tuple[Answered, float]](min(MOST_PEOPLE, config.most_people)) for _ in range(2)
        )
        super().__init__(GapAlarm(USERS_ALIKE, TOLERATED), self._live, self._control)
        self._config = config
        # tenants whose people found no room on a side: neither side adds more of them in this period
        self._closed: set[str] = set()
        self._policy = ""
        self._alpha = config.gold_alpha / 2.0
        self.readings: deque[Sameness] = deque(maxlen=_READINGS)

    def turn(self, turn: Turn) -> Iterator[Alarm]:
        """Process a person's turn; yield alarms.

        Only people who were assigned to live or control at random count, once per period. Turns that Auto routed, which follow the reward,
        do not.
        """
        if not self._config.enabled or turn.arm not in (Arm.LIVE, Arm.CONTROL) or not dealt_by_chance(turn):
            return
        at, asked = turn.ended_at, tasks_of(turn)
        if not asked or not turn.sampled_ids or not turn.finish.complete:
            return
        if self.gap.lasted(at) >= self._config.gold_s:
            yield from self._anew(at)
        own, other = (self._live, self._control) if turn.arm is Arm.LIVE else (self._control, self._live)
        other.drop(turn.person)
        if turn.tenant not in self._closed:
            counted = own.get(turn.person, lambda: ((*asked[0], answer_hash(turn.sampled_ids)), at))
            if counted is None:
                self._closed.add(turn.tenant)
        if self.gap.look_due(at):
            yield from self._look(at)

    def release(self, event: ReleaseEvent) -> Iterator[Alarm]:
        """Process a line of the ledger: another release may have gone live."""
        if event.action in ("shipped", "rolled_back"):
            if len(self._live) >= _LEAST_READ[0] and len(self._control) >= _LEAST_READ[1]:
                yield from self._anew(event.at)
            self._policy = str(event.policy)

    def _anew(self, at: float) -> Iterator[Alarm]:
        """End the period, after a last comparison."""
        yield from self._look(at)
        read = self._read()
        if read is not None:
            self.readings.append(read)
            if read.difference <= self.gap.tolerated:
                why = f"{self._policy or 'live'} does not show it: {described(read, self._alpha)}"
                yield from self.gap.end(why, at)
        self._alpha = self._config.gold_alpha / 2.0 * min(1.0, max(self.gap.lasted(at) / self._config.gold_s, 1e-4))
        for side in (self._live, self._control):
            side.clear()
        self._closed.clear()
        self.gap.since = at

    def _read(self) -> Sameness | None:
        """Compare both sides over the same time: for a tenant that found no room on a side, up to the last person who is on both."""
        ends: list[dict[str, float]] = [{}, {}]
        for side, end in zip((self._live, self._control), ends, strict=True):
            for (tenant, _), (_, at) in side:
                end[tenant] = max(end.get(tenant, at), at)
        live, control = (
            [
                each
                for (tenant, _), (each, at) in side
                if tenant not in self._closed or all(at <= end.get(tenant, at) for end in ends)
            ]
            for side in (self._live, self._control)
        )
        return sameness(live, control, self._policy)

    def _look(self, at: float) -> Iterator[Alarm]:
        read = self._read()
        if read is None or lower_bound(read.difference, read.variance, self._alpha) <= self.gap.tolerated:
            return
        if self.gap.find(read.difference):
            yield self.gap.raised(described(read, self._alpha), at, asdict(read) | {"pauses": False})

    def snapshot(self) -> dict[str, Any]:
        """Return the whole state as JSON types."""
        return {
            "sides": [[[*person, *each, at] for person, (each, at) in side] for side in (self._live, self._control)],
            "closed": sorted(self._closed),
            "policy": self._policy,
            "alpha": self._alpha,
            **self.gap.snapshot(),
            "readings": [asdict(each) for each in self.readings],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `snapshot` returned. Raises LookupError, TypeError or ValueError for an invalid state."""
        for side, rows in zip((self._live, self._control), state["sides"], strict=True):
            side.clear()
            for tenant, user, own, opening, hashed, at in rows:
                side.put((str(tenant), str(user)), ((str(own), str(opening), str(hashed)), float(at)))
        self._closed = {str(tenant) for tenant in state["closed"]}
        self._policy, self._alpha = str(state["policy"]), float(state["alpha"])
        self.gap.restore(state)
        self.readings = deque((Sameness(**each) for each in state["readings"]), maxlen=_READINGS)


def described(read: Sameness, alpha: float) -> str:
    """Describe a reading as text, with bounds that hold at all looks at this level."""
    lower, upper = (100 * bound(read.difference, read.variance, alpha / 2.0) for bound in (lower_bound, upper_bound))
    return (
        f"two answers to different people share {read.similarity:.1%} of their runs of three tokens among {read.live} people on "
        f"{read.policy or 'live'}, {read.usual:.1%} among {read.control} on control: {100 * read.difference:+.1f} pp "
        f"[{lower:+.1f}, {upper:+.1f}]"
    )
