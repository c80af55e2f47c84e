"""How many users it takes to a verdict, and how often that is wrong: trials with and without what is known of tasks before them.

    python -m benchmarks.release.verdicts --runs 200          # about two hours on one core

1,000 users a day, who differ in taste (correlation 0.15) and in how much they ask (log-normal), and 300 tasks, asked by anybody, some often
and most seldom, whose log odds differ by a standard deviation of 1; three turns in ten are of tasks that never come again. Everything is
known through the classes of the product: a week of the past, slots of half an hour, a ramp, the plan of looks, `returned` and
`harmed_users` as guardrails. The worlds: `turns` that only users and tasks tell apart; `sessions` of five turns on one task that go well or
badly together; `leavers`, one user in ten of whom cannot stand the candidate and leaves; a `minority` of one in twenty that loses 20 points
while the others gain one.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from typing import Any

import numpy as np
from benchmarks.contender import RESULTS, machine
from numpy.typing import NDArray

from ostinato.release.metrics.config import MetricConfig
from ostinato.release.metrics.metric import ExpectedMetrics, Metric, Past
from ostinato.release.metrics.retention import DAY, Retention
from ostinato.release.pace import Traffic, ship_plan
from ostinato.release.trial.config import TrialConfig
from ostinato.release.trial.contrast import POOLED, TimeSlot
from ostinato.release.trial.trial import Trial
from ostinato.release.trial.verdict import NextAction

RESULT = RESULTS / "release_verdicts.json"
CONFIG = TrialConfig(margin=0.04, trials_a_week=7)
METRICS = tuple(
    Metric.of(MetricConfig(name=name), CONFIG.margin) for name in ("acceptance", "returned", "harmed_users")
)
USERS, TASKS, SPREAD, REPEATED = 1_000, 300, 1.0, 0.7
SLOTS_A_DAY = round(DAY / CONFIG.slot_s)
OVER = (NextAction.BLOCK, NextAction.ROLL_BACK)
Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A world and what the candidate does there. Example: ``Cell(world="sessions", effect=-0.04)``"""

    world: str = "turns"
    effect: float = 0.0
    tasks: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How a trial ended, after how many hours, users and turns on the candidate; for one that shipped, until then and at last."""

    first: str
    last: str
    hours: float
    users: int
    turns: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Turns of a slot: who, about what (a number from `TASKS` on never comes again), and the log odds that task and session add."""

    who_N: Indices
    task_N: Indices
    odds_N: Floats
    luck_N: Floats


