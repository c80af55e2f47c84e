"""Simulated people who come in sessions through the day, some often and most seldom, and a log that forgets rows once read."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
from benchmarks.release.habits import CLEAN, Habits, Rng, Written, clean, parsed

from ostinato.core.notices import Alarm
from ostinato.core.records import (
    Arm,
    Identity,
    PolicyVersion,
    Reward,
    Row,
    Sampling,
    Signal,
    Source,
    Span,
    Turn,
    identity,
)
from ostinato.core.seams import Cursor, R

DAY = 86_400.0
PEOPLE, TURNS_A_DAY = 10_000, 100_000
SESSION = 8.0  # turns, on average
POLICY = PolicyVersion(number=1, hash="01" * 16)


@dataclass(frozen=True, slots=True)
class World:
    """How people differ: `rho` is the correlation of a habit between two turns of a session, `swing` its relative amplitude over a day,
    `taste` the standard deviation of log odds between people, `control` the share of people on the reference arm. Of a share `heard` of
    the turns people say something, of which `liked` is good; half of the turns run tests, of which `passed` pass. A hacked turn is liked
    by `pleases` more, and its tests pass by `harms` less.
    """

    rho: float = 0.05
    swing: float = 0.15
    taste: float = 0.1
    control: float = 0.2
    heard: float = 0.6
    liked: float = 0.6
    passed: float = 0.7
    pleases: float = 0.3
    harms: float = 0.5


@dataclass(slots=True)
class _Visit:
    user: int
    left: int
    shares: dict[str, float] = field(default_factory=dict)


class Visitors:
    """An endless stream of simulated people's turns, in the order in which they end.

    Once `hack` is set, the live arm's policy answers a share `spread` of its turns with it.
    """

    def __init__(self, seed: int, world: World = World(), habits: Habits = CLEAN) -> None:
        self._rng = np.random.default_rng(seed)
        self._world = world
        self._habits: dict[str, float] = asdict(habits)
        activity_U = self._rng.lognormal(0.0, 1.2, PEOPLE)
        self._reach_U = np.cumsum(activity_U / activity_U.sum())
        self._taste_U = self._rng.normal(0.0, world.taste, PEOPLE)
        self._control_U = self._rng.random(PEOPLE) < world.control
        self._phase = {name: self._rng.uniform(0, 2 * math.pi) for name in self._habits}
        self._number = 0
        self._next_visit = 0.0
        self._due: list[tuple[float, int, _Visit]] = []
        self._shifted = self._habits
        self.hack: Callable[[Rng], Written] | None = None
        self.spread = 0.0

    def shift(self, habits: Habits) -> None:
        """From now on the live arm's policy has these habits."""
        self._shifted = asdict(habits)

    def rows(self, count: int) -> Iterator[Turn | Reward | Signal]:
        """The next `count` turns, each followed by what was said of it."""
        for turn, hacked in itertools.islice(self._turns(), count):
            yield turn
            yield from self._said(turn, hacked=hacked)

    def _turns(self) -> Iterator[tuple[Turn, bool]]:
        rng = self._rng
        while True:
            while not self._due or self._next_visit <= self._due[0][0]:
                self._number += 1
                visit = self._visit(self._next_visit)
                heapq.heappush(self._due, (self._next_visit, self._number, visit))
                self._next_visit += rng.exponential(DAY * SESSION / TURNS_A_DAY)
            at, number, visit = heapq.heappop(self._due)
            visit.left -= 1
            if visit.left:
                heapq.heappush(self._due, (at + 20.0 + rng.exponential(40.0), number, visit))
            yield self._turn(at, visit)

    def _visit(self, at: float) -> _Visit:
        user = min(PEOPLE - 1, int(np.searchsorted(self._reach_U, self._rng.random())))
        rho, shares = self._world.rho, {}
        for name, share in (self._habits if self._control_U[user] else self._shifted).items():
            swung = share * (1.0 + self._world.swing * math.sin(2 * math.pi * at / DAY + self._phase[name]))
            odds = swung / (1.0 - swung) * math.exp(self._taste_U[user])
            mean = odds / (1.0 + odds)
            shares[name] = self._rng.beta(mean * (1 - rho) / rho, (1 - mean) * (1 - rho) / rho)
        return _Visit(user=user, left=1 + int(self._rng.poisson(SESSION - 1)), shares=shares)

    def _said(self, turn: Turn, *, hacked: bool) -> Iterator[Reward | Signal]:
        world, at = self._world, turn.ended_at
        heard, liked, tested, passed = self._rng.random(4).tolist()
        if heard < world.heard:
            value = 1.0 if liked < world.liked + world.pleases * hacked else -1.0
            yield Reward(turn=turn.id, value=value, function="f@1", signals=(f"{turn.id}:said",), at=at)
        if tested < 0.5:
            yield Signal(
                id=f"s{turn.id}",
                turn=turn.id,
                tenant=turn.tenant,
                name="tests_passed",
                value=float(passed < world.passed - world.harms * hacked),
                source=Source.CODE,
                occurred_at=at,
                received_at=at,
            )

    def _turn(self, at: float, visit: _Visit) -> tuple[Turn, bool]:
        self._number += 1
        rng = self._rng
        arm = Arm.CONTROL if self._control_U[visit.user] else Arm.LIVE
        hacked = self.hack if arm is Arm.LIVE and rng.random() < self.spread else None
        written = hacked(rng) if hacked else clean(rng, lambda name: rng.random() < visit.shares[name])
        ids = _ids(rng, written)
        turn = Turn(
            id=f"simulated-{self._number}:0",
            episode=f"{self._number}",
            parent=None,
            user=f"u{visit.user}",
            tenant="simulated",
            arm=arm,
            propensity=self._world.control if arm is Arm.CONTROL else 1.0 - self._world.control,
            prompt_ids=_PROMPT,
            sampled_ids=ids,
            logprobs=(),
            spans=(Span(policy=POLICY, tokens=len(ids)),),
            sampling=Sampling(max_tokens=4096),
            finish=written.finish,
            text=written.text,
            calls=parsed(written.text),
            started_at=at,
            ended_at=at,
        )
        return turn, hacked is not None


