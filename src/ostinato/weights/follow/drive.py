"""Drives a vLLM server so that it follows a ref of the weight store. The server's side is `weights.follow.vllm`.

The server's workers fetch and verify a version while they serve. Then the driver pauses the server, has it load the version, checks what it
serves, and resumes it. If an error occurs before the load, the server keeps serving the old version, and the error is reported.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp

from ostinato.core.errors import Conflict, Corrupt, NotFetched, NotFound, OstinatoError, Unavailable
from ostinato.core.records import PolicyVersion
from ostinato.core.retry import RetryPolicy, retry
from ostinato.weights.follow.follower import Follower

logger = logging.getLogger(__name__)

Kv = Literal["recompute", "keep"]
_LONGEST_WAIT_S = 60.0
_RESUMES = RetryPolicy(pause_s=0.1, attempts=5)
_QUERY_S = 60.0  # timeout of requests that need no download and no load
# transient errors of a server's workers, which do not mean that the version is bad
_TRANSIENT = ("Unavailable", "Unauthorized", "StorageFull", "OSError", "TimeoutError")
_OTHER_DRIVER_S = 2.0  # longest wait for another driver to finish the update that it has begun


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSwap:
    """The seconds that a swap took. `staged_s`: fetching while serving; `pause_s`: the pause, measured by the driver; `load_s`: the load
    within the pause.

    Example: ``VllmSwap(policy=v17, staged_s=0.6, pause_s=0.21, load_s=0.16)``
    """

    policy: PolicyVersion
    staged_s: float
    pause_s: float
    load_s: float


class VllmFollower:
    """Drives one vLLM server. `store` is the weight store's location as the server's workers see it.

    `kv` says what happens to the KV cache that the old weights computed. "recompute": open streams continue, and the new weights recompute
    their KV cache and all cached prefixes. "keep": nothing is recomputed; open streams, and new requests that share a cached prefix, use
    the old weights' KV cache.

    Example::

        async with VllmFollower("http://127.0.0.1:8000", follower, {"url": "/mnt/weights"}) as vllm:
            swap = await vllm.swap(await follower.resolve("live"))
    """

    def __init__(
        self,
        url: str,
        follower: Follower,
        store: Mapping[str, Any],
        *,
        kv: Kv = "recompute",
        poll_s: float = 0.05,
        timeout_s: float = 600.0,
    ) -> None:
        self._url, self._follower, self._store = url.rstrip("/"), follower, dict(store)
        self._kv, self._poll_s = kv, poll_s
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=timeout_s)
        self._session: aiohttp.ClientSession | None = None
        self._stale_cache = False  # the server has the new weights, but the KV cache of the old ones

    async def __aenter__(self) -> VllmFollower:
        # no keep-alive: the server may close an idle connection just as a request arrives
        connector = aiohttp.TCPConnector(force_close=True)
        self._session = aiohttp.ClientSession(timeout=self._timeout, connector=connector)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def served(self) -> str:
        """Return the root that the server says it serves, or some other text before the first swap."""
        return str((await self._call("GET", "/weight_info", within_s=_QUERY_S))["weight_version"])

    async def stage(self, policy: PolicyVersion) -> float:
        """Have every worker fetch and verify a version while it serves. Returns the seconds that the slowest worker took.

        Raises Corrupt if the workers refuse the version, NotFetched if they cannot fetch it, Unavailable if the server cannot be reached.
        """
        await self._call("POST", "/init_weight_transfer_engine", {"init_info": self._store}, within_s=_QUERY_S)
        workers = await self._ask("ostinato_stage", policy.hash)
        while any(worker["state"] == "fetching" for worker in workers):
            await asyncio.sleep(self._poll_s)
            workers = await self._ask("ostinato_status")
        refused = [worker for worker in workers if worker["state"] != "ready" or worker["root"] != policy.hash]
        if refused:
            why = refused[0].get("error") or f"a worker's state is {refused[0]['state']!r}"
            if why.startswith(_TRANSIENT):
                raise NotFetched(f"{self._url} cannot fetch {policy} and keeps its weights: {why}")
            raise Corrupt(f"{self._url} refuses {policy} and keeps its weights: {why}")
        return max(float(worker["seconds"]) for worker in workers)

    async def has_staged(self, policy: PolicyVersion) -> bool:
        """Return True if every worker has the version ready, so that `swap` does not wait for a download. Raises Unavailable."""
        workers = await self._ask("ostinato_status")
        return all(worker["state"] == "ready" and worker["root"] == policy.hash for worker in workers)

    async def swap(self, policy: PolicyVersion, loaded: Callable[[], object] | None = None) -> VllmSwap:
        """Make the server serve a version. Streams stay open.

        Calls `loaded` when the version is loaded and the server is still paused: all tokens before come from the old version, all later
        ones from the new.

        Raises:
            Corrupt: the workers refused the version; the server was not paused and serves the old version.
            Unavailable: the server cannot be reached, or refused a step. It was resumed, and serves the old version, or the new one with
                the old weights' KV cache: swap again.
            Conflict: it is unknown what the server serves, or it serves something other than it says. It is left paused and answers no
                requests.
        """
        staged_s = await self.stage(policy)
        started, known = time.perf_counter(), True
        try:
            await self._call("POST", "/pause?mode=keep&clear_cache=false")
            load_s = await self._load(policy)
            self._stale_cache = self._kv == "recompute"
            if loaded is not None:
                loaded()
            if self._stale_cache:
                await self._reset_kv_cache()
        except Conflict:
            known = False
            raise
        finally:
            if known:
                await self._resume()
        return VllmSwap(policy=policy, staged_s=staged_s, pause_s=time.perf_counter() - started, load_s=load_s)

    async def follow(
        self,
        ref: str,
        on_swap: Callable[[VllmSwap], object],
        on_error: Callable[[str, Exception], object] | None = None,
        interval_s: float = 1.0,
    ) -> None:
        """Swap whenever the server serves something other than the ref's version, until cancelled.

        A server that restarts is swapped to the version again; a server that a killed driver left paused is resumed. A failure is reported
        once per distinct message and retried with exponential back-off, at most a minute apart.
        """
        report = on_error or _log_error
        reported, wait, first = "", interval_s, True
        while True:
            try:
                await self._check(ref, on_swap, first)
                reported, wait, first = "", interval_s, False
            except (OstinatoError, OSError) as error:
                if str(error) != reported:
                    report(ref, error)
                reported, wait = str(error), min(2 * wait, _LONGEST_WAIT_S)
            await asyncio.sleep(wait)

    # ------------------------------------------------------------ internals

    async def _check(self, ref: str, on_swap: Callable[[VllmSwap], object], first: bool) -> None:
        """Compare ref and server once, and swap if they differ. `first`: no check has succeeded before."""
        policy = await self._follower.resolve(ref)
        if policy is None:
            raise NotFound(f"there is no ref {ref} in the weight store; `ostinato status` lists them", field="ref")
        if await self.served() != policy.hash or self._stale_cache:
            on_swap(await self.swap(policy))
        elif first and (await self._call("GET", "/is_paused"))["is_paused"]:
            logger.warning("%s serves %s but is paused: a driver died during a swap; it is resumed", self._url, policy)
            if self._kv == "recompute":
                await self._reset_kv_cache()  # the driver may have died before it did this
            await self._resume()

    async def _load(self, policy: PolicyVersion) -> float:
        """Load the staged version, and verify that every worker and the server's label name it."""
        started = time.perf_counter()
        try:
            await self._call("POST", "/start_weight_update")
        except Unavailable as error:
            if "already active" not in str(error):
                raise
            logger.warning("%s: a driver died during an update; this one continues it", self._url)
        try:
            await self._call("POST", "/update_weights", {"update_info": {"root": policy.hash}})
            await self._call("POST", "/finish_weight_update", {"weight_version": policy.hash})
        except Unavailable as error:
            if await self._serves(policy):
                logger.warning("%s: another driver finished the update to %s", self._url, policy)
                return time.perf_counter() - started
            if await self._may_hold(policy):
                raise Conflict(f"{self._url} may hold {policy} under the name of what it served: {error}") from error
            raise
        label, held = await self._named()
        if {label} | held != {policy.hash}:
            raise Conflict(f"{self._url} should serve {policy.hash}, but says {label} and its workers {sorted(held)}")
        return time.perf_counter() - started

    async def _named(self) -> tuple[str, set[str]]:
        """Return what the server says it serves, and what its workers say."""
        return await self.served(), {str(worker["served"]) for worker in await self._ask("ostinato_status")}

    async def _serves(self, policy: PolicyVersion) -> bool:
        """Return True if server and workers name the version, now or once another driver has finished its update."""
        ends = time.perf_counter() + _OTHER_DRIVER_S
        while True:
            try:
                label, held = await self._named()
            except Unavailable:
                return False
            if {label} | held == {policy.hash}:
                return True
            if held != {policy.hash} or time.perf_counter() >= ends:
                return False
            await asyncio.sleep(self._poll_s)

    async def _may_hold(self, policy: PolicyVersion) -> bool:
        """Return True if some worker serves the version, or if the workers cannot be asked."""
        try:
            return any(worker["served"] == policy.hash for worker in await self._ask("ostinato_status"))
        except Unavailable:
            return True

    async def _reset_kv_cache(self) -> None:
        """Drop the whole KV cache. Running streams recompute what they need."""
        done = await self._call("POST", "/reset_prefix_cache?reset_running_requests=true")
        if not done.get("success"):
            raise Unavailable(f"{self._url} serves the new weights but kept its cache: {done}; swap again")
        self._stale_cache = False

    async def _resume(self) -> None:
        """Resume the server. Raises Conflict if its workers serve different weights or a worker says that its weights are broken."""

        async def once() -> None:
            workers = await self._ask("ostinato_status")
            broken = next((worker["broken"] for worker in workers if worker["broken"]), "")
            if broken or len({worker["served"] for worker in workers}) > 1:
                raise Conflict(f"{self._url} is left paused: {broken or 'its workers serve different weights'}")
            await self._call("POST", "/resume")

        try:
            await retry(once, _RESUMES, on=Unavailable)
        except Unavailable as error:
            raise Unavailable(f"{self._url} is paused and cannot be resumed: {error}. POST /resume there") from error

    async def _ask(self, method: str, *args: str) -> list[dict[str, Any]]:
        """Call a method of the worker extension on every worker."""
        answer = await self._call("POST", "/collective_rpc", {"method": method, "args": list(args)}, within_s=_QUERY_S)
        return answer["results"]

    async def _call(
        self, verb: str, path: str, body: Mapping[str, Any] | None = None, *, within_s: float | None = None
    ) -> dict[str, Any]:
        assert self._session is not None, "use `async with VllmFollower(...)`"
        try:
            async with asyncio.timeout(within_s), self._session.request(verb, self._url + path, json=body) as reply:
                text = await reply.text()
                if reply.status == 404:
                    raise Unavailable(f"{self._url} has no {path}: {_START}")
                if reply.status >= 400:
                    why = " ".join(text.split())[:1000]
                    raise Unavailable(f"{self._url} refused {path}: {why} ({_START})")
                return await reply.json() if text else {}
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise Unavailable(f"{self._url}{path}: {type(error).__name__}: {error}") from error


_START = (
    'start vLLM with VLLM_SERVER_DEV_MODE=1, --weight-transfer-config \'{"backend": "ostinato"}\' and '
    "--worker-extension-cls ostinato.weights.follow.vllm.worker.StagingWorker"
)


def _log_error(ref: str, error: Exception) -> None:
    logger.error("ref %s: the server's weights stay as they are: %s", ref, error)
