"""`tools`: the reference loop. The model reads, writes, edits and runs in a sandbox until it submits, or may not go on."""

from __future__ import annotations

from pydantic import BaseModel, Field

from ostinato.core.conversation import Message, Role, ToolCall
from ostinato.core.seams import Sandbox
from ostinato.worlds.harness.attempt import Attempt, needed
from ostinato.worlds.harness.hashing import harness_hash
from ostinato.worlds.harness.rollout import Ended, Model, Rollout
from ostinato.worlds.harness.toolbox import SUBMIT, TOOLS, BadCall, Toolbox, arguments_of, cut
from ostinato.worlds.tasks.task import Task

SYSTEM = "You work on files in a sandbox, with tools. Look before you change something, check what you did, then call submit."


class ToolsConfig(BaseModel, frozen=True, extra="forbid"):
    """What the reference harness shows and allows."""

    system: str = Field(
        default=SYSTEM, description="The first message, where a task brings no system message of its own."
    )
    output_characters: int = Field(default=8000, ge=100, description="Of a longer result, begin and end are shown.")
    command_s: float = Field(default=60.0, gt=0, description="Seconds after which one command is killed.")
    tokens: int = Field(default=32_768, ge=1, description="Tokens that the model may say in all of a rollout.")


class ToolLoop:
    """Implements `Harness` with the tools read, write, edit, bash and submit."""

    name = "tools"

    def __init__(self, config: ToolsConfig | None = None) -> None:
        self._config = config or ToolsConfig()
        self._hash = harness_hash(self.name, version=1, decides=self._config.model_dump(mode="json"), tools=TOOLS)

    @property
    def hash(self) -> str:
        return self._hash

    async def run(self, task: Task, model: Model, sandbox: Sandbox | None) -> Rollout:
        box = needed(sandbox, task, self.name)
        own = any(message.role is Role.SYSTEM for message in task.messages)
        attempt = Attempt(task, self, () if own else (Message(role=Role.SYSTEM, text=self._config.system),))
        return await attempt.work(lambda: self._loop(attempt, model, box), box)

    async def _loop(self, attempt: Attempt, model: Model, sandbox: Sandbox) -> Ended:
        toolbox = Toolbox(sandbox, command_s=self._config.command_s)
        while (left := self._config.tokens - int(attempt.effort["tokens"])) > 0:
            answered = await attempt.ask(model, TOOLS, most=left)
            calls = answered.message.calls
            if not calls:
                return Ended.LENGTH if answered.finish == "length" else Ended.SUBMITTED
            for number, call in enumerate(calls, start=1):
                submitted = await self._answer(attempt, toolbox, call)
                if submitted:
                    for missed in calls[number:]:
                        self._say(attempt, missed, "not done: the work was submitted before", failed=True)
                    return Ended.SUBMITTED
        return Ended.LENGTH

    async def _answer(self, attempt: Attempt, toolbox: Toolbox, call: ToolCall) -> bool:
        """Do a call and say what came of it; True if it was a submission."""
        attempt.effort["calls"] += 1
        try:
            if call.name == SUBMIT:
                arguments_of(call)
                self._say(attempt, call, "submitted")
                return True
            self._say(attempt, call, await toolbox.do(call))
        except BadCall as error:
            attempt.effort["bad_calls"] += 1
            self._say(attempt, call, f"error: {error}", failed=True)
        return False

    def _say(self, attempt: Attempt, call: ToolCall, text: str, *, failed: bool = False) -> None:
        text = cut(text, self._config.output_characters)
        attempt.messages.append(Message(role=Role.TOOL, text=text, answers=call.id, failed=failed))
