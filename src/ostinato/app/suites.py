"""Opens the task files that candidates are evaluated on, and attempts their held-out tasks in the same way as training rollouts."""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from ostinato.adapt.safety import smoke_items, suite_items
from ostinato.app import worlds
from ostinato.app.storage import home, operator_key, serving_run
from ostinato.config import Config
from ostinato.core.arm_assignment import branch_ref
from ostinato.core.conversation import Message, Role
from ostinato.core.errors import BadConfig, BadRequest
from ostinato.core.records import PolicyVersion
from ostinato.core.seams import Backend
from ostinato.demo import tab as tab_lines
from ostinato.demo import tasks as demo_tasks
from ostinato.evaluate.opinions import OpinionProbes
from ostinato.evaluate.runner import Attempted, SuiteRunner
from ostinato.evaluate.suites import Item, Suite
from ostinato.worlds.grading.grade import Grader
from ostinato.worlds.grading.own import own_graders
from ostinato.worlds.harness.gateway import WorldGateway
from ostinato.worlds.harness.harnesses import answered
from ostinato.worlds.harness.rollout import Ended, Harness, Rollout
from ostinato.worlds.rollout.attempt import Workshop
from ostinato.worlds.tasks.rows import ANSWER_S, GRADING_S
from ostinato.worlds.tasks.task import Split, Task, Taskset
from ostinato.worlds.tasks.tasksets import load, parse

ONE_ANSWER = "single"
"""The harness whose rollouts are a single answer; one call can sample several."""

EVAL_USER = "eval"

# ---------------------------------------------------------------- task files


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSuite:
    """The held-out tasks of a file as a suite: its items have the tasks' ids, and its hash covers the tasks and their harnesses.

    `runs_code`: whether a harness or grader runs code that a model wrote.

    Example: ``TaskSuite(suite=suite, tasks=taskset, runs_code=True)``
    """

    suite: Suite
    tasks: Taskset
    runs_code: bool


def open_task_suite(file: str, config: Config) -> TaskSuite:
    """Open the held-out tasks of a file or of a shipped suite (`demo`, `demo-tab`, `safety`, `safety-smoke`), only the first
    `evaluate.items` if that is set.

    The suite is named after the file. Raises BadConfig if the file cannot be read, has no held-out task, or has one that cannot be
    attempted or graded.
    """
    taskset = _read(file, config)
    tasks = [task for task in taskset.tasks if task.split is Split.HELD_OUT]
    if not tasks:
        raise BadConfig(
            f"task file {file}: no task has the split 'held_out', so there is nothing to measure with; give some tasks that split"
        )
    tasks = tasks[: config.evaluate.items or None]
    worlds.check_tasks(config, tasks)
    items = tuple(Item(task.id, task.family) for task in tasks)
    return TaskSuite(
        suite=Suite(taskset.name, _hash(taskset, tasks, config), items),
        tasks=replace(taskset, tasks=tuple(tasks)),
        runs_code=worlds.runs_code(config, tasks),
    )


def _read(file: str, config: Config) -> Taskset:
    answer_s, grading_s = config.evaluate.runner.request_timeout_s, config.evaluate.grade_timeout_s
    if (shipped := _shipped(file)) is not None:
        name, items = shipped
        text = "".join(json.dumps(item) + "\n" for item in items)
        found = parse(name, text, Path(), answer_s=answer_s, grading_s=grading_s)
        return replace(found, hash=parse(name, text, Path()).hash)
    path = Path(file).expanduser()
    if not path.is_file():
        raise BadConfig(f"there is no task file {file}; check evaluate.suite (a relative path begins at {Path.cwd()})")
    path, name = path.resolve(), path.stem  # the name before resolving, because a mounted file may be a link
    found = load(path, answer_s=answer_s, grading_s=grading_s)
    # timeouts do not change what is asked, so the hash is computed with the default ones
    usual = found if (answer_s, grading_s) == (ANSWER_S, GRADING_S) else load(path)
    return replace(found, name=name, hash=usual.hash)


def _hash(taskset: Taskset, tasks: Sequence[Task], config: Config) -> str:
    harnesses = worlds.open_harnesses(config)
    used = sorted({harnesses[task.harness].hash for task in tasks})
    asked = sorted({str(config.worlds.temperature) for task in tasks if task.temperature is None})
    own = own_graders(config.worlds.graders, worlds.GRADERS)
    graders = sorted({own[task.grading.grader].identity for task in tasks if task.grading.grader in own})
    judge = config.worlds.judge if any(task.grading.grader == "rubric" for task in tasks) else None
    judged = [] if judge is None else [judge.model_dump_json(include={"model", "axes"})]
    return blake3("\0".join([taskset.hash, str(len(tasks)), *asked, *used, *graders, *judged]).encode()).hexdigest()


def _shipped(suite: str) -> tuple[str, list[dict[str, Any]]] | None:
    """Return the name and items of a suite that ships with Ostinato; None for any other."""
    match suite:
        case "demo":  # the copilot's held-out function families, for which no user ever asks
            return "demo-heldout", demo_tasks.suite_items(demo_tasks.split(demo_tasks.load())[1])
        case "demo-tab":  # Tab's held-out lines, which no user ever types
            return "tab-heldout", tab_lines.suite_items(tab_lines.split_lines()[1])
        case "safety":
            return suite, suite_items()
        case "safety-smoke":
            return suite, smoke_items()
        case _:
            return None


# ---------------------------------------------------------------- attempting tasks


