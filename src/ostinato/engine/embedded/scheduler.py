"""The scheduler decides which tokens the next step computes: continuous batching, chunked prefill, prefix caching, fairness, preemption.

It is pure book-keeping over `BlockPool`: no tensors, no clock, no threads. The worker calls `plan()`, runs the plan, and reports back
through `advance`, `fork` and `remove`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ostinato.core.generation import Generate
from ostinato.core.records import PolicyVersion
from ostinato.engine.admission import prefix_key
from ostinato.engine.embedded.kv import BlockPool, chain_key
from ostinato.model.logit_edits import LogitEditor
from ostinato.model.steering import AnswerSteering

# ---------------------------------------------------------------- the waiting queue


S = TypeVar("S", bound=Hashable)


class WaitingSamples(Generic[S]):
    """A fair queue of the samples that are ready to start, by client.

    The next sample belongs to the client with the fewest running samples; ties go to the client that has waited longest for a turn.

    Example::

        waiting.put("ann", sample)
        waiting.next()  # the sample, still in the queue
        waiting.start("ann", sample)
        waiting.end("ann")
    """

    def __init__(self) -> None:
        # by client, the longest wait for a turn first
        self._queues: dict[str, OrderedDict[S, None]] = {}
        self._running: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[S]:
        return chain.from_iterable(self._queues.values())

    def put(self, client: str, sample: S, *, first: bool = False) -> None:
        """Queue a sample behind its client's other samples, or before them if `first`."""
        queue = self._queues.setdefault(client, OrderedDict())
        queue[sample] = None
        if first:
            queue.move_to_end(sample, last=False)

    @property
    def newcomer(self) -> bool:
        """True if a client without running samples is waiting. Costs O(number of clients with running samples)."""
        return not self._queues.keys() <= self._running.keys()

    @property
    def most(self) -> int:
        """The largest number of running samples of any client."""
        return max(self._running.values(), default=0)

    def running(self, client: str) -> int:
        """Return the number of the client's running samples."""
        return self._running[client]

    def next(self) -> S | None:
        """Return the sample that starts next, without removing it; None if the queue is empty."""
        if not self._queues:
            return None
        client = min(self._queues, key=self._running.__getitem__)  # of equals the first
        return next(iter(self._queues[client]))

    def start(self, client: str, sample: S) -> None:
        """Count a sample as running, and remove it from the queue if it is there."""
        self.discard(client, sample)
        self._running[client] += 1
        if queue := self._queues.pop(client, None):
            self._queues[client] = queue  # it had its turn, so it is last among equals

    def end(self, client: str) -> None:
        """Count one of the client's samples as no longer running."""
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]

    def discard(self, client: str, sample: S) -> None:
        """Remove a sample if it is in the queue."""
        queue = self._queues.get(client)
        if queue is not None:
            queue.pop(sample, None)
            if not queue:
                del self._queues[client]


# ---------------------------------------------------------------- the scheduler


@dataclass(eq=False, slots=True, kw_only=True)
class Generation:
    """One sample in progress. `ids` are the prompt and sampled tokens; the keys and values of the first `computed` ones are in `blocks`.

    `leader` is the sample of the same request that computes their common prompt; None once this sample has or computes the prompt itself.

    With `targets` the sample is scored instead: `targets` are the tokens that follow each of the last len(targets) `ids`, and their
    log-probabilities are collected in `logprobs`.

    Example: ``Generation(request=request, index=0, seed=7, ids=list(request.prompt_ids), policy=v3)``.
    """

    request: Generate
    index: int
    seed: int
    ids: list[int]
    policy: PolicyVersion
    leader: Generation | None = None
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    routes: list[NDArray[np.integer[Any]]] = field(default_factory=list)  # experts [L, k] per computed position, if any
    pure: bool = True  # `policy` computed all of its keys and values, so other samples may reuse its full blocks
    editor: LogitEditor | None = None  # edits logits before sampling
    steering: AnswerSteering | None = None
    targets: Sequence[int] = ()
    logprobs: list[float] = field(default_factory=list)  # of the first targets

    @property
    def client(self) -> str:
        """The client, identified by the cache salt."""
        return self.request.cache_salt

    @property
    def prompt(self) -> int:
        """The number of prompt tokens."""
        return len(self.request.prompt_ids)

    @property
    def sampled(self) -> int:
        """The number of tokens sampled so far."""
        return len(self.ids) - self.prompt

    @property
    def read_from(self) -> int:
        """The first position whose final hidden state is needed. It must be computed even if its keys and values are cached."""
        return len(self.ids) - max(1, len(self.targets))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """Work for one step: compute ids[start:end] of a sample. `last`: then sample the token at index `end`.

    Example: ``Scheduled(sample=sample, start=96, end=97, last=True)``.
    """

    sample: Generation
    start: int
    end: int
    last: bool


