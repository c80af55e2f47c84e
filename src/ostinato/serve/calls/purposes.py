"""The purpose of a call: the task itself or an auxiliary call. Pure.

It is given by the header X-Ostinato-Purpose, or else inferred from headers that coding agents send anyway: Codex marks its sub-agents
and compactions, Claude Code and opencode their sub-agents. A call in an agent's session without tools is a side call: a title, a topic,
a summary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from ostinato.core.conversation import Conversation
from ostinato.core.errors import BadRequest
from ostinato.core.records import Purpose

SESSION_HEADERS = ("X-Claude-Code-Session-Id", "Session-Id", "X-Session-Id")  # Claude Code, Codex, opencode
_SESSIONS = [name.lower().encode() for name in SESSION_HEADERS]
_PARENTS = (b"x-claude-code-agent-id", b"x-codex-parent-thread-id", b"x-parent-session-id")
_COMPACTIONS = ("compact", "compaction")


def purpose_of(headers: Mapping[bytes, bytes], conversation: Conversation | None) -> Purpose:
    """The purpose of a call, by its headers (names in lower case) and, if it is a conversation, its tools. Raises BadRequest.

    Example: ``purpose_of({b"x-ostinato-purpose": b"side"}, None) is Purpose.SIDE``
    """
    said = headers.get(b"x-ostinato-purpose")
    if said is not None:
        try:
            return Purpose(said.decode("latin-1"))
        except ValueError:
            raise BadRequest(f"X-Ostinato-Purpose takes {', '.join(Purpose)}.", field="X-Ostinato-Purpose") from None
    subagent = headers.get(b"x-openai-subagent", b"").decode("latin-1")
    if subagent in _COMPACTIONS or _codex_kind(headers.get(b"x-codex-turn-metadata", b"")) in _COMPACTIONS:
        return Purpose.COMPACTION
    if subagent or any(name in headers for name in _PARENTS):
        return Purpose.SUBAGENT
    in_session = any(name in headers for name in _SESSIONS)
    return Purpose.SIDE if in_session and conversation is not None and not _uses_tools(conversation) else Purpose.TASK


def _codex_kind(metadata: bytes) -> str:
    """The `request_kind` in Codex' turn metadata, a JSON header that may be longer than other headers; "" if there is none."""
    try:
        told = json.loads(metadata)
    except (ValueError, RecursionError):
        return ""
    kind = told.get("request_kind") if isinstance(told, dict) else None
    return kind if isinstance(kind, str) else ""


def _uses_tools(conversation: Conversation) -> bool:
    return bool(conversation.tools) or any(message.calls for message in conversation.messages)
