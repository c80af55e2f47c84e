"""Rewrites an agent's request before the gateway sees it, with another model, another user and our sampling. Pure.

An agent's own temperature of 0, which one of the common agents sends, would make all rollouts of a group the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ostinato.worlds.harness.agents.config import Dialect
from ostinato.worlds.harness.gateway import USER

_DROPPED = frozenset(
    ["top_p", "seed", "n", "presence_penalty", "frequency_penalty", "logit_bias", "safety_identifier", "metadata"]
)
_BUDGETS: Mapping[Dialect, tuple[str, ...]] = {
    "chat": ("max_tokens", "max_completion_tokens"),
    "messages": ("max_tokens",),
    "responses": ("max_output_tokens",),
}
_HEADER_CHARS = 4096
PASSED = frozenset(
    [
        "x-claude-code-agent-id",
        "x-codex-parent-thread-id",
        "x-codex-turn-metadata",
        "x-openai-subagent",
        "x-parent-session-id",
        "x-claude-code-session-id",
        "session-id",
        "x-session-id",
    ]
)
"""Headers, in lower case, by which the gateway tells an agent's side calls from its work. No other header of an agent is passed on."""


def ruled_request(
    dialect: Dialect, body: Mapping[str, Any], *, model: str, temperature: float, tokens: int, user: str = USER
) -> dict[str, Any]:
    """The request for the gateway, with at most `tokens` per answer. Other faults in it are left for the gateway to report.

    Example: ``ruled_request("chat", {"model": "x", "temperature": 0, "messages": []}, model="m", temperature=1.0, tokens=64)``
    """
    ruled = {name: value for name, value in body.items() if name not in _DROPPED}
    ruled |= {"model": model, "temperature": temperature}
    ruled |= {"metadata": {"user_id": user}} if dialect == "messages" else {"user": user}
    named = [name for name in _BUDGETS[dialect] if ruled.get(name) is not None]
    for name in named or _BUDGETS[dialect][:1]:
        asked = ruled.get(name)
        if asked is None or (isinstance(asked, int | float) and asked > tokens):
            ruled[name] = tokens
    return ruled


def passed_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The agent's headers that the gateway may see."""
    plain = {name.lower(): value for name, value in headers.items() if value.isascii() and value.isprintable()}
    return {name: value for name, value in plain.items() if name in PASSED and len(value) <= _HEADER_CHARS}
