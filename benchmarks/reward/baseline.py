"""The value of a baseline: E[A^2] of rewards minus baseline on a simulated population, before normalisation.

Users differ in taste, prompts in length, and some prompts are asked by many users. Rewards are 1 (accepted) or 0, so that
the batch mean's E[A^2] is the variance p(1 - p). "oracle" knows each turn's true probability; nothing can do better.
The population's spread is chosen so that the oracle's figure is about three quarters of the batch mean's. The table only shows
how much of that possible gain our baseline achieves.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import numpy as np
from benchmarks.contender import RESULTS

from ostinato.core.records import Arm, Finish, PolicyVersion, Sampling, Span, Turn
from ostinato.reward.baseline import Baseline, context_of

USERS, POPULAR, BATCH, BATCHES, WARM = 200, 150, 144, 60, 10
RESULT = RESULTS / "baseline.json"


@dataclass(frozen=True)
class Simulated:
    """One simulated turn, its simulated user's reward, and the probability that it would be liked."""

    turn: Turn
    reward: float
    probability: float


def population(seed: int, batches: int = BATCHES) -> list[list[Simulated]]:
    """Batches of turns by simulated users with their own tastes, who ask popular and unique prompts of different lengths."""
    rng = np.random.default_rng(seed)
    taste_U = rng.normal(0.0, 0.8, USERS)
    activity_U = rng.dirichlet(np.full(USERS, 2.0))
    popular = [tuple(rng.integers(0, 256, int(length)).tolist()) for length in rng.lognormal(5.0, 0.9, POPULAR)]
    quirk_P = rng.normal(0.0, 0.5, POPULAR)
    policy = PolicyVersion(number=0, hash="00")
    made: list[list[Simulated]] = []
    for batch in range(batches):
        made.append([])
        for i in range(BATCH):
            user = int(rng.choice(USERS, p=activity_U))
            which = int(rng.integers(POPULAR))
            if rng.random() < 0.5:
                prompt, quirk = popular[which], float(quirk_P[which])
            else:
                prompt, quirk = tuple(rng.integers(0, 256, int(rng.lognormal(5.0, 0.9))).tolist()), rng.normal(0.0, 0.5)
            score = 0.9 + taste_U[user] + quirk - 1.2 * (math.log1p(len(prompt)) - 5.0)
            probability = 1.0 / (1.0 + math.exp(-score))
            turn = Turn(
                id=f"{batch}-{i}:0",
                episode=f"{batch}-{i}",
                parent=None,
                user=f"u{user}",
                tenant="simulated",
                arm=Arm.LIVE,
                propensity=1.0,
                prompt_ids=prompt,
                sampled_ids=(1,),
                logprobs=(-0.5,),
                spans=(Span(policy=policy, tokens=1),),
                sampling=Sampling(max_tokens=1),
                finish=Finish.STOP,
                text="x",
                started_at=float(3600 * batch + i),
                ended_at=float(3600 * batch + i + 1),
            )
            made[-1].append(Simulated(turn, float(rng.random() < probability), probability))
    return made


def measure(batches: list[list[Simulated]]) -> dict[str, float]:
    """E[A^2] per baseline over all batches but the first WARM. "ours" and "user mean" predict a batch before they see its rewards."""
    ours = Baseline()
    sums: dict[str, float] = {}
    counts: dict[str, float] = {}
    squares: dict[str, list[float]] = {"none": [], "batch mean": [], "user mean": [], "ours": [], "oracle": []}
    for index, batch in enumerate(batches):
        mean = sum(each.reward for each in batch) / len(batch)
        overall = sum(sums.values()) / max(1.0, sum(counts.values()))
        for each in batch:
            user = each.turn.user
            user_mean = (sums.get(user, 0.0) + 10 * overall) / (counts.get(user, 0.0) + 10)
            guesses = (0.0, mean, user_mean, ours.predict(context_of(each.turn)), each.probability)
            if index >= WARM:
                for values, guess in zip(squares.values(), guesses, strict=True):
                    values.append((each.reward - guess) ** 2)
        for each in batch:
            ours.observe(context_of(each.turn), each.reward)
            sums[each.turn.user] = sums.get(each.turn.user, 0.0) + each.reward
            counts[each.turn.user] = counts.get(each.turn.user, 0.0) + 1.0
    return {name: float(np.mean(values)) for name, values in squares.items()}


def main() -> None:
    seeds = range(3)
    runs = [measure(population(seed)) for seed in seeds]
    means = {name: float(np.mean([run[name] for run in runs])) for name in runs[0]}
    print(f"{'baseline':<12}{'E[A^2]':>8}{'vs batch mean':>16}")
    for name, value in means.items():
        print(f"{name:<12}{value:>8.3f}{value / means['batch mean']:>15.2f}x")
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(
        json.dumps({"metric": "E[A^2]", "seeds": len(seeds), "mean": means, "runs": runs}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
