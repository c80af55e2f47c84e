"""The block pool and the scheduler never leak, never free twice, and always move."""

import random
from itertools import takewhile

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ostinato.core.generation import Generate
from ostinato.core.records import PolicyVersion, Sampling
from ostinato.engine.embedded.kv import BlockPool
from ostinato.engine.embedded.scheduler import Generation, Scheduler

BLOCKS = 12
V0 = PolicyVersion(number=0, hash="v0")


class PoolMachine(RuleBasedStateMachine):
    """Against a model that simply remembers every reader."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.owners = []
        self.names = {}

    @rule(count=st.integers(0, BLOCKS + 1))
    def allocate(self, count):
        held = {block for owner in self.owners for block in owner}
        blocks = self.pool.allocate(count)
        assert (blocks is None) == (count > BLOCKS - len(held))
        if blocks is not None:
            assert not held & set(blocks)
            assert len(set(blocks)) == count
            for block in blocks:
                self.names = {key: b for key, b in self.names.items() if b != block}
            self.owners.append(blocks)

    @rule(at=st.integers(0, 100))
    def share(self, at):
        if self.owners:
            blocks = self.owners[at % len(self.owners)]
            self.pool.share(blocks)
            self.owners.append(list(blocks))

    @rule(at=st.integers(0, 100))
    def release(self, at):
        if self.owners:
            self.pool.release(self.owners.pop(at % len(self.owners)))

    @rule(at=st.integers(0, 100), key=st.binary(min_size=1, max_size=1))
    def name(self, at, key):
        held = sorted({block for owner in self.owners for block in owner})
        if held:
            block = held[at % len(held)]
            self.pool.name(block, key)
            if key not in self.names and block not in self.names.values():
                self.names[key] = block

    @rule(key=st.binary(min_size=1, max_size=1))
    def revive(self, key):
        block = self.pool.find(key)
        assert block == self.names.get(key)
        if block is not None:
            self.pool.share([block])
            self.owners.append([block])

    @invariant()
    def readers_agree(self):
        for block in range(BLOCKS):
            assert self.pool.readers(block) == sum(owner.count(block) for owner in self.owners)
        held = {block for owner in self.owners for block in owner}
        assert self.pool.held == len(held)
        assert self.pool.idle == len(set(self.names.values()) - held)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30)


def make_samples(rng, number, blocks):
    budget = rng.randint(1, 6)
    prompt = tuple(rng.randrange(2) for _ in range(rng.randint(1, blocks * 4 - budget)))
    sampling = Sampling(max_tokens=budget)
    request = Generate(
        id=str(number),
        slot="live",
        prompt_ids=prompt,
        n=rng.randint(1, 3),
        sampling=sampling,
        cache_salt=rng.choice("abc"),
    )
    samples = [Generation(request=request, index=i, seed=number, ids=list(prompt), policy=V0) for i in range(request.n)]
    for sample in samples[1:]:
        sample.leader = samples[0]
    return samples


def run_step(scheduler, work, rng):
    """What the worker does with a plan, without a model. Returns the samples that ended."""
    drawing = []
    for piece in work:
        assert piece.start == piece.sample.computed
        assert len(piece.sample.blocks) * 4 >= piece.end
        scheduler.advance(piece)
        if piece.last:
            forked = scheduler.fork(piece.sample) if piece.sample.sampled == 0 else []
            drawing += [piece.sample, *(sample for sample, _, _ in forked)]
    for sample in drawing:
        sample.ids.append(rng.randrange(2))
    ended = [sample for sample in drawing if sample.sampled == sample.request.sampling.max_tokens]
    for sample in ended:
        scheduler.remove(sample)
    return ended


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), blocks=st.integers(3, 12), rows=st.integers(1, 6), lanes=st.integers(1, 3))
def test_every_request_ends_and_every_block_comes_back(seed, blocks, rows, lanes):
    rng = random.Random(seed)
    scheduler = Scheduler(BlockPool(blocks), block=4, rows=rows, chunk=8, lanes=lanes)
    waiting = [sample for r in range(rng.randint(1, 8)) for sample in make_samples(rng, r, blocks)]
    scheduler.add(waiting)
    for step in range(2000):
        work = scheduler.plan()
        assert len(scheduler.running) <= rows
        assert len({piece.sample for piece in work}) == len(work)
        assert all(piece.sample in scheduler.running for piece in work)
        sizes = [piece.end - piece.start for piece in work]
        assert max(sizes, default=0) <= 8
        assert sum(size for size in sizes if size > 1) <= 8 * lanes
        if not work:
            break
        for sample in run_step(scheduler, work, rng):
            waiting.remove(sample)
        if waiting and rng.random() < 0.1:
            scheduler.remove(waiting.pop(rng.randrange(len(waiting))))  # the client went away
        if rng.random() < 0.1:
            scheduler.swap("live", PolicyVersion(number=step, hash=f"v{step}"), recompute=rng.random() < 0.5)
    assert not waiting
    assert scheduler.pool.held == 0


def one(number, salt, prompt=(1, 0, 1, 1, 0, 1, 0, 0, 1)):
    request = Generate(id=str(number), slot="live", prompt_ids=prompt, sampling=Sampling(max_tokens=4), cache_salt=salt)
    return Generation(request=request, index=0, seed=number, ids=list(prompt), policy=V0)


def test_a_prompt_is_found_again_under_its_own_salt_only():
    rng = random.Random(0)
    scheduler = Scheduler(BlockPool(BLOCKS), block=4, rows=2, chunk=16)
    hits = []
    for number, salt in enumerate(["acme", "bolt", "acme", "", "bolt", ""]):
        scheduler.add([one(number, salt)])
        while work := scheduler.plan():
            run_step(scheduler, work, rng)
        hits.append(scheduler.prefix_hits)
    assert hits == [0, 0, 8, 8, 16, 24]


@settings(max_examples=60)
@given(crowd=st.integers(1, 60), rows=st.integers(1, 6), seed=st.integers(0, 10**6))
def test_whoever_asks_little_does_not_wait_behind_who_asks_much(crowd, rows, seed):
    rng = random.Random(seed)
    scheduler = Scheduler(BlockPool(100), block=4, rows=rows, chunk=16)
    scheduler.add([one(number, "many") for number in range(crowd)])
    run_step(scheduler, scheduler.plan(), rng)
    few = one(1000, "few")
    scheduler.add([few])
    before = len(ran := set(scheduler.running))
    while few not in scheduler.running:
        run_step(scheduler, scheduler.plan(), rng)
        ran.update(takewhile(lambda sample: sample is not few, scheduler.running))
    assert len(ran) - before <= 1, "somebody else starts before only where nobody of theirs ran any more"
