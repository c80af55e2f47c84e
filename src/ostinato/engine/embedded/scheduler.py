"""Which tokens the next step computes: continuous batching, chunked prefill, shared prompts, the prefix cache, preemption.

Pure book-keeping over `BlockPool`: no tensors, no clock, no threads. The worker asks for `plan()`, runs it, and reports back through
`advance`, `fork` and `remove`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ostinato.core.generation import Generate
from ostinato.core.records import PolicyVersion
from ostinato.engine.embedded.blocks import BlockPool, chain_key
from ostinato.engine.prefix import prefix_key


@dataclass(eq=False, slots=True, kw_only=True)
class Generation:
    """One answer in the making. `ids` = prompt and sampled tokens; the KV of the first `computed` of them lies in `blocks`.

    `leader` is the sample of the same request that computes their common prompt; None once the prompt is this sample's own.

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
    pure: bool = True  # all of its KV was made by `policy`, so its full blocks may be found by others

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def sampled(self) -> int:
        """Tokens sampled so far."""
        return len(self.ids) - self.prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """Compute ids[start:end] of a sample. `last` says that the token after `end` is to be drawn.

    Example: ``Scheduled(sample=sample, start=96, end=97, last=True)``.
    """

    sample: Generation
    start: int
    end: int
    last: bool


