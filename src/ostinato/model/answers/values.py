"""Gives arguments the types in a tool's schema, for formats that write every value as text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_KINDS: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}


def typed(values: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """The values, with each text parsed if it is JSON of a type that its property's schema wants; otherwise it stays a text.

    Example: ``typed({"limit": "5"}, {"properties": {"limit": {"type": "integer"}}}) == {"limit": 5}``
    """
    properties = schema.get("properties")
    wanted = properties if isinstance(properties, Mapping) else {}
    return {name: _value(value, _types(wanted.get(name))) for name, value in values.items()}


def _types(schema: Any) -> list[str]:
    """The types that a property may have; "string" among them if it may be any text."""
    if not isinstance(schema, Mapping):
        return []
    declared = schema.get("type")
    types = [declared] if isinstance(declared, str) else [*declared] if isinstance(declared, list) else []
    for name in ("anyOf", "oneOf"):
        choices = schema.get(name)
        types += [type for choice in (choices if isinstance(choices, list) else []) for type in _types(choice)]
    return [type for type in types if isinstance(type, str)]


def _value(value: Any, types: list[str]) -> Any:
    if not isinstance(value, str) or "string" in types:
        return value
    text = {"True": "true", "False": "false", "None": "null"}.get(value.strip(), value)
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        return value
    if isinstance(read, float) and read.is_integer() and "integer" in types:
        read = int(read)
    fits = any(type(read) in _KINDS.get(name, ()) for name in types)
    return read if fits else value
