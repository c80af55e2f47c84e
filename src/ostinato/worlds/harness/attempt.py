"""What every harness keeps while a model works: the conversation, the turns, what it took, and the deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from ostinato.core.conversation import Message, Role, Tool
from ostinato.core.errors import BadConfig, BadRequest, TooLarge, Unavailable
from ostinato.core.seams import Sandbox
from ostinato.worlds.harness.rollout import Answered, Ended, Harness, Model, Rollout
from ostinato.worlds.tasks.task import Task

_EFFORT = ("turns", "tokens", "prompt_tokens", "calls", "bad_calls", "seconds")


class GaveUp(Exception):
    """Ends the work on a task; `ended` says why."""

    def __init__(self, ended: Ended) -> None:
        super().__init__(ended.value)
        self.ended = ended


class Attempt:
    """One try at a task, as far as it has come.

    Args:
        task: what is tried.
        harness: who lets the model work.
        before: messages of the harness's own that come before the task's.

    Example::

        attempt = Attempt(task, self)
        return await attempt.work(lambda: self._loop(attempt, model, sandbox), sandbox)
    """

    def __init__(self, task: Task, harness: Harness, before: Sequence[Message] = ()) -> None:
        self.task = task
        self.messages = [*before, *task.messages]
        self.turns: list[str] = []
        self.detail: dict[str, Any] = {}
        self.effort: dict[str, float] = dict.fromkeys(_EFFORT, 0.0)
        self._harness = f"{harness.name}@{harness.hash}"

    async def ask(self, model: Model, tools: Sequence[Tool] = (), *, most: int | None = None) -> Answered:
        """The model's next answer, noted. An answer that goes on with a last message becomes one message with it.

        Raises GaveUp: the prompt does not fit, or the model may not be asked again. Raises Unavailable.
        """
        task = self.task
        if len(self.turns) >= task.turns:
            raise GaveUp(Ended.TURNS)
        most = task.tokens if most is None else min(most, task.tokens)
        try:
            answered = await model.ask(tuple(self.messages), tools, max_tokens=most, stop=task.stop)
        except TooLarge as error:
            self.detail["why"] = str(error)
            raise GaveUp(Ended.LENGTH if self.turns else Ended.FAILED) from error
        except BadRequest as error:
            self.detail["why"] = str(error)
            raise GaveUp(Ended.FAILED) from error
        said = answered.message
        if self.messages[-1].role is Role.ASSISTANT:
            said = replace(said, text=closed(self.messages.pop().text + said.text))
        self.messages.append(said)
        self.turns.append(answered.turn)
        self.detail["answer"] = answered.message.text
        for name, count in (("turns", 1), ("tokens", answered.tokens), ("prompt_tokens", answered.prompt_tokens)):
            self.effort[name] += count
        return answered

    async def work(self, loop: Callable[[], Awaitable[Ended]], sandbox: Sandbox | None) -> Rollout:
        """Run the harness's loop until it ends or the task's time is over. Raises Unavailable."""
        clock = asyncio.get_running_loop().time
        began = clock()
        limit = asyncio.timeout(self.task.timeout_s)
        try:
            async with limit:
                ended = await loop()
        except GaveUp as gave_up:
            ended = gave_up.ended
        except TimeoutError as error:
            if not limit.expired():
                raise Unavailable(f"task {self.task.id!r}: {error or 'a call took too long'}; try again") from error
            ended = Ended.TIMEOUT
        self.effort["seconds"] = clock() - began
        return Rollout(
            task=self.task.id,
            harness=self._harness,
            ended=ended,
            messages=tuple(self.messages),
            turns=tuple(self.turns),
            changes=() if sandbox is None else tuple(await sandbox.diff()),
            effort=self.effort,
            detail=self.detail,
        )


def closed(text: str) -> str:
    r"""The text with its last code block closed: the fence that would close it is often where an answer is stopped.

    Example: ``closed("```python\nx = 1") == "```python\nx = 1\n```"``
    """
    fences = sum(line.lstrip().startswith("```") for line in text.split("\n"))
    return text if fences % 2 == 0 else f"{text.rstrip()}\n```"


def needed(sandbox: Sandbox | None, task: Task, name: str) -> Sandbox:
    """The sandbox. Raises BadConfig where there is none."""
    if sandbox is None:
        raise BadConfig(f"task {task.id!r}: harness {name!r} works in a sandbox, and none was opened; open one")
    return sandbox
