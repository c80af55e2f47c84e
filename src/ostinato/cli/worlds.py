"""`ostinato worlds`: simulated worlds, and how closely they resemble production."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter, validators
from rich.console import Console

from ostinato.cli.options import Common

worlds = App(
    name="worlds",
    help="Simulated worlds: tasks, models that work on them in sandboxes, and how much they are like production.",
)


@worlds.command
def observe(group: str = "", *, script: Annotated[bool, Parameter(negative="")] = False) -> None:
    """Print what a program sees of this machine, as a line for the command `probe`; no variable's value, nobody's name.

    Parameters
    ----------
    group
        All that is seen of one machine belongs to one group; none: a hash of its name.
    script
        Print the script instead, for a machine without Ostinato: what `ostinato worlds observe --script` prints goes into its python3.
    """
    from ostinato.launch.commands.worlds.observe import observation_of_this, source

    sys.stdout.write(source() if script else observation_of_this(group) + "\n")


@worlds.command
def episodes(
    whose: Literal["people", "world"],
    *,
    out: Path,
    most: Annotated[int, Parameter(name=["--most", "-n"])] = 500,
    common: Common | None = None,
) -> None:
    """Write what the model was shown in a run's newest episodes, as lines for the command `probe`: prompts, tools, lengths, times.

    Parameters
    ----------
    whose
        people: what was served. world: rollouts in simulated worlds.
    out
        The file. Words of system prompts and tools stand in it, nobody's own; of what was asked a hash, by which a guess can be checked.
    most
        How many episodes.
    """
    from ostinato.launch.commands.worlds.observe import write_episodes

    asyncio.run(write_episodes((common or Common()).of_run(), whose, out, most, Console()))


@worlds.command
def probe(
    production: Path,
    simulation: Path,
    *,
    same_prompts: Annotated[bool, Parameter(negative="")] = False,
    seed: int = 0,
    tells: int = 12,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Can production be told from simulation, and by what? A cross-validated classifier with its interval, and features by their own AUC.

    Parameters
    ----------
    production
        Observations of real machines or episodes, one a line (made by `ostinato worlds observe` or by the command `episodes`).
    simulation
        Observations of sandboxes or rollouts.
    same_prompts
        Set aside which tasks are asked for how often: compare episodes that were asked the same, as many of each prompt on either side.
    seed
        Of the folds, of the resampling, and of which episodes are drawn for the same prompts.
    tells
        How many features are named.
    json
        One JSON object instead of the table.
    """
    from ostinato.launch.commands.worlds.probe import show_probe

    show_probe(production, simulation, seed, tells, Console(), same_prompts=same_prompts, machine=json)


@worlds.command
def show(file: Path) -> None:
    """What a taskset holds: families, splits, harnesses, graders, sizes, and the hash of all of it. Nothing in it is run.

    For example: `ostinato worlds show tasks.jsonl`

    Parameters
    ----------
    file
        A taskset file (JSONL), or a directory of Harbor's task folders.
    """
    from ostinato.launch.commands.worlds.show import show_taskset

    show_taskset(file, Console())


@worlds.command
def run(
    file: Path,
    *,
    split: Literal["held_out", "train", "canary", "all"] = "held_out",
    tries: Annotated[int, Parameter(validator=validators.Number(gte=1))] = 1,
    limit: Annotated[int, Parameter(validator=validators.Number(gte=0))] = 0,
    concurrency: Annotated[int | None, Parameter(validator=validators.Number(gte=1))] = None,
    release: str = "newest",
    out: Path | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
    common: Common | None = None,
) -> None:
    """Try each task so many times with the weights of a run, and say what was solved: pass@1 and best-of-k. Nothing is learned from it.

    Where the run is up, its gateway answers; otherwise a gateway is started for as long as it takes. Every record lies in
    `finished.jsonl` in the run's directory, too.

    For example: `ostinato worlds run tasks.jsonl --tries 8 --release v40 --set run.directory=runs/demo`

    Parameters
    ----------
    file
        The taskset (JSONL).
    split
        Which of its tasks.
    tries
        Rollouts of each task: k of best-of-k.
    limit
        At most so many tasks, drawn by `worlds.seed`; 0: all.
    concurrency
        Rollouts at once; none: `worlds.concurrency`.
    release
        Whose weights: newest, a ref such as live, a number such as v12, or the first digits of a root. They are held still while it
        lasts; where a release worker is up, only newest can be measured, as it moves.
    out
        A file to which the records are appended, for `ostinato worlds coverage` and others.
    json
        One JSON object instead of the table.
    """
    from ostinato.launch.commands.worlds.measuring.run import Asked, run_tasks

    config = (common or Common()).of_run_or_new()
    if concurrency is not None:
        config = config.model_copy(update={"worlds": config.worlds.model_copy(update={"concurrency": concurrency})})
    asked = Asked(file=file, split=split, tries=tries, limit=limit, release=release, out=out, machine=json)
    asyncio.run(run_tasks(config, asked, Console()))


