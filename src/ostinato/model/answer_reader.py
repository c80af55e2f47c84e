"""Splits one answer into text, reasoning and calls while it is sampled, without losing any of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import regex
from transformers.utils.chat_parsing.content_parsers import process_field
from transformers.utils.chat_parsing.response_templates import ResponseTemplateField

from ostinato.core.conversation import Piece, Tool, ToolCall, call_id
from ostinato.core.records import MAX_PARSED_CALLS, ParsedCall
from ostinato.model.answer_formats import AFTER_CALLS, Format

# ---------------------------------------------------------------- values


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


# ---------------------------------------------------------------- the reader


_CLOSING = "</function>"  # what declared templates leave in a body besides its tags
_ARGUMENTS = ("arguments", "parameters")
_UNREADABLE = (ValueError, TypeError, KeyError, RecursionError, OverflowError)


class Reader:
    """The core AnswerReader for one format.

    Text and reasoning are returned as soon as they cannot begin a delimiter. A call is returned when its region is closed and holds a
    name and a JSON object; any other such region is returned as it was sampled, delimiters included, and counts as a malformed call. So
    does the beginning of a call (`Format.marks`) outside of regions. White space around calls and reasoning belongs to them. Without
    `tools` nothing is a call.

    Args:
        format: the model's.
        tools: the tools that may be called; their schemas give types to the arguments of formats that have none.
        turn: the turn's id, which the calls' ids name.
        opening: the beginning of the answer that is in the prompt, such as "<think>"; it is read but not returned.
    """

    def __init__(self, format: Format, *, tools: Sequence[Tool], turn: str, opening: str = "") -> None:
        self._format = format
        self._schemas = {tool.name: tool.parameters for tool in tools}
        self._turn = turn
        self._watched = (*format.reasoning, *format.text, *(format.calls if tools else ()))
        self._marks = format.marks if tools else ()
        self._fed = -len(opening)  # characters
        self._buffer = ""  # not yet read
        self._field: ResponseTemplateField | None = None  # the open region
        self._first = self._outside = _first_characters([field.open_literals for field in self._watched])
        self._captures: dict[str, str] = {}
        self._raw: list[str] = []  # of the open region, its opening included
        self._body: list[str] = []
        self._space = ""  # after text: shown with the text that follows, unless a region follows
        self._skips = False  # whether white space is dropped, after a region
        self._calls = 0
        self._begun = 0  # where the open region begins
        self._found: list[ParsedCall] = []
        self.feed(opening)

    def feed(self, text: str) -> list[Piece]:
        if not self._watched:
            return [Piece(text=text)] if text else []
        self._fed += len(text)
        if not self._buffer and self._first is not None and self._first.isdisjoint(text):  # most tokens
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
        """The first delimiter, and the position up to which the buffer holds neither a delimiter nor the beginning of one."""
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
            self._space, self._skips = "", True  # white space after text is dropped with the delimiter

    def _look_for_marks(self, upto: int) -> None:
        """Note the beginnings of calls in the buffer's text before `upto`, if it is outside of regions: no region begins with them."""
        for mark in self._marks if self._field is None else ():
            at = self._buffer.find(mark, 0, upto)
            while at >= 0 and len(self._found) < MAX_PARSED_CALLS:
                start = self._fed - len(self._buffer) + at
                self._note([ParsedCall(name="", start=start, end=start + len(mark))])
                at = self._buffer.find(mark, at + len(mark), upto)

    def _note(self, calls: list[ParsedCall]) -> None:
        self._found += calls[: MAX_PARSED_CALLS - len(self._found)]

    def _take(self, text: str) -> Iterator[Piece]:
        """Take text of the open region, or text outside regions."""
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
        """Text or reasoning without its trailing white space, which may belong to what follows."""
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
        """The calls of a closed region; None if its content is malformed or holds no call."""
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
        """The open region as a malformed call. Without a delimiter it may be any JSON, and is a call only if it has arguments."""
        written = "".join(self._raw)
        called = self._raw[0] or any(f'"{name}"' in written for name in _ARGUMENTS)
        return [ParsedCall(name="", start=self._begun, end=end)] if called else []

    def _call(self, value: Any, place: int, *, typeless: bool) -> ToolCall:
        """Raises one of _UNREADABLE."""
        call = value.get("function", value)
        name, values = call["name"], call[_ARGUMENTS[0] if _ARGUMENTS[0] in call else _ARGUMENTS[1]]
        if not isinstance(name, str) or not name.strip() or not isinstance(values, dict):
            raise TypeError
        name.encode()  # a name with half a surrogate pair is invalid
        shaped = typed(values, self._schemas.get(name.strip(), {})) if typeless else values
        arguments = json.dumps(shaped, ensure_ascii=False, allow_nan=False)
        try:
            arguments.encode()
        except UnicodeEncodeError:  # half a surrogate pair stays an escape
            arguments = json.dumps(shaped, allow_nan=False)
        return ToolCall(id=call_id(self._turn, self._calls + place), name=name.strip(), arguments=arguments)


def _first_characters(literals: Sequence[Sequence[str] | None]) -> frozenset[str] | None:
    """The characters that the delimiters may begin with; None if unknown."""
    found = [text for texts in literals for text in texts or ("",)]
    return frozenset(text[0] for text in found) if all(found) else None


def _may_grow(field: ResponseTemplateField, match: regex.Match[str], *, opens: bool) -> bool:
    """True if more text could make a match at the buffer's end longer, or invalid."""
    if match.end() != len(match.string):
        return False
    literals = field.open_literals if opens else field.close_literals
    extends = field.open_literal_can_extend if opens else field.close_literal_can_extend
    return match.start() == match.end() or literals is None or extends
