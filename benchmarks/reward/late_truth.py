"""Learning early from late truth: steps an hour, and the direction of the gradient, from early rewards, from predicted and from late ones.

    python -m benchmarks.reward.late_truth [--seeds 3] [--hours 96] [--pace 60]

A policy chooses one of three kinds of answer in each of six contexts. Some kinds are accepted at once and taken back the next day: whether
they are shows after five minutes, in the share of lines that is still there. All goes through the real reward desk in virtual time, with
`learn.batch = "auto"`, a trainer that looks every ten minutes and is served at once, and `reward.max_staleness` as shipped:

- *early*: the window is an hour, and what happens later is not seen;
- *surrogate*: the same with `reward.surrogate.truth_after_s` = 24 h;
- *truth*: the window is 24 h.

*Steps an hour* are those after the first day. *Cosine* is that of the sum of these steps' gradients with the gradient of the late reward,
for a policy that stays uniform; *one step* the mean over single steps. *Reward* is the mean late reward of the policy at the end, where it
follows its gradients.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from benchmarks.contender import RESULTS, machine
from numpy.typing import NDArray

from ostinato.core.errors import NoSignal
from ostinato.core.records import Arm, Batch, PolicyVersion, Turn
from ostinato.core.seams import Folds
from ostinato.reward.config import RewardConfig, SurrogateConfig
from ostinato.reward.ledger_entries import Taught
from ostinato.reward.pipeline import RewardDesk
from ostinato.reward.runners import asker_of, late_asker_of
from ostinato.reward.surrogate import SurrogateQuality
from ostinato.testing.log import MemoryLog
from ostinato.testing.records import a_delivery, a_signal, a_turn

RESULT = RESULTS / "late_truth.json"
HOUR, DAY = 3600.0, 86_400.0
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class World:
    """What people do with each kind of answer (columns) in each context (rows), and when that changes.

    `accepted_CK`: the share that they accept; `lasting_CK`: of these, the share that lasts, which the lines kept after five minutes show.
    `blind_from`: hours from which on these lines tell nothing of what lasts. `faked_from`: hours from which on live's answers of the last
    kind look as if they lasted.
    """

    people: int = 90
    control: float = 0.3  # share of people
    silent: float = 0.1  # share of turns that nobody reacts to
    late_s: float = 20 * HOUR  # when people find that an answer does not last
    accepted_CK: Sequence[Sequence[float]] = ((0.5, 0.4, 0.9), (0.3, 0.6, 0.8), (0.6, 0.5, 0.5)) * 2
    lasting_CK: Sequence[Sequence[float]] = ((0.8, 0.9, 0.1), (0.9, 0.5, 0.1), (0.2, 0.8, 0.5)) * 2
    blind_from: float = float("inf")
    faked_from: float = float("inf")

    @property
    def late_CK(self) -> Floats:
        """The mean late reward: 0.75 for what lasts, -0.25 for what does not, 0 without a reaction."""
        return (1.0 - self.silent) * (np.array(self.accepted_CK) * np.array(self.lasting_CK) - 0.25)


@dataclass
class Run:
    """A desk over a world: people come, and every `look_s` seconds the trainer looks for a batch.

    `ages`: of each batch, the age of its oldest turn in seconds. `gradients_SCK`: of each step, with its time.
    """

    config: RewardConfig
    world: World = field(default_factory=World)
    seed: int = 0
    rate: float = 0.0
    look_s: float = 600.0
    folds: Folds | None = None

    def __post_init__(self) -> None:
        self.log, self.now, self.rng = MemoryLog(), [0.0], np.random.default_rng(self.seed)
        self.number, self.step, self.later = 0, 0, list[tuple[float, Any]]()
        self.logits_CK = np.zeros(np.shape(self.world.accepted_CK))
        self.ages, self.gradients = list[float](), list[tuple[float, Floats]]()
        self.open()

    def open(self) -> None:
        """Open a desk, over the same log."""
        self.desk = RewardDesk(
            self.log,
            asker_of(self.config),
            lambda: self.now[0],
            self.config,
            folds=self.folds,
            taught=Taught(every=True),
            late_asker=late_asker_of(self.config),
        )

    @property
    def policy_CK(self) -> Floats:
        """The chance of each kind of answer, by context."""
        odds = np.exp(self.logits_CK)
        return odds / odds.sum(axis=1, keepdims=True)

    @property
    def quality(self) -> SurrogateQuality:
        """How well late rewards were predicted."""
        return self.desk.surrogate["default"]

    async def go(self, hours: float, pace: float) -> None:
        """Let `pace` turns an hour come for so long."""
        for _ in range(round(hours * HOUR / self.look_s)):
            await self.log.append(*self._rows(int(self.rng.poisson(pace * self.look_s / HOUR))))
            self.now[0] += self.look_s
            made = None
            with contextlib.suppress(NoSignal):  # all rewards are the same: these turns are held back
                made = await self.desk.batch(self.step + 1, 12, PolicyVersion(number=0, hash="00"))
            if made is not None:
                self.step = made.row.step
                self._learn(made.row, [sample.turn for sample in made.samples])

    def _rows(self, count: int) -> list[Any]:
        now = self.now[0]
        rows = [row for at, row in self.later if at <= now]
        self.later = [each for each in self.later if each[0] > now]
        for _ in range(count):
            self.number += 1
            user = int(self.rng.integers(self.world.people))
            control = user < self.world.control * self.world.people
            context = int(self.rng.integers(len(self.logits_CK)))
            chances = np.full(3, 1 / 3) if control else self.policy_CK[context]
            kind, at = int(self.rng.choice(3, p=chances)), now + float(self.rng.random()) * self.look_s
            arm = Arm.CONTROL if control else Arm.LIVE
            turn = a_turn(f"{self.number}:0", user=f"u{user}", arm=arm, version=self.step, sampled=(kind,))
            turn = replace(turn, prompt_ids=(context,), started_at=at - 1.0, ended_at=at, episode=f"e{self.number}")
            rows += [turn, a_delivery(turn, at=at), *self._said(turn, context, kind, faked=not control and kind == 2)]
        return rows

    def _said(self, turn: Turn, context: int, kind: int, *, faked: bool) -> list[Any]:
        """What is said now; what is said the next day is kept for later."""
        at, hour = turn.ended_at, turn.ended_at / HOUR
        silent, accepted, lasting, blind = self.rng.random(4)
        if silent < self.world.silent:
            return []
        if accepted >= self.world.accepted_CK[context][kind]:
            return [a_signal(turn, "rejected", at=at + 60.0)]
        lasts = lasting < self.world.lasting_CK[context][kind]
        seen = 0.95 if lasts or (faked and hour >= self.world.faked_from) else 0.05
        if not (blind < 0.5 if hour >= self.world.blind_from else lasts):
            late = at + self.world.late_s
            self.later.append((late, a_signal(turn, "undone", at=late)))
        return [
            a_signal(turn, "accepted", at=at + 60.0),
            a_signal(turn, "lines_kept_5m", at=at + 300.0, value=seen),
        ]

    def _learn(self, batch: Batch, turns: Sequence[Turn]) -> None:
        gradient_CK, policy_CK = np.zeros_like(self.logits_CK), self.policy_CK
        for turn, credit in zip(turns, batch.credits, strict=True):
            context, kind = turn.prompt_ids[0], turn.sampled_ids[0]
            gradient_CK[context] += credit[0] * (np.arange(3) == kind) - credit[0] * policy_CK[context]
        self.ages.append(batch.at - min(turn.ended_at for turn in turns))
        self.gradients.append((batch.at, gradient_CK))
        self.logits_CK = self.logits_CK + self.rate * gradient_CK / np.sqrt(len(turns))

    def late_gradient(self) -> Floats:
        """The gradient of the mean late reward, at the policy as it is."""
        late_CK, policy_CK = self.world.late_CK, self.policy_CK
        return policy_CK * (late_CK - (policy_CK * late_CK).sum(axis=1, keepdims=True))


def config_of(kind: str, **more: Any) -> RewardConfig:
    """The settings of "early", "surrogate" or "truth"; `more` are the surrogate's."""
    window = DAY if kind == "truth" else HOUR
    settings = {"truth_after_s": DAY if kind == "surrogate" else 0.0, "signals": ("lines_kept_5m",), **more}
    return RewardConfig(options={"window": window}, surrogate=SurrogateConfig(**settings))


