"""A turn's answer, parsed once for all behaviour rates. Pure, and linear in the text's length, since the text is untrusted.

No regular expressions are used: people who write to the model choose part of what it answers, and no text may cost more than a look
at each character.

Tool calls in an answer's text, as the families of models write them. Pure, and linear in the text's length. The gateway reads calls by
the format of the model that it serves. The monitors have texts of any model and look for the formats of all families at once, in a simple
way: a call is well-formed if it names a tool and its arguments can be read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from ostinato.core.lines import lines_of
from ostinato.core.records import Turn

# ---------------------------------------------------------------- written calls


# ruff: noqa: RUF001  # DeepSeek delimits with characters that look like others


MOST_CALLS = 64
_PATHS = ("path", "file_path", "file", "filename", "target_file")
# key's start and end, value's end
_TAGGED = (
    ("<parameter=", ">", "</parameter>"),
    ("<arg_key>", "</arg_key>", "</arg_value>"),
)
_LLAMA, _LLAMA_ARGUMENTS = '{"name":', '"parameters"'  # this format has no marker, so both are required


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenCall:
    """A tool call, as it was written. Example: ``WrittenCall(name="bash", arguments={"command": "ls"})``"""

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


class _Markup(NamedTuple):
    """The markers that begin and end a call; with `open` the answer's end ends it, too. `inside` separates its name from its arguments."""

    begins: str
    ends: tuple[str, ...]
    open: bool = False
    inside: str = ""


_MARKUPS = (
    _Markup("<tool_call>", ("</tool_call>",)),  # Hermes, Qwen, SmolLM; Qwen3-Coder; GLM
    _Markup("[TOOL_CALLS]", ("[TOOL_CALLS]",), open=True, inside="[ARGS]"),  # Mistral
    _Markup("to=functions.", ("<|call|>", "<|end|>"), open=True, inside="<|message|>"),  # gpt-oss
    _Markup("<|tool_call_begin|>", ("<|tool_call_end|>",), inside="<|tool_call_argument_begin|>"),  # Kimi
    _Markup("<｜tool▁call▁begin｜>", ("<｜tool▁call▁end｜>",), inside="<｜tool▁sep｜>"),  # DeepSeek
    _Markup("<|python_tag|>", (), open=True),  # Llama
)


def written_calls(text: str) -> tuple[list[WrittenCall], int, str]:
    """The well-formed calls, the number of broken ones, and the text without any of them. Calls after the first 64 stay text.

    A call without the end marker of its family is broken.

    Example: ``written_calls('Look. <tool_call>{"name": "ls", "arguments": {}}</tool_call>')[1:] == (0, "Look. ")``
    """
    calls: list[WrittenCall] = []
    rest: list[str] = []
    broken, at = 0, 0
    if text.lstrip().startswith(_LLAMA) and _LLAMA_ARGUMENTS in text:
        found = _by_json(text)
        return (found, 0, "") if found else ([], 1, "")
    for start, end, markup, whole in _regions(text):
        if len(calls) + broken >= MOST_CALLS:
            break
        rest.append(text[at:start])
        found = _read(text[start + len(markup.begins) : whole or len(text)], markup) if whole is not None else []
        calls += found
        broken += not found
        at = end
    rest.append(text[at:])
    return calls, broken, "".join(rest)


def _regions(text: str) -> Iterator[tuple[int, int, _Markup, int | None]]:
    """Start and end of each call's region, its markup, and where its content ends; None where the end marker is missing."""
    next_at = {markup: text.find(markup.begins) for markup in _MARKUPS}
    at = 0
    while True:
        for markup, place in next_at.items():
            if 0 <= place < at:
                next_at[markup] = text.find(markup.begins, at)
        found = [(place, markup) for markup, place in next_at.items() if place >= 0]
        if not found:
            return
        start, markup = min(found)
        begun = start + len(markup.begins)
        ends = [(place, mark) for mark in markup.ends if (place := text.find(mark, begun)) >= 0]
        if ends:
            place, mark = min(ends)
            at = place if mark == markup.begins else place + len(mark)
            yield start, at, markup, place
        else:
            at = len(text)
            yield start, at, markup, at if markup.open else None


def _read(body: str, markup: _Markup) -> list[WrittenCall]:
    """The calls of a region; none if it cannot be read."""
    name, found, arguments = body.partition(markup.inside) if markup.inside else ("", "", body)
    if found:
        return _named(name, arguments)
    bare = body.strip()
    if bare.startswith(("{", "[")):
        return _by_json(bare)
    if bare.startswith("<function="):
        name, _, rest = bare.removeprefix("<function=").partition(">")
        return _tagged(name, rest.removesuffix("</function>"))
    name, found, rest = bare.partition("<arg_key>")
    return _tagged(name, found + rest) if found else []


def _named(name: str, arguments: str) -> list[WrittenCall]:
    """A call whose name stands before its arguments, both stripped of what each family adds to them."""
    name = name.strip().removeprefix("functions.")
    if name == "function":  # DeepSeek R1: its name and its arguments in a fence
        name, _, arguments = arguments.partition("\n```json\n")
        arguments = arguments.strip().removesuffix("```")
    name = name.partition("<|")[0].partition("[CALL_ID]")[0].strip().partition(" ")[0]
    head, colon, number = name.rpartition(":")
    name = head if colon and number.isdecimal() else name
    return _by_json(json.dumps({"name": name}), arguments)


def _by_json(text: str, arguments: str | None = None) -> list[WrittenCall]:
    """An object with a name and arguments (an object, or one written as a string), or a list of such; none for anything else."""
    try:
        found = json.loads(text)
        calls = [_call(each, arguments) for each in (found if isinstance(found, list) else [found])]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []
    return calls


def _call(found: Any, arguments: str | None) -> WrittenCall:
    """Raises ValueError, KeyError, TypeError, RecursionError."""
    given = arguments if arguments is not None else found["arguments"] if "arguments" in found else found["parameters"]
    given = json.loads(given) if isinstance(given, str) else given
    if not isinstance(found["name"], str) or not found["name"] or not isinstance(given, dict):
        raise TypeError
    return WrittenCall(name=found["name"], arguments=cast("dict[str, Any]", given))


def _tagged(name: str, text: str) -> list[WrittenCall]:
    """A call whose arguments are tags; each is taken as text. No call if there is anything between the tags."""
    arguments: dict[str, str] = {}
    at = _bare(text, 0)
    while at < len(text):
        tags = next((tags for tags in _TAGGED if text.startswith(tags[0], at)), None)
        if tags is None:
            return []
        key = at + len(tags[0])
        keyed = text.find(tags[1], key)
        ended = text.find(tags[2], keyed + len(tags[1])) if keyed >= 0 else -1
        if ended < 0:
            return []
        value = text[keyed + len(tags[1]) : ended].strip().removeprefix("<arg_value>")
        arguments[text[key:keyed]] = value.strip()
        at = _bare(text, ended + len(tags[2]))
    return [WrittenCall(name=name.strip(), arguments=arguments)] if name.strip() else []


def _bare(text: str, at: int) -> int:
    """The first place from `at` on that is not white space."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at


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
