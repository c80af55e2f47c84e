"""Harm to a minority: how soon the guardrail `harmed_users` finds it, and how often it is wrong where there is none.

    python -m benchmarks.release.minority          # two minutes on one core

One user in twenty loses 20 points of acceptance and everybody else gains one, so that the average hardly moves; half of the users meet the
candidate, and each has a past of five days. `found` is at the level of one of the default guardrails, looked at eight times a day. Without
harm, `false` is the share of runs in which the evidence ever passed a level, looked at as often.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass

import numpy as np
from benchmarks.contender import RESULTS, machine

from ostinato.release.metrics.config import DEFAULT_GUARDRAILS
from ostinato.release.trial.config import TrialConfig
from ostinato.release.trial.contrast import Contrast, TailContrast, TimeSlot, log_evidence

RESULT = RESULTS / "release_minority.json"
CONFIG = TrialConfig()
ALPHA = CONFIG.false_stops / CONFIG.trials_a_week / 2 / len(DEFAULT_GUARDRAILS)
LOOKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A world. `harmed` is the share of users who lose `loss`; the others gain `gain`. `turns` are a user's a day, on average."""

    users: int = 10_000
    turns: float = 10.0
    days: int = 4
    harmed: float = 0.05
    loss: float = 0.20
    gain: float = 0.01
    share: float = 0.5


@dataclass(frozen=True, slots=True)
class Found:
    """The largest evidence at any look, when it first passed `ALPHA` (days; None: never), and the average's change."""

    evidence: float
    days: float | None
    average: float


def run(kind: Kind, seed: int) -> Found:
    """One trial."""
    rng = np.random.default_rng(seed)
    accepts_U, turns_U = rng.beta(6.0, 4.0, kind.users), 2.0 + rng.gamma(2.0, (kind.turns - 2.0) / 2.0, kind.users)
    treated_U = rng.random(kind.users) < kind.share
    change_U = np.where(rng.random(kind.users) < kind.harmed, -kind.loss, kind.gain)
    chance_U = np.clip(accepts_U + np.where(treated_U, change_U, 0.0), 0.0, 1.0)
    past_U = rng.poisson(5.0 * turns_U)
    expected_U = np.asarray((rng.binomial(past_U, accepts_U) + 6.0 * 0.6) / (past_U + 6.0), dtype=np.float64)
    tail, average = TailContrast(0.05, 1), Contrast(CONFIG.most_turns_a_day)
    most, at = -math.inf, None
    for look in range(kind.days * LOOKS):
        n_U = rng.poisson(turns_U / LOOKS)
        who = np.flatnonzero(n_U)
        slot = TimeSlot(
            day=look // LOOKS,
            people_R=who,
            turns_R=n_U[who].astype(np.float64),
            good_R=rng.binomial(n_U[who], chance_U[who]).astype(np.float64),
            expected_R=expected_U[who],
            treated_R=treated_U[who],
        )
        tail.add(slot)
        average.add(slot)
        effect = tail.effect()
        most = max(most, log_evidence(effect.difference, effect.variance, 1))
        if at is None and most >= -math.log(ALPHA):
            at = (look + 1) / LOOKS
    return Found(most, at, average.effect().difference)


HARM = (
    Kind(),
    Kind(days=7),
    Kind(turns=20.0),
    Kind(turns=20.0, days=7),
    Kind(turns=5.0, days=7),
    Kind(days=7, share=0.9),
    Kind(users=40_000),
    Kind(users=2_000, days=7),
)
NONE = (Kind(users=1_000, harmed=0.0, gain=0.0), Kind(users=1_000, harmed=0.0, gain=0.0, share=0.9))


def main() -> None:
    """Print a line for each world, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--out", default=str(RESULT), help="where the figures go")
    asked, results = parser.parse_args(), []
    for kind in HARM:
        runs = [run(kind, seed) for seed in range(asked.runs)]
        days = sorted(each.days for each in runs if each.days is not None)
        average = float(np.mean([each.average for each in runs]))
        results.append({**asdict(kind), "runs": asked.runs, "found": len(days), "days": days, "average": average})
        middle = days[len(days) // 2] if days else None
        print(
            f"{kind}: found {len(days)} of {asked.runs}, median day {middle}, average {100 * average:+.2f} pp",
            flush=True,
        )
    for kind in NONE:
        most = [run(kind, seed).evidence for seed in range(20 * asked.runs)]
        false = {
            alpha: float(np.mean([each >= -math.log(alpha) for each in most]))
            for alpha in (0.2, 0.1, 0.05, 0.01, ALPHA)
        }
        results.append({**asdict(kind), "runs": len(most), "false": false})
        print(f"{kind}: false {false} of {len(most)}", flush=True)
    with open(asked.out, "w", encoding="utf-8") as file:
        json.dump({"machine": machine(), "alpha": ALPHA, "kinds": results}, file, indent=1)


if __name__ == "__main__":
    main()
