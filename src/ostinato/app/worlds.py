"""Simulated worlds, assembled from the configuration: tasks, harnesses, sandboxes, graders, rollouts, and the alarms that they raise.

Also the taskset that ships with Ostinato: the demo's functions as tasks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from ostinato.app.storage import Home, Run, home, operator_key
from ostinato.config import Config
from ostinato.core.clock import wall_clock
from ostinato.core.conversation import Message, Role
from ostinato.core.errors import BadConfig, Unavailable
from ostinato.core.records import Arm, Turn
from ostinato.core.retry import RetryPolicy, retry
from ostinato.core.seams import Backend, Log
from ostinato.demo.tasks import MAX_TOKENS, STOP, Blank, messages, split
from ostinato.demo.tasks import load as load_blanks
from ostinato.evaluate.coverage import ScoredAttempt, covered, lost_coverage
from ostinato.record.rowlog import RowLog
from ostinato.release.alarms import note
from ostinato.worlds.building.runs import BuildPlace
from ostinato.worlds.grading.answer_checks import ChecksGrader, read_checks
from ostinato.worlds.grading.completion import CompletionGrader, Runs, read_completion
from ostinato.worlds.grading.effort import Alarm, EffortConfig, WatchedGrader
from ostinato.worlds.grading.functions import FunctionGrader, FunctionGrading, IsolatedPrograms, read_data
from ostinato.worlds.grading.grade import Grade, Grader, PatternGrader, SuggestionGrader, read_pattern, read_suggestion
from ostinato.worlds.grading.harbor import HarborGrader, read_harbor
from ostinato.worlds.grading.judge import JudgedGrader, RubricGrader, RubricJudge
from ostinato.worlds.grading.own import OwnGrader, own_graders
from ostinato.worlds.grading.suites import PytestGrader, read_suite
from ostinato.worlds.harness.gateway import WorldGateway
from ostinato.worlds.harness.harnesses import HARNESSES, ToolLoop, is_agent, no_harness, open_harness
from ostinato.worlds.harness.rollout import Harness, Rollout
from ostinato.worlds.rollout.attempt import Workshop
from ostinato.worlds.rollout.finished import CHEATED, CheatWatch, Finished
from ostinato.worlds.rollout.groups import EventFile, SpentGroups, most_steps_behind, open_groups, set_back
from ostinato.worlds.rollout.mutual_tls import door_context, renewing, worker_context
from ostinato.worlds.rollout.rollout_server import Door, FarOutcomes, OwnTurns
from ostinato.worlds.rollout.rollout_worker import Rollouts
from ostinato.worlds.sandbox import Boxes, SandboxConfig, SingleRuns, python_inside
from ostinato.worlds.sandbox.e2b import E2BBoxes
from ostinato.worlds.sandbox.e2b.backend import PYTHON
from ostinato.worlds.sandbox.gvisor import GVisorBoxes, RunsInBoxes
from ostinato.worlds.tasks.task import Grading, Split, Task, Taskset
from ostinato.worlds.tasks.tasksets import load, taskset_of

logger = logging.getLogger(__name__)

# ---------------------------------------------------------------- grading


_DATA_READERS: dict[str, Callable[[Task], object]] = {
    "function": lambda task: read_data(FunctionGrading, task),
    "pattern": read_pattern,
    "pytest": read_suite,
    "python_tests": read_completion,
    "suggestion": read_suggestion,
    "harbor": read_harbor,
    "rubric": lambda task: None,  # it judges any text
    "checks": read_checks,
}
"""Parsers of a task's `grading.data`, by grader. Each raises BadConfig for data that its grader cannot use."""

GRADERS = tuple(_DATA_READERS)
"""The names of graders that tasks and suites may use."""

GRADERS_IN_BOXES = ("function", "pytest", "harbor")
"""The graders that need a sandbox backend."""

_GRADERS_OF_TEXT = ("pattern", "checks", "suggestion", "rubric")
"""The graders that run no code."""


