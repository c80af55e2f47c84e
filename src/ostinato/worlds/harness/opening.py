"""Harnesses by the names that tasks use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ostinato.core.errors import BadConfig
from ostinato.worlds.harness.repair import RepairConfig, RepairLoop
from ostinato.worlds.harness.rollout import Harness
from ostinato.worlds.harness.single import SingleAnswer
from ostinato.worlds.harness.tools import ToolLoop, ToolLoopConfig

HARNESSES = ("single", "repair", "tools")

_C = TypeVar("_C", bound=BaseModel)


def open_harness(name: str, settings: Mapping[str, Any] | None = None) -> Harness:
    """The harness of this name. Raises BadConfig for a name or a setting that there is not.

    Args:
        name: as tasks name it.
        settings: of `[worlds.harness.NAME]`.
    """
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
            raise BadConfig(f"worlds.harness: there is no harness {name!r}; there are {', '.join(HARNESSES)}")


def _read_settings(model: type[_C], name: str, settings: Mapping[str, Any]) -> _C:
    try:
        return model.model_validate(dict(settings))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in (name, *first["loc"]))
        raise BadConfig(f"worlds.harness.{where}: {first['msg']}") from error
