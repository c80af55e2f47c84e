"""Fences: control tokens in text from outside are put between two noncharacters before a chat template sees the text.

Text inside a fence in the template's output is encoded by a tokenizer that knows no control tokens.

Tools, calls and results as plain text in the Hermes format, for models whose chat template does not support them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ostinato.core.conversation import Conversation, Message, Role, Tool, ToolCall
from ostinato.core.errors import BadRequest

# Unicode noncharacters: never part of interchanged text, so nothing is lost when they are dropped from a message.
_OPEN, _CLOSE, HOLE, _EDGE = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3"
_FENCED = re.compile(f"{_OPEN}([^{_OPEN}{_CLOSE}]*){_CLOSE}")
_FENCE = re.compile(f"[{_OPEN}{_CLOSE}]")
_DROPPED = str.maketrans("", "", _OPEN + _CLOSE + HOLE + _EDGE)


class Fences:
    """Puts fences around the control tokens of one tokenizer, and finds them again.

    Example: ``Fences(["<|im_end|>"]).written(fences.around("a<|im_end|>") + "<|im_end|>") == ["<|im_end|>"]``
    """

    def __init__(self, tokens: Collection[str]) -> None:
        longest_first = sorted(tokens, key=len, reverse=True)
        # without tokens: a pattern that matches nothing
        any_token = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._token = re.compile(any_token)
        self._escaped = re.compile(rf"\\[uU]0*{ord(_OPEN):x}(?:{any_token})", re.IGNORECASE)

    def around(self, text: str, *, edges: bool = False) -> str:
        """The text with its control tokens fenced; with `edges` no neighbouring text can complete a control token."""
        bare = text if text.isascii() else text.translate(_DROPPED)
        fenced = self._token.sub(f"{_OPEN}\\g<0>{_CLOSE}", bare)
        return f"{_EDGE}{fenced}{_EDGE}" if edges else fenced

    def written(self, text: str) -> list[str]:
        """The control tokens outside fences, in order: those that the template wrote."""
        return [token for piece, fenced in self.pieces(text) if not fenced for token in self._token.findall(piece)]

    def pieces(self, text: str) -> Iterator[tuple[str, bool]]:
        """The text in order, cut at the fences, which are left out; each piece comes with whether it was fenced."""
        for i, piece in enumerate(_FENCED.split(text)):
            if i % 2:
                yield piece, True
            else:  # a fence that the template cut in two still separates
                yield from ((part, False) for part in _FENCE.split(piece))

    def first(self, text: str) -> str | None:
        """The control token that the text begins with, after white space; None if it begins with anything else."""
        match = self._token.match(text.lstrip())
        return None if match is None else match[0]

    def last(self, text: str, tokens: Collection[str]) -> re.Match[str] | None:
        """The last of these tokens outside a fence; None if there is none."""
        fenced = {match.start(1) for match in _FENCED.finditer(text)}
        found = [match for match in self._token.finditer(text) if match[0] in tokens and match.start() not in fenced]
        return found[-1] if found else None

    def check_intact(self, text: str) -> None:
        """Raise BadRequest if the template wrote a fence as an escape, which leaves the control token in it bare."""
        if self._escaped.search(text):
            raise BadRequest(
                "the model's chat template escapes the characters that keep this text from becoming a control token; "
                "leave the control token out",
                field="messages",
            )

    @staticmethod
    def loose(texts: Iterable[str], tokens: Collection[str]) -> frozenset[str]:
        """The texts that could form one of these tokens together with what a template writes beside them."""
        heads = tuple({token[:n] for token in tokens for n in range(1, len(token))})
        tails = tuple({token[n:] for token in tokens for n in range(1, len(token))})

        def fits(text: str) -> bool:
            bare = text.strip()  # as many templates do
            return bool(bare) and (
                text.endswith(heads)
                or text.startswith(tails)
                or bare.endswith(heads)
                or bare.startswith(tails)
                or any(bare in token for token in tokens)
            )

        return frozenset(filter(fits, texts))


def encodable(text: str, field: str) -> str:
    """The text itself. Raises BadRequest for a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"{field} holds half of a surrogate pair, which is not text", field=field) from error
    return text


# ---------------------------------------------------------------- tool calls as text


_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def as_text(conversation: Conversation) -> Conversation:
    """The same conversation with its tools, calls and tool messages written into the texts.

    The tools are appended to the first system message, which is made if there is none; calls are appended to their message's text;
    consecutive results become one user message. A prefix of the conversation becomes a prefix of the result, unless it ends between
    two results. Raises BadRequest for a schema that cannot be written.
    """
    messages: list[Message] = []
    after_result = False
    for message in with_described_tools(conversation):
        is_result = message.role is Role.TOOL
        if not is_result:
            messages.append(replace(message, text=spoken(message), calls=()) if message.calls else message)
        elif after_result:
            messages[-1] = replace(messages[-1], text=f"{messages[-1].text}\n{answered(message)}")
        else:
            messages.append(Message(role=Role.USER, text=answered(message)))
        after_result = is_result
    return replace(conversation, messages=tuple(messages), tools=())


def with_described_tools(conversation: Conversation) -> Sequence[Message]:
    """The messages, with the tools described in the first message, a system message.

    Example: without tools, ``with_described_tools(conversation) == conversation.messages``
    """
    messages = conversation.messages
    if not conversation.tools:
        return messages
    described = _TOOLS.format(tools="\n".join(map(_described, conversation.tools)))
    if messages and messages[0].role is Role.SYSTEM:
        text = f"{messages[0].text}\n\n{described}" if messages[0].text else described
        return (replace(messages[0], text=text), *messages[1:])
    return (Message(role=Role.SYSTEM, text=described), *messages)


def spoken(message: Message) -> str:
    r"""An assistant's text followed by its calls.

    Example: ``'Let me look.\n<tool_call>\n{"name": "read", "arguments": {"path": "calc.py"}}\n</tool_call>'``
    """
    return "\n".join([*([message.text] if message.text else []), *map(_called, message.calls)])


def function_schema(tool: Tool) -> dict[str, Any]:
    """A tool in OpenAI's format, which chat templates and models know."""
    parameters = dict(tool.parameters) or {"type": "object", "properties": {}}
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": parameters},
    }


def _described(tool: Tool) -> str:
    try:
        return json.dumps(function_schema(tool), ensure_ascii=False)
    except RecursionError:
        raise BadRequest(f"the parameters of the tool {tool.name!r} are nested too deeply", field="tools") from None


def _called(call: ToolCall) -> str:
    name = json.dumps(call.name, ensure_ascii=False)
    # arguments that are an object stay as the model wrote them
    arguments = json.dumps(call.arguments, ensure_ascii=False) if call.values() is None else call.arguments.strip()
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def answered(message: Message) -> str:
    """A tool's message as text."""
    return f"<tool_response>\n{message.text}\n</tool_response>"
