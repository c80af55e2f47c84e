"""Parses the gateway's answers to the evaluation runner: texts, and the policy versions that made their tokens.

A chat completion carries, for all its choices together, one span per run of tokens that one version made::

    {"choices": [{"index": 0, "message": {"content": "..."}}], "ostinato": {"spans": [[3, "9f2c", 7]]}}
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ostinato.core.errors import BadRequest, Corrupt, OstinatoError, Unauthorized, Unavailable
from ostinato.core.records import PolicyVersion

RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
_SAME_KEY = "the evaluation's admin key must equal serve.admin_key"


@dataclass(frozen=True, slots=True)
class Response:
    """One sampled text; `formed` if it is not empty and ended by itself. Example: ``Response("return a + b", True)``"""

    text: str
    formed: bool


@dataclass(frozen=True, slots=True)
class Health:
    """The model's public name and the version that each slot serves. Example: ``Health("smol", {"live": v3})``"""

    model: str
    slots: dict[str, PolicyVersion]


def read_answers(raw: bytes, expected: int) -> tuple[list[Response], list[PolicyVersion]]:
    """The answers in the order of their index, and every version that made a token of them.

    Raises:
        Corrupt: the answer is malformed or has another number of choices; the message names the part.
    """
    try:
        body = json.loads(raw)
        choices = {choice["index"]: choice for choice in body["choices"]}
        if set(choices) != set(range(expected)):
            raise ValueError(f"choices {sorted(choices)} where {expected} were asked for")
        responses = [_response(choices[i]) for i in range(expected)]
        policies = [_policy(number, content_hash) for number, content_hash, _ in body["ostinato"]["spans"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _corrupt("an answer", error) from error
    if any(response.text for response in responses) and not policies:
        raise Corrupt("an answer has text but names no version; nothing can be concluded from it")
    return responses, policies


def read_health(raw: bytes) -> Health:
    """The body of `GET /health`. Raises Corrupt; Unauthorized if it is that for a stranger."""
    try:
        body = json.loads(raw)
        if body.keys() == {"status"}:
            raise Unauthorized(f"the gateway tells /health no versions; {_SAME_KEY}")
        slots = {name: _policy(slot["number"], slot["hash"]) for name, slot in body["slots"].items()}
        return Health(str(body["model"]), slots)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _corrupt("/health", error) from error


def refusal(status: int, text: str, where: str) -> OstinatoError:
    """The error for an HTTP status other than 200: Unavailable if a retry may succeed."""
    message = f"{where}: the gateway answered {status}: {text[:300]}"
    if status in RETRIED:
        return Unavailable(message)
    if status in (401, 403):
        return Unauthorized(f"{message}; {_SAME_KEY}")
    return BadRequest(message)


def _response(choice: dict[str, Any]) -> Response:
    content = choice["message"]["content"]
    if content is not None and not isinstance(content, str):
        raise TypeError("message.content is not text")
    return Response(content or "", bool(content) and choice["finish_reason"] == "stop")


def _policy(number: Any, content_hash: Any) -> PolicyVersion:
    if type(number) is not int or not isinstance(content_hash, str):
        raise TypeError("a version's number is not an integer or its hash is not text")
    return PolicyVersion(number=number, hash=content_hash)


def _corrupt(what: str, error: Exception) -> Corrupt:
    return Corrupt(
        f"{what} of the gateway has not the promised form ({type(error).__name__}: {error}); "
        "does the URL point to an Ostinato gateway of this version?"
    )
