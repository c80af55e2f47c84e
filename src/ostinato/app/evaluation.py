"""The release worker's objects: the suites, their runners against the gateway, and the controller that decides."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from ostinato.app.storage import Run, operator_key
from ostinato.config import Config
from ostinato.core.clock import wall_clock
from ostinato.core.errors import BadConfig
from ostinato.core.records import ReleaseEvent
from ostinato.demo import tasks as demo_tasks
from ostinato.evaluate.config import BarConfig, GateConfig
from ostinato.evaluate.gate import check_bars, check_margins, items_in_round
from ostinato.evaluate.suites import Item, Suite, build, load, parse, pattern, suggestion
from ostinato.release.alarms import note
from ostinato.reward import functions
from ostinato.run_directory import BEST_EVALUATION_REF, EVALUATION_REF
from ostinato.worlds.grading.completion import python_tests
from ostinato.worlds.sandbox import SingleRuns

if TYPE_CHECKING:  # the check of the suite at the start of `up` must not wait for the measuring code
    from ostinato.app.worlds_evaluation import WorldSuite
    from ostinato.evaluate.evaluation import Evaluation, Runner
    from ostinato.evaluate.runner import ItemGrader, SuiteRunner
    from ostinato.release.controller import ReleaseController
    from ostinato.release.ledger import ReleaseLedger
    from ostinato.release.monitors.watcher import MonitorWatcher

# ---------------------------------------------------------------- graders


GRADERS = ("python_tests", "pattern", "suggestion")


def check_item(item: Item) -> None:
    """Raise BadConfig unless the item's grader exists and can work with it."""
    if item.grader == "pattern":
        pattern(item, "")
    elif item.grader == "suggestion":
        suggestion(item, "")
    elif item.grader == "python_tests":
        head, tests = item.data.get("head"), item.data.get("tests")
        if not isinstance(head, str) or re.match(r"def \w+\(", head) is None:
            raise BadConfig(
                f"suite item {item.id!r}: grader 'python_tests' needs a 'head' that starts with 'def name('"
            )
        if not isinstance(tests, str) or not tests.strip():
            raise BadConfig(f"suite item {item.id!r}: grader 'python_tests' needs 'tests', Python source with asserts")
    else:
        raise BadConfig(f"suite item {item.id!r}: no grader {item.grader!r}; there are {' and '.join(GRADERS)}")


def open_grader(config: Config) -> ItemGrader:
    """Grades one answer to a suite item: in the sandbox, by pattern, or as a suggestion.

    Raises BadConfig for an item that cannot be graded.
    """
    sandbox = SingleRuns(config.sandbox)

    async def grade(item: Item, text: str) -> float:
        check_item(item)
        if item.grader == "pattern":
            return pattern(item, text)
        if item.grader == "suggestion":
            return suggestion(item, text)
        return await python_tests(item.data["head"], text, item.data["tests"], sandbox, config.evaluate.grade_timeout_s)

    return grade


# ---------------------------------------------------------------- suites


@dataclass(frozen=True, slots=True, kw_only=True)
class Suites:
    """The suites that a candidate is measured on: those on which it is compared, and those that only quality bars use; no name twice.

    `bars` refer to their suites by name. `worlds` maps names to those of the suites whose items are tasks of simulated worlds.
    """

    compared: tuple[Suite, ...]
    aside: tuple[Suite, ...]
    bars: tuple[BarConfig, ...]
    worlds: Mapping[str, WorldSuite]


def open_suites(config: Config) -> Suites:
    """All suites, each cut to `evaluate.items` if that is set. Raises BadConfig if there is none or one cannot be read."""
    settings = config.evaluate
    files = {name: _open(name, config) for name in (settings.suite, *settings.further_suites)}
    worlds = {file: _open_world(file, config) for file in settings.tasksets}
    compared = (*files.values(), *(world.suite for world in worlds.values()))
    aside: list[Suite] = []
    bars: list[BarConfig] = []
    for bar in settings.bars:
        file = bar.suite or settings.suite
        if bar.taskset and bar.taskset not in worlds:
            worlds[bar.taskset] = _open_world(bar.taskset, config)
            aside.append(worlds[bar.taskset].suite)
        elif not bar.taskset and file not in files:
            files[file] = _open(file, config)
            aside.append(files[file])
        suite = worlds[bar.taskset].suite if bar.taskset else files[file]
        bars.append(bar.model_copy(update={"suite": suite.name}))
    names = [suite.name for suite in (*compared, *aside)]
    if twice := {name for name in names if names.count(name) > 1}:
        raise BadConfig(
            f"two task files are named {twice.pop()!r}; give one of them another name (evaluate.suite and others)"
        )
    by_name = {world.suite.name: world for world in worlds.values()}
    return Suites(compared=compared, aside=tuple(aside), bars=tuple(bars), worlds=by_name)


