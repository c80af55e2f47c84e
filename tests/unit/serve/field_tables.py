"""The objects that requests consist of, by dialect, and the guide's page about their fields.

python -m tests.unit.serve.field_tables > docs/guide/fields.md
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from ostinato.serve.dialects import anthropic, context_edits, openai, responses, responses_items
from ostinato.serve.dialects.compaction_blocks import packed_token
from ostinato.serve.dialects.extensions import Extensions
from ostinato.serve.dialects.field_rules import UNSUPPORTED, Ignored, Only

Json = dict[str, Any]
SCHEMA = {"type": "object"}
HI = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
CHAT = {"model": "m", "messages": [HI]}
MESSAGES = {"model": "m", "max_tokens": 9, "messages": [HI]}
RESPONSES = {"model": "m", "input": "hi"}

BLOCK = {"turn": "t:0", "episode": "e", "number": 0, "place": "", "content": "", "text": "x"}


@dataclass(frozen=True, kw_only=True)
class Object:
    """An object of a request: its name in the guide, a sample of it, and the request that holds a given one."""

    name: str
    model: type[BaseModel]
    sample: Json
    within: Callable[[Json], Json]
    parse: Callable[[Any], Any]


def marked(model: type[BaseModel]) -> Iterator[tuple[str, Ignored | Only | None]]:
    """The fields of an object with their marks; None for a field that is used."""
    for name, field in model.model_fields.items():
        marks = [mark for mark in field.metadata if isinstance(mark, Ignored | Only)]
        yield field.alias or name, marks[0] if marks else None


def _chat(name: str, model: type[BaseModel], sample: Json, within: Callable[[Json], Json]) -> Object:
    return Object(name=name, model=model, sample=sample, within=lambda o: CHAT | within(o), parse=openai.parse_chat)


def _messages(name: str, model: type[BaseModel], sample: Json, within: Callable[[Json], Json]) -> Object:
    return Object(
        name=name, model=model, sample=sample, within=lambda o: MESSAGES | within(o), parse=anthropic.parse_messages
    )


def _responses(name: str, model: type[BaseModel], sample: Json, within: Callable[[Json], Json]) -> Object:
    return Object(
        name=name, model=model, sample=sample, within=lambda o: RESPONSES | within(o), parse=responses.parse_responses
    )


def _same(body: Json) -> Json:
    return body


def _block(name: str, model: type[BaseModel], sample: Json, role: str = "user") -> Object:
    return _messages(name, model, sample, lambda block: {"messages": [HI, {"role": role, "content": [block]}, HI]})


def _item(name: str, model: type[BaseModel], sample: Json) -> Object:
    return _responses(name, model, sample, lambda item: {"input": [HI, item]})


def _tool(name: str, model: type[BaseModel], sample: Json) -> Object:
    return _responses(name, model, sample, lambda tool: {"tools": [tool]})


FUNCTION = {"name": "read", "parameters": SCHEMA}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
CHOICE = {"type": "function", "function": {"name": "read"}}
OFFERED = [{"type": "function", "function": FUNCTION}]
READ = {"name": "read", "input_schema": SCHEMA}
TABLES: dict[str, list[Object]] = {
    "/v1/chat/completions": [
        _chat("The request", openai.ChatRequest, CHAT, _same),
        _chat("`stream_options`", openai.StreamOptions, {}, lambda o: {"stream_options": o}),
        _chat("`response_format`", openai.ResponseFormat, FORM, lambda o: {"response_format": o}),
        _chat(
            "`response_format.json_schema`",
            openai.JsonSchema,
            FORM["json_schema"],
            lambda o: {"response_format": FORM | {"json_schema": o}},
        ),
        _chat("`tool_choice` as an object", openai.NamedTool, CHOICE, lambda o: {"tools": OFFERED, "tool_choice": o}),
        _chat("A message", openai.ChatMessage, HI, lambda o: {"messages": [HI, o]}),
        _chat("An assistant's message", openai.ChatMessage,
              {"role": "assistant", "content": None, "tool_calls": [CALL]}, lambda o: {"messages": [HI, o]}),
        _chat("A tool's message", openai.ChatMessage, {"role": "tool", "content": "x", "tool_call_id": "c1"},
              lambda o: {"messages": [HI, o]}),
        _chat("A part of a message", openai.ChatPart, {"type": "text", "text": "x"},
              lambda o: {"messages": [{"role": "user", "content": [o]}]}),
        _chat("A tool's `function`", openai.ChatFunction, FUNCTION,
              lambda o: {"tools": [{"type": "function", "function": o}]}),
    ],
    "/v1/completions": [
        Object(name="The request", model=openai.CompletionRequest, sample={"model": "m", "prompt": "x"}, within=_same,
               parse=openai.parse_completion),
    ],
    "/v1/messages": [
        _messages("The request", anthropic.MessagesRequest, MESSAGES, _same),
        Object(name="The request of `/v1/messages/count_tokens`", model=anthropic.CountRequest,
               sample={"model": "m", "messages": [HI]}, within=_same,
               parse=lambda body: anthropic.parse_count(body).conversation),
        _messages("`metadata`", anthropic.Metadata, {"user_id": "ann"}, lambda o: {"metadata": o}),
        _messages("`compaction`", anthropic.CompactionConfig, {"type": "summarize"}, lambda o: {"compaction": o}),
        _messages("`context_management`", context_edits.ContextManagement, {},
                  lambda o: {"context_management": o}),
        _messages("An edit of `context_management`, each with its own fields", context_edits.ContextEdit,
                  {"type": "compact_20260112"}, lambda o: {"context_management": {"edits": [o]}}),
        _messages("A measure in an edit: `trigger`, `keep`, `clear_at_least`", context_edits.Measure,
                  {"type": "input_tokens", "value": 60_000},
                  lambda o: {"context_management": {"edits": [{"type": "compact_20260112", "trigger": o}]}}),
        _messages("`tool_choice`", anthropic.ToolChoice, {"type": "tool", "name": "read"},
                  lambda o: {"tools": [READ], "tool_choice": o}),
        _messages("`output_config`", anthropic.OutputConfig, {}, lambda o: {"output_config": o}),
        _messages("`output_config.format`, or `output_format`", anthropic.JsonFormat,
                  {"type": "json_schema", "schema": SCHEMA}, lambda o: {"output_config": {"format": o}}),
        _messages("A message", anthropic.AnthropicMessage, HI, lambda o: {"messages": [o]}),
        _block("A `text` block", anthropic.TextBlock, {"type": "text", "text": "x"}),
        _block("A `thinking` block", anthropic.ThinkingBlock, {"type": "thinking", "thinking": "x"}, "assistant"),
        _block("A `redacted_thinking` block", anthropic.RedactedThinkingBlock,
               {"type": "redacted_thinking", "data": "x"}, "assistant"),
        _block("A `compaction` block", anthropic.CompactionContentBlock, {"type": "compaction"}, "assistant"),
        _block("A `tool_use` block", anthropic.ToolUseBlock,
               {"type": "tool_use", "id": "c1", "name": "read", "input": {}}, "assistant"),
        _block("A `tool_result` block", anthropic.ToolResultBlock, {"type": "tool_result", "tool_use_id": "c1"}),
        _messages("A `tool_reference` block", anthropic.ToolReferenceBlock,
                  {"type": "tool_reference", "tool_name": "x"},
                  lambda o: {"messages": [{"role": "user",
                                           "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [o]}]}]}),
        _block("A `document` block", anthropic.DocumentBlock,
               {"type": "document", "source": {"type": "text", "data": "x"}}),
        _block("A `search_result` block", anthropic.SearchResultBlock,
               {"type": "search_result", "title": "x", "source": "y", "content": []}),
        _messages("A tool", anthropic.AnthropicTool, READ, lambda o: {"tools": [o]}),
    ],
    "/v1/responses": [
        _responses("The request", responses.ResponsesRequest, RESPONSES, _same),
        _responses("`text`", responses.Text, {}, lambda o: {"text": o}),
        _responses("`prompt_cache_options`", responses.PromptCacheOptions, {}, lambda o: {"prompt_cache_options": o}),
        _responses("An entry of `context_management`", responses.ContextEntry, {"type": "compaction"},
                   lambda o: {"context_management": [o]}),
        _responses("`text.format`", responses.TextFormat, {"type": "json_schema", "name": "x", "schema": SCHEMA},
                   lambda o: {"text": {"format": o}}),
        _responses("`tool_choice` as an object", responses.ResponsesNamedTool, {"type": "function", "name": "read"},
                   lambda o: {"tools": [{"type": "function", "name": "read"}], "tool_choice": o}),
        Object(name="The request of `/v1/responses/compact`", model=responses.CompactRequest, sample=RESPONSES,
               within=_same, parse=responses.parse_compact),
        _item("A `compaction` item", responses_items.CompactionItem,
              {"type": "compaction", "encrypted_content": packed_token(BLOCK, b"")}),
        _item("A `message` item", responses_items.MessageItem, {"type": "message", **HI}),
        _item("An `item_reference`", responses_items.ReferenceItem, {"type": "item_reference", "id": "msg_resp-3f_0"}),
        _item("A `function_call` item", responses_items.CallItem,
              {"type": "function_call", "call_id": "c1", "name": "read", "arguments": "{}"}),
        _item("A `custom_tool_call` item", responses_items.CustomCallItem,
              {"type": "custom_tool_call", "call_id": "c1", "name": "run", "input": "x"}),
        _item("A `local_shell_call`, `shell_call` or `apply_patch_call` item", responses_items.ClientCallItem,
              {"type": "shell_call", "call_id": "c1", "action": {}}),
        _item("A result of a call", responses_items.ResultItem,
              {"type": "function_call_output", "call_id": "c1", "output": "x"}),
        _tool("A `function` tool", responses_items.FunctionTool, {"type": "function", "name": "read"}),
        _tool("A `custom` tool", responses_items.CustomTool, {"type": "custom", "name": "run"}),
        _tool("A `namespace` tool", responses_items.NamespaceTool,
              {"type": "namespace", "name": "web", "tools": [{"type": "function", "name": "find"}]}),
    ],
}  # fmt: skip

_OPENING = """# Fields of requests

