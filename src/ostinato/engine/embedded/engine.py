"""The embedded engine: implements `core.seams.Engine` with Hugging Face modules, behind asyncio, on one worker thread."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from transformers import PreTrainedModel

from ostinato.core.errors import Unavailable
from ostinato.core.generation import Capabilities, Chunk, Generate
from ostinato.core.interpreter import take_short_turns
from ostinato.core.numerics import Contract
from ostinato.core.records import Finish, PolicyVersion, Sampling
from ostinato.core.seams import Renderer
from ostinato.core.weights import Snapshot, Swap, Weights
from ostinato.engine.admission import check_loaded, check_request, check_room, check_score, pause_stats
from ostinato.engine.config import EngineConfig
from ostinato.engine.embedded.form import prepack, round_to_fp8
from ostinato.engine.embedded.fused import TrialCache
from ostinato.engine.embedded.kv import BlockPool, open_store
from ostinato.engine.embedded.scheduler import Scheduler
from ostinato.engine.embedded.worker import CLOSED, EngineThread, LoadedPolicy, OpenStream
from ostinato.model.backend import backend_of
from ostinato.model.cpu import team
from ostinato.model.grammars import Grammars
from ostinato.model.linear import Integers
from ostinato.model.logit_edits import LogitEditor
from ostinato.model.steering import AnswerSteering, LogitSteering

T = TypeVar("T")


class TorchEngine:
    """Samples tokens with one module per loaded policy.

    Args:
        build: weights -> an eval module; raises BadWeights for weights that must not be served.
        renderer: decodes ids and knows the stop tokens, the vocabulary and the context.
        config: the engine's sizes.
        integers: integer format of the decoder's linear layers; None: they compute in the model's dtype.
        contract: the numerics contract of this process, stamped on its samples; None if it was not measured.
        wide: `config.threads` torch threads give the same bits as one thread, so a small step may use them all.
        grammars: compiles the grammars that answers must follow; None: requests with a grammar are not supported.
        clock: monotonic seconds, for deadlines.
        device: where `build`'s models compute.
        keep: cache of fusion trials: knows which optimised forms leave a model's bits unchanged (`fused.TrialCache`); None: try them.

    Example::

        engine = TorchEngine(build(path), HFRenderer(path), EngineConfig())
        await engine.start()
        await engine.load("live", Snapshot(policy=v0, weights=weights))
        async for chunk in engine.generate(Generate(id="r1", slot="live", prompt_ids=ids, sampling=Sampling(max_tokens=64))):
            ...
        await engine.close()
    """

    def __init__(
        self,
        build: Callable[[Weights], PreTrainedModel],
        renderer: Renderer,
        config: EngineConfig | None = None,
        *,
        integers: Integers | None = None,
        contract: Contract | None = None,
        wide: bool = False,
        grammars: Grammars | None = None,
        clock: Callable[[], float] = time.monotonic,
        device: str = "cpu",
        keep: TrialCache | None = None,
    ) -> None:
        self.config, self._device = config or EngineConfig(), device
        self._build, self._renderer, self._integers, self._keep = build, renderer, integers, keep
        self._contract, self._wide, self._grammars, self._clock = contract, wide, grammars, clock
        self._loading = asyncio.Lock()
        # one thread: freed weights stay in the allocating thread's heap arena, where the next version should reuse them
        self._building = ThreadPoolExecutor(1, thread_name_prefix="build")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._worker: EngineThread | None = None
        self._open = 0
        # by request id: its stream, once the thread has accepted it, and its chunks; a None chunk: its caller ended a sample
        self._streams: dict[str, tuple[list[OpenStream], asyncio.Queue[Chunk | None]]] = {}
        self._blocks = self.config.kv_tokens // self.config.block

    async def start(self) -> None:
        """Start the worker thread. Slots are empty until `load`."""
        if self._worker is not None:
            raise Unavailable("The engine has been started before; make a new one.")
        config, threads = self.config, self.config.threads or 1  # 0: the useful number of threads was not measured
        self._loop = asyncio.get_running_loop()
        scheduler = Scheduler(
            BlockPool(self._blocks),
            block=config.block,
            rows=config.max_batch,
            chunk=config.chunk_on(self._device),
            lanes=threads,
        )
        self._worker = EngineThread(
            scheduler,
            make_store=lambda shape: open_store(shape, self._blocks, config.block),
            stop_ids=self._renderer.stop_ids(),
            decode=self._renderer.decode,
            flush=self._flush,
            threads=threads,
            recompute=config.recompute_on_swap,
            wide=self._wide,
            clock=self._clock,
        )
        self._worker.start()

    async def close(self) -> None:
        """End open streams with `Finish.ABORT` and stop the thread. Idempotent."""
        if self._worker is not None:
            with contextlib.suppress(Unavailable):
                self._worker.post(self._worker.stop)
            await asyncio.to_thread(self._worker.join)
        self._building.shutdown(wait=False)

    async def generate(self, request: Generate) -> AsyncGenerator[Chunk, None]:
        """Yield one chunk per token and sample, in order within a sample. See `core.seams.Engine.generate`.

        Raises:
            NotFound: nothing is loaded in the slot.
            TooLarge, BadRequest: the request can never be served (see `check_request`), or its grammar is invalid.
            Unavailable: not started, failed, or too many samples are open.
        """
        worker = self._running()
        self._admit(worker, request)
        until = None if request.within_s is None else self._clock() + request.within_s
        editor = None
        if request.sampling.edits_logits:  # compiling a grammar may take a while, so it must not block open streams
            editor = await asyncio.to_thread(LogitEditor.of, request.sampling, self._grammars)
            self._admit(worker, request)
        steering = self._steering(request)
        seed = request.sampling.seed if request.sampling.seed is not None else secrets.randbits(48)
        chunks: asyncio.Queue[Chunk | None] = asyncio.Queue()  # bounded by n * max_tokens
        submitted: list[OpenStream] = []
        # may raise Unavailable
        worker.post(lambda: submitted.append(worker.submit(request, seed, chunks.put_nowait, editor, until, steering)))
        missing = request.n
        self._open += request.n
        opened = self._streams[request.id] = (submitted, chunks)
        try:
            while missing:
                chunk = await chunks.get()
                missing -= chunk is None or chunk.finish is not None
                if chunk is not None:
                    yield chunk
        finally:
            self._open -= request.n
            if self._streams.get(request.id) is opened:
                del self._streams[request.id]
            if missing:
                with contextlib.suppress(Unavailable):  # the thread has ended, and the stream with it
                    worker.post(lambda: worker.cancel(submitted[0]))

    async def end_sample(self, request: str, index: int, tokens: int) -> bytes:
        """End a sample between two steps. See `core.seams.Engine.end_sample`. Raises Unavailable."""
        submitted, chunks = self._streams.get(request, ([], None))
        if not submitted or chunks is None:
            return b""
        worker, (stream,) = self._running(), submitted
        routes = await self._call(lambda: worker.end(stream, index, tokens))
        if routes is None:
            return b""
        chunks.put_nowait(None)
        return routes

    async def load(self, slot: str, snapshot: Snapshot) -> Swap:
        """Build the new module beside the running one, then swap it into the slot between two steps.

        Open streams of the slot keep their KV cache and continue with the new weights. New requests do not use prefixes that the old
        version cached. Slots with the same weights share one module. Raises BadWeights; the slot then keeps its old version.
        """
        worker = self._running()
        async with self._loading:
            same = (p.model for p in list(worker.policies.values()) if p.version.hash == snapshot.policy.hash)
            model = next(same, None)
            if model is None:
                with _short_turns():
                    model = await asyncio.get_running_loop().run_in_executor(
                        self._building, self._make, snapshot.weights
                    )
            policy = LoadedPolicy(version=snapshot.policy, model=model)
            swap, _ = await self._call(lambda: worker.exchange(slot, policy))
        return swap

    async def unload(self, slot: str) -> None:
        """Empty a slot; its open streams end with `Finish.ERROR`. Raises NotFound."""
        worker = self._running()
        check_loaded(slot, worker.policies)
        await self._call(lambda: worker.unload(slot))

    async def score(self, slot: str, ids: Sequence[int], start: int, cache_salt: str = "") -> list[float]:
        """Return the log-probabilities (temperature 1) of ids[start:], bit-identical to those of sampling. Scoring is scheduled together
        with open streams and shares their prefix cache. Raises BadRequest, NotFound, TooLarge, Overloaded, Unavailable.
        """
        worker, can = self._running(), self.capabilities()
        check_loaded(slot, worker.policies)
        check_score(ids, start, most=can.context, vocab_size=can.vocab_size)
        if start == len(ids):
            return []
        check_room(1, self._open, self.config.max_waiting)
        request = Generate(
            id="score", slot=slot, prompt_ids=tuple(ids[:-1]), sampling=Sampling(max_tokens=1), cache_salt=cache_salt
        )
        chunks: asyncio.Queue[Chunk] = asyncio.Queue()
        submitted: list[OpenStream] = []
        worker.post(lambda: submitted.append(worker.submit(request, 0, chunks.put_nowait, targets=tuple(ids[start:]))))
        self._open += 1
        try:
            chunk = await chunks.get()
        except asyncio.CancelledError:
            with contextlib.suppress(Unavailable):  # the thread has ended, and its work with it
                worker.post(lambda: worker.cancel(submitted[0]))
            raise
        finally:
            self._open -= 1
        if chunk.finish is not Finish.LENGTH:
            raise Unavailable(f"The weights in slot {slot!r} were unloaded, or gave logits that are not finite.")
        return list(chunk.logprobs)

    def slots(self) -> dict[str, PolicyVersion]:
        """Return the loaded version of each slot."""
        return {slot: policy.version for slot, policy in self._running().policies.copy().items()}

    def numerics(self) -> str:
        """Return the numerics contract's id; "" without a contract."""
        return "" if self._contract is None else self._contract.id

    def contract(self) -> Contract | None:
        """Return the numerics contract, if there is one."""
        return self._contract

    def capabilities(self) -> Capabilities:
        """Return the renderer's vocabulary and context; the KV cache may limit the context further."""
        renderer = self._renderer
        return Capabilities(
            context=min(renderer.context, self._blocks * self.config.block),
            vocab_size=renderer.vocab_size,
            follows_grammars=self._grammars is not None,
            steers="exact",
        )

    def stats(self) -> dict[str, float]:
        """Return gauges, and counters since the start. Times are in seconds; tokens, blocks and samples are counts."""
        worker = self._running()
        scheduler = worker.scheduler
        return {
            **worker.counters,
            "running": len(scheduler.running),
            "waiting": scheduler.queued,
            "orders_open": worker.posted - worker.counters["orders_done"],
            "kv_blocks": self._blocks,
            "kv_blocks_used": scheduler.pool.held,
            "kv_blocks_cached": scheduler.pool.idle,
            "prefix_hit_tokens": scheduler.prefix_hits,
            "preemptions": scheduler.preemptions,
            "swaps": worker.swaps,
            **pause_stats(worker.pauses.copy()),
        }

    def _steering(self, request: Generate) -> Callable[[], AnswerSteering] | None:
        asked, sampling, renderer = request.steering, request.sampling, self._renderer
        if asked is None:
            return None
        logits = LogitSteering.of(asked.basis, asked.dials, asked.cap, sampling.temperature)
        off = bool(sampling.grammar)
        return lambda: AnswerSteering(asked, logits, renderer.opens_call, renderer.token_bytes, off=off)

    def _make(self, weights: Weights) -> PreTrainedModel:
        with team(1):  # leaves the other cores to open streams
            model = self._build(weights)
            if self.config.products == "fp8":
                round_to_fp8(model)
            elif backend_of(model).kernels == "own":
                prepack(model, self._integers, self._keep)
        return model

    def _running(self) -> EngineThread:
        if self._worker is None or not self._worker.is_alive():
            failure = self._worker.failure if self._worker else None
            raise Unavailable(CLOSED) from failure
        return self._worker

    def _admit(self, worker: EngineThread, request: Generate) -> None:
        check_loaded(request.slot, worker.policies)
        can = self.capabilities()
        check_request(request, context=can.context, vocab_size=can.vocab_size, steers=can.steers)
        check_room(request.n, self._open, self.config.max_waiting)

    async def _call(self, order: Callable[[], T]) -> T:
        """Run `order` on the worker thread between two steps and return what it returns or raises."""
        answer: Future[T] = Future()
        answer.set_running_or_notify_cancel()  # the order is carried out even if its caller is cancelled

        def run() -> None:
            try:
                answer.set_result(order())
            except Exception as error:  # noqa: BLE001 (raised again in the caller)
                answer.set_exception(error)

        self._running().post(run)
        return await asyncio.wrap_future(answer)

    def _flush(self, outbox: list[tuple[Callable[[Chunk], None], Chunk]]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_deliver, outbox)


@contextlib.contextmanager
def _short_turns() -> Generator[None]:
    """Shorten the interpreter's thread switch interval from 5 ms to 0.2 ms while a version is built.

    Each operation of a step releases the GIL and would otherwise wait a full switch interval until the building thread yields it.
    """
    before = sys.getswitchinterval()
    take_short_turns()
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _deliver(outbox: list[tuple[Callable[[Chunk], None], Chunk]]) -> None:
    for deliver, chunk in outbox:
        deliver(chunk)
