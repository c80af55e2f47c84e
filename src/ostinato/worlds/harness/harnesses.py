"""The built-in harnesses (tools, repair, single), and the registry that opens a harness by the name that tasks use.

The tool loop is the reference: task's messages -> model -> tool calls -> sandbox -> results into the conversation -> model ... until the
model submits or a budget is used up. The changed files in the sandbox are the outcome. The repair loop checks the model's code: task's
messages -> answer -> its code is written to a file -> the check runs -> if it passes, done; if it fails, its output goes into the
conversation and the model answers again.
"""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from ostinato.core.conversation import Message, Role, ToolCall
from ostinato.core.errors import BadConfig, BadRequest, StorageFull, Unavailable
from ostinato.core.sandbox import SandboxSpec
from ostinato.core.seams import Sandbox
from ostinato.worlds.harness import rollout
from ostinato.worlds.harness.agent import AgentConfig, CodingAgent
from ostinato.worlds.harness.memory import MEMORY_VERSION, Memory, MemoryConfig
from ostinato.worlds.harness.toolbox import OFFERED, ToolReply, cut_middle, tools_named, use
from ostinato.worlds.tasks.task import Task

# ---------------------------------------------------------------- a rollout in progress


class _Session(ABC):
    """A rollout in progress: the loop of model calls and actions. Subclasses define how to call the model and act on its answers."""

    def __init__(self, task: Task, model: rollout.Model, sandbox: Sandbox, messages: Sequence[Message]) -> None:
        self._task, self._model, self._sandbox = task, model, sandbox
        self.messages = list(messages)
        self.turns = list[str]()
        self.answers = 0  # turns, except those that only summarise
        self.effort = Counter[str](tokens=0)

    def record(self) -> tuple[Sequence[Message], dict[str, Any]]:
        """Return the whole conversation, and further entries for `Rollout.detail`."""
        return self.messages, {}

    async def work(self, deadline: float) -> tuple[rollout.Ended, str]:
        """Run the loop until `deadline` (event-loop time) at the latest. Returns how it ended and an explanation for people.

        Raises Unavailable.
        """
        overran = (rollout.Ended.TIMEOUT, rollout.timed_out(self._task))
        while self.answers < self._task.turns:
            try:
                answered = await self._ask(deadline)
                self.answers += 1
                self.turns.append(answered.turn)
                self.messages.append(answered.message)
                self._count(answered)
            except rollout.RolloutOver as over:
                return over.ended, over.why
            except BadRequest as error:  # the conversation has outgrown the context
                return (rollout.Ended.LENGTH if self.turns else rollout.Ended.FAILED), str(error)
            except rollout.OutOfTime:
                if not self.turns:
                    raise
                return overran
            if answered.finish == rollout.OVERRAN:
                return overran
            try:
                async with asyncio.timeout_at(deadline):
                    ended = await self._act(answered, deadline)
            except TimeoutError:
                return overran
            if ended is not None:
                return ended, ""
        return rollout.Ended.TURNS, ""

    @abstractmethod
    async def _ask(self, deadline: float) -> rollout.ModelAnswer: ...

    @abstractmethod
    def _count(self, answered: rollout.ModelAnswer) -> None: ...

    @abstractmethod
    async def _act(self, answered: rollout.ModelAnswer, deadline: float) -> rollout.Ended | None:
        """Act on an answer. Returns how the rollout ended, or None if it continues."""


class _Loop:
    """A harness that runs a `_Session` in the task's own sandbox."""

    name: str
    hash: str
    config: Any
    session: Callable[[Task, rollout.Model, Sandbox, Any], _Session]

    def spec(self, task: Task) -> SandboxSpec:
        """Return the task's own sandbox."""
        return task.spec

    async def run(self, task: Task, model: rollout.Model, sandbox: Sandbox | None) -> rollout.Rollout:
        """Run the session until it ends or the task's time is over. Raises Unavailable."""
        if sandbox is None:
            raise ValueError(f"the harness {self.name!r} needs a sandbox")
        session = self.session(task, model, sandbox, self.config)
        clock = asyncio.get_running_loop().time
        start = clock()
        ended, why, changes = await rollout.worked(sandbox, session.work(start + task.timeout_s))
        messages, detail = session.record()
        return rollout.Rollout(
            task=task.id,
            harness=f"{self.name}@{self.hash}",
            ended=ended,
            messages=tuple(messages),
            turns=tuple(session.turns),
            changes=changes,
            effort={**session.effort, "turns": float(session.answers), "seconds": clock() - start},
            detail=detail | ({"why": why} if why else {}),
        )