def check_grading(task: Task, own: Collection[str] = ()) -> None:
    """Raise BadConfig, which names the task and the field, unless the task's grader exists and can use its `grading.data`.

    `own`: the names of the operator's own graders, whose data only they can check.
    """
    grader = task.grading.grader
    if grader in own:
        return
    if grader not in _DATA_READERS:
        raise BadConfig(
            f"task {task.id!r}, field 'grading.grader': there is no grader {grader!r}; there are {', '.join([*GRADERS, *own])}; "
            "worlds.graders adds your own"
        )
    _DATA_READERS[grader](task)


def open_backend(config: SandboxConfig) -> Backend:
    """Return the sandbox backend that `sandbox.backend` selects. Raises BadConfig if it needs something that is not installed."""
    match config.backend:
        case "gvisor":
            return GVisorBoxes(config)
        case "e2b":
            return E2BBoxes(config)
        case "namespaces":
            return Boxes(config)


@contextlib.asynccontextmanager
async def open_grading(config: Config, *, proving: bool = False) -> AsyncGenerator[tuple[Backend, Grader]]:
    """Open sandboxes and a grader of any task in them, with the price of effort and the judge that `[worlds]` sets.

    `proving`: for a verdict about a candidate. Effort then has no price, and single answers do not wait until the processor is otherwise
    idle. Raises BadConfig for a judge whose key is not set, and like `open_backend`.
    """
    async with contextlib.AsyncExitStack() as leaving:
        judge = await leaving.enter_async_context(_open_judge(config))
        boxes = open_backend(config.sandbox)
        leaving.push_async_callback(boxes.close)
        python = PYTHON if config.sandbox.backend == "e2b" else python_inside()
        if config.sandbox.backend == "namespaces":
            runs = SingleRuns(config.sandbox, gives_way=not proving)
            leaving.callback(runs.close)
        else:
            assert isinstance(boxes, GVisorBoxes | E2BBoxes)
            runs = RunsInBoxes(boxes, config.sandbox, python=python)
        effort = None if proving else config.worlds.effort
        own = _open_own(config, leaving)
        yield boxes, open_graders(boxes, runs, python, effort=effort, judge=judge, own=own)


@contextlib.asynccontextmanager
async def open_answer_grading(config: Config, *, judged: bool) -> AsyncGenerator[tuple[None, Grader]]:
    """Open a grader of single answers, without `GRADERS_IN_BOXES`; tests run in namespaces of this machine.

    `judged`: whether some are graded by `rubric`. Raises BadConfig for a judge whose key is not set.
    """
    async with contextlib.AsyncExitStack() as leaving:
        judge = await leaving.enter_async_context(_open_judge(config)) if judged else None
        runs = leaving.enter_context(contextlib.closing(SingleRuns(config.sandbox)))
        own = _open_own(config, leaving)
        yield None, open_graders(None, runs, python_inside(), judge=judge, own=own)


def _open_own(config: Config, leaving: contextlib.AsyncExitStack) -> dict[str, OwnGrader]:
    """Open the operator's own graders, whose processes end when the stack is left. Raises BadConfig."""
    own = own_graders(config.worlds.graders, GRADERS, config.worlds.grader_memory_bytes)
    for grader in own.values():
        leaving.push_async_callback(grader.close)
    return own


@contextlib.asynccontextmanager
async def _open_judge(config: Config) -> AsyncGenerator[RubricJudge | None]:
    """Open the judge of `worlds.judge`; None without one. Raises BadConfig if its key is not set."""
    settings = config.worlds.judge
    if settings is None:
        yield None
        return
    key = os.environ.get(settings.key_env, "").strip() if settings.key_env else ""
    if settings.key_env and not key:
        raise BadConfig(
            f"worlds.judge takes its key from the variable {settings.key_env}, which is not set: export it where this is started"
        )
    async with RubricJudge(settings, key) as judge:
        yield judge


