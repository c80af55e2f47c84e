"""The release worker's objects: a suite, who runs it against the gateway, and who decides."""

from __future__ import annotations

import json
from pathlib import Path

from ostinato.app.storage import EVALUATION_REF, Run, home
from ostinato.app.worlds import open_grader
from ostinato.config import Config
from ostinato.core.clock import wall_clock
from ostinato.demo import tasks as demo_tasks
from ostinato.evaluate.evaluation import Evaluation
from ostinato.evaluate.runner import SuiteRunner
from ostinato.evaluate.statistics import clustered_difference
from ostinato.evaluate.suites import Suite, build, load, parse
from ostinato.release.controller import ReleaseController
from ostinato.weights.follow.versions import StoreVersions


def open_suite(config: Config) -> Suite:
    """The evaluation suite, cut to `evaluate.items` if that is set."""
    named = config.evaluate.suite
    suite = _demo_suite() if named == "demo" else load(Path(named))
    items = suite.items[: config.evaluate.items] if config.evaluate.items else suite.items
    return suite if len(items) == len(suite.items) else build(suite.name, items)


def _demo_suite() -> Suite:
    """The copilot's held-out function families, which no user ever asks for."""
    _, held_out = demo_tasks.split(demo_tasks.load())
    return parse("demo-heldout", "".join(json.dumps(item) + "\n" for item in demo_tasks.suite_items(held_out)))


def open_runner(config: Config, url: str) -> SuiteRunner:
    """The suite runner against a gateway."""
    return SuiteRunner(open_suite(config), open_grader(config), url, home(config).admin_key(), config.evaluate.runner)


def open_evaluation(config: Config, url: str) -> Evaluation:
    """Candidate against live through the gateway at `url`."""
    return Evaluation(open_runner(config, url), config.evaluate.gate, candidate_slot=EVALUATION_REF)


def open_releases(run: Run, evaluation: Evaluation | None = None) -> ReleaseController:
    """The release controller; without an evaluation it can only look and roll back."""
    settings = run.config.release.model_copy(update={"evaluation_ref": EVALUATION_REF})
    return ReleaseController(
        run.log,
        run.store,
        StoreVersions(run.store, run.follower),
        evaluation,
        settings,
        wall_clock,
        clustered_difference,
    )
