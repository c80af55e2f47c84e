"""Conversations from the messages that a client of a chat endpoint would send."""

import json

from ostinato.core.conversation import Conversation, Message, Role, Tool, ToolCall

READ = Tool(
    name="read",
    description="Read a file.",
    parameters={"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
)


def talk(*messages, tools=(), continued=False):
    """`talk({"role": "user", "content": "hi"})`; `reasoning`, `calls` and `answers` as in `Message`."""
    return Conversation(messages=tuple(map(message, messages)), tools=tuple(tools), continued=continued)


def message(fields):
    rest = {name: value for name, value in fields.items() if name not in ("role", "content")}
    return Message(role=Role(fields["role"]), text=fields.get("content", ""), **rest)


def system(text):
    return {"role": "system", "content": text}


def user(text):
    return {"role": "user", "content": text}


def assistant(text="", *calls, reasoning=""):
    return {"role": "assistant", "content": text, "calls": calls, "reasoning": reasoning}


def call(id="call_1", name="read", **arguments):
    return ToolCall(id=id, name=name, arguments=json.dumps(arguments or {"path": "calc.py"}, ensure_ascii=False))


def result(text, answers="call_1"):
    return {"role": "tool", "content": text, "answers": answers}
