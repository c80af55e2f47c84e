"""The reference harness: the model works with tools in a sandbox until it submits or a budget ends.

Data flow: task's messages -> model -> calls -> sandbox -> results into the conversation -> model ... -> changes in the sandbox.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from pydantic import BaseModel, Field

from ostinato.core.conversation import Message, Role, ToolCall
from ostinato.core.errors import BadRequest, Unavailable
from ostinato.core.sandboxing import SandboxSpec
from ostinato.core.seams import Sandbox
from ostinato.worlds.harness.hashing import harness_hash
from ostinato.worlds.harness.rollout import OVERRAN, Ended, Model, ModelAnswer, OutOfTime, Rollout, timed_out, worked
from ostinato.worlds.harness.toolbox import OFFERED, ToolReply, cut_middle, tools_named, use
from ostinato.worlds.tasks.task import Task

_VERSION = 1


class ToolLoopConfig(BaseModel, frozen=True, extra="forbid"):
    """`[worlds.harness.tools]`."""

    prompt: str = Field(
        default="Work on the task with the tools. Call submit when it is done.",
        description="System message for tasks without one. Empty: none.",
    )
    offered: tuple[str, ...] = Field(
        default=OFFERED,
        min_length=1,
        description="Tools offered to the model: read, write, edit, bash, python, submit.",
    )
    output_chars: int = Field(
        default=8000, ge=200, description="Characters of a tool's answer; longer answers lose their middle."
    )
    answer_tokens: int = Field(
        default=32768, ge=1, description="Most tokens of all the model's answers in one rollout."
    )
    command_s: float = Field(default=60.0, gt=0, description="Seconds after which a shell command is killed.")


class ToolLoop:
    """Implements `Harness`: the tools of `ToolLoopConfig.offered`.

    Example: ``rollout = await ToolLoop(ToolLoopConfig(output_chars=4000)).run(task, model, sandbox)``
    """

    name = "tools"

    def __init__(self, config: ToolLoopConfig | None = None) -> None:
        self.config = config or ToolLoopConfig()
        offered = tools_named(self.config.offered)
        shown = [{"name": tool.name, "about": tool.description, "takes": dict(tool.parameters)} for tool in offered]
        self.hash = harness_hash(self.name, _VERSION, tools=shown, config=self.config.model_dump())

    def spec(self, task: Task) -> SandboxSpec:
        """The task's own sandbox."""
        return task.spec

    async def run(self, task: Task, model: Model, sandbox: Sandbox | None) -> Rollout:
        """Work until a submit, an answer without a call, or the end of the turns, the tokens or the time. Raises Unavailable."""
        if sandbox is None:
            raise ValueError("the harness 'tools' needs a sandbox")
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
            effort={**session.effort, "turns": float(len(session.turns)), "seconds": clock() - start},
            detail={"why": why} if why else {},
        )


class _Session:
    """One rollout in progress."""

    def __init__(self, task: Task, model: Model, sandbox: Sandbox, config: ToolLoopConfig) -> None:
        self._task, self._model, self._sandbox, self._config = task, model, sandbox, config
        self._tools = tools_named(config.offered)
        bare = config.prompt and not any(message.role is Role.SYSTEM for message in task.messages)
        opening = [Message(role=Role.SYSTEM, text=config.prompt)] if bare else []
        self.messages = [*opening, *task.messages]
        self.turns = list[str]()
        self.effort = Counter[str](tokens=0, calls=0, errors=0)
        self._told = 0  # tokens of the conversation so far, as the gateway counted them

    async def work(self, deadline: float) -> tuple[Ended, str]:
        """Work until `deadline`, by the loop's clock, at the latest. Returns why it ended, and an explanation for people.

        Raises Unavailable.
        """
        overran = (Ended.TIMEOUT, timed_out(self._task))
        while len(self.turns) < self._task.turns:
            try:
                answered = await self._ask(deadline)
            except BadRequest as error:  # the conversation has outgrown the context
                return (Ended.LENGTH if self.turns else Ended.FAILED), str(error)
            except OutOfTime:
                if not self.turns:
                    raise
                return overran
            if answered.finish == OVERRAN:
                return overran
            try:
                async with asyncio.timeout_at(deadline):
                    ended = await self._act(answered, deadline)
            except TimeoutError:
                return overran
            if ended is not None:
                return ended, ""
        return Ended.TURNS, ""

    async def _ask(self, deadline: float) -> ModelAnswer:
        left = self._config.answer_tokens - int(self.effort["tokens"])
        answered = await self._model.ask(
            self.messages,
            self._tools,
            max_tokens=min(self._task.tokens, left),
            stop=self._task.stop,
            left_s=deadline - asyncio.get_running_loop().time(),
        )
        self.turns.append(answered.turn)
        self.messages.append(answered.message)
        self.effort["tokens"] += answered.tokens
        self.effort["call_tokens" if answered.message.calls else "final_tokens"] += answered.tokens
        if self._told:  # what the prompt grew by beyond the last answer is tool output
            self.effort["output_tokens"] += max(0, answered.prompt_tokens - self._told)
        self._told = answered.prompt_tokens + answered.tokens
        return answered

    async def _act(self, answered: ModelAnswer, deadline: float) -> Ended | None:
        """Execute an answer's calls. Returns how the rollout ended; None if it goes on."""
        done = False
        for call in answered.message.calls:
            self.effort["calls"] += 1
            if done:
                told = ToolReply(text="error: not done, since submit was called before", failed=True)
            else:
                left = deadline - asyncio.get_running_loop().time()
                told = await self._used(call, max(0.01, min(self._config.command_s, left)))
            self.effort["errors"] += told.failed
            text = cut_middle(told.text, self._config.output_chars)
            self.messages.append(Message(role=Role.TOOL, text=text, answers=call.id, failed=told.failed))
            done = done or (call.name == "submit" and not told.failed)
        if done:
            return Ended.SUBMITTED
        if not answered.message.calls:
            return Ended.LENGTH if answered.finish == "length" else Ended.SUBMITTED
        return Ended.LENGTH if self.effort["tokens"] >= self._config.answer_tokens else None

    async def _used(self, call: ToolCall, timeout: float) -> ToolReply:
        """A call's result. If a program cannot start although the sandbox lives, the model caused it (by its processes or memory)."""
        try:
            return await use(call, self._sandbox, timeout=timeout, offered=self._config.offered)
        except Unavailable as error:
            await self._sandbox.diff()  # raises if it is the sandbox that is gone
            return ToolReply(text=f"error: {error}", failed=True)
