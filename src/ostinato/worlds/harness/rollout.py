"""What a harness leaves behind: the conversation, the turns that were captured, and what became of the files."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from ostinato.core.conversation import Message, Tool
from ostinato.core.errors import SandboxBroken, Unavailable
from ostinato.core.sandboxing import Change, SandboxSpec
from ostinato.core.seams import Sandbox
from ostinato.worlds.tasks.task import Task

OVERRAN = "deadline"
"""`Answered.finish` of an answer that was cut because the time that it might take was over."""


class OutOfTime(Unavailable):
    """The time that an answer might take was over before a token of it came: there is no turn."""

    code = "out_of_time"


class Ended(StrEnum):
    """Why a rollout ended. `FAILED`: something other than the policy ended it, so that it teaches nothing."""

    SUBMITTED = "submitted"  # the model said that it is done
    TURNS = "turns"  # it was asked as often as it may be
    LENGTH = "length"  # its context or an answer's budget was used up
    TIMEOUT = "timeout"
    BROKEN = "broken"  # its programs took so much that the sandbox had to be ended
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One answer of the model. `turn` is the id under which the gateway captured it; `finish` is as OpenAI says it, or `OVERRAN`.

    Example: ``Answered(turn="chatcmpl-3f:0", message=Message(role=Role.ASSISTANT, text="Done."), ...)``
    """

    turn: str
    message: Message
    finish: str
    prompt_tokens: int
    tokens: int


class Model(Protocol):
    """The model of one episode, behind the gateway: every call is captured as a turn of the episode."""

    async def ask(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        left_s: float | None = None,
    ) -> Answered:
        """The next message of the assistant, or as much of it as was said in the seconds that are left; None: it may take what it takes.

        Raises BadRequest (a prompt beyond the context), Unavailable, and as one of the latter OutOfTime.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One try at a task. `effort` counts what it took: tokens (of answers with calls, of answers without, of what tools answered; reasoning
    counts with its answer), calls, errors, turns, seconds.

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
    """What is said of a rollout that its time ended."""
    return f"after {task.timeout_s:g} s"


async def worked(sandbox: Sandbox, work: Awaitable[tuple[Ended, str]]) -> tuple[Ended, str, tuple[Change, ...]]:
    """How a rollout's work ended, more about that for people, and what it changed: nothing, if it broke its sandbox. Raises Unavailable."""
    try:
        ended, why = await work
        return ended, why, tuple(await sandbox.diff())
    except SandboxBroken as error:
        return Ended.BROKEN, str(error), ()


class Harness(Protocol):
    """Lets a model work on a task."""

    @property
    def name(self) -> str:
        """As tasks name it. Example: "tools"."""
        ...

    @property
    def hash(self) -> str:
        """Of all that decides what the model sees: prompts, tools and their descriptions, limits, version. Goes onto every turn."""
        ...

    def spec(self, task: Task) -> SandboxSpec | None:
        """The sandbox that it works on a task in; None: it needs none."""
        ...

    async def run(self, task: Task, model: Model, sandbox: Sandbox | None) -> Rollout:
        """Work until the model is done or may not go on. What the model does wrong is part of the rollout, never an exception.

        Raises Unavailable where the gateway or the sandbox fails, OutOfTime where the time was over before the model said anything.
        """
        ...