def open_graders(
    backend: Backend | None,
    runs: Runs,
    python: str,
    *,
    effort: EffortConfig | None = None,
    judge: RubricJudge | None = None,
    alarm: Alarm | None = None,
    own: Mapping[str, Grader] | None = None,
) -> Grader:
    """Return a grader of any task, which dispatches to the grader that the task names, one of `GRADERS` or of `own`.

    Args:
        backend: where function and repository tasks are graded; None: there are no such tasks.
        runs: where completions are graded.
        python: the path of a Python interpreter inside a sandbox of `backend`.
        effort: the price of effort; None: no price.
        judge: also judges solved function and repository tasks, and alone those of the grader `rubric`; the caller opens and closes it.
        alarm: called for outcomes reached by cheating; None: a warning in this process's log.
        own: the operator's own graders by name.
    """
    graders: dict[str, Grader] = {}
    if backend is not None:
        apart = IsolatedPrograms(backend=backend, python=python)
        graders |= {"function": FunctionGrader(apart), "pytest": PytestGrader(apart)}
        if judge is not None:
            graders = {name: JudgedGrader(grader, judge) for name, grader in graders.items()}
        graders["harbor"] = HarborGrader(backend)
    graders["python_tests"] = CompletionGrader(runs)
    graders["pattern"] = PatternGrader()
    graders["checks"] = ChecksGrader()
    graders["suggestion"] = SuggestionGrader()
    graders["rubric"] = RubricGrader(judge)
    graders |= own or {}
    return WatchedGrader(graders, effort or EffortConfig(), alarm or _warn)


def _warn(task: Task, rollout: Rollout, grade: Grade) -> None:
    logger.warning("task %s, turns %s: cheated: %s", task.id, rollout.turns[-1:], "; ".join(grade.cheated))


# ---------------------------------------------------------------- tasks and rollouts


def open_taskset(config: Config) -> Taskset:
    """Return the taskset for rollouts. Raises BadConfig if none is set, it cannot be read, or nothing could be learned from it."""
    if config.learn.source == "people":
        raise BadConfig('learn.source is "people": rollouts would teach nothing; set it to "worlds" or "both"')
    if not config.worlds.file:
        raise BadConfig("worlds.file is empty; name a taskset (JSONL)")
    tasks = load(Path(config.worlds.file).expanduser())
    if not any(task.split is Split.TRAIN for task in tasks.tasks):
        raise BadConfig(
            f"worlds.file {config.worlds.file}: no task has the split 'train', so there is nothing to learn"
        )
    check_tasks(config, tasks.tasks)
    strengths = {"reward.belief.strength": config.reward.belief.strength, "worlds.suspects": config.worlds.suspects}
    asks = next((name for name, strength in strengths.items() if strength), "")
    if asks and not any(task.known for task in tasks.tasks if task.split is Split.TRAIN):
        raise BadConfig(
            f"{asks} is set, and no task of worlds.file {config.worlds.file} with the split 'train' has a known answer; give tasks the "
            f"field 'known', or set {asks} = 0"
        )
    for task in tasks.tasks:
        cut = task.top_p < 1.0 and config.engine.kind == "vllm"  # vLLM does not report which tokens top_p left
        if task.split is Split.TRAIN and (cut or task.temperature == 0.0):
            raise BadConfig(
                f"worlds.file {config.worlds.file}: task {task.id!r}: an answer at temperature 0, or with vLLM from a part of the "
                "distribution (top_p), teaches nothing; leave both out of tasks with the split 'train'"
            )
    return tasks


def check_tasks(config: Config, tasks: Iterable[Task]) -> None:
    """Raise BadConfig for a task whose harness or grader does not exist or cannot handle it."""
    known, own = open_harnesses(config), own_graders(config.worlds.graders, GRADERS)
    for task in tasks:
        if task.harness not in known:
            raise BadConfig(f"task {task.id!r}: {no_harness(task.harness)}")
        if isinstance(harness := known[task.harness], ToolLoop):
            harness.check(task)
        if task.known is not None and is_agent(task.harness):
            raise BadConfig(f"task {task.id!r}, field 'known': an agent's conversation is its own; leave it out")
        if is_agent(task.harness) and task.top_p < 1.0:
            raise BadConfig(f"task {task.id!r}, field 'top_p': an agent's calls are sampled whole; leave it out")
        check_grading(task, own)
        if task.grading.grader == "rubric" and config.worlds.judge is None:
            raise BadConfig(
                f"task {task.id!r}: the grader 'rubric' asks the model of [worlds.judge], which is not set; set it, or name another grader"
            )


