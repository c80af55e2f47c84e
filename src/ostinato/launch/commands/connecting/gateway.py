"""The gateway as an agent sees it: the models that it lists, and one small call in a dialect."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import aiohttp

from ostinato.core.errors import BadConfig, Unauthorized, Unavailable
from ostinato.launch.commands.connecting.agents import Dialect
from ostinato.launch.commands.connecting.forms import Json
from ostinato.launch.commands.connecting.masking import hidden
from ostinato.launch.views.plain import plain

_MOST_BYTES = 1024 * 1024
_MOST_CHARS = 300  # of an error's text
_LOOK_S = 15.0
_CALL_S = 180.0  # enough for a model that is still loading on a slow machine
_TOKENS = 16

_CALLS: Mapping[Dialect, tuple[str, Json]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": _TOKENS}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": _TOKENS}),
    "responses": ("/v1/responses", {"input": "Say hello.", "max_output_tokens": _TOKENS, "store": False}),
}
_REMEDIES = {
    400: "look at --model and --dialect",
    401: "give the gateway's key as OSTINATO_API_KEY or with --key",
    403: "give another key as OSTINATO_API_KEY or with --key",
    404: "look at --url and --model; a gateway of an older version may not speak this dialect",
    429: "try again in a moment",
    503: "try again in a moment",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """What the gateway reports of a captured call. A field that is not reported is None, such as `version` if an outside model answered."""

    turn: str
    request: str
    arm: str
    version: int | None
    root: str
    prompt_tokens: int | None
    answer_tokens: int | None


async def first_model(url: str, key: str | None) -> str:
    """The model that the gateway lists first. Raises Unavailable, Unauthorized, BadConfig."""
    body, _ = await _ask(url, key, "/v1/models", None, _LOOK_S)
    listed: object = body.get("data")
    names = (
        [each.get("id") for each in cast(list[Any], listed) if isinstance(each, dict)]
        if isinstance(listed, list)
        else []
    )
    if not names or not isinstance(names[0], str):
        raise BadConfig(f"{url}/v1/models lists no model; is it a gateway's address? Name the model with --model")
    return names[0]


async def call(url: str, key: str | None, model: str, dialect: Dialect) -> Captured:
    """Make one small call. Raises Unavailable, Unauthorized, and BadConfig if it is refused, or answered but not captured."""
    path, question = _CALLS[dialect]
    body, headers = await _ask(url, key, path, {"model": model, **question}, _CALL_S)
    turn = headers.get("x-ostinato-turn", "")
    if not turn:
        raise BadConfig(f"{url} answered, but captured no turn (no X-Ostinato-Turn); give --url an Ostinato gateway")
    usage = cast(Json, found) if isinstance(found := body.get("usage"), dict) else {}
    version = headers.get("x-ostinato-policy", "")
    return Captured(
        turn=plain(turn),
        request=plain(headers.get("request-id", "")),
        arm=plain(headers.get("x-ostinato-arm", "")),
        version=int(version) if version.isdecimal() else None,
        root=plain(headers.get("x-ostinato-weights", "")),
        prompt_tokens=_count(usage, "prompt_tokens", "input_tokens"),
        answer_tokens=_count(usage, "completion_tokens", "output_tokens"),
    )


def _count(usage: Json, *names: str) -> int | None:
    return next((value for name in names if isinstance(value := usage.get(name), int)), None)


async def _ask(
    url: str, key: str | None, path: str, body: Json | None, timeout_s: float
) -> tuple[Json, Mapping[str, str]]:
    """Make a request; returns the JSON object and the response's headers. The key goes to this address only: no redirect is followed."""
    headers = {"anthropic-version": "2023-06-01"} | ({"Authorization": f"Bearer {key}"} if key else {})
    method = "GET" if body is None else "POST"
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with (
            aiohttp.ClientSession(headers=headers, timeout=timeout) as http,
            http.request(method, f"{url}{path}", json=body, allow_redirects=False) as response,
        ):
            raw = await _bounded(response)
            answered, status = response.headers, response.status
    except TimeoutError as error:
        raise Unavailable(f"{url} gave no answer within {timeout_s:g} s; look at `ostinato status`") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        why = f"{type(error).__name__}: {plain(hidden(str(error), key))}"
        raise Unavailable(
            f"{url} cannot be reached ({why}); start it with `ostinato up`, or name another with --url"
        ) from error
    if status != 200:
        raise _refusal(f"{url}{path}", status, raw, key)
    try:
        value: object = json.loads(raw)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise BadConfig(f"{url}{path} answered with something else than a JSON object; is --url a gateway's?")
    return cast(Json, value), answered


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    raw = b""
    async for piece in response.content.iter_any():
        raw += piece
        if len(raw) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES} bytes")
    return raw


def _refusal(where: str, status: int, raw: bytes, key: str | None) -> BadConfig | Unauthorized | Unavailable:
    try:
        said = json.loads(raw)["error"]["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        said = raw.decode(errors="replace")
    words = plain(hidden(" ".join(str(said).split()), key))[:_MOST_CHARS]
    kind = Unauthorized if status == 401 else Unavailable if status >= 500 or status == 429 else BadConfig
    remedy = _REMEDIES.get(status, "the gateway's output says why" if status >= 500 else "look at --url")
    return kind(f"{where} answered {status}: {words}; {remedy}")
