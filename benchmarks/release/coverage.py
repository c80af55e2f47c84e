"""How often a trial's intervals hold with few users: at a single look, and at all looks jointly.

    python -m benchmarks.release.coverage             # about half an hour on one core

Users differ in taste (beta) and in how much they ask (log-normal, many times more for some), come back slot after slot, and half of them
are treated, without effect. `normal` and `student` are 95% intervals at the last look, with Student's t on the effective number of users;
`above` and `below` say how often a one-sided sequence of level 0.05 was beyond the truth at any look, and `planned` how often a bound of
a plan of looks was, if the plan expects what a first trial had in the end.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass

import numpy as np
from benchmarks.contender import RESULTS, machine
from numpy.typing import NDArray
from scipy import stats

from ostinato.release.trial.contrast import Contrast, Effect, TimeSlot, log_evidence
from ostinato.release.trial.group_sequential import GroupSequentialTest, ShipPlan

RESULT = RESULTS / "release_coverage.json"
USERS = (20, 50, 200)
LEVEL = 0.05
SLOTS_A_DAY = 12
_FEWEST = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Covered:
    """Shares of the runs. Example: ``Covered(users=20, mean=0.6, runs=500, normal=0.88, student=0.95, above=0.02, below=0.01,
    planned=0.05)``
    """

    users: int
    mean: float
    runs: int
    normal: float
    student: float
    above: float
    below: float
    planned: float


def effects(rng: np.random.Generator, users: int, mean: float, correlation: float, slots: int) -> list[Effect]:
    """One trial without an effect: the estimated effect after each slot."""
    more = (1.0 - correlation) / correlation
    taste_U, rate_U = rng.beta(mean * more, (1.0 - mean) * more, users), rng.lognormal(-0.5, 1.0, users)
    treated_U: NDArray[np.bool_] = np.arange(users) < users // 2
    contrast, found = Contrast(), list[Effect]()
    for slot in range(slots):
        turns_U = rng.poisson(rate_U)
        people_R = np.flatnonzero(turns_U)
        contrast.add(
            TimeSlot(
                day=slot // SLOTS_A_DAY,
                people_R=people_R,
                turns_R=turns_U[people_R].astype(np.float64),
                good_R=rng.binomial(turns_U, taste_U)[people_R].astype(np.float64),
                expected_R=np.full(len(people_R), mean),
                treated_R=treated_U[people_R],
            )
        )
        found.append(contrast.effect())
    return found


def covered(users: int, mean: float, correlation: float, *, runs: int, slots: int = 16) -> Covered:
    """The shares over `runs` seeded runs."""
    rng = np.random.default_rng(users)
    normal = student = above = below = planned = 0
    first = 1.0 / effects(rng, users, mean, correlation, slots)[-1].variance
    plan = ShipPlan(information={"goal": first}, alpha=LEVEL, limit_s=float(slots))
    for _ in range(runs):
        found = effects(rng, users, mean, correlation, slots)
        planned += _beyond(found, GroupSequentialTest(first, plan))
        last = found[-1]
        error = math.sqrt(last.variance)
        normal += abs(last.difference) <= 1.96 * error
        student += abs(last.difference) <= float(stats.t.ppf(0.975, max(last.freedom - 1.0, 1.0))) * error
        wrong = [
            any(log_evidence(effect.difference, effect.variance, side) >= -math.log(LEVEL) for effect in found)
            for side in (1, -1)
        ]
        above, below = above + wrong[0], below + wrong[1]
    counts = {"normal": normal, "student": student, "above": above, "below": below, "planned": planned}
    return Covered(users=users, mean=mean, runs=runs, **{name: count / runs for name, count in counts.items()})


def _beyond(found: list[Effect], test: GroupSequentialTest) -> bool:
    """True if a bound of the planned looks was above the truth, which is 0; looks begin at five effective users on a side."""
    highest = -math.inf
    for number, effect in enumerate(found, 1):
        if effect.people >= _FEWEST:
            test.add(effect, float(number))
        highest = max(highest, test.lower)
    return highest > 0.0


def main() -> None:
    """Print a line for each size and kind of metric, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--out", default=str(RESULT), help="where the figures go")
    asked = parser.parse_args()
    found: list[Covered] = []
    for mean, correlation in ((0.6, 0.15), (0.05, 0.05)):
        for users in USERS:
            found.append(covered(users, mean, correlation, runs=asked.runs))
            print(found[-1], flush=True)
    with open(asked.out, "w", encoding="utf-8") as file:
        json.dump({"machine": machine(), "covered": [asdict(each) for each in found]}, file, indent=1)


if __name__ == "__main__":
    main()