def _open_world(file: str, config: Config) -> WorldSuite:
    from ostinato.app.worlds_evaluation import world_suite  # brings an HTTP client along

    return world_suite(file, config)


def open_suite(config: Config) -> Suite:
    """The first suite, which is the one named in reports. Raises as `open_suites`."""
    return open_suites(config).compared[0]


async def check_suite(config: Config) -> Suite:
    """The first suite, after a check that this machine can grade every item of all suites and that they suffice for the gate's verdict.

    Raises BadConfig, SandboxRefused.
    """
    suites, gate = open_suites(config), gate_rules(config)
    answered = [suite for suite in (*suites.compared, *suites.aside) if suite.name not in suites.worlds]
    items = [item for suite in answered for item in suite.items]
    for item in items:
        check_item(item)
    for suite in suites.compared:
        check_margins(suite.name, items_in_round(suite, gate), gate)
    drawn = {suite.name: items_in_round(suite, gate) for suite in suites.compared}
    drawn |= {suite.name: len(suite.items) for suite in suites.aside}
    check_bars([(bar, bar.suite, drawn[bar.suite]) for bar in suites.bars])
    if any(item.grader == "python_tests" for item in items) or any(world.runs_code for world in suites.worlds.values()):
        async with SingleRuns(config.sandbox) as sandbox:
            await sandbox.check()
    return suites.compared[0]


NO_SUITE = "release:suite"
"""The name of the alarm that stands while a run has no suite."""


COARSE = "release:resolution"
"""The name of the alarm that stands while the suite, at its measured spread, cannot hold the configured margin."""


async def note_suite(run: Run) -> None:
    """Write into the log that a run without a suite ships nothing by itself, or that it has one now. Idempotent."""
    suite = run.config.evaluate.suite
    why = (
        f"candidates are measured on {suite}"
        if suite
        else "no suite (evaluate.suite): nothing ships by itself; `ostinato ship` and `ostinato rollback` do it by hand"
    )
    await note(run.log, NO_SUITE, raised=not suite, why=why, at=wall_clock())


HEARING = "release:hearing"
"""The name of the alarm that stands while trials stop listening before the reward function does."""


async def note_hearing(run: Run) -> None:
    """Write into the log whether trials hear feedback as long as rewards wait for it. Idempotent."""
    heard, window = run.config.release.outcomes.maturity_s, _window(run.config)
    short = run.config.release.canary and isinstance(window, int | float) and heard < window
    why = (
        f"trials hear what is said about a turn for {heard:g} s (release.outcomes.maturity_s), rewards for {window:g} s "
        "(reward.options.window): what people take back later is not held against a release; raise the first"
        if short
        else "trials hear feedback as long as rewards do"
    )
    await note(run.log, HEARING, raised=short, why=why, at=wall_clock())


def _window(config: Config) -> object:
    """How long the reward function waits, if that is known without loading a user's own function; None otherwise."""
    module, _, name = config.reward.function.partition(":")
    if "window" in config.reward.options or module != functions.__name__:
        return config.reward.options.get("window")
    parameter = signature(getattr(functions, name)).parameters.get("window")
    return None if parameter is None else parameter.default


MEASURED = 5
"""After so many verdicts, a suite's measured spread says more than the assumed one."""


async def note_resolution(run: Run, suite: Suite) -> None:
    """Write into the log whether the suite can hold the total margin at the spread that its last verdicts measured. Idempotent."""
    found: list[float] = []
    async for _, row in run.log.read(0, {ReleaseEvent}):
        report = row.detail.get("report", {}) if isinstance(row, ReleaseEvent) else {}
        if report.get("suite_hash") == suite.hash and report.get("verdict") != "EXTEND" and "smallest_margin" in report:
            found.append(float(report["smallest_margin"]))
    if len(found) < MEASURED:
        return
    smallest, margin = median(found[-MEASURED:]), run.config.evaluate.gate.total_margin
    why = f"as the last {MEASURED} verdicts measured it, suite {suite.name!r} can hold a total margin of {100 * smallest:.1f} pp"
    if smallest > margin:
        why += (
            f", and {100 * margin:.1f} pp is set: more than one in ten equally good candidates is blocked; add items or draws, or raise "
            "evaluate.gate.total_margin"
        )
    await note(run.log, COARSE, raised=smallest > margin, why=why, at=wall_clock())