What the gateway does with each field that a client sends. This page is made from the models that read the requests, and a test compares
the two.

- A field is **used**; or **ignored**, because it cannot change what the caller gets; or **refused** by name, with status 400, because
  ignoring it would give the caller something else than it asked for. Some are refused unless they hold a value that changes nothing.
- `null` means that the field was not sent, whatever the field.
- A field that is not listed is refused with the name of the nearest one, except where the table says that others are ignored.

What the model does not get although the request is taken is named in the header `X-Ostinato-Omitted`:

| Word | Meaning |
|---|---|
| `image`, `document`, `audio`, `video` | words stand in its place, as the model reads text only |
| `strict-tools` | the arguments of strict tools are not enforced, as the model may also answer in text |
| `hosted-tools` | calls that another provider's own tools made earlier, with their results |
| `tool-web-search`, `tool-local-shell`, `tool-image-generation`, `tool-tool-search` | a tool of OpenAI's own, which Codex offers |
"""


def page() -> str:
    """The guide's page in Markdown."""
    parts = [_OPENING]
    for path, objects in TABLES.items():
        parts.append(f"## {path}\n")
        shown: list[type[BaseModel]] = []
        for each in objects:
            if each.model not in shown:
                shown.append(each.model)
                parts.append(_table(each.name, each.model, own=issubclass(each.model, Extensions)))
    parts.append("## Fields that other servers added\n\nEvery request knows them, in all dialects.\n")
    parts.append(_table("", Extensions, own=False))
    return "\n".join(parts).rstrip() + "\n"


