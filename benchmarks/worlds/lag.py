"""Asynchronous against synchronous learning with heavy-tailed rollout durations: lag, the trainer's idle share, seconds to equal reward.

    python -m benchmarks.worlds.lag --seeds 0 --sides async sync      # about six minutes a seed on two idle cores
    python -m benchmarks.worlds.lag --seeds 0 --sides trl

The same code runs twice, with gateway and trainer as separate processes. *sync* starts the next step's rollouts once the last step's
weights are served (lag 0; the trainer waits for the slowest of 128). *async* continues meanwhile within a bound. A rollout is one short
answer and then a wait as long as tools and tests would take (`lag_world.py`: log-normal, a median of 7.5 minutes over `--scale`). What
counts is how long that is beside a step: where a step takes twice as long, half of the scale compares the same. `idle` is the share of time
in which the trainer does not compute, over the steps after the first `WARM`. For comparison there is TRL's GRPOTrainer, whose reward
function waits as long.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from benchmarks.contender import PEERS, RESULTS, ROOT, machine
from benchmarks.worlds.lag_world import GROUP, GROUPS, LIKED, LONGEST_S, SCALE, TASKS, TOKENS, duration, prompt, slowest
from rich.console import Console

from ostinato.app.storage import Run, home, open_run
from ostinato.config import Config, load
from ostinato.core.conversation import Message, Role
from ostinato.core.records import Holdback
from ostinato.core.seams import Sandbox
from ostinato.launch.commands.crew import Launched, launch
from ostinato.launch.commands.demo import ready
from ostinato.launch.commands.worlds.train import idle_share
from ostinato.record.roles import hold
from ostinato.status.progress_lines import last_lines
from ostinato.testing.tiny import tiny_model
from ostinato.worlds.grading.grade import PatternGrader
from ostinato.worlds.harness.gateway import WorldGateway
from ostinato.worlds.harness.harnesses import SingleAnswer
from ostinato.worlds.harness.rollout import Model, Rollout, harness_hash
from ostinato.worlds.rollout.attempt import Workshop
from ostinato.worlds.rollout.groups import EventFile, SpentGroups, most_steps_behind
from ostinato.worlds.rollout.rollout_worker import Rollouts
from ostinato.worlds.tasks.task import Grading, Task, Taskset
from ostinato.worlds.tasks.tasksets import taskset_of

HIDDEN, LAYERS = 384, 5
RATE = 2e-5
BOUND = 8
LEAD, WINDOW, CONCURRENCY = 3, 17, 384
TARGET, RECENT, WARM = 0.5, 3, 3
SIDES = ("async", "sync", "trl")
console = Console()


def settings(directory: Path, seed: int, *, lockstep: bool) -> list[str]:
    pace = (1, GROUPS, GROUP * GROUPS) if lockstep else (LEAD, WINDOW, CONCURRENCY)
    names = ("lead", "window", "concurrency")
    return [
        f"run.directory='{directory / 'run'}'",
        f"model.source='{tiny_model(directory / 'model', hidden=HIDDEN, layers=LAYERS, seed=seed)}'",
        "model.name='tiny'",
        "model.dtype='bfloat16'",
        "model.compute='fp32'",
        "model.numerics='fast'",
        "listen.port=0",
        "serve.page=false",
        'learn.source="worlds"',
        "learn.poll_s=0.02",
        "learn.publish_every=100000",
        "learn.checkpoint_every=100",
        "train.compute='fp32'",
        "train.publish='bf16'",
        f"train.learning_rate={RATE}",
        f"train.turn_tokens={TOKENS}",
        "train.microbatch_tokens=4096",
        f"reward.world_staleness={0 if lockstep else BOUND}",
        "reward.settle_s=0.0",
        "evaluate.suite=''",
        "follow.interval_s=0.05",
        f"worlds.group={GROUP}",
        f"worlds.groups={GROUPS}",
        *(f"worlds.{name}={value}" for name, value in zip(names, pace, strict=True)),
        "worlds.epochs=0",
        f"worlds.seed={seed}",
        "worlds.poll_s=0.02",
    ]


def tasks() -> Taskset:
    grading = Grading(grader="pattern", data={"pattern": LIKED})
    return taskset_of(
        "letters",
        [
            Task(
                id=f"t{n}",
                family="letters",
                messages=(Message(role=Role.USER, text=prompt(n)),),
                grading=grading,
                tokens=TOKENS,
                harness="slow",
            )
            for n in range(TASKS)
        ],
    )


class Slow:
    """Implements `Harness`: one answer, then a wait. In lockstep it begins once the last step's weights are served."""

    name = "slow"
    hash = harness_hash(name, 1)

    def __init__(
        self, seed: int, gateway: WorldGateway, spending: SpentGroups, *, lockstep: bool, scale: float
    ) -> None:
        self._seed, self._gateway, self._spending = seed, gateway, spending
        self._lockstep, self._scale = lockstep, scale
        self._answer, self._count, self._served = SingleAnswer(), 0, 0
        self._asking = asyncio.Lock()

    def spec(self, task: Task) -> None:
        """None, because this harness needs no sandbox."""

    async def run(self, task: Task, model: Model, sandbox: Sandbox | None) -> Rollout:
        number, self._count = self._count, self._count + 1
        async with self._asking:  # one rollout polls for all
            while self._lockstep and self._served < self._spending.steps:
                health = await self._gateway.call("GET", "/health")
                self._served = int(health["slots"]["world"]["number"])
                await asyncio.sleep(0.02)
        rollout = await self._answer.run(task, model, sandbox)
        await asyncio.sleep(duration(f"{self._seed}.{number}", self._scale))
        return replace(rollout, harness=f"{self.name}@{self.hash}")


