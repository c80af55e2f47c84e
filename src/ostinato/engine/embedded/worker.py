"""The engine's step loop: plan, forward pass, sampling, delivery. Everything here runs on the engine's single thread except `post`.

The forward pass of a step is data-parallel over lanes: each lane is a thread that runs a part of the batch through the whole model.

Lanes need no barrier inside a layer, whereas a team of OpenMP threads needs two per operation; each lane runs torch with one thread. A
row's bits do not depend on the other rows of the batch, so they do not depend on the lanes. If there is too little work for two parts, a
team of threads computes the single part: for few tokens the cost is that of reading the weights, and two cores read faster than one.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from ostinato.core import routes
from ostinato.core.errors import BadRoutes, BadWeights, Unavailable
from ostinato.core.generation import Chunk, Generate, Tops
from ostinato.core.records import Finish, PolicyVersion
from ostinato.core.weights import Swap
from ostinato.engine.admission import shown
from ostinato.engine.embedded.condensed import is_condensed
from ostinato.engine.embedded.kv import KVShape, KVStore
from ostinato.engine.embedded.sampler import Draw, Drawn, draw, key_of, uniform
from ostinato.engine.embedded.scheduler import Generation, Scheduled, Scheduler
from ostinato.model import routing
from ostinato.model.attention import hidden, logits
from ostinato.model.backend import backend_of
from ostinato.model.cpu import team
from ostinato.model.logit_edits import UNEDITED, Edit, LogitEditor
from ostinato.model.logprobs import softmax
from ostinato.model.paged import PagedEntry
from ostinato.model.steering import AnswerSteering
from ostinato.model.stream import TextStream

# ---------------------------------------------------------------- parallel forward pass


A = TypeVar("A")
B = TypeVar("B")
_MIN_TOKENS = 8  # of a part: fewer are not worth reading all weights
_SCORE_ROWS = 128  # positions whose logits are in memory at once


class Lanes:
    """A pool of `count` threads, the caller's included. `wide`: a single item may use all of them, because that changes no bit.

    Example: ``Lanes(2).map(run, parts)``.
    """

    def __init__(self, count: int, *, wide: bool = False) -> None:
        self.count, self._wide = count, wide
        self._pool = ThreadPoolExecutor(
            max(1, count - 1), thread_name_prefix="ostinato-lane", initializer=torch.set_num_threads, initargs=(1,)
        )

    def parts(self, model: PreTrainedModel) -> int:
        """Return the best number of parts for a model's work: 1 if its threads, or a device, parallelise it already."""
        shared = backend_of(model).device != "cpu" or (self._wide and is_condensed(model))
        return 1 if shared else self.count

    def map(self, run: Callable[[A], B], items: Sequence[A]) -> list[B]:
        """Apply `run` to every item in parallel. Each free lane takes the next item, so put the longest items first.

        Returns the results in the order of the items. Raises what `run` raises, after all lanes have finished.
        """
        if len(items) == 1:
            with team(self.count if self._wide else torch.get_num_threads()):
                return [run(items[0])]
        results: list[B | None] = [None] * len(items)
        waiting = deque(enumerate(items))

        def lane() -> None:
            while waiting:
                try:
                    at, item = waiting.popleft()
                except IndexError:  # another lane took the last item
                    return
                results[at] = run(item)

        others = [self._pool.submit(lane) for _ in range(min(self.count, len(items)) - 1)]
        try:
            lane()
        finally:
            for other in others:
                other.exception()  # waits: no lane may still write keys when the next step begins
        for other in others:
            other.result()
        return cast("list[B]", results)

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown()


