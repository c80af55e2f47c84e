"""A streaming parser of answers: splits an answer into text, reasoning and tool calls while it is sampled, without losing any of it.

How a model family writes reasoning and calls is declared in a response template, as defined by transformers. A tokenizer's own template
(`response_template` in its configuration) takes precedence; otherwise the family is recognised by marks in the chat template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import regex
from transformers.utils.chat_parsing.content_parsers import process_field
from transformers.utils.chat_parsing.response_templates import ResponseTemplateField, load_response_template

from ostinato.core.conversation import Piece, Tool, ToolCall, call_id
from ostinato.core.errors import BadConfig
from ostinato.core.records import MAX_PARSED_CALLS, ParsedCall
from ostinato.model.response_constraints import Wording

# ---------------------------------------------------------------- formats of model families


# ruff: noqa: RUF001  # DeepSeek delimits with characters that look like others


Json = dict[str, Any]
_END = re.compile(r"(^|\|)(\\Z|\$)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """The syntax of a model's answers: the regions for calls, reasoning and text, and their delimiters.

    `markers`: the control tokens among the delimiters, which decoding must show. `ending`: the regions that the end of the answer also
    closes. `ends`: the control tokens that end an answer, and a region with it, but are not shown. `wording`: the syntax of calls, for
    demanding them; None if unknown. `marks`: texts that begin a call; where no call region follows, the call is malformed. `opener`: a
    regular expression that matches in every call, which is forbidden where calls are; "" if unknown.

    Example: ``HERMES.calls[0].open_re.pattern == "<tool_call>"``
    """

    calls: tuple[ResponseTemplateField, ...]
    reasoning: tuple[ResponseTemplateField, ...]
    text: tuple[ResponseTemplateField, ...]
    markers: frozenset[str]
    ending: frozenset[str]
    ends: tuple[str, ...] = ()
    wording: Wording | None = None
    marks: tuple[str, ...] = ()
    opener: str = ""

    @property
    def openings(self) -> frozenset[str]:
        """The fixed texts with which tool calls begin."""
        return frozenset(self.marks).union(*(field.open_literals or () for field in self.calls))

    def opens_call(self, text: str) -> bool:
        """Return whether a tool call, or a malformed attempt at one, begins in the text."""
        opens = (field.open_re for field in self.calls)
        return any(mark in text for mark in self.marks) or any(found and found.search(text) for found in opens)


def format_for(
    chat_template: str,
    control: Collection[str],
    declared: object = None,
    ends: Collection[str] = (),
) -> Format:
    """Return the format of a model: the one that its tokenizer declares, if it can be streamed, else its family's, else Hermes.

    Args:
        chat_template: the model's chat template, by which its family is recognised.
        control: the tokenizer's control tokens.
        declared: the tokenizer's own response template.
        ends: the control tokens that end an answer.

    Raises:
        BadConfig: the tokenizer's declaration is not a response template.
    """
    family = next((family for family in _FAMILIES if all(mark in chat_template for mark in family.marks)), None)
    if declared is not None:
        if not isinstance(declared, Mapping):
            raise BadConfig("the tokenizer's response_template is invalid: it must be a JSON object")
        format = _compiled(dict(declared), control, ends, family)
        if not any(_holds_text(field) for field in (*format.calls, *format.reasoning, *format.text)):
            return format
    family = family or _HERMES
    return _compiled(family.template(thinks="<think>" in chat_template), control, ends, family)


def _holds_text(field: ResponseTemplateField) -> bool:
    """Return whether a region's opening pattern can begin in any text: all text would be held back, and rescanned for every token."""
    found = field.open_re.search("a word " * 20, partial=True)
    return found is not None and found.start() < 100


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """A model family, recognised by `marks` in its chat template. `fields`: the regions of its response template. `begins`: the text with
    which its calls begin, well-formed or not. `opener`: a regular expression that matches in every call.
    """

    marks: tuple[str, ...]
    fields: Json
    wording: Wording | None = None
    begins: str = ""
    opener: str = "<tool_call>"

    def template(self, *, thinks: bool) -> Json:
        own = {"reasoning_content": _THINK} if thinks and "reasoning_content" not in self.fields else {}
        return {"start_anchor": "assistant", "fields": {"content": {}, **own, **self.fields}}


