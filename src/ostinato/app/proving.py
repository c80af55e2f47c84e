"""The release worker's objects: a suite, who runs it against the gateway, and who decides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.app.storage import EVALUATION_REF, Run, home
from ostinato.app.worlds import check_item, open_grader
from ostinato.config import Config
from ostinato.core.clock import wall_clock
from ostinato.core.errors import BadConfig
from ostinato.core.records import Alarm, AlarmState
from ostinato.demo import tasks as demo_tasks
from ostinato.evaluate.suites import Suite, build, load, parse
from ostinato.worlds.sandbox import Sandbox

if TYPE_CHECKING:  # a check of the suite at the start of `up` must not wait for what measures
    from ostinato.evaluate.evaluation import Evaluation
    from ostinato.evaluate.runner import SuiteRunner
    from ostinato.release.controller import ReleaseController
    from ostinato.release.monitors.watcher import MonitorWatcher


def open_suite(config: Config) -> Suite:
    """The evaluation suite, cut to `evaluate.items` if that is set. Raises BadConfig if there is none or it cannot be read."""
    named = config.evaluate.suite
    if not named:
        raise BadConfig(
            "there is no suite to measure with: name a task file in evaluate.suite (the guide says how to write one)"
        )
    suite = _demo_suite() if named == "demo" else load(Path(named))
    items = suite.items[: config.evaluate.items] if config.evaluate.items else suite.items
    return suite if len(items) == len(suite.items) else build(suite.name, items)


async def check_suite(config: Config) -> Suite:
    """The suite, once each of its items can be graded on this machine. Raises BadConfig, SandboxRefused."""
    suite = open_suite(config)
    for item in suite.items:
        check_item(item)
    if any(item.grader == "python_tests" for item in suite.items):
        async with Sandbox(config.sandbox) as sandbox:
            await sandbox.check()
    return suite


NO_SUITE = "release:suite"
"""The name of the alarm that stands while a run has no suite."""


async def note_suite(run: Run) -> None:
    """Write into the log that a run without a suite ships nothing by itself, or that it has one now. Idempotent."""
    standing: Alarm | None = None
    count = 0
    async for _, row in run.log.read(0, {Alarm}):
        if isinstance(row, Alarm) and row.name == NO_SUITE:
            standing, count = row, count + 1
    state = AlarmState.CLEARED if run.config.evaluate.suite else AlarmState.RAISED
    before = AlarmState.CLEARED if standing is None else standing.state
    if state is not before:
        why = (
            f"candidates are measured on {run.config.evaluate.suite}"
            if state is AlarmState.CLEARED
            else "no suite (evaluate.suite): nothing ships by itself; `ostinato ship` and `ostinato rollback` do it by hand"
        )
        await run.log.append(Alarm(id=f"{NO_SUITE}:{count}", name=NO_SUITE, state=state, reason=why, at=wall_clock()))


def _demo_suite() -> Suite:
    """The copilot's held-out function families, which no user ever asks for."""
    _, held_out = demo_tasks.split(demo_tasks.load())
    return parse("demo-heldout", "".join(json.dumps(item) + "\n" for item in demo_tasks.suite_items(held_out)))


def open_runner(config: Config, url: str) -> SuiteRunner:
    """The suite runner against a gateway."""
    from ostinato.evaluate.runner import SuiteRunner

    return SuiteRunner(open_suite(config), open_grader(config), url, home(config).admin_key(), config.evaluate.runner)


def open_evaluation(config: Config, url: str) -> Evaluation:
    """Candidate against live through the gateway at `url`."""
    from ostinato.evaluate.evaluation import Evaluation

    return Evaluation(open_runner(config, url), config.evaluate.gate, candidate_slot=EVALUATION_REF)


def open_releases(run: Run, evaluation: Evaluation | None = None) -> ReleaseController:
    """The release controller; without an evaluation it only looks, and moves releases by hand."""
    from ostinato.evaluate.statistics import clustered_difference
    from ostinato.release.controller import ReleaseController
    from ostinato.weights.follow.versions import StoreVersions

    return ReleaseController(
        run.log,
        run.store,
        StoreVersions(run.store, run.follower),
        evaluation,
        run.config.release,
        wall_clock,
        clustered_difference,
        evaluation_ref=EVALUATION_REF,
        canary=run.config.serve.canary_share > 0,
    )


def open_monitors(run: Run) -> MonitorWatcher:
    """The monitors of reward hacking over the log of a run. Raises BadConfig for a rate that cannot be loaded."""
    from ostinato.release.monitors.watcher import MonitorWatcher

    return MonitorWatcher(run.log, run.config.release.monitors, run.folds)
