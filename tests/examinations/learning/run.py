"""Does a real model learn in simulated worlds, and does it generalise to tasks that it was never taught?

    python -m tests.examinations.learning.run [functions repairs numbers] [--seeds 0 1 2] [--steps N] [--directory DIR]
    python -m tests.examinations.learning.run removals --tasks FILE       # FILE: what `ostinato worlds build` made
    python -m tests.examinations.learning.run --tasksets DIR             # only writes the tasks, to keep a corpus clear of them

For each world and seed: `ostinato train --world` on the taught tasks, then `ostinato worlds run` on the held-out ones, four tries each,
with the initial and the last weights. Intervals of shares have tasks as units; those of changes have families, because tasks of one family
rise and fall together. Held-out functions are of families that were not taught. Held-out numbers are other files for the kinds of questions
that were taught; the kinds that were not demonstrated are also reported separately.

functions: one answer, hidden tests. repairs: two answers, with a check between them that shows failures. numbers: questions about a file,
to be answered with a Python tool, after a short start by imitation of some kinds of them. removals: short bodies removed from real
packages, after a start by imitation of half of the packages; families are packages. The model is SmolLM2-135M-Instruct throughout.
With `--engine int8` or `--engine vllm` rollouts are sampled in int8 (`engine.products`) or by two vLLM servers on this machine
(`python -m benchmarks.peers vllm`), as separate rows beside those of the exact engine, to see whether learning is the same at equal steps;
the success before and after is measured with the exact engine. Prints a table and writes
tests/examinations/results/learning.json. Training takes 14 to 24 minutes a world and seed on two cores without bf16 instructions.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.stats import t as student
from tests.examinations.learning import removal_world, tool_world
from tests.fakes.repair_tasks import repair_tasks
from tests.fakes.vllm import serving_smollm2

from ostinato.app.worlds import function_tasks
from ostinato.core.records import PolicyVersion
from ostinato.core.report import ItemMean
from ostinato.evaluate.coverage import covered
from ostinato.launch.commands.worlds.run import read_attempts
from ostinato.worlds.rollout.finished import Finished, read_finished
from ostinato.worlds.sandbox import Boxes
from ostinato.worlds.tasks.tasksets import save

RESULT = Path(__file__).parents[1] / "results" / "learning.json"
TRIES = 4
SHOWN = 48
STEPS = {"functions": 12, "repairs": 10, "numbers": 10, "removals": 6}
TASKS = {"functions": function_tasks, "repairs": repair_tasks, "numbers": tool_world.tool_tasks}
SETTINGS = {
    "listen.port": 0,
    "engine.block": 16,
    "train.learning_rate": 3e-5,
    "worlds.group": 8,
    "worlds.groups": 16,
    "worlds.concurrency": 64,
    "worlds.window": 32,
    "worlds.epochs": 0,
}
"""Settings for every world. Each was tried with one seed beforehand and then kept for all."""
OWN: dict[str, dict[str, Any]] = {
    "repairs": {"worlds.groups": 8},
    "numbers": {"worlds.groups": 8},
    "removals": {"worlds.groups": 8, "reward.flat_groups": "train"},
}
"""Rollouts of several turns get smaller steps. Few groups of removals have different rewards, so a step trains on flat groups too."""


Engine = Literal["exact", "int8", "vllm"]
EXACT = {"engine.kind": "embedded", "engine.urls": [], "engine.products": "plain", "model.numerics": "exact"}


@contextlib.contextmanager
def sampling_with(engine: Engine, place: Path) -> Generator[dict[str, Any]]:
    """The settings with which rollouts are sampled by this engine, which runs until the context ends."""
    if engine == "exact":
        yield EXACT
    elif engine == "int8":
        yield {"engine.products": "int8", "model.numerics": "fast"}
    else:
        with serving_smollm2(2, place) as urls:
            yield {"engine.kind": "vllm", "engine.urls": urls}


def _key(row: dict[str, Any]) -> tuple[str, int, str]:
    return row["world"], row["seed"], row["engine"]


def words(settings: dict[str, Any]) -> list[str]:
    """Settings as `--set` words."""
    return [word for name, value in settings.items() for word in ("--set", f"{name}={json.dumps(value)}")]


def ostinato(*argv: str, log: Path) -> float:
    """Run an `ostinato` command with its output in `log`. Returns its wall seconds. Raises CalledProcessError."""
    began = time.monotonic()
    with log.open("a") as out:
        subprocess.run([sys.executable, "-m", "ostinato.cli", *argv], check=True, stdout=out, stderr=subprocess.STDOUT)
    return time.monotonic() - began


def write_tasks(world: str, place: Path) -> Path:
    """Write the tasks of a world that makes its own to a file."""
    place.mkdir(parents=True, exist_ok=True)
    file = place / f"{world}.jsonl"
    save(TASKS[world](), file)
    return file


async def start_of(world: str, place: Path, tasks: Path | None) -> tuple[Path, dict[str, Any]]:
    """A world's taskset and its own settings, including the model after its start by imitation if it has one."""
    if world in TASKS:
        file = write_tasks(world, place)
    if world in ("functions", "repairs"):
        return file, OWN.get(world, {})
    boxes = Boxes()
    if world == "numbers":
        tools = tool_world.HARNESS
        lines = await tool_world.demonstrations(boxes, SHOWN)
    else:
        assert tasks is not None
        tools, taskset = removal_world.HARNESS, removal_world.removal_tasks(tasks)
        file = tasks.with_name("removals.jsonl")  # beside the layers
        save(taskset, file)
        lines = await removal_world.demonstrations(boxes, taskset)
    await boxes.close()
    harness = {f"worlds.harness.tools.{name}": value for name, value in tools.items()}
    return file, {"model.source": str(imitated(world, lines, place)), "model.name": "start", **harness, **OWN[world]}