def _compiled(
    spec: Json, control: Collection[str], ends: Collection[str] = (), family: _Family | None = None
) -> Format:
    try:
        load_response_template(spec)  # validates the unchanged template
        ending = {name: _without_end(field) for name, field in spec["fields"].items()}
        fields = load_response_template({**spec, "fields": ending}).fields.values()
    except (ValueError, TypeError) as error:
        raise BadConfig(f"the tokenizer's response_template is invalid: {error}") from error
    opened = [field for field in fields if field.open_re is not None]
    shown = [spec["fields"][field.name] for field in opened]
    delimiters = json.dumps(shown, ensure_ascii=False).replace("\\", "")
    calls = tuple(field for field in opened if field.name.startswith("tool_call"))
    reasoning = tuple(field for field in opened if field.name in ("reasoning_content", "reasoning", "thinking"))
    return Format(
        calls=calls,
        reasoning=reasoning,
        text=tuple(field for field in opened if field not in calls and field not in reasoning),
        markers=frozenset(token for token in control if token in delimiters),
        ending=frozenset(name for name in ending if ending[name] != spec["fields"][name] or not _closes(ending[name])),
        ends=tuple(token for token in ends if token in delimiters),
        wording=None if family is None else family.wording,
        marks=(family.begins,) if family is not None and family.begins else (),
        opener=_opener([spec["fields"][field.name] for field in calls]) if family is None else family.opener,
    )


def _opener(calls: Sequence[Json]) -> str:
    """Return a regular expression for the beginnings of a declared template's calls; "" if one of them begins with a pattern."""
    opens = [re.escape(field["open"]).replace("/", r"\/") for field in calls if isinstance(field.get("open"), str)]
    return "|".join(opens) if len(opens) == len(calls) else ""


def _without_end(field: Json) -> Json:
    """Remove the answer's end from a region's closing pattern: with it, the reader would not wait for the rest of a partial delimiter."""
    pattern = _END.sub("", field.get("close_pattern", ""))
    rest = {name: value for name, value in field.items() if name != "close_pattern"}
    return {**rest, "close_pattern": pattern} if pattern else rest


def _closes(field: Json) -> bool:
    return "close" in field or "close_pattern" in field


# ---------------------------------------------------------------- the families; all repetitions are bounded, for linear time

AFTER_CALLS = "after_calls"
"""A region that begins where a list of calls ends; recognised only after a call."""

