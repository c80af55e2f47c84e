"""The evaluation's side of the gateway: reading its answers, checking who made them, and waiting while it cannot answer yet.

A gateway may be down for a while, and its slot may not serve the version under evaluation yet.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import aiohttp

from ostinato.core.chat_answer import read_chat_answer, read_health
from ostinato.core.errors import BadRequest, Conflict, Corrupt, OstinatoError, Unauthorized, Unavailable
from ostinato.core.records import PolicyVersion
from ostinato.core.retry import Backoff, RetryPolicy, unavailable
from ostinato.evaluate.config import RunnerConfig

# ---------------------------------------------------------------- answers


RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
_SAME_KEY = "the evaluation's admin key must equal serve.admin_key"


@dataclass(frozen=True, slots=True)
class Response:
    """One sampled text; `formed` if it is not empty and ended by itself. Example: ``Response("return a + b", True)``"""

    text: str
    formed: bool


def read_answers(raw: bytes, expected: int) -> tuple[list[Response], tuple[PolicyVersion, ...]]:
    """The answers in the order of their index, and every version that made a token of them.

    Raises:
        Corrupt: the answer is malformed or has another number of choices; the message names the part.
    """
    answer = read_chat_answer(raw, expected)
    responses = [
        Response(each.message.text, bool(each.message.text) and each.finish == "stop") for each in answer.choices
    ]
    if any(response.text for response in responses) and not answer.policies:
        raise Corrupt("an answer has text but names no version; nothing can be concluded from it")
    return responses, answer.policies


def refusal(status: int, text: str, where: str, headers: Mapping[str, str]) -> OstinatoError:
    """The error for an HTTP status other than 200: Unavailable if a retry may succeed, with what `headers` say about when."""
    message = f"{where}: the gateway answered {status}: {text[:300]}"
    if status in RETRIED:
        return unavailable(message, headers)
    if status in (401, 403):
        return Unauthorized(f"{message}; {_SAME_KEY}")
    return BadRequest(message)


# ---------------------------------------------------------------- waiting


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
