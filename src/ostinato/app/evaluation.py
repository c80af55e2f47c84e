"""The release worker's objects: the suites, their runners against the gateway, and the controller that decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from statistics import median
from typing import TYPE_CHECKING, Any

from ostinato.app.storage import Run, rows_of
from ostinato.config import Config
from ostinato.core.clock import wall_clock
from ostinato.core.errors import BadConfig
from ostinato.core.records import Arm, ReleaseEvent
from ostinato.evaluate.config import BarConfig, GateConfig
from ostinato.evaluate.gate import check_bars, check_margins, items_in_round
from ostinato.evaluate.suites import Suite
from ostinato.release.alarms import note
from ostinato.reward import functions
from ostinato.run_directory import BEST_EVALUATION_REF, EVALUATION_REF, LEARNER_TEST_REF
from ostinato.worlds.sandbox import SingleRuns

if TYPE_CHECKING:  # the check of the suite when `up` starts must not wait for the evaluation code
    from ostinato.app.suites import TaskSuite
    from ostinato.evaluate.evaluation import Evaluation, StepCheck
    from ostinato.release.controller import ReleaseController
    from ostinato.release.ledger import ReleaseLedger
    from ostinato.release.monitors.watcher import MonitorWatcher

# ---------------------------------------------------------------- suites


@dataclass(frozen=True, slots=True, kw_only=True)
class Suites:
    """The suites that a candidate is evaluated on: `compared` against other versions, and `aside`, which only quality bars use.

    Names are unique. `bars` refer to their suites by name.
    """

    compared: tuple[TaskSuite, ...]
    aside: tuple[TaskSuite, ...]
    bars: tuple[BarConfig, ...]


def open_suites(config: Config) -> Suites:
    """Return all suites, each cut to `evaluate.items` if that is set. Raises BadConfig if there is none or one cannot be read."""
    settings = config.evaluate
    opened = {file: _open(file, config) for file in (settings.suite, *settings.further_suites, *settings.tasksets)}
    compared = tuple(opened.values())
    bars: list[BarConfig] = []
    for bar in settings.bars:
        file = bar.suite or bar.taskset or settings.suite
        if file not in opened:
            opened[file] = _open(file, config)
        bars.append(bar.model_copy(update={"suite": opened[file].suite.name}))
    names = [found.suite.name for found in opened.values()]
    if twice := {name for name in names if names.count(name) > 1}:
        raise BadConfig(
            f"two task files are named {twice.pop()!r}; give one of them another name (evaluate.suite and others)"
        )
    return Suites(compared=compared, aside=tuple(opened.values())[len(compared) :], bars=tuple(bars))


def open_suite(config: Config) -> TaskSuite:
    """Return the first suite, whose name reports use. Raises like `open_suites`."""
    return open_suites(config).compared[0]


def check_learner(config: Config) -> None:
    """Raise BadConfig if users are to follow training, but nothing tests the steps or nothing is learned from users."""
    if not config.serve.learner_share:
        return
    if not config.evaluate.suite:
        raise BadConfig(
            "serve.learner_share: without a suite no training step can be tested before it answers somebody; name one in evaluate.suite, "
            "or set serve.learner_share = 0"
        )
    if config.learn.source == "worlds":
        raise BadConfig(
            "serve.learner_share: with learn.source = 'worlds' nothing is learned from users; set it to 'people' or 'both', or "
            "serve.learner_share = 0"
        )


async def check_suite(config: Config) -> Suite:
    """Return the first suite, after checking that this machine can grade every item and that the suites have the power that the gate needs.

    Raises BadConfig, SandboxRefused.
    """
    suites, gate = open_suites(config), gate_rules(config)
    drawn = {found.suite.name: items_in_round(found.suite, gate) for found in suites.compared}
    for name, items in drawn.items():
        check_margins(name, items, gate)
    drawn |= {found.suite.name: len(found.suite.items) for found in suites.aside}
    check_bars([(bar, bar.suite, drawn[bar.suite]) for bar in suites.bars])
    if any(found.runs_code for found in (*suites.compared, *suites.aside)):
        async with SingleRuns(config.sandbox) as sandbox:
            await sandbox.check()
    return suites.compared[0].suite


NO_SUITE = "release:suite"
"""The name of the alarm that is raised while a run has no suite."""


COARSE = "release:resolution"
"""The name of the alarm that is raised while the suite, at its measured spread, has too little power for the configured margin."""


async def note_suite(run: Run) -> None:
    """Write into the log that a run without a suite ships nothing automatically, or that it now has a suite. Idempotent."""
    suite = run.config.evaluate.suite
    why = (
        f"candidates are measured on {suite}"
        if suite
        else "no suite (evaluate.suite): nothing ships by itself; `ostinato ship` and `ostinato rollback` do it by hand"
    )
    await note(run.log, NO_SUITE, raised=not suite, why=why, at=wall_clock())
    if not suite:
        await note(run.log, COARSE, raised=False, why="no suite measures candidates any more", at=wall_clock())


HEARING = "release:hearing"
"""The name of the alarm that is raised while trials stop listening for feedback before the reward function does."""


async def note_hearing(run: Run) -> None:
    """Write into the log whether trials listen for feedback as long as rewards wait for it. Idempotent."""
    heard, window, setting = run.config.release.outcomes.maturity_s, _window(run.config), "reward.options.window"
    if late := run.config.reward.surrogate.truth_after_s:
        window, setting = late, "reward.surrogate.truth_after_s"
    short = run.config.release.canary and isinstance(window, int | float) and heard < window
    why = (
        f"trials hear what is said about a turn for {heard:g} s (release.outcomes.maturity_s), rewards for {window:g} s "
        f"({setting}): what people take back later is not held against a release; raise the first"
        if short
        else "trials hear feedback as long as rewards do"
    )
    await note(run.log, HEARING, raised=short, why=why, at=wall_clock())


async def note_switched_off(run: Run) -> None:
    """End the alarms of features that are switched off, because the component that would end them does not run. Idempotent."""
    from ostinato.release.auto.router import PROPENSITY_ALARM
    from ostinato.worlds.rollout.finished import CHEATED

    config = run.config
    if not config.serve.auto.arms:
        await note(
            run.log, PROPENSITY_ALARM, raised=False, why="Auto is switched off (serve.auto.arms)", at=wall_clock()
        )
    if config.learn.source == "people":
        why = "nothing is learned from rollouts (learn.source)"
        await note(run.log, CHEATED, raised=False, why=why, at=wall_clock())


def _window(config: Config) -> object:
    """Return how long the reward function waits; None if that is unknown without importing a user's own function."""
    module, _, name = config.reward.function.partition(":")
    if "window" in config.reward.options or module != functions.__name__:
        return config.reward.options.get("window")
    parameter = signature(getattr(functions, name)).parameters.get("window")
    return None if parameter is None else parameter.default


