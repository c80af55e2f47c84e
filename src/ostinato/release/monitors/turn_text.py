"""Parses a turn's answer once for all behaviour rates. Pure, and linear in the text's length, since the text is untrusted.

No regular expressions are used: people who write to the model influence what it answers, and no text may cost more than one look at each
character.

The gateway has stored with the turn which tool calls an answer makes, and where (`Turn.calls`), as it parsed them for the client. Only
their arguments are parsed here, from their place in the text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ostinato.core.lines import lines_of
from ostinato.core.records import ParsedCall, Turn

# ---------------------------------------------------------------- calls


_PATHS = ("path", "file_path", "file", "filename", "target_file")
_TAGGED = (  # key's start and end, value's end
    ("<parameter=", ">", "</parameter>"),
    ("<arg_key>", "</arg_key>", "</arg_value>"),
)
_JSON = json.JSONDecoder()


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenCall:
    """A tool call as it was written. Example: ``WrittenCall(name="bash", arguments={"command": "ls"})``"""

    name: str
    arguments: Mapping[str, Any]

    @property
    def path(self) -> str:
        """The file that the call is about; "" if it names none."""
        return next((value for key in _PATHS if isinstance(value := self.arguments.get(key), str)), "")

    @property
    def written(self) -> str:
        """All text on the first level of its arguments, one value per line."""
        return "\n".join(value for value in self.arguments.values() if isinstance(value, str))


def _written_calls(text: str, parsed: Iterable[ParsedCall]) -> tuple[list[WrittenCall], str]:
    """Return the well-formed calls with their arguments, and the text without any call. Several calls in one place form a list."""
    calls: list[WrittenCall] = []
    rest: list[str] = []
    at = 0
    for (start, end), group in groupby(parsed, key=lambda call: (call.start, call.end)):
        rest.append(text[at:start])
        at = max(at, end)
        names = [call.name for call in group if call.name]
        if names:
            calls += _with_arguments(names, text[start:end])
    return calls, "".join((*rest, text[at:]))


def _with_arguments(names: list[str], region: str) -> list[WrittenCall]:
    """Return a region's calls. Arguments that cannot be parsed count as none, as when only part of the region is looked at."""
    tags = min((tags for tags in _TAGGED if tags[0] in region), key=lambda tags: region.find(tags[0]), default=None)
    if tags is not None and tags[0] in region.partition("{")[0]:
        first = WrittenCall(name=names[0], arguments=_tagged(region, *tags))
        return [first, *(WrittenCall(name=name, arguments={}) for name in names[1:])]
    found = _objects(region)
    found += [{}] * (len(names) - len(found))
    return [WrittenCall(name=name, arguments=_arguments(name, each)) for name, each in zip(names, found, strict=False)]


def _objects(region: str) -> list[dict[str, Any]]:
    """Return the JSON objects in a region, up to the first that cannot be parsed."""
    found: list[dict[str, Any]] = []
    at = region.find("{")
    while at >= 0:
        try:
            value, at = _JSON.raw_decode(region, at)
        except (ValueError, RecursionError):
            break
        found.append(value)
        at = region.find("{", at)
    return found