@dataclass(frozen=True, slots=True)
class LanePart:
    """The work of one lane in a step: pieces for one policy's model."""

    model: PreTrainedModel
    pieces: list[Scheduled]

    @property
    def tokens(self) -> int:
        """The number of tokens to compute."""
        return sum(piece.end - piece.start for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class LaneOutput:
    """The results of a `LanePart`, by piece.

    `states_RD`: the final hidden state of each piece's last token. `routes`: the chosen experts of its tokens [n, L, k], None if none are
    recorded. `scores`: the log-probabilities of the targets that follow its tokens. `sound`: whether its states are finite. `recorded`:
    a CUDA graph was replayed.
    """

    states_RD: Tensor
    routes: list[NDArray[np.integer[Any]]] | None
    scores: list[list[float]]
    sound: list[bool]
    recorded: bool = False


def split_work(model: PreTrainedModel, pieces: Sequence[Scheduled], lanes: int) -> list[LanePart]:
    """Divide work among lanes by tokens. The longest pieces come first; single tokens that share a prompt are adjacent."""
    pieces = sorted(pieces, key=lambda piece: (piece.start - piece.end, piece.sample.blocks))
    total = sum(piece.end - piece.start for piece in pieces)
    router = routing.of(model)
    lanes = min(lanes, total // _MIN_TOKENS) if router is None else 1  # only one call at a time can record routes
    if lanes <= 1:
        return [LanePart(model, pieces)]
    parts: list[list[Scheduled]] = [[] for _ in range(lanes)]
    load = [0] * lanes
    for piece in pieces:
        size = piece.end - piece.start
        fair = load.index(min(load)) if size > 1 else next((i for i in range(lanes) if load[i] * lanes < total), -1)
        parts[fair].append(piece)
        load[fair] += size
    return [LanePart(model, part) for part in parts if part]


@torch.inference_mode()
def forward(part: LanePart, store: KVStore) -> LaneOutput:
    """Run the part's pieces through the model; their keys and values are then in the store."""
    pieces, router = part.pieces, routing.of(part.model)
    device = part.model.device
    tokens = [token for p in pieces for token in p.sample.ids[p.start : p.end]]
    entries = [PagedEntry(start=p.start, end=p.end, blocks=p.sample.blocks) for p in pieces]
    if len(tokens) == len(pieces) and router is None:
        states_RD = store.decoded(part.model, tokens, entries)
        if states_RD is not None:
            return LaneOutput(states_RD, None, _scores(part, states_RD), _finite(pieces, states_RD), recorded=True)
    ids = torch.tensor(tokens).to(device)
    positions = torch.tensor([position for p in pieces for position in range(p.start, p.end)]).to(device)
    plan = store.attend(entries)
    with router.record() if router is not None and router.can_record else nullcontext() as recording:
        states_ND = hidden(part.model, ids, positions, plan)
    ends = np.cumsum([p.end - p.start for p in pieces])
    routes = None if recording is None else np.split(recording.ids_NLk().cpu().numpy(), ends[:-1])
    last_RD = states_ND[torch.from_numpy(ends - 1).to(device)]
    return LaneOutput(last_RD, routes, _scores(part, states_ND), _finite(pieces, states_ND))


def _finite(pieces: Sequence[Scheduled], states_ND: Tensor) -> list[bool]:
    """Return by piece whether its final states are finite, and with them its keys and values.

    Not checked (True) if every piece is a single token to sample from: its logits are checked instead.
    """
    if all(piece.last and piece.end - piece.start == 1 and not piece.sample.targets for piece in pieces):
        return [True] * len(pieces)
    finite_N = states_ND.abs().amax(-1).isfinite().cpu()  # a seventh of the time of isfinite() over all elements
    return [bool(part.all()) for part in finite_N.split([piece.end - piece.start for piece in pieces])]


def _scores(part: LanePart, states_ND: Tensor) -> list[list[float]]:
    """Return by piece the log-probabilities (temperature 1) of the targets that follow its tokens; NaN where logits are not finite."""
    by_piece: list[list[float]] = [[] for _ in part.pieces]
    end, kernels = 0, backend_of(part.model).kernels
    for piece, scores in zip(part.pieces, by_piece, strict=True):
        sample, end = piece.sample, end + piece.end - piece.start
        if not sample.targets:
            continue
        begin = max(piece.start, sample.read_from)
        for at in range(begin, piece.end, _SCORE_ROWS):
            stop = min(at + _SCORE_ROWS, piece.end)
            made_MV = logits(part.model, states_ND[end - piece.end + at : end - piece.end + stop])
            normal = softmax(made_MV, torch.ones(stop - at, dtype=torch.float32), kernels)
            targets_M = np.array(sample.targets[at - sample.read_from : stop - sample.read_from])
            scores += np.where(normal.sound(), normal.logprobs(targets_M), np.nan).tolist()
    return by_piece


@torch.inference_mode()
def draw_rows(model: PreTrainedModel, states_MD: Tensor, rows: Sequence[Draw], lanes: Lanes) -> Drawn:
    """Sample one token from each of M states, as `rows` specifies."""
    together, kernels = lanes.parts(model) == 1, backend_of(model).kernels
    made_MV = lanes.map(lambda states_MD: logits(model, states_MD), [states_MD])[0] if together else None
    share = -(-len(rows) // lanes.count) if kernels == "own" else len(rows)
    starts = range(0, len(rows), max(share, _MIN_TOKENS))

    def part(start: int) -> Drawn:
        stop = min(start + max(share, _MIN_TOKENS), len(rows))
        with torch.inference_mode():
            own_MV = logits(model, states_MD[start:stop]) if made_MV is None else made_MV[start:stop]
            return draw(own_MV, rows[start:stop], kernels)

    parts = lanes.map(part, starts)
    names = [field.name for field in fields(Drawn)]
    return Drawn(**{name: [each for drawn in parts for each in getattr(drawn, name)] for name in names})


def _edit(sample: Generation) -> Edit | None:
    """Return the logit edit for a sample's next token; None if it has none."""
    edit = None if sample.editor is None else sample.editor.edit()
    steering = None if sample.steering is None else sample.steering.row()
    return edit if steering is None else replace(edit or UNEDITED, steering=steering)


# ---------------------------------------------------------------- the thread


CLOSED = "The engine is not running; start it, or restart the server if it failed."
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPolicy:
    """A policy version and its module. Slots with the same weights share the module."""

    version: PolicyVersion
    model: PreTrainedModel


@dataclass(eq=False, slots=True)
class OpenStream:
    """An open request: the callback for its chunks, and the text decoder of each sample."""

    deliver: Callable[[Chunk], None]
    texts: list[TextStream]
    samples: list[Generation]


class EngineThread(threading.Thread):
    """The worker thread: runs steps while there is work and sleeps otherwise.

    Other threads send it orders, callables that it runs between two steps (`post`). `flush(outbox)` hands all chunks of a step to the
    event loop at once. If a step raises, every stream ends with `Finish.ERROR`, `failure` is set and the thread ends.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        make_store: Callable[[KVShape], KVStore],
        stop_ids: frozenset[int],
        decode: Callable[[Sequence[int]], str],
        flush: Callable[[list[tuple[Callable[[Chunk], None], Chunk]]], None],
        threads: int,
        recompute: bool,
        wide: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name="ostinato-engine", daemon=True)
        self.scheduler = scheduler
        self.policies: dict[str, LoadedPolicy] = {}
        self.failure: BaseException | None = None
        counted = ("tokens", "steps", "passes", "recorded_passes", "prefill_tokens", "busy_s", "orders_done")
        self.counters: dict[str, float] = dict.fromkeys(counted, 0)
        self.posted = 0  # orders accepted
        self.swaps = 0
        self.pauses: deque[float] = deque(maxlen=1024)
        self._make_store, self._stop_ids, self._decode, self._flush = make_store, stop_ids, decode, flush
        self._lanes, self._recompute = Lanes(threads, wide=wide), recompute
        self._store: KVStore | None = None
        self._streams: dict[Generation, OpenStream] = {}
        self._deadlines: dict[Generation, float] = {}  # of the open samples that have one, on `clock`
        self._clock = clock
        self._outbox: list[tuple[Callable[[Chunk], None], Chunk]] = []
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = False
        self._closed = False
        # once `_closed` is set, no further order is accepted, and every order accepted before is run
        self._gate = threading.Lock()

    # ---- from any thread

    def post(self, order: Callable[[], None]) -> None:
        """Run `order` on this thread between two steps. Raises Unavailable if the thread has ended."""
        with self._gate:
            if self._closed:
                raise Unavailable(CLOSED) from self.failure
            self.posted += 1
            self._orders.put(order)

    # ---- orders

    def submit(
        self,
        request: Generate,
        seed: int,
        deliver: Callable[[Chunk], None],
        editor: LogitEditor | None = None,
        until: float | None = None,
        steering: Callable[[], AnswerSteering] | None = None,
        targets: Sequence[int] = (),
    ) -> OpenStream:
        """Queue a request's samples. They end with `Finish.ERROR` at once if the slot has been emptied in the meantime.

        `editor`, in its initial state, makes the logit edits that the sampling asks for. `until`: the samples' deadline on `clock`.
        `steering` makes the steering of one answer. With `targets`, the tokens that follow each of the last len(targets) prompt tokens,
        nothing is sampled: one chunk brings the targets' log-probabilities.
        """
        policy = self.policies.get(request.slot)
        version = PolicyVersion(number=0, hash="") if policy is None else policy.version
        samples = [
            Generation(
                request=request,
                index=i,
                seed=seed,
                ids=list(request.prompt_ids),
                policy=version,
                editor=None if editor is None else editor.copy(),
                steering=None if steering is None else steering(),
                targets=targets,
            )
            for i in range(request.n)
        ]
        for sample in samples[1:]:
            sample.leader = samples[0]
        texts = [TextStream(self._decode, request.sampling.stop) for _ in samples]
        stream = OpenStream(deliver, texts, samples)
        self._streams |= dict.fromkeys(samples, stream)
        if until is not None:
            self._deadlines |= dict.fromkeys(samples, until)
        self.scheduler.add(samples)
        if policy is None:
            self._end_slot(request.slot)
        return stream

    def cancel(self, stream: OpenStream) -> None:
        """Stop the request's open samples without a final chunk."""
        for sample in stream.samples:
            if self._streams.pop(sample, None) is not None:
                self._deadlines.pop(sample, None)
                self.scheduler.remove(sample)

    def end(self, stream: OpenStream, index: int, tokens: int) -> bytes | None:
        """Stop one of the request's samples without a final chunk. Returns the encoded expert choices of its prompt and its first `tokens`
        sampled tokens (see `_routes`); None if the sample has already ended.
        """
        sample = stream.samples[index]
        if self._streams.pop(sample, None) is None:
            return None
        self._deadlines.pop(sample, None)
        encoded = self._routes(sample, sample.prompt + tokens)
        self.scheduler.remove(sample)
        return encoded

    def exchange(self, slot: str, policy: LoadedPolicy) -> tuple[Swap, LoadedPolicy | None]:
        """Swap the slot to other weights. Also returns the old policy, so that its memory is freed on another thread."""
        self._check_shape(policy.model)
        started = time.perf_counter()
        old = self.policies.get(slot)
        self.policies[slot] = policy
        streams = self.scheduler.swap(slot, policy.version, recompute=self._recompute)
        pause = time.perf_counter() - started
        self.pauses.append(pause)
        self.swaps += 1
        return Swap(slot=slot, policy=policy.version, pause_s=pause, streams=streams), old

    def unload(self, slot: str) -> LoadedPolicy | None:
        """Empty the slot and return its policy; its open samples end with `Finish.ERROR`."""
        policy = self.policies.pop(slot, None)
        self._end_slot(slot)
        return policy

    def _end_slot(self, slot: str) -> None:
        for sample in [s for s in self.scheduler.samples() if s.request.slot == slot]:
            self._emit(sample, Finish.ERROR)
        self._send()

    def stop(self) -> None:
        """End the thread; open streams end with `Finish.ABORT`."""
        self._stopping = True

    # ---- the loop

    def run(self) -> None:
        """Run steps until `stop` or a failure."""
        torch.set_num_threads(1)  # parallelism comes from the lanes
        finish = Finish.ABORT
        try:
            while not self._stopping:
                self._run_orders()
                if not self._stopping:
                    self._step()
        except BaseException as error:  # noqa: BLE001 (no failure may leave a stream hanging; it is recorded and logged)
            self.failure, finish = error, Finish.ERROR
            _LOG.exception("the engine's thread failed")
        self._end(finish)

    def _end(self, finish: Finish) -> None:
        with self._gate:
            self._closed = True
        while not self._orders.empty():
            try:
                self._orders.get()()
            except Exception:  # noqa: BLE001 (the failure may have left any state half done, and no stream may hang)
                _LOG.exception("an order failed while the engine's thread ended")
        self._lanes.close()
        for sample in list(self._streams):
            self._emit(sample, finish)
        self._send()

    def _run_orders(self) -> None:
        """Run the waiting orders; if there is no other work, block until the next order."""
        while True:
            try:
                order = self._orders.get(block=not self._streams)
            except queue.Empty:
                return
            order()
            del order  # it may reference the old version's model, and the next order may be far away
            self.counters["orders_done"] += 1
            if self._stopping:
                return

    @torch.inference_mode()
    def _step(self) -> None:
        started = time.perf_counter()
        self._end_expired()
        work = self.scheduler.plan()
        by_policy: dict[str, list[Scheduled]] = {}  # slots that hold the same weights share a forward pass
        for piece in work:
            by_policy.setdefault(self.policies[piece.sample.request.slot].version.hash, []).append(piece)
        parts = [part for pieces in by_policy.values() for part in self._split(pieces)]
        if parts:
            self._run(sorted(parts, key=lambda part: -part.tokens))  # the longest first: see `Lanes.map`
        self._send()
        self.counters["steps"] += 1
        self.counters["busy_s"] += time.perf_counter() - started

    def _end_expired(self) -> None:
        """End the samples whose deadline has passed, waiting or running, before anything more is computed for them."""
        now = self._clock()
        # reversed: samples that wait for a leader's prompt must end before the leader
        for sample in reversed([sample for sample, until in self._deadlines.items() if until <= now]):
            text = self._streams[sample].texts[sample.index]
            rest = text.flush()
            self._emit(sample, Finish.STOP if text.stopped else Finish.DEADLINE, text=rest)

    def _split(self, pieces: Sequence[Scheduled]) -> list[LanePart]:
        model = self.policies[pieces[0].sample.request.slot].model
        return split_work(model, pieces, self._lanes.parts(model))

    def _run(self, parts: Sequence[LanePart]) -> None:
        store = self._store
        assert store is not None, "a policy is loaded"
        drawing: dict[PreTrainedModel, list[tuple[list[Generation], Tensor]]] = {}
        for part, ran in zip(parts, self._lanes.map(lambda part: forward(part, store), parts), strict=True):
            samples: list[Generation] = []
            rows: list[int] = []
            self.counters["passes"] += 1
            self.counters["recorded_passes"] += ran.recorded
            for at, piece in enumerate(part.pieces):
                count = piece.end - piece.start
                self.counters["prefill_tokens"] += count if count > 1 else 0
                if ran.routes is not None:
                    piece.sample.routes[piece.start : piece.end] = list(ran.routes[at])
                self.scheduler.advance(piece)
                # before the sample can be preempted or cancelled, which would hand its blocks to others unwiped
                if not ran.sound[at]:
                    self._end_not_finite(piece.sample)
                elif piece.sample.targets:
                    self._score(piece, ran.scores[at])
                elif piece.last:
                    first = self._fork(piece.sample, store) if piece.sample.sampled == 0 else []
                    samples += [piece.sample, *first]
                    rows += [at] * (1 + len(first))
            if samples:
                states_MD = ran.states_RD.index_select(0, torch.tensor(rows).to(ran.states_RD.device))
                drawing.setdefault(part.model, []).append((samples, states_MD))
        for model, rows_of_parts in drawing.items():
            self._draw(
                model,
                [sample for samples, _ in rows_of_parts for sample in samples],
                torch.cat([states for _, states in rows_of_parts]),
            )

    def _score(self, piece: Scheduled, logprobs: Sequence[float]) -> None:
        sample = piece.sample
        sample.logprobs += logprobs
        if np.isnan(logprobs).any():
            self._end_not_finite(sample)
        elif piece.last:
            self._emit(sample, Finish.LENGTH, tuple(sample.targets), tuple(sample.logprobs))

    def _fork(self, leader: Generation, store: KVStore) -> list[Generation]:
        started = self.scheduler.fork(leader) if leader.request.n > 1 else []
        for _, source, target in started:
            if source is not None and target is not None:
                store.copy(source, target)
        return [sample for sample, _, _ in started]

    def _draw(self, model: PreTrainedModel, samples: Sequence[Generation], states_MD: Tensor) -> None:
        rows = [
            Draw(
                temperature=sample.request.sampling.temperature,
                top_p=sample.request.sampling.top_p,
                u=uniform(sample.seed, sample.index, sample.sampled),
                race=key_of(sample.seed, sample.index, sample.sampled) if sample.request.paired else None,
                edit=_edit(sample),
                tops=sample.request.tops,
            )
            for sample in samples
        ]
        drawn = draw_rows(model, states_MD, rows, self._lanes)
        for i, sample in enumerate(samples):
            if drawn.sound[i]:
                if sample.steering is not None:
                    sample.steering.take(drawn.tokens[i], drawn.steered[i])
                self._append(sample, drawn.tokens[i], drawn.logprobs[i], drawn.tops[i], drawn.nuclei[i])
            else:
                self._end_not_finite(sample)

    def _append(self, sample: Generation, token: int, logprob: float, tops: Tops, nucleus: bytes) -> None:
        if sample.editor is not None and (why := sample.editor.take(token)):  # takes stop tokens too
            # only the first line: the compiler's message quotes the whole grammar, which is the client's text
            _LOG.warning("request %s: its grammar's matcher failed: %.120s", sample.request.id, why.partition("\n")[0])
            # sampled tokens always pass the mask, so the matcher has reached its own limits; the token is dropped
            self._emit(sample, Finish.GRAMMAR)
            return
        sample.ids.append(token)
        self.counters["tokens"] += 1
        stream = self._streams[sample].texts[sample.index]
        last = sample.sampled == sample.request.sampling.max_tokens
        text, finish = shown(stream, token, self._stop_ids, last=last)
        self._emit(sample, finish, (token,), (logprob,), text, (tops,) if tops else (), nucleus)

    def _end_not_finite(self, sample: Generation) -> None:
        """End a sample whose states or logits are not finite, and wipe its blocks."""
        _LOG.error("request %s: its states or logits are not finite; the stream ends", sample.request.id)
        if self._store is not None:
            self._store.wipe(self.scheduler.forget_blocks(sample))
        self._emit(sample, Finish.ERROR)

    def _emit(
        self,
        sample: Generation,
        finish: Finish | None,
        ids: tuple[int, ...] = (),
        logprobs: tuple[float, ...] = (),
        text: str = "",
        tops: tuple[Tops, ...] = (),
        nucleus: bytes = b"",
    ) -> None:
        chunk = Chunk(
            index=sample.index,
            ids=ids,
            logprobs=logprobs,
            policy=sample.policy,
            text=text,
            finish=finish,
            seed=sample.seed,
            routes=b"" if finish is None else self._routes(sample, len(sample.ids)),
            nucleus=nucleus,
            tops=tops,
            steered=None if sample.steering is None else sample.steering.result(),
        )
        self._outbox.append((self._streams[sample].deliver, chunk))
        if finish is not None:
            del self._streams[sample]
            self._deadlines.pop(sample, None)
            self.scheduler.remove(sample)

    def _routes(self, sample: Generation, length: int) -> bytes:
        """Return the encoded expert choices of the first `length` tokens except the last, which was not fed back to the model.

        Empty for a dense model, a stream that was cut off, a single token, and a scored sample.
        """
        policy = self.policies.get(sample.request.slot)
        router = None if policy is None else routing.of(policy.model)
        if router is None or sample.targets or not 1 < length <= len(sample.routes) + 1:
            return b""
        try:
            return routes.encode(np.stack(sample.routes[: length - 1]), router.experts)
        except BadRoutes as error:
            _LOG.error("request %s: its routes are not kept: %s", sample.request.id, error)
            return b""

    def _send(self) -> None:
        if self._outbox:
            self._flush(self._outbox)
            self._outbox = []

    def _check_shape(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        shape = KVShape(
            layers=config.num_hidden_layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=model.dtype,
            backend=backend_of(model),
        )
        if self._store is None:
            self._store = self._make_store(shape)
        elif shape != self._store.shape:
            raise BadWeights(f"These weights need a KV cache of {shape}; this engine holds {self._store.shape}.")
