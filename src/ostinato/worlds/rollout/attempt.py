"""One attempt at a task: harness, sandbox and model, then the grader, with bounded retries while a service is unavailable.

Evaluation runs tasks a given number of times without training on them; their turns are reported as measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from ostinato.core.conversation import Message, Role, Tool
from ostinato.core.errors import BadRequest, Unavailable
from ostinato.core.records import PolicyVersion
from ostinato.core.retry import Backoff, RetryPolicy
from ostinato.core.sandbox import SandboxSpec
from ostinato.core.seams import Backend, Clock
from ostinato.core.verdicts import continuation_name
from ostinato.worlds.grading.grade import Grade, Grader
from ostinato.worlds.harness.agent import CodingAgent
from ostinato.worlds.harness.gateway import EpisodeModel, WorldGateway
from ostinato.worlds.harness.rollout import Ended, Harness, Model, ModelAnswer, OutOfTime, Rollout
from ostinato.worlds.rollout.finished import Finished, shown_changes
from ostinato.worlds.rollout.groups import measured
from ostinato.worlds.tasks.task import Task, Taskset

logger = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 30.0
_MOST_BYTES, _MOST_CHARS = 1 << 20, 2_000  # of an original file; of an explanation
_T = TypeVar("_T")

Given = tuple[tuple[Message, ...], ModelAnswer]
"""The messages of a model call, and the model's answer to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workshop:
    """Everything needed to run tasks: harnesses by name, the sandbox backend (None: no harness needs one), grader and gateway.

    Example: ``Workshop(harnesses={"single": SingleAnswer()}, backend=None, grader=grader, gateway=gateway)``
    """

    harnesses: Mapping[str, Harness]
    backend: Backend | None
    grader: Grader
    gateway: WorldGateway

    async def work(self, task: Task, model: Model) -> Rollout:
        """Run one rollout, in a sandbox if its harness needs one. Raises Unavailable."""
        harness = self.harnesses[task.harness]
        if self.backend is None or (spec := harness.spec(task)) is None:
            return await harness.run(task, model, None)
        sandbox = await self.backend.start(spec)
        try:
            return await harness.run(task, model, sandbox)
        finally:
            await sandbox.stop()

    async def grade(self, task: Task, rollout: Rollout) -> Grade:
        """Grade a rollout: 0 if it ran out of time or broke its sandbox, whatever it left behind; otherwise the grader's grade.

        A rollout graded 0 for that stays in its group: overlong rollouts are not masked (Composer 2, arXiv:2603.24477). Raises as
        `Grader.grade`.
        """
        if rollout.ended is Ended.TIMEOUT:
            return Grade(value=0.0, why=f"its time was over {rollout.detail.get('why', '')}".strip())
        if rollout.ended is Ended.BROKEN:
            return Grade(value=0.0, why=f"it broke its sandbox: {rollout.detail.get('why', '')}")
        return await self.grader.grade(task, rollout)


class Unrepeatable(Exception):
    """The replay of a recorded rollout diverged from the recording."""


