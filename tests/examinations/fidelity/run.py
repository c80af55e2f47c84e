"""Can the model tell simulation with the shipped harness from production? One gateway serves people and a world at the same time.

    python -m tests.examinations.fidelity.run [--model smollm2|tiny|DIR] [--people N] [--asks N] [--tries N] [--phases ...]

Simulated people ask for the demo's functions over the public endpoint, by popularity, as in `ostinato demo`; at the same time the
harness `single` works on the same functions through the worlds' gateway client, each in groups, with the same weights. Then `ostinato
worlds episodes` writes both sides and `ostinato worlds probe` compares them, with and without --same-prompts.

shipped: rollouts come as from the rollout worker, the next when a place is free. apart: each separately, shuffled together with the people,
so that both meet the same load. bursts: the same, but all of a group at once. planted: as shipped, with a quarter of the people and
tasks, and with one word of the world's system prompt changed.

Nothing is learned. Prints a table and writes tests/examinations/results/fidelity.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from ostinato.app.storage import home, open_store
from ostinato.app.worlds import function_tasks
from ostinato.config import Config, load
from ostinato.core.conversation import Role
from ostinato.core.records import Arm
from ostinato.demo import tasks as functions
from ostinato.demo.users import SimulatedUser, UsersConfig, ask, body, make_users
from ostinato.launch.commands.crew import Launched, launch
from ostinato.launch.commands.demo import ready
from ostinato.record.roles import hold
from ostinato.testing.tiny import tiny_model
from ostinato.worlds.harness.gateway import WorldGateway
from ostinato.worlds.harness.harnesses import SingleAnswer
from ostinato.worlds.tasks.task import Split, Task

RESULT = Path(__file__).parents[1] / "results" / "fidelity.json"
SYSTEM, PLANTED = functions.SYSTEM, "Emit Python."
START_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The amount of traffic: people, questions per person, rollouts per task, calls at once; only every `every`-th task is used."""

    people: int
    asks: int
    tries: int
    at_once: int
    every: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """How rollouts arrive. `places`: as from the rollout worker, in the order of groups, the next when a place is free, until all people
    have asked. Otherwise shuffled together with the people: a group at once, or (`apart`) each rollout separately.
    `tell`: one word of the world's system prompt is changed. `share`: only one in `share` people and tasks is used.
    """

    name: str
    places: bool = False
    apart: bool = False
    tell: bool = False
    share: int = 1


PHASES = (
    Phase(name="shipped", places=True),
    Phase(name="apart", apart=True),
    Phase(name="bursts"),
    Phase(name="planted", places=True, tell=True, share=4),
)


def settings_of(model: str, place: Path) -> list[str]:
    """Settings of a gateway with the world's arm and without a trainer."""
    source = str(tiny_model(place / "tiny", context=1024)) if model == "tiny" else model
    settings = {"run.directory": str(place / "run"), "model.source": source, "listen.port": 0, "learn.source": "both"}
    settings |= {"evaluate.suite": "", "engine.block": 16, "follow.interval_s": 0.2}
    if model == "tiny":
        settings |= {"model.dtype": "float32", "model.numerics": "fast"}
    return [f"{name}={json.dumps(value)}" for name, value in settings.items()]


async def person(http: aiohttp.ClientSession, user: SimulatedUser, asks: int, model: str, seed: int) -> None:
    """A person who asks for a few different functions in turn, mostly the first ones of their favourite families, as in the demo."""
    dice = random.Random(f"{seed}/{user.id}")
    taught, _ = functions.split(functions.load())
    families = [[task for task in taught if task.family == family] for family in user.families]
    wanted: dict[str, functions.Blank] = {}
    while len(wanted) < asks:
        (tasks,) = dice.choices(families, [1.0 / (rank + 2) for rank in range(len(families))])
        (task,) = dice.choices(tasks, [1.0 / (rank + 2) for rank in range(len(tasks))])
        wanted[task.id] = task
    for task in wanted.values():
        await ask(http, body(task.prompt, user.id, model))


async def rollouts(gateway: WorldGateway, task: Task, group: str, members: Sequence[int]) -> None:
    """Run some of a task's rollouts concurrently."""
    harness = SingleAnswer()
    models = [gateway.model(f"{group}.{member}", group=group, harness=harness.hash) for member in members]
    await asyncio.gather(*(harness.run(task, model, None) for model in models))


