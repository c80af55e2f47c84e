"""The test of the arms' shares on simulated users: how often it detects a deal that differs from the set shares, and its false alarms.

Newcomers come a hundred at a time, and the test is evaluated after each hundred.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ostinato.release.trial.config import TrialConfig
from ostinato.release.trial.trial import ArmBalance

AT_ONCE = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealt:
    """Users dealt by the `true` shares while the test expects the `set` shares.

    Example: ``Dealt(name="52/48", set=(0.5, 0.5), true=(0.52, 0.48), users=20_000)``
    """

    name: str
    set: tuple[float, ...]
    true: tuple[float, ...]
    users: int


CASES = (
    Dealt(name="50/50 as set", set=(0.5, 0.5), true=(0.5, 0.5), users=100_000),
    Dealt(name="5/10/85 as set", set=(0.05, 0.10, 0.85), true=(0.05, 0.10, 0.85), users=100_000),
    Dealt(name="52/48", set=(0.5, 0.5), true=(0.52, 0.48), users=20_000),
    Dealt(name="51/49", set=(0.5, 0.5), true=(0.51, 0.49), users=50_000),
    Dealt(name="5% canary that loses a fifth", set=(0.05, 0.95), true=(0.04 / 0.99, 0.95 / 0.99), users=20_000),
)


def found(case: Dealt, seed: int) -> int | None:
    """The number of users after which the deal is called wrong, or None."""
    rng, balance = np.random.default_rng((5, seed)), ArmBalance()
    void = math.log(TrialConfig().imbalance)
    for number, newcomers in enumerate(rng.multinomial(AT_ONCE, case.true, case.users // AT_ONCE).tolist(), 1):
        balance.add(newcomers, case.set)
        if balance.log_factor() >= void:
            return number * AT_ONCE
    return None


def shares_found(runs: int) -> list[dict[str, Any]]:
    """A row for each case."""
    rows: list[dict[str, Any]] = []
    for case in CASES:
        users = [count for count in (found(case, seed) for seed in range(runs)) if count is not None]
        median = float(np.median(users)) if users else None
        rows.append({"case": case.name, "runs": runs, "found": len(users) / runs, "median_users": median})
    return rows
