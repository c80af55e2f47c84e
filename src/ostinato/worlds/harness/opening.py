"""Harnesses by the names that tasks use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from ostinato.core.errors import BadConfig
from ostinato.worlds.harness.rollout import Harness
from ostinato.worlds.harness.single import SingleAnswer
from ostinato.worlds.harness.tools import ToolLoop, ToolLoopConfig

HARNESSES = ("single", "tools")


def open_harness(name: str, settings: Mapping[str, Any] | None = None) -> Harness:
    """The harness of this name. Raises BadConfig for a name or a setting that there is not.

    Args:
        name: as tasks name it.
        settings: of `[worlds.harness.NAME]`.
    """
    if name not in HARNESSES:
        raise BadConfig(f"worlds.harness: there is no harness {name!r}; there are {', '.join(HARNESSES)}")
    if name == "tools":
        return ToolLoop(_read_settings(name, settings or {}))
    if settings:
        raise BadConfig(f"worlds.harness.{name}: has no settings; remove {', '.join(sorted(settings))}")
    return SingleAnswer()


def _read_settings(name: str, settings: Mapping[str, Any]) -> ToolLoopConfig:
    try:
        return ToolLoopConfig.model_validate(dict(settings))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in (name, *first["loc"]))
        raise BadConfig(f"worlds.harness.{where}: {first['msg']}") from error
