"""How many users it takes to a verdict, and how often that is wrong: trials as they were before adjustment and planned looks, and now.

    python -m benchmarks.release.verdicts --runs 200
    python -m benchmarks.release.verdicts --table             # the figures as a table, from the result

The rules: `plain` subtracts nothing that is known from before a trial, and ships by the confidence sequence alone; `now` is the product's,
with what is expected of each person and task, and planned looks; `people` is that without tasks.

1,000 users a day, who differ in taste (correlation 0.15) and in how much they ask (log-normal), and 300 tasks, asked by anybody, some often
and most seldom, whose log odds differ by a standard deviation of 1; three turns in ten are of tasks that never come again. Trials are those
of the product: slots of half an hour, a ramp, the plan of looks, `returned` and `harmed_users` as guardrails. What a week of the past makes
expected is computed for all turns at once, and compared with `Past`, which takes them one by one, before anything is measured. The worlds:
`turns` that only users and tasks tell apart; `sessions` of five turns on one task that go well or badly together; `leavers`, one in ten
of whom cannot stand the candidate and leaves; a `minority` of one in twenty that loses 20 points while the others gain one.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from benchmarks.contender import RESULTS, machine
from numpy.typing import NDArray

from ostinato.release.metrics.config import MetricConfig
from ostinato.release.metrics.metric import ExpectedMetrics, Metric, Past, shrinkage
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
_SHRINK = 6.0  # as `Past`'s, before how much people differ is known
OVER = (NextAction.BLOCK, NextAction.ROLL_BACK)
Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A world and what the candidate does there. Example: ``Cell(world="sessions", effect=-0.04)``"""

    world: str = "turns"
    effect: float = 0.0
    rule: str = "now"


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

    def past(self) -> tuple[Turns, Indices, NDArray[np.bool_]]:
        """The turns of the week before, their slots, and which were accepted."""
        slots = [self.turns(slot) for slot in range(-7 * SLOTS_A_DAY, 0)]
        turns = Turns(**{name: np.concatenate([getattr(each, name) for each in slots]) for name in Turns.__slots__})
        slot_N = np.repeat(np.arange(-7 * SLOTS_A_DAY, 0), [len(each.who_N) for each in slots])
        return turns, slot_N, self.good(turns, np.zeros(len(turns.who_N), dtype=np.bool_))

    def expected(self) -> ExpectedMetrics:
        """What is expected after a week, by the product's own class."""
        past, (turns, slot_N, good_N) = Past(METRICS, 0.0), self.past()
        for n, (user, task) in enumerate(zip(turns.who_N.tolist(), turns.task_N.tolist(), strict=True)):
            tasks = [("", str(task))] if task < TASKS and self._cell.rule == "now" else ()
            at = (float(slot_N[n]) + 0.5) * CONFIG.slot_s
            past.remember(("", str(user)), at, {"accepted": float(good_N[n])}, tasks)
        return past.expected()


