"""Which tokens the next step computes: continuous batching, chunked prefill, shared prompts, the prefix cache, preemption.

Pure book-keeping over `BlockPool`: no tensors, no clock, no threads. The worker asks for `plan()`, runs it, and reports back through
`advance`, `fork` and `remove`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ostinato.core.generation import Generate
from ostinato.core.records import PolicyVersion
from ostinato.engine.embedded.blocks import BlockPool, chain_key
from ostinato.engine.embedded.waiting import WaitingSamples
from ostinato.engine.prefix import prefix_key
from ostinato.model.logit_edits import LogitEditor


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
    editor: LogitEditor | None = None  # where tokens are not drawn from the model's own logits

    @property
    def asker(self) -> str:
        """Whose it is: who shares a cache salt."""
        return self.request.cache_salt

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

    Requests with one cache salt are one asker's. Askers take turns, and the one with most samples running makes room: when blocks run
    out, or when an asker with none running waits, its youngest is put back in the queue and computed again later. The oldest sample
    always goes on. As every admitted request fits the empty pool, the queue always moves. A step costs what it plans, however
    many samples wait.
    """

    def __init__(self, pool: BlockPool, *, block: int, rows: int, chunk: int, lanes: int = 1) -> None:
        self.pool, self._block, self._rows, self._chunk, self._lanes = pool, block, rows, chunk, lanes
        self._routes: dict[int, Sequence[NDArray[np.integer[Any]]]] = {}  # of the tokens in a block that has a name
        self.waiting: WaitingSamples[Generation] = WaitingSamples()
        self.following: dict[Generation, list[Generation]] = {}  # by leader: those that wait for its prompt
        self.running: dict[Generation, None] = {}  # in the order in which they began
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
        """Samples that do not run."""
        return len(self.waiting) + sum(map(len, self.following.values()))

    def plan(self) -> list[Scheduled]:
        """The next step's work; empty when nothing waits or runs."""
        work: list[Scheduled] = []
        budget, preemptions = self._chunk * self._lanes, self.preemptions
        for sample in list(self.running):
            if sample not in self.running:
                continue  # preempted for another one in this very loop
            missing = len(sample.ids) - sample.computed
            take = missing if missing == 1 else min(missing, budget, self._chunk)
            if take and self._grow(sample, sample.computed + take):
                budget -= take if missing > 1 else 0
                work.append(self._work(sample, take))
        if self.preemptions == preemptions:
            work += self._admit(budget)
        return work if self.preemptions == preemptions else [piece for piece in work if piece.sample in self.running]

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
        filled block must be copied. Those that find no room go to the head of the queue as ordinary samples.
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
        """Forget a sample, finished or not, and release its blocks. Those that waited for it wait no longer."""
        if sample in self.running:
            self._stop(sample)
        self.waiting.discard(sample.asker, sample)
        if sample.leader is not None:
            self.following[sample.leader].remove(sample)
        self._release(sample)
        if followers := self.following.pop(sample, None):
            first, *others = followers  # it computes the prompt now
            first.leader = None
            self._to_head(first)
            for other in others:
                other.leader = first
            self.following |= {first: others} if others else {}

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
        """Blocks for this many tokens; takes them from whoever has most running. False if that was the sample itself."""
        missing = -(-tokens // self._block) - len(sample.blocks)
        if missing <= 0:
            return True
        while (blocks := self.pool.allocate(missing)) is None:
            if self._preempt() is sample:
                return False
        sample.blocks += blocks
        return True

    def _preempt(self) -> Generation:
        """Put back the youngest sample of an asker with most running: the oldest of all only where it is the last."""
        most = self.waiting.most
        sample = next(each for each in reversed(self.running) if self.waiting.running(each.asker) == most)
        self._put_back(sample)
        self.preemptions += 1
        return sample

    def _has_row(self) -> bool:
        """True if a sample may start: in a free row, or in one of an asker with several, for an asker with none."""
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
        sample.blocks, sample.keys, sample.computed, sample.pure = [], [], 0, True

    def _admit(self, budget: int) -> list[Scheduled]:
        """Start samples while there is room. For askers with none running room is made; then only theirs start."""
        work: list[Scheduled] = []
        preemptions = self.preemptions
        while budget > 0 and self._has_row() and (sample := self.waiting.next()) is not None:
            newcomer = not self.waiting.running(sample.asker)
            if not newcomer and self.preemptions > preemptions:
                break  # it may have been put back just now
            if len(self.running) >= self._rows:
                self._preempt()
            found = self._find(sample)
            self.pool.share(found)  # first, so that allocating cannot give them away
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
        """So many blocks, beside one for every running sample, which may soon want it: to take those would only preempt again."""
        while missing + len(self.running) > self.pool.available:
            # who has one sample running keeps it, so nobody is put back in turn
            if not make_room or self.waiting.most < 2:
                return None
            self._preempt()
        return self.pool.allocate(missing)

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
