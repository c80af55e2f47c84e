"""Parses the gateway's responses to its own clients: chat completions, and `GET /health`.

A chat completion has, for all its choices together, one span per run of tokens sampled by one version::

    {"choices": [{"index": 0, "message": {"content": "..."}, "finish_reason": "stop"}],
     "ostinato": {"turns": ["chatcmpl-1:0"], "spans": [[3, "9f2c", 7]]}}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ostinato.core.conversation import Message, Role, ToolCall
from ostinato.core.errors import Corrupt, Unauthorized
from ostinato.core.records import PolicyVersion

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatChoice:
    """One sampled message. `finish` is OpenAI's reason: "stop", "length", "tool_calls".

    Example: ``ChatChoice(message=Message(role=Role.ASSISTANT, text="return a + b"), finish="stop")``
    """

    message: Message
    finish: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """A chat completion: its choices in the order of their index, every version that sampled a token of them, and the turns' ids.

    `prompt_tokens` and `tokens` count the prompt and all choices, 0 if unknown; `overran`: the call's deadline cut the answer off.

    Example: ``ChatAnswer(choices=(choice,), policies=(v9,), turns=("chatcmpl-1:0",), prompt_tokens=31, tokens=12, overran=False)``
    """

    choices: tuple[ChatChoice, ...]
    policies: tuple[PolicyVersion, ...]
    turns: tuple[str, ...]
    prompt_tokens: int
    tokens: int
    overran: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayHealth:
    """The model's public name and the version that each slot serves. Example: ``GatewayHealth(model="smol", slots={"live": v3})``"""

    model: str
    slots: Mapping[str, PolicyVersion]


def read_chat_answer(body: Any, expected: int = 1) -> ChatAnswer:
    """Parse the answer in a response's body, given parsed or as bytes. Raises Corrupt, which names the part, if it is malformed or has
    another number of choices than `expected`.
    """
    return _or_corrupt("an answer", lambda: _chat_answer(_parsed(body), expected))


def read_health(body: Any) -> GatewayHealth:
    """Parse the body of `GET /health`, given parsed or as bytes. Raises Corrupt; Unauthorized if the body names no versions."""
    return _or_corrupt("/health", lambda: _health(_parsed(body)))


def _parsed(body: Any) -> Any:
    return json.loads(body) if isinstance(body, bytes) else body


def _or_corrupt(what: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise Corrupt(
            f"{what} of the gateway does not have the expected form ({type(error).__name__}: {error}); "
            "does the URL point to an Ostinato gateway of this version?"
        ) from error


def _chat_answer(body: Any, expected: int) -> ChatAnswer:
    choices = {choice["index"]: choice for choice in body["choices"]}
    if set(choices) != set(range(expected)):
        raise ValueError(f"choices {sorted(choices)} where {expected} were asked for")
    own, usage = body["ostinato"], body.get("usage") or {}
    return ChatAnswer(
        choices=tuple(_choice(choices[index]) for index in range(expected)),
        policies=tuple(_policy(number, content_hash) for number, content_hash, _ in own.get("spans", ())),
        turns=tuple(map(str, own.get("turns", ()))),
        prompt_tokens=int(usage.get("prompt_tokens", 0)),
        tokens=int(usage.get("completion_tokens", 0)),
        overran=bool(own.get("deadline")),
    )


def _choice(choice: Any) -> ChatChoice:
    said = choice["message"]
    calls = tuple(
        ToolCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
        for call in said.get("tool_calls") or ()
    )
    message = Message(
        role=Role.ASSISTANT, text=_text(said, "content"), reasoning=_text(said, "reasoning_content"), calls=calls
    )
    return ChatChoice(message=message, finish=str(choice["finish_reason"]))


def _text(message: Any, field: str) -> str:
    found = message.get(field) or ""
    if not isinstance(found, str):
        raise TypeError(f"message.{field} is not text")
    return found


def _health(body: Any) -> GatewayHealth:
    if body.keys() == {"status"}:
        raise Unauthorized("the gateway's /health names no versions: the caller's admin key must equal serve.admin_key")
    slots = {name: _policy(slot["number"], slot["hash"]) for name, slot in body["slots"].items()}
    return GatewayHealth(model=str(body["model"]), slots=slots)


def _policy(number: Any, content_hash: Any) -> PolicyVersion:
    if type(number) is not int or not isinstance(content_hash, str):
        raise TypeError("a version's number is not an integer or its hash is not text")
    return PolicyVersion(number=number, hash=content_hash)