class Scheduler:
    """Plans steps with at most `rows` running samples and `chunk` prefill tokens per lane; one sample gets at most one lane's share.

    Requests with the same cache salt belong to one client, and clients are scheduled fairly. When blocks run out, or a client without
    running samples waits, the client with the most running samples is preempted: its youngest sample returns to the queue and is
    recomputed later. The oldest sample always continues, and every admitted request fits into the empty pool, so the queue always makes
    progress. The cost of planning a step depends on the planned work, not on the number of waiting samples.
    """

    def __init__(self, pool: BlockPool, *, block: int, rows: int, chunk: int, lanes: int = 1) -> None:
        self.pool, self._block, self._rows, self._chunk, self._lanes = pool, block, rows, chunk, lanes
        self._routes: dict[int, Sequence[NDArray[np.integer[Any]]]] = {}  # by named block: the experts of its tokens
        self.waiting: WaitingSamples[Generation] = WaitingSamples()
        self.following: dict[Generation, list[Generation]] = {}  # by leader: the samples that wait for its prompt
        self.running: dict[Generation, None] = {}  # in the order of their starts
        self.prefix_hits = 0
        self.preemptions = 0

    def add(self, samples: Iterable[Generation]) -> None:
        """Queue new samples, in order."""
        for sample in samples:
            if sample.leader is None:
                self.waiting.put(sample.client, sample)
            else:
                self.following.setdefault(sample.leader, []).append(sample)

    def samples(self) -> list[Generation]:
        """Return all samples, running ones first."""
        return [*self.running, *self.waiting, *chain.from_iterable(self.following.values())]

    @property
    def queued(self) -> int:
        """The number of samples that are not running."""
        return len(self.waiting) + sum(map(len, self.following.values()))

    def plan(self) -> list[Scheduled]:
        """Plan the next step; empty if no sample waits or runs."""
        work: list[Scheduled] = []
        budget, preemptions = self._chunk * self._lanes, self.preemptions
        for sample in list(self.running):
            if sample not in self.running:
                continue  # preempted for another sample in this loop
            missing = len(sample.ids) - sample.computed
            take = missing if missing == 1 else min(missing, budget, self._chunk)
            if take and self._grow(sample, sample.computed + take):
                budget -= take if missing > 1 else 0
                work.append(self._work(sample, take))
        if self.preemptions == preemptions:
            work += self._admit(budget)
        return work if self.preemptions == preemptions else [piece for piece in work if piece.sample in self.running]

    def advance(self, work: Scheduled) -> None:
        """Record that this work's keys and values are in the cache, and name the blocks that became full."""
        sample = work.sample
        sample.computed = work.end
        while sample.pure and (len(sample.keys) + 1) * self._block <= sample.computed:
            at = len(sample.keys)
            sample.keys.append(self._key(sample, at))
            self.pool.name(sample.blocks[at], sample.keys[at])
            if sample.routes:
                self._routes[sample.blocks[at]] = sample.routes[at * self._block : (at + 1) * self._block]

    def fork(self, leader: Generation) -> list[tuple[Generation, int | None, int | None]]:
        """Share the leader's computed prompt with the samples that wait for it.

        Returns (sample, source block, target block) for each sample that can start now; source and target are set if a partly
        filled block must be copied. Samples without room become ordinary samples at the head of the queue.
        """
        started: list[tuple[Generation, int | None, int | None]] = []
        left: list[Generation] = []
        for sample in self.following.pop(leader, ()):
            sample.leader = None
            full, rest = divmod(sample.prompt, self._block)
            own = self.pool.allocate(1 if rest else 0) if len(self.running) < self._rows else None
            if own is None:
                left.append(sample)
                continue
            self.pool.share(leader.blocks[:full])
            sample.blocks, sample.keys = [*leader.blocks[:full], *own], leader.keys[:full]
            sample.computed, sample.policy, sample.pure = sample.prompt, leader.policy, leader.pure
            sample.routes = leader.routes[: sample.prompt]
            self._start(sample)
            started.append((sample, leader.blocks[full] if own else None, own[0] if own else None))
        for sample in reversed(left):
            self._to_head(sample)
        return started

    def remove(self, sample: Generation) -> None:
        """Remove a sample, finished or not, and release its blocks. If others wait for its prompt, the first of them becomes the leader."""
        if sample in self.running:
            self._stop(sample)
        self.waiting.discard(sample.client, sample)
        if sample.leader is not None:
            self.following[sample.leader].remove(sample)
        self._release(sample)
        if followers := self.following.pop(sample, None):
            first, *others = followers
            first.leader = None
            self._to_head(first)
            for other in others:
                other.leader = first
            self.following |= {first: others} if others else {}

    def forget_blocks(self, sample: Generation) -> list[int]:
        """Drop from the prefix cache, and return, the blocks that only this sample reads, because their content is not finite.

        The caller must wipe them before it removes the sample.
        """
        own = [block for block in sample.blocks if self.pool.readers(block) == 1]
        for block in own:
            self.pool.forget(block)
        return own

    def swap(self, slot: str, policy: PolicyVersion, *, recompute: bool) -> int:
        """Move the slot's samples to its new weights; return how many there are.

        Samples without sampled tokens, and with `recompute` all samples, recompute their keys and values first. The others continue at
        once, with keys and values from both versions.
        """
        affected = [sample for sample in self.samples() if sample.request.slot == slot]
        for sample in affected:
            sample.policy = policy
        # reversed: the oldest must end at the head of the queue
        for sample in reversed([sample for sample in affected if sample in self.running]):
            if sample.computed and (recompute or not sample.sampled):
                self._requeue(sample)
            else:
                sample.pure = sample.computed == 0
        return len(affected)

    def _work(self, sample: Generation, take: int) -> Scheduled:
        end = sample.computed + take
        return Scheduled(sample=sample, start=sample.computed, end=end, last=end == len(sample.ids))

    def _grow(self, sample: Generation, tokens: int) -> bool:
        """Allocate blocks for this many tokens, preempting samples if needed. False if the sample itself was preempted."""
        missing = -(-tokens // self._block) - len(sample.blocks)
        if missing <= 0:
            return True
        while (blocks := self.pool.allocate(missing)) is None:
            if self._preempt() is sample:
                return False
        sample.blocks += blocks
        return True

    def _preempt(self) -> Generation:
        """Preempt the youngest sample among the clients with the most running ones: the oldest sample only if no other runs."""
        most = self.waiting.most
        sample = next(each for each in reversed(self.running) if self.waiting.running(each.client) == most)
        self._requeue(sample)
        self.preemptions += 1
        return sample

    def _has_row(self) -> bool:
        """Return whether a sample may start: a row is free, or a client without running samples may take one from a client with several."""
        return len(self.running) < self._rows or (self.waiting.newcomer and self.waiting.most > 1)

    def _requeue(self, sample: Generation) -> None:
        self._stop(sample)
        self._release(sample)
        self._to_head(sample)

    def _to_head(self, sample: Generation) -> None:
        self.waiting.put(sample.client, sample, first=True)

    def _start(self, sample: Generation) -> None:
        self.running[sample] = None
        self.waiting.start(sample.client, sample)

    def _stop(self, sample: Generation) -> None:
        del self.running[sample]
        self.waiting.end(sample.client)

    def _release(self, sample: Generation) -> None:
        self.pool.release(sample.blocks)
        sample.blocks, sample.keys, sample.logprobs, sample.computed, sample.pure = [], [], [], 0, True

    def _admit(self, budget: int) -> list[Scheduled]:
        """Start samples while there is room. Preempt to start clients without running samples; after that, start only such clients."""
        work: list[Scheduled] = []
        preemptions = self.preemptions
        while budget > 0 and self._has_row() and (sample := self.waiting.next()) is not None:
            newcomer = not self.waiting.running(sample.client)
            if not newcomer and self.preemptions > preemptions:
                break  # it may be the sample that was just preempted
            if len(self.running) >= self._rows:
                self._preempt()
            cached = self._find_cached(sample)
            self.pool.share(cached)  # before allocating, which could evict them
            take = min(len(sample.ids) - len(cached) * self._block, budget, self._chunk)
            missing = -(-(len(cached) * self._block + take) // self._block) - len(cached)
            own = self._reserve(missing, make_room=newcomer)
            if own is None:
                self.pool.release(cached)
                sample.keys = []
                break
            sample.blocks, sample.computed = [*cached, *own], len(cached) * self._block
            sample.routes = [routes for block in cached for routes in self._routes.get(block, ())]
            self.prefix_hits += sample.computed
            self._start(sample)
            budget -= take
            work.append(self._work(sample, take))
        return work

    def _reserve(self, missing: int, *, make_room: bool) -> list[int] | None:
        """Allocate blocks, but leave one free for each running sample: it may need one soon, and would otherwise cause a preemption."""
        while missing + len(self.running) > self.pool.available:
            # a client keeps its only running sample, so clients do not preempt each other in turn
            if not make_room or self.waiting.most < 2:
                return None
            self._preempt()
        return self.pool.allocate(missing)

    def _find_cached(self, sample: Generation) -> list[int]:
        """Return the cached blocks of the longest prefix of this sample's ids, up to the first position whose state is needed."""
        cached: list[int] = []
        sample.keys = []
        for at in range(sample.read_from // self._block):
            key = self._key(sample, at)
            block = self.pool.find(key)
            if block is None:
                break
            cached.append(block)
            sample.keys.append(key)
        return cached

    def _key(self, sample: Generation, at: int) -> bytes:
        parent = sample.keys[at - 1] if at else prefix_key(sample.policy.hash, sample.request.cache_salt)
        tokens: Sequence[int] = sample.ids[at * self._block : (at + 1) * self._block]
        return chain_key(parent, tokens)
