"""Demonstrations for a start by imitation: a script that knows the answer works through the harness, in the sandbox, as the model will."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ostinato.core.conversation import Message, Role, ToolCall
from ostinato.core.seams import Backend
from ostinato.model.template_repairs import function_schema
from ostinato.worlds.harness.harnesses import open_harness
from ostinato.worlds.harness.rollout import ModelAnswer
from ostinato.worlds.harness.toolbox import tools_named
from ostinato.worlds.tasks.task import Task

Say = Callable[[Sequence[Message]], Message]
"""The script's answer to a conversation."""


class _Scripted:
    """Implements `Model`."""

    def __init__(self, say: Say) -> None:
        self._say = say

    async def ask(
        self,
        messages: Sequence[Message],
        tools: Sequence[object] = (),
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        left_s: float | None = None,
    ) -> ModelAnswer:
        said = self._say(messages)
        said = replace(said, calls=tuple(replace(call, id=f"call_{len(messages)}") for call in said.calls))
        return ModelAnswer(turn=f"expert-{len(messages)}:0", message=said, finish="stop", prompt_tokens=0, tokens=1)


def call_of(tool: str, **arguments: object) -> Message:
    """An answer that calls one tool and says nothing."""
    return Message(role=Role.ASSISTANT, calls=(ToolCall(id="call", name=tool, arguments=json.dumps(arguments)),))


async def demonstrated(backend: Backend, task: Task, harness: Mapping[str, Any], say: Say) -> str:
    """A line for `ostinato train --demonstrations`: the whole conversation, and the tools offered."""
    box = await backend.start(task.spec)
    try:
        rollout = await open_harness("tools", harness).run(task, _Scripted(say), box)
    finally:
        await box.stop()
    tools = [function_schema(tool) for tool in tools_named(harness["offered"])]
    return json.dumps({"messages": [_row(each) for each in rollout.messages], "tools": tools})


def _row(message: Message) -> dict[str, object]:
    row: dict[str, object] = {"role": message.role.value, "content": message.text}
    if message.calls:
        row["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.calls
        ]
    if message.role is Role.TOOL:
        row["tool_call_id"] = message.answers
    return row
