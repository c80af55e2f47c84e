"""Repairs conversations for a chat template that refuses them, leaves out a part of them, or does not support tools.

For templates without tools, `as_text` writes tools, calls and results as plain text in the Hermes format.

No repair moves a text past an assistant message, so a prefix of the conversation still renders to a prefix of the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, takewhile
from typing import Any

from ostinato.core.conversation import Conversation, Message, Role, Tool, ToolCall
from ostinato.core.errors import BadRequest

# ---------------------------------------------------------------- tools as text


_TOOLS_TEXT = """# Tools

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
    """Write a conversation's tools, calls and results as plain text.

    Tools are appended to the system message at the beginning, which is added if there is none; calls are appended to their message's text;
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
    """Return the messages, with the tools described in a system message at the beginning.

    Example: without tools, ``with_described_tools(conversation) == conversation.messages``
    """
    messages = conversation.messages
    if not conversation.tools:
        return messages
    described = _TOOLS_TEXT.format(tools="\n".join(map(_described, conversation.tools)))
    if messages and messages[0].role is Role.SYSTEM:
        text = f"{messages[0].text}\n\n{described}" if messages[0].text else described
        return (replace(messages[0], text=text), *messages[1:])
    return (Message(role=Role.SYSTEM, text=described), *messages)


def spoken(message: Message) -> str:
    r"""Return an assistant message's text followed by its calls.

    Example: ``'Let me look.\n<tool_call>\n{"name": "read", "arguments": {"path": "calc.py"}}\n</tool_call>'``
    """
    return "\n".join([*([message.text] if message.text else []), *map(_written, message.calls)])


def function_schema(tool: Tool) -> dict[str, Any]:
    """Return a tool in OpenAI's format, which chat templates and models know."""
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


def _written(call: ToolCall) -> str:
    name = json.dumps(call.name, ensure_ascii=False)
    # arguments that are a JSON object stay as the model wrote them
    arguments = json.dumps(call.arguments, ensure_ascii=False) if call.values() is None else call.arguments.strip()
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def answered(message: Message) -> str:
    """Return a tool message as text."""
    return f"<tool_response>\n{message.text}\n</tool_response>"


# ---------------------------------------------------------------- repairs of messages


_GAP = "\n\n"

Messages = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Repair:
    """A change of messages, and probe conversations that show whether a template needs it."""

    change: Callable[[Messages], Messages]
    probes: tuple[Conversation, ...]

    def __call__(self, conversation: Conversation) -> Conversation:
        """Return the repaired conversation; the same object if there is nothing to repair."""
        messages = self.change(conversation.messages)
        return conversation if messages == conversation.messages else replace(conversation, messages=messages)


def repaired(conversation: Conversation, repairs: Sequence[Repair]) -> Conversation:
    """Apply these repairs to a conversation, in order."""
    for repair in repairs:
        conversation = repair(conversation)
    return conversation


# ------------------------------------------------------------ calls and their results


def _text_before_calls(messages: Messages) -> Messages:
    """Move an assistant's text into a message of its own, before that of its calls."""
    made: list[Message] = []
    for message in messages:
        if message.calls and message.text.strip():
            made += (replace(message, calls=()), Message(role=message.role, calls=message.calls))
        else:
            made.append(message)
    return tuple(made)


def _one_call_each(messages: Messages) -> Messages:
    """Move each call into a message of its own, followed by its results."""
    made: list[Message] = []
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        if len(message.calls) < 2:
            made.append(message)
            continue
        results = _results(messages[place:])
        place += len(results)
        for first, call in zip((True, *[False] * len(message.calls)), message.calls, strict=False):
            single = replace(message, calls=(call,)) if first else Message(role=message.role, calls=(call,))
            made += (single, *(result for result in results if result.answers == call.id))
            results = [result for result in results if result.answers != call.id]
        made += results
    return tuple(made)


def _results_of_calls(messages: Messages) -> Messages:
    """Turn a result without a preceding call into a user message."""
    made: list[Message] = []
    open_calls: set[str] = set()
    for message in messages:
        if message.role is not Role.TOOL:
            open_calls = {call.id for call in message.calls}
        elif message.answers not in open_calls:
            message = Message(role=Role.USER, text=answered(message))
        made.append(message)
    return tuple(made)


def _answer_after_results(messages: Messages) -> Messages:
    """Insert an empty assistant message between a result and a user message."""
    made = list(messages[:1])
    for before, message in pairwise(messages):
        if before.role is Role.TOOL and message.role is Role.USER:
            made.append(Message(role=Role.ASSISTANT))
        made.append(message)
    return tuple(made)


def _results(messages: Messages) -> list[Message]:
    return list(takewhile(lambda message: message.role is Role.TOOL, messages))


# ------------------------------------------------------------ system messages


def _one_system_first(messages: Messages) -> Messages:
    """Merge the system messages at the beginning into one."""
    system, rest = _split(messages)
    return messages if len(system) < 2 else (Message(role=Role.SYSTEM, text=_joined(system)), *rest)


def _no_system_first(messages: Messages) -> Messages:
    """Move the system messages at the beginning into a user message: the first one, if it follows directly."""
    system, rest = _split(messages)
    if not system:
        return messages
    if rest and rest[0].role is Role.USER:
        system, rest = (*system, rest[0]), rest[1:]
    return (Message(role=Role.USER, text=_joined(system)), *rest)


def _no_system_later(messages: Messages) -> Messages:
    """Turn a system message after other messages into a user message that is marked as system text."""
    system, rest = _split(messages)
    return (*system, *(_noted(message) if message.role is Role.SYSTEM else message for message in rest))


def _noted(message: Message) -> Message:
    return Message(role=Role.USER, text=f"<system>\n{message.text}\n</system>")


