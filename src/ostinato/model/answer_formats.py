# ruff: noqa: RUF001  # DeepSeek delimits with characters that look like others
"""How the families of models write reasoning and calls: declarative response templates, as transformers defines them.

If a tokenizer declares its own (`response_template` in its configuration), that is used; otherwise the family is recognised by marks in
the chat template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers.utils.chat_parsing.response_templates import ResponseTemplateField, load_response_template

from ostinato.core.errors import BadConfig
from ostinato.model.response_constraints import Wording

Json = dict[str, Any]
_END = re.compile(r"(^|\|)(\\Z|\$)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """The regions that an answer may have. `markers` are the control tokens among their delimiters, which must stay visible.

    `opener` is a regular expression of what every call holds, "" if that is unknown: what may not be sampled where calls are forbidden.
    `ending` names the regions that the answer's end closes too; `ends` are control tokens that end an answer, and a region with it,
    but are not shown. `wording` is how calls are written, if they can be demanded; None if that is unknown. `marks` begin a call: where
    no region follows, it is malformed.

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
        """The fixed texts that tool calls begin with."""
        return frozenset(self.marks).union(*(field.open_literals or () for field in self.calls))

    def opens_call(self, text: str) -> bool:
        """True if a tool call, or a malformed attempt at one, begins in the text."""
        opens = (field.open_re for field in self.calls)
        return any(mark in text for mark in self.marks) or any(found and found.search(text) for found in opens)


def format_for(
    chat_template: str,
    control: Collection[str],
    declared: Mapping[str, Any] | None = None,
    ends: Collection[str] = (),
) -> Format:
    """The format of a model: what its tokenizer declares, if it can be streamed, else that of its family, else Hermes.

    Args:
        chat_template: the model's, by which its family is recognised.
        control: the tokenizer's control tokens.
        declared: the tokenizer's own response template.
        ends: the control tokens that end an answer.

    Raises:
        BadConfig: the tokenizer's declaration is not a response template.
    """
    family = next((family for family in _FAMILIES if all(mark in chat_template for mark in family.marks)), None)
    if declared is not None:
        format = _compiled(dict(declared), control, ends, family)
        if not any(_holds_text(field) for field in (*format.calls, *format.reasoning, *format.text)):
            return format
    family = family or _HERMES
    return _compiled(family.template(thinks="<think>" in chat_template), control, ends, family)


def _holds_text(field: ResponseTemplateField) -> bool:
    """True for a region that may begin in any text: all text would be held back, and searched again for every token."""
    found = field.open_re.search("a word " * 20, partial=True)
    return found is not None and found.start() < 100


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """A family is recognised by `marks` in its chat template, and the beginning of its calls, however they go on, by `begins`. `opener`: a
    regular expression of what each of its calls holds.
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
        load_response_template(spec)  # checks the unchanged template
        ending = {name: _without_end(field) for name, field in spec["fields"].items()}
        fields = load_response_template({**spec, "fields": ending}).fields.values()
    except (ValueError, TypeError) as error:
        raise BadConfig(f"the tokenizer's response_template is none: {error}") from error
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
    """A regular expression of how a declared template's calls begin; "" if one of them begins with a pattern."""
    opens = [re.escape(field["open"]).replace("/", r"\/") for field in calls if isinstance(field.get("open"), str)]
    return "|".join(opens) if len(opens) == len(calls) else ""


def _without_end(field: Json) -> Json:
    """A region's field without the answer's end in its closing pattern: with it, the reader would not wait for a partial delimiter."""
    pattern = _END.sub("", field.get("close_pattern", ""))
    rest = {name: value for name, value in field.items() if name != "close_pattern"}
    return {**rest, "close_pattern": pattern} if pattern else rest


def _closes(field: Json) -> bool:
    return "close" in field or "close_pattern" in field


# ---------------------------------------------------------------- the families, every repetition bounded, so that time is linear

AFTER_CALLS = "after_calls"
"""A region that begins where a list of calls ends; it is recognised only after a call."""

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
        several=None,  # each call has a number of its own
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
