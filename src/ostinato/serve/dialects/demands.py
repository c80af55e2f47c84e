"""A request's constraints on its answer, common to all dialects: which tools must be called, or the schema of a JSON text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ostinato.core.conversation import Demand, Tool
from ostinato.core.errors import BadRequest
from ostinato.serve.dialects.omissions import Omissions

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
AUTO, NONE, REQUIRED = "auto", "none", "required"
_STRICT = "strict-tools"


def demanded(
    tools: Sequence[Tool],
    *,
    choice: str,
    named: str | None,
    several: bool,
    schema: Mapping[str, Any] | None,
    omissions: Omissions,
) -> Demand | None:
    """The constraint on the answer; None if it is free.

    Args:
        tools: the offered tools.
        choice: one of `AUTO`, `NONE` and `REQUIRED`.
        named: the single tool that must be called, if any.
        several: whether more than one call may be made.
        schema: JSON schema of the answer's text, if it is not a call.
        omissions: is told if tools are strict although the answer may be free text, where nothing is enforced.

    Raises:
        BadRequest: a call is required of a tool that is not offered.
    """
    names = tuple(tool.name for tool in tools)
    if named is not None:
        if named not in names:
            raise BadRequest(f"tool_choice names {named[:100]!r}, which is not among the tools.", field="tool_choice")
        return Demand(calls=(named,), several=False)
    if choice == REQUIRED:
        if not names:
            raise BadRequest("tool_choice demands a call, and there are no tools.", field="tool_choice")
        return Demand(calls=names, several=several)
    callable_names = names if choice == AUTO else ()
    if schema is not None:
        return Demand(schema=schema, calls=callable_names, several=several)
    if any(tool.strict for tool in tools) and callable_names:
        omissions.add(_STRICT)
    return None