@dataclass(slots=True)
class RecordedModel:
    """A model that records its answers in `given`, each with the messages of its call, and that can first replay an earlier recording.

    It replays all answers of `known` except the last, and samples from there on. Raises Unrepeatable if the messages of a call differ from
    those recorded, the last entry of `known` included.

    Example: ``RecordedModel(model, earlier.given[:6])``, which samples from the sixth answer on
    """

    model: EpisodeModel
    known: Sequence[Given] = ()
    given: list[Given] = field(default_factory=list[Given])

    @property
    def draw(self) -> float | None:
        """The `draw` of the underlying model."""
        return self.model.draw

    @property
    def policies(self) -> Collection[PolicyVersion]:
        """The policy versions of the answers that were sampled, not replayed."""
        return self.model.policies

    async def ask(self, messages: Sequence[Message], tools: Sequence[Tool] = (), **how: Any) -> ModelAnswer:
        """Return the assistant's next message, replayed or sampled. Raises Unrepeatable, and as `Model.ask`."""
        place = len(self.given)
        answer = None
        if place < len(self.known):
            before, answer = self.known[place]
            if before != tuple(messages):
                raise Unrepeatable(f"the conversation before answer {place} differs from the recorded one")
        if answer is None or place == len(self.known) - 1:
            answer = await self.model.ask(messages, tools, **how)
        self.given.append((tuple(messages), answer))
        return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRollout:
    """One rollout that has ended. `grade`: None if it was not graded because it ended for a reason outside the policy. `given`: the model's
    answers with the messages of each call, if they were recorded.

    Example: ``FinishedRollout(task=task, episode="w3f.0.2.0", rollout=rollout, grade=Grade(value=1.0), policies=(v7,))``
    """

    task: Task
    episode: str
    rollout: Rollout
    grade: Grade | None
    policies: tuple[PolicyVersion, ...] = ()
    given: Sequence[Given] = ()

    @property
    def turns(self) -> tuple[str, ...]:
        """The ids of the captured turns."""
        return self.rollout.turns

    @property
    def value(self) -> float | None:
        """The value of the grade, 0 if the rollout cheated, None if it was not graded."""
        return None if self.grade is None else 0.0 if self.grade.cheated else self.grade.value

    @property
    def solved(self) -> bool:
        """True if it was graded and solved the task."""
        return self.grade is not None and self.grade.solved

    @property
    def cheated(self) -> bool:
        """True if the rollout faked its outcome, or tried to."""
        return self.grade is not None and bool(self.grade.cheated)

    @property
    def why(self) -> str:
        """How the rollout ended, for people."""
        return str(self.rollout.detail.get("why", self.rollout.ended)) if self.grade is None else self.rollout.ended

    def record(self, tasks: Taskset, clock: Clock, *, group: str | None = None, member: int | None = None) -> Finished:
        """Return the record to keep of this rollout. Reads the task's original files at the changed paths, for the diffs."""
        task, rollout, grade = self.task, self.rollout, self.grade or Grade(value=0.0)
        return Finished(
            at=clock(),
            taskset=tasks.hash,
            task=task.id,
            family=task.family,
            split=task.split,
            harness=rollout.harness,
            group=group,
            member=member,
            episode=self.episode,
            turns=self.turns,
            policy=min(self.policies, default=None),
            policy_last=max(self.policies, default=None),
            value=self.value,
            solved=self.solved,
            why=(self.why if self.grade is None else grade.why)[:_MOST_CHARS],
            ended=rollout.ended,
            parts=_finite(grade.parts),
            cheated=tuple(each[:_MOST_CHARS] for each in grade.cheated),
            effort=_finite(rollout.effort),
            changes=shown_changes(rollout.changes, lambda path: original_of(task.spec, path)),
        )


