"""The hash of a harness: the one place where it is made, so that serving, training and evaluation say the same of the same program."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from blake3 import blake3

from ostinato.core.conversation import Tool
from ostinato.core.errors import BadConfig

HEADER = "X-Ostinato-Harness"


def harness_hash(name: str, *, version: int, decides: Mapping[str, Any], tools: Sequence[Tool] = ()) -> str:
    """BLAKE3, 64 hexadecimal digits, of all that decides what the model sees: name, version, settings and texts, and tools in their order.

    The order of keys does not matter. Raises BadConfig for what is not made of JSON's types.

    Example: ``harness_hash("tools", version=1, decides={"output_characters": 8000}, tools=TOOLS)``
    """
    shown = [[tool.name, tool.description, tool.parameters, tool.strict] for tool in tools]
    whole = {"name": name, "version": version, "decides": dict(decides), "tools": shown}
    try:
        text = json.dumps(whole, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BadConfig(f"harness {name!r}: {error}; what decides must be made of JSON's types") from error
    return blake3(text.encode()).hexdigest()