def expected_at_once(cell: Cell, town: Town) -> tuple[Floats, Floats, Floats]:
    """Of each user the expected acceptance and return, and of each task how much more it brings; the last is 0: tasks that are new."""
    turns, slot_N, good_N = town.past()
    who_N, value_N = turns.who_N, good_N.astype(np.float64)
    over_U, turns_U = (
        np.bincount(who_N, value_N, USERS).astype(np.float64),
        np.bincount(who_N, minlength=USERS).astype(np.float64),
    )
    people_U = _mixed(over_U, turns_U, float(value_N.sum()))
    visits_DU = np.zeros((7, USERS), dtype=np.bool_)
    visits_DU[slot_N // SLOTS_A_DAY + 7, who_N] = True
    counted_DU = np.logical_or.accumulate(visits_DU, axis=0)[:-1]
    back_U = (visits_DU[1:] & counted_DU).sum(axis=0).astype(np.float64)
    more_K = np.zeros(TASKS + 1)
    if cell.rule == "now":
        before_N, own_N = _before(who_N, value_N), _before(who_N, np.ones(len(who_N)))
        all_N = np.arange(len(who_N), dtype=np.float64)
        usual_N = np.divide(np.cumsum(value_N) - value_N, all_N, out=np.zeros(len(who_N)), where=all_N > 0)
        left_N = value_N - (before_N + _SHRINK * usual_N) / (own_N + _SHRINK)
        known_N = (turns.task_N < TASKS) & (all_N > 0)
        left_K = np.bincount(turns.task_N[known_N], left_N[known_N], TASKS).astype(np.float64)
        turns_K = np.bincount(turns.task_N[known_N], minlength=TASKS).astype(np.float64)
        more_K[:-1] = _mixed(left_K, turns_K, float((left_N[known_N] ** 2).sum())) - left_K.sum() / turns_K.sum()
    return people_U, _mixed(back_U, counted_DU.sum(axis=0).astype(np.float64), float(back_U.sum())), more_K


def _before(group_N: Indices, value_N: Floats) -> Floats:
    """Of each row the sum of its group's rows before it."""
    order_N = np.argsort(group_N, kind="stable")
    sums_N, found_N = np.cumsum(value_N[order_N]) - value_N[order_N], np.empty(len(value_N))
    starts_N = np.flatnonzero(np.diff(group_N[order_N], prepend=-1))
    found_N[order_N] = sums_N - np.repeat(sums_N[starts_N], np.diff(starts_N, append=len(value_N)))
    return found_N


def _mixed(total_G: Floats, turns_G: Floats, squares: float) -> Floats:
    """Each group's mean, mixed with the mean of all by the product's `shrinkage`; `squares` is the sum of all turns' squares."""
    usual = float(total_G.sum() / turns_G.sum())
    left_G = total_G - usual * turns_G
    mixed = shrinkage(zip(left_G.tolist(), turns_G.tolist(), strict=True), squares - usual**2 * float(turns_G.sum()))
    if mixed is None or np.isinf(mixed):
        return np.full(len(total_G), usual)
    return usual + left_G / (turns_G + mixed)


def check() -> None:
    """Raises AssertionError if `expected_at_once` is not what `Past` expects."""
    cell = Cell()
    known, (people_U, back_U, more_K) = Town(cell, 0).expected(), expected_at_once(cell, Town(cell, 0))
    of = np.array([known.of(("", str(user))) for user in range(USERS)])
    assert np.allclose(of[:, 0], people_U)
    assert np.allclose(of[:, 1], back_U)
    assert np.allclose([known.tasks.get(("", str(task)), (0.0,))[0] for task in range(TASKS)], more_K[:-1], atol=1e-9)


class Run:
    """One trial in a town."""

    def __init__(self, cell: Cell, seed: int) -> None:
        self._town = Town(cell, seed)
        plain = cell.rule == "plain"
        nothing = np.full(USERS, 0.57), np.full(USERS, 0.8), np.zeros(TASKS + 1)
        people_U, back_U, self._task_K = nothing if plain else expected_at_once(cell, self._town)
        self._people_MU = np.stack([people_U, back_U])
        allowed = {"acceptance": METRICS[0].allowed}
        plan = ship_plan(Traffic(people=round(0.9 * USERS), turns=10 * USERS, good=0.57), allowed, CONFIG)
        self._trial = Trial(CONFIG, active=USERS, metrics=METRICS, plan=None if plain else plan)
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


def figures(cell: Cell, seeds: Sequence[int], seconds: float) -> dict[str, Any]:
    """The figures of a cell, of as many of these seeds as take no more than so much processor time."""
    began, found = time.process_time(), list[Verdict]()
    for seed in seeds:
        found.append(Run(cell, seed).verdict(follow=cell.world in ("leavers", "minority")))
        if time.process_time() - began >= seconds:
            break
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
    ("sessions", 0.0),
    ("sessions", -0.04),
    ("leavers", 0.0),
    ("minority", 0.0),
]
RULES = ("plain", "now")


def _interval(count: int, runs: int) -> str:
    """A share of runs with its 95% interval (Wilson 1927)."""
    z, share = 1.96, count / runs
    middle, half = share + z * z / (2 * runs), z * (share * (1 - share) / runs + z * z / (4 * runs**2)) ** 0.5
    low, high = ((middle + sign * half) / (1 + z * z / runs) for sign in (-1, 1))
    return f"{count} of {runs} ({100 * max(0.0, low):.1f} to {100 * high:.1f}%)"


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table: a row for each world and rule."""
    lines = [
        "| world, candidate | rule | users, mean | turns on it, mean | hours, mean and median | ships | ended as worse, or taken back |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in results:
        ended = {name: count for name, count in each["last"].items() if name in ("block", "roll_back")}
        undecided = sum(count for why, count in each["why"].items() if why.startswith("not enough"))
        lines.append(
            f"| {each['world']}, {100 * each['effect']:+.0f} | {each['rule']} | {each['users']:.0f} | {each['turns']:,.0f} | "
            f"{each['hours'][0]:.1f}, {each['hours'][1]:.1f} | {_interval(each['first'].get('ship', 0), each['runs'])} | "
            f"{_interval(sum(ended.values()) - undecided, each['runs'])} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Print a line for each cell, and write the result after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--cells", type=int, nargs="*", default=list(range(len(CELLS))), help="which of the cells")
    parser.add_argument("--rules", nargs="+", choices=["plain", "people", "now"], default=RULES)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="of processor time for a cell and rule, at most"
    )
    parser.add_argument("--table", action="store_true", help="print the result as a table, and run nothing")
    parser.add_argument("--out", default=str(RESULT), help="where the figures go")
    asked = parser.parse_args()
    if asked.table:
        print(table(json.loads(Path(asked.out).read_text(encoding="utf-8"))["results"]))
        return
    check()
    results: list[dict[str, Any]] = []
    for world, effect in [CELLS[number] for number in asked.cells]:
        for rule in asked.rules:
            results.append(figures(Cell(world=world, effect=effect, rule=rule), range(asked.runs), asked.seconds))
            print(results[-1], flush=True)
            kept = json.dumps({"machine": machine(), "results": results}, indent=1)
            Path(asked.out).write_text(kept + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