_PROMPT = tuple(range(64, 128))
_POOL = np.random.default_rng(99).integers(1_000, 50_000, 200_000).tolist()


def _ids(rng: Rng, written: Written) -> tuple[int, ...]:
    """Tokens that no other answer has, or the prompt's."""
    if written.echoes:
        return (_PROMPT * 3)[: written.tokens]
    begin = int(rng.integers(len(_POOL) - 8_192))
    return tuple(_POOL[begin : begin + written.tokens])


class ForgetfulLog:
    """A log that `forget` empties but for the last row. Implements the part of `Log` that readers use."""

    def __init__(self, first: Cursor = 0) -> None:
        self._before = first  # number of forgotten rows
        self._rows: list[Row] = []
        self.alarms: list[Alarm] = []

    async def append(self, *rows: Row) -> Cursor:
        self._rows.extend(rows)
        self.alarms.extend(row for row in rows if isinstance(row, Alarm))
        return self._before + len(self._rows)

    async def read(self, after: Cursor, kinds: set[type]) -> AsyncIterator[tuple[Cursor, Row]]:
        for place in range(max(0, after - self._before), len(self._rows)):
            if type(self._rows[place]) in kinds:
                yield self._before + place + 1, self._rows[place]

    def forget(self) -> None:
        """Drop all rows but the last."""
        self._before += max(0, len(self._rows) - 1)
        del self._rows[:-1]

    async def find(self, kind: type[R], identities: Sequence[Identity]) -> list[R]:
        wanted = set(identities)
        return [row for row in self._rows if isinstance(row, kind) and identity(row) in wanted]

    async def horizon(self) -> Cursor:
        return 0

    async def before_last(self, count: int, kind: type[Row]) -> Cursor:
        return 0
