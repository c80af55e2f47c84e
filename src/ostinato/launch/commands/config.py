"""`ostinato config`: lists every configuration key, from the tree that validates them."""

from __future__ import annotations

import json
import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ostinato.config import Config, keys, nearest, origins
from ostinato.core.errors import NotFound
from ostinato.launch.views.screen import bare_table

# ---------------------------------------------------------------- the keys


_NAMES = {str: "text", bool: "true or false", Path: "path", SecretStr: "secret", type(None): "null"}
_SIGNS = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A configuration key. `default` and `value` are JSON types; `origin` is a file name, "--set", or "" for a default."""

    name: str
    kind: str
    default: Any
    value: Any
    origin: str
    meaning: str


def listed(config: Config, origins: Mapping[str, str]) -> list[Key]:
    """Return every key in the order of the tree. `origins` maps each key that was set to where it was set."""
    values, defaults = config.model_dump(mode="json"), Config().model_dump(mode="json")
    return [
        Key(
            name=name,
            kind=kind_of(field),
            default=_at(defaults, name),
            value=_at(values, name),
            origin=next((origin for key, origin in origins.items() if f"{key}.".startswith(f"{name}.")), ""),
            meaning=field.description or "",
        )
        for name, field in keys(Config)
    ]


def kind_of(field: FieldInfo) -> str:
    """Return a field's type in words. Example: "int >= 1", "'exact' or 'fast'", "list of text"."""
    bounds = [
        f"{sign} {value:g}"
        for name, sign in _SIGNS
        for part in field.metadata
        if (value := getattr(part, name, None)) is not None
    ]
    return " ".join([_words(field.annotation), ", ".join(bounds)]).strip()


def _words(kind: Any) -> str:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _words(parts[0])
    if origin is Literal:
        return " or ".join(repr(part) for part in parts)
    if origin in (Union, types.UnionType):
        return " or ".join(_words(part) for part in parts)
    if origin in (tuple, list):
        return f"list of {_words(parts[0])}"
    if origin is dict or kind is dict:
        return "table"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " or ".join(repr(each.value) for each in kind)
    return _NAMES.get(kind, getattr(kind, "__name__", str(kind)))


def table(found: list[Key]) -> Table:
    """Return a table with a row per key, for a wide terminal. Values other than the default are bold; "from" is their origin."""
    drawn = bare_table()
    for name in ("key", "type", "default", "value", "from", "meaning"):
        drawn.add_column(name, overflow="fold", no_wrap=name == "key")
    for key in found:
        set_here = "bold" if key.value != key.default else ""
        cells = (key.name, key.kind, shown(key.default), shown(key.value), key.origin, key.meaning)
        drawn.add_row(*map(Text, cells, (set_here, "", "dim", set_here, "", "")))
    return drawn


def blocks(found: list[Key]) -> Text:
    """Return a few lines per key, for a narrow terminal."""
    text = Text()
    for key in found:
        differs = key.value != key.default
        text.append(f"{key.name} = {shown(key.value)}", "bold" if differs else "")
        text.append(f"  {key.kind}", "dim")
        text.append(f"  (default {shown(key.default)})" if differs else "", "dim")
        text.append(f"  from {key.origin}\n" if key.origin else "\n", "dim")
        text.append(f"    {key.meaning}\n")
    return text


def shown(value: Any) -> str:
    """Return a value roughly as it would be written in TOML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return repr(value)
    if isinstance(value, dict) and value:
        entries = cast("dict[str, Any]", value).items()
        return f"{{ {', '.join(f'{key} = {shown(each)}' for key, each in entries if each not in (None, [], {}))} }}"
    if isinstance(value, list) and any(isinstance(each, dict) for each in cast("list[Any]", value)):
        lines = "".join(f"  {shown(each)},\n" for each in cast("list[Any]", value))
        return f"[\n{lines}]"
    return str(value)


def _at(tree: Mapping[str, Any], name: str) -> Any:
    value: Any = tree
    for part in name.split("."):
        value = value[part]
    return value


# ---------------------------------------------------------------- the command


WIDE = 140  # columns


def list_keys(
    config: Config, path: Path | None, overrides: Sequence[str], prefix: str, console: Console, *, as_json: bool
) -> None:
    """Print the keys below `prefix`. Raises NotFound with the most similar key or section if there are none."""
    every = listed(config, origins(path, overrides))
    found = [key for key in every if f"{key.name}.".startswith(f"{prefix}." if prefix else "")]
    if not found:
        names = {key.name.rpartition(".")[0] for key in every} | {key.name for key in every}
        close = nearest(prefix, sorted(names))
        known = f"did you mean {close!r}?" if close else f"sections: {', '.join(Config.model_fields)}"
        raise NotFound(f"no key or section {prefix!r}; {known}")
    if as_json:
        console.print_json(json.dumps([asdict(key) for key in found]))
    else:
        console.print(table(found) if console.width >= WIDE else blocks(found))
