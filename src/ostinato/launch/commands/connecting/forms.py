"""The formats of coding agents' settings, edited as text: JSON is merged, any other format gets a marked block of our lines.

Nothing here reads or writes a file. An edit that would harm the existing settings is refused with BadConfig.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from ostinato.core.errors import BadConfig
from ostinato.core.lines import lines_of

Json = dict[str, Any]

NAME = "Ostinato"
"""The name of our entry in a list of providers."""

_BLOCK = re.compile(
    r"^# >>> ostinato connect: (\w+) >>>\r?\n.*?^# <<< ostinato connect: \1 <<<(?:\r?\n|\Z)", re.MULTILINE | re.DOTALL
)
_MARKER = re.compile(r"# (>>>|<<<) ostinato connect: \w+ \1")
_INDENT = re.compile(r"^([ \t]+)\S", re.MULTILINE)
_YAML_LINE = re.compile(r"(---|[ \t#-].*|(['\"]?)([\w.-]+)\2[ \t]*:([ \t].*)?|)")
_ENV_LINE = re.compile(
    r"""\s*(\#.*|(export\s+)?[A-Za-z_][\w.-]*\s*(=\s*('[^']*'\s*(\#.*)?|"(\\.|[^"\\])*"\s*(\#.*)?|[^'"].*|))?)?"""
)


def merged_json(text: str | None, settings: Json) -> str:
    """A JSON file with these settings merged in; all others are kept. In a list, our own entry comes first, once.

    Args:
        text: the file's text; None: there is no file.
        settings: the settings to merge in.

    Raises:
        BadConfig: it is not a plain JSON object, names a key twice, or holds something else where an object or list is needed.
    """
    return edited_json(text, lambda there: _merged(there, settings, ""))


def edited_json(text: str | None, change: Callable[[Json], Json]) -> str:
    """A JSON file after `change`, with its layout kept where possible. Raises BadConfig as `merged_json` does."""
    mark, text = without_mark(text or "")
    there = _object(text) if text.strip() else {}
    new = change(there)
    if new == there and text.strip():
        return mark + text
    found = _INDENT.search(text)
    newline = "\r\n" if "\r\n" in text else "\n"
    written = json.dumps(new, indent=found[1] if found else 2, ensure_ascii=False)
    return mark + f"{written}\n".replace("\n", newline)


def without_mark(text: str) -> tuple[str, str]:
    """A text's byte order mark, with which some editors begin a file, and the rest."""
    return ("\ufeff", text[1:]) if text.startswith("\ufeff") else ("", text)


def _object(text: str) -> Json:
    try:
        value: object = json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise BadConfig(f"it is no plain JSON ({error}); mend it, and take out comments") from error
    if not isinstance(value, dict):
        raise BadConfig("it holds no JSON object; mend it")
    return cast(Json, value)


def _once(pairs: list[tuple[str, Any]]) -> Json:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name in found if sum(name == each for each, _ in pairs) > 1)
        raise ValueError(f"{twice!r} is there twice")
    return found


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _merged(there: Json, settings: Mapping[str, Any], where: str) -> Json:
    new = dict(there)
    for name, value in settings.items():
        old, place = there.get(name), f"{where}{name}"
        if isinstance(value, dict):
            if name in there and not isinstance(old, dict):
                raise BadConfig(f"{place} is no JSON object; mend it")
            new[name] = _merged(cast(Json, old or {}), cast(Json, value), f"{place}.")
        elif isinstance(value, list):
            if name in there and not isinstance(old, list):
                raise BadConfig(f"{place} is no JSON list; mend it")
            new[name] = [*cast(list[Any], value), *(each for each in cast(list[Any], old or []) if not _is_ours(each))]
        else:
            new[name] = value
    return new


def _is_ours(entry: object) -> bool:
    return isinstance(entry, dict) and cast(Json, entry).get("name") == NAME


def without_blocks(text: str) -> str:
    """A text without our marked blocks. Raises BadConfig for a marker without its counterpart."""
    left = _BLOCK.sub("", text)
    for line in lines_of(left):
        if _MARKER.fullmatch(line):
            raise BadConfig(f"it has the line {line!r} without its other end; take it out")
    return left


def with_block(text: str, name: str, lines: Sequence[str], *, first: bool = False) -> str:
    r"""A text with these lines between markers of this name, replacing the lines that were there. All else stays, byte for byte.

    Args:
        text: a file's text.
        name: one word that tells this block from others of ours.
        lines: the block's lines; empty: the block is removed.
        first: a new block is put before the text, not after it.

    Example: ``with_block("a = 1\n", "more", ["b = 2"])`` has ``b = 2`` between its markers at the end.
    """
    newline = "\r\n" if "\r\n" in text else "\n"
    marked = (f"# >>> ostinato connect: {name} >>>", *lines, f"# <<< ostinato connect: {name} <<<") if lines else ()
    block = "".join(f"{line}{newline}" for line in marked)
    for found in _BLOCK.finditer(text):
        if found[1] == name:
            return text[: found.start()] + block + text[found.end() :]
    if first:
        mark, rest = without_mark(text)
        return mark + block + rest
    return text + (newline if block and text and not text.endswith("\n") else "") + block


def toml_of(text: str) -> Json:
    """A TOML text's values. Raises BadConfig."""
    try:
        return tomllib.loads(without_mark(text)[1])
    except (ValueError, RecursionError) as error:
        raise BadConfig(f"it is no TOML ({error}); mend it") from error


def yaml_keys(text: str) -> dict[str, int]:
    """The top-level keys of a YAML mapping in block style, with their line numbers from 1. Raises BadConfig for any other YAML."""
    keys: dict[str, int] = {}
    for number, line in enumerate(lines_of(without_mark(text)[1]), 1):
        found = _YAML_LINE.fullmatch(line)
        if found is None or (line == "---" and keys):
            raise BadConfig(f"line {number} is not of the form 'name: value'; mend it")
        if found[3] is not None:
            keys[found[3]] = number
    return keys


def check_env(text: str) -> None:
    """Raise BadConfig unless every line is ``NAME=value``, a comment or empty: an open quote would swallow our lines."""
    for number, line in enumerate(lines_of(without_mark(text)[1]), 1):
        if _ENV_LINE.fullmatch(line) is None:
            raise BadConfig(f"line {number} is not of the form NAME=value on one line; mend it")


def quoted(text: str) -> str:
    """A JSON string, which TOML and YAML read too."""
    return json.dumps(text, ensure_ascii=False)
