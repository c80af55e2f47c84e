"""Limits on JSON schemas, beyond which compiling their grammars would cost too much. Pure.

The compiler itself is tried in a separate process (`model/grammars/trial.py`); schemas known to be expensive are refused before that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ostinato.core.errors import BadRequest

MOST_PATTERNS = 16  # of `patternProperties`: the time grows with their cube
MULTIPLES = (0.001, 1_000.0)  # of `multipleOf`: the memory grows with it


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raise BadRequest for a schema whose grammar would be too expensive to compile."""
    patterns = 0
    for node in _nodes(schema):
        if isinstance(node, Mapping):
            found = node.get("patternProperties")
            patterns += len(found) if isinstance(found, Mapping) else 0
            _check_multiple(node.get("multipleOf"))
    if patterns > MOST_PATTERNS:
        raise _too_much(f"{patterns} patternProperties, of which {MOST_PATTERNS} may be")


def _check_multiple(value: Any) -> None:
    least, most = MULTIPLES
    if isinstance(value, int | float) and not least <= value <= most:
        raise _too_much(f"a multipleOf of {value:g}; give {least:g} to {most:g}")


def _nodes(value: Any) -> Iterator[Any]:
    """All parts of a JSON value."""
    todo = [value]
    while todo:
        part = todo.pop()
        yield part
        if isinstance(part, Mapping):
            todo.extend(part.values())
        elif isinstance(part, list):
            todo.extend(part)


def _too_much(what: str) -> BadRequest:
    return BadRequest(f"The format, or the parameters of a tool that must be called, cannot be held to: it has {what}.")
