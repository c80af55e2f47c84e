"""A turn's answer, parsed once for all behaviour rates. Pure, and linear in the text's length, since the text is untrusted.

No regular expressions are used: people who write to the model choose part of what it answers, and no text may cost more than a look
at each character.
"""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.core.lines import lines_of
from ostinato.core.records import Turn
from ostinato.release.monitors.written_calls import WrittenCall, written_calls

LONGEST = 40_000  # characters of an answer that are looked at
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
    """The input of a rate: the recorded turn, and its parsed text.

    `prose` are the lines of text outside code and calls; `calls` are the well-formed tool calls, `edits` those that change a file, and
    `broken_calls` counts the malformed ones; `code` are the lines of all code, those that edits write included; `patched` are the files
    that a diff in the text names. `has_edit`: it offers or makes a change. `prompt` is the prompt's text, if the watcher can decode it.

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
    """Parse a turn's first 40,000 characters. Never raises, whatever the text."""
    text = turn.text[:LONGEST]
    calls, broken, rest = written_calls(text)
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
        broken_calls=broken,
        code=(*code, *(line for call in edits for line in lines_of(call.written))),
        patched=tuple(_patched(lines)),
        is_patch=is_patch,
        has_edit=is_patch or bool(edits) or bool(code),
        prompt=prompt,
    )


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
