"""The harnesses of our own (tools, repair, single), and opening a harness by the name that tasks use.

The tool loop is the reference: task's messages -> model -> calls -> sandbox -> results into the conversation -> model ... until it submits
or a budget ends; the changes in the sandbox are the outcome. The repair loop checks the model's code: task's messages -> answer -> its
code becomes a file -> the check runs -> passed: done; failed: the output goes into the conversation, and the model answers again.
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
    """A rollout in progress: asks and acts until something ends it. A harness says how it asks and what it does with an answer."""

    def __init__(self, task: Task, model: rollout.Model, sandbox: Sandbox, messages: Sequence[Message]) -> None:
        self._task, self._model, self._sandbox = task, model, sandbox
        self.messages = list(messages)
        self.turns = list[str]()
        self.answers = 0  # turns, without those that only summarise
        self.effort = Counter[str](tokens=0)

    def record(self) -> tuple[Sequence[Message], dict[str, Any]]:
        """The whole conversation, and what else is to be told of the rollout."""
        return self.messages, {}

    async def work(self, deadline: float) -> tuple[rollout.Ended, str]:
        """Work until `deadline`, by the loop's clock, at the latest. Returns why it ended, and an explanation for people.

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
        """Do what an answer asks for. Returns how the rollout ended; None if it goes on."""


class _Loop:
    """A harness that works in the task's own sandbox until its session ends."""

    name: str
    hash: str
    config: Any
    session: Callable[[Task, rollout.Model, Sandbox, Any], _Session]

    def spec(self, task: Task) -> SandboxSpec:
        """The task's own sandbox."""
        return task.spec

    async def run(self, task: Task, model: rollout.Model, sandbox: Sandbox | None) -> rollout.Rollout:
        """Work until the session or the task's time ends. Raises Unavailable."""
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
        description="System message for tasks without one. Empty: none.",
    )
    offered: tuple[str, ...] = Field(
        default=OFFERED,
        min_length=1,
        description="Tools offered to the model: read, write, edit, bash, python, submit.",
    )
    output_chars: int = Field(
        default=8000,
        ge=200,
        description="Characters of a tool's output that are shown. Longer output loses its middle.",
    )
    answer_tokens: int = Field(
        default=32768, ge=1, description="Most tokens of all the model's answers in one rollout together."
    )
    command_s: float = Field(default=60.0, gt=0, description="Seconds after which a shell command is killed.")
    memory: MemoryConfig | None = Field(
        default=None,
        description="How the model summarises what outgrows its window. None: outgrowing the window ends the rollout.",
    )


class _ToolSession(_Session):
    def __init__(self, task: Task, model: rollout.Model, sandbox: Sandbox, config: ToolLoopConfig) -> None:
        bare = config.prompt and not any(message.role is Role.SYSTEM for message in task.messages)
        opening = [Message(role=Role.SYSTEM, text=config.prompt)] if bare else []
        super().__init__(task, model, sandbox, [*opening, *task.messages])
        self._config = config
        self._tools = tools_named(config.offered)
        self.effort.update(calls=0, errors=0)
        self._told = 0  # tokens of the conversation so far, as the gateway counted them
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
                self._told = 0
            return await self._answer(deadline)
        except BadRequest as error:
            if memory.fresh and memory.effort["summaries"]:
                why = f"the first prompt after a summary was refused ({error}); is memory.window within the model's context?"
                raise rollout.RolloutOver(rollout.Ended.FAILED, why) from error
            if not await memory.shrink(lambda: self._left(deadline)):
                raise
            self._told = 0
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
        if self._told:  # what the prompt grew by beyond the last answer is tool output
            self.effort["output_tokens"] += max(0, answered.prompt_tokens - self._told)
        self._told = answered.prompt_tokens + answered.tokens
        if self.memory is not None:
            self.memory.count(answered)

    async def _act(self, answered: rollout.ModelAnswer, deadline: float) -> rollout.Ended | None:
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
            return rollout.Ended.SUBMITTED
        if not answered.message.calls:
            return rollout.Ended.LENGTH if answered.finish == "length" else rollout.Ended.SUBMITTED
        return rollout.Ended.LENGTH if self.effort["tokens"] >= self._config.answer_tokens else None

    async def _used(self, call: ToolCall, timeout: float) -> ToolReply:
        """A call's result. If a program cannot start although the sandbox lives, the model caused it (by its processes or memory)."""
        try:
            return await use(call, self._sandbox, timeout=timeout, offered=self._config.offered)
        except Unavailable as error:
            await self._sandbox.diff()  # raises if it is the sandbox that is gone
            return ToolReply(text=f"error: {error}", failed=True)


