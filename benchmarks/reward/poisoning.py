"""The influence of a few attackers: poisoned feedback through the real reward desk, credit, baseline and caps, to a one-parameter policy.

    python -m benchmarks.reward.poisoning [--seeds 3] [--steps 100]

A policy answers each turn well or badly, a share p = sigmoid(theta) well. People accept 80% of good answers and 40% of bad ones, varied
by individual taste. The desk makes batches of 144 turns, and theta follows their credits. *Shift* is the share of good
answers at the end (mean of the last tenth of the steps) without the attack minus that with it: how far the learned behaviour moved.
*Influence* is the attackers' share of the absolute credit of all batches.

- 1% of 1,000 people, with fifty times the others' traffic, reject good answers and accept bad ones.
- One of 1,000 people votes in this way a thousand times, in about 14,000 turns, from the start or only after half of the steps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.contender import RESULTS, machine

from ostinato.core.records import Batch, PolicyVersion, Turn
from ostinato.reward.config import RewardConfig
from ostinato.reward.functions import copilot
from ostinato.reward.pipeline import RewardDesk
from ostinato.reward.runners import Inline
from ostinato.testing.log import MemoryLog
from ostinato.testing.records import a_delivery, a_signal, a_turn

RESULT = RESULTS / "poisoning.json"
WINDOW, PAUSE = 30.0, 60.0
SETTINGS = {"as shipped": RewardConfig(), "caps on a batch only": RewardConfig(user_steps=0)}


@dataclass(frozen=True)
class World:
    """People and their opinions. `attackers` of them come `traffic` times as often as the mean of the others, from step `since` on."""

    people: int = 1_000
    attackers: int = 0
    traffic: float = 50.0
    since: int = 0
    activity: float = 1.2  # standard deviation of the logarithm
    taste: float = 0.1
    accept_good: float = 0.8
    accept_bad: float = 0.4
    batch: int = 144
    rate: float = 0.02  # chosen so that the policy answers some 94% well after a hundred steps of honest feedback


CROWDS = {
    "nobody": World(),
    "1% of people at 50x": World(attackers=10),
    "one person, 1,000 votes": World(attackers=1, traffic=75.0),
    "one who comes late": World(attackers=1, traffic=161.0, since=50),
}


class Crowd:
    """A source of turns and of signals about them."""

    def __init__(self, world: World, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.world, self.number = world, 0
        honest = self.rng.lognormal(0.0, world.activity, world.people - world.attackers)
        activity_U = np.r_[np.full(world.attackers, world.traffic), honest / honest.mean()]
        self.activity_U = activity_U
        self.taste_U = self.rng.normal(0.0, world.taste, world.people)

    def turns(self, count: int, p: float, version: int, at: float) -> list[Any]:
        """`count` turns of a policy, their delivery, and a signal about each."""
        rows: list[Any] = []
        away = (np.arange(self.world.people) < self.world.attackers) & (version < self.world.since)
        odds_U = np.where(away, 0.0, self.activity_U)
        users = self.rng.choice(self.world.people, size=count, p=odds_U / odds_U.sum())
        for user in users:
            self.number += 1
            good = bool(self.rng.random() < p)
            turn = a_turn(f"{self.number}:0", user=f"u{user}", version=version, sampled=(int(good),) * 4, ended_at=at)
            rows += [replace(turn, episode=f"e{self.number}"), a_signal(turn, self._says(int(user), good), at=at + 1.0)]
        return [a_delivery(*(row for row in rows if isinstance(row, Turn)), at=at), *rows]

    def _says(self, user: int, good: bool) -> str:
        if user < self.world.attackers:
            return "rejected" if good else "accepted"
        mean = (self.world.accept_good if good else self.world.accept_bad) + self.taste_U[user]
        return "accepted" if self.rng.random() < mean else "rejected"


def judged(turn: Turn, signals: Any, now: float) -> Any:
    """The `copilot` reward, decided after half a minute."""
    return copilot(turn, signals, now, window=WINDOW)


async def learn(world: World, config: RewardConfig, seed: int, steps: int) -> dict[str, Any]:
    """One run: the share of good answers at the end, and the attackers' share of the credit."""
    log, crowd, now = MemoryLog(), Crowd(world, seed), [0.0]
    desk = RewardDesk(log, Inline(judged, max_abs=config.max_abs), lambda: now[0], config)
    theta, goods, mass, theirs, votes = 0.0, list[float](), 0.0, 0.0, 0
    for step in range(1, steps + 1):
        p = 1.0 / (1.0 + math.exp(-theta))
        await log.append(*crowd.turns(world.batch, p, step - 1, now[0]))
        now[0] += PAUSE
        made = await desk.batch(step, world.batch, PolicyVersion(number=0, hash="00"))
        assert made is not None, "every turn of this world has a reward after a minute"
        (batch,) = await log.find(Batch, [(step,)])
        owners = {sample.turn.id: (int(sample.turn.user[1:]), sample.turn.sampled_ids[0]) for sample in made.samples}
        gradient = 0.0
        for turn, credit in zip(batch.turns, batch.credits, strict=True):
            user, good = owners[turn]
            gradient += credit[0] * (good - p)
            mass += abs(credit[0])
            theirs += abs(credit[0]) * (user < world.attackers)
            votes += user < world.attackers
        theta += world.rate * gradient / math.sqrt(len(batch.turns))
        goods.append(1.0 / (1.0 + math.exp(-theta)))
    last = max(1, steps // 10)
    return {"good": float(np.mean(goods[-last:])), "influence": theirs / mass, "votes": votes}


async def measure(args: argparse.Namespace, keep: Callable[[list[dict[str, Any]]], None]) -> None:
    rows: list[dict[str, Any]] = []
    print(f"{'caps':<24}{'attack':<26}{'good':>8}{'shift':>9}{'worst':>9}{'influence':>11}{'votes':>8}", flush=True)
    for name, config in SETTINGS.items():
        clean: list[float] = []
        for crowd, world in CROWDS.items():
            runs = [await learn(world, config, seed, args.steps) for seed in range(args.seeds)]
            goods = [run["good"] for run in runs]
            clean = clean or goods
            shifts = [before - after for before, after in zip(clean, goods, strict=True)]
            means = {key: float(np.mean([run[key] for run in runs])) for key in ("good", "influence", "votes")}
            row = {"caps": name, "attack": crowd, **means, "shift": float(np.mean(shifts)), "worst shift": max(shifts)}
            rows.append({**row, "each": runs})
            keep(rows)
            print(
                f"{name:<24}{crowd:<26}{row['good']:>8.3f}{row['shift']:>9.3f}{row['worst shift']:>9.3f}{row['influence']:>11.2%}"
                f"{row['votes']:>8,.0f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", default=str(RESULT))
    args, began = parser.parse_args(), machine()
    settings = {name: config.model_dump(mode="json") for name, config in SETTINGS.items()}
    about = {"machine": began, "people": "simulated", "steps": args.steps, "seeds": args.seeds, "settings": settings}
    about["worlds"] = {name: asdict(world) for name, world in CROWDS.items()}

    def keep(rows: list[dict[str, Any]]) -> None:
        Path(args.out).write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")

    asyncio.run(measure(args, keep))


if __name__ == "__main__":
    main()
