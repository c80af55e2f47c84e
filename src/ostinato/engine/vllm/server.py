"""One vLLM server over HTTP: its settings, token streams and scores. Its weights are handled elsewhere (`WeightDriver`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Protocol, Self

import aiohttp

from ostinato.core.errors import BadConfig, BadRequest, BadRoutes, Unavailable
from ostinato.core.records import PolicyVersion
from ostinato.engine.vllm.wire import (
    VllmServerInfo,
    WireChoice,
    read_about,
    read_context,
    read_event,
    read_scores,
    read_version,
)

_LOG = logging.getLogger(__name__)
_PATH = "/inference/v1/generate"
_MODE = "processed_logprobs"
_LOOK_S = 1.0
_GRACE_S = 60.0
_LINE, _LINE_WITH_ROUTES = 1 << 20, 1 << 27  # half of the longest event: 100,000 tokens' routes may take 85 MB
_START = (
    "start it with VLLM_SERVER_DEV_MODE=1, --enable-scale-out, --logprobs-mode processed_logprobs and what "
    "`ostinato weights drive-vllm --help` says of weights; for JSON schemas and demanded calls also with "
    "--structured-outputs-config.backend guidance"
)


class Paused(Protocol):
    """The result of a change of weights."""

    @property
    def pause_s(self) -> float:
        """Seconds during which the server made no token."""
        ...


class WeightDriver(Protocol):
    """Brings versions of the weights to one server: `weights.follow.drive.VllmFollower`."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, kind: Any, error: Any, at: Any) -> None: ...

    async def served(self) -> str:
        """The hash of the version that the server reports to serve."""
        ...

    async def stage(self, policy: PolicyVersion) -> object:
        """Have the server fetch and verify a version while it goes on serving. Raises Corrupt, Unavailable."""
        ...

    async def has_staged(self, policy: PolicyVersion) -> bool:
        """Whether the server still has the version that it staged: it may have been restarted since. Raises Unavailable."""
        ...

    async def swap(self, policy: PolicyVersion, loaded: Callable[[], object]) -> Paused:
        """Load a version; calls `loaded` when the weights are in and the server has not resumed yet."""
        ...


class ServerClient:
    """A client of one server. `driver` brings it weights. `experts`: of each layer of the model; 0 for a dense one.

    `follows_grammars`: it was started so that it reads our grammars. `told`: its version, and what it says of itself. Both are known once
    `context` has returned.
    """

    def __init__(self, url: str, driver: WeightDriver, *, silence_s: float, experts: int = 0) -> None:
        self.url, self.driver, self._experts = url.rstrip("/"), driver, experts
        self.follows_grammars = False
        self.told: tuple[str, VllmServerInfo] | None = None
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=silence_s),
            # the server has limits of its own, and a connection that it closes as a request arrives would look like its failure
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            read_bufsize=_LINE_WITH_ROUTES if experts else _LINE,
        )

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        await self._session.close()

    async def context(self, within_s: float) -> int:
        """The context length (prompt and answer together, in tokens). Waits for the server to answer. Raises Unavailable if it does not
        within `within_s`, BadConfig if it was started with wrong options.
        """
        ends = asyncio.get_running_loop().time() + within_s
        while True:
            try:
                context = read_context(await self._ask("/v1/models"))
                break
            except Unavailable:
                if asyncio.get_running_loop().time() >= ends:
                    raise
                await asyncio.sleep(_LOOK_S)
        about = read_about(await self._ask("/server_info?config_format=json"))
        version, settings = read_version(await self._ask("/version")), about.vllm_config
        if settings.logprobs_mode != _MODE:
            raise BadConfig(f"{self.url} reports {settings.logprobs_mode}, which leave the temperature out: {_START}")
        if settings.dies_of_seeds:
            raise BadConfig(
                f"{self.url} runs on a CPU with chunked prefill, where one long prompt with a seed ends it; start it with "
                f"--no-enable-chunked-prefill --max-num-batched-tokens {context} (its context)"
            )
        if self._experts and not settings.returns_routes:
            _LOG.warning(
                "%s does not say which experts a token went to, so the trainer leaves its answers out: start it with "
                "--enable-return-routed-experts, or set train.router_replay = false",
                self.url,
            )
        self.follows_grammars, self.told = settings.reads_lark, (version, about)
        return context

    async def check_health(self) -> None:
        """Raise Unavailable if the server cannot be reached or reports that its engine is dead."""
        await self._ask("/health")

    async def tokens(self, body: Mapping[str, Any]) -> AsyncGenerator[WireChoice, None]:
        """New tokens as they are sampled; closing the generator frees the request. Raises BadRequest, Unavailable."""
        try:
            async with self._session.post(self.url + _PATH, json=dict(body) | {"stream": True}) as reply:
                await self._check(reply)
                async for line in reply.content:
                    for choice in read_event(line):
                        await self._keep_routes(choice)
                        yield choice
        except BadRequest:  # also a ValueError, but the caller's fault
            raise
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise self._lost(error) from error

    async def _keep_routes(self, choice: WireChoice) -> None:
        """Read the choice's routes in a thread, if there are any: those of a long answer take a while. Invalid ones are not kept."""
        if not self._experts or choice.routed_experts is None:
            return
        try:
            await asyncio.to_thread(choice.keep_routes, self._experts)
        except BadRoutes as error:
            _LOG.error("%s: the routes of an answer are not kept: %s", self.url, error)

    async def scores(self, ids: Sequence[int], start: int, salt: str) -> list[float]:
        """Log-probabilities of ids[start:] at temperature 1. Raises Unavailable."""
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
        body = {"token_ids": list(ids), "sampling_params": sampling, "cache_salt": salt}
        return read_scores(await self._ask(_PATH, body), list(ids), start)

    async def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        verb = "GET" if body is None else "POST"
        try:
            async with self._session.request(verb, self.url + path, json=body) as reply:
                await self._check(reply)
                return await reply.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._lost(error) from error

    async def _check(self, reply: aiohttp.ClientResponse) -> None:
        if reply.status < 400:
            return
        said = " ".join((await reply.text()).split())[:500]
        if reply.status == 404:
            raise BadConfig(f"{self.url} has no {reply.url.path}: {_START}")
        if reply.status == 400:
            raise BadRequest(f"The vLLM server refuses the request: {said}")
        raise Unavailable(f"{self.url}{reply.url.path} answers {reply.status}: {said}")

    def _lost(self, error: Exception) -> Unavailable:
        return Unavailable(f"{self.url} cannot be reached: {type(error).__name__}: {error}; is the vLLM server up?")


async def contexts_of(servers: Sequence[ServerClient], within_s: float) -> list[int]:
    """The contexts of the servers that answer within `within_s`, and at the latest `_GRACE_S` after the first one; `told` is None for the
    others. Raises Unavailable if none does, BadConfig if one was started with wrong options.
    """
    asked = [asyncio.ensure_future(server.context(within_s)) for server in servers]
    try:
        for answer in asyncio.as_completed(asked):
            with contextlib.suppress(Unavailable):
                await answer
                break
        await asyncio.wait(asked, timeout=_GRACE_S)
    finally:
        for each in asked:
            each.cancel()
        results = await asyncio.gather(*asked, return_exceptions=True)
    found = list[int]()
    for server, result in zip(servers, results, strict=True):
        if isinstance(result, int):
            found.append(result)
            continue
        server.told = None
        if not isinstance(result, (Unavailable, asyncio.CancelledError)):
            raise result
        _LOG.error("%s does not answer yet; the others are used without it", server.url)
    if not found:
        raise next(each for each in results if isinstance(each, Unavailable))
    return found
