"""People who leave: trials of a version that some users cannot stand, with and without the guardrail `returned`.

    python -m benchmarks.release.leavers          # three minutes on one core

4,000 users who differ in how often they come and what they accept, half of them on the candidate. In `leavers` one user in ten cannot stand
it: they accept a tenth of its answers, and after the first bad one four in five of them leave for good. `at 48 h` looks once, after two
days. `followed` is the trial as it runs: a look each half hour, shares that grow, release, and two further days beside the users who stay
on the version before. The false alarms of `returned` alone are counted at every look, for four days.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
from benchmarks.contender import RESULTS, machine

from ostinato.release.metrics.config import DEFAULT_GUARDRAILS, MetricConfig
from ostinato.release.metrics.metric import Metric
from ostinato.release.metrics.retention import DAY, Retention
from ostinato.release.trial.config import TrialConfig
from ostinato.release.trial.contrast import POOLED, Contrast, TimeSlot, log_evidence
from ostinato.release.trial.trial import Trial
from ostinato.release.trial.verdict import NextAction

RESULT = RESULTS / "release_leavers.json"
CONFIG = TrialConfig()
SLOTS_A_DAY = round(DAY / CONFIG.slot_s)
METRICS = (
    Metric.of(MetricConfig(name="acceptance"), CONFIG.margin),
    Metric.of(MetricConfig(name="returned"), CONFIG.margin),
)
OVER = (NextAction.BLOCK, NextAction.ROLL_BACK)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Users: a share `averse` of them accepts `liked` of the candidate's answers, and leaves after a bad one with probability `leave`."""

    users: int = 4_000
    averse: float = 0.1
    liked: float = 0.1
    leave: float = 0.8


EQUAL = World(averse=0.0)


class Town:
    """Draws each user's habits and a week before the trial; then, slot by slot, who comes and what they accept."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.rng = world, np.random.default_rng(seed)
        rng, users = self.rng, world.users
        self.accepts_U = rng.beta(12.0, 8.0, users)
        self.comes_U = rng.beta(18.0, 2.0, users)
        self.turns_U = 6.0 + rng.gamma(3.0, 3.0, users)
        self.place_U = rng.random(users)
        self.averse_U = rng.random(users) < world.averse
        self.left_U = np.zeros(users, dtype=np.bool_)
        heard_U = rng.poisson(5.0 * self.turns_U)
        self.expected_U = (rng.binomial(heard_U, self.accepts_U) + 6.0 * 0.6) / (heard_U + 6.0)
        self.expected_back_U = np.asarray((rng.binomial(6, self.comes_U) + 6.0 * 0.9) / 12.0, dtype=np.float64)

    def day(self) -> None:
        """Draw who comes today, and their turns in each slot."""
        self.here_U = self.rng.random(self.world.users) < self.comes_U
        rate_U = np.where(self.here_U, self.turns_U, 0.0) / SLOTS_A_DAY
        self._turns_US = self.rng.poisson(rate_U[:, None], (self.world.users, SLOTS_A_DAY))

    def slot(self, j: int, share: float) -> TimeSlot:
        """The turns of today's slot j, with the candidate on a share of the users."""
        turns_U = np.where(self.left_U, 0, self._turns_US[:, j])
        who = np.flatnonzero(turns_U)
        treated_R = self.place_U[who] < share
        hit_R = treated_R & self.averse_U[who]
        good_R = self.rng.binomial(turns_U[who], np.where(hit_R, self.world.liked, self.accepts_U[who]))
        bad_R = hit_R & (good_R < turns_U[who])
        self.left_U[who] = bad_R & (self.rng.random(len(who)) < self.world.leave)
        return TimeSlot(
            day=0,
            people_R=who,
            turns_R=turns_U[who].astype(np.float64),
            good_R=good_R.astype(np.float64),
            expected_R=self.expected_U[who],
            treated_R=treated_R,
        )

    def back(self, retention: Retention, day: int, share: float) -> TimeSlot:
        """The rows of a day that is over: all who had come before."""
        rows = list(retention.rows(day))
        who = np.array([int(user) for (_, user), _ in rows], dtype=np.int64)
        return TimeSlot(
            day=day,
            people_R=who,
            turns_R=np.ones(len(who)),
            good_R=np.array([known["user.returned"] for _, known in rows]),
            expected_R=self.expected_back_U[who],
            treated_R=self.place_U[who] < share,
        )


