"""Tools, calls and results as plain text in the Hermes format, for models whose chat template does not support them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ostinato.core.conversation import Conversation, Message, Role, Tool, ToolCall
from ostinato.core.errors import BadRequest

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