# ---------------------------------------------------------------- the tool loop


_TOOLS_VERSION = 1


class ToolLoopConfig(BaseModel, frozen=True, extra="forbid"):
    """`[worlds.harness.tools]`."""

    prompt: str = Field(
        default="Work on the task with the tools. Call submit when it is done.",
        description="System message for tasks that bring none. Empty: no system message.",
    )
    offered: tuple[str, ...] = Field(
        default=OFFERED,
        min_length=1,
        description="Tools offered to the model: read, write, edit, bash, python, submit.",
    )
    output_chars: int = Field(
        default=8000,
        ge=200,
        description="Characters of a tool's output that the model is shown. The middle of longer output is left out.",
    )
    answer_tokens: int = Field(
        default=32768, ge=1, description="Token budget of one rollout: most tokens of all the model's answers together."
    )
    command_s: float = Field(default=60.0, gt=0, description="Seconds after which a shell command is killed.")
    memory: MemoryConfig | None = Field(
        default=None,
        description="How the model summarises a conversation that outgrows its context window. None: the rollout ends there.",
    )


class _ToolSession(_Session):
    def __init__(self, task: Task, model: rollout.Model, sandbox: Sandbox, config: ToolLoopConfig) -> None:
        add_prompt = config.prompt and not any(message.role is Role.SYSTEM for message in task.messages)
        opening = [Message(role=Role.SYSTEM, text=config.prompt)] if add_prompt else []
        super().__init__(task, model, sandbox, [*opening, *task.messages])
        self._config = config
        self._tools = tools_named(config.offered)
        self.effort.update(calls=0, errors=0)
        self._context_tokens = 0  # of the conversation so far, as the gateway counted them
        self.memory: Memory | None = None
        if config.memory is not None:
            self.memory = Memory(
                config.memory,
                task,
                model,
                self.messages,
                self.turns,
                self.effort,
                room=config.memory.room(task.tokens, config.output_chars),
                tools=self._tools,
                sandbox=sandbox,
            )

    def record(self) -> tuple[Sequence[Message], dict[str, Any]]:
        if self.memory is None:
            return super().record()
        return self.memory.transcript, {"memory": "fell back"} if self.memory.fell_back else {}

    async def _ask(self, deadline: float) -> rollout.ModelAnswer:
        memory = self.memory
        if memory is None:
            return await self._answer(deadline)
        try:
            if memory.full:
                await memory.summarise(lambda: self._left(deadline))
                self._context_tokens = 0
            return await self._answer(deadline)
        except BadRequest as error:
            if memory.fresh and memory.effort["summaries"]:
                why = f"the first prompt after a summary was refused ({error}); is memory.window within the model's context?"
                raise rollout.RolloutOver(rollout.Ended.FAILED, why) from error
            if not await memory.shrink(lambda: self._left(deadline)):
                raise
            self._context_tokens = 0
            return await self._answer(deadline)

    async def _answer(self, deadline: float) -> rollout.ModelAnswer:
        left = self._left(deadline)
        if left["tokens"] <= 0:
            raise rollout.RolloutOver(rollout.Ended.LENGTH, "")
        most = min(self._task.tokens, int(left["tokens"]))
        return await self._model.ask(
            self.messages, self._tools, max_tokens=most, stop=self._task.stop, left_s=left["seconds"]
        )

    def _left(self, deadline: float) -> dict[str, float]:
        return {
            "calls": self._task.turns - self.answers,
            "tokens": self._config.answer_tokens - self.effort["tokens"],
            "seconds": deadline - asyncio.get_running_loop().time(),
        }

    def _count(self, answered: rollout.ModelAnswer) -> None:
        self.effort["tokens"] += answered.tokens
        self.effort["call_tokens" if answered.message.calls else "final_tokens"] += answered.tokens
        if self._context_tokens:  # the prompt grew by the last answer, counted already, and by tool output
            self.effort["output_tokens"] += max(0, answered.prompt_tokens - self._context_tokens)
        self._context_tokens = answered.prompt_tokens + answered.tokens
        if self.memory is not None:
            self.memory.count(answered)

    async def _act(self, answered: rollout.ModelAnswer, deadline: float) -> rollout.Ended | None:
        done = False
        for call in answered.message.calls:
            self.effort["calls"] += 1
            if done:
                reply = ToolReply(text="error: not done, since submit was called before", failed=True)
            else:
                left = deadline - asyncio.get_running_loop().time()
                reply = await self._execute(call, max(0.01, min(self._config.command_s, left)))
            self.effort["errors"] += reply.failed
            text = cut_middle(reply.text, self._config.output_chars)
            self.messages.append(Message(role=Role.TOOL, text=text, answers=call.id, failed=reply.failed))
            done = done or (call.name == "submit" and not reply.failed)
        if done:
            return rollout.Ended.SUBMITTED
        if not answered.message.calls:
            return rollout.Ended.LENGTH if answered.finish == "length" else rollout.Ended.SUBMITTED
        return rollout.Ended.LENGTH if self.effort["tokens"] >= self._config.answer_tokens else None

    async def _execute(self, call: ToolCall, timeout: float) -> ToolReply:
        """Execute a tool call. If a program cannot start although the sandbox is alive, the model's own processes or memory use are the
        cause, so the call fails instead of the rollout.
        """
        try:
            return await use(call, self._sandbox, timeout=timeout, offered=self._config.offered)
        except Unavailable as error:
            await self._sandbox.diff()  # raises if the sandbox is gone
            return ToolReply(text=f"error: {error}", failed=True)


