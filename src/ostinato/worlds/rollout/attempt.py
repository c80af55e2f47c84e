"""One attempt at a task: harness, sandbox and model, then the grader. Retries, in bounds, while a service is unavailable.

Tasks are also tried only to measure: each a given number of times, with nothing learned. Their turns are reported as measured.
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
_MOST_BYTES, _MOST_WORDS = 1 << 20, 2_000
_T = TypeVar("_T")

Given = tuple[tuple[Message, ...], ModelAnswer]
"""An answer of the model, behind the messages before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workshop:
    """What is needed to work on tasks: harnesses by name, the backend of their sandboxes (None: no harness needs one), grader, gateway.

    Example: ``Workshop(harnesses={"single": SingleAnswer()}, backend=None, grader=grader, gateway=gateway)``
    """

    harnesses: Mapping[str, Harness]
    backend: Backend | None
    grader: Grader
    gateway: WorldGateway

    async def work(self, task: Task, model: Model) -> Rollout:
        """One rollout, in a sandbox if its harness needs one. Raises Unavailable."""
        harness = self.harnesses[task.harness]
        if self.backend is None or (spec := harness.spec(task)) is None:
            return await harness.run(task, model, None)
        sandbox = await self.backend.start(spec)
        try:
            return await harness.run(task, model, sandbox)
        finally:
            await sandbox.stop()

    async def grade(self, task: Task, rollout: Rollout) -> Grade:
        """A rollout's grade: 0 if it ran out of time or broke its sandbox, whatever it left behind; otherwise the grader's.

        Such a rollout stays in its group: overlong rollouts are not masked (Composer 2, arXiv:2603.24477). Raises as `Grader.grade`.
        """
        if rollout.ended is Ended.TIMEOUT:
            return Grade(value=0.0, why=f"its time was over {rollout.detail.get('why', '')}".strip())
        if rollout.ended is Ended.BROKEN:
            return Grade(value=0.0, why=f"it broke its sandbox: {rollout.detail.get('why', '')}")
        return await self.grader.grade(task, rollout)


class Unrepeatable(Exception):
    """A rollout's beginning went another way when it was repeated."""


@dataclass(slots=True)
class RecordedModel:
    """A model whose answers are kept in `given`, each with the messages before it, and which first repeats those of an earlier rollout, all
    but the last one of `known`. Raises Unrepeatable if it is asked behind other messages than these were, the last one included.

    Example: ``RecordedModel(model, earlier.given[:6])``, which samples from the sixth answer on
    """

    model: EpisodeModel
    known: Sequence[Given] = ()
    given: list[Given] = field(default_factory=list[Given])

    @property
    def draw(self) -> float | None:
        """The model's."""
        return self.model.draw

    @property
    def policies(self) -> Collection[PolicyVersion]:
        """Those of the answers that were sampled."""
        return self.model.policies

    async def ask(self, messages: Sequence[Message], tools: Sequence[Tool] = (), **how: Any) -> ModelAnswer:
        """The next message of the assistant. Raises Unrepeatable; else as `Model`."""
        place = len(self.given)
        answer = None
        if place < len(self.known):
            before, answer = self.known[place]
            if before != tuple(messages):
                raise Unrepeatable(f"the conversation before answer {place} is another one")
        if answer is None or place == len(self.known) - 1:
            answer = await self.model.ask(messages, tools, **how)
        self.given.append((tuple(messages), answer))
        return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRollout:
    """One rollout that has ended. `grade` None: something other than the policy ended it, and it was not graded. `given`: the model's
    answers with the messages before each, if they were recorded.

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
        """The turns that were captured."""
        return self.rollout.turns

    @property
    def value(self) -> float | None:
        """The value of its grade, 0 if it cheated; None if it was not graded."""
        return None if self.grade is None else 0.0 if self.grade.cheated else self.grade.value

    @property
    def solved(self) -> bool:
        """True if it was graded and solved the task."""
        return self.grade is not None and self.grade.solved

    @property
    def cheated(self) -> bool:
        """True if its outcome was faked, or it tried to fake it."""
        return self.grade is not None and bool(self.grade.cheated)

    @property
    def why(self) -> str:
        """How it ended, for people."""
        return str(self.rollout.detail.get("why", self.rollout.ended)) if self.grade is None else self.rollout.ended

    def record(self, tasks: Taskset, clock: Clock, *, group: str | None = None, member: int | None = None) -> Finished:
        """The record to keep of it. Reads the task's own files at the changed paths."""
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
            why=(self.why if self.grade is None else grade.why)[:_MOST_WORDS],
            ended=rollout.ended,
            parts=_finite(grade.parts),
            cheated=tuple(each[:_MOST_WORDS] for each in grade.cheated),
            effort=_finite(rollout.effort),
            changes=shown_changes(rollout.changes, lambda path: original_of(task.spec, path)),
        )