@worlds.command
def watch(
    directory: Path | None = None,
    *,
    task: str = "",
    rollout: str = "",
    once: Annotated[bool, Parameter(negative="")] = False,
    common: Common | None = None,
) -> None:
    """Watch the rollouts of a run: groups under way, success by family, what ended last. Or one rollout, step by step.

    Until Ctrl-C. Where the output is no terminal, a line for each rollout that ends.

    Parameters
    ----------
    directory
        The run's directory; none: `run.directory`.
    task
        Show the newest rollout of this task: what the model was given and said, what it changed, how it was graded.
    rollout
        Show this rollout, by its episode's name.
    once
        Show how it stands now, and end.
    """
    from ostinato.launch.commands.worlds.watch import show_rollout, watch_worlds

    config, out = (common or Common()).of_run(directory), Console()
    try:
        if task or rollout:
            asyncio.run(show_rollout(config, out, task=task, episode=rollout))
        else:
            asyncio.run(watch_worlds(config, out, once=once))
    except KeyboardInterrupt:
        sys.exit(0)


@worlds.command
def grade(
    file: Path,
    rollouts: Path | None = None,
    *,
    task: str = "",
    changes: Path | None = None,
    common: Common | None = None,
) -> None:
    """Grade what somebody wrote for a task, by the same graders as rollouts. The exit code is 1 if it is not solved.

    For example: `ostinato worlds grade tasks.jsonl --task calc-1 --changes my.patch`

    Parameters
    ----------
    file
        The taskset (JSONL).
    rollouts
        Trajectories to grade: an ATIF file, or one a line.
    task
        The id of the task, instead.
    changes
        With --task: a directory with the changed files, a unified diff (.patch or .diff), or for a task that is answered in words a
        text.
    """
    from ostinato.core.errors import BadConfig
    from ostinato.launch.commands.worlds.grade import grade_changes, grade_rollouts

    config, out = (common or Common()).load(), Console()
    if rollouts is not None and not task and changes is None:
        work = grade_rollouts(config, file, rollouts, out)
    elif task and changes is not None and rollouts is None:
        work = grade_changes(config, file, task, changes, out)
    else:
        raise BadConfig("give a file of rollouts, or --task with --changes")
    sys.exit(0 if asyncio.run(work) else 1)


@worlds.command
def coverage(
    rollouts: Path,
    *,
    k: Annotated[int, Parameter(name=["-k"])] = 8,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """What each checkpoint solves of held-out tasks at the first try and at the best of k, and whether it is only surer of less.

    Parameters
    ----------
    rollouts
        Finished rollouts, one JSON object a line: task, family, split, policy ({"number": 3, "hash": "..."}), value.
    k
        Tries; tasks with fewer are left out, and counted.
    json
        One JSON object instead of the table.
    """
    from ostinato.launch.commands.worlds.coverage import show_coverage

    show_coverage(rollouts, k, Console(), machine=json)


@worlds.command(name="plan-burst")
def plan_burst(
    *,
    sandboxes: int = 100_000,
    clusters: int = 4,
    nodes: int = 250,
    lose_after: float | None = None,
    seed: int = 0,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Simulate how long a burst of sandboxes takes to be placed, by three ways to place them, with all that is assumed.

    Parameters
    ----------
    sandboxes
        How many are asked for.
    clusters
        How many clusters, each in a region of its own.
    nodes
        Machines of one cluster.
    lose_after
        Seconds after which the first region is lost with all that runs there; none: never.
    seed
        Of all that is drawn.
    json
        One JSON object instead of the table.
    """
    from ostinato.launch.commands.worlds.burst import show_burst

    show_burst(sandboxes, clusters, nodes, lose_after, seed, Console(), machine=json)


@worlds.command
def build(
    *packages: str,
    out: Path,
    held_out: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    cache: Path = Path("~/.cache/ostinato/builds"),
    tasks: int = 80,
    cpu_minutes: float = 4.0,
    seed: int = 0,
) -> None:
    """Make tasks out of published Python packages: bodies removed, functions taken away, bugs put in; the package's tests judge.

    Third-party code runs only in sandboxes without a network. A build that was stopped goes on where it was.

    For example: `ostinato worlds build tabulate cachetools==8.0.0 --out tasks.jsonl`

    Parameters
    ----------
    packages
        Names at the index that pip uses, with or without a version, or paths of source distributions.
    out
        The taskset file, such as tasks.jsonl; tasks.layers beside it then holds the packages' files, and belongs to it.
    held_out
        Packages, named alike, whose tasks are only measured with; may be repeated. All tasks of a package are of one split.
    cache
        Where what was tried is kept, for a build that goes on.
    tasks
        Tasks of one package, at most.
    cpu_minutes
        Minutes of CPU for one package, at most.
    seed
        Draws the functions and the faults.
    """
    from ostinato.launch.commands.worlds.build import build_tasks
    from ostinato.worlds.building.config import BuildConfig

    config = BuildConfig(seed=seed, tasks=tasks, cpu_seconds=60 * cpu_minutes)
    asyncio.run(build_tasks(packages, held_out, out, cache.expanduser(), config, Console()))
