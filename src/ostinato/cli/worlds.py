"""`ostinato worlds`: simulated worlds, and how closely they resemble production."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter, validators
from rich.console import Console

from ostinato.cli.options import DEFAULTS, Common, Count, Flag, Positive, Words
from ostinato.core.places import expanded

worlds = App(
    name="worlds",
    help="Simulated worlds: tasks, models that work on them in sandboxes, and how much the worlds are like production.",
)


@worlds.command
def observe(group: str = "", *, script: Flag = False) -> None:
    """Print what a program can see of this machine, as a line for the command `probe`, without names or values of variables.

    Parameters
    ----------
    group
        Group that all observations of one machine share. Default: a hash of the machine's name.
    script
        Print a script instead, for a machine without Ostinato: pipe what `ostinato worlds observe --script` prints into its python3.
    """
    from ostinato.launch.commands.worlds.fidelity import observation_of_this
    from ostinato.worlds.fidelity import observe as observing

    sys.stdout.write(observing.script() if script else observation_of_this(group) + "\n")


@worlds.command
def episodes(
    whose: Literal["people", "world"],
    *,
    out: Path,
    most: Annotated[int, Parameter(name=["--most", "-n"])] = 500,
    common: Common = DEFAULTS,
) -> None:
    """Write what the model saw in a run's newest episodes, as lines for the command `probe`: prompts, tools, lengths, times.

    Parameters
    ----------
    whose
        people: episodes of users. world: rollouts in simulated worlds.
    out
        The output file. It holds words of system prompts and tools but no user's text; a hash of each prompt could confirm a guess.
    most
        Most episodes to write.
    """
    from ostinato.launch.commands.worlds.fidelity import write_episodes

    asyncio.run(write_episodes(common.of_run(), whose, out, most, Console()))


@worlds.command
def probe(
    production: Path,
    simulation: Path,
    *,
    same_prompts: Flag = False,
    seed: int = 0,
    tells: int = 12,
    json: Flag = False,
) -> None:
    """Test whether production can be told from simulation, and by what: a cross-validated classifier with its interval, features by AUC.

    Parameters
    ----------
    production
        Observations of real machines or episodes, one per line, from `ostinato worlds observe` or the command `episodes`.
    simulation
        Observations of sandboxes or rollouts, one per line.
    same_prompts
        Ignore differences in how often each task is asked: compare episodes with the same prompts, equally many of each on both sides.
    seed
        Seeds the folds, the resampling, and with --same-prompts the choice of episodes.
    tells
        How many features to show.
    json
        Print one JSON object instead of the table.
    """
    from ostinato.launch.commands.worlds.fidelity import show_probe

    show_probe(production, simulation, seed, tells, Console(), same_prompts=same_prompts, machine=json)


@worlds.command
def show(file: Path) -> None:
    """Show what a taskset contains: families, splits, harnesses, graders, sizes, and its hash. Nothing in it is run.

    For example: `ostinato worlds show tasks.jsonl`

    Parameters
    ----------
    file
        A taskset file (JSONL), or a directory of Harbor's task folders.
    """
    from ostinato.launch.commands.worlds.tasksets import show_taskset

    show_taskset(file, Console())


@worlds.command
def run(
    file: Path,
    *,
    split: Literal["held_out", "train", "canary", "all"] = "held_out",
    tries: Positive = 1,
    limit: Count = 0,
    concurrency: Annotated[int | None, Parameter(validator=validators.Number(gte=1))] = None,
    release: str = "newest",
    out: Path | None = None,
    json: Flag = False,
    common: Common = DEFAULTS,
) -> None:
    """Try each task several times with the weights of a run, and report pass@1 and best-of-k. Nothing is learned from it.

    If the run is up, its gateway answers; otherwise a gateway is started for the duration. Every record is also kept in
    `finished.jsonl` in the run's directory.

    For example: `ostinato worlds run tasks.jsonl --tries 8 --release v40 --set run.directory=runs/demo`

    Parameters
    ----------
    file
        The taskset (JSONL).
    split
        The split whose tasks are tried.
    tries
        Rollouts per task: the k of best-of-k.
    limit
        Most tasks to try, drawn by `worlds.seed`. 0: all.
    concurrency
        Rollouts at once. Default: `worlds.concurrency`.
    release
        The weights to try: newest, a ref such as live, a number such as v12, or the first digits of a root hash. They stay fixed
        meanwhile; if a release worker is up, only newest can be measured, and it may move.
    out
        A file to append the records to, for instance for `ostinato worlds coverage`.
    json
        Print one JSON object instead of the table.
    """
    from ostinato.launch.commands.worlds.run import MeasureOptions, run_tasks

    config = common.of_run_or_new()
    if concurrency is not None:
        config = config.model_copy(update={"worlds": config.worlds.model_copy(update={"concurrency": concurrency})})
    asked = MeasureOptions(file=file, split=split, tries=tries, limit=limit, release=release, out=out, machine=json)
    asyncio.run(run_tasks(config, asked, Console()))


@worlds.command
def watch(
    directory: Path | None = None,
    *,
    task: str = "",
    rollout: str = "",
    once: Flag = False,
    common: Common = DEFAULTS,
) -> None:
    """Watch the rollouts of a run: groups in progress, success by family, the latest results. Or show one rollout, step by step.

    Runs until Ctrl-C. If the output is not a terminal, it prints a line for each rollout that ends.

    Parameters
    ----------
    directory
        The run's directory. Default: `run.directory`.
    task
        Show the newest rollout of this task: what the model was given and said, what it changed, how it was graded.
    rollout
        Show the rollout with this episode name.
    once
        Show the current state and exit.
    """
    from ostinato.launch.commands.worlds.watch import show_rollout, watch_worlds

    config, out = common.of_run(directory), Console()
    try:
        if task or rollout:
            asyncio.run(show_rollout(config, out, task=task, episode=rollout))
        else:
            asyncio.run(watch_worlds(config, out, once=once))
    except KeyboardInterrupt:
        sys.exit(0)


@worlds.command
def grade(file: Path, *, task: str, changes: Path, common: Common = DEFAULTS) -> None:
    """Grade somebody's answer to a task with the graders that rollouts use. The exit code is 1 if it is not solved.

    For example: `ostinato worlds grade tasks.jsonl --task calc-1 --changes my.patch`

    Parameters
    ----------
    file
        The taskset (JSONL).
    task
        The id of the task.
    changes
        The answer: a directory with the changed files, a unified diff (.patch or .diff), or a text file for a task that is answered
        in words.
    """
    from ostinato.launch.commands.worlds.tasksets import grade_changes

    config, out = common.starting(), Console()
    sys.exit(0 if asyncio.run(grade_changes(config, file, task, changes, out)) else 1)


@worlds.command
def coverage(
    rollouts: Path,
    *,
    k: Annotated[int, Parameter(name=["-k"])] = 8,
    json: Flag = False,
) -> None:
    """Show each checkpoint's pass@1 and best-of-k on held-out tasks, and whether pass@1 rose at the expense of best-of-k.

    Parameters
    ----------
    rollouts
        Finished rollouts, one JSON object per line: task, family, split, policy ({"number": 3, "hash": "..."}), value.
    k
        Tries per task, 2 or more. Tasks with fewer are left out and counted.
    json
        Print one JSON object instead of the table.
    """
    from ostinato.launch.commands.worlds.run import show_coverage

    show_coverage(rollouts, k, Console(), machine=json)


@worlds.command(name="plan-burst")
def plan_burst(
    *,
    sandboxes: int = 100_000,
    clusters: int = 4,
    nodes: int = 250,
    lose_after: float | None = None,
    seed: int = 0,
    json: Flag = False,
) -> None:
    """Simulate how long three placement strategies take to place a burst of sandboxes, and list the assumptions.

    Parameters
    ----------
    sandboxes
        Number of sandboxes requested.
    clusters
        Number of clusters, each in its own region.
    nodes
        Machines per cluster.
    lose_after
        Seconds after which the first region fails with everything that runs there. Default: never.
    seed
        Seeds all random draws.
    json
        Print one JSON object instead of the table.
    """
    from ostinato.launch.commands.worlds.tasksets import show_burst

    show_burst(sandboxes, clusters, nodes, lose_after, seed, Console(), machine=json)


@worlds.command
def build(
    *packages: str,
    out: Path,
    held_out: Words = (),
    cache: Path = Path("~/.cache/ostinato/builds"),
    tasks: int = 80,
    cpu_minutes: float = 4.0,
    seed: int = 0,
) -> None:
    """Make tasks from published Python packages: function bodies removed, functions deleted, bugs inserted; the package's tests grade them.

    Third-party code runs only in sandboxes without a network. A build that was stopped resumes where it was.

    For example: `ostinato worlds build tabulate cachetools==8.0.0 --out tasks.jsonl`

    Parameters
    ----------
    packages
        Package names at pip's index, with or without a version, or paths of source distributions.
    out
        The taskset file, such as tasks.jsonl. The packages' files go into tasks.layers beside it; keep the two together.
    held_out
        Packages, named in the same way, whose tasks are used only for evaluation; may be repeated. A package's tasks are all in one split.
    cache
        Directory that keeps the results so far, so that a build can resume.
    tasks
        Most tasks per package.
    cpu_minutes
        Most minutes of CPU time per package.
    seed
        Seeds the choice of functions and faults.
    """
    from ostinato.launch.commands.worlds.tasksets import build_tasks
    from ostinato.worlds.building.config import BuildConfig

    config = BuildConfig(seed=seed, tasks=tasks, cpu_seconds=60 * cpu_minutes)
    asyncio.run(build_tasks(packages, held_out, out, expanded(cache), config, Console()))