@contextlib.asynccontextmanager
async def rollouts(run: Run, url: str, seed: int, *, lockstep: bool, scale: float) -> AsyncGenerator[Rollouts]:
    """The rollout worker's `Rollouts`, with this world's harness."""
    journal, events = EventFile.open(run.home.rollouts)
    with contextlib.closing(journal):
        async with WorldGateway(url, run.home.admin_key()) as gateway:
            spending = SpentGroups(run.log, after=0)
            harness = Slow(seed, gateway, spending, lockstep=lockstep, scale=scale)
            shop = Workshop(harnesses={"slow": harness}, backend=None, grader=PatternGrader(), gateway=gateway)
            yield Rollouts(tasks(), shop, journal, events, spending, run.config.worlds, lambda *_, **__: None)


def cpu(launched: Launched) -> dict[str, float]:
    """CPU seconds that each process has used, a figure that other load on the machine does not change."""
    pids = {watched.worker.name: watched.worker.pid for watched in launched.supervisor.watched} | {
        "rollout": os.getpid()
    }
    return {name: sum(psutil.Process(pid).cpu_times()[:2]) for name, pid in pids.items()}


def steps_of(config: Config) -> list[dict[str, Any]]:
    return [line for line in last_lines(home(config).progress("train"), 1 << 24) if line["kind"] == "step"]


def reached(rewards: Sequence[float]) -> int | None:
    """The first step at which the mean reward of the last `RECENT` steps reaches `TARGET`, or None."""
    for at in range(RECENT, len(rewards) + 1):
        if statistics.fmean(rewards[at - RECENT : at]) >= TARGET:
            return at
    return None


async def learn(seed: int, steps: int, scale: float, *, lockstep: bool) -> dict[str, Any]:
    """Train until the reward is reached and, unless in lockstep, `steps` steps were taken, at most twice `steps`. Returns a report."""
    with tempfile.TemporaryDirectory() as place:
        config = load(None, settings(Path(place), seed, lockstep=lockstep))
        with hold(home(config).root, "up"):
            async with launch(config, lambda *_: None, names=("serve", "train")) as launched:
                url = await launched.during(ready(launched.home, ("world",)))
                with open_run(config) as run:
                    async with rollouts(run, url, seed, lockstep=lockstep, scale=scale) as making:
                        began, doing, spent = time.time(), Counter[str](), cpu(launched)
                        task = asyncio.create_task(making.run())
                        while not task.done():
                            done = steps_of(config)
                            good = reached([step["reward_mean"] for step in done])
                            if len(done) >= 2 * steps or (good and (lockstep or len(done) >= steps)):
                                break
                            for _ in range(10):
                                doing[re.sub(r"\d+", "N", launched.doing("train"))] += 1
                                await asyncio.sleep(0.02)
                        task.cancel()
                        await asyncio.gather(task, return_exceptions=True)
                        rows = [row async for _, row in run.log.read(0, {Holdback})]
                        held = Counter(row.reason for row in rows if isinstance(row, Holdback))
                        spent = {who: seconds - spent[who] for who, seconds in cpu(launched).items()}
        return report(steps_of(config), began, held) | {
            "cpu_s": spent,
            "trainer_was": {what: round(count / doing.total(), 3) for what, count in doing.most_common(6)},
        }


