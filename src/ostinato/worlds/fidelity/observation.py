"""One observation of a machine or of a conversation, as a flat mapping of features. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from ostinato.core.errors import BadRequest

Feature = float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One observation. `group` names what makes several observations dependent, such as a machine or a task.

    `asked` is a hash of the question that opened an episode, the same for the same question; "" if there was none or it is unknown.

    Example: ``Observation(group="web-1", features={"cpu.count": 8.0, "kernel.system": "Linux", "tool:git": 1.0})``
    """

    group: str
    features: Mapping[str, Feature]
    asked: str = ""

    def line(self) -> str:
        """As a line of JSON."""
        asked = {"asked": self.asked} if self.asked else {}
        return json.dumps({"group": self.group, **asked, "features": dict(self.features)})


def parse_observation(line: str) -> Observation:
    """The inverse of `Observation.line`. Raises BadRequest."""
    try:
        found = json.loads(line)
        group, features, asked = found["group"], found["features"], found.get("asked", "")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadRequest(f'no observation: {error}; a line is {{"group": "...", "features": {{...}}}}') from error
    if not isinstance(group, str) or not isinstance(features, dict) or not isinstance(asked, str):
        raise BadRequest("no observation: `group` and `asked` are texts and `features` an object")
    kept: dict[str, Feature] = {}
    for name, value in cast("dict[str, Any]", features).items():
        if not isinstance(value, str | int | float):
            raise BadRequest(f"feature {name!r} is neither a number nor a text", field=name)
        kept[name] = value if isinstance(value, str) else float(value)
    return Observation(group=group, features=kept, asked=asked)
