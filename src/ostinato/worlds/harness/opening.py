"""Opens harnesses by the names that tasks use."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ostinato.core.errors import BadConfig, BadRequest
from ostinato.core.seams import Sandbox
from ostinato.worlds.harness.agents.coding import CodingAgent
from ostinato.worlds.harness.agents.config import AgentConfig
from ostinato.worlds.harness.hashing import harness_hash
from ostinato.worlds.harness.repair import RepairConfig, RepairLoop
from ostinato.worlds.harness.rollout import OVERRAN, Ended, Harness, Model, Rollout, timed_out
from ostinato.worlds.harness.tools import ToolLoop, ToolLoopConfig
from ostinato.worlds.tasks.task import Task

# ---------------------------------------------------------------- single answers


_VERSION = 1


class SingleAnswer:
    """Implements `Harness`: the task's messages, one answer, no tools and no sandbox."""

    name = "single"
    hash = harness_hash(name, _VERSION)

    def spec(self, task: Task) -> None:
        """None: it runs nothing."""

    async def run(self, task: Task, model: Model, sandbox: Sandbox | None) -> Rollout:
        """One answer, or as much of it as there is when the task's time is over. If the prompt does not fit, the rollout fails before the
        model has said anything. Raises Unavailable, or OutOfTime if the time ran out before the model said anything.
        """
        clock = asyncio.get_running_loop().time
        start = clock()
        try:
            answered = await model.ask(task.messages, max_tokens=task.tokens, stop=task.stop, left_s=task.timeout_s)
        except BadRequest as error:
            return Rollout(
                task=task.id,
                harness=f"{self.name}@{self.hash}",
                ended=Ended.FAILED,
                messages=task.messages,
                turns=(),
                detail={"why": str(error)},
            )
        overran = answered.finish == OVERRAN
        return Rollout(
            task=task.id,
            harness=f"{self.name}@{self.hash}",
            ended=Ended.TIMEOUT if overran else Ended.LENGTH if answered.finish == "length" else Ended.SUBMITTED,
            messages=(*task.messages, answered.message),
            turns=(answered.turn,),
            effort={
                "turns": 1.0,
                "tokens": float(answered.tokens),
                "final_tokens": float(answered.tokens),
                "seconds": clock() - start,
            },
            detail={"why": timed_out(task)} if overran else {},
        )


# ---------------------------------------------------------------- by name


_C = TypeVar("_C", bound=BaseModel)

HARNESSES = ("single", "repair", "tools")
"""The harnesses that need no settings."""


def is_agent(name: str) -> bool:
    """True for the names of third-party agents: "agent", or "agent-" followed by a name."""
    return name == "agent" or (name.startswith("agent-") and len(name) > len("agent-"))


def open_harness(name: str, settings: Mapping[str, Any] | None = None) -> Harness:
    """The harness of this name. Raises BadConfig for an unknown name or an invalid setting.

    Args:
        name: the name that tasks use.
        settings: those of `[worlds.harness.NAME]`.
    """
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
