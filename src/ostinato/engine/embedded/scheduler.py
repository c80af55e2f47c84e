"""Decides which tokens the next step computes: continuous batching, chunked prefill, shared prompts, the prefix cache, preemption.

Pure book-keeping over `BlockPool`: no tensors, no clock, no threads. The worker asks for `plan()`, runs it, and reports back through
`advance`, `fork` and `remove`.
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

# ---------------------------------------------------------------- the queue


S = TypeVar("S", bound=Hashable)


class WaitingSamples(Generic[S]):
    """Samples that could start, by asker.

    The next sample belongs to the asker with the fewest samples running; among equals, to the one that has waited longest for a turn.

    Example::

        waiting.put("ann", sample)
        waiting.next()  # the sample, still in the queue
        waiting.start("ann", sample)
        waiting.end("ann")
    """

    def __init__(self) -> None:
        # by asker; those that have waited longest for a turn come first
        self._queues: dict[str, OrderedDict[S, None]] = {}
        self._running: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[S]:
        return chain.from_iterable(self._queues.values())

    def put(self, asker: str, sample: S, *, first: bool = False) -> None:
        """Queue a sample behind its asker's other samples, or before them if `first`."""
        queue = self._queues.setdefault(asker, OrderedDict())
        queue[sample] = None
        if first:
            queue.move_to_end(sample, last=False)

    @property
    def newcomer(self) -> bool:
        """True if an asker with no running samples is waiting. Costs O(number of askers with running samples)."""
        return not self._queues.keys() <= self._running.keys()

    @property
    def most(self) -> int:
        """The number of running samples of the asker with most of them."""
        return max(self._running.values(), default=0)

    def running(self, asker: str) -> int:
        """The number of the asker's running samples."""
        return self._running[asker]

    def next(self) -> S | None:
        """The sample that starts next; None if none waits."""
        if not self._queues:
            return None
        asker = min(self._queues, key=self._running.__getitem__)  # the first of equals
        return next(iter(self._queues[asker]))

    def start(self, asker: str, sample: S) -> None:
        """Count a sample as running, whether or not it waited here."""
        self.discard(asker, sample)
        self._running[asker] += 1
        if queue := self._queues.pop(asker, None):
            self._queues[asker] = queue  # it had its turn, so it comes last among equals

    def end(self, asker: str) -> None:
        """One of the asker's samples has stopped running."""
        self._running[asker] -= 1
        if not self._running[asker]:
            del self._running[asker]

    def discard(self, asker: str, sample: S) -> None:
        """Remove a sample if it waits here."""
        queue = self._queues.get(asker)
        if queue is not None:
            queue.pop(sample, None)
            if not queue:
                del self._queues[asker]


# ---------------------------------------------------------------- the scheduler


