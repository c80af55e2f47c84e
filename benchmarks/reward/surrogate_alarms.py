"""How often the surrogate's two alarms are false in a week, and how soon they find what was planted: simulated people, the real regression.

    python -m benchmarks.reward.surrogate_alarms [--runs 60] [--first-seed 0] [--seconds 540] [--worlds WORLD ...]

People come around the clock, with a swing over the day, an activity that differs between them (log-normal), and moods that last for hours
and are everybody's. A turn shows some early values; its late reward, known a day later (or six hours), is good with a chance that these and
the person decide. In *stable* worlds nothing changes for nine days, and live and control are one policy. The week counts that begins two
days after the first late reward. An alarm in it is false. *bound* is a world whose `least_correlation` is the correlation that predictions
really have there, which is the hardest world in which the alarm must be silent; in the others that correlation is well above.

In worlds with a *drop* something changes at the start of the week: `blind`, where early values tell nothing of the late reward any more,
and `faked`, where half of live's turns look better early than they turn out. *hours* are counted from the first late reward of a changed
turn.

Turns are predicted, late rewards learned and alarms looked at every two hours.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.contender import RESULTS, machine
from numpy.typing import NDArray

from ostinato.core.notices import AlarmState
from ostinato.core.records import Arm, Reward, Source
from ostinato.core.verdicts import LATE_REWARD, late_id
from ostinato.reward.alarms import SURROGATE, SURROGATE_GAP, Alarms
from ostinato.reward.config import CoverageConfig, RewardConfig, SurrogateConfig
from ostinato.reward.ledger_entries import TurnFacts
from ostinato.reward.surrogate import Surrogate
from ostinato.testing.records import a_signal, a_turn

RESULT = RESULTS / "surrogate_alarms.json"
HOUR, DAY = 3600.0, 86_400.0
WEEK_H, STEP_H = 7 * 24, 2
GOOD, BAD = 0.75, -0.25
REWARDS = RewardConfig()
TURN = a_turn()
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class World:
    """One product. Rates are turns an hour, spreads are standard deviations of log odds."""

    people: int = 200
    control: float = 0.2  # share of people
    pace: float = 20.0  # turns an hour
    activity: float = 0.7  # of the logarithm of a person's pace
    base: float = 0.5  # the late reward's chance to be good
    told: float = 6.0  # log odds between the worst and the best early value
    taste: float = 0.3  # between people
    mood: float = 0.3  # of everybody's, over hours
    late_h: int = 24
    least: float = 0.3
    drop: str = ""

    def chances(self, kept_R: Floats, odds_R: Floats) -> Floats:
        """Of a good late reward."""
        odds_R = math.log(self.base / (1.0 - self.base)) + self.told * (kept_R - 0.5) + odds_R
        return 1.0 / (1.0 + np.exp(-odds_R))


FEW = World(people=100, control=0.25, taste=0.6)
WORLDS: dict[str, World] = {
    "as it may be": World(),
    "few people": FEW,
    "few people, of whom some come often": replace(FEW, activity=1.2),
    "twenty-one on control": World(people=105, activity=0.3, taste=1.0),
    "many people, more turns": World(people=2_000, pace=80.0),
    "seldom good": World(base=0.05, told=8.0),
    "nearly always good": World(base=0.95, told=8.0),
    "late by six hours": World(late_h=6),
    "moods": World(mood=1.0),
    "bound": World(told=3.0, least=0.38),
    "bound, few people, of whom some come often": replace(FEW, told=3.0, activity=1.2, least=0.34),
    "drop: blind": World(drop="blind"),
    "drop: blind, few people": replace(FEW, drop="blind"),
    "drop: faked": World(drop="faked"),
    "drop: faked, few people": replace(FEW, drop="faked"),
    "drop: faked, many people, more turns": World(people=2_000, pace=80.0, drop="faked"),
}


class Product:
    """People and the regression, two hours at a time."""

    def __init__(self, world: World, seed: int) -> None:
        self._world, self._rng = world, np.random.default_rng(seed)
        pace_P = self._rng.lognormal(0.0, world.activity, world.people)
        self._pace_P = pace_P / pace_P.sum()
        self._taste_P = self._rng.normal(0.0, world.taste, world.people)
        self._control_P = np.arange(world.people) < round(world.control * world.people)
        self._mood, self._number = 0.0, 0
        self._late: dict[int, list[tuple[str, float]]] = {}
        config = SurrogateConfig(truth_after_s=world.late_h * HOUR, signals=("kept",), least_correlation=world.least)
        self.surrogate = Surrogate(config, REWARDS.user_cap, 7 * DAY)
        self.alarms = Alarms(CoverageConfig())

    def pass_on(self, number: int, *, dropped: bool) -> list[str]:
        """Let two hours pass, until `number`. Returns the names of the alarms that were raised at their end."""
        world, rng = self._world, self._rng
        self._mood = 0.8 * self._mood + math.sqrt(1.0 - 0.8**2) * rng.normal(0.0, world.mood)
        count = int(rng.poisson(STEP_H * world.pace * (1.0 + 0.5 * math.sin(2 * math.pi * number / 24))))
        who_R = rng.choice(world.people, count, p=self._pace_P)
        kept_R = rng.random(count)
        shown_R, odds_R = kept_R.copy(), self._taste_P[who_R] + self._mood
        if dropped and world.drop == "blind":
            shown_R = rng.random(count)
        if dropped and world.drop == "faked":
            fakes_R = ~self._control_P[who_R] & (rng.random(count) < 0.5)
            shown_R = np.where(fakes_R, 0.9 + 0.1 * shown_R, shown_R)
        good_R = rng.random(count) < world.chances(kept_R, odds_R)
        liked_R = rng.random(count) < 0.3 + 0.4 * shown_R
        for who, shown, good, liked in zip(
            who_R.tolist(), shown_R.tolist(), good_R.tolist(), liked_R.tolist(), strict=True
        ):
            self._follow(number, who, shown, GOOD if liked else BAD, GOOD if good else BAD)
        for turn, truth in self._late.pop(number, ()):
            at = number * HOUR
            told = replace(a_signal(TURN, LATE_REWARD, id=late_id(turn), value=truth, at=at), turn=turn)
            self.surrogate.learn(replace(told, source=Source.CODE))
        raised = list[str]()
        for row in list(self.surrogate.due(self.alarms, number * HOUR)):
            self.alarms.apply(row)
            raised += [row.name] if row.state is AlarmState.RAISED else []
        return raised

    def _follow(self, number: int, who: int, shown: float, value: float, truth: float) -> None:
        self._number += 1
        at, control = number * HOUR, bool(self._control_P[who])
        turn = replace(
            TURN,
            id=f"t{self._number}:0",
            user=f"u{who}",
            arm=Arm.CONTROL if control else Arm.LIVE,
            started_at=at,
            ended_at=at,
        )
        early = {"reward": value, "delay": 0.4, "has:kept": 1.0, "value:kept": shown}
        reward = Reward(turn=turn.id, value=value, function="f@1", signals=(), at=at)
        reward = self.surrogate.predicted(turn.tenant, reward, early, REWARDS.max_abs)
        self.surrogate.follow(TurnFacts.of(self._number, turn, REWARDS), (), reward, control=control)
        self._late.setdefault(number + self._world.late_h, []).append((turn.id, truth))


def week(world: World, seed: int) -> dict[str, Any]:
    """One run: by alarm, the hour of the week at which it was first raised, how long it stood, and what was measured at the end."""
    product, begin = Product(world, seed), world.late_h + 48
    found = {name: {"raised": None, "stood": 0} for name in (SURROGATE, SURROGATE_GAP)}
    started, late = dict[str, int](), world.late_h if world.drop else 0
    for number in range(0, begin + WEEK_H, STEP_H):
        raised, hour = product.pass_on(number, dropped=number >= begin - late), number - begin
        for name in raised:
            started[name] = hour
        standing = product.alarms.standing()
        for name, of in found.items():
            here = name + TURN.tenant
            if hour < 0:
                continue
            if here in raised and of["raised"] is None:
                of["raised"] = hour
            of["stood"] += STEP_H * (here in standing and started[here] >= 0)
    quality = product.surrogate.qualities()[TURN.tenant]
    return {"seed": seed, **found, "correlation": quality.correlation, "gap": quality.gap}


def interval(count: int, runs: int) -> tuple[float, float]:
    """Wilson's at 95%, in percent."""
    share, z2 = count / runs, 1.96**2
    middle, half = share + z2 / (2 * runs), 1.96 * math.sqrt(share * (1 - share) / runs + z2 / (4 * runs**2))
    return 100 * max(0.0, middle - half) / (1 + z2 / runs), 100 * min(1 + z2, middle + half) / (1 + z2 / runs)


