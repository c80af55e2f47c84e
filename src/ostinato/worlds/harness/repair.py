"""`repair`: the model writes a file, sees how the visible tests fail, and may write it again, once."""

from __future__ import annotations

import re

from pydantic import BaseModel, Field

from ostinato.core.conversation import Message, Role
from ostinato.core.seams import Sandbox
from ostinato.worlds.harness.attempt import Attempt, needed
from ostinato.worlds.harness.hashing import harness_hash
from ostinato.worlds.harness.rollout import Ended, Model, Rollout
from ostinato.worlds.harness.toolbox import cut
from ostinato.worlds.tasks.task import Task

_BLOCK = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)


class RepairConfig(BaseModel, frozen=True, extra="forbid"):
    """What is written, what is run, and what is said of it."""

    path: str = Field(default="solution.py", description="Where the answer's last code block is put.")
    command: tuple[str, ...] = Field(default=("python3", "visible_tests.py"), description="Exit code 0: it passes.")
    command_s: float = Field(default=10.0, gt=0, description="Seconds after which the tests are killed.")
    failed: str = Field(
        default="It fails:\n\n{output}\n\nWrite it again.", description="What the model is told; {output} is cut."
    )
    output_characters: int = Field(default=1500, ge=100, description="Of a longer output, begin and end are shown.")


class RepairOnce:
    """Implements `Harness`: at most two answers. What the first answer was prefilled with, the second is too."""

    name = "repair"

    def __init__(self, config: RepairConfig | None = None) -> None:
        self._config = config or RepairConfig()
        self._hash = harness_hash(self.name, version=1, decides=self._config.model_dump(mode="json"))

    @property
    def hash(self) -> str:
        return self._hash

    async def run(self, task: Task, model: Model, sandbox: Sandbox | None) -> Rollout:
        box = needed(sandbox, task, self.name)
        attempt = Attempt(task, self)
        return await attempt.work(lambda: self._work(attempt, model, box), box)

    async def _work(self, attempt: Attempt, model: Model, sandbox: Sandbox) -> Ended:
        last = attempt.task.messages[-1]
        prefill = [last] if last.role is Role.ASSISTANT else []
        for number in (1, 2):
            answered = await attempt.ask(model)
            ended = Ended.LENGTH if answered.finish == "length" else Ended.SUBMITTED
            output = await self._tried(attempt, sandbox)
            if output is None or number == 2:
                break
            said = self._config.failed.replace("{output}", cut(output, self._config.output_characters))
            if attempt.task.turns > 1:
                attempt.messages += [Message(role=Role.USER, text=said), *prefill]
            else:
                break
        attempt.detail["visible"] = output is None
        return ended

    async def _tried(self, attempt: Attempt, sandbox: Sandbox) -> str | None:
        """How the visible tests fail; None if they pass."""
        blocks = _BLOCK.findall(attempt.messages[-1].text)
        code = blocks[-1] if blocks else attempt.messages[-1].text
        await sandbox.write(self._config.path, code.encode("utf-8", "replace"))
        result = await sandbox.exec(self._config.command, timeout=self._config.command_s)
        if result.code == 0 and not result.killed_reason:
            return None
        ending = f"killed: {result.killed_reason}" if result.killed_reason else f"exit code {result.code}"
        shown = [part.decode(errors="replace").strip() for part in (result.stdout, result.stderr)]
        return "\n".join([*filter(None, shown), ending])
