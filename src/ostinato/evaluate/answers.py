"""The gateway's answers to the evaluation runner, and waiting for a gateway that cannot answer yet.

A chat completion carries, for all its choices together, one span per run of tokens that one version made::

    {"choices": [{"index": 0, "message": {"content": "..."}}], "ostinato": {"spans": [[3, "9f2c", 7]]}}

A gateway may be down for a while, and its slot may not serve the version under evaluation yet.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import aiohttp

from ostinato.core.errors import BadRequest, Conflict, Corrupt, OstinatoError, Unauthorized, Unavailable
from ostinato.core.records import PolicyVersion
from ostinato.core.retry import Backoff, RetryPolicy, unavailable
from ostinato.evaluate.config import RunnerConfig

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


def refusal(status: int, text: str, where: str, headers: Mapping[str, str]) -> OstinatoError:
    """The error for an HTTP status other than 200: Unavailable if a retry may succeed, with what `headers` say about when."""
    message = f"{where}: the gateway answered {status}: {text[:300]}"
    if status in RETRIED:
        return unavailable(message, headers)
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


# ---------------------------------------------------------------- Retries


MAX_RESPONSE_BYTES = 16 * 2**20
_LONGEST_PAUSE_S = 8.0
_T = TypeVar("_T")


class WrongVersion(Unavailable):
    """A response was made, in part or whole, by another version than the one under evaluation, or the slot is empty."""


def check_version(slot: str, policy: PolicyVersion, found: PolicyVersion | None) -> None:
    """Raise WrongVersion while the slot does not hold `policy` yet, Conflict once it holds another that is newer."""
    if found is None or (found.hash != policy.hash and found.number <= policy.number):
        serves = "is not loaded" if found is None else f"serves {found}"
        raise WrongVersion(
            f"waiting for slot {slot!r} to serve {policy}; it {serves}. Does the engine follow this ref?"
        )
    if found.hash != policy.hash:
        raise Conflict(f"slot {slot!r} has moved on to {found} while {policy} was evaluated")


async def patiently(config: RunnerConfig, what: str, ask: Callable[[], Awaitable[_T]]) -> _T:
    """Call `ask` until it succeeds; transport failures and waiting for a version have separate budgets. Raises Unavailable."""
    policy = RetryPolicy(pause_s=config.retry_pause_s, longest_s=_LONGEST_PAUSE_S, jitter=0.25)
    rng = random.Random()
    transport = Backoff(replace(policy, attempts=config.attempts), rng=rng)
    version = Backoff(replace(policy, total_s=config.slot_timeout_s), rng=rng)
    while True:
        try:
            return await ask()
        except WrongVersion as error:
            pause = version.failed(error)
            if pause is None:
                raise
        except (Unavailable, aiohttp.ClientError, TimeoutError) as error:
            pause = transport.failed(error)
            if pause is None:
                raise Unavailable(
                    f"{what}: the gateway failed {transport.failures} times, last with {type(error).__name__}: {error}; "
                    "is `ostinato serve` running?"
                ) from error
        await asyncio.sleep(pause)


async def served_model(session: aiohttp.ClientSession, health: str, slot: str, policy: PolicyVersion) -> str:
    """The gateway's model name, once the slot serves `policy`: a wrong version must not cost a whole batch of samples.

    Raises WrongVersion, Conflict, Corrupt.
    """
    async with session.get(health) as response:
        found = read_health(await bounded(response))
    check_version(slot, policy, found.slots.get(slot))
    return found.model


async def bounded(response: aiohttp.ClientResponse) -> bytes:
    """A response's body. Raises Corrupt if it is longer than any gateway sends."""
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_chunked(2**16):
        parts.append(part)
        size += len(part)
        if size > MAX_RESPONSE_BYTES:
            raise Corrupt(f"{response.url} sent more than {MAX_RESPONSE_BYTES} bytes; is it an Ostinato gateway?")
    return b"".join(parts)


def first_error(errors: BaseExceptionGroup[OstinatoError]) -> OstinatoError:
    """One error out of a task group's tree: the tasks fail for the same reason, and callers catch by type."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, OstinatoError)
    return error
