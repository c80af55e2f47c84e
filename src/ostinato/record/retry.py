"""Lets a worker wait for a log whose server is unavailable, instead of exiting and restarting."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, ExitStack
from typing import TypeVar

from ostinato.core.errors import Unavailable

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Patience:
    """Retries calls that raise Unavailable. They must be safe to repeat, as all calls of a log and its folds are.

    Args:
        longest_s: seconds after which the error is raised after all.
        waiting: a context manager entered while waiting, with a text that says for what, such as `Pulse.during`.
        again_s: seconds between two attempts, each of which may itself take `record.append_s`.

    Example: ``await patience.until_there(lambda: log.append(row))``
    """

    def __init__(
        self, longest_s: float, waiting: Callable[[str], AbstractContextManager[None]], again_s: float = 0.5
    ) -> None:
        self._longest_s, self._waiting, self._again_s = longest_s, waiting, again_s
        self._waits = False  # so that only one of several waiting calls reports it

    async def until_there(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The result of `ask`. Raises its errors, but Unavailable only after `longest_s` of failed attempts."""
        began = time.monotonic()
        with ExitStack() as said:
            while True:
                try:
                    answer = await ask()
                except Unavailable as error:
                    if time.monotonic() - began >= self._longest_s:
                        raise
                    if not self._waits:
                        logger.warning("waiting for the log, for %g s at most: %s", self._longest_s, error)
                        self._waits = True
                        said.callback(self._ended, time.monotonic())
                        said.enter_context(self._waiting(f"waiting for the log: {error}"[:300]))
                    await asyncio.sleep(self._again_s)
                else:
                    return answer

    def _ended(self, since: float) -> None:
        self._waits = False
        logger.info("waited for the log for %.1f s", time.monotonic() - since)
