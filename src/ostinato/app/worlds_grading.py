"""The graders of tasks, by the names that tasks use."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import AsyncGenerator, Mapping

from ostinato.config import Config
from ostinato.core.errors import BadConfig
from ostinato.core.seams import Backend
from ostinato.worlds.grading.completion import CompletionGrader, Runs, read_completion
from ostinato.worlds.grading.effort import Alarm, EffortConfig, WatchedGrader
from ostinato.worlds.grading.functions import FunctionGrader, FunctionGrading, read_data
from ostinato.worlds.grading.grade import Grade, Grader, PatternGrader, read_pattern
from ostinato.worlds.grading.harbor import HarborGrader, read_harbor
from ostinato.worlds.grading.judge import JudgedGrader, RubricJudge
from ostinato.worlds.grading.sandboxed_program import Apart
from ostinato.worlds.grading.suites import PytestGrader, read_suite
from ostinato.worlds.harness.rollout import Rollout
from ostinato.worlds.sandbox import Boxes, SandboxConfig, SingleRuns, python_inside
from ostinato.worlds.sandbox.e2b import E2BBoxes
from ostinato.worlds.sandbox.e2b.backend import PYTHON
from ostinato.worlds.sandbox.gvisor import GVisorBoxes, RunsInBoxes
from ostinato.worlds.tasks.task import Task

WORLD_GRADERS = ("function", "pattern", "pytest", "python_tests", "harbor")
"""The names that tasks may use."""


def check_grading(task: Task) -> None:
    """Raise BadConfig, which names the task and the field, unless the task's grader exists and can work with `grading.data`."""
    match task.grading.grader:
        case "function":
            read_data(FunctionGrading, task)
        case "harbor":
            read_harbor(task)
        case "pytest":
            read_suite(task)
        case "python_tests":
            read_completion(task)
        case "pattern":
            read_pattern(task)
        case other:
            raise BadConfig(
                f"task {task.id!r}, field 'grading.grader': there is no grader {other!r}; there are {', '.join(WORLD_GRADERS)}"
            )


def open_backend(config: SandboxConfig) -> Backend:
    """The backend of the worlds' sandboxes, chosen by `sandbox.backend`. Raises BadConfig if it needs something that is not installed."""
    match config.backend:
        case "gvisor":
            return GVisorBoxes(config)
        case "e2b":
            return E2BBoxes(config)
        case "namespaces":
            return Boxes(config)


@contextlib.asynccontextmanager
async def open_grading(
    config: Config, environment: Mapping[str, str] = os.environ, *, proving: bool = False
) -> AsyncGenerator[tuple[Backend, Grader]]:
    """Sandboxes, and a grader of any task in them, with the price of effort and the judge that `[worlds]` sets.

    `proving`: for a verdict about a candidate. Effort then has no price, and single answers need not wait until the processor is
    otherwise idle. Raises BadConfig for a judge whose key is not set, and as `open_backend` does.
    """
    settings = config.worlds
    async with contextlib.AsyncExitStack() as leaving:
        judge = None
        if settings.judge is not None:
            key = environment.get(settings.judge.key_env, "").strip() if settings.judge.key_env else ""
            if settings.judge.key_env and not key:
                raise BadConfig(
                    f"worlds.judge takes its key from the variable {settings.judge.key_env}, which is not set"
                )
            judge = await leaving.enter_async_context(RubricJudge(settings.judge, key))
        boxes = open_backend(config.sandbox)
        leaving.push_async_callback(boxes.close)
        python = PYTHON if config.sandbox.backend == "e2b" else python_inside()
        if config.sandbox.backend == "namespaces":
            runs = SingleRuns(config.sandbox, gives_way=not proving)
            leaving.callback(runs.close)
        else:
            assert isinstance(boxes, GVisorBoxes | E2BBoxes)
            runs = RunsInBoxes(boxes, config.sandbox, python=python)
        effort = None if proving else settings.effort
        yield boxes, open_graders(boxes, runs, python, effort=effort, judge=judge)


def open_graders(
    backend: Backend,
    runs: Runs,
    python: str,
    *,
    effort: EffortConfig | None = None,
    judge: RubricJudge | None = None,
    alarm: Alarm | None = None,
) -> Grader:
    """Grades any task by the grader that it names, one of `WORLD_GRADERS`.

    Args:
        backend: where function and repository tasks are graded.
        runs: where completions are graded.
        python: the path of an interpreter inside of a sandbox of `backend`.
        effort: the price of effort; None: nothing.
        judge: judges solved outcomes of function and repository tasks too; the caller opens and closes it.
        alarm: told of outcomes reached by cheating; None: a warning in this process's log.
    """
    apart = Apart(backend=backend, python=python)
    graders: dict[str, Grader] = {"function": FunctionGrader(apart), "pytest": PytestGrader(apart)}
    if judge is not None:
        graders = {name: JudgedGrader(grader, judge) for name, grader in graders.items()}
    graders["harbor"] = HarborGrader(backend)
    graders["python_tests"] = CompletionGrader(runs)
    graders["pattern"] = PatternGrader()
    return WatchedGrader(graders, effort or EffortConfig(), alarm or _warn)


def _warn(task: Task, rollout: Rollout, grade: Grade) -> None:
    logging.getLogger(__name__).warning(
        "task %s, turns %s: cheated: %s", task.id, rollout.turns[-1:], "; ".join(grade.cheated)
    )