def _arguments(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call in an object that names it, or the object itself if the name stands before it."""
    call = found.get("function", found)
    if not isinstance(call, dict) or str(call.get("name")).strip() != name:
        return found
    arguments = call.get("arguments", call.get("parameters"))
    return arguments if isinstance(arguments, dict) else found


def _tagged(region: str, opening: str, keyed: str, closing: str) -> dict[str, Any]:
    """Return arguments written in tags, each as text."""
    arguments: dict[str, Any] = {}
    for pair in region.split(opening)[1:]:
        key, _, value = pair.partition(keyed)
        arguments[key] = value.partition(closing)[0].strip().removeprefix("<arg_value>").strip()
    return arguments


# ---------------------------------------------------------------- the text


LONGEST = 40_000  # characters of an answer that are parsed
_FENCES = ("```", "~~~")
_PATCH = ("diff --git ", "@@ ", "*** Begin Patch", "<<<<<<< SEARCH")
_HEADS = ("+++ ", "*** Update File: ", "*** Add File: ", "*** Delete File: ")

SHELLS = frozenset(
    {"bash", "cmd", "exec", "exec_command", "execute_command", "run_command", "run_shell_command", "run_terminal_cmd"}
    | {"sh", "shell", "terminal"}
)
"""Names of tools that run a command line."""

EDITORS = frozenset(
    {"apply_patch", "create_file", "edit", "edit_file", "insert", "multi_edit", "replace", "search_replace"}
    | {"str_replace", "str_replace_based_edit_tool", "str_replace_editor", "write", "write_file"}
)
"""Names of tools that change a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeBlock:
    """A fenced block; `language` is what the fence names, in lower case.

    Example: ``CodeBlock(language="python", lines=("x = 1",))``
    """

    language: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnText:
    """The input of a rate: the recorded turn and its parsed text.

    Attributes:
        prose: the lines of text outside code and calls.
        calls: the well-formed tool calls.
        edits: those of the calls that change a file.
        broken_calls: the number of malformed calls.
        knows_calls: the tool calls are known; if not, they are part of the prose.
        code: the lines of all code, including what edits write.
        patched: the files that a diff in the text names.
        has_edit: the answer offers or makes a change.

    Example: ``take_apart(turn).prose == ("Here it is:", "Anything else?")``
    """

    turn: Turn
    text: str
    prose: tuple[str, ...]
    blocks: tuple[CodeBlock, ...]
    calls: tuple[WrittenCall, ...]
    edits: tuple[WrittenCall, ...]
    broken_calls: int
    knows_calls: bool
    code: tuple[str, ...]
    patched: tuple[str, ...]
    is_patch: bool
    has_edit: bool


def take_apart(turn: Turn) -> TurnText:
    """Parse a turn's first 40,000 characters. Never raises, whatever the text."""
    text, parsed = turn.text[:LONGEST], turn.calls or ()
    calls, rest = _written_calls(text, parsed)
    lines = lines_of(rest)
    prose, blocks = _fenced(lines)
    edits = tuple(call for call in calls if call.name in EDITORS)
    is_patch = any(line.startswith(_PATCH) for line in lines)
    code = [line for block in blocks for line in block.lines]
    return TurnText(
        turn=turn,
        text=text,
        prose=tuple(prose),
        blocks=tuple(blocks),
        calls=tuple(calls),
        edits=edits,
        broken_calls=sum(not call.name for call in parsed),
        knows_calls=turn.calls is not None,
        code=(*code, *(line for call in edits for line in lines_of(call.written))),
        patched=tuple(_patched(lines)),
        is_patch=is_patch,
        has_edit=is_patch or bool(edits) or bool(code),
    )


def _fenced(lines: list[str]) -> tuple[list[str], list[CodeBlock]]:
    """Return the lines outside fences, and the fenced blocks. A block that is never closed reaches to the end."""
    prose: list[str] = []
    blocks: list[CodeBlock] = []
    fence, language, inside = "", "", list[str]()
    for line in lines:
        start = line.lstrip()[:3]
        if not fence and start in _FENCES:
            fence, language, inside = start, line.strip(" `~\t").casefold()[:32], []
        elif fence and start == fence:
            blocks.append(CodeBlock(language=language, lines=tuple(inside)))
            fence = ""
        else:
            (inside if fence else prose).append(line)
    if fence:
        blocks.append(CodeBlock(language=language, lines=tuple(inside)))
    return prose, blocks


def _patched(lines: list[str]) -> list[str]:
    named = (line for line in lines if line.startswith(_HEADS))
    return [line[len(next(head for head in _HEADS if line.startswith(head))) :].strip() for line in named]
