"""What a JSON schema may ask of the compiler of grammars, which recurses without a bound of its own and never gives up. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ostinato.core.errors import BadRequest

MOST_STEPS = 64  # from one `$ref` to the next: thousands of them overflow the compiler's stack, which ends the process
MOST_PATTERNS = 16  # of `patternProperties`: the time grows with their cube
MULTIPLES = (0.001, 1_000.0)  # of `multipleOf`: the memory grows with it


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raise BadRequest for a schema whose grammar would cost too much to make."""
    try:
        patterns = 0
        for node in _nodes(schema):
            if isinstance(node, Mapping):
                found = node.get("patternProperties")
                patterns += len(found) if isinstance(found, Mapping) else 0
                _check_multiple(node.get("multipleOf"))
        if patterns > MOST_PATTERNS:
            raise _too_much(f"{patterns} patternProperties, of which {MOST_PATTERNS} may be")
        _steps(schema, schema, {}, ())
    except RecursionError:
        raise _too_much("parts that are nested too deeply") from None


def _check_multiple(value: Any) -> None:
    least, most = MULTIPLES
    if isinstance(value, int | float) and not least <= value <= most:
        raise _too_much(f"a multipleOf of {value:g}; give {least:g} to {most:g}")


def _steps(root: Any, part: Any, known: dict[str, int], path: tuple[str, ...]) -> int:
    """How many references lead on from here, one behind the other, at most; circles are gone through once."""
    longest = 0
    for node in _nodes(part):
        pointer = node.get("$ref") if isinstance(node, Mapping) else None
        if not isinstance(pointer, str) or pointer in path:
            continue
        if pointer not in known:
            if len(path) >= MOST_STEPS:
                raise _too_much(f"references that lead from one to the next more than {MOST_STEPS} times")
            known[pointer] = _steps(root, _at(root, pointer), known, (*path, pointer))
        longest = max(longest, 1 + known[pointer])
    if len(path) + longest > MOST_STEPS:
        raise _too_much(f"references that lead from one to the next more than {MOST_STEPS} times")
    return longest


def _at(root: Any, pointer: str) -> Any:
    """What a pointer within the schema names; None if nothing."""
    part = root
    for name in pointer.removeprefix("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(part, Mapping):
            part = part.get(name)
        elif isinstance(part, list) and name.isdigit() and int(name) < len(part):
            part = part[int(name)]
        else:
            return None
    return part


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