_THINK: Json = {"open": "<think>", "close": "</think>"}
_CALL: Json = {"name": "{name}", "arguments": "{content}"}
_HERMES = _Family(
    marks=("<tool_call>",),
    fields={"tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True}},
    wording=Wording(call='<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>', several="\n"),
)
_QWEN_CODER = _Family(
    marks=("<tool_call>", "<function="),
    begins="<tool_call>",
    fields={
        "tool_calls": {
            "open_pattern": r"<tool_call>\s{0,9}<function=(?P<name>[^>\n]{1,256})>",
            "close_pattern": r"</function>\s{0,9}</tool_call>",
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>[^>\n]{1,256})>\n?(?P<value>(?:(?!<parameter=).)*?)\n?</parameter>"
            },
            "repeats": True,
            "transform": _CALL,
        }
    },
)
_GLM = _Family(
    marks=("<tool_call>", "<arg_key>"),
    begins="<tool_call>",
    fields={
        "tool_calls": {
            "open_pattern": r"<tool_call>\s{0,9}(?P<name>[^<\s]{1,256})\s{0,9}(?=<)",
            "close": "</tool_call>",
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<arg_key>(?P<key>[^<]{1,256})</arg_key>\s{0,9}<arg_value>(?P<value>(?:(?!<arg_value>).)*?)</arg_value>"
            },
            "repeats": True,
            "transform": _CALL,
        }
    },
)
_LLAMA = _Family(
    marks=("<|python_tag|>",),
    begins="<|python_tag|>",
    fields={
        "tool_calls": {
            "open_pattern": r'(?:<\|python_tag\|>\s{0,9})?(?=\{\s{0,9}"name"\s{0,9}:)',
            "close_pattern": r"\Z",
            "content": "json",
            "repeats": True,
        }
    },
    wording=Wording(call='{"name": "NAME", "parameters": ARGUMENTS}', several=None),
    opener=r'\{\s{0,9}"name"\s{0,9}:',
)
_LLAMA_UNTAGGED = replace(_LLAMA, marks=('{"name": function name, "parameters":',))
_MISTRAL = _Family(
    marks=("[TOOL_CALLS]",),
    begins="[TOOL_CALLS]",
    opener=r"\[TOOL_CALLS\]",
    fields={
        "tool_calls": {
            "open_pattern": r"\[TOOL_CALLS\]\s{0,9}(?=\[)",
            "close_pattern": r"\Z",
            "content": "json",
            "repeats": True,
        },
        "tool_calls_by_name": {
            "open_pattern": r"\[TOOL_CALLS\](?P<name>[^\[{\s]{1,256})(?:\[CALL_ID\][^\[]{0,64})?\[ARGS\]",
            "close_pattern": r"(?=\[TOOL_CALLS\])|\Z",
            "content": "json",
            "repeats": True,
            "transform": _CALL,
        },
    },
    wording=Wording(call='{"name": "NAME", "arguments": ARGUMENTS}', several=", ", calls=("[TOOL_CALLS][", "]")),
)
_MISTRAL_BY_NAME = replace(
    _MISTRAL, marks=("[TOOL_CALLS]", "[ARGS]"), wording=Wording(call="[TOOL_CALLS]NAME[ARGS]ARGUMENTS", several="")
)
_HARMONY_HEAD = r"(?:<\|start\|>assistant)?"
_HARMONY = _Family(
    marks=("<|channel|>", "<|message|>"),
    begins="to=functions.",
    opener=r"to=functions\.",
    fields={
        "reasoning_content": {
            "open_pattern": _HARMONY_HEAD + r"<\|channel\|>analysis<\|message\|>",
            "close_pattern": r"<\|end\|>|\Z",
            "content_args": {"strip": False},
        },
        "final": {
            "open_pattern": _HARMONY_HEAD + r"<\|channel\|>(?:final|commentary)<\|message\|>",
            "close_pattern": r"<\|end\|>|<\|return\|>|\Z",
        },
        "tool_calls": {
            "open_pattern": r"(?:<\|start\|>assistant)?(?:<\|channel\|>\w{1,32})?\s{0,9}to=functions\.(?P<name>[^\s<]{1,256})"
            r"(?:<\|channel\|>\w{1,32})?\s{0,9}(?:<\|constrain\|>\w{1,32}|json)?\s{0,9}<\|message\|>",
            "close_pattern": r"<\|call\|>|<\|end\|>|\Z",
            "content": "json",
            "repeats": True,
            "transform": _CALL,
        },
    },
    wording=Wording(
        call="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS",
        several=None,
        text="<|channel|>final<|message|>",
        thought=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    ),
)
_KIMI = _Family(
    marks=("<|tool_call_argument_begin|>",),
    begins="<|tool_call_begin|>",
    opener=r"<\|tool_call_begin\|>",
    fields={
        "tool_calls": {
            "open_pattern": r"(?:<\|tool_calls_section_begin\|>\s{0,9})?<\|tool_call_begin\|>\s{0,9}(?:functions\.)?"
            r"(?P<name>[^\s:<]{1,256})(?::\d+)?\s{0,9}<\|tool_call_argument_begin\|>",
            "close": "<|tool_call_end|>",
            "content": "json",
            "repeats": True,
            "transform": _CALL,
        },
        AFTER_CALLS: {"open": "<|tool_calls_section_end|>"},
    },
    wording=Wording(
        call="<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>",
        several=None,  # each call must have a number of its own
        calls=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
)
_DEEPSEEK = _Family(
    marks=("<｜tool▁calls▁begin｜>",),
    begins="<｜tool▁call▁begin｜>",
    opener="<｜tool▁call▁begin｜>",
    fields={
        "tool_calls": {
            "open_pattern": r"(?:<｜tool▁calls▁begin｜>\s{0,9})?<｜tool▁call▁begin｜>(?P<name>[^\s<]{1,256})<｜tool▁sep｜>",
            "close": "<｜tool▁call▁end｜>",
            "content": "json",
            "repeats": True,
            "transform": _CALL,
        },
        AFTER_CALLS: {"open": "<｜tool▁calls▁end｜>"},
    },
    wording=Wording(
        call="<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>",
        several="",
        calls=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
)
_DEEPSEEK_FENCED = _Family(
    marks=("<｜tool▁calls▁begin｜>", "```json"),
    begins="<｜tool▁call▁begin｜>",
    opener="<｜tool▁call▁begin｜>",
    fields={
        "tool_calls": {
            "open_pattern": r"(?:<｜tool▁calls▁begin｜>\s{0,9})?<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
            r"(?P<name>[^\s<]{1,256})\s{0,9}```json\n",
            "close_pattern": r"\n```\s{0,9}<｜tool▁call▁end｜>",
            "content": "json",
            "repeats": True,
            "transform": _CALL,
        },
        AFTER_CALLS: {"open": "<｜tool▁calls▁end｜>"},
    },
    wording=Wording(
        call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>",
        several="\n",
        calls=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
)
_FAMILIES = (
    _QWEN_CODER,
    _GLM,
    _KIMI,
    _DEEPSEEK_FENCED,
    _DEEPSEEK,
    _HARMONY,
    _MISTRAL_BY_NAME,
    _MISTRAL,
    _HERMES,
    _LLAMA,
    _LLAMA_UNTAGGED,
)

HERMES = _compiled(_HERMES.template(thinks=False), (), (), _HERMES)
"""Calls as <tool_call>{"name": ..., "arguments": {...}}</tool_call>, no reasoning."""


# ---------------------------------------------------------------- types of arguments


_KINDS: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}


def typed(values: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Convert argument values by their schema: parse each string that is JSON of an allowed type, unless the property may be a string.

    Example: ``typed({"limit": "5"}, {"properties": {"limit": {"type": "integer"}}}) == {"limit": 5}``
    """
    properties = schema.get("properties")
    wanted = properties if isinstance(properties, Mapping) else {}
    return {name: _value(value, _types(wanted.get(name))) for name, value in values.items()}


def _types(schema: Any) -> list[str]:
    """Return the JSON types that a property's schema allows."""
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


# ---------------------------------------------------------------- the reader


_CLOSING = "</function>"  # declared templates may leave it in a body beside the tags
_ARGUMENTS = ("arguments", "parameters")
_UNREADABLE = (ValueError, TypeError, KeyError, RecursionError, OverflowError)


class Reader:
    """Implements `core.seams.AnswerReader` for one format.

    Text and reasoning are returned as soon as they cannot begin a delimiter. A call is returned when its region is closed and holds a
    name and a JSON object. Any other call region is returned as text, exactly as sampled, and counts as a malformed call; so does the
    beginning of a call (`Format.marks`) outside regions. White space around calls and reasoning belongs to them. Without `tools`, nothing
    is a call.

    Args:
        format: the model's format.
        tools: the tools that may be called; their schemas type the arguments of formats without types.
        turn: the turn's id, from which the calls' ids are made.
        opening: the beginning of the answer that is part of the prompt, such as "<think>"; it is parsed but not returned.
    """

    def __init__(self, format: Format, *, tools: Sequence[Tool], turn: str, opening: str = "") -> None:
        self._format = format
        self._schemas = {tool.name: tool.parameters for tool in tools}
        self._turn = turn
        self._watched = (*format.reasoning, *format.text, *(format.calls if tools else ()))
        self._marks = format.marks if tools else ()
        self._fed = -len(opening)  # characters received
        self._buffer = ""  # text not yet parsed
        self._field: ResponseTemplateField | None = None  # the open region
        self._first = self._outside = _first_characters([field.open_literals for field in self._watched])
        self._captures: dict[str, str] = {}
        self._raw: list[str] = []  # the open region's text, its opening included
        self._body: list[str] = []
        self._space = ""  # white space after text: returned with the next text, dropped if a region follows
        self._skips = False  # drop white space, because a region precedes
        self._calls = 0
        self._begun = 0  # where the open region begins, in characters
        self._found: list[ParsedCall] = []
        self.feed(opening)

    def feed(self, text: str) -> list[Piece]:
        if not self._watched:
            return [Piece(text=text)] if text else []
        self._fed += len(text)
        if not self._buffer and self._first is not None and self._first.isdisjoint(text):  # fast path for most tokens
            return [*self._take(text)]
        self._buffer += text
        return [*self._read(last=False)]

    def finish(self) -> list[Piece]:
        pieces = [*self._ended(), *self._read(last=True)]
        field = self._field
        if field is not None and field in self._format.calls:
            ends = field.name in self._format.ending
            pieces += self._close(field, "") if ends else self._shown("".join(self._raw))
        reasons = field is not None and field in self._format.reasoning
        return [*pieces, Piece(text=self._space)] if self._space and not reasons else pieces

    def _ended(self) -> Iterator[Piece]:
        """Close a call whose closing delimiter is the answer's end token, which is not shown."""
        field = self._field
        if field is None or field not in self._format.calls or field.close_re is None:
            return
        for end in self._format.ends:
            match = field.close_re.search(self._buffer + end)
            if match is None or match.end() != len(self._buffer) + len(end) or match.start() > len(self._buffer):
                continue
            yield from self._take(self._buffer[: match.start()])
            delimiter, self._buffer = self._buffer[match.start() :], ""
            yield from self._close(field, delimiter)
            return

    def in_call(self) -> bool:
        return self._field in self._format.calls

    def parsed_calls(self, *, unfinished: bool = True) -> list[ParsedCall]:
        last = self._malformed(self._fed) if unfinished and self.in_call() else []
        return [*self._found, *last][:MAX_PARSED_CALLS]

    # ------------------------------------------------------------ regions

    def _read(self, *, last: bool) -> Iterator[Piece]:
        while True:
            found, certain = self._scan(last)
            upto = certain if found is None else found[1].start()
            self._look_for_marks(upto)
            yield from self._take(self._buffer[:upto])
            if found is None:
                self._buffer = self._buffer[upto:]
                return
            field, match = found
            begins = self._fed - len(self._buffer) + match.start()
            self._buffer = self._buffer[match.end() :]
            if self._field is None:
                self._begun = begins
                self._open(field, match)
                continue
            yield from self._close(field, match[0])
            if not match[0] and not self._buffer:
                return

    def _scan(self, last: bool) -> tuple[tuple[ResponseTemplateField, regex.Match[str]] | None, int]:
        """Return the first delimiter, if any, and the position before which the buffer holds no delimiter and no beginning of one."""
        best: tuple[ResponseTemplateField, regex.Match[str]] | None = None
        certain = len(self._buffer)
        for field in self._watched if self._field is None else (self._field,):
            if field.name == AFTER_CALLS and not self._calls:
                continue
            pattern = field.open_re if self._field is None else field.close_re
            match = None if pattern is None else pattern.search(self._buffer, partial=not last)
            if match is None:
                continue
            if not last and (match.partial or _may_grow(field, match, opens=self._field is None)):
                certain = min(certain, match.start())
            elif best is None or (match.start(), -match.end()) < (best[1].start(), -best[1].end()):
                best = field, match
        if best is not None and best[1].start() >= certain and certain < len(self._buffer):
            best = None
        return best, certain

    def _open(self, field: ResponseTemplateField, match: regex.Match[str]) -> None:
        self._field, self._first = field, _first_characters([field.close_literals])
        self._captures = {name: text for name, text in match.groupdict().items() if text is not None}
        self._raw, self._body = [match[0]], []
        if field not in self._format.calls:
            self._space, self._skips = "", True  # white space before the delimiter is dropped

    def _look_for_marks(self, upto: int) -> None:
        """Record marks in the buffer before `upto`, outside regions, as malformed calls: no region began at them."""
        for mark in self._marks if self._field is None else ():
            at = self._buffer.find(mark, 0, upto)
            while at >= 0 and len(self._found) < MAX_PARSED_CALLS:
                start = self._fed - len(self._buffer) + at
                self._note([ParsedCall(name="", start=start, end=start + len(mark))])
                at = self._buffer.find(mark, at + len(mark), upto)

    def _note(self, calls: list[ParsedCall]) -> None:
        self._found += calls[: MAX_PARSED_CALLS - len(self._found)]

    def _take(self, text: str) -> Iterator[Piece]:
        """Consume text of the open region, or text outside regions."""
        if not text:
            return
        if self._field in self._format.calls:
            self._raw.append(text)
            self._body.append(text)
        else:
            yield from self._shown(text)

    def _close(self, field: ResponseTemplateField, delimiter: str) -> Iterator[Piece]:
        self._field, self._first = None, self._outside
        if field not in self._format.calls:
            self._space, self._skips = "", True
            return
        calls = self._parsed(field)
        end = self._fed - len(self._buffer)
        if calls is None:
            self._note(self._malformed(end))
            yield from self._shown("".join(self._raw) + delimiter)
            return
        self._note([ParsedCall(name=call.name, start=self._begun, end=end) for call in calls])
        self._space, self._skips = "", True
        for call in calls:
            yield Piece(call=call)

    def _shown(self, text: str) -> list[Piece]:
        """Return text or reasoning, holding back trailing white space, which may belong to a following region."""
        if self._skips:
            text = text.lstrip()
            self._skips = not text
        bare = text.rstrip()
        if not bare:
            self._space += text
            return []
        shown, self._space = self._space + bare, text[len(bare) :]
        return [Piece(reasoning=shown) if self._field in self._format.reasoning else Piece(text=shown)]

    # ------------------------------------------------------------ calls

    def _parsed(self, field: ResponseTemplateField) -> list[ToolCall] | None:
        """Parse the calls of a closed region; None if its content is malformed or holds no call."""
        body = "".join(self._body)
        if field.content == "xml-inline":
            rest = regex.sub(field.content_args["tag_pattern"], "", body, flags=regex.DOTALL)
            if rest.strip() not in ("", _CLOSING):
                return None
        try:
            value = process_field(body, field, self._captures)
            values = value if isinstance(value, list) else [value]
            calls = [self._call(each, i, typeless=field.content != "json") for i, each in enumerate(values)]
        except _UNREADABLE:
            return None
        self._calls += len(calls)
        return calls or None

    def _malformed(self, end: int) -> list[ParsedCall]:
        """Return the open region as a malformed call; [] if it has no opening delimiter and names no arguments."""
        written = "".join(self._raw)
        called = self._raw[0] or any(f'"{name}"' in written for name in _ARGUMENTS)
        return [ParsedCall(name="", start=self._begun, end=end)] if called else []

    def _call(self, value: Any, place: int, *, typeless: bool) -> ToolCall:
        """Build a call from a parsed value. Raises one of `_UNREADABLE`."""
        call = value.get("function", value)
        name, values = call["name"], call[_ARGUMENTS[0] if _ARGUMENTS[0] in call else _ARGUMENTS[1]]
        if not isinstance(name, str) or not name.strip() or not isinstance(values, dict):
            raise TypeError
        name.encode()  # raises for a lone surrogate
        shaped = typed(values, self._schemas.get(name.strip(), {})) if typeless else values
        arguments = json.dumps(shaped, ensure_ascii=False, allow_nan=False)
        try:
            arguments.encode()
        except UnicodeEncodeError:  # a lone surrogate stays an escape sequence
            arguments = json.dumps(shaped, allow_nan=False)
        return ToolCall(id=call_id(self._turn, self._calls + place), name=name.strip(), arguments=arguments)


def _first_characters(literals: Sequence[Sequence[str] | None]) -> frozenset[str] | None:
    """Return the characters with which the delimiters may begin; None if unknown."""
    known = [text for texts in literals for text in texts or ("",)]
    return frozenset(text[0] for text in known) if all(known) else None


def _may_grow(field: ResponseTemplateField, match: regex.Match[str], *, opens: bool) -> bool:
    """Return whether more text could extend or invalidate a match at the buffer's end."""
    if match.end() != len(match.string):
        return False
    literals = field.open_literals if opens else field.close_literals
    extends = field.open_literal_can_extend if opens else field.close_literal_can_extend
    return match.start() == match.end() or literals is None or extends
