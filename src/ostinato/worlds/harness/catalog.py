"""The harnesses by name: the one way to one, for training, evaluation and serving, so that its hash is the same in all three."""

from __future__ import annotations

from pydantic import BaseModel, Field

from ostinato.core.errors import BadConfig
from ostinato.worlds.harness.repair import RepairConfig, RepairOnce
from ostinato.worlds.harness.rollout import Harness
from ostinato.worlds.harness.single import SingleAnswer
from ostinato.worlds.harness.tools import ToolLoop, ToolsConfig

NAMES = ("single", "tools", "repair")


class HarnessConfig(BaseModel, frozen=True, extra="forbid"):
    """What the harnesses show and allow; any change of it is another harness, with another hash."""

    tools: ToolsConfig = Field(default=ToolsConfig(), description="The reference loop with tools.")
    repair: RepairConfig = Field(default=RepairConfig(), description="Two answers with visible tests between them.")


def open_harness(name: str, config: HarnessConfig | None = None) -> Harness:
    """The harness of a name, as tasks say it. Raises BadConfig for an unknown one."""
    config = config or HarnessConfig()
    if name == "single":
        return SingleAnswer()
    if name == "tools":
        return ToolLoop(config.tools)
    if name == "repair":
        return RepairOnce(config.repair)
    raise BadConfig(f"there is no harness {name!r}; there are {', '.join(NAMES)}")
