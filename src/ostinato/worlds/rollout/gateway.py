"""The rollout worker's client of the gateway: a model for each episode, and a place to send verdicts to."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import aiohttp

from ostinato.core.chat_answer import read_health
from ostinato.core.errors import BadRequest, Unauthorized, Unavailable
from ostinato.core.records import Arm, PolicyVersion
from ostinato.core.retry import unavailable
from ostinato.worlds.harness.gateway import GRACE_S, LEFT, EpisodeModel, PassedAnswer

_REFUSALS = (400, 413, 422)
_PASSED = (*_REFUSALS, 429)  # an agent that sends too many requests must not be able to end its rollout as torn
"""HTTP statuses that a retry would get again."""


class WorldGateway:
    """One gateway, over HTTP. An async context manager.

    Args:
        url: its address, without a path.
        key: the run's admin key, which is needed to name a slot and to speak for a world. Empty: a certificate identifies the caller.
        temperature: the temperature at which answers are sampled.
        timeout_s: longest wait for an answer, for a call that does not itself say how much time is left for it.
        context: TLS with a client certificate, for `https`.
        slot: the slot whose weights answer.

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
        """The policy version in the slot; None if there is none, or the gateway does not answer."""
        try:
            health = read_health(await self.call("GET", "/health"))
        except (Unavailable, BadRequest, Unauthorized):
            return None
        self._model = health.model
        return health.slots.get(self._slot)

    async def say(self, events: Sequence[dict[str, Any]]) -> None:
        """Send events, all in one call; they are in the log on return. Raises Unavailable, BadRequest."""
        await self.call("POST", "/v1/feedback", list(events))

    async def named(self) -> str:
        """The gateway's name for its model. Raises Unavailable."""
        if not self._model and not await self.ready():
            raise Unavailable(f"the gateway has no weights in the slot {self._slot!r} yet")
        return self._model

    async def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        """One call's answer. Raises Unavailable if another try may succeed, BadRequest if none will."""
        if self._session is None:
            raise RuntimeError("enter the gateway first")
        try:
            timeout = self._timeout(headers or {})
            asked = self._session.request(method, self._url + path, json=body, headers=headers, timeout=timeout)
            async with asked as response:
                answer = await response.json(content_type=None)
                status, told = response.status, response.headers
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise Unavailable(f"{method} {path}: {type(error).__name__}: {error}") from error
        if status < 300:
            return answer
        said = f"{method} {path}: HTTP {status}: {answer}"
        if status in _REFUSALS:
            raise BadRequest(said)
        raise unavailable(said, told)  # another run's key or an empty slot can also be cured by a restart

    @contextlib.asynccontextmanager
    async def streamed(self, path: str, body: bytes, headers: Mapping[str, str]) -> AsyncGenerator[PassedAnswer]:
        """The answer to a POST while it arrives, also if it says "too many requests". Raises Unavailable if another try may succeed."""
        if self._session is None:
            raise RuntimeError("enter the gateway first")
        told = {**headers, "Content-Type": "application/json"}
        async with contextlib.AsyncExitStack() as stack:
            try:
                timeout = self._timeout(headers)
                posted = self._session.post(self._url + path, data=body, headers=told, timeout=timeout)
                response = await stack.enter_async_context(posted)
                if response.status >= 300 and response.status not in _PASSED:
                    said = f"POST {path}: HTTP {response.status}: {(await response.text())[:500]}"
                    raise unavailable(said, response.headers)
            except (aiohttp.ClientError, TimeoutError) as error:
                raise Unavailable(f"POST {path}: {type(error).__name__}: {error}") from error
            yield PassedAnswer(status=response.status, headers=response.headers, parts=_parts(response))

    def _timeout(self, headers: Mapping[str, str]) -> aiohttp.ClientTimeout:
        """The timeout of a call with these headers. It is later than the deadline stated there, which the gateway itself enforces."""
        left = headers.get(LEFT, "")
        return aiohttp.ClientTimeout(total=int(left) / 1000 + 2 * GRACE_S if left.isdecimal() else self._timeout_s)


async def _parts(response: aiohttp.ClientResponse) -> AsyncGenerator[bytes]:
    try:
        async for part in response.content.iter_any():
            yield part
    except (aiohttp.ClientError, TimeoutError) as error:
        raise Unavailable(f"an answer was cut: {type(error).__name__}: {error}") from error
