"""Write, run, see what fails, repair: the model's code is checked in a sandbox, and the model is shown what went wrong.

Data flow: task's messages -> answer -> its code becomes a file -> the check runs -> passed: done; failed: the output goes into the
conversation, and the model answers again.
"""

from __future__ import annotations

import asyncio
import re

from pydantic import BaseModel, Field

from ostinato.core.conversation import Message, Role
from ostinato.core.errors import BadRequest, StorageFull
from ostinato.core.sandboxing import SandboxSpec
from ostinato.core.seams import Sandbox
from ostinato.worlds.harness.hashing import harness_hash
from ostinato.worlds.harness.rollout import OVERRAN, Ended, Model, OutOfTime, Rollout, timed_out, worked
from ostinato.worlds.harness.toolbox import cut_middle
from ostinato.worlds.tasks.task import Task

_VERSION = 1
_FENCE = re.compile(r"^[ \t]*```[^\n]*\n?", re.MULTILINE)


class RepairConfig(BaseModel, frozen=True, extra="forbid"):
    """`[worlds.harness.repair]`."""

    path: str = Field(
        default="answer.py", description="File in the working directory that the model's code is written to."
    )
    command: tuple[str, ...] = Field(
        default=("python3", "-B", "-S", "-s", "check.py"),
        min_length=1,
        description="The check, run in the working directory; exit code 0 means that the code passes. The task brings "
        "its files. Keep Python from caching bytecode (-B), or it takes two answers within a second for one.",
    )
    command_s: float = Field(default=10.0, gt=0, description="Seconds after which the check is killed.")
    output_chars: int = Field(
        default=400,
        ge=40,
        description="Characters of the check's output that are shown; longer output loses its middle.",
    )
    told: str = Field(
        default="That fails:\n{output}\nWrite it again.",
        description="Message to the model after a failure; {output} stands for the check's output, cut to "
        "`output_chars`.",
    )


class RepairLoop:
    """Implements `Harness`: at most `Task.turns` answers, each of which is checked; the last one counts.

    If the task's messages end with the beginning of the answer, every answer continues that beginning.

    Example: ``rollout = await RepairLoop(RepairConfig(path="calc.py")).run(task, model, sandbox)``
    """

    name = "repair"

    def __init__(self, config: RepairConfig | None = None) -> None:
        self.config = config or RepairConfig()
        self.hash = harness_hash(self.name, _VERSION, config=self.config.model_dump())

    def spec(self, task: Task) -> SandboxSpec:
        """The task's own sandbox."""
        return task.spec

    async def run(self, task: Task, model: Model, sandbox: Sandbox | None) -> Rollout:
        """Work until the check passes, or until the end of the turns, the context or the time. Raises Unavailable."""
        if sandbox is None:
            raise ValueError("the harness 'repair' needs a sandbox")
        session = _Session(task, model, sandbox, self.config)
        clock = asyncio.get_running_loop().time
        start = clock()
        ended, why, changes = await worked(sandbox, session.work(start + task.timeout_s))
        return Rollout(
            task=task.id,
            harness=f"{self.name}@{self.hash}",
            ended=ended,
            messages=tuple(session.messages),
            turns=tuple(session.turns),
            changes=changes,
            effort={
                "turns": float(len(session.turns)),
                "tokens": float(session.tokens),
                "final_tokens": float(session.tokens),
                "seconds": clock() - start,
            },
            detail={"checks": tuple(session.checks), **({"why": why} if why else {})},
        )


class _Session:
    """One rollout in progress. `checks` says for each answer whether it passed."""

    def __init__(self, task: Task, model: Model, sandbox: Sandbox, config: RepairConfig) -> None:
        self._task, self._model, self._sandbox, self._config = task, model, sandbox, config
        last = task.messages[-1]
        self._begun = last if last.role is Role.ASSISTANT else None
        self.messages = list(task.messages)
        self.turns = list[str]()
        self.checks = list[bool]()
        self.tokens = 0

    async def work(self, deadline: float) -> tuple[Ended, str]:
        """Work until `deadline`, by the loop's clock, at the latest. Returns why it ended, and an explanation for people.

        Raises Unavailable.
        """
        clock = asyncio.get_running_loop().time
        overran = (Ended.TIMEOUT, timed_out(self._task))
        while True:
            try:
                answered = await self._model.ask(
                    self.messages, max_tokens=self._task.tokens, stop=self._task.stop, left_s=deadline - clock()
                )
            except BadRequest as error:  # the conversation has outgrown the context
                return (Ended.LENGTH if self.turns else Ended.FAILED), str(error)
            except OutOfTime:
                if not self.turns:
                    raise
                return overran
            self.turns.append(answered.turn)
            self.tokens += answered.tokens
            self.messages.append(answered.message)
            if answered.finish == OVERRAN:
                return overran
            whole = (self._begun.text if self._begun else "") + answered.message.text
            try:
                async with asyncio.timeout_at(deadline):
                    output = await self._failure(whole)
            except TimeoutError:
                return overran
            self.checks.append(output is None)
            if output is None or len(self.turns) >= self._task.turns:
                cut = answered.finish == "length"
                return Ended.LENGTH if cut else Ended.TURNS if output else Ended.SUBMITTED, ""
            self._show(whole, output)

    async def _failure(self, text: str) -> str | None:
        """The check's output for the code in an answer; None if it passes."""
        try:
            await self._sandbox.write(self._config.path, code_in(text).encode("utf-8", "surrogatepass"))
        except (BadRequest, StorageFull) as error:  # earlier code blocked the path or filled the disk
            return cut_middle(f"the code could not be put into its place: {error}", self._config.output_chars)
        result = await self._sandbox.exec(self._config.command, timeout=self._config.command_s)
        if result.code == 0:
            return None
        said = (result.stdout + result.stderr).decode("utf-8", "replace").strip()
        if result.killed_reason:
            said = f"{said}\nkilled: {result.killed_reason}".strip()
        return cut_middle(said or f"exit code {result.code}", self._config.output_chars)

    def _show(self, answer: str, output: str) -> None:
        """Add a failure to the conversation."""
        if self._begun is not None:
            self.messages[-2:] = [Message(role=Role.ASSISTANT, text=answer)]
        told = self._config.told.replace("{output}", output)
        self.messages.append(Message(role=Role.USER, text=told))
        if self._begun is not None:
            self.messages.append(self._begun)


def code_in(text: str) -> str:
    r"""The content of the last code fence, which need not be closed; the whole text if there is none.

    Example: ``code_in("Here:\n```python\nx = 1\n```\nDone.") == "x = 1\n"``
    """
    fences = list(_FENCE.finditer(text))
    if not fences:
        return text
    opening = fences[-1] if len(fences) % 2 else fences[-2]
    end = len(text) if opening is fences[-1] else fences[-1].start()
    return text[opening.end() : end]
