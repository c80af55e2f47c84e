"""A turn's answer, taken apart once for all behaviour rates. Pure, and linear in the text's length: the text is anybody's.

Nothing here is a regular expression: whoever writes to the model chooses part of what it answers, and none of it may cost more than
a look at each character.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from ostinato.core.records import Turn

LONGEST = 40_000  # characters of an answer that are looked at
MOST_CALLS = 64
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FENCES = ("```", "~~~")
_PATCH = ("diff --git ", "@@ ", "*** Begin Patch", "<<<<<<< SEARCH")
_HEADS = ("+++ ", "*** Update File: ", "*** Add File: ", "*** Delete File: ")
_PATHS = ("path", "file_path", "file", "filename", "target_file")

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
class WrittenCall:
    """A call of a tool, as it was written. Example: ``WrittenCall(name="bash", arguments={"command": "ls"})``"""

    name: str
    arguments: Mapping[str, Any]

    @property
    def path(self) -> str:
        """The file that it is about; "" if it names none."""
        return next((value for key in _PATHS if isinstance(value := self.arguments.get(key), str)), "")

    @property
    def written(self) -> str:
        """All text in its arguments' first level, one value a line."""
        return "\n".join(value for value in self.arguments.values() if isinstance(value, str))


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeBlock:
    """A fenced block; `language` is what the fence names, in lower case.

    Example: ``CodeBlock(language="python", lines=("x = 1",))``
    """

    language: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnText:
    """What a rate looks at: the recorded turn, and its text taken apart.

    `prose` is the text outside code and calls, a line each; `calls` are the well-formed tool calls, `edits` those that change a file, and
    `broken_calls` counts the others; `code` are the lines of all code, those that edits write included; `patched` are the files that a
    diff in the text names. `has_edit`: it offers or makes a change. `prompt` is the prompt's text where whoever watches can decode it.

    Example: ``take_apart(turn).prose == ("Here it is:", "Anything else?")``
    """

    turn: Turn
    text: str
    prose: tuple[str, ...]
    blocks: tuple[CodeBlock, ...]
    calls: tuple[WrittenCall, ...]
    edits: tuple[WrittenCall, ...]
    broken_calls: int
    code: tuple[str, ...]
    patched: tuple[str, ...]
    is_patch: bool
    has_edit: bool
    prompt: str | None


def take_apart(turn: Turn, prompt: str | None = None) -> TurnText:
    """Look at a turn's first 40,000 characters. Never raises, whatever the text."""
    text = turn.text[:LONGEST]
    calls, broken, rest = _tool_calls(text)
    lines = rest.splitlines()
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
        broken_calls=broken,
        code=(*code, *(line for call in edits for line in call.written.splitlines())),
        patched=tuple(_patched(lines)),
        is_patch=is_patch,
        has_edit=is_patch or bool(edits) or bool(code),
        prompt=prompt,
    )


def _tool_calls(text: str) -> tuple[list[WrittenCall], int, str]:
    """The well-formed calls, the number of others, and the text without any of them. A call without an end is broken."""
    calls: list[WrittenCall] = []
    rest: list[str] = []
    broken, at = 0, 0
    while len(calls) + broken < MOST_CALLS and (start := text.find(_OPEN, at)) >= 0:
        rest.append(text[at:start])
        end = text.find(_CLOSE, start)
        body = text[start + len(_OPEN) : end if end >= 0 else len(text)]
        call = _parsed(body) if end >= 0 else None
        if call is None:
            broken += 1
        else:
            calls.append(call)
        at = end + len(_CLOSE) if end >= 0 else len(text)
    rest.append(text[at:])
    return calls, broken, "".join(rest)


def _parsed(body: str) -> WrittenCall | None:
    """A JSON object with a name and arguments (an object, or one written as a string); None for anything else."""
    try:
        found = json.loads(body)
        arguments = found["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        name = found["name"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return WrittenCall(name=name, arguments=cast("dict[str, Any]", arguments))


def _fenced(lines: list[str]) -> tuple[list[str], list[CodeBlock]]:
    """Lines outside of fences, and the fenced blocks; a block that is never closed reaches to the end."""
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
