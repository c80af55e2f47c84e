"""The value of a baseline: the noise of the gradient that is left with it, on simulated populations of users.

A turn's gradient is its advantage times the gradient of its answer's log-probability, whose square grows with the answer's length. So the
noise is the sum of tokens^2 (reward - baseline)^2, and E[A^2], which counts every answer alike, stands beside it. Both are printed
as shares of what the batch mean leaves. Rewards are 1 (accepted) or 0; users differ in taste, prompts in what they are worth.

In the worlds `shared` (half of the prompts asked by many), `repeated` (all of them, by a policy that improves from 25 to 50%), `unique`
(none) and `drifting` (users whose taste changes) rejected answers are about twice as long as accepted ones; in `short` half as long; in
`alike` length tells nothing. "user mean" shrinks each user's mean towards the overall mean. "accepted" knows each turn's true
probability: no baseline has a lower E[A^2], but it is not the one with the least noise.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from benchmarks.contender import RESULTS

from ostinato.reward.baseline import Baseline, BaselineInputs
from ostinato.reward.config import BaselineConfig

BATCH, BATCHES, WARM = 144, 60, 10


@dataclass(frozen=True)
class World:
    """A simulated population.

    `repeats`: the share of prompts that are asked again; `quirk`: how much prompts differ, in logits; `drift`: how fast tastes change
    per turn of a user; `first`, `last`: the policy's logit in the first and the last batch; `rejected`: log of a rejected answer's
    tokens beyond an accepted one's.
    """

    users: int = 200
    prompts: int = 150
    repeats: float = 0.5
    quirk: float = 0.5
    drift: float = 0.0
    first: float = 0.9
    last: float = 0.9
    rejected: float = 0.8


WORLDS = {
    "shared": World(),
    "repeated": World(users=40, prompts=60, repeats=1.0, quirk=1.0, first=-1.1, last=0.0),
    "unique": World(repeats=0.0),
    "drifting": World(users=40, repeats=0.0, drift=0.02),
    "short": World(rejected=-0.8),
    "alike": World(rejected=0.0),
}


@dataclass(frozen=True)
class Simulated:
    """One simulated turn: what a baseline may know of it, its answer's tokens, its reward, and the chance that it would be accepted."""

    inputs: BaselineInputs
    tokens: int
    reward: float
    chance: float


def population(world: World, seed: int, batches: int = BATCHES) -> list[list[Simulated]]:
    """Batches of turns by simulated users."""
    rng = np.random.default_rng(seed)
    taste_U = rng.normal(0.0, 0.8, world.users)
    busy_U = rng.dirichlet(np.full(world.users, 2.0)).cumsum()
    length_P, quirk_P = rng.lognormal(5.0, 0.9, world.prompts), rng.normal(0.0, world.quirk, world.prompts)
    made: list[list[Simulated]] = []
    for batch in range(batches):
        level = world.first + (world.last - world.first) * batch / batches
        turns: list[Simulated] = []
        for i in range(BATCH):
            user, which = (
                int(busy_U.searchsorted(busy_U[-1] * rng.random(), side="right")),
                int(rng.integers(world.prompts)),
            )
            taste_U[user] = (1.0 - world.drift) * taste_U[user] + rng.normal(0.0, 0.8 * math.sqrt(2.0 * world.drift))
            prompt, length, quirk = f"p{which}", length_P[which], quirk_P[which]
            if rng.random() >= world.repeats:
                prompt, length, quirk = f"{batch}-{i}", rng.lognormal(5.0, 0.9), rng.normal(0.0, world.quirk)
            chance = 1.0 / (1.0 + math.exp(-(level + taste_U[user] + quirk)))
            accepted = bool(rng.random() < chance)
            inputs = BaselineInputs(
                person=("simulated", f"u{user}"), prompt=prompt, length=int(length), started_at=3600.0 * batch + i
            )
            tokens = max(1, int(rng.lognormal(2.5 + world.rejected * (0.5 - accepted), 0.7)))
            turns.append(Simulated(inputs, tokens, float(accepted), chance))
        made.append(turns)
    return made


class UserMean:
    """Each user's mean reward, shrunk by ten turns at the overall mean."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
        self._total, self._turns = 0.0, 0

    def predict(self, inputs: BaselineInputs) -> float:
        """The user's shrunk mean."""
        overall = self._total / max(1, self._turns)
        total, count = self._of.get(inputs.person[1], (0.0, 0))
        return (total + 10 * overall) / (count + 10)

    def observe(self, inputs: BaselineInputs, value: float, tokens: int) -> None:
        """Count one reward."""
        total, count = self._of[inputs.person[1]]
        self._of[inputs.person[1]] = (total + value, count + 1)
        self._total, self._turns = self._total + value, self._turns + 1


def measure(batches: list[list[Simulated]], config: BaselineConfig | None = None) -> dict[str, tuple[float, float]]:
    """Gradient noise and E[A^2] of each baseline, as shares of the batch mean's, over all batches but the first WARM. Those that learn
    predict a batch before they see its rewards.
    """
    config = config or BaselineConfig()
    learners: dict[str, Baseline | UserMean] = {
        "user mean": UserMean(),
        "every turn alike": Baseline(config.model_copy(update={"length_exponent": 0.0})),
        "ours": Baseline(config),
    }
    left: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for index, batch in enumerate(batches):
        mean = sum(each.reward for each in batch) / len(batch)
        for each in batch if index >= WARM else ():
            guesses = {"batch mean": mean, "accepted": each.chance}
            guesses |= {name: learner.predict(each.inputs) for name, learner in learners.items()}
            for name, guess in guesses.items():
                square = (each.reward - guess) ** 2
                left[name].append((each.tokens**2 * square, square))
        for each in batch:
            for learner in learners.values():
                learner.observe(each.inputs, each.reward, each.tokens)
    sums = {name: np.sum(values, axis=0) for name, values in left.items()}
    return {name: tuple((value / sums["batch mean"]).tolist()) for name, value in sums.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "baseline.json")
    args = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {}
    print(f"{'world':<12}{'baseline':<20}{'gradient noise':>16}{'E[A^2]':>10}")
    for name, world in WORLDS.items():
        runs = [measure(population(world, seed)) for seed in range(args.seeds)]
        found[name] = {kind: np.mean([run[kind] for run in runs], axis=0).tolist() for kind in runs[0]}
        for kind, (noise, square) in found[name].items():
            print(f"{name:<12}{kind:<20}{noise:>15.3f}x{square:>9.3f}x")
    args.out.write_text(
        json.dumps({"columns": ["gradient noise", "E[A^2]"], "seeds": args.seeds, "worlds": found}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
