"""A normal form of messages: the same for an answer as it was sampled and as agents send it back.

Agents parse an answer and serialise it anew: reasoning is dropped or trimmed, a call's JSON is reformatted, with its keys in another
order, 60000.0 becomes 60000, and optional flags are filled in with their defaults. None of this changes the meaning. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ostinato.core.conversation import Message, Tool, ToolCall

_UNSAID = (None, False)  # values of a call's arguments that mean the same as no argument


def normal(message: Message) -> tuple[str, ...]:
    """The parts of a message that must be equal for two messages to count as the same."""
    if message.role == "tool":
        return (message.role, message.answers, message.text)
    if message.role != "assistant":
        return (message.role, message.text)
    calls = [part for call in message.calls for part in (call.id, call.name, _arguments(call))]
    return (message.role, message.text.strip(), *calls)


def digest(seed: bytes, *parts: str) -> bytes:
    """A hash of a list of parts. Lengths are hashed too, so that lists with the same concatenation differ."""
    pieces = [len(seed).to_bytes(8, "big"), seed]
    for part in parts:
        data = part.encode()
        pieces += (len(data).to_bytes(8, "big"), data)
    return blake2b(b"".join(pieces), digest_size=16).digest()


def tools_digest(tools: Sequence[Tool]) -> str:
    """A digest of the tools as a prompt shows them; "" without tools."""
    if not tools:
        return ""
    shown = [[tool.name, tool.description, tool.parameters] for tool in tools]
    return digest(b"", json.dumps(shown)).hex()


def _arguments(call: ToolCall) -> str:
    values = call.values()
    if values is None:
        return call.arguments
    said = {name: value for name, value in values.items() if not any(value is unsaid for unsaid in _UNSAID)}
    try:
        return json.dumps(_plain(said), sort_keys=True)
    except (ValueError, RecursionError):
        return call.arguments


def _plain(value: Any) -> Any:
    """A value with its whole numbers as integers."""
    match value:
        case float() if value.is_integer():
            return int(value)
        case dict():
            return {key: _plain(item) for key, item in value.items()}
        case list():
            return [_plain(item) for item in value]
        case _:
            return value
