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
    """The deadline of an answer passed before its first token, so no turn was captured."""

    code = "out_of_time"


class Ended(StrEnum):
    """Why a rollout ended. `FAILED`: for a reason outside the policy, so it must not be trained on."""

    SUBMITTED = "submitted"  # the model said that it is done
    TURNS = "turns"  # all turns were used
    LENGTH = "length"  # the context or a token budget was used up
    TIMEOUT = "timeout"
    BROKEN = "broken"  # its programs exhausted the sandbox's resources, and the sandbox had to be stopped
    FAILED = "failed"


class RolloutOver(Exception):
    """Raised inside a harness to end the rollout. `why` is an explanation for people."""

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
    """The model of one episode, called through the gateway, which captures every call as a turn of the episode."""

    @property
    def draw(self) -> float | None:
        """A pseudo-random number in [0, 1) derived from the episode's id, for settings that vary between training rollouts. None: the
        episode is only measured.
        """
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
        """Return the assistant's next message, or the part of it that was sampled within `left_s` seconds (None: no limit).

        If `purpose` is not the task itself, the model may not call `tools`.

        Raises BadRequest if the prompt exceeds the context, Unavailable, and its subclass OutOfTime.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One attempt at a task.

    `effort` counts tokens (separately those of answers with calls, of answers without, and of tool outputs; reasoning counts as part of its
    answer), calls, errors, turns and seconds. Third-party agents add `windows`, one more than their summaries. Harnesses with memory add
    summaries, their tokens and the refused attempts at them.

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
    """Return the explanation for a rollout that ran out of time."""
    return f"after {task.timeout_s:g} s"


async def worked(sandbox: Sandbox, work: Awaitable[tuple[Ended, str]]) -> tuple[Ended, str, tuple[Change, ...]]:
    """Await `work`. Return how it ended, an explanation for people, and the changed files (none if the sandbox broke). Raises
    Unavailable.
    """
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
        """A hash of everything that determines what the model sees: prompts, tools, limits, version. It is recorded with every turn."""
        ...

    def spec(self, task: Task) -> SandboxSpec | None:
        """Return the sandbox that a task needs, or None if it needs none."""
        ...

    async def run(self, task: Task, model: Model, sandbox: Sandbox | None) -> Rollout:
        """Run the task until the model is done or has used up a budget. The model's mistakes are part of the rollout and never raised.

        Raises Unavailable if the gateway or the sandbox fails, OutOfTime if the time ran out before the model's first token.
        """
        ...


# ---------------------------------------------------------------- the hash of a harness


def harness_hash(name: str, version: int, **shown: Any) -> str:
    """Return 16 hex digits of the BLAKE3 hash of a harness's name, its version and what it shows to the model: prompts, tools, limits (as
    JSON with sorted keys).

    Every code change that alters what a model sees must increment `version`.
    """
    text = json.dumps({"name": name, "version": version, "shown": shown}, sort_keys=True, separators=(",", ":"))
    return blake3(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