MEASURED = 5
"""With at least this many verdicts, a suite's spread is that of the paired differences; with fewer, that of the anchor's draws."""


async def note_resolution(run: Run, suite: Suite) -> None:
    """Write into the log whether the suite has the power for the margins, at the spread measured by its verdicts. Idempotent.

    With fewer than `MEASURED` verdicts the spread of the anchor's draws counts; from then on that of the differences.
    """
    reports: list[Mapping[str, Any]] = []
    async for row in rows_of(run.log, ReleaseEvent):
        report = row.detail.get("report", {})
        if report.get("suite_hash") == suite.hash and report.get("verdict") != "EXTEND" and "smallest_margin" in report:
            reports.append(report)
    raised, why = _is_coarse(reports, suite, run.config.evaluate.gate)
    await note(run.log, COARSE, raised=raised, why=why, at=wall_clock())


def _is_coarse(reports: Sequence[Mapping[str, Any]], suite: Suite, gate: GateConfig) -> tuple[bool, str]:
    """Return whether the suite has too little power for the margins, judged by its verdicts' reports (oldest first), and why."""
    if len(reports) < MEASURED:
        spreads = [float(report["draw_spread"]) for report in reports if report.get("draw_spread")]
        if not spreads:
            return False, f"nothing was measured on suite {suite.name!r} yet"
        try:
            check_margins(suite.name, items_in_round(suite, gate), gate, median(spreads))
        except BadConfig as error:
            return True, str(error)
        return False, f"as the anchor's draws of suite {suite.name!r} vary, it can hold its margins"
    smallest, margin = median(float(report["smallest_margin"]) for report in reports[-MEASURED:]), gate.total_margin
    why = f"as the last {MEASURED} verdicts measured it, suite {suite.name!r} can hold a total margin of {100 * smallest:.1f} pp"
    if smallest > margin:
        why += (
            f", and {100 * margin:.1f} pp is set: more than one in ten equally good candidates is blocked; add items or draws, or raise "
            "evaluate.gate.total_margin"
        )
    return smallest > margin, why