class ToolLoop(_Loop):
    """Implements `Harness`: the model works with the tools of `ToolLoopConfig.offered` until it calls submit, answers without a call, or
    uses up a budget.
    """

    name, session = "tools", _ToolSession

    def __init__(self, config: ToolLoopConfig | None = None) -> None:
        self.config = config or ToolLoopConfig()
        offered = tools_named(self.config.offered)
        shown = [{"name": tool.name, "about": tool.description, "takes": dict(tool.parameters)} for tool in offered]
        plain = self.config.model_dump(exclude_none=True)
        more = {} if self.config.memory is None else {"memory": MEMORY_VERSION}
        self.hash = rollout.harness_hash(self.name, _TOOLS_VERSION, tools=shown, config=plain, **more)

    def check(self, task: Task) -> None:
        """Raise BadConfig if the context window in `memory` is too small for this task."""
        if self.config.memory is not None:
            try:
                self.config.memory.room(task.tokens, self.config.output_chars)
            except BadConfig as error:
                raise BadConfig(f"task {task.id!r}: worlds.harness.tools.{error}") from error


# ---------------------------------------------------------------- the repair loop


_REPAIR_VERSION = 1
_FENCE = re.compile(r"^[ \t]*```[^\n]*\n?", re.MULTILINE)


class RepairConfig(BaseModel, frozen=True, extra="forbid"):
    """`[worlds.harness.repair]`."""

    path: str = Field(
        default="answer.py", description="File in the working directory to which the model's code is written."
    )
    command: tuple[str, ...] = Field(
        default=("python3", "-B", "-S", "-s", "check.py"),
        min_length=1,
        description="The check, run in the working directory. Exit code 0 means that the code passes. The task must bring the files of the "
        "check. Keep Python from caching bytecode (-B): with a cache it may run the previous answer if two answers come within a second.",
    )
    command_s: float = Field(default=10.0, gt=0, description="Seconds after which the check is killed.")
    output_chars: int = Field(
        default=400,
        ge=40,
        description="Characters of the check's output that the model is shown. The middle of longer output is left out.",
    )
    told: str = Field(
        default="That fails:\n{output}\nWrite it again.",
        description="Message to the model after a failed check. {output} is replaced by the check's output, cut to `output_chars`.",
    )


