"""Retries with exponential back-off, under an explicit policy: attempts, total time, Retry-After, and jitter from a given random source.

`Patience` lets a worker wait for a log whose server is unavailable, instead of exiting and restarting.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import TypeVar

from ostinato.core.errors import Unavailable

T = TypeVar("T")
E = TypeVar("E", bound=Exception)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often and for how long a call is retried.

    The first pause lasts `pause_s` seconds, and each further one twice as long, up to `longest_s`. There are at most `attempts` tries, and
    none starts more than `total_s` seconds after the first failure. `jitter` is the random fraction of a pause, so that
    callers that failed together do not retry together.

    Example: ``RetryPolicy(pause_s=0.5, longest_s=8.0, attempts=8, jitter=0.25)``
    """

    pause_s: float
    longest_s: float = 30.0
    attempts: int | None = None
    total_s: float = math.inf
    jitter: float = 0.0


class RetryLater(Unavailable):
    """Unavailable, and the other side has said how many seconds to wait."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def unavailable(message: str, headers: Mapping[str, str]) -> Unavailable:
    """Return the error for a response that may succeed on retry, with the wait from its headers (of any letter case), if any."""
    lower = {name.lower(): value for name, value in headers.items()}
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        if (value := lower.get(name, "")).isascii() and value.isdigit() and len(value) <= 9:
            return RetryLater(message, unit * int(value))
    return Unavailable(message)


class Backoff:
    """The failures of one call, and the pauses between them.

    Args:
        policy: how often and for how long to try.
        rng: source of the jitter; None: no jitter.
        clock: monotonic seconds.

    Example::

        backoff = Backoff(RetryPolicy(pause_s=0.5, attempts=3))
        pause_s = backoff.failed(error)  # 0.5, then 1.0, then None: give up
    """

    def __init__(
        self, policy: RetryPolicy, *, rng: random.Random | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._policy, self._rng, self._clock = policy, rng, clock
        self._pause_s = policy.pause_s
        self._first: float | None = None
        self.failures = 0

    def failed(self, error: BaseException | None = None) -> float | None:
        """Count a failure. Returns the seconds to wait before the next try; None if the policy allows none.

        For a `RetryLater` it is at least that error's own wait, of which no more than `longest_s` counts.
        """
        policy, now = self._policy, self._clock()
        self.failures += 1
        if self._first is None:
            self._first = now
        pause = self._pause_s
        self._pause_s = min(2 * self._pause_s, policy.longest_s)
        if self._rng is not None:
            pause *= 1 - policy.jitter * self._rng.random()
        if isinstance(error, RetryLater):
            pause = max(pause, min(error.retry_after_s, policy.longest_s))
        spent = policy.attempts is not None and self.failures >= policy.attempts
        return None if spent or now + pause - self._first > policy.total_s else pause


async def retry(
    ask: Callable[[], Awaitable[T]],
    policy: RetryPolicy,
    *,
    on: type[E],
    failed: Callable[[E], object] = lambda _: None,
    rng: random.Random | None = None,
) -> T:
    """Return the result of `ask`, which must be idempotent. Errors of the type `on` are retried; the last one, and any other, is raised.

    `failed` is called with each error of that type, including the last. `rng` as for `Backoff`.

    Example: ``await retry(lambda: gateway.say(events), RetryPolicy(pause_s=0.5, attempts=3), on=Unavailable)``
    """
    backoff = Backoff(policy, rng=rng)
    while True:
        try:
            return await ask()
        except on as error:
            failed(error)
            pause = backoff.failed(error)
            if pause is None:
                raise
        await asyncio.sleep(pause)


# ---------------------------------------------------------------- waiting for a log server


logger = logging.getLogger(__name__)


class Patience:
    """Retries calls that raise Unavailable. They must be idempotent, as all calls of a log and its folds are.

    Args:
        longest_s: seconds after which the error is raised after all.
        waiting: a context manager entered while waiting, given a text with the reason, such as `Pulse.during`.
        again_s: seconds between two attempts, each of which may itself take `record.append_s`.

    Example: ``await patience.until_there(lambda: log.append(row))``
    """

    def __init__(
        self, longest_s: float, waiting: Callable[[str], AbstractContextManager[None]], again_s: float = 0.5
    ) -> None:
        self._longest_s, self._waiting, self._again_s = longest_s, waiting, again_s
        self._waits = False  # so that only one of several waiting calls reports it

    async def until_there(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `ask`. Raises its errors, but Unavailable only after `longest_s` of failed attempts."""
        began = time.monotonic()
        with ExitStack() as said:
            while True:
                try:
                    return await ask()
                except Unavailable as error:
                    if time.monotonic() - began >= self._longest_s:
                        raise
                    if not self._waits:
                        logger.warning("waiting for the log, for %g s at most: %s", self._longest_s, error)
                        self._waits = True
                        said.callback(self._log_wait_end, time.monotonic())
                        said.enter_context(self._waiting(f"waiting for the log: {error}"[:300]))
                await asyncio.sleep(self._again_s)

    def _log_wait_end(self, since: float) -> None:
        self._waits = False
        logger.info("waited for the log for %.1f s", time.monotonic() - since)
