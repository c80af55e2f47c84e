"""Opens harnesses by the names that tasks use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ostinato.core.errors import BadConfig
from ostinato.worlds.harness.agents.coding import CodingAgent
from ostinato.worlds.harness.agents.config import AgentConfig
from ostinato.worlds.harness.repair import RepairConfig, RepairLoop
from ostinato.worlds.harness.rollout import Harness
from ostinato.worlds.harness.single import SingleAnswer
from ostinato.worlds.harness.tools import ToolLoop, ToolLoopConfig

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