def slots(
    world: World, seed: int, days: int, metrics: tuple[Metric, ...] = METRICS, *, share: float | None = None
) -> Iterator[tuple[float, Trial, int]]:
    """A trial, slot by slot: seconds since it began, the trial with the slot in it, and how many users came so far.

    With `share`, the candidate's share is constant; without it, it is what the trial says after each look of the caller.
    """
    town, trial, retention = Town(world, seed), Trial(CONFIG, active=world.users, metrics=metrics), Retention(0.0)
    came_U = np.zeros(world.users, dtype=np.bool_)
    for day in range(days):
        town.day()
        trial.share = trial.share if share is None else share
        morning, today_U = trial.share, np.zeros(world.users, dtype=np.bool_)
        for j in range(SLOTS_A_DAY):
            slot, end = town.slot(j, trial.share), day * DAY + (j + 1) * CONFIG.slot_s
            for user in slot.people_R[~today_U[slot.people_R]]:
                retention.see(("", str(user)), end - 1.0)
            came_U[slot.people_R] = today_U[slot.people_R] = True
            outcomes: dict[str, Mapping[str, TimeSlot]] = {"acceptance": {POOLED: slot}}
            if end == retention.end(day) and metrics == METRICS:
                back = town.back(retention, day, morning)
                trial.come_back(back, morning)
                outcomes["returned"] = {POOLED: back}
            trial.add(slot, outcomes, end)
            yield end, trial, int(came_U.sum())


def after_two_days(world: World, seed: int, metrics: tuple[Metric, ...] = METRICS) -> NextAction:
    """The one look after two days with half of the users on the candidate."""
    *_, (end, trial, _) = slots(world, seed, 2, metrics, share=0.5)
    return trial.look(end).next


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """How a trial went: the hours and users until it shipped (None: it did not), how it ended, and why."""

    shipped_h: float | None = None
    shipped_users: int | None = None
    end: str = "stands"
    ended_h: float | None = None
    why: str = ""


def followed(world: World, seed: int, metrics: tuple[Metric, ...] = METRICS, days: int = 4) -> Followed:
    """The trial with a look each half hour, until it is blocked or taken back, or for `days` days."""
    found = Followed()
    for end, trial, came in slots(world, seed, days, metrics):
        decision = trial.look(end)
        if decision.next is NextAction.SHIP:
            found = replace(found, shipped_h=end / 3600.0, shipped_users=came)
        if decision.next in OVER:
            return replace(found, end=decision.next.value, ended_h=end / 3600.0, why=decision.reason)
    return found


def falsely_worse(seed: int, days: int = 4) -> bool:
    """Equal versions, half and half: whether `returned` was called worse at any look, at the level of one of all default guardrails."""
    alpha = CONFIG.false_stops / CONFIG.trials_a_week / 2 / len(DEFAULT_GUARDRAILS)
    town, retention, contrast = Town(EQUAL, seed), Retention(0.0), Contrast()
    for day in range(days):
        town.day()
        for user in np.flatnonzero(town.here_U):
            retention.see(("", str(user)), day * DAY + 1.0)
        contrast.add(town.back(retention, day, 0.5))
        effect = contrast.effect()
        if log_evidence(effect.difference, effect.variance, -1) >= -math.log(alpha):
            return True
    return False


def main() -> None:
    """Print a line for each rule and world, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--out", default=str(RESULT), help="where the figures go")
    asked = parser.parse_args()
    results: list[dict[str, Any]] = []
    for label, world in (("leavers", World()), ("equal", EQUAL)):
        for rule, metrics in (("turns alone", METRICS[:1]), ("with returned", METRICS)):
            looked = Counter(after_two_days(world, seed, metrics).value for seed in range(asked.runs))
            runs = [followed(world, seed, metrics) for seed in range(asked.runs)]
            shipped = [run for run in runs if run.shipped_h is not None]
            results.append(
                {
                    "world": label,
                    "rule": rule,
                    "runs": asked.runs,
                    "at_48_h": looked,
                    "shipped": len(shipped),
                    "hours": median(run.shipped_h or 0.0 for run in shipped) if shipped else None,
                    "users": median(run.shipped_users or 0 for run in shipped) if shipped else None,
                    "ended": Counter(run.end for run in runs),
                    "ended_h": median([run.ended_h for run in runs if run.ended_h is not None] or [math.nan]),
                    "why": Counter(run.why.split(":")[0] for run in runs if run.why),
                }
            )
            print(results[-1], flush=True)
    false = sum(falsely_worse(seed) for seed in range(10 * asked.runs))
    print(f"equal: returned worse without a tolerance in {false} of {10 * asked.runs}", flush=True)
    with open(asked.out, "w", encoding="utf-8") as file:
        json.dump({"machine": machine(), "results": results, "false": false}, file, indent=1)


if __name__ == "__main__":
    main()