def _split(messages: Messages) -> tuple[Messages, Messages]:
    """Split into the system messages at the beginning, and all others."""
    system = tuple(takewhile(lambda message: message.role is Role.SYSTEM, messages))
    return system, messages[len(system) :]


def _joined(messages: Messages) -> str:
    return _GAP.join(message.text for message in messages if message.text)


# ------------------------------------------------------------ alternation of roles


def _user_first(messages: Messages) -> Messages:
    """Insert an empty user message if the first non-system message is not the user's."""
    system, rest = _split(messages)
    return messages if not rest or rest[0].role is Role.USER else (*system, Message(role=Role.USER), *rest)


def _user_somewhere(messages: Messages) -> Messages:
    """Append an empty user message if there are only system messages."""
    return messages if _split(messages)[1] else (*messages, Message(role=Role.USER))


def _no_empty_answers(messages: Messages) -> Messages:
    """Drop assistant messages without text, reasoning and calls, except the last message, which may be continued."""

    def says(message: Message) -> bool:
        return bool(message.role is not Role.ASSISTANT or message.text.strip() or message.reasoning or message.calls)

    return (*filter(says, messages[:-1]), *messages[-1:])


def _one_at_a_time(role: Role, messages: Messages) -> Messages:
    """Merge consecutive messages of this role, except those that follow a call."""
    made = list(messages[:1])
    for message in messages[1:]:
        before = made[-1]
        if not before.role is message.role is role or before.calls:
            made.append(message)
            continue
        reasoning = _GAP.join(filter(None, (before.reasoning, message.reasoning)))
        made[-1] = replace(message, text=_joined((before, message)), reasoning=reasoning)
    return tuple(made)


# ------------------------------------------------------------ all repairs and their probes


def _said(role: Role, word: str) -> Message:
    return Message(role=role, text=f"probe {word}")


def _called(word: str, *ids: str, text: str = "") -> Message:
    arguments = f'{{"probe_key": "probe {word}"}}'
    calls = tuple(ToolCall(id=id, name="probe_tool", arguments=arguments) for id in ids)
    return Message(role=Role.ASSISTANT, text=text, calls=calls)


def _returned(word: str, answers: str) -> Message:
    return Message(role=Role.TOOL, text=f"probe {word}", answers=answers)


def _probe(*messages: Message) -> Conversation:
    used = any(message.calls or message.role is Role.TOOL for message in messages)
    return Conversation(messages=messages, tools=_TOOLS if used else ())


_TOOLS = (Tool(name="probe_tool", description="A probe.", parameters={"type": "object", "properties": {}}),)
_RULE, _LATER_RULE = _said(Role.SYSTEM, "rule"), _said(Role.SYSTEM, "later rule")
_ASKED, _MORE = _said(Role.USER, "question"), _said(Role.USER, "more")
_ANSWER, _SECOND = _said(Role.ASSISTANT, "answer"), _said(Role.ASSISTANT, "second answer")
_FIRST_ID, _SECOND_ID = "call_probe_0_0", "call_probe_0_1"
_RETURNED, _RETURNED_TOO = _returned("result", _FIRST_ID), _returned("second result", _SECOND_ID)

REPAIRS = (
    Repair(_text_before_calls, (_probe(_ASKED, _called("value", _FIRST_ID, text="probe thought"), _RETURNED),)),
    Repair(_one_call_each, (_probe(_ASKED, _called("value", _FIRST_ID, _SECOND_ID), _RETURNED, _RETURNED_TOO),)),
    Repair(_results_of_calls, (_probe(_ASKED, _RETURNED), _probe(_ASKED, _ANSWER, _RETURNED))),
    Repair(_one_system_first, (_probe(_RULE, _LATER_RULE, _ASKED),)),
    Repair(_no_system_first, (_probe(_RULE, _ASKED),)),
    Repair(_no_system_later, (_probe(_RULE, _ASKED, _ANSWER, _LATER_RULE, _MORE),)),
    Repair(_user_first, (_probe(_ANSWER, _ASKED), _probe(_RULE, _ANSWER, _ASKED))),
    Repair(_user_somewhere, (_probe(_RULE),)),
    Repair(_no_empty_answers, (_probe(_ASKED, Message(role=Role.ASSISTANT), _MORE),)),
    Repair(partial(_one_at_a_time, Role.USER), (_probe(_ASKED, _MORE),)),
    Repair(partial(_one_at_a_time, Role.ASSISTANT), (_probe(_ASKED, _ANSWER, _SECOND, _MORE),)),
    Repair(_answer_after_results, (_probe(_ASKED, _called("value", _FIRST_ID), _RETURNED, _MORE),)),
)
"""All repairs, in the order in which they are applied."""


def needed(
    settled: Callable[[Conversation], Conversation], shows: Callable[[Conversation], bool]
) -> tuple[Repair, ...]:
    """Return the repairs that a template needs: without each, it refuses or truncates some conversation, whatever the other repairs.

    Args:
        settled: converts a conversation's tools to the form that the template supports.
        shows: returns whether the template writes all texts of a conversation.
    """
    repairs: tuple[Repair, ...] = ()
    for i, repair in enumerate(REPAIRS):
        probes = (repaired(settled(probe), repairs) for probe in repair.probes)
        if any(_helps(repair, REPAIRS[i + 1 :], probe, shows) for probe in probes):
            repairs = (*repairs, repair)
    return repairs


def _helps(repair: Repair, later: Sequence[Repair], probe: Conversation, shows: Callable[[Conversation], bool]) -> bool:
    """Return whether the template shows the probe only after this repair, alone or together with later ones."""
    if shows(probe):
        return False
    return shows(repair(probe)) or (shows(repaired(probe, (repair, *later))) and not shows(repaired(probe, later)))