class RolloutAttempts:
    """Runs and grades rollouts of tasks, with retries.

    An unavailable service is retried with exponential back-off from `pause_s` seconds on, for `patience_s` seconds. A rollout that is lost
    midway `tries` times, for example because the model's programs take its sandbox down, has failed.
    """

    def __init__(self, shop: Workshop, *, pause_s: float, tries: int = 3, patience_s: float = 3600.0) -> None:
        self._shop, self._tries = shop, tries
        self._policy = RetryPolicy(pause_s=pause_s, longest_s=_LONGEST_PAUSE_S, total_s=patience_s, jitter=0.25)
        self._rng = random.Random()

    async def once(self, task: Task, episode: str, group: str | None, *, record: bool = False) -> FinishedRollout:
        """Run one rollout, and grade it.

        If the gateway or the sandbox becomes unavailable midway, the rollout is torn and started again: for up to `patience_s` while no
        model call succeeds, at most `tries` times after one has. A rollout whose time ran out before the first token has failed. With
        `record`, it can be `continued`, unless its harness is a third-party agent, which calls the model by itself.

        Raises errors that no retry would change (BadConfig, BadRequest), and Unavailable.
        """
        harness = self._shop.harnesses[task.harness]
        record = record and not isinstance(harness, CodingAgent)
        backoff, number, lost = self._backoff(), 0, 0
        while True:
            name = episode if number == 0 else f"{episode}.{number}"
            model = self._model(task, name, group)
            model = RecordedModel(model) if record else model
            try:
                rollout = await self._shop.work(task, model)
                break
            except Unavailable as error:
                lost += bool(model.policies)
                if isinstance(error, OutOfTime) or lost >= self._tries:
                    logger.warning("rollout %s is given up, lost midway %d times: %s", name, lost, error)
                    rollout = _lost(task, harness.hash, error)
                    break
                logger.info("rollout %s is started again: %s", name, error)
                if model.policies:  # the gateway has answered meanwhile
                    backoff = self._backoff()
                await self._pause(backoff, error)
            number += 1
        grade = None
        if rollout.ended is not Ended.FAILED and rollout.turns:
            grade = await self.patiently(lambda: self._shop.grade(task, rollout))
        given = model.given if isinstance(model, RecordedModel) else ()
        policies = tuple(sorted(model.policies))
        return FinishedRollout(task=task, episode=name, rollout=rollout, grade=grade, policies=policies, given=given)

    async def measure(self, task: Task, episode: str) -> FinishedRollout:
        """Run and grade a rollout as `once`, and report its turns as measured, so that they are not trained on."""
        tried = await self.once(task, episode, None)
        if events := measured(tried.turns):
            await self.patiently(lambda: self._shop.gateway.say(events))
        return tried

    def _model(self, task: Task, name: str, group: str | None) -> EpisodeModel:
        harness = self._shop.harnesses[task.harness].hash
        return self._shop.gateway.model(
            name, group=group, harness=harness, temperature=task.temperature, top_p=task.top_p
        )

    async def continued(self, tried: FinishedRollout, group: str, at: int, number: int) -> FinishedRollout | None:
        """Resample a recorded rollout from turn `at` on, and grade the result.

        The answers before `at` are replayed in a new sandbox, where their calls must return exactly the same text. Only the turns from `at`
        on belong to the result. Returns None, without a retry, if the replay diverges or the rollout ends for a reason outside the policy.

        Raises errors that no retry would change, and Unavailable of a grader.
        """
        name, task = continuation_name(tried.episode, at, number), tried.task
        model = RecordedModel(self._model(task, name, group), known=tried.given[: at + 1])
        try:
            rollout = await self._shop.work(task, model)
        except (Unrepeatable, Unavailable) as error:
            logger.info("rollout %s is given up: %s", name, error)
            return None
        rollout = replace(rollout, turns=rollout.turns[at:])
        if rollout.ended is Ended.FAILED or not rollout.turns:
            return None
        grade = await self.patiently(lambda: self._shop.grade(task, rollout))
        return FinishedRollout(
            task=task, episode=name, rollout=rollout, grade=grade, policies=tuple(sorted(model.policies))
        )

    async def belief_changes(self, tried: FinishedRollout) -> tuple[float, ...]:
        """Return the change of the belief in the task's known answer at each turn of a rollout.

        The belief is measured (`WorldGateway.belief`) before the first turn and after each turn with its tool results. Returns () if the
        task has no known answer, a question exceeds the context, or the turns do not follow one another in one conversation, as with
        summaries and some third-party agents.

        Raises Unavailable, Corrupt.
        """
        known, messages = tried.task.known, tried.rollout.messages
        prefilled = sum(message.role is Role.ASSISTANT for message in tried.task.messages)
        answers = [at for at, message in enumerate(messages) if message.role is Role.ASSISTANT][prefilled:]
        summarised = any(tried.rollout.effort.get(name) for name in ("summaries", "refused"))
        if known is None or tried.grade is None or summarised or len(answers) != len(tried.turns):
            return ()
        try:
            beliefs = [
                await self.patiently(lambda at=at, known=known: self._shop.gateway.belief(messages[:at], known))
                for at in (*answers, len(messages))
            ]
        except BadRequest as error:
            logger.info("rollout %s: its beliefs could not be measured: %s", tried.episode, error)
            return ()
        return tuple(after - before for before, after in pairwise(beliefs))

    async def patiently(self, ask: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Call `ask`, with retries for `patience_s` while it raises Unavailable. Raises all other errors, and Unavailable after that
        time.
        """
        backoff = self._backoff()
        while True:
            try:
                return await ask()
            except Unavailable as error:
                logger.info("retried: %s", error)
                await self._pause(backoff, error)

    def _backoff(self) -> Backoff:
        return Backoff(self._policy, rng=self._rng, clock=asyncio.get_running_loop().time)

    async def _pause(self, backoff: Backoff, error: Unavailable) -> None:
        """Back off after a failure. Raises Unavailable once failures have lasted for too long."""
        pause = backoff.failed(error)
        if pause is None:
            raise Unavailable(f"given up after {self._policy.total_s:g} s (worlds.patience_s): {error}") from error
        await asyncio.sleep(pause)


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    return {str(name): float(value) for name, value in values.items() if math.isfinite(value)}


def _lost(task: Task, harness: str, error: Unavailable) -> Rollout:
    why = f"the model gave no answer in time: {error}" if isinstance(error, OutOfTime) else f"lost midway: {error}"
    return Rollout(
        task=task.id,
        harness=f"{task.harness}@{harness}",
        ended=Ended.FAILED,
        messages=task.messages,
        turns=(),  # without a verdict, they count as torn when the group is closed
        detail={"why": why[:500]},
    )


def original_of(spec: SandboxSpec, path: str) -> bytes | None:
    """Return the bytes of the task's own file at a path below `workdir`, or None if there is none, or if a layer's file is no plain file or
    larger than 1 MiB.
    """
    if path in spec.files:
        return spec.files[path]
    for layer in reversed(spec.layers):
        top = Path(layer).resolve()
        try:
            file = (top / path).resolve()
            if file.is_relative_to(top) and file.is_file():
                return file.read_bytes() if file.stat().st_size <= _MOST_BYTES else None
        except (OSError, ValueError, RuntimeError):  # a circular link, or an invalid name
            return None
    return None


# ---------------------------------------------------------------- evaluation of tasks


class Measurement:
    """Evaluates tasks: runs each `tries` times, `concurrency` rollouts at once.

    `token` is the prefix of the episodes' names. A rollout that ends for a reason outside the policy is attempted at most `again` times.
    `pause_s` and `patience_s` are as in `RolloutAttempts`.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        shop: Workshop,
        *,
        tries: int,
        concurrency: int,
        token: str,
        again: int,
        pause_s: float,
        patience_s: float = 3600.0,
    ) -> None:
        self._tasks, self._shop, self._tries = tasks, shop, tries
        self._token, self._again = token, again
        self._concurrency = asyncio.Semaphore(concurrency)
        self._attempts = RolloutAttempts(shop, pause_s=pause_s, patience_s=patience_s)

    async def results(self) -> AsyncGenerator[FinishedRollout]:
        """Yield each rollout as it ends. Every task starts once before any task starts a second time.

        Raises errors that no retry would change: BadConfig, BadRequest. Closing the generator early cancels the rollouts in progress.
        """
        work = [
            asyncio.ensure_future(self._one(task, f"{self._token}.{draw}.{place}"))
            for draw in range(self._tries)
            for place, task in enumerate(self._tasks)
        ]
        try:
            for ended in asyncio.as_completed(work):
                yield await ended
        finally:
            for each in work:
                each.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*work, return_exceptions=True)

    async def _one(self, task: Task, episode: str) -> FinishedRollout:
        async with self._concurrency:
            number = 0
            while True:
                tried = await self._attempts.measure(task, episode if not number else f"{episode}.again{number}")
                number += 1
                if tried.value is not None or number >= self._again:
                    return tried