class Scheduler:
    """Decides, within `rows` samples at once and, per step and lane, `chunk` prefill tokens; no sample gets more than one lane's.

    The oldest sample always goes on: when blocks run out the youngest is put back in the queue and computed again later. As every
    admitted request fits the empty pool, the queue always moves.
    """

    def __init__(self, pool: BlockPool, *, block: int, rows: int, chunk: int, lanes: int = 1) -> None:
        self.pool, self._block, self._rows, self._chunk, self._lanes = pool, block, rows, chunk, lanes
        self._routes: dict[int, Sequence[NDArray[np.integer[Any]]]] = {}  # of the tokens in a block that has a name
        self.waiting: deque[Generation] = deque()
        self.running: list[Generation] = []
        self.prefix_hits = 0
        self.preemptions = 0

    def add(self, samples: Iterable[Generation]) -> None:
        """Queue samples in the order of their arrival."""
        self.waiting.extend(samples)

    def samples(self) -> list[Generation]:
        """All samples, running first."""
        return [*self.running, *self.waiting]

    def plan(self) -> list[Scheduled]:
        """The next step's work; empty when nothing waits or runs."""
        work: list[Scheduled] = []
        budget, preemptions = self._chunk * self._lanes, self.preemptions
        for sample in list(self.running):
            if sample not in self.running:
                continue  # preempted for an older one in this very loop
            missing = len(sample.ids) - sample.computed
            take = missing if missing == 1 else min(missing, budget, self._chunk)
            if take and self._grow(sample, sample.computed + take):
                budget -= take if missing > 1 else 0
                work.append(self._work(sample, take))
        work = [piece for piece in work if piece.sample in self.running]
        return work + self._admit(budget) if self.preemptions == preemptions else work

    def advance(self, work: Scheduled) -> None:
        """The KV of this work is in the cache: name the blocks that became full."""
        sample = work.sample
        sample.computed = work.end
        while sample.pure and (len(sample.keys) + 1) * self._block <= sample.computed:
            at = len(sample.keys)
            sample.keys.append(self._key(sample, at))
            self.pool.name(sample.blocks[at], sample.keys[at])
            if sample.routes:
                self._routes[sample.blocks[at]] = sample.routes[at * self._block : (at + 1) * self._block]

    def fork(self, leader: Generation) -> list[tuple[Generation, int | None, int | None]]:
        """The leader's prompt is computed: give it to the samples that wait for it.

        Returns (sample, source block, target block) for each that can start now; source and target are set where a partly
        filled block must be copied. Those that find no room stay in the queue as ordinary samples.
        """
        started: list[tuple[Generation, int | None, int | None]] = []
        for sample in [waiting for waiting in self.waiting if waiting.leader is leader]:
            sample.leader = None
            full, rest = divmod(sample.prompt, self._block)
            own = self.pool.allocate(1 if rest else 0) if len(self.running) < self._rows else None
            if own is None:
                continue
            self.pool.share(leader.blocks[:full])
            sample.blocks, sample.keys = [*leader.blocks[:full], *own], leader.keys[:full]
            sample.computed, sample.policy, sample.pure = sample.prompt, leader.policy, leader.pure
            sample.routes = leader.routes[: sample.prompt]
            self.waiting.remove(sample)
            self.running.append(sample)
            started.append((sample, leader.blocks[full] if own else None, own[0] if own else None))
        return started

    def remove(self, sample: Generation) -> None:
        """Forget a sample, finished or not, and release its blocks. Those that waited for it wait no longer."""
        if sample in self.running:
            self.running.remove(sample)
        elif sample in self.waiting:
            self.waiting.remove(sample)
        self._release(sample)
        followers = [other for other in self.waiting if other.leader is sample]
        for other in followers:  # the first of them computes the prompt now
            other.leader = followers[0] if other is not followers[0] else None

    def spoil(self, sample: Generation) -> list[int]:
        """The sample's KV is not finite: its own blocks, now without names, to be wiped before it is removed."""
        own = [block for block in sample.blocks if self.pool.readers(block) == 1]
        for block in own:
            self.pool.forget(block)
        return own

    def swap(self, slot: str, policy: PolicyVersion, *, recompute: bool) -> int:
        """The slot holds other weights now and its samples go on. Returns how many.

        With `recompute` they compute their past again first, as do those that have sampled nothing yet; the others go on at
        once, with keys and values of mixed origin.
        """
        found = [sample for sample in self.samples() if sample.request.slot == slot]
        for sample in found:
            sample.policy = policy
        for sample in reversed([sample for sample in found if sample in self.running]):  # the oldest is back first
            if sample.computed and (recompute or not sample.sampled):
                self._put_back(sample)
            else:
                sample.pure = sample.computed == 0
        return len(found)

    def _work(self, sample: Generation, take: int) -> Scheduled:
        end = sample.computed + take
        return Scheduled(sample=sample, start=sample.computed, end=end, last=end == len(sample.ids))

    def _grow(self, sample: Generation, tokens: int) -> bool:
        """Blocks for this many tokens; takes them from the youngest if need be. False if that was the sample itself."""
        missing = -(-tokens // self._block) - len(sample.blocks)
        if missing <= 0:
            return True
        while (blocks := self.pool.allocate(missing)) is None:
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sample:
                return False
        sample.blocks += blocks
        return True

    def _preempt(self, sample: Generation) -> None:
        self._put_back(sample)
        self.preemptions += 1

    def _put_back(self, sample: Generation) -> None:
        self.running.remove(sample)
        self._release(sample)
        self.waiting.appendleft(sample)

    def _release(self, sample: Generation) -> None:
        self.pool.release(sample.blocks)
        sample.blocks, sample.keys, sample.computed, sample.pure = [], [], 0, True

    def _admit(self, budget: int) -> list[Scheduled]:
        work: list[Scheduled] = []
        for sample in list(self.waiting):
            if budget <= 0 or len(self.running) >= self._rows:
                break
            if sample.leader is not None:
                continue
            found = self._find(sample)
            self.pool.share(found)  # first, so that allocating cannot give them away
            take = min(len(sample.ids) - len(found) * self._block, budget, self._chunk)
            missing = -(-(len(found) * self._block + take) // self._block) - len(found)
            # every running sample may soon want one more block: to admit into that reserve would only preempt again
            own = self.pool.allocate(missing) if missing + len(self.running) <= self.pool.available else None
            if own is None:
                self.pool.release(found)
                sample.keys = []
                break
            sample.blocks, sample.computed = [*found, *own], len(found) * self._block
            sample.routes = [routes for block in found for routes in self._routes.get(block, ())]
            self.prefix_hits += sample.computed
            self.waiting.remove(sample)
            self.running.append(sample)
            budget -= take
            work.append(self._work(sample, take))
        return work

    def _find(self, sample: Generation) -> list[int]:
        """The cached blocks that begin this sample's ids; at least one token is always left to compute."""
        found: list[int] = []
        sample.keys = []
        for at in range((len(sample.ids) - 1) // self._block):
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