class RolloutAttempts:
    """Tries tasks.

    What is unavailable is retried after `pause_s` seconds, then twice as many, and so on, for `patience_s`. A rollout that is lost in its
    middle `tries` times, say because the model's programs take its sandbox down, has failed.
    """

    def __init__(self, shop: Workshop, *, pause_s: float, tries: int = 3, patience_s: float = 3600.0) -> None:
        self._shop, self._tries = shop, tries
        self._policy = RetryPolicy(pause_s=pause_s, longest_s=_LONGEST_PAUSE_S, total_s=patience_s, jitter=0.25)
        self._rng = random.Random()

    async def once(self, task: Task, episode: str, group: str | None, *, record: bool = False) -> FinishedRollout:
        """One rollout and its grade. A rollout that a gateway or a sandbox left unfinished by becoming unavailable is torn, and begun anew:
        for `patience_s` while none can begin, `tries` times once the model has spoken. One whose time was over before that has failed.
        With `record`, it can be `continued`, unless its harness is an agent, which asks the model by itself.

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
                    logger.warning("rollout %s is given up, lost in its middle %d times: %s", name, lost, error)
                    rollout = _lost(task, harness.hash, error)
                    break
                logger.info("rollout %s is begun anew: %s", name, error)
                if model.policies:  # a gateway that answers is available
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
        """As `once`, of which nothing is learned: the log says so of its turns."""
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
        """A recorded rollout sampled anew from its turn `at`, with its grade: its answers before that are repeated in a new sandbox, to the
        last character of what their calls return, and only the turns from there on are its own. None if that went another way, or something
        other than the policy ended it: nobody tries again.

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
        """How much each turn of a rollout changed the probability of its task's known answer: the slot's weights are asked before its first
        turn and after each, what its calls returned included. () if there is no such answer, the context is too small for one of the
        questions, or the conversation is not the rollout's turns one after the other, as with summaries and agents of others.

        Raises Unavailable, Corrupt.
        """
        asked, messages = tried.task.known, tried.rollout.messages
        given = sum(message.role is Role.ASSISTANT for message in tried.task.messages)
        answers = [at for at, message in enumerate(messages) if message.role is Role.ASSISTANT][given:]
        summed = any(tried.rollout.effort.get(name) for name in ("summaries", "refused"))
        if asked is None or tried.grade is None or summed or len(answers) != len(tried.turns):
            return ()
        try:
            read = [
                await self.patiently(lambda at=at, asked=asked: self._shop.gateway.belief(messages[:at], asked))
                for at in (*answers, len(messages))
            ]
        except BadRequest as error:
            logger.info("rollout %s: what it believed is not known: %s", tried.episode, error)
            return ()
        return tuple(after - before for before, after in pairwise(read))

    async def patiently(self, ask: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Retry for `patience_s` while Unavailable is raised. Raises errors that no retry would change, and Unavailable."""
        backoff = self._backoff()
        while True:
            try:
                return await ask()
            except Unavailable as error:
                logger.info("tried again: %s", error)
                await self._pause(backoff, error)

    def _backoff(self) -> Backoff:
        return Backoff(self._policy, rng=self._rng, clock=asyncio.get_running_loop().time)

    async def _pause(self, backoff: Backoff, error: Unavailable) -> None:
        """Pause after a failure. Raises Unavailable once there have been failures for too long."""
        pause = backoff.failed(error)
        if pause is None:
            raise Unavailable(f"given up after {self._policy.total_s:g} s (worlds.patience_s): {error}") from error
        await asyncio.sleep(pause)


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    return {str(name): float(value) for name, value in values.items() if math.isfinite(value)}


def _lost(task: Task, harness: str, error: Unavailable) -> Rollout:
    said = (
        f"the model did not speak in time: {error}" if isinstance(error, OutOfTime) else f"lost in its middle: {error}"
    )
    return Rollout(
        task=task.id,
        harness=f"{task.harness}@{harness}",
        ended=Ended.FAILED,
        messages=task.messages,
        turns=(),  # no verdict names them: they are torn when the group is closed
        detail={"why": said[:500]},
    )


def original_of(spec: SandboxSpec, path: str) -> bytes | None:
    """The task's own bytes at a path below `workdir`; None if there is no file, or a layer's is not a plain file of at most 1 MiB."""
    if path in spec.files:
        return spec.files[path]
    for layer in reversed(spec.layers):
        top = Path(layer).resolve()
        try:
            found = (top / path).resolve()
            if found.is_relative_to(top) and found.is_file():
                return found.read_bytes() if found.stat().st_size <= _MOST_BYTES else None
        except (OSError, ValueError, RuntimeError):  # a circular link, or an invalid name
            return None
    return None


# ---------------------------------------------------------------- evaluation of tasks


class Measurement:
    """Tries each of some tasks `tries` times, `concurrency` rollouts at once.

    `token` is the prefix of the episodes' names. A rollout that something other than the policy ends is tried `again` times at most. The
    others are `pause_s` and `patience_s` of `RolloutAttempts`.
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
        self._places = asyncio.Semaphore(concurrency)
        self._attempts = RolloutAttempts(shop, pause_s=pause_s, patience_s=patience_s)

    async def results(self) -> AsyncGenerator[FinishedRollout]:
        """Each rollout as it ends; all tasks are begun once before any of them twice.

        Raises errors that no retry would change: BadConfig, BadRequest. Closing it early cancels the rollouts in progress.
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
        async with self._places:
            number = 0
            while True:
                tried = await self._attempts.measure(task, episode if not number else f"{episode}.again{number}")
                number += 1
                if tried.value is not None or number >= self._again:
                    return tried