def imitated(world: str, lines: list[str], place: Path) -> Path:
    """The model after its start by imitation of these lines, made only once per place."""
    place.mkdir(parents=True, exist_ok=True)
    shown, model = place / f"{world}.shown.jsonl", place / f"{world}.start"
    shown.write_text("\n".join(lines) + "\n")
    if not model.exists():
        settings = words({"train.learning_rate": 3e-5})
        ostinato(
            "train", "--demonstrations", str(shown), "--out", str(model), "--batch", "8", "--epochs", "2", *settings,
            log=place / f"{world}.start.log",
        )  # fmt: skip
    return model


def tried_in(place: Path, world: str, engine: Engine, seed: int) -> Path:
    """The file of the rollouts with which `train` measures."""
    return place / f"{world}-{engine}-{seed}.finished.jsonl"


def train(
    world: str, file: Path, own: dict[str, Any], engine: Engine, seed: int, steps: int, place: Path
) -> dict[str, Any]:
    """Train in one world with one seed, then measure the weights before and after."""
    name = f"{world}-{engine}-{seed}"
    run, log, tried = place / name, place / f"{name}.log", tried_in(place, world, engine, seed)
    settings = words(SETTINGS | own | {"run.directory": str(run), "worlds.seed": seed, "train.seed": seed})
    tried.unlink(missing_ok=True)
    with sampling_with(engine, place) as sampling:
        seconds = ostinato("train", "--world", str(file), "--steps", str(steps), *settings, *words(sampling), log=log)
    for release in ("base", "newest"):
        ostinato(
            "worlds", "run", str(file), "--tries", str(TRIES), "--release", release, "--out", str(tried), *settings,
            *words(EXACT | {"engine.threads": 2}), log=log,
        )  # fmt: skip
    before, after = covered(read_attempts(tried), TRIES)
    if before.rates is None or after.rates is None or after.change is None:
        raise RuntimeError(f"{tried}: not every task was tried {TRIES} times; see {log}")
    found: dict[str, Any] = {"world": world, "seed": seed, "engine": engine}
    found |= {"steps": after.policy.number, "seconds": seconds}
    found |= {
        "first": asdict(before.rates.first),
        "last": asdict(after.rates.first),
        "change": asdict(after.change.first),
    }
    found |= {"best_first": asdict(before.rates.best), "best_last": asdict(after.rates.best)}
    found["settings"] = {name: str(value) for name, value in sorted((SETTINGS | own).items()) if name != "model.source"}
    kept, _ = read_finished(tried.read_text().splitlines())
    shown = {kind.name for kind in tool_world.KINDS if kind.shown} if world == "numbers" else set[str]()
    policies = (before.policy, after.policy)
    found["by_family"] = by_family(kept, policies)
    found["not_demonstrated"] = by_family([each for each in kept if each.family not in shown], policies)
    for name, policy in (("turns_first", before.policy), ("turns_last", after.policy)):
        found[name] = by_turns([each for each in kept if each.policy == policy])
    return found