def _open(named: str, config: Config) -> Suite:
    if not named:
        raise BadConfig(
            "there is no suite to measure with: name a task file in evaluate.suite, or 'demo', the functions of `ostinato demo`"
        )
    shipped = {"demo": _demo_suite, "demo-tab": _tab_suite}
    suite = shipped[named]() if named in shipped else load(Path(named))
    items = suite.items[: config.evaluate.items] if config.evaluate.items else suite.items
    return suite if len(items) == len(suite.items) else build(suite.name, items)


def _demo_suite() -> Suite:
    """The copilot's held-out function families, which no user ever asks for."""
    _, held_out = demo_tasks.split(demo_tasks.load())
    return parse("demo-heldout", "".join(json.dumps(item) + "\n" for item in demo_tasks.suite_items(held_out)))


def _tab_suite() -> Suite:
    """Tab's held-out lines, which no user ever types."""
    from ostinato.demo import tab as tab_lines

    _, held_out = tab_lines.split_lines()
    return parse("tab-heldout", "".join(json.dumps(item) + "\n" for item in tab_lines.suite_items(held_out)))


def open_runner(config: Config, url: str, suite: Suite | None = None) -> SuiteRunner:
    """The runner of a suite (default: the first one) against a gateway."""
    from ostinato.evaluate.runner import SuiteRunner

    chosen = suite or open_suite(config)
    return SuiteRunner(chosen, open_grader(config), url, operator_key(config), config.evaluate.runner)


def gate_rules(config: Config) -> GateConfig:
    """The gate's rules. Without trials on users, the gate itself must show the win that `release.require` asks for. Raises BadConfig."""
    gate = config.evaluate.gate
    if config.release.require == "no_loss" or config.release.canary:
        return gate
    if not gate.sample_best:
        raise BadConfig(
            "release.require='win' compares with the best release, which evaluate.gate.sample_best=false leaves out; set it to true"
        )
    return gate.model_copy(update={"require": "win"})


def open_evaluation(config: Config, url: str) -> Evaluation:
    """The evaluation of candidates against live, best and anchor, through the gateway at `url`."""
    from ostinato.app.worlds_evaluation import open_rollout_runner
    from ostinato.evaluate.evaluation import Evaluation

    suites = open_suites(config)

    def runner(suite: Suite) -> Runner:
        world = suites.worlds.get(suite.name)
        return open_runner(config, url, suite) if world is None else open_rollout_runner(config, url, world)

    return Evaluation(
        [runner(suite) for suite in suites.compared],
        gate_rules(config),
        bars=suites.bars,
        aside=[runner(suite) for suite in suites.aside],
        candidate_slot=EVALUATION_REF,
        best_slot=BEST_EVALUATION_REF,
    )


def open_ledger(run: Run) -> ReleaseLedger:
    """The release ledger, for reading only."""
    from ostinato.release.ledger import ReleaseLedger

    return ReleaseLedger(run.log, wall_clock)


def open_releases(
    run: Run, evaluation: Evaluation | None = None, monitors: MonitorWatcher | None = None
) -> ReleaseController:
    """The release controller. Without an evaluation it only looks, and releases by hand. A monitor's alarm pauses its shipping."""
    from ostinato.evaluate.statistics import clustered_difference
    from ostinato.release.controller import ReleaseController
    from ostinato.weights.follow.follower import StoreVersions

    return ReleaseController(
        run.log,
        run.store,
        StoreVersions(run.store, run.follower),
        evaluation,
        run.config.release,
        wall_clock,
        clustered_difference,
        evaluation_ref=EVALUATION_REF,
        best_ref=BEST_EVALUATION_REF if run.config.evaluate.gate.sample_best else None,
        paused=lambda: monitors is not None and monitors.pauses_shipping,
    )


def open_monitors(run: Run) -> MonitorWatcher:
    """The monitors of reward hacking over the log of a run. Raises BadConfig for a rate that cannot be loaded."""
    from ostinato.release.monitors.watcher import MonitorWatcher

    return MonitorWatcher(run.log, run.config.release.monitors, run.folds)
