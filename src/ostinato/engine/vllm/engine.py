"""`core.seams.Engine` over vLLM servers: each server holds one version of the weights, and one or several servers serve a slot.

Log-probabilities are the server's own, after its temperature and top-p. The numerics contract names the servers and promises no bits.

Routing is prefix-aware: among a slot's replicas (servers that hold the requested version), a request goes to the one that was sent most of
its prompt before, unless its load is too high. No server is queried for this: its prefix cache is guessed from what was sent to it, and a
wrong guess costs a prefill, never a wrong answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from ostinato.core.errors import BadConfig, OstinatoError, Unavailable
from ostinato.core.generation import Capabilities, Chunk, Generate
from ostinato.core.numerics import Contract
from ostinato.core.records import Arm, Finish, PolicyVersion
from ostinato.core.seams import Renderer
from ostinato.core.weights import Snapshot, Swap
from ostinato.engine.admission import check_loaded, check_request, check_room, check_score, pause_stats, prefix_key
from ostinato.engine.config import EngineConfig
from ostinato.engine.vllm.fleet import Replica, VllmFleet
from ostinato.engine.vllm.loans import Loans
from ostinato.engine.vllm.server import (
    OpenAnswer,
    ServerClient,
    System,
    VllmServerInfo,
    WeightDriver,
    WireChoice,
    contexts_of,
)
from ostinato.model.steering import StaticSteering
from ostinato.model.tensors import check_finite

# ---------------------------------------------------------------- routing


BLOCK = 64
"""Tokens per link of a prompt's hash chain: the granularity of prefix matching."""
BOUND = 1.25
"""Load bound: a request avoids replicas whose open samples would exceed this many times the mean, rounded up."""
_MAX_LINKS = 1 << 15  # remembered per replica: 2M tokens


def links(key: bytes, ids: Sequence[int]) -> list[bytes]:
    """Return a prompt's hash chain: link i covers `key` and the first (i + 1) * BLOCK tokens; the last link covers all tokens.

    Two prompts with the same key (`engine.admission.prefix_key`) share links exactly as far as they share whole blocks from the start.

    Example: ``links(k, range(70))[:1] == links(k, range(64))``
    """
    chain, last = list[bytes](), key
    for start in range(0, len(ids), BLOCK):
        last = blake2b(last + array("q", ids[start : start + BLOCK]).tobytes(), digest_size=8).digest()
        chain.append(last)
    return chain


class SentPrefixes:
    """The links most recently sent to each replica, by the replica's name: an estimate of its prefix cache.

    Example::

        sent.send("http://a", chain)
        assert sent.known("http://a", chain) == len(chain)
    """

    def __init__(self, kept: int = _MAX_LINKS) -> None:
        self._kept = kept
        self._links: dict[str, OrderedDict[bytes, None]] = {}

    def known(self, name: str, chain: Sequence[bytes]) -> int:
        """Return how many leading links of a chain the replica was sent before."""
        sent = self._links.get(name, {})
        return next((at for at, link in enumerate(chain) if link not in sent), len(chain))

    def send(self, name: str, chain: Sequence[bytes]) -> None:
        """Record that a prompt is sent to the replica. Evicts the oldest links, and within a prompt its end before its beginning."""
        sent = self._links.setdefault(name, OrderedDict())
        for link in reversed(chain):
            sent[link] = None
            sent.move_to_end(link)
        while len(sent) > self._kept:
            sent.popitem(last=False)


def route(
    known: Mapping[str, int], running: Mapping[str, int], chains: Mapping[str, Sequence[bytes]], samples: int
) -> str:
    """Choose the replica for a request; return its name.

    Replicas are ranked by known links, most first, then by rendezvous hashing (Thaler and Ravishankar 1998) of the first link that the
    best replica does not know, so that prompts with the same beginning go to the same replica even without a history. The first replica
    whose load stays within BOUND times the mean is chosen (Mirrokni et al. 2018), else the least loaded one. A request's samples are never
    split.

    Args:
        known: name -> how many links of the request's prompt the replica was sent before. Not empty.
        running: name -> open samples.
        chains: name -> the prompt's hash chain under the replica's key; not empty.
        samples: the number of requested samples.
    """
    best = max(known.values())

    def weight(name: str) -> bytes:
        chain = chains[name]
        return blake2b(chain[min(best, len(chain) - 1)] + name.encode(), digest_size=8).digest()

    order = sorted(known, key=lambda name: (known[name], weight(name)), reverse=True)
    most = math.ceil(BOUND * (sum(running[name] for name in order) + samples) / len(order))
    return next((name for name in order if running[name] + samples <= most), min(order, key=lambda name: running[name]))


