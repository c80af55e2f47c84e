"""A harness, and the result of its run: the conversation, the captured turns, and the changes to files."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from blake3 import blake3

from ostinato.core.conversation import Message, Tool
from ostinato.core.errors import SandboxBroken, Unavailable
from ostinato.core.records import Purpose
from ostinato.core.sandbox import Change, SandboxSpec
from ostinato.core.seams import Sandbox
from ostinato.worlds.tasks.task import Task

OVERRAN = "deadline"
"""`ModelAnswer.finish` of an answer that was cut at its deadline."""


class OutOfTime(Unavailable):
    """An answer's deadline passed before its first token: there is no turn."""

    code = "out_of_time"


class Ended(StrEnum):
    """Why a rollout ended. `FAILED`: something other than the policy ended it, so that it teaches nothing."""

    SUBMITTED = "submitted"  # the model said that it is done
    TURNS = "turns"  # it has used all its turns
    LENGTH = "length"  # its context or an answer's budget was used up
    TIMEOUT = "timeout"
    BROKEN = "broken"  # its programs used so much that the sandbox had to be stopped
    FAILED = "failed"


class RolloutOver(Exception):
    """Ends a rollout from within: how it ended, and an explanation for people."""

    def __init__(self, ended: Ended, why: str) -> None:
        super().__init__(why)
        self.ended, self.why = ended, why


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAnswer:
    """One answer of the model. `turn` is the id under which the gateway captured it; `finish` is OpenAI's finish reason, or `OVERRAN`.

    Example: ``ModelAnswer(turn="chatcmpl-3f:0", message=Message(role=Role.ASSISTANT, text="Done."), ...)``
    """

    turn: str
    message: Message
    finish: str
    prompt_tokens: int
    tokens: int


class Model(Protocol):
    """The model of one episode, behind the gateway: every call is captured as a turn of the episode."""

    @property
    def draw(self) -> float | None:
        """A number in [0, 1), the same whenever this episode is run again, for what is to vary in training. None: only measured."""
        ...

    async def ask(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        left_s: float | None = None,
        purpose: Purpose = Purpose.TASK,
    ) -> ModelAnswer:
        """The next message of the assistant, or as much of it as was sampled within `left_s` seconds; None: no limit.

        With another `purpose` than the task, `tools` may not be called.

        Raises BadRequest (the prompt exceeds the context), or Unavailable, of which OutOfTime is a kind.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One attempt at a task. `effort` counts tokens (of answers with calls, of answers without, of tool outputs; reasoning counts with its
    answer), calls, errors, turns and seconds; of third-party agents also windows (one more than its summaries); with memory also summaries,
    their tokens and the refused tries at them.

    Example: ``Rollout(task="calc-1", harness="tools@3f2a", ended=Ended.SUBMITTED, messages=(...), turns=("chatcmpl-3f:0",))``
    """

    task: str
    harness: str
    ended: Ended
    messages: tuple[Message, ...]
    turns: tuple[str, ...]
    changes: tuple[Change, ...] = ()
    effort: Mapping[str, float] = field(default_factory=dict[str, float])
    detail: Mapping[str, Any] = field(default_factory=dict[str, Any])


def timed_out(task: Task) -> str:
    """The explanation for a rollout that ran out of time."""
    return f"after {task.timeout_s:g} s"


async def worked(sandbox: Sandbox, work: Awaitable[tuple[Ended, str]]) -> tuple[Ended, str, tuple[Change, ...]]:
    """How a rollout's work ended, an explanation for people, and its changes: none, if it broke its sandbox. Raises Unavailable."""
    try:
        ended, why = await work
        return ended, why, tuple(await sandbox.diff())
    except SandboxBroken as error:
        return Ended.BROKEN, str(error), ()


class Harness(Protocol):
    """Lets a model work on a task."""

    @property
    def name(self) -> str:
        """The name that tasks use. Example: "tools"."""
        ...

    @property
    def hash(self) -> str:
        """A hash of all that decides what the model sees: prompts, tools with descriptions, limits, version. Recorded with every turn."""
        ...

    def spec(self, task: Task) -> SandboxSpec | None:
        """The sandbox that a task needs; None: no sandbox."""
        ...

    async def run(self, task: Task, model: Model, sandbox: Sandbox | None) -> Rollout:
        """Work until the model is done or may not go on. The model's mistakes are part of the rollout, never an exception.

        Raises Unavailable if the gateway or the sandbox fails, OutOfTime if the time ran out before the model said anything.
        """
        ...


# ---------------------------------------------------------------- the hash of a harness


def harness_hash(name: str, version: int, **shown: Any) -> str:
    """16 hex digits of the BLAKE3 of a harness's name, its version and what it shows: prompts, tools, limits (all as JSON, keys sorted).

    `version` must be raised with every code change that changes what a model sees.
    """
    text = json.dumps({"name": name, "version": version, "shown": shown}, sort_keys=True, separators=(",", ":"))
    return blake3(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