def _table(name: str, model: type[BaseModel], *, own: bool) -> str:
    fields = [(field, mark) for field, mark in marked(model) if not own or field not in Extensions.model_fields]
    used = ", ".join(f"`{field}`" for field, mark in fields if mark is None)
    rows = [f"| {used} | used |"] if used else []
    reasons: dict[str, list[str]] = {}
    for field, mark in fields:
        if isinstance(mark, Ignored):
            reasons.setdefault(f"ignored: {mark.why}", []).append(f"`{field}`")
        elif isinstance(mark, Only):
            values = " or ".join(f"`{json.dumps(value)}`" for value in mark.values)
            remedy = mark.why.removeprefix(UNSUPPORTED).removeprefix("is not supported: ")
            told = f"refused{f' unless {values}' if values else ''}{f': {remedy}' if remedy else ''}"
            reasons.setdefault(told, []).append(f"`{field}`")
    rows += [f"| {', '.join(names)} | {why} |" for why, names in reasons.items()]
    if model.model_config.get("extra") == "ignore":
        rows.append("| others | ignored: hints or notes that change nothing |")
    table = "\n".join(["| Field | What happens |", "|---|---|", *rows])
    return f"**{name}**\n\n{table}\n" if name else f"{table}\n"


if __name__ == "__main__":
    sys.stdout.write(page())
