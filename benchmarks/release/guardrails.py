"""Guardrails on rare events: false stops, and how soon harm is detected.

    python -m benchmarks.release.guardrails           # about ten minutes on one core

A trial of four days with half of the users treated (simulated, as in `benchmarks.release.path.world`), and an event on a share of turns
that happens more often to some users than to others. The guardrail stops the trial by the default settings, as one of the default
guardrails. `false` is the share of trials without harm that it stopped; its budget for these is `alpha`. With harm, the figures are the
share stopped and the median hours until the stop.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass
from statistics import median

import numpy as np
from benchmarks.contender import RESULTS, machine
from benchmarks.release.path.world import SLOTS_A_DAY, Habits, Product

from ostinato.release.metrics.config import DEFAULT_GUARDRAILS
from ostinato.release.trial.config import TrialConfig
from ostinato.release.trial.contrast import Contrast, TimeSlot, log_evidence

RESULT = RESULTS / "release_guardrails.json"
CONFIG = TrialConfig()
ALPHA = CONFIG.false_stops / CONFIG.trials_a_week / 2 / len(DEFAULT_GUARDRAILS)
DAYS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A guardrail and the candidate's effect on it. Example: ``Kind(users=1000, usual=0.01, harmed=0.03, tolerance=0.01)``"""

    users: int
    usual: float
    harmed: float
    tolerance: float


KINDS = tuple(
    Kind(users=users, usual=usual, harmed=harmed, tolerance=tolerance)
    for users in (1_000, 10_000)
    for usual, tolerance, harms in (
        (0.002, 0.01, (0.002, 0.012, 0.05)),
        (0.01, 0.01, (0.01, 0.02, 0.03, 0.05)),
        (0.05, 0.02, (0.05, 0.07, 0.10)),
    )
    for harmed in harms
)


def stopped_after(kind: Kind, seed: int, *, share: float = 0.5) -> int | None:
    """The number of slots until the guardrail stopped the trial, or None if it never did."""
    product, rng = Product(Habits(active=kind.users, correlation=0.05), seed), np.random.default_rng(seed + 10**6)
    treated_U = rng.random(product.users) < share
    prone_U = rng.gamma(0.5, 2.0, product.users)
    chance_U = np.clip(np.where(treated_U, kind.harmed, kind.usual) * prone_U, 0.0, 1.0)
    contrast = Contrast(CONFIG.most_turns_a_day)
    for j in range(DAYS * SLOTS_A_DAY):
        seen = product.visits()
        events_R = rng.binomial(seen.turns_R, chance_U[seen.people_R]).astype(np.float64)
        contrast.add(
            TimeSlot(
                day=j // SLOTS_A_DAY,
                people_R=seen.people_R,
                turns_R=seen.turns_R.astype(np.float64),
                good_R=events_R,
                expected_R=np.zeros(len(events_R)),
                treated_R=treated_U[seen.people_R],
            )
        )
        effect = contrast.effect()
        enough = effect.freedom >= CONFIG.min_people and effect.turns >= CONFIG.min_turns
        if enough and log_evidence(effect.difference - kind.tolerance, effect.variance, 1) >= -math.log(ALPHA):
            return j + 1
    return None


def main() -> None:
    """Print a line for each kind, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--out", default=str(RESULT), help="where the figures go")
    asked, found = parser.parse_args(), []
    for kind in KINDS:
        ends = [end for seed in range(asked.runs) if (end := stopped_after(kind, seed)) is not None]
        hours = median(ends) / 2 if ends else None
        found.append({**asdict(kind), "runs": asked.runs, "stopped": len(ends) / asked.runs, "hours": hours})
        label = "false" if kind.harmed <= kind.usual + kind.tolerance + 1e-9 else "stopped"
        print(f"{kind}: {label} {len(ends)} of {asked.runs}, median {hours} h (alpha {ALPHA:.4f})", flush=True)
    with open(asked.out, "w", encoding="utf-8") as file:
        json.dump({"machine": machine(), "alpha": ALPHA, "kinds": found}, file, indent=1)


if __name__ == "__main__":
    main()