def cosine(one: Floats, other: Floats) -> float:
    """Of two gradients."""
    return float((one * other).sum() / max(1e-12, float(np.linalg.norm(one) * np.linalg.norm(other))))


async def figures(kind: str, seed: int, hours: float, pace: float) -> dict[str, Any]:
    """One row of the table."""
    still, learns = Run(config_of(kind), seed=seed), Run(config_of(kind), seed=seed, rate=0.2)
    await still.go(hours, pace)
    await learns.go(hours, pace)
    steps = [gradient for at, gradient in still.gradients if at > DAY + HOUR]
    truth, quality = still.late_gradient(), still.desk.surrogate.get("default")
    return {
        "learned_from": kind,
        "seed": seed,
        "steps_an_hour": len(steps) / (hours - 25.0),
        "cosine": cosine(sum(steps, np.zeros_like(truth)), truth),
        "one_step": float(np.mean([cosine(each, truth) for each in steps])) if steps else None,
        "reward": float((learns.policy_CK * learns.world.late_CK).sum(axis=1).mean()),
        "quality": None if quality is None else asdict(quality),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--hours", type=float, default=96.0)
    parser.add_argument("--pace", type=float, default=60.0, help="turns an hour")
    args = parser.parse_args()
    rows = list[dict[str, Any]]()
    print(f"{'learned from':<14}{'seed':>5}{'steps/h':>9}{'cosine':>9}{'one step':>10}{'reward':>9}{'correlation':>13}")
    for kind in ("early", "surrogate", "truth"):
        for seed in range(args.seeds):
            row = asyncio.run(figures(kind, seed, args.hours, args.pace))
            rows.append(row)
            one = "" if row["one_step"] is None else f"{row['one_step']:.2f}"
            correlation = "" if row["quality"] is None else f"{row['quality']['correlation']:.3f}"
            print(
                f"{kind:<14}{seed:>5}{row['steps_an_hour']:>9.2f}{row['cosine']:>9.3f}{one:>10}{row['reward']:>9.3f}{correlation:>13}",
                flush=True,
            )
    RESULT.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