def summary(name: str, world: World, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"world": name, "runs": len(runs), "drop": world.drop}
    for alarm in (SURROGATE, SURROGATE_GAP):
        hours = sorted(run[alarm]["raised"] for run in runs if run[alarm]["raised"] is not None)
        row[alarm] = {"raised in": len(hours), "95%": interval(len(hours), len(runs)), "hours": hours}
        row[alarm]["stood"] = sum(run[alarm]["stood"] for run in runs) / len(runs) / WEEK_H
    return row


def show(row: dict[str, Any]) -> None:
    line = f"{row['world']:<46}{row['runs']:>5}"
    for alarm in (SURROGATE, SURROGATE_GAP):
        of = row[alarm]
        line += f"   {alarm[:-1]}: {of['raised in']:>3} [{of['95%'][0]:.1f}, {of['95%'][1]:.1f}%] stood {100 * of['stood']:.2f}%"
        line += f" hours {np.median(of['hours']):.0f}, worst {of['hours'][-1]}" if row["drop"] and of["hours"] else ""
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=60, help="weeks of each world")
    parser.add_argument("--first-seed", type=int, default=0, help="of each world; the next weeks have the next ones")
    parser.add_argument("--seconds", type=float, default=540.0, help="processor time, shared evenly by the worlds")
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=list(WORLDS))
    parser.add_argument("--out", type=Path, default=RESULT)
    args, rows = parser.parse_args(), list[dict[str, Any]]()
    for name in args.worlds:
        world, began, runs = WORLDS[name], time.process_time(), list[dict[str, Any]]()
        while len(runs) < args.runs and time.process_time() - began < args.seconds / len(args.worlds):
            runs.append(week(world, args.first_seed + len(runs)))
        rows.append(summary(name, world, runs) | {"cpu_s": time.process_time() - began})
        rows[-1]["correlation"] = float(np.mean([run["correlation"] for run in runs]))
        show(rows[-1])
        args.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