# ---------------------------------------------------------------- numerics


def contract_of(reports: Sequence[tuple[str, VllmServerInfo]]) -> Contract:
    """Return the numerics contract of servers with these versions and descriptions. A field in which they differ names all values.

    It distinguishes the turns of different engines but promises no bits: batch shapes, kernels and cores are unknown.
    """
    settings = [about.vllm_config for _, about in reports]
    systems = [about.system_env or System() for _, about in reports]
    devices = [
        system.nvidia_gpu_models or each.device_config.device for system, each in zip(systems, settings, strict=True)
    ]
    return Contract(
        mode="fast",
        torch=_all(system.torch_version for system in systems),
        blas="unknown",
        isa=_all(devices),
        threads=1,
        block=1,
        dtype=_all(each.model_config_.dtype.removeprefix("torch.") for each in settings),
        quantisation=_all(each.model_config_.quantization or "none" for each in settings),
        kernels=_all(f"vllm {version}" for version, _ in reports),
    )


def _all(values: Iterable[str]) -> str:
    return " or ".join(sorted({" ".join(value.split())[:200] for value in values}))


# ---------------------------------------------------------------- requests


def token_request(request: Generate, seed: int, stop_ids: frozenset[int], salt: str) -> dict[str, Any]:
    """Return the JSON body of a token request. Its prefix is shared only under the same `salt`. Steering is added to its logit biases."""
    sampling = request.sampling
    biases = dict(sampling.logit_bias)
    if request.steering is not None:
        for token, push in StaticSteering(request.steering, sampling).biases.items():
            biases[token] = biases.get(token, 0.0) + push
    edits: dict[str, Any] = {"logit_bias": {str(token): value for token, value in biases.items()}}
    edits |= {"presence_penalty": sampling.presence_penalty, "frequency_penalty": sampling.frequency_penalty}
    if sampling.grammar:
        edits["structured_outputs"] = {"grammar": sampling.grammar}
    return {
        "request_id": request.id,
        "token_ids": list(request.prompt_ids),
        "cache_salt": salt,  # vLLM keys its prefix cache by tokens and this alone
        "sampling_params": {
            "n": request.n,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": seed % (1 << 63),
            "stop": list(sampling.stop),
            "stop_token_ids": sorted(stop_ids),
            "ignore_eos": True,  # only the renderer's stop tokens count
            "logprobs": request.tops,  # in addition to the sampled token's
            "detokenize": bool(sampling.stop),
            **(edits if biases or sampling.edits_logits else {}),
        },
    }


# ---------------------------------------------------------------- streams


Event = tuple[WireChoice, PolicyVersion] | Finish | OstinatoError
"""Tokens with the version that their server held when they arrived, or the end of a request."""


@dataclass(eq=False, slots=True)
class VllmStream:
    """An open request at one replica. `samples`: its unfinished samples; `said`: output has arrived; `lent`: the replica was on loan."""

    slot: str
    samples: int
    replica: Replica
    policy: PolicyVersion
    lent: bool
    said: bool = False
    pump: asyncio.Task[Any] | None = None
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue[Event])


# ---------------------------------------------------------------- the engine


_LOG = logging.getLogger(__name__)
_CLOSED = "The engine is not running; start it, or restart the server if it was closed."
_MAX_ATTEMPTS = 2  # a request that crashes a server must not crash all of them


async def open_vllm(
    config: EngineConfig,
    renderer: Renderer,
    drive: Callable[[str], WeightDriver],
    draining: Callable[[], Collection[str]] = tuple,
    experts: int = 0,
) -> VllmEngine:
    """Connect to the servers in `config.urls`, and return an engine over them.

    `drive(url)` makes a server's weight driver. `draining()` names the servers that get no new requests. `experts`: the number of experts
    per layer of a mixture of experts, whose routes are then kept with the answers; 0 for a dense model.

    A server that does not answer within `connect_s`, or a minute after the first one, is used as soon as it does.

    Raises Unavailable if no server answers within `connect_s`, BadConfig if a server was started without a needed option.
    """
    servers = [ServerClient(url, drive(url), silence_s=config.silence_s, experts=experts) for url in config.urls]
    try:
        contexts = await contexts_of(servers, config.connect_s)
    except BaseException:
        for server in servers:
            await server.close()
        raise
    return VllmEngine(servers, renderer, config, context=min(contexts), draining=draining)


