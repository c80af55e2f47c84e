"""`core.seams.Engine` over vLLM servers: each holds one version of the weights, and a slot stands for one of them.

Log-probabilities are the server's own, under its temperature and its nucleus; no contract says which arithmetic made them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ostinato.core.errors import BadRequest, Conflict, NotFound, OstinatoError, TooLarge, Unavailable
from ostinato.core.generation import Capabilities, Chunk, Generate
from ostinato.core.numerics import Contract
from ostinato.core.records import Finish, PolicyVersion
from ostinato.core.seams import Renderer
from ostinato.core.weights import Snapshot, Swap
from ostinato.engine.admission import check_request
from ostinato.engine.config import EngineConfig
from ostinato.engine.prefix import prefix_key
from ostinato.engine.vllm.answer import OpenAnswer
from ostinato.engine.vllm.server import ServerClient, WeightDriver
from ostinato.engine.vllm.wire import WireChoice
from ostinato.model.tensors import check_finite

_LOG = logging.getLogger(__name__)
_CLOSED = "The engine is not running; start it, or restart the server if it was closed."
_LOOK_S = 1.0
_ASK_S = 10.0  # a server that has not said after that what it serves is asked again
_PAUSES = 1024


@dataclass(frozen=True, slots=True)
class _Place:
    """What a slot stands for."""

    server: ServerClient
    policy: PolicyVersion


@dataclass(eq=False, slots=True)
class _Stream:
    """An open request: its events, each with the version that its slot held when it came, or how it ends."""

    slot: str
    place: _Place
    samples: int
    events: asyncio.Queue[tuple[WireChoice, PolicyVersion] | Finish | OstinatoError] = field(
        default_factory=asyncio.Queue[tuple[WireChoice, PolicyVersion] | Finish | OstinatoError]
    )


async def open_vllm(config: EngineConfig, renderer: Renderer, drive: Callable[[str], WeightDriver]) -> VllmEngine:
    """Wait for the servers in `config.urls` and make an engine of them. `drive(url)` brings one its weights.

    Raises Unavailable if one does not answer within `connect_s`, BadConfig if one was started without what is needed.
    """
    servers = [ServerClient(url, drive(url), silence_s=config.silence_s) for url in config.urls]
    try:
        contexts = await asyncio.gather(*(server.context(config.connect_s) for server in servers))
    except BaseException:
        for server in servers:
            await server.close()
        raise
    return VllmEngine(servers, renderer, config, context=min(contexts))


class VllmEngine:
    """Makes tokens by vLLM servers. `context` is the servers' own limit. Made by `open_vllm`.

    Slots that hold the same version share a server. A slot that leaves a shared server leaves its open streams there: they end
    under the version that they began with.

    Example::

        engine = await open_vllm(config, HFRenderer(path), lambda url: VllmFollower(url, follower, {"url": "/mnt/weights"}))
        await engine.start()
        await engine.load("live", snapshot)
    """

    def __init__(
        self, servers: Sequence[ServerClient], renderer: Renderer, config: EngineConfig, *, context: int
    ) -> None:
        self._servers, self._renderer, self._config, self._context = tuple(servers), renderer, config, context
        self._slots: dict[str, _Place] = {}
        self._streams: set[_Stream] = set()
        self._loading = asyncio.Lock()
        self._stack = contextlib.AsyncExitStack()
        self._watch: asyncio.Task[None] | None = None
        self._closed = False
        self._counts = {"tokens": 0, "steps": 0, "swaps": 0}
        self._pauses: list[float] = []

    async def start(self) -> None:
        """Begin to watch what the servers serve. Slots are empty until `load`."""
        if self._watch is not None or self._closed:
            raise Unavailable("The engine has been started before; make a new one.")
        for server in self._servers:
            await self._stack.enter_async_context(server.driver)
        self._watch = asyncio.create_task(self._keep_all())

    async def close(self) -> None:
        """End open streams with `Finish.ABORT` and let go of the servers, which go on running. Idempotent."""
        self._closed = True
        self._end_streams(Finish.ABORT)
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self._stack.aclose()
        for server in self._servers:
            await server.close()

    async def generate(self, request: Generate) -> AsyncGenerator[Chunk, None]:
        """One chunk per event of the server, in order within a sample. See `core.seams.Engine.generate`.

        Raises:
            NotFound: nothing is loaded in the slot.
            TooLarge, BadRequest: the request can never be served (see `check_request`).
            Unavailable: not started, too many samples are open, or the server cannot be reached.
        """
        place = self._admit(request)
        seed = request.sampling.seed if request.sampling.seed is not None else secrets.randbits(31)
        answer = OpenAnswer(request, seed, stop_ids=self._renderer.stop_ids(), decode=self._renderer.decode)
        stream = _Stream(request.slot, place, request.n)
        body = _body(request, seed, self._renderer.stop_ids(), prefix_key(place.policy.hash, request.cache_salt).hex())
        pump = asyncio.create_task(self._pump(stream, body))
        self._streams.add(stream)
        begun = False
        try:
            while answer.missing:
                event = await stream.events.get()
                if isinstance(event, OstinatoError):
                    if not begun:
                        raise event
                    _LOG.error("request %s: %s", request.id, event)
                    event = Finish.ERROR
                chunks = answer.end(event, stream.place.policy) if isinstance(event, Finish) else [answer.take(*event)]
                for chunk in chunks:
                    if chunk is not None:
                        begun = True
                        stream.samples -= chunk.finish is not None
                        self._counts["tokens"] += len(chunk.ids)
                        yield chunk
        finally:
            self._streams.discard(stream)
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)

    async def load(self, slot: str, snapshot: Snapshot) -> Swap:
        """Have a server take the version from the weight store, which must hold it; the weights in hand are only looked at.

        Raises BadWeights for a NaN, Corrupt or Unavailable if the server refuses: the slot then keeps what it had. Raises Conflict
        if nobody knows what the server holds: its slots are then empty. Unavailable too if every server holds another version.
        """
        self._check_running()
        policy = snapshot.policy
        await asyncio.to_thread(check_finite, snapshot.weights)
        async with self._loading:
            server = self._server_for(slot, policy)
            place = _Place(server, policy)
            pause_s = 0.0
            if server.label == policy.hash:
                self._slots[slot] = place
            else:
                pause_s = await self._swap(server, policy, lambda: self._slots.__setitem__(slot, place))
        streams = sum(s.samples for s in self._streams if s.slot == slot and s.place.server is server)
        return Swap(slot=slot, policy=policy, pause_s=pause_s, streams=streams)

    async def unload(self, slot: str) -> None:
        """Empty a slot; its open streams end with `Finish.ERROR`. The server keeps its weights. Raises NotFound."""
        self._check_running()
        self._place(slot)
        del self._slots[slot]
        self._end_streams(Finish.ERROR, slot)

    async def score(self, slot: str, ids: Sequence[int], start: int) -> list[float]:
        """Log-probabilities (temperature 1) of ids[start:], as the server scores a prompt: near those of sampling, not equal."""
        self._check_running()
        place = self._place(slot)
        if not 1 <= start <= len(ids):
            raise BadRequest(f"start is {start}; it must lie in [1, {len(ids)}].", field="start")
        if len(ids) >= self.capabilities().context:
            raise TooLarge(f"{len(ids)} tokens leave no room in the context of {self._context}.", field="ids")
        if min(ids) < 0 or max(ids) >= self._renderer.vocab_size:
            raise BadRequest(f"A token id lies outside [0, {self._renderer.vocab_size}).", field="ids")
        return (
            await place.server.scores(ids, start, prefix_key(place.policy.hash, "").hex()) if start < len(ids) else []
        )

    def slots(self) -> dict[str, PolicyVersion]:
        """What is loaded now."""
        return {slot: place.policy for slot, place in self._slots.items()}

    def numerics(self) -> str:
        """Nothing: vLLM's arithmetic is not ours to promise."""
        return ""

    def contract(self) -> Contract | None:
        """None."""
        return None

    def capabilities(self) -> Capabilities:
        """The smallest of the renderer's and the servers' contexts. Grammars are followed if every server does."""
        context = min(self._context, self._renderer.context)
        return Capabilities(
            context=context,
            vocab_size=self._renderer.vocab_size,
            scores_exactly=False,
            follows_grammars=all(server.follows_grammars for server in self._servers),
        )

    def stats(self) -> dict[str, float]:
        """Gauges and counters since the start. `steps` counts the servers' events. Raises Unavailable when closed."""
        self._check_running()
        pauses = sorted(self._pauses)
        return {
            **self._counts,
            "running": sum(stream.samples for stream in self._streams),
            "waiting": 0,
            "last_pause_s": self._pauses[-1] if pauses else 0.0,
            "pause_p50_s": pauses[len(pauses) // 2] if pauses else 0.0,
            "pause_p99_s": pauses[len(pauses) * 99 // 100] if pauses else 0.0,
        }

    # ---- within

    def _check_running(self) -> None:
        if self._watch is None or self._watch.done() or self._closed:
            raise Unavailable(_CLOSED)

    def _place(self, slot: str) -> _Place:
        if slot not in self._slots:
            raise NotFound(f"No policy is loaded in slot {slot!r}; loaded: {sorted(self._slots)}.", field="model")
        return self._slots[slot]

    def _admit(self, request: Generate) -> _Place:
        self._check_running()
        place, can = self._place(request.slot), self.capabilities()
        check_request(request, context=can.context, vocab_size=can.vocab_size)
        running = sum(stream.samples for stream in self._streams)
        if running + request.n > self._config.max_waiting:
            raise Unavailable(f"{running} samples are open, the limit is {self._config.max_waiting}; try again later.")
        return place

    async def _pump(self, stream: _Stream, body: dict[str, Any]) -> None:
        """Server -> queue. Each event gets the version that its slot holds while it comes."""
        try:
            async with contextlib.aclosing(stream.place.server.tokens(body)) as choices:
                async for choice in choices:
                    now = self._slots.get(stream.slot)
                    if now is not None and now.server is stream.place.server:
                        stream.place = now
                    self._counts["steps"] += 1
                    stream.events.put_nowait((choice, stream.place.policy))
            stream.events.put_nowait(Unavailable("the vLLM server closed the stream before its end"))
        except OstinatoError as error:
            stream.events.put_nowait(error)
        except Exception as error:  # noqa: BLE001 (no failure may leave a stream hanging)
            _LOG.exception("%s: a stream ends", stream.place.server.url)
            stream.events.put_nowait(Unavailable(f"the vLLM server's answer is not understood: {error!r}"))

    def _end_streams(self, finish: Finish, slot: str | None = None) -> None:
        for stream in self._streams:
            if slot in (None, stream.slot):
                stream.events.put_nowait(finish)

    def _server_for(self, slot: str, policy: PolicyVersion) -> ServerClient:
        """The server that has the version already, or the slot's own, or a free one."""
        users = {
            server: {name for name, place in self._slots.items() if place.server is server} for server in self._servers
        }
        for server, names in users.items():
            if server.label == policy.hash and names:
                return server
        for server, names in users.items():
            if names == {slot}:
                return server
        for server, names in users.items():
            if not names:
                return server
        raise Unavailable(
            f"each of the {len(self._servers)} vLLM servers holds another slot's version; add one to engine.urls for {slot!r}"
        )

    async def _swap(self, server: ServerClient, policy: PolicyVersion, loaded: Callable[[], object]) -> float:
        """Bring a version to a server; returns the pause. `loaded` is called when no token of the old one can come any more."""

        def arrived() -> None:
            server.label = ""  # until the driver says that all went well: it may yet fail, and the old version is gone
            loaded()

        try:
            swap = await server.driver.swap(policy, arrived)
        except Conflict:
            server.label = ""
            for slot in [name for name, place in self._slots.items() if place.server is server]:
                del self._slots[slot]
                self._end_streams(Finish.ERROR, slot)
            raise
        server.label = policy.hash
        self._counts["swaps"] += 1
        self._pauses = [*self._pauses, swap.pause_s][-_PAUSES:]
        return swap.pause_s

    async def _keep_all(self) -> None:
        """Look after each server by itself: one that hangs keeps no other from its weights."""
        async with asyncio.TaskGroup() as group:
            for server in self._servers:
                group.create_task(self._keep(server))

    async def _keep(self, server: ServerClient) -> None:
        """A server that was started again has none of our weights: bring them back. What fails is said once and tried again."""
        said = ""
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                await self._bring_back(server)
                said = ""
            except Exception as error:  # noqa: BLE001 (whatever a server answers, the next look may find it well)
                known = isinstance(error, OstinatoError)
                words = str(error) if known else f"{server.url}: {error!r}"
                if said != words:
                    _LOG.error("%s", words, exc_info=None if known else error)
                said = words

    async def _bring_back(self, server: ServerClient) -> None:
        held, label = self._held(server), server.label
        if held is None:
            return
        try:
            async with asyncio.timeout(_ASK_S):
                served = await server.driver.served()
        except TimeoutError as error:
            raise Unavailable(f"{server.url} does not say what it serves; is the vLLM server well?") from error
        if served == held.hash == label:
            return
        async with self._loading:
            if (self._held(server), server.label) != (held, label):
                return  # it was given something meanwhile: what it said is old
            why = f"serves {served}" if served != held.hash else "did not end its last swap well"
            _LOG.warning("%s %s: it is given %s again", server.url, why, held)
            await self._swap(server, held, lambda: None)

    def _held(self, server: ServerClient) -> PolicyVersion | None:
        """What a server should serve; None if no slot stands for it."""
        return next((place.policy for place in self._slots.values() if place.server is server), None)


def _body(request: Generate, seed: int, stop_ids: frozenset[int], salt: str) -> dict[str, Any]:
    sampling = request.sampling
    edits: dict[str, Any] = {"logit_bias": {str(token): value for token, value in sampling.logit_bias}}
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
            "ignore_eos": True,  # the renderer's stop tokens are the ones that count
            "logprobs": request.tops,  # beside the sampled token's
            "detokenize": bool(sampling.stop),
            **(edits if sampling.edits_logits else {}),
        },
    }