class _RepairSession(_Session):
    """A repair loop in progress. `checks` holds for each answer whether it passed."""

    def __init__(self, task: Task, model: rollout.Model, sandbox: Sandbox, config: RepairConfig) -> None:
        super().__init__(task, model, sandbox, task.messages)
        self._config = config
        last = task.messages[-1]
        self._prefill = last if last.role is Role.ASSISTANT else None
        self.checks = list[bool]()
        self.effort.update(final_tokens=0)

    def record(self) -> tuple[Sequence[Message], dict[str, Any]]:
        return self.messages, {"checks": tuple(self.checks)}

    async def _ask(self, deadline: float) -> rollout.ModelAnswer:
        left_s = deadline - asyncio.get_running_loop().time()
        return await self._model.ask(self.messages, max_tokens=self._task.tokens, stop=self._task.stop, left_s=left_s)

    def _count(self, answered: rollout.ModelAnswer) -> None:
        self.effort.update(tokens=answered.tokens, final_tokens=answered.tokens)

    async def _act(self, answered: rollout.ModelAnswer, deadline: float) -> rollout.Ended | None:
        whole = (self._prefill.text if self._prefill else "") + answered.message.text
        output = await self._failure(whole)
        self.checks.append(output is None)
        if output is None or len(self.turns) >= self._task.turns:
            cut = answered.finish == "length"
            return rollout.Ended.LENGTH if cut else rollout.Ended.TURNS if output else rollout.Ended.SUBMITTED
        self._show(whole, output)
        return None

    async def _failure(self, text: str) -> str | None:
        """Run the check on the code in an answer. Returns its output, or None if it passes."""
        try:
            await self._sandbox.write(self._config.path, code_in(text).encode("utf-8", "surrogatepass"))
        except (BadRequest, StorageFull) as error:  # earlier code blocked the path or filled the disk
            return cut_middle(f"the code could not be put into its place: {error}", self._config.output_chars)
        result = await self._sandbox.exec(self._config.command, timeout=self._config.command_s)
        if result.code == 0:
            return None
        output = (result.stdout + result.stderr).decode("utf-8", "replace").strip()
        if result.killed_reason:
            output = f"{output}\nkilled: {result.killed_reason}".strip()
        return cut_middle(output or f"exit code {result.code}", self._config.output_chars)

    def _show(self, answer: str, output: str) -> None:
        """Add a failed answer and the check's output to the conversation."""
        if self._prefill is not None:
            self.messages[-2:] = [Message(role=Role.ASSISTANT, text=answer)]
        told = self._config.told.replace("{output}", output)
        self.messages.append(Message(role=Role.USER, text=told))
        if self._prefill is not None:
            self.messages.append(self._prefill)


class RepairLoop(_Loop):
    """Implements `Harness`: runs a check on each answer until one passes, for at most `Task.turns` answers. The last answer counts.

    If the task's messages end with an assistant message, every answer continues that prefill.
    """

    name, session = "repair", _RepairSession

    def __init__(self, config: RepairConfig | None = None) -> None:
        self.config = config or RepairConfig()
        self.hash = rollout.harness_hash(self.name, _REPAIR_VERSION, config=self.config.model_dump())


def code_in(text: str) -> str:
    r"""Return the content of the last code fence, which need not be closed, or the whole text if there is none.

    Example: ``code_in("Here:\n```python\nx = 1\n```\nDone.") == "x = 1\n"``
    """
    fences = list(_FENCE.finditer(text))
    if not fences:
        return text
    opening = fences[-1] if len(fences) % 2 else fences[-2]
    end = len(text) if opening is fences[-1] else fences[-1].start()
    return text[opening.end() : end]


# ---------------------------------------------------------------- single answers


