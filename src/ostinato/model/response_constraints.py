"""Constrained decoding: translates a demand on an answer into a grammar in llguidance's Lark dialect.

A demand is JSON that follows a schema, tool calls in the model's own format (`Wording`), or any text without a call. A reasoning model may
think first.

JSON schemas that are known to be too expensive to compile are refused here. All other grammars are tried in a separate process
(`model/grammars.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ostinato.core.conversation import Conversation, Demand, Tool
from ostinato.core.errors import BadRequest

# ---------------------------------------------------------------- limits on schemas


MAX_PATTERNS = 16  # `patternProperties`: compile time grows with the cube of their number
MULTIPLES = (0.001, 1_000.0)  # range of `multipleOf`: compile memory grows with it


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raise BadRequest for a schema whose grammar would be too expensive to compile."""
    patterns = 0
    for node in _nodes(schema):
        if isinstance(node, Mapping):
            found = node.get("patternProperties")
            patterns += len(found) if isinstance(found, Mapping) else 0
            _check_multiple(node.get("multipleOf"))
    if patterns > MAX_PATTERNS:
        raise _too_expensive(f"{patterns} patternProperties; send {MAX_PATTERNS} at most")


def _check_multiple(value: Any) -> None:
    least, most = MULTIPLES
    if isinstance(value, int | float) and not least <= value <= most:
        # an integer may be too large for a float, so its text is cut
        raise _too_expensive(f"a multipleOf of {str(value)[:20]}; give {least:g} to {most:g}")


def _nodes(value: Any) -> Iterator[Any]:
    """Yield all parts of a JSON value, itself included."""
    todo = [value]
    while todo:
        part = todo.pop()
        yield part
        if isinstance(part, Mapping):
            todo.extend(part.values())
        elif isinstance(part, list):
            todo.extend(part)


def _too_expensive(what: str) -> BadRequest:
    return BadRequest(
        f"The format, or the parameters of a tool that must be called, cannot be enforced: it has {what}."
    )


# ---------------------------------------------------------------- constraints


_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""JSON on one line: with free white space allowed, some models generate nothing but white space."""
_GAP = r"SPACE: /\s{0,4}/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    r"""The syntax in which a family of models writes tool calls: `calls` encloses all calls, `call` is one call with NAME and ARGUMENTS.

    `several` separates two calls; None: the model can only make one. `text` precedes an answer's text. `thought` encloses the reasoning
    of a reasoning model.

    Example: ``Wording(call='<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>', several="\n")``
    """

    call: str
    several: str | None
    calls: tuple[str, str] = ("", "")
    text: str = ""
    thought: tuple[str, str] = ("<think>", "</think>")


def grammar_of(
    conversation: Conversation,
    wording: Wording | None,
    control: Mapping[str, int],
    *,
    thinks: bool,
    opening: str,
    opener: str = "",
) -> str:
    """Return the grammar of a conversation's demand on its answer; "" if there is no demand.

    Args:
        conversation: the conversation, with its demand.
        wording: the syntax of the model's calls; None if unknown.
        control: the tokenizer's control tokens, which the grammar names by id.
        thinks: the model may reason before it answers.
        opening: the text with which the template begins the answer.
        opener: a regular expression that matches in every call, "" if unknown; a demand without calls forbids text that matches it.

    Raises:
        BadRequest: this model cannot be made to follow the demand.
    """
    demand = conversation.demand
    if demand is None:
        return ""
    if wording is None and demand.calls:
        raise BadRequest(
            "this model cannot be made to call a tool: how it writes calls is not known well enough; send 'auto'",
            field="tool_choice",
        )
    if conversation.continued and (demand.schema is not None or demand.calls):
        raise BadRequest(
            "an answer that continues a message cannot be constrained; demand no format and no call", field="messages"
        )
    for schema in (demand.schema, *(tool.parameters for tool in conversation.tools if tool.name in demand.calls)):
        if schema is not None:
            check_schema(schema)
    lark = _Lark(wording or Wording(call="", several=None), control)
    return lark.rules(demand, conversation.tools, thinks=thinks, opening=opening, opener=opener)


class _Lark:
    """Writes grammar rules in the syntax of one model."""

    def __init__(self, wording: Wording, control: Mapping[str, int]) -> None:
        self._wording, self._control = wording, control
        longest_first = sorted(control, key=len, reverse=True)
        self._token = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def rules(self, demand: Demand, tools: Sequence[Tool], *, thinks: bool, opening: str, opener: str) -> str:
        begin, end = self._wording.thought
        begun = begin in opening
        thought = "thought" if begun else f"({self._literal(begin)} thought)?" if thinks else ""
        answers: list[str] = []
        rules: list[str] = []
        if demand.schema is not None:
            answers.append(_row(self._literal(self._wording.text), "value"))
            rules.append(f"value: {_json(demand.schema)}")
        if demand.calls:
            answers.append("calls")
            rules += self._calls([tool for tool in tools if tool.name in demand.calls], several=demand.several)
        if not answers:
            answers.append(_row(self._literal(self._wording.text), "PLAIN"))
            rules.append(f"PLAIN: ~/(.|\\n)*({opener})(.|\\n)*/" if opener else "PLAIN: /(.|\\n)*/")
        rules += self._thought(end) if thought else []
        return "\n".join([_row("start:", thought, "answer"), f"answer: {' | '.join(answers)}", *rules])

    def _thought(self, end: str) -> list[str]:
        """Return rules for any text up to `end`."""
        closing = self._literal(end)
        if closing.startswith("<["):  # a control token is not text
            return [f"thought: ANYTHING {closing} SPACE", "ANYTHING: /(.|\\n)*/", _GAP]
        return ["thought: thinking SPACE", f"thinking[suffix={closing}]: /(.|\\n)*/", _GAP]

    def _calls(self, chosen: Sequence[Tool], *, several: bool) -> list[str]:
        wording = self._wording
        before, after = map(self._literal, wording.calls)
        more = "" if wording.several is None or not several else f"({_row(self._literal(wording.several), 'call')})*"
        alternatives = " | ".join(f"call{i}" for i in range(len(chosen)))
        rules = [_row("calls:", before, "call", more, after), f"call: {alternatives}"]
        head, _, tail = wording.call.partition("ARGUMENTS")
        left, _, right = head.partition("NAME")
        for i, tool in enumerate(chosen):
            name = json.dumps(tool.name, ensure_ascii=False)
            said = json.dumps(name[1:-1], ensure_ascii=False) if left.endswith('"') else name
            around = _row(self._literal(left), said, self._literal(right)), self._literal(tail)
            rules += [f"call{i}: {_row(around[0], f'values{i}', around[1])}", f"values{i}: {_arguments(tool)}"]
        return rules

    def _literal(self, text: str) -> str:
        """Return a rule for exactly this text, with control tokens by id; "" for empty text."""
        parts: list[str] = []
        at = 0
        for match in self._token.finditer(text):
            parts += [json.dumps(text[at : match.start()], ensure_ascii=False)] if match.start() > at else []
            parts.append(f"<[{self._control[match[0]]}]>")
            at = match.end()
        return _row(*parts, json.dumps(text[at:], ensure_ascii=False) if at < len(text) else "")


def _row(*parts: str) -> str:
    return " ".join(filter(None, parts))


def _json(schema: Mapping[str, Any], *, lenient: bool = False) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": {**_ONE_LINE, "lenient": lenient}})


def _arguments(tool: Tool) -> str:
    """Return a rule for a tool's arguments. Unless the tool is strict, parts of its schema that cannot be enforced are left out."""
    return _json(tool.parameters or {"type": "object"}, lenient=not tool.strict)