async def traffic(url: str, key: str, tasks: Sequence[Task], phase: Phase, sizes: Sizes, seed: int, model: str) -> int:
    """Run people and rollouts at the same time. Returns the number of rollouts."""
    taught, _ = functions.split(functions.load())
    crowd = [
        replace(each, id=f"{phase.name}-{each.id}")
        for each in make_users(taught, UsersConfig(count=sizes.people), seed)
    ]
    connector = aiohttp.TCPConnector(limit=0)
    async with WorldGateway(url, key) as gateway, aiohttp.ClientSession(url, connector=connector) as http:
        people = [person(http, each, sizes.asks, model, seed) for each in crowd]
        if phase.places:
            asked = asyncio.create_task(in_turn(people, sizes.at_once - sizes.at_once // 2))
            members = (
                (task, f"{phase.name}.{again}.{at}", member)
                for again in count()
                for at, task in enumerate(tasks)
                for member in range(sizes.tries)
            )
            done = await asyncio.gather(*(place(gateway, members, asked) for _ in range(sizes.at_once // 2)))
            await asked
            return sum(done)
        groups = [
            rollouts(gateway, task, f"{phase.name}.{at}", some)
            for at, task in enumerate(tasks)
            for some in ([[member] for member in range(sizes.tries)] if phase.apart else [range(sizes.tries)])
        ]
        jobs = [*people, *groups]
        random.Random(f"{seed}/{phase.name}").shuffle(jobs)
        await in_turn(jobs, sizes.at_once)
        return len(tasks) * sizes.tries


async def place(gateway: WorldGateway, members: Iterator[tuple[Task, str, int]], asked: asyncio.Task[None]) -> int:
    """One of the rollout worker's places: it runs the next rollout as long as people ask. Returns the number of rollouts."""
    number = 0
    while not asked.done():
        task, group, member = next(members)
        await rollouts(gateway, task, group, [member])
        number += 1
    return number


async def in_turn(jobs: Sequence[Coroutine[Any, Any, None]], at_once: int) -> None:
    """Run all jobs in order, `at_once` concurrently."""
    turn = asyncio.Semaphore(at_once)

    async def one(job: Coroutine[Any, Any, None]) -> None:
        async with turn:
            await job

    await asyncio.gather(*map(one, jobs))


def planted(task: Task) -> Task:
    """The task with one word of the system prompt changed."""
    messages = tuple(replace(each, text=PLANTED) if each.role is Role.SYSTEM else each for each in task.messages)
    assert messages != task.messages
    return replace(task, messages=messages)


def worlds(*words: str) -> str:
    """Run `ostinato worlds ...`. Returns its output. Raises CalledProcessError."""
    argv = [sys.executable, "-m", "ostinato.cli", "worlds", *words]
    return subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout


def probed(settings: Sequence[str], directory: Path, phase: str, counts: dict[str, int]) -> list[dict[str, Any]]:
    """Write the newest episodes of both sides, as many as `counts` says, and compare them with and without --same-prompts."""
    files = {whose: directory / f"{phase}.{whose}.jsonl" for whose in counts}
    words = [word for setting in settings for word in ("--set", setting)]
    for whose, file in files.items():
        worlds("episodes", whose, "--out", str(file), "--most", str(counts[whose]), *words)
    rows: list[dict[str, Any]] = []
    for options in ((), ("--same-prompts",)):
        found = json.loads(worlds("probe", *map(str, files.values()), "--json", *options))
        rows.append({"phase": phase, **found, "tells": found["tells"][:8]})
    return rows


async def examine(
    model: str, sizes: Sizes, seed: int, directory: Path, phases: Sequence[Phase] = PHASES
) -> list[dict[str, Any]]:
    """Run all phases in one run."""
    settings = settings_of(model, directory)
    config: Config = load(None, settings)
    tasks = [task for task in function_tasks().tasks if task.split is Split.TRAIN][:: sizes.every]
    rows: list[dict[str, Any]] = []
    with hold(home(config).root, "up"):
        async with launch(config, lambda who, what: None, names=("serve",)) as launched:
            async with asyncio.timeout(START_S):
                url = await launched.during(opened(config, launched))
            for phase in phases:
                some = tasks[:: phase.share]
                asked = list(map(planted, some)) if phase.tell else some
                many = replace(sizes, people=sizes.people // phase.share)
                began = time.monotonic()
                made = await launched.during(
                    traffic(url, launched.home.admin_key(), asked, phase, many, seed, config.model.served_as)
                )
                seconds = time.monotonic() - began
                counts = {"people": many.people * many.asks, "world": made}
                found = await asyncio.to_thread(probed, settings, directory, phase.name, counts)
                rows += [{"model": model, "seconds": seconds, **row} for row in found]
    return rows


async def opened(config: Config, launched: Launched) -> str:
    """Wait for the gateway, with live's weights at the world's ref in place of a trainer's newest. Returns its URL."""
    await ready(launched.home, ("live", "control"))
    store = open_store(config)
    live = await store.read_ref("live")
    assert live is not None
    await store.move_ref(Arm.WORLD.value, await store.read_ref(Arm.WORLD.value), live)
    return await ready(launched.home, ("live", "control", Arm.WORLD.value))


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    """A line for each comparison."""
    table = Table("model", "world", "prompts", "production", "simulation", "AUC", "p", "told apart by", "verdict", "s")
    for row in rows:
        shared = "as they come" if row["prompts"] is None else f"{row['prompts']['shared']} shared"
        by = ", ".join(f"{tell['name']} {tell['auc']:.3f}" for tell in row["tells"] if tell["p"] <= 0.025)
        table.add_row(
            row["model"], row["phase"], shared,
            *(f"{row[side][0]} in {row[side][1]}" for side in ("production", "simulation")),
            f"{row['auc']:.3f} [{row['lower']:.3f}, {row['upper']:.3f}]", f"{row['p']:.2f}", by or "nothing",
            row["verdict"], f"{row['seconds']:.0f}",
        )  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help='"tiny": random weights, a minute; else as model.source')
    parser.add_argument("--people", type=int, default=400)
    parser.add_argument("--asks", type=int, default=3)
    parser.add_argument("--tries", type=int, default=4)
    parser.add_argument("--at-once", type=int, default=16)
    names = [phase.name for phase in PHASES]
    parser.add_argument("--phases", nargs="+", choices=names, default=names)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, default=None, help="where the run is kept; none: nowhere")
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    sizes = Sizes(people=given.people, asks=given.asks, tries=given.tries, at_once=given.at_once)
    with tempfile.TemporaryDirectory() as nowhere:
        phases = [phase for phase in PHASES if phase.name in given.phases]
        rows = asyncio.run(examine(given.model, sizes, given.seed, given.directory or Path(nowhere), phases))
    kept: list[dict[str, Any]] = json.loads(given.out.read_text()) if given.out.exists() else []
    kept = [row for row in kept if row["model"] != given.model or row["phase"] not in given.phases] + rows
    given.out.write_text(json.dumps(kept, indent=1) + "\n")
    Console(width=200).print(table_of(kept))


if __name__ == "__main__":
    main()