def runs_code(config: Config, tasks: Iterable[Task]) -> bool:
    """Return whether a harness or grader of these tasks runs code that a model wrote, so that a sandbox is needed."""
    harnesses, outside = open_harnesses(config), {*_GRADERS_OF_TEXT, *config.worlds.graders}
    return any(harnesses[task.harness].spec(task) is not None or task.grading.grader not in outside for task in tasks)


def check_steps(config: Config, tasks: Taskset) -> None:
    """Raise BadConfig if too few groups are drawn for even one step."""
    worlds = config.worlds
    drawn = worlds.epochs * sum(task.split is Split.TRAIN for task in tasks.tasks)
    if worlds.epochs and drawn < worlds.groups and config.learn.source == "worlds":
        raise BadConfig(
            f"taskset {tasks.name!r} gives {drawn} groups (worlds.epochs is {worlds.epochs}), and a step takes {worlds.groups} "
            "(worlds.groups): not one step is possible; set worlds.epochs=0 to draw tasks for ever, lower worlds.groups, or add tasks"
        )


def open_harnesses(config: Config) -> dict[str, Harness]:
    """Return the harnesses by name. Raises BadConfig for unknown settings."""
    for name in config.worlds.harness:
        if name not in HARNESSES and not is_agent(name):
            raise BadConfig(f"worlds.harness.{name}: no such harness; there are {', '.join(HARNESSES)} and agent")
    names = dict.fromkeys([*HARNESSES, *config.worlds.harness])
    return {name: open_harness(name, config.worlds.harness.get(name)) for name in names}


@contextlib.asynccontextmanager
async def open_rollouts(
    run: Run, url: str, tasks: Taskset, tell: Callable[..., None], keep: Callable[[Finished], None]
) -> AsyncGenerator[Rollouts]:
    """Open rollouts of a taskset through the gateway at `url`, resumed where an earlier worker stopped.

    `tell` and `keep` as in `Rollouts`. Raises BadConfig, Corrupt, StorageFull, Unavailable.
    """
    warn_of_staleness(run.config, tasks)
    journal, events = EventFile.open(run.home.rollouts)
    with contextlib.closing(journal):
        events = await _reconciled(run.log, journal, events)
        async with open_workshop(run.config, run.home, url, tasks) as shop:
            spent = SpentGroups(run.log, after=_read_upto(events) or 0)
            reward = run.config.reward
            yield Rollouts(
                tasks,
                shop,
                journal,
                events,
                spent,
                run.config.worlds,
                tell,
                keep,
                flat_count=reward.flat_groups == "train",
                beliefs=reward.belief.strength > 0 or run.config.worlds.suspects > 0,
            )


@contextlib.asynccontextmanager
async def open_far_rollouts(
    config: Config,
    tasks: Taskset,
    tell: Callable[..., None],
    keep: Callable[[Finished], None],
    waiting: Callable[[str], None],
) -> AsyncGenerator[Rollouts]:
    """Open rollouts of a taskset for a run on another machine, through its door, resumed where an earlier worker stopped.

    While the door does not answer, `waiting` is told why. Raises BadConfig, Corrupt, StorageFull.
    """
    aim, worlds = config.worlds.connect, config.worlds
    context = worker_context(aim.certificate, aim.key, aim.authority)
    longest = max(task.timeout_s for task in tasks.tasks)
    journal, events = EventFile.open(home(config).rollouts)
    with contextlib.closing(journal):
        gateway = WorldGateway(aim.url, "", temperature=worlds.temperature, timeout_s=longest, context=context)
        async with renewing(context, aim.certificate, aim.key), workshop_behind(config, gateway) as shop:
            outcomes = FarOutcomes(gateway)
            patience = RetryPolicy(pause_s=worlds.retry_pause_s, longest_s=worlds.retry_pause_s)
            end = await retry(outcomes.end, patience, on=Unavailable, failed=lambda error: waiting(str(error)))
            after = _read_upto(events)
            if after is not None and after > end:
                events, after = _give_up(journal, events, open_groups(events)), None
            if after is None:
                after = end
                events.append({"kind": "linked", "n": -1, "after": after})
                journal.append(events[-1], sync=True)
            spent = SpentGroups(outcomes, after=after)
            flat_count = config.reward.flat_groups == "train"
            yield Rollouts(tasks, shop, journal, events, spent, worlds, tell, keep, flat_count=flat_count)


