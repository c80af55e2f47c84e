"""The client for asyncio, which sends on a few threads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

from ostinato_client.events import Event, Receipt
from ostinato_client.sending import Sender

_THREADS = 8
_T = TypeVar("_T")


class AsyncOstinato:
    """As `Ostinato`, for asyncio. Use as `async with AsyncOstinato(url) as client`, or call `close()`.

    Example::

        async with AsyncOstinato("http://127.0.0.1:8321") as client:
            await client.feedback(completion.id, "accepted", True)
    """

    def __init__(self, base_url: str, api_key: str | None = None, *, deadline_s: float = 5.0) -> None:
        self._sender = Sender(base_url, api_key)
        self._deadline_s = deadline_s
        self._threads = ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="ostinato-feedback")

    async def __aenter__(self) -> AsyncOstinato:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Shut the threads down, without waiting for them."""
        self._threads.shutdown(wait=False)

    async def feedback(
        self,
        target: str,
        name: str,
        value: bool | float | None = None,
        *,
        source: str = "human",
        correction: str | None = None,
        comment: str | None = None,
        occurred_at: float | str | None = None,
        retracts: str | None = None,
        id: str | None = None,
    ) -> Receipt:
        """Report what happened to an answer; see `Ostinato.feedback`."""
        given: dict[str, Any] = {} if id is None else {"id": id}
        event = Event(target, name, value, source, correction, comment, occurred_at, retracts, **given)
        return (await self.feedback_many([event]))[0]

    async def consent(self, user: str, train: str | None = None, *, signature: str | None = None) -> str:
        """Record what a user allows, or ask for it; see `Ostinato.consent`."""
        return await self._call(self._sender.choose, user, train, signature, self._deadline_s)

    async def dials(self, user: str, *, signature: str | None = None) -> dict[str, Any]:
        """A user's dials; see `Ostinato.dials`."""
        return await self._dials("GET", user, None, signature)

    async def set_dials(
        self, user: str, dials: Mapping[str, float | str | None], *, signature: str | None = None
    ) -> dict[str, Any]:
        """Set some of a user's dials by hand; see `Ostinato.set_dials`."""
        return await self._dials("PUT", user, dict(dials), signature)

    async def reset_dials(self, user: str, *, signature: str | None = None) -> dict[str, Any]:
        """Return all dials of a user to the prior; see `Ostinato.reset_dials`."""
        return await self._dials("DELETE", user, None, signature)

    async def _dials(
        self, method: str, user: str, dials: Mapping[str, float | str | None] | None, signature: str | None
    ) -> dict[str, Any]:
        return await self._call(self._sender.dials, method, user, dials, signature, self._deadline_s)

    async def feedback_many(self, events: Iterable[Event]) -> list[Receipt]:
        """Report many events; see `Ostinato.feedback_many`."""
        return await self._call(self._sender.send, list(events), self._deadline_s)

    async def _call(self, method: Callable[..., _T], *args: object) -> _T:
        """Run the sender's method on a thread. Waiting for one counts against the deadline, too."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, method, *args, time.monotonic())
