"""LLM-as-a-judge: a model that judges outcomes in addition to the verifier, or alone, one axis of a rubric at a time.

If it fails, times out or gives an invalid answer, only the judgement on that axis is missing: a missing grade is not a grade of 0.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from ostinato.core.errors import BadConfig, Unavailable
from ostinato.core.sandbox import ChangeKind
from ostinato.worlds.grading.grade import Grade, Grader, last_answer
from ostinato.worlds.grading.rubrics import PROMPT, Axis, RubricConfig, messages_about, mixed, option_in, schema_of
from ostinato.worlds.harness.rollout import Rollout
from ostinato.worlds.tasks.task import Task

_PARSE_ERRORS = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
"""What parsing a response may raise if it does not have OpenAI's shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisWord:
    """The judgement on one axis. `option` is None if there was no valid answer, or a different one in each order; `why` says which.

    Example: ``AxisWord(axis="clarity", option="clear", why="", tokens=812, seconds=1.4)``
    """

    axis: str
    option: str | None
    why: str
    tokens: int
    seconds: float


class RubricJudge:
    """Client of the judge model. An async context manager. `key` is the model's API key; empty: none."""

    def __init__(self, config: RubricConfig, key: str = "") -> None:
        self.config = config
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> RubricJudge:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self.config.timeout_s), headers=self._headers
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def words(self, material: Mapping[str, str]) -> list[AxisWord]:
        """Return the judgement on each axis. Failures of the model or its endpoint are never raised."""
        return list(await asyncio.gather(*(self._word(axis, material) for axis in self.config.axes)))

    async def _word(self, axis: Axis, material: Mapping[str, str]) -> AxisWord:
        began, tokens = time.monotonic(), 0
        options: list[str | None] = []
        why = ""
        for backwards in (False, True):
            try:
                answer, used = await self._ask(axis, material, backwards=backwards)
            except (aiohttp.ClientError, TimeoutError, *_PARSE_ERRORS) as error:
                why = f"failed: {type(error).__name__}"
                break
            tokens += used
            options.append(option_in(axis, answer))
            if options[-1] is None:
                why = "no option"
                break
        if not why and options[0] != options[1]:
            why = "changed with the order"
        option = None if why else options[0]
        return AxisWord(axis=axis.name, option=option, why=why, tokens=tokens, seconds=time.monotonic() - began)

    async def _ask(self, axis: Axis, material: Mapping[str, str], *, backwards: bool) -> tuple[str, int]:
        if self._session is None:
            raise ValueError("enter the judge's context first")
        form: dict[str, Any] = {"name": "option", "schema": schema_of(axis), "strict": True}
        body = {
            "model": self.config.model,
            "messages": messages_about(axis, material, backwards=backwards),
            "temperature": 0.0,
            "max_tokens": self.config.max_tokens,
            "response_format": {"type": "json_schema", "json_schema": form},
        }
        async with self._session.post(
            f"{self.config.url}/chat/completions", json=body, raise_for_status=True
        ) as response:
            answer = json.loads(await response.text())
        return str(answer["choices"][0]["message"]["content"]), int((answer.get("usage") or {}).get("total_tokens", 0))


class JudgedGrader:
    """Implements `Grader`: the weighted mean of a verifier's value and the values of a judge's axes.

    An axis without a judgement is left out together with its weight. `Grade.parts` holds each axis's value, and `judge_tokens`,
    `judge_seconds` and `judge_silent` (the number of axes without a judgement).
    """

    def __init__(self, verifier: Grader, judge: RubricJudge) -> None:
        self._verifier = verifier
        self._judge = judge

    async def grade(self, task: Task, rollout: Rollout) -> Grade:
        grade = await self._verifier.grade(task, rollout)
        config = self._judge.config
        if grade.cheated or (config.only_solved and not grade.solved):
            return grade
        words = await self._judge.words(shown_of(task, rollout))
        weighted: list[tuple[float, float | None]] = [(config.verifier, grade.value)]
        parts = {**grade.parts, "verifier": grade.value}
        for axis, word in zip(config.axes, words, strict=True):
            value = axis.options[word.option] if word.option is not None else None
            weighted.append((axis.weight, value))
            if value is not None:
                parts[axis.name] = value
        parts |= {
            "judge_tokens": float(sum(word.tokens for word in words)),
            "judge_seconds": sum(word.seconds for word in words),
            "judge_silent": float(sum(word.option is None for word in words)),
        }
        silent = "".join(f", no word on {word.axis} ({word.why})" for word in words if word.option is None)
        why = f"{grade.why}; judged by {config.model}, {PROMPT}{silent}"
        return replace(grade, value=mixed(weighted), parts=parts, why=why, verified=grade.value)


class RubricGrader:
    """Implements `Grader`: the weighted mean of a judge's axes alone, for answers that no program can verify. `judge` None: not
    configured.
    """

    def __init__(self, judge: RubricJudge | None) -> None:
        self._judge = judge

    async def grade(self, task: Task, rollout: Rollout) -> Grade:
        if self._judge is None:
            raise BadConfig(
                f"task {task.id!r}: the grader 'rubric' asks the model of [worlds.judge], which is not set; set it, or name another grader"
            )
        axes = self._judge.config.axes
        words = await self._judge.words(shown_of(task, rollout))
        parts = {axis.name: axis.options[w.option] for axis, w in zip(axes, words, strict=True) if w.option is not None}
        if not parts:
            raise Unavailable(f"task {task.id!r}: the judge gave no answer ({words[0].why}); look at worlds.judge")
        value = mixed([(axis.weight, parts.get(axis.name)) for axis in axes])
        return Grade(value=value, parts=parts, why=f"judged by {self._judge.config.model}, {PROMPT}")


def shown_of(task: Task, rollout: Rollout) -> dict[str, str]:
    """Return the material that a judge sees: the task's messages, the written files, and the last message."""
    written = (change for change in rollout.changes if change.kind is ChangeKind.WRITTEN)
    return {
        "asked": "\n".join(message.text for message in task.messages),
        "written": "\n".join(f"{change.path}:\n{change.data.decode('utf-8', 'replace')}" for change in written),
        "said": last_answer(rollout),
    }