@dataclass(eq=False, slots=True, kw_only=True)
class Generation:
    """One answer in progress. `ids` are the prompt and sampled tokens; the KV of the first `computed` of them is in `blocks`.

    `leader` is the sample of the same request that computes their common prompt; None once this sample has or computes the prompt itself.

    With `targets`, the tokens after the last so many of `ids`, nothing is sampled: their log-probabilities are collected in `logprobs`.

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
    pure: bool = True  # all of its KV was computed by `policy`, so others may reuse its full blocks
    editor: LogitEditor | None = None  # if tokens are sampled from edited logits
    steering: AnswerSteering | None = None
    targets: Sequence[int] = ()
    logprobs: list[float] = field(default_factory=list)  # of the first targets

    @property
    def asker(self) -> str:
        """The asker, identified by the cache salt."""
        return self.request.cache_salt

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def sampled(self) -> int:
        """Tokens sampled so far."""
        return len(self.ids) - self.prompt

    @property
    def read_from(self) -> int:
        """The first position whose final state is read, and which is therefore computed even if its keys and values are cached."""
        return len(self.ids) - max(1, len(self.targets))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """Compute ids[start:end] of a sample. `last`: the token at index `end` is then to be sampled.

    Example: ``Scheduled(sample=sample, start=96, end=97, last=True)``.
    """

    sample: Generation
    start: int
    end: int
    last: bool


class Scheduler:
    """Plans steps with at most `rows` samples at once and `chunk` prefill tokens per lane; no sample gets more than one lane's share.

    Requests with the same cache salt belong to one asker. Askers take turns, and the asker with the most running samples makes room: when
    blocks run out, or an asker with none running waits, its youngest sample is put back in the queue and recomputed later. The oldest
    sample always goes on. Since every admitted request fits the empty pool, the queue always advances. The cost of a step depends on the
    work that it plans, not on how many samples wait.
    """

    def __init__(self, pool: BlockPool, *, block: int, rows: int, chunk: int, lanes: int = 1) -> None:
        self.pool, self._block, self._rows, self._chunk, self._lanes = pool, block, rows, chunk, lanes
        self._routes: dict[int, Sequence[NDArray[np.integer[Any]]]] = {}  # experts of the tokens in each named block
        self.waiting: WaitingSamples[Generation] = WaitingSamples()
        self.following: dict[Generation, list[Generation]] = {}  # by leader: the samples that wait for its prompt
        self.running: dict[Generation, None] = {}  # in the order in which they started
        self.prefix_hits = 0
        self.preemptions = 0

    def add(self, samples: Iterable[Generation]) -> None:
        """Queue samples in the order of their arrival."""
        for sample in samples:
            if sample.leader is None:
                self.waiting.put(sample.asker, sample)
            else:
                self.following.setdefault(sample.leader, []).append(sample)

    def samples(self) -> list[Generation]:
        """All samples, running first."""
        return [*self.running, *self.waiting, *chain.from_iterable(self.following.values())]

    @property
    def queued(self) -> int:
        """The number of samples that do not run."""
        return len(self.waiting) + sum(map(len, self.following.values()))

    def plan(self) -> list[Scheduled]:
        """The next step's work; empty if no sample waits or runs."""
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
        """Record that the KV of this work is in the cache, and name the blocks that became full."""
        sample = work.sample
        sample.computed = work.end
        while sample.pure and (len(sample.keys) + 1) * self._block <= sample.computed:
            at = len(sample.keys)
            sample.keys.append(self._key(sample, at))
            self.pool.name(sample.blocks[at], sample.keys[at])
            if sample.routes:
                self._routes[sample.blocks[at]] = sample.routes[at * self._block : (at + 1) * self._block]

    def fork(self, leader: Generation) -> list[tuple[Generation, int | None, int | None]]:
        """Give the leader's computed prompt to the samples that wait for it.

        Returns (sample, source block, target block) for each sample that can start now; source and target are set if a partly
        filled block must be copied. Samples that find no room go to the head of the queue as ordinary samples.
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
        """Remove a sample, finished or not, and release its blocks. If others wait for its prompt, the first of them computes it."""
        if sample in self.running:
            self._stop(sample)
        self.waiting.discard(sample.asker, sample)
        if sample.leader is not None:
            self.following[sample.leader].remove(sample)
        self._release(sample)
        if followers := self.following.pop(sample, None):
            first, *others = followers  # `first` computes the prompt now
            first.leader = None
            self._to_head(first)
            for other in others:
                other.leader = first
            self.following |= {first: others} if others else {}

    def spoil(self, sample: Generation) -> list[int]:
        """Unname and return the blocks that only this sample reads, whose KV is not finite. They must be wiped before it is removed."""
        own = [block for block in sample.blocks if self.pool.readers(block) == 1]
        for block in own:
            self.pool.forget(block)
        return own

    def swap(self, slot: str, policy: PolicyVersion, *, recompute: bool) -> int:
        """Let the slot's samples go on with its new weights. Returns how many there are.

        With `recompute` they first recompute their past, as samples without sampled tokens always do; the others go on at once, with
        keys and values from both versions.
        """
        found = [sample for sample in self.samples() if sample.request.slot == slot]
        for sample in found:
            sample.policy = policy
        # so that the oldest is back at the head
        for sample in reversed([sample for sample in found if sample in self.running]):
            if sample.computed and (recompute or not sample.sampled):
                self._put_back(sample)
            else:
                sample.pure = sample.computed == 0
        return len(found)

    def _work(self, sample: Generation, take: int) -> Scheduled:
        end = sample.computed + take
        return Scheduled(sample=sample, start=sample.computed, end=end, last=end == len(sample.ids))

    def _grow(self, sample: Generation, tokens: int) -> bool:
        """Ensure blocks for this many tokens, preempting samples if needed. False if the sample itself was preempted."""
        missing = -(-tokens // self._block) - len(sample.blocks)
        if missing <= 0:
            return True
        while (blocks := self.pool.allocate(missing)) is None:
            if self._preempt() is sample:
                return False
        sample.blocks += blocks
        return True

    def _preempt(self) -> Generation:
        """Put back the youngest sample of an asker with the most running ones. The oldest sample is chosen only if no other runs."""
        most = self.waiting.most
        sample = next(each for each in reversed(self.running) if self.waiting.running(each.asker) == most)
        self._put_back(sample)
        self.preemptions += 1
        return sample

    def _has_row(self) -> bool:
        """True if a sample may start: a row is free, or an asker with none running can take a row from an asker with several."""
        return len(self.running) < self._rows or (self.waiting.newcomer and self.waiting.most > 1)

    def _put_back(self, sample: Generation) -> None:
        self._stop(sample)
        self._release(sample)
        self._to_head(sample)

    def _to_head(self, sample: Generation) -> None:
        self.waiting.put(sample.asker, sample, first=True)

    def _start(self, sample: Generation) -> None:
        self.running[sample] = None
        self.waiting.start(sample.asker, sample)

    def _stop(self, sample: Generation) -> None:
        del self.running[sample]
        self.waiting.end(sample.asker)

    def _release(self, sample: Generation) -> None:
        self.pool.release(sample.blocks)
        sample.blocks, sample.keys, sample.logprobs, sample.computed, sample.pure = [], [], [], 0, True

    def _admit(self, budget: int) -> list[Scheduled]:
        """Start samples while there is room. For askers with none running, room is made by preemption; then only theirs start."""
        work: list[Scheduled] = []
        preemptions = self.preemptions
        while budget > 0 and self._has_row() and (sample := self.waiting.next()) is not None:
            newcomer = not self.waiting.running(sample.asker)
            if not newcomer and self.preemptions > preemptions:
                break  # it may be the sample that was just put back
            if len(self.running) >= self._rows:
                self._preempt()
            found = self._find(sample)
            self.pool.share(found)  # before allocating, which could give them away
            take = min(len(sample.ids) - len(found) * self._block, budget, self._chunk)
            missing = -(-(len(found) * self._block + take) // self._block) - len(found)
            own = self._reserve(missing, make_room=newcomer)
            if own is None:
                self.pool.release(found)
                sample.keys = []
                break
            sample.blocks, sample.computed = [*found, *own], len(found) * self._block
            sample.routes = [routes for block in found for routes in self._routes.get(block, ())]
            self.prefix_hits += sample.computed
            self._start(sample)
            budget -= take
            work.append(self._work(sample, take))
        return work

    def _reserve(self, missing: int, *, make_room: bool) -> list[int] | None:
        """Allocate blocks, but leave one per running sample, which may need it soon: taking those would only cause a preemption."""
        while missing + len(self.running) > self.pool.available:
            # an asker keeps its only running sample, so askers do not preempt each other in turn
            if not make_room or self.waiting.most < 2:
                return None
            self._preempt()
        return self.pool.allocate(missing)

    def _find(self, sample: Generation) -> list[int]:
        """The cached blocks with the longest known prefix of this sample's ids, up to the first position whose state is read."""
        found: list[int] = []
        sample.keys = []
        for at in range(sample.read_from // self._block):
            key = self._key(sample, at)
            block = self.pool.find(key)
            if block is None:
                break
            found.append(block)
            sample.keys.append(key)
        return found

    def _key(self, sample: Generation, at: int) -> bytes:
        parent = sample.keys[at - 1] if at else prefix_key(sample.policy.hash, sample.request.cache_salt)
        tokens: Sequence[int] = sample.ids[at * self._block : (at + 1) * self._block]
        return chain_key(parent, tokens)
