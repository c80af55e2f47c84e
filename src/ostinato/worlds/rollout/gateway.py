"""The gateway as the rollout worker sees it: a model for each episode, and a place to tell verdicts."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, cast

import aiohttp

from ostinato.core.errors import BadRequest, Unavailable
from ostinato.core.records import Arm, PolicyVersion
from ostinato.worlds.harness.gateway import GRACE_S, LEFT, EpisodeModel, PassedAnswer

_REFUSALS = (400, 413, 422)
_PASSED = (*_REFUSALS, 429)  # an agent that asks too much must not be able to end its rollout as torn
"""Another try would get them again."""


class WorldGateway:
    """One gateway, over HTTP. An async context manager.

    Args:
        url: where it listens, without a path.
        key: the run's admin key: who names a slot, and speaks for a world. Empty: a certificate says who asks.
        temperature: at which answers are sampled.
        timeout_s: longest answer, for a call that does not say itself how much time is left for it.
        context: TLS with a certificate of one's own, for `https`.
        slot: whose weights answer.

    Example::

        async with WorldGateway(url, key) as gateway:
            answered = await gateway.model("w3f.0.2.0", group="w3f.0", harness="9f2c").ask(messages, max_tokens=64)
    """

    def __init__(
        self,
        url: str,
        key: str,
        *,
        temperature: float = 1.0,
        timeout_s: float = 600.0,
        slot: str = Arm.WORLD.value,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._url, self._key, self.temperature, self._slot = url.rstrip("/"), key, temperature, slot
        self._context = context
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._model = ""

    async def __aenter__(self) -> WorldGateway:
        connector = aiohttp.TCPConnector(limit=0, ssl=self._context or True)
        headers = {"X-Ostinato-Key": self._key} if self._key else {}
        self._session = aiohttp.ClientSession(headers=headers, connector=connector)
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._session is not None:
            await self._session.close()

    def model(self, episode: str, *, group: str | None, harness: str, seed: int | None = None) -> EpisodeModel:
        """The model of one episode. `seed`: as `EpisodeModel`'s."""
        return EpisodeModel(self, episode, group, harness, slot=self._slot, seed=seed)

    async def ready(self) -> bool:
        """True once the slot holds weights."""
        return await self.holds() is not None

    async def holds(self) -> PolicyVersion | None:
        """The weights in the slot; None while there are none, or nobody answers."""
        try:
            health = await self.call("GET", "/health")
        except (Unavailable, BadRequest):
            return None
        self._model = str(health.get("model", ""))
        found = cast("dict[str, Any]", health.get("slots", {})).get(self._slot)
        return None if found is None else PolicyVersion(number=int(found["number"]), hash=str(found["hash"]))

    async def say(self, events: Sequence[dict[str, Any]]) -> None:
        """Send events, all in one call; they are in the log on return. Raises Unavailable, BadRequest."""
        await self.call("POST", "/v1/feedback", list(events))

    async def named(self) -> str:
        """What the gateway calls its model. Raises Unavailable."""
        if not self._model and not await self.ready():
            raise Unavailable(f"the gateway has no weights in the slot {self._slot!r} yet")
        return self._model

    async def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        """One call's answer. Raises Unavailable where another try may succeed, BadRequest where none will."""
        if self._session is None:
            raise RuntimeError("enter the gateway first")
        try:
            timeout = self._timeout(headers or {})
            asked = self._session.request(method, self._url + path, json=body, headers=headers, timeout=timeout)
            async with asked as response:
                answer = await response.json(content_type=None)
                status = response.status
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise Unavailable(f"{method} {path}: {type(error).__name__}: {error}") from error
        if status < 300:
            return answer
        said = f"{method} {path}: HTTP {status}: {answer}"
        if status in _REFUSALS:
            raise BadRequest(said)
        raise Unavailable(said)  # a key of another run or an empty slot passes with a restart, too

    @contextlib.asynccontextmanager
    async def streamed(self, path: str, body: bytes, headers: Mapping[str, str]) -> AsyncGenerator[PassedAnswer]:
        """One posted call's answer while it arrives; who asks too much is told so. Raises Unavailable where another try may succeed."""
        if self._session is None:
            raise RuntimeError("enter the gateway first")
        told = {**headers, "Content-Type": "application/json"}
        async with contextlib.AsyncExitStack() as stack:
            try:
                timeout = self._timeout(headers)
                posted = self._session.post(self._url + path, data=body, headers=told, timeout=timeout)
                response = await stack.enter_async_context(posted)
                if response.status >= 300 and response.status not in _PASSED:
                    raise Unavailable(f"POST {path}: HTTP {response.status}: {(await response.text())[:500]}")
            except (aiohttp.ClientError, TimeoutError) as error:
                raise Unavailable(f"POST {path}: {type(error).__name__}: {error}") from error
            yield PassedAnswer(status=response.status, headers=response.headers, parts=_parts(response))

    def _timeout(self, headers: Mapping[str, str]) -> aiohttp.ClientTimeout:
        """Of a call with these headers: where its time ends at the other side, the other side says so."""
        left = headers.get(LEFT, "")
        return aiohttp.ClientTimeout(total=int(left) / 1000 + 2 * GRACE_S if left.isdecimal() else self._timeout_s)


async def _parts(response: aiohttp.ClientResponse) -> AsyncGenerator[bytes]:
    try:
        async for part in response.content.iter_any():
            yield part
    except (aiohttp.ClientError, TimeoutError) as error:
        raise Unavailable(f"an answer was cut: {type(error).__name__}: {error}") from error


async def until_ready(gateway: WorldGateway, poll_s: float) -> None:
    """Wait until the gateway answers for worlds."""
    while not await gateway.ready():
        await asyncio.sleep(poll_s)