class HeldOutTasks:
    """Implements `TaskSlot`: attempts held-out tasks in a workshop whose gateway answers with the weights of one slot."""

    def __init__(self, tasks: Taskset, shop: Workshop, gateway: WorldGateway, answers_per_call: int) -> None:
        self._tasks: Mapping[str, Task] = {task.id: task for task in tasks.tasks}
        self._shop, self._gateway, self._answers_per_call = shop, gateway, answers_per_call
        self._token, self._number = f"bar{secrets.token_hex(4)}", 0

    async def served(self) -> PolicyVersion | None:
        return await self._gateway.served()

    def answers_per_call(self, item: Item) -> int:
        return self._answers_per_call if self._tasks[item.id].harness == ONE_ANSWER else 1

    async def tries(self, item: Item, seed: int, count: int) -> list[Attempted]:
        task = self._tasks[item.id]
        harness = self._shop.harnesses[task.harness]
        if task.harness == ONE_ANSWER:
            return await self._answers(task, harness, seed, count)
        return [await self._rollout(task, harness, seed + number) for number in range(count)]

    async def _answers(self, task: Task, harness: Harness, seed: int, count: int) -> list[Attempted]:
        began = time.monotonic()
        found = await self._gateway.sample(task, n=count, seed=seed, user=EVAL_USER, harness=harness.hash)
        seconds = time.monotonic() - began
        return [
            self._attempted(
                task,
                answered(task, harness, choice.message, choice.finish),
                bool(choice.message.text) and choice.finish == "stop",
                found.policies,
                seconds,
                text=choice.message.text or None,
            )
            for choice in found.choices
        ]

    async def _rollout(self, task: Task, harness: Harness, seed: int) -> Attempted:
        self._number += 1
        began = time.monotonic()
        model = self._gateway.model(
            f"{self._token}.{self._number}",
            group=None,
            harness=harness.hash,
            seed=seed,
            temperature=task.temperature,
            top_p=task.top_p,
        )
        rollout: Rollout = await self._shop.work(task, model)
        seconds = time.monotonic() - began
        if rollout.ended is Ended.FAILED:
            why = rollout.detail.get("why", "it did not begin")
            raise BadRequest(f"task {task.id!r} cannot be tried: {why}; fix it or remove it from the task file")
        formed = rollout.ended is Ended.SUBMITTED
        return self._attempted(task, rollout, formed, tuple(sorted(model.policies)), seconds)

    def _attempted(
        self,
        task: Task,
        rollout: Rollout,
        formed: bool,
        policies: tuple[PolicyVersion, ...],
        seconds: float,
        *,
        text: str | None = None,
    ) -> Attempted:
        async def score() -> float:
            grade = await self._shop.grade(task, rollout)
            return 0.0 if grade.cheated else grade.value

        return Attempted(formed=formed, policies=policies, seconds=seconds, grade=score, text=text)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutWorld:
    """Implements `TaskWorld` with a run's harnesses, sandboxes and graders, and the gateway at `url`.

    Example: ``HeldOutWorld(config=config, url="http://127.0.0.1:8321", tasks=found.tasks)``
    """

    config: Config
    url: str
    tasks: Taskset

    def grading(self) -> AbstractAsyncContextManager[tuple[Backend | None, Grader]]:
        """Return the sandbox backend and grader. Single answers need no backend: their tests run in namespaces of this machine."""
        only_answers = all(task.harness == ONE_ANSWER for task in self.tasks.tasks)
        graders = {task.grading.grader for task in self.tasks.tasks}
        if only_answers and graders.isdisjoint(worlds.GRADERS_IN_BOXES):
            return worlds.open_answer_grading(self.config, judged="rubric" in graders)
        return worlds.open_grading(self.config, proving=True)

    @contextlib.asynccontextmanager
    async def open(self, slot: str) -> AsyncGenerator[HeldOutTasks]:
        place = home(serving_run(self.config))
        gateway = worlds.world_gateway(self.config, place, self.url, self.tasks, _slot_name(self.config, slot))
        async with worlds.workshop_behind(self.config, gateway, grading=self.grading()) as shop:
            yield HeldOutTasks(self.tasks, shop, gateway, self.config.evaluate.runner.samples_per_request)


def open_runner(config: Config, url: str, found: TaskSuite) -> SuiteRunner:
    """Return the runner of a suite against the gateway at `url`."""
    world = HeldOutWorld(config=config, url=url.rstrip("/").removesuffix("/v1"), tasks=found.tasks)
    return SuiteRunner(found.suite, world, config.evaluate.runner)


def _slot_name(config: Config, slot: str) -> str:
    """Return the gateway's name for a slot; a tenant's branch has slots of its own."""
    return branch_ref(config.run.tenant, slot) if config.run.tenant else slot


# ---------------------------------------------------------------- probes


class _SlotScorer:
    """Implements `Scorer` with a gateway."""

    def __init__(self, gateway: WorldGateway) -> None:
        self._gateway = gateway

    async def served(self) -> PolicyVersion | None:
        return await self._gateway.served()

    async def logprob(self, prompt: str, answer: str) -> float:
        return math.fsum(await self._gateway.scored([Message(role=Role.USER, text=prompt)], answer))


@dataclass(frozen=True, slots=True, kw_only=True)
class _SlotScoring:
    """Implements `Scoring` with a run's gateway at `url`."""

    config: Config
    url: str

    @contextlib.asynccontextmanager
    async def open(self, slot: str) -> AsyncGenerator[_SlotScorer]:
        key, runner = operator_key(self.config, home(serving_run(self.config))), self.config.evaluate.runner
        named = _slot_name(self.config, slot)
        async with WorldGateway(self.url, key, timeout_s=runner.request_timeout_s, slot=named) as gateway:
            yield _SlotScorer(gateway)


def open_opinions(config: Config, url: str) -> OpinionProbes:
    """Return the probes for sycophancy against the gateway at `url`."""
    scoring = _SlotScoring(config=config, url=url.rstrip("/").removesuffix("/v1"))
    return OpinionProbes(scoring, config.evaluate.runner)