_SINGLE_VERSION = 1


class SingleAnswer:
    """Implements `Harness`: one answer to the task's messages, without tools and sandbox."""

    name = "single"
    hash = rollout.harness_hash(name, _SINGLE_VERSION)

    def spec(self, task: Task) -> None:
        """Return None: this harness runs no programs."""

    async def run(self, task: Task, model: rollout.Model, sandbox: Sandbox | None) -> rollout.Rollout:
        """Sample one answer, which is cut when the task's time is over. A prompt that exceeds the context gives a rollout that `FAILED`.

        Raises Unavailable, or OutOfTime if the time ran out before the first token.
        """
        clock = asyncio.get_running_loop().time
        start = clock()
        try:
            answer = await model.ask(task.messages, max_tokens=task.tokens, stop=task.stop, left_s=task.timeout_s)
        except BadRequest as error:
            return rollout.Rollout(
                task=task.id,
                harness=f"{self.name}@{self.hash}",
                ended=rollout.Ended.FAILED,
                messages=task.messages,
                turns=(),
                detail={"why": str(error)},
            )
        effort = {"tokens": float(answer.tokens), "final_tokens": float(answer.tokens), "seconds": clock() - start}
        return answered(task, self, answer.message, answer.finish, turns=(answer.turn,), effort={"turns": 1.0} | effort)


def answered(
    task: Task,
    harness: rollout.Harness,
    message: Message,
    finish: str,
    *,
    turns: tuple[str, ...] = (),
    effort: Mapping[str, float] | None = None,
) -> rollout.Rollout:
    """Return the rollout of a single answer. `finish` is as in `ModelAnswer`."""
    overran, cut = finish == rollout.OVERRAN, finish == "length"
    ended = rollout.Ended.LENGTH if cut else rollout.Ended.SUBMITTED
    return rollout.Rollout(
        task=task.id,
        harness=f"{harness.name}@{harness.hash}",
        ended=rollout.Ended.TIMEOUT if overran else ended,
        messages=(*task.messages, message),
        turns=turns,
        effort=effort or {},
        detail={"why": rollout.timed_out(task)} if overran else {},
    )


# ---------------------------------------------------------------- registry


_C = TypeVar("_C", bound=BaseModel)

HARNESSES = ("single", "repair", "tools")
"""The harnesses that work without settings."""


def is_agent(name: str) -> bool:
    """True for the names of third-party agents: "agent", or "agent-" followed by a name."""
    return name == "agent" or (name.startswith("agent-") and len(name) > len("agent-"))


def open_harness(name: str, settings: Mapping[str, Any] | None = None) -> rollout.Harness:
    """Return the harness of this name, with the settings of `[worlds.harness.NAME]`. Raises BadConfig for an unknown name or an invalid
    setting.
    """
    if is_agent(name):
        if settings is None:
            raise BadConfig(f"worlds.harness.{name}: this agent is not configured; set its command")
        return CodingAgent(name, _read_settings(AgentConfig, name, settings))
    match name:
        case "tools":
            return ToolLoop(_read_settings(ToolLoopConfig, name, settings or {}))
        case "repair":
            return RepairLoop(_read_settings(RepairConfig, name, settings or {}))
        case "single":
            if settings:
                raise BadConfig(f"worlds.harness.{name}: has no settings; remove {', '.join(sorted(settings))}")
            return SingleAnswer()
        case _:
            raise BadConfig(f"worlds.harness: {no_harness(name)}")


def no_harness(name: str) -> str:
    """Return the error message for a harness that is not available, with the remedy."""
    if is_agent(name):
        return f"the harness {name!r} is not configured; add [worlds.harness.{name}] with its command to the config"
    return f"there is no harness {name!r}; there are {', '.join(HARNESSES)}, and agent or agent-NAME"


def _read_settings(kind: type[_C], name: str, settings: Mapping[str, Any]) -> _C:
    try:
        return kind.model_validate(dict(settings))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in (name, *first["loc"]))
        raise BadConfig(f"worlds.harness.{where}: {first['msg']}") from error
