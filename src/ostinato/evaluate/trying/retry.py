"""Waits for a gateway, which may be down for a while, or whose slot may not serve the version under evaluation yet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import aiohttp

from ostinato.core.errors import Conflict, Corrupt, OstinatoError, Unavailable
from ostinato.core.records import PolicyVersion
from ostinato.evaluate.answers import read_health
from ostinato.evaluate.config import RunnerConfig

MAX_RESPONSE_BYTES = 16 * 2**20
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
    pause, failures, started = config.retry_pause_s, 0, time.monotonic()
    while True:
        try:
            return await ask()
        except WrongVersion:
            if time.monotonic() - started > config.slot_timeout_s:
                raise
        except (Unavailable, aiohttp.ClientError, TimeoutError) as error:
            failures += 1
            if failures >= config.attempts:
                raise Unavailable(
                    f"{what}: the gateway failed {failures} times, last with {type(error).__name__}: {error}; "
                    "is `ostinato serve` running?"
                ) from error
        await asyncio.sleep(pause)
        pause = min(2 * pause, 8.0)


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