class ToolLoop(_Loop):
    """Implements `Harness`: the tools of `ToolLoopConfig.offered`, until a submit, an answer without a call, or the end of a budget."""

    name, session = "tools", _ToolSession

    def __init__(self, config: ToolLoopConfig | None = None) -> None:
        self.config = config or ToolLoopConfig()
        offered = tools_named(self.config.offered)
        shown = [{"name": tool.name, "about": tool.description, "takes": dict(tool.parameters)} for tool in offered]
        plain = self.config.model_dump(exclude_none=True)
        more = {} if self.config.memory is None else {"memory": MEMORY_VERSION}
        self.hash = rollout.harness_hash(self.name, _TOOLS_VERSION, tools=shown, config=plain, **more)

    def check(self, task: Task) -> None:
        """Raise BadConfig if the memory's window is too small for this task."""
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
        description="The check, run in the working directory. Exit code 0 means that the code passes. The task brings the files of the "
        "check. Keep Python from caching bytecode (-B), or it takes two answers within a second for one.",
    )
    command_s: float = Field(default=10.0, gt=0, description="Seconds after which the check is killed.")
    output_chars: int = Field(
        default=400,
        ge=40,
        description="Characters of the check's output that are shown. Longer output loses its middle.",
    )
    told: str = Field(
        default="That fails:\n{output}\nWrite it again.",
        description="Message to the model after a failure. {output} stands for the check's output, cut to `output_chars`.",
    )


class _RepairSession(_Session):
    """`checks` says for each answer whether it passed."""

    def __init__(self, task: Task, model: rollout.Model, sandbox: Sandbox, config: RepairConfig) -> None:
        super().__init__(task, model, sandbox, task.messages)
        self._config = config
        last = task.messages[-1]
        self._begun = last if last.role is Role.ASSISTANT else None
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
        whole = (self._begun.text if self._begun else "") + answered.message.text
        output = await self._failure(whole)
        self.checks.append(output is None)
        if output is None or len(self.turns) >= self._task.turns:
            cut = answered.finish == "length"
            return rollout.Ended.LENGTH if cut else rollout.Ended.TURNS if output else rollout.Ended.SUBMITTED
        self._show(whole, output)
        return None

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


class RepairLoop(_Loop):
    """Implements `Harness`: at most `Task.turns` answers, each of which is checked until one passes; the last one counts.

    If the task's messages end with the beginning of the answer, every answer continues that beginning.
    """

    name, session = "repair", _RepairSession

    def __init__(self, config: RepairConfig | None = None) -> None:
        self.config = config or RepairConfig()
        self.hash = rollout.harness_hash(self.name, _REPAIR_VERSION, config=self.config.model_dump())


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


# ---------------------------------------------------------------- single answers


_SINGLE_VERSION = 1


class SingleAnswer:
    """Implements `Harness`: the task's messages, one answer, no tools and no sandbox."""

    name = "single"
    hash = rollout.harness_hash(name, _SINGLE_VERSION)

    def spec(self, task: Task) -> None:
        """None: it runs nothing."""

    async def run(self, task: Task, model: rollout.Model, sandbox: Sandbox | None) -> rollout.Rollout:
        """One answer, or as much of it as there is when the task's time is over. If the prompt does not fit, the rollout fails before the
        model has said anything. Raises Unavailable, or OutOfTime if the time ran out before the model said anything.
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
    """The rollout that one answer is. `finish` is as `ModelAnswer` has it."""
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


# ---------------------------------------------------------------- by name


_C = TypeVar("_C", bound=BaseModel)

HARNESSES = ("single", "repair", "tools")
"""The harnesses that need no settings."""


def is_agent(name: str) -> bool:
    """True for the names of third-party agents: "agent", or "agent-" followed by a name."""
    return name == "agent" or (name.startswith("agent-") and len(name) > len("agent-"))


def open_harness(name: str, settings: Mapping[str, Any] | None = None) -> rollout.Harness:
    """The harness of this name with the settings of `[worlds.harness.NAME]`. Raises BadConfig for an unknown name, an invalid setting."""
    if is_agent(name):
        if settings is None:
            raise BadConfig(f"worlds.harness.{name}: nothing says what this agent is; set its command")
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
    """The error message for a harness that is not available, with the remedy."""
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