def _open(file: str, config: Config) -> TaskSuite:
    if not file:
        raise BadConfig(
            "there is no suite to measure with: name a task file in evaluate.suite, or 'demo', the functions of `ostinato demo`"
        )
    from ostinato.app.suites import open_task_suite  # imports an HTTP client

    return open_task_suite(file, config)


def gate_rules(config: Config) -> GateConfig:
    """Return the gate's rules. Without trials on users the gate must show the win that `release.require` asks for. Raises BadConfig."""
    gate = config.evaluate.gate
    if config.release.require == "no_loss" or config.release.canary:
        return gate
    if not gate.sample_best:
        raise BadConfig(
            "release.require='win' compares with the best release, which evaluate.gate.sample_best=false leaves out; set it to true"
        )
    return gate.model_copy(update={"require": "win"})


def open_evaluation(config: Config, url: str) -> Evaluation:
    """Return the evaluation of candidates against live, best and anchor, through the gateway at `url`."""
    from ostinato.app.suites import open_opinions, open_runner
    from ostinato.evaluate.evaluation import Evaluation

    suites = open_suites(config)
    return Evaluation(
        [open_runner(config, url, found) for found in suites.compared],
        gate_rules(config),
        bars=suites.bars,
        aside=[open_runner(config, url, found) for found in suites.aside],
        candidate_slot=EVALUATION_REF,
        best_slot=BEST_EVALUATION_REF,
        opinions=open_opinions(config, url) if config.evaluate.opinions else None,
    )


def open_step_check(config: Config, url: str) -> StepCheck | None:
    """Return the test of training steps that users follow, through the gateway at `url`; None if no user does. Raises BadConfig."""
    from ostinato.app.suites import open_runner
    from ostinato.evaluate.evaluation import StepCheck

    if not config.serve.learner_share:
        return None
    suites = open_suites(config)
    return StepCheck(
        [open_runner(config, url, found) for found in suites.compared],
        config.evaluate.gate,
        bars=suites.bars,
        aside=[open_runner(config, url, found) for found in suites.aside],
        slot=LEARNER_TEST_REF,
    )


def open_ledger(run: Run) -> ReleaseLedger:
    """Return the release ledger, for reading only."""
    from ostinato.release.ledger import ReleaseLedger

    return ReleaseLedger(run.log, wall_clock)


def open_releases(
    run: Run,
    evaluation: Evaluation | None = None,
    monitors: MonitorWatcher | None = None,
    steps: StepCheck | None = None,
) -> ReleaseController:
    """Return the release controller. Without an evaluation it only observes, and releases on command.

    A monitor's alarm pauses its shipping. `steps` tests the training steps that users follow.
    """
    from ostinato.release.controller import ReleaseController
    from ostinato.weights.follow.follower import StoreVersions

    return ReleaseController(
        run.log,
        run.store,
        StoreVersions(run.store, run.follower),
        evaluation,
        run.config.release,
        wall_clock,
        guarded=True,
        evaluation_ref=EVALUATION_REF,
        best_ref=BEST_EVALUATION_REF if run.config.evaluate.gate.sample_best else None,
        paused=lambda: monitors is not None and monitors.pauses_shipping,
        control_moves=bool(run.config.run.tenant),
        steps=steps,
        newest_ref=Arm.WORLD.value,
        step_ref=LEARNER_TEST_REF,
        idle_refs=_idle_refs(run.config),
    )


def _idle_refs(config: Config) -> tuple[str, ...]:
    """Return the refs that nothing moves while no user follows training, no candidate is tried on users, or none is evaluated."""
    off: list[str] = []
    if not config.release.canary:
        off += [Arm.CANARY.value, Arm.PREVIOUS.value]
    if not config.evaluate.suite:
        off.append(EVALUATION_REF)
    if not config.evaluate.gate.sample_best:
        off.append(BEST_EVALUATION_REF)
    if not config.serve.learner_share:
        off += [Arm.LEARNER.value, LEARNER_TEST_REF, *([Arm.WORLD.value] if config.learn.source == "people" else [])]
    return tuple(off)


def open_monitors(run: Run) -> MonitorWatcher:
    """Return the monitors for reward hacking over a run's log. Raises BadConfig for a rate that cannot be loaded."""
    from ostinato.release.monitors.watcher import MonitorWatcher

    return MonitorWatcher(run.log, run.config.release.monitors, run.folds)