def by_family(kept: list[Finished], policies: tuple[PolicyVersion, PolicyVersion]) -> dict[str, float]:
    """Mean success before and after over equally weighted families, and the change with its 95% t interval."""
    solved: dict[str, tuple[list[bool], list[bool]]] = {}
    for each in kept:
        if each.policy in policies:
            solved.setdefault(each.family, ([], []))[policies.index(each.policy)].append(each.solved)
    first, last = (np.array([np.mean(sides[side]) for sides in solved.values()]) for side in (0, 1))
    change, n = last - first, len(first)
    half = float(student.ppf(0.975, n - 1) * change.std(ddof=1) / n**0.5)
    mean = float(change.mean())
    found = {
        "first": float(first.mean()),
        "last": float(last.mean()),
        "mean": mean,
        "lower": mean - half,
        "upper": mean + half,
    }
    return {"families": n, **found}


def by_turns(rollouts: list[Finished]) -> dict[str, dict[str, float]]:
    """The number of rollouts and the share solved, by number of turns."""
    found: dict[str, dict[str, float]] = {}
    for count in sorted({len(each.turns) for each in rollouts}):
        theirs = [each for each in rollouts if len(each.turns) == count]
        found[str(count)] = {"rollouts": len(theirs), "solved": sum(each.solved for each in theirs) / len(theirs)}
    return found


def table_of(found: list[dict[str, Any]]) -> Table:
    """A line for each world and seed."""
    table = Table(
        "world",
        "engine",
        "seed",
        "steps",
        "pass@1 start",
        "pass@1 last",
        "change, families",
        "not demonstrated",
        f"best of {TRIES}",
        "by turns, last",
        "min",
    )
    for row in found:
        start, last = (ItemMean(**row[name]) for name in ("first", "last"))
        turns = ", ".join(
            f"{n}: {100 * each['solved']:.0f}% of {each['rollouts']}" for n, each in row["turns_last"].items()
        )
        table.add_row(
            row["world"], row["engine"], str(row["seed"]), str(row["steps"]), _share(start), _share(last),
            _change(row["by_family"]), _change(row["not_demonstrated"]),
            f"{100 * row['best_first']['mean']:.0f} -> {100 * row['best_last']['mean']:.0f}%", turns,
            f"{row['seconds'] / 60:.1f}",
        )  # fmt: skip
    return table


def _change(of: dict[str, float]) -> str:
    points = f"{100 * of['mean']:+.1f} pp [{100 * of['lower']:+.1f}, {100 * of['upper']:+.1f}]"
    return f"{100 * of['first']:.0f} -> {100 * of['last']:.0f}%, {points} ({of['families']})"


def _share(mean: ItemMean) -> str:
    return f"{100 * mean.mean:.1f}% [{100 * mean.lower:.1f}, {100 * mean.upper:.1f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("worlds", nargs="*", default=list(TASKS), choices=[*STEPS, []], metavar="WORLD")
    parser.add_argument("--tasks", type=Path, default=None, help="of removals: a taskset of `ostinato worlds build`")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--steps", type=int, default=None, help=f"none: {', '.join(f'{n} for {w}' for w, n in STEPS.items())}"
    )
    parser.add_argument("--engine", choices=get_args(Engine), default="exact", help="what rollouts are sampled with")
    parser.add_argument("--directory", type=Path, default=None, help="where runs are kept; none: nowhere")
    parser.add_argument(
        "--tasksets", type=Path, default=None, help="write the worlds' own tasks there, and nothing else"
    )
    given = parser.parse_args()
    if given.tasksets:
        for world in TASKS:
            write_tasks(world, given.tasksets)
        return
    if "removals" in given.worlds and given.tasks is None:
        parser.error("removals needs --tasks FILE: what `ostinato worlds build PACKAGE... --out FILE` made")
    console = Console(width=180)
    found: list[dict[str, Any]] = json.loads(RESULT.read_text()) if RESULT.exists() else []
    with tempfile.TemporaryDirectory() as nowhere:
        place = given.directory or Path(nowhere)
        for world in given.worlds:
            file, own = asyncio.run(start_of(world, place, given.tasks))
            for seed in given.seeds:
                row = train(world, file, own, given.engine, seed, given.steps or STEPS[world], place)
                found = [each for each in found if _key(each) != _key(row)] + [row]
                console.print(table_of([row]))
                RESULT.write_text(json.dumps(found, indent=1) + "\n")
    console.print(table_of(found))


if __name__ == "__main__":
    main()