class VllmEngine:
    """Samples tokens on vLLM servers; made by `open_vllm`. `context` is the shortest context length of the servers.

    `loans` lends replicas of the live slot to rollouts, when asked to.

    Slots that hold the same version share servers. When a slot leaves a shared server, its open streams stay there and finish under the
    version that they began with.

    Example::

        engine = await open_vllm(config, HFRenderer(path), lambda url: VllmFollower(url, follower, {"url": "/mnt/weights"}))
        await engine.start()
        await engine.load("live", snapshot)
    """

    def __init__(
        self,
        servers: Sequence[ServerClient],
        renderer: Renderer,
        config: EngineConfig,
        *,
        context: int,
        draining: Callable[[], Collection[str]],
    ) -> None:
        self._servers, self._renderer, self._config, self._context = tuple(servers), renderer, config, context
        self._fleet = VllmFleet(servers, config.replicas, draining, self._running, self._end_at, self._check_late)
        self._sent = SentPrefixes()
        self._streams: set[VllmStream] = set()
        self._stack = contextlib.AsyncExitStack()
        self._watch: asyncio.Task[None] | None = None
        self._closed = False
        self._contract = self._reported_contract()
        self._grammars = all(server.follows_grammars for server in servers if server.reported is not None)
        self._counts = {"tokens": 0, "steps": 0, "retries": 0, "lent_tokens": 0}
        lends = Arm.LIVE.value, Arm.WORLD.value
        self.loans = Loans(self._fleet, *lends, running=self._running, cut=self._cut, clock=time.monotonic)

    async def start(self) -> None:
        """Start to monitor the servers and their versions. Slots are empty until `load`."""
        if self._watch is not None or self._closed:
            raise Unavailable("The engine has been started before; make a new one.")
        for server in self._servers:
            await self._stack.enter_async_context(server.driver)
        self._watch = asyncio.create_task(self._fleet.watch())

    async def close(self) -> None:
        """End open streams with `Finish.ABORT` and disconnect from the servers, which keep running. Idempotent."""
        self._closed = True
        self.loans.close()
        self._end(Finish.ABORT, self._streams)
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self._stack.aclose()
        for server in self._servers:
            await server.close()

    async def generate(self, request: Generate) -> AsyncGenerator[Chunk, None]:
        """Yield one chunk per server event, in order within a sample. See `core.seams.Engine.generate`.

        If a server fails before the first token, the request is retried at another server with the same seed; after the first token it is
        never retried. At its deadline a request keeps the tokens that have arrived.

        Raises:
            NotFound: nothing is loaded in the slot.
            TooLarge, BadRequest: the request can never be served (see `check_request`).
            Unavailable: not started, too many samples are open, or no server can be reached.
        """
        self._admit(request)
        seed = request.sampling.seed if request.sampling.seed is not None else secrets.randbits(31)
        answer = OpenAnswer(request, seed, stop_ids=self._renderer.stop_ids(), decode=self._renderer.decode)
        begun, steered = False, Counter[int]()
        steering = None if request.steering is None else StaticSteering(request.steering, request.sampling)
        async with contextlib.aclosing(self._events(request, seed)) as events:
            async for stream, event in events:
                if isinstance(event, OstinatoError):
                    if not begun:
                        raise event
                    _LOG.error("request %s: %s", request.id, event)
                    event = Finish.ERROR
                chunks = answer.end(event, stream.policy) if isinstance(event, Finish) else [answer.take(*event)]
                for chunk in chunks:
                    if chunk is not None and (chunk.ids or chunk.finish is not None):
                        begun = True
                        chunk = await self._enforced(answer, chunk, request)
                        if steering is not None:
                            steered[chunk.index] += len(chunk.ids)
                            chunk = replace(chunk, steered=steering.result(steered[chunk.index]))
                        stream.samples -= chunk.finish is not None
                        self._counts["tokens"] += len(chunk.ids)
                        self._counts["lent_tokens"] += len(chunk.ids) * stream.lent
                        yield chunk
                if not answer.missing:
                    return

    async def _enforced(self, answer: OpenAnswer, chunk: Chunk, request: Generate) -> Chunk:
        """Return the chunk, with `Finish.ERROR` if it ends an answer that violates the request's grammar.

        A server whose matcher fails in the middle of an answer ends the answer there, and reports a stop.
        """
        ids, grammar = answer.constrained(chunk), request.sampling.grammar
        if ids is None or await asyncio.to_thread(self._renderer.fulfils, grammar, ids):
            return chunk
        _LOG.error("request %s: the vLLM server let the answer end before its grammar did", request.id)
        return replace(chunk, finish=Finish.ERROR, routes=b"")

    async def end_sample(self, request: str, index: int, tokens: int) -> bytes:
        """Do nothing: a server can only end whole requests, and reports a sample's experts only at the sample's own end."""
        return b""

    async def load(self, slot: str, snapshot: Snapshot) -> Swap:
        """Roll the version out to the slot's servers, one after another. They fetch it from the weight store, which must hold it; the given
        weights are only checked. A server that cannot be reached gets the version when it is back.

        Raises BadWeights for a NaN, Corrupt or Unavailable if the servers refuse: the slot then keeps its old version. Raises Conflict if
        the slot's last server is in an unknown state: the slots of that server are then empty. Raises Unavailable also if all servers hold
        other slots' versions or drain.
        """
        self._check_running()
        await asyncio.to_thread(check_finite, snapshot.weights)
        pause_s, replicas = await self._fleet.load(slot, snapshot.policy)
        streams = sum(each.samples for each in self._streams if each.slot == slot and each.replica in replicas)
        return Swap(slot=slot, policy=snapshot.policy, pause_s=pause_s, streams=streams)

    async def unload(self, slot: str) -> None:
        """Empty a slot; its open streams end with `Finish.ERROR`. The servers keep their weights. Raises NotFound."""
        self._check_running()
        check_loaded(slot, self._fleet.slots)
        self._fleet.unload(slot)
        self._end(Finish.ERROR, (stream for stream in self._streams if stream.slot == slot))

    async def score(self, slot: str, ids: Sequence[int], start: int, cache_salt: str = "") -> list[float]:
        """Return the log-probabilities (temperature 1) of ids[start:] as a server scores a prompt: close to those of sampling, not equal.

        Raises BadRequest, NotFound, TooLarge, Overloaded, Unavailable.
        """
        self._check_running()
        check_loaded(slot, self._fleet.slots)
        can = self.capabilities()
        check_score(ids, start, most=can.context - 1, vocab_size=can.vocab_size)  # a server must sample a token, too
        if start == len(ids):
            return []
        check_room(1, self._running().total(), self._config.max_waiting)
        tried: list[Replica] = []
        while True:
            self._check_running()
            check_loaded(slot, self._fleet.slots)
            replica, key = self._replica_for(slot, ids, cache_salt, 1, tried)
            try:
                scores = await self._scored(slot, replica, ids, start, key)
            except Unavailable:
                replica.set_aside()
                tried.append(replica)
                if len(tried) == min(_MAX_ATTEMPTS, len(self._servers)):
                    raise
            else:
                if scores is not None:
                    return scores

    async def _scored(
        self, slot: str, replica: Replica, ids: Sequence[int], start: int, key: bytes
    ) -> list[float] | None:
        """Return one server's scores, or None if the caller must ask again because the replica was recalled or lost its slot or version.

        Until then the replica does not change over to another slot, but it may swap to the slot's next version. Raises Unavailable.
        """
        stream = VllmStream(slot, 1, replica, self._fleet.policy_of(replica, slot), replica.loan is not None)
        asking = asyncio.create_task(replica.server.scores(ids, start, key.hex()))
        stream.pump = asking
        self._streams.add(stream)
        try:
            await asyncio.wait({asking})
            return None if asking.cancelled() else asking.result()
        finally:
            self._streams.discard(stream)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    def slots(self) -> dict[str, PolicyVersion]:
        """Return the loaded versions. A slot switches to its new version once its last server has it."""
        return dict(self._fleet.slots)

    def numerics(self) -> str:
        """Return the contract's id."""
        return self._contract.id

    def contract(self) -> Contract:
        """Return the contract that the servers' reports gave at the start."""
        return self._contract

    def capabilities(self) -> Capabilities:
        """Return the smallest context of the renderer and the servers. Grammars are followed if every server did so at the start."""
        context = min(self._context, self._renderer.context)
        return Capabilities(
            context=context,
            vocab_size=self._renderer.vocab_size,
            follows_grammars=self._grammars,
            steers="static",
        )

    def stats(self) -> dict[str, float]:
        """Return gauges, and counters since the start. Raises Unavailable when closed.

        `steps` counts server events, `retries` the requests retried at a second server. `servers_well` are healthy, `servers_draining` get
        no new requests, and `draining_open` samples are open on those. `servers_lent` are lent to rollouts, `servers_returning` are on
        their way back; `lent_seconds` and `lent_tokens` are the time and tokens that rollouts got from them, `lent_cut` the samples that
        were cut off.
        """
        self._check_running()
        replicas, loans, running = self._fleet.replicas, self.loans.standing(), self._running()
        return {
            **self._counts,
            "swaps": self._fleet.swaps,
            "running": running.total(),
            "waiting": 0,
            **pause_stats(self._fleet.pauses),
            "servers": len(replicas),
            "servers_well": sum(each.well for each in replicas),
            "servers_draining": sum(each.draining for each in replicas),
            "draining_open": sum(running[each] for each in replicas if each.draining),
            "servers_lent": loans.lent,
            "servers_returning": loans.returning,
            "lent_seconds": self.loans.seconds,
            "lent_tokens": self._counts["lent_tokens"],
            "lent_cut": self.loans.cut_off,
        }

    # ---- admission and routing

    def _reported_contract(self) -> Contract:
        return contract_of([server.reported for server in self._servers if server.reported is not None])

    def _check_late(self, server: ServerClient, context: int) -> None:
        """Raise BadConfig if a server that first answered after the start differs from those that answered at the start."""
        other = self._reported_contract().id != self._contract.id or (self._grammars and not server.follows_grammars)
        if other or context < self._context:
            server.reported = None
            unlike = "a shorter context, another build or other options than the servers that answered at the start"
            raise BadConfig(f"{server.url} has {unlike}; restart the gateway to use it")

    def _check_running(self) -> None:
        if self._watch is None or self._watch.done() or self._closed:
            raise Unavailable(_CLOSED)

    def _admit(self, request: Generate) -> None:
        self._check_running()
        check_loaded(request.slot, self._fleet.slots)
        can = self.capabilities()
        check_request(request, context=can.context, vocab_size=can.vocab_size, steers=can.steers)
        check_room(request.n, self._running().total(), self._config.max_waiting)

    def _running(self, slot: str = "") -> Counter[Replica]:
        """Count open samples by replica, of one slot or of all ("")."""
        counts = Counter[Replica]()
        for stream in self._streams:
            counts[stream.replica] += stream.samples if slot in ("", stream.slot) else 0
        return counts

    def _replica_for(
        self, slot: str, ids: Sequence[int], salt: str, samples: int, tried: Collection[Replica]
    ) -> tuple[Replica, bytes]:
        """Return the replica to ask, and the prefix-cache key of the request there. Raises Unavailable if none is left."""
        by_url = {each.server.url: each for each in self._fleet.candidates(slot) if each not in tried}
        keys = {url: prefix_key(self._fleet.policy_of(each, slot).hash, salt) for url, each in by_url.items()}
        if not by_url:
            raise Unavailable(f"no other vLLM server of {slot!r} can be asked now; try again in a moment.")
        if len(self._servers) == 1:
            (url,) = by_url
        else:
            url = self._routed(ids, samples, by_url, keys)
        return by_url[url], keys[url]

    def _routed(
        self, ids: Sequence[int], samples: int, replicas: Mapping[str, Replica], keys: Mapping[str, bytes]
    ) -> str:
        by_key = {key: links(key, ids) for key in set(keys.values())}
        chains = {url: by_key[key] for url, key in keys.items()}
        running = self._running()
        known = {url: self._sent.known(url, chain) for url, chain in chains.items()}
        url = route(known, {url: running[each] for url, each in replicas.items()}, chains, samples)
        self._sent.send(url, chains[url])
        return url

    # ---- streams

    async def _events(self, request: Generate, seed: int) -> AsyncGenerator[tuple[VllmStream, Event], None]:
        """Yield the events of a request. If a server fails before its first token, the request is retried at another server."""
        tried: list[Replica] = []
        failure: OstinatoError | None = None
        until = None if request.within_s is None else asyncio.get_running_loop().time() + request.within_s
        while True:
            try:
                replica, key = self._replica_for(request.slot, request.prompt_ids, request.cache_salt, request.n, tried)
            except Unavailable as error:
                raise failure or error from None
            if failure is not None:
                self._counts["retries"] += 1
                _LOG.warning("request %s is retried at %s: %s", request.id, replica.server.url, failure)
            tried.append(replica)
            policy, lent = self._fleet.policy_of(replica, request.slot), replica.loan is not None
            stream = VllmStream(request.slot, request.n, replica, policy, lent)
            async with contextlib.aclosing(self._events_at(stream, request, seed, key, until)) as events:
                received = False
                async for event in events:
                    if isinstance(event, Unavailable) and not received and len(tried) < _MAX_ATTEMPTS:
                        failure = event
                        break
                    received = received or (isinstance(event, tuple) and event[0].has_output)
                    yield stream, event
                else:
                    return

    async def _events_at(
        self, stream: VllmStream, request: Generate, seed: int, key: bytes, until: float | None
    ) -> AsyncGenerator[Event, None]:
        """Yield one server's events for a request, until the event loop's time `until`. After closing, no event of it can arrive."""
        loop = asyncio.get_running_loop()
        late = None if until is None else loop.call_at(until, self._end, Finish.DEADLINE, (stream,))
        pump = stream.pump = asyncio.create_task(
            self._pump(stream, token_request(request, seed, self._renderer.stop_ids(), key.hex()))
        )
        self._streams.add(stream)
        try:
            while True:
                event = await stream.events.get()
                yield event
                if not isinstance(event, tuple):
                    return
        finally:
            if late is not None:
                late.cancel()
            self._streams.discard(stream)
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)

    async def _pump(self, stream: VllmStream, body: Mapping[str, object]) -> None:
        """Move events from the server to the stream's queue, each with the version that the server holds when the event arrives.

        Once the server no longer serves the slot, the stream keeps its last version.
        """
        replica, missing = stream.replica, stream.samples
        try:
            async with contextlib.aclosing(replica.server.tokens(body)) as choices:
                async for choice in choices:
                    missing -= choice.finish_reason is not None
                    if stream.slot in replica.slots:
                        stream.policy = self._fleet.policy_of(replica, stream.slot)
                    replica.failures = 0
                    self._counts["steps"] += 1
                    stream.said = stream.said or choice.has_output
                    stream.events.put_nowait((choice, stream.policy))
            failure = Unavailable(f"{replica.server.url} closed the stream before its end")
        except OstinatoError as error:
            failure = error
        except Exception as error:  # noqa: BLE001 (no failure may leave a stream hanging)
            _LOG.exception("%s: a stream ends", replica.server.url)
            failure = Unavailable(f"the vLLM server's answer is not understood: {error!r}")
        if isinstance(failure, Unavailable) and missing > 0:
            _LOG.warning("%s is set aside: %s", replica.server.url, failure)
            replica.set_aside()
        stream.events.put_nowait(failure)

    def _end(self, finish: Finish, streams: Iterable[VllmStream]) -> None:
        for stream in streams:
            stream.events.put_nowait(finish)
            if stream.pump is not None:
                stream.pump.cancel()  # a score is awaited, not read from the queue

    def _cut(self, replica: Replica) -> int:
        """Abort a replica's streams, so that no further token arrives; those without output are retried. Count the others' samples."""
        cut = 0
        for stream in self._streams:
            if stream.replica is replica and stream.pump is not None and not stream.pump.done():
                stream.pump.cancel()
                stream.events.put_nowait(Unavailable(f"{replica.server.url} was recalled for people; ask again."))
                cut += stream.samples if stream.said else 0
        return cut

    def _end_at(self, replica: Replica) -> None:
        """End the replica's streams with `Finish.ERROR`, because it is unknown which version makes its tokens."""
        self._end(Finish.ERROR, (stream for stream in self._streams if stream.replica is replica))