def open_workshop(
    config: Config, place: Home, url: str, tasks: Taskset, slot: str = Arm.WORLD.value
) -> AbstractAsyncContextManager[Workshop]:
    """Open a workshop for a taskset's tasks, with the weights in a slot of the gateway at `url`. Raises BadConfig."""
    return workshop_behind(config, world_gateway(config, place, url, tasks, slot))


def world_gateway(config: Config, place: Home, url: str, tasks: Taskset, slot: str = Arm.WORLD.value) -> WorldGateway:
    """Return a client of one slot of the gateway at `url`, with a timeout for the slowest task. Raises BadConfig."""
    longest = max(task.timeout_s for task in tasks.tasks)
    temperature = config.worlds.temperature
    return WorldGateway(url, operator_key(config, place), temperature=temperature, timeout_s=longest, slot=slot)


@contextlib.asynccontextmanager
async def workshop_behind(
    config: Config,
    gateway: WorldGateway,
    *,
    grading: AbstractAsyncContextManager[tuple[Backend | None, Grader]] | None = None,
) -> AsyncGenerator[Workshop]:
    """Open a workshop whose models are behind `gateway`, which it opens and closes. `grading`: `open_grading`'s by default."""
    async with contextlib.AsyncExitStack() as leaving:
        await leaving.enter_async_context(gateway)
        boxes, grader = await leaving.enter_async_context(grading or open_grading(config))
        yield Workshop(harnesses=open_harnesses(config), backend=boxes, grader=grader, gateway=gateway)


@contextlib.asynccontextmanager
async def open_door(run: Run, url: str, listener: socket.socket) -> AsyncGenerator[None]:
    """Open the door for workers on other machines, in front of the gateway at `url`. Raises BadConfig."""
    config = run.config.worlds.door
    context = door_context(config.certificate, config.key, config.authority)
    async with WorldGateway(url, run.home.admin_key(), temperature=run.config.worlds.temperature) as gateway:
        door = Door(gateway, OwnTurns(run.log), listener, context, config)
        async with renewing(context, config.certificate, config.key), door:
            yield


