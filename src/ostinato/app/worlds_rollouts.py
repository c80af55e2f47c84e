"""The rollout worker's objects: tasks, harnesses, sandboxes, graders, the gateway, and the worker's own memory."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from ostinato.app.storage import Run
from ostinato.config import Config
from ostinato.core.errors import BadConfig
from ostinato.worlds.grading.completion import python_tests
from ostinato.worlds.grading.grade import Grade, Grader
from ostinato.worlds.harness.rollout import Harness, Rollout
from ostinato.worlds.rollout.gateway import WorldGateway
from ostinato.worlds.rollout.journal import EventFile
from ostinato.worlds.rollout.once import AskedOnce
from ostinato.worlds.rollout.spending import Spending
from ostinato.worlds.rollout.working import Rollouts, Workshop
from ostinato.worlds.sandbox import SingleRuns
from ostinato.worlds.tasks.task import Split, Task, Taskset
from ostinato.worlds.tasks.tasksets import load


def open_taskset(config: Config) -> Taskset:
    """The tasks that rollouts are made of. Raises BadConfig: none is named, it cannot be read, or nothing in it teaches."""
    if config.learn.source == "people":
        raise BadConfig('learn.source is "people": rollouts would teach nothing; set it to "worlds" or "both"')
    if not config.worlds.file:
        raise BadConfig("worlds.file is empty; name a taskset (JSONL)")
    tasks = load(Path(config.worlds.file).expanduser())
    if not any(task.split is Split.TRAIN for task in tasks.tasks):
        raise BadConfig(
            f"worlds.file {config.worlds.file}: no task has the split 'train', so there is nothing to learn"
        )
    known = open_harnesses(config)
    for task in tasks.tasks:
        if task.harness not in known:
            raise BadConfig(f"task {task.id!r}: no harness {task.harness!r}; there are {', '.join(sorted(known))}")
    return tasks


def open_harnesses(config: Config) -> dict[str, Harness]:
    """The harnesses by name."""
    return {"single": AskedOnce()}


class TextGrader:
    """Implements `Grader` for answers: by a pattern, or by hidden tests of a function that was asked for."""

    def __init__(self, config: Config) -> None:
        self._runs = SingleRuns(config.sandbox)

    async def grade(self, task: Task, rollout: Rollout) -> Grade:
        """1 or 0."""
        text, data, grader = rollout.messages[-1].text, task.grading.data, task.grading.grader
        if grader == "pattern":
            return Grade(value=float(re.search(str(data["pattern"]), text) is not None))
        if grader == "python_tests":
            return Grade(
                value=await python_tests(data["head"], text, data["tests"], self._runs, task.grading.timeout_s)
            )
        raise BadConfig(f"task {task.id!r}: no grader {grader!r}; there are pattern and python_tests")


def open_task_grader(config: Config) -> Grader:
    """Grades the rollouts of tasks."""
    return TextGrader(config)


@contextlib.asynccontextmanager
async def open_rollouts(run: Run, url: str, tasks: Taskset, tell: Callable[..., None]) -> AsyncGenerator[Rollouts]:
    """Rollouts of a taskset through the gateway at `url`, going on where an earlier worker was. Raises BadConfig, Corrupt, StorageFull."""
    config = run.config
    journal, events = EventFile.open(run.home.rollouts)
    with contextlib.closing(journal):
        longest = max(task.timeout_s for task in tasks.tasks)
        async with WorldGateway(
            url, run.home.admin_key(), temperature=config.worlds.temperature, timeout_s=longest
        ) as gateway:
            spending = Spending(run.log, after=max((event.get("after", 0) for event in events), default=0))
            shop = Workshop(
                harnesses=open_harnesses(config), backend=None, grader=open_task_grader(config), gateway=gateway
            )
            yield Rollouts(tasks, shop, journal, events, spending, config.worlds, tell)