class Town:
    """Users, tasks, and the turns of each slot, the same for one seed whatever is on trial."""

    def __init__(self, cell: Cell, seed: int) -> None:
        self._cell, self._seed = cell, seed
        rng = np.random.default_rng((seed, 0))
        rate_U = rng.lognormal(np.log(10.0) - 0.72, 1.2, USERS).clip(0.05, 400.0)
        self._rate_U = rate_U / SLOTS_A_DAY
        self._taste_U = rng.normal(0.4, 0.9, USERS)
        self._task_K = rng.normal(0.0, SPREAD, TASKS)
        self._asked_K = np.cumsum(1.0 / (np.arange(TASKS) + 10.0))
        self._asked_K /= self._asked_K[-1]
        self.place_U, self.averse_U = rng.random(USERS), rng.random(USERS)
        self.gone_U = np.zeros(USERS, dtype=np.bool_)

    def turns(self, slot: int) -> Turns:
        """The turns of a slot; those before the trial have negative numbers."""
        rng = np.random.default_rng((self._seed, 1, slot + 10_000))
        swing = 1.0 + 0.5 * np.sin(2 * np.pi * slot / SLOTS_A_DAY)
        session = 5 if self._cell.world == "sessions" else 1
        visits_U = rng.poisson(swing * self._rate_U / session)
        who_V = np.repeat(np.arange(USERS), visits_U)
        task_V = np.searchsorted(self._asked_K, rng.random(len(who_V)))
        new_V = rng.random(len(who_V)) >= REPEATED
        odds_V = np.where(new_V, rng.normal(0.0, SPREAD, len(who_V)), self._task_K[task_V])
        odds_V = odds_V + rng.normal(0.0, 1.0, len(who_V)) * (session > 1)
        each_N = np.repeat(np.arange(len(who_V)), session)
        return Turns(
            who_N=who_V[each_N],
            task_N=np.where(new_V, TASKS, task_V)[each_N],
            odds_N=odds_V[each_N],
            luck_N=rng.random(len(each_N)),
        )

    def good(self, turns: Turns, treated_N: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which turns are accepted; those who cannot stand the candidate may leave over it."""
        chance_N = 1.0 / (1.0 + np.exp(-self._taste_U[turns.who_N] - turns.odds_N))
        averse_N = treated_N & (self.averse_U[turns.who_N] < 0.1)
        if self._cell.world == "leavers":
            chance_N = np.where(averse_N, 0.1, chance_N)
        elif self._cell.world == "minority":
            few_N = self.averse_U[turns.who_N] < 0.05
            chance_N = chance_N + treated_N * np.where(few_N, -0.2, 0.01)
        else:
            chance_N = chance_N + treated_N * self._cell.effect
        good_N = turns.luck_N < chance_N
        if self._cell.world == "leavers":
            self.gone_U[turns.who_N[averse_N & ~good_N & (np.modf(turns.luck_N * 997.0)[0] < 0.8)]] = True
        return good_N

    def expected(self) -> ExpectedMetrics:
        """What is expected after a week, by the product's own class."""
        past = Past(METRICS, 0.0)
        for slot in range(-7 * SLOTS_A_DAY, 0):
            turns = self.turns(slot)
            good_N = self.good(turns, np.zeros(len(turns.who_N), dtype=np.bool_))
            at = (slot + 0.5) * CONFIG.slot_s
            for user, task, good in zip(turns.who_N.tolist(), turns.task_N.tolist(), good_N.tolist(), strict=True):
                tasks = [("", str(task))] if task < TASKS and self._cell.tasks else ()
                past.remember(("", str(user)), at, {"accepted": float(good)}, tasks)
        return past.expected()


class Run:
    """One trial in a town."""

    def __init__(self, cell: Cell, seed: int) -> None:
        self._town = Town(cell, seed)
        self._expected = self._town.expected()
        of = [self._expected.of(("", str(user))) for user in range(USERS)]
        self._people_MU = np.array(of).T
        self._task_K = np.array([self._expected.tasks.get(("", str(task)), (0.0,))[0] for task in range(TASKS)] + [0.0])
        allowed = {"acceptance": METRICS[0].allowed}
        plan = ship_plan(Traffic(people=round(0.9 * USERS), turns=10 * USERS, good=0.57), allowed, CONFIG)
        self._trial = Trial(CONFIG, active=USERS, metrics=METRICS, plan=plan)
        self._retention = Retention(0.0)

    def _slot(self, number: int, share: float) -> TimeSlot:
        town, turns = self._town, self._town.turns(number)
        here_N = ~town.gone_U[turns.who_N]
        turns = Turns(**{name: getattr(turns, name)[here_N] for name in ("who_N", "task_N", "odds_N", "luck_N")})
        good_N = town.good(turns, town.place_U[turns.who_N] < share)
        people_R, row_N = np.unique(turns.who_N, return_inverse=True)
        turns_R = np.bincount(row_N, minlength=len(people_R)).astype(np.float64)
        left_R = np.bincount(row_N, self._task_K[turns.task_N], minlength=len(people_R))
        return TimeSlot(
            day=number // SLOTS_A_DAY,
            people_R=people_R,
            turns_R=turns_R,
            good_R=np.bincount(row_N, good_N, minlength=len(people_R)).astype(np.float64),
            expected_R=self._people_MU[0][people_R] + left_R / np.maximum(turns_R, 1.0),
            treated_R=town.place_U[people_R] < share,
        )

    def _back(self, day: int, share: float) -> TimeSlot:
        rows = list(self._retention.rows(day))
        who = np.array([int(user) for (_, user), _ in rows], dtype=np.int64)
        back_R = np.array([known["user.returned"] for _, known in rows])
        expected_R, treated_R = self._people_MU[1][who], self._town.place_U[who] < share
        return TimeSlot(
            day=day, people_R=who, turns_R=np.ones(len(who)), good_R=back_R, expected_R=expected_R, treated_R=treated_R
        )

    def slots(self) -> Iterator[tuple[float, TimeSlot]]:
        """Adds slot after slot to the trial; yields when each ends, in seconds, and its turns."""
        morning = self._trial.share
        for number in range(round(CONFIG.limit_s / CONFIG.slot_s)):
            slot, end = self._slot(number, self._trial.share), (number + 1) * CONFIG.slot_s
            for user in slot.people_R.tolist():
                self._retention.see(("", str(user)), end - 1.0)
            outcomes: dict[str, Mapping[str, TimeSlot]] = {"acceptance": {POOLED: slot}, "harmed_users": {POOLED: slot}}
            if end == self._retention.end(slot.day):
                back = self._back(slot.day, morning)
                self._trial.come_back(back, morning)
                outcomes["returned"] = {POOLED: back}
                morning = self._trial.share
            self._trial.add(slot, outcomes, end)
            yield end, slot

    def verdict(self, *, follow: bool) -> Verdict:
        """A look after each slot until it ships or is blocked; with `follow` also whether it is taken back later."""
        came_U, turns, first = np.zeros(USERS, dtype=np.bool_), 0.0, ""
        found = Verdict(first="waits", last="waits", hours=96.0, users=USERS, turns=0.0, why="")
        for end, slot in self.slots():
            came_U[slot.people_R] = True
            turns += float(slot.turns_R[slot.treated_R].sum())
            decision = self._trial.look(end)
            if decision.next is NextAction.SHIP or (decision.next in OVER and not first):
                first, why = decision.next.value, decision.reason.split(":")[0]
                found = Verdict(
                    first=first, last=first, hours=end / 3600, users=int(came_U.sum()), turns=turns, why=why
                )
            elif decision.next in OVER:
                return replace(found, last=decision.next.value, why=decision.reason.split(":")[0])
            if first and (decision.next in OVER or not follow):
                break
        return found


def figures(cell: Cell, seeds: Sequence[int]) -> dict[str, Any]:
    """The figures of a cell."""
    found = [Run(cell, seed).verdict(follow=cell.world in ("leavers", "minority")) for seed in seeds]
    return asdict(cell) | {
        "runs": len(found),
        "first": Counter(each.first for each in found),
        "last": Counter(each.last for each in found),
        "why": Counter(each.why for each in found if each.last != "ship"),
        "hours": [round(fmean(each.hours for each in found), 1), median(each.hours for each in found)],
        "users": fmean(each.users for each in found),
        "turns": fmean(each.turns for each in found),
    }


CELLS = [
    ("turns", 0.0),
    ("turns", -0.04),
    ("turns", -0.10),
    ("sessions", 0.0),
    ("sessions", -0.04),
    ("leavers", 0.0),
    ("minority", 0.0),
]


def main() -> None:
    """Print a line for each cell, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--cells", type=int, nargs="*", default=list(range(len(CELLS))), help="which of the cells")
    parser.add_argument("--out", default=str(RESULT), help="where the figures go")
    asked = parser.parse_args()
    results: list[dict[str, Any]] = []
    for world, effect in [CELLS[number] for number in asked.cells]:
        for tasks in (False, True):
            results.append(figures(Cell(world=world, effect=effect, tasks=tasks), range(asked.runs)))
            print(results[-1], flush=True)
    with open(asked.out, "w", encoding="utf-8") as file:
        json.dump({"machine": machine(), "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