async def _reconciled(log: RowLog, journal: EventFile, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the journal's events without groups whose turns the log lacks because an older backup was restored. Raises Unavailable."""
    turns = {number: group.turns for number, group in open_groups(events).items()}
    lost = [number for number, each in turns.items() if each and not await log.places(Turn, [(turn,) for turn in each])]
    if lost or (_read_upto(events) or 0) > await log.append():
        return _give_up(journal, events, lost)
    return events


def _give_up(journal: EventFile, events: list[dict[str, Any]], lost: Collection[int]) -> list[dict[str, Any]]:
    logger.warning(
        "the log was restored to an earlier state than the journal of rollouts: %d open groups are given up", len(lost)
    )
    events = set_back(events, lost)
    journal.rewrite(events)
    return events


def _read_upto(events: Sequence[Mapping[str, Any]]) -> int | None:
    return max((int(event["after"]) for event in events if "after" in event), default=None)


def warn_of_staleness(config: Config, tasks: Taskset) -> None:
    """Warn if long answers may make a step hold fewer groups than configured, or if slow groups may be held back as too stale, so that only
    fast ones are learned from.
    """
    pace, bound, most = config.worlds, config.reward.world_staleness, config.reward.batch_tokens
    longest = max(task.turns * task.tokens for task in tasks.tasks if task.split is Split.TRAIN)
    members = pace.group + pace.suspects * pace.suspect_tries
    fit = min(pace.groups, max(1, most // (members * longest)))
    if fit < pace.groups:
        logger.warning(
            "a group of %d rollouts may have %d tokens in answers alone, so that a step may hold %d of worlds.groups = %d, or hold a group "
            "back as too_long; raise reward.batch_tokens (%d), or lower worlds.group or the tasks' turns and tokens",
            *(members, members * longest, fit, pace.groups, most),
        )
    behind = most_steps_behind(per_step=fit, lead=-(-pace.lead * pace.groups // fit), window=pace.window)
    if behind > bound:
        logger.warning(
            "a group may fall %d steps behind (worlds.lead %d, worlds.window %d), and reward.world_staleness is %d: groups that take long "
            "may be held back; lower the first two or raise the last",
            *(behind, pace.lead, pace.window, bound),
        )


# ---------------------------------------------------------------- building


def open_build_place(out: Path, cache: Path) -> BuildPlace:
    """Return a build place with sandboxes on this machine. Layers lie beside the taskset file, so that both can be moved together."""
    return BuildPlace(
        backend=Boxes(gives_way=False),
        python=python_inside(),
        workdir="/work",
        layers=out.with_name(f"{out.stem}.layers"),
        cache=cache,
    )


# ---------------------------------------------------------------- notices


NARROWED = "worlds:best_of_k"
"""The name of the alarm that is raised while the newest measured checkpoint has a higher pass@1 and a lower best of k than the first."""


async def note_cheats(log: Log, watch: CheatWatch) -> None:
    """Write the watch's finding into the log, unless it is already there. Raises StorageFull."""
    if watch.raised is not None:
        await note(log, CHEATED, raised=watch.raised, why=watch.why, at=wall_clock())


async def note_coverage(log: Log, records: Iterable[Finished], k: int) -> None:
    """Write into the log whether the newest measured checkpoint has, significantly, a higher pass@1 and a lower best of k than the first.

    Idempotent. Writes nothing until two checkpoints have tried ten held-out tasks k times each. All records must be of one taskset.
    """
    attempts = [
        ScoredAttempt(task=each.task, family=each.family, policy=each.policy, value=each.value)
        for each in records
        if each.split is Split.HELD_OUT
        and each.value is not None
        and each.policy is not None
        and each.policy == each.policy_last
    ]
    rows = covered(attempts, k)
    if k < 2 or not any(row.change is not None for row in rows):
        return
    lost = lost_coverage(rows)
    if lost is None:
        newest = next(row for row in reversed(rows) if row.rates is not None)
        why = f"{newest.policy} does not solve less at the best of {k} while it solves more at the first try"
    else:
        why = f"{lost.policy}: pass@1 rose and the best of {k} fell; what it gave up does not come back by training on"
    await note(log, NARROWED, raised=lost is not None, why=why, at=wall_clock())


# ---------------------------------------------------------------- the demo of worlds


def function_tasks() -> Taskset:
    """Return the functions that the demo's users ask for, as training tasks, and those of the held-out families, as held-out tasks.

    They are asked for as in the demo: the answer continues the function's head, and hidden tests grade it.
    Example: ``save(function_tasks(), Path("functions.jsonl"))``
    """
    taught, held = split(load_blanks())
    tasks = [_task(blank, Split.TRAIN) for blank in taught] + [_task(blank, Split.HELD_OUT) for blank in held]
    return taskset_of("functions", tasks)


def _task(blank: Blank, part: Split) -> Task:
    return Task(
        id=blank.id,
        family=blank.family,
        messages=tuple(Message(role=Role(each["role"]), text=each["content"]) for each in messages(blank)),
        grading=Grading(grader="python_tests", data={"head": blank.head, "tests": blank.tests}, timeout_s=4.0),
        split=part,
        tokens=MAX_TOKENS,
        stop=STOP,
        timeout_s=120.0,
    )