def report(steps: list[dict[str, Any]], began: float, held: Counter[str]) -> dict[str, Any]:
    rewards = [step["reward_mean"] for step in steps]
    good, settled = reached(rewards), steps[WARM:]
    between = [later["at"] - earlier["at"] for earlier, later in itertools.pairwise(steps)]
    return {
        "steps": len(steps),
        "reached_step": good,
        "reached_s": steps[good - 1]["at"] - began if good else None,
        "first_step_s": steps[0]["at"] - began,
        "step_s": statistics.median(step["seconds"] for step in steps),
        "interval_s": statistics.median(between),
        "idle": idle_share(settled),
        "lag_max": max(step["lag_max"] for step in steps),
        "lag_mean": statistics.fmean(step["lag_mean"] for step in steps),
        "ess": statistics.fmean(step["ess"] for step in steps),
        "rewards": rewards,
        "at": [step["at"] - began for step in steps],
        "seconds": [step["seconds"] for step in steps],
        "held_turns": dict(held),
    }


def plan(step_s: float, scale: float) -> str:
    """The concurrency that the trainer needs by Little's law if a step takes `step_s`, as text."""
    mean = statistics.fmean(duration(f"m.{n}", scale) for n in range(20_000))
    rate = GROUP * GROUPS / step_s
    group_s = slowest(GROUP, scale)
    return (
        f"a step of {step_s:.2f} s takes {rate:.0f} rollouts/s x {mean:.2f} s = {rate * mean:.0f} at once, in groups whose slowest lasts "
        f"{group_s:.1f} s on average: {GROUPS / step_s * group_s:.0f} groups under way ({WINDOW} may be); the slowest of a "
        f"step lasts {slowest(GROUP * GROUPS, scale):.1f} s"
    )


def peer(seed: int, steps: int, scale: float) -> dict[str, Any]:
    """TRL on the same prompts, model and waits."""
    python = PEERS / "trl" / "bin" / "python"
    if not python.exists():
        return {"missing": "python -m benchmarks.peers trl"}
    with tempfile.TemporaryDirectory() as place:
        model = tiny_model(Path(place) / "model", hidden=HIDDEN, layers=LAYERS, seed=seed)
        done = subprocess.run(
            [
                python,
                "-m",
                "benchmarks.worlds.peer_lag",
                str(model),
                str(seed),
                str(steps),
                str(RATE),
                str(TARGET),
                str(RECENT),
                str(scale),
            ],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=True,
        )
    found = json.loads(done.stdout)
    good = reached(found["rewards"])
    return found | {"reached_step": good, "reached_s": found["at"][good - 1] if good else None}


def keep(seed: int, side: str, scale: float, found: dict[str, Any]) -> None:
    """Add one side's result for a seed to the scale's results file. Results under other settings are dropped."""
    about = {
        "bound": BOUND,
        "target": TARGET,
        "scale": scale,
        "rate": RATE,
        "lead": LEAD,
        "window": WINDOW,
        "hidden": HIDDEN,
        "layers": LAYERS,
    }
    file = RESULTS / ("worlds_lag.json" if scale == SCALE else f"worlds_lag_{scale:g}.json")
    old = json.loads(file.read_text()) if file.exists() else {}
    rows = old.get("rows", {}) if {name: old.get(name) for name in about} == about else {}
    rows.setdefault(str(seed), {})[side] = found
    file.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


def say(who: str, seed: int, found: dict[str, Any]) -> None:
    shown = {key: value for key, value in found.items() if key not in ("rewards", "at", "seconds")}
    console.print(f"{who} (seed {seed}):", json.dumps(shown), highlight=False)
    rewards = found.get("rewards", [])
    console.print("  reward", " ".join(f"{reward:.2f}" for reward in rewards), highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--sides", nargs="+", choices=SIDES, default=SIDES, help="what a smaller choice leaves out is kept"
    )
    parser.add_argument(
        "--steps", type=int, default=20, help="asynchronous steps to take at least; nobody takes twice as many"
    )
    parser.add_argument("--scale", type=float, default=SCALE, help="real seconds per second of the benchmark")
    args = parser.parse_args()
    console.print(
        f"durations: 1/{args.scale:g} of a median of 7.5 min, at most {LONGEST_S / 60:.0f} min; bound {BOUND} steps, by the pace at most "
        f"{most_steps_behind(per_step=GROUPS, lead=LEAD, window=WINDOW)}"
    )
    for seed in args.seeds:
        for side in args.sides:
            before = machine()
            found = (
                peer(seed, args.steps, args.scale)
                if side == "trl"
                else asyncio.run(learn(seed, args.steps, args.scale, lockstep=side == "sync"))
            )
            say(side, seed, found)
            if side == "async":
                console.print(" ", plan(found["step_s"], args.scale))
            keep(seed, side, args.scale, found | {"machine": before})


if __name__ == "__main__":
    sys.exit(main())
