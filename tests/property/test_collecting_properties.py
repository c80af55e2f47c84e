"""Random lives of a weight store: after each collection, whatever a ref holds is there bit for bit."""

import asyncio

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.core.errors import NotFound
from ostinato.core.weights import WeightArray
from ostinato.testing.store import MemoryStore
from ostinato.weights.follow.follower import Follower
from ostinato.weights.keep.fsck import verify
from ostinato.weights.keep.gc import CollectConfig, collect
from ostinato.weights.keep.pins import hold, let_go, pin, unpin
from ostinato.weights.publish.publisher import PublisherConfig, VersionPublisher
from ostinato.weights.version.content import weights_root

HOUR = 3600
NAMES = st.sampled_from(["a", "b"])
BACK = st.integers(0, 6)
STEPS = st.one_of(
    st.tuples(st.just("publish"), BACK),
    st.tuples(st.just("again"), BACK),
    st.tuples(st.sampled_from(["live", "candidate"]), BACK),
    st.tuples(st.sampled_from(["pin", "hold"]), NAMES, BACK),
    st.tuples(st.sampled_from(["unpin", "let go"]), NAMES),
    st.tuples(st.just("wait"), st.sampled_from([0.4, 5, 30])),
    st.tuples(st.just("orphan"), st.binary(min_size=1, max_size=4)),
    st.tuples(st.just("collect"), st.integers(1, 3), st.sampled_from([1.0, 24.0])),
)


class Life:
    """What happened so far; `made` are the versions, oldest first, whether collected or not."""

    def __init__(self):
        self.store = MemoryStore()
        self.publisher = VersionPublisher(self.store, PublisherConfig(anchor_every=3, anchor_share=100))
        self.made = []

    def back(self, steps):
        return self.made[-1 - steps % len(self.made)] if self.made else None

    def model(self, number):
        codes = np.arange(200, dtype=np.uint16)
        codes[number % 150 : number % 150 + 20] += number + 1
        return {"w": WeightArray("BF16", (200,), codes.view(np.uint8))}

    async def publish(self, number, base):
        done = await self.publisher.publish(number, self.model(number), run="r", base=base, ref="candidate")
        if done.policy not in self.made:
            self.made.append(done.policy)

    async def step(self, step):
        match step:
            case ("publish", back):
                await self.publish(len(self.made), self.back(back))
            case ("again", back) if self.made:
                await self.publish(self.back(back).number, self.back(back + 1))
            case (("live" | "candidate") as ref, back) if self.made:
                policy = self.back(back)
                if f"version/{policy.hash}" in self.store.links:
                    await self.store.move_ref(ref, self.store.links.get(ref), policy.hash)
            case _:
                await self.keep_or_pass_time(step)

    async def keep_or_pass_time(self, step):
        match step:
            case (("pin" | "hold") as kind, name, back) if self.made:
                await self.take(pin if kind == "pin" else hold, name, self.back(back).hash)
            case ("unpin", name) if f"pin/{name}" in self.store.links:
                await unpin(self.store, name)
            case ("let go", name):
                await let_go(self.store, name)
            case ("wait", hours):
                self.store.now += hours * HOUR
            case ("orphan", data):
                await self.store.put(data)
            case ("collect", keep, grace):
                await self.collect(CollectConfig(keep=keep, grace_hours=grace, parallel=2))

    async def take(self, how, name, root):
        there = f"version/{root}" in self.store.links
        try:
            await how(self.store, name, root)
            assert there
        except NotFound:
            assert not there

    async def collect(self, config):
        store, before = self.store, dict(self.store.links)
        grace = 3600 * config.grace_hours
        ages = {found.hash: found.age_s async for found in store.list_objects()}
        refs = await store.list_refs()
        whole = sum(map(len, store.objects.values()))
        found = await collect(store, config)
        for ref, value in before.items():
            held_ = ref.startswith("lease/") and refs[ref].age_s <= config.lease_s
            if not ref.startswith(("version/", "lease/")) or held_:
                assert store.links[ref] == value
                await self.fetched(value)
            elif ref.startswith("version/") and refs[ref].age_s < grace:
                assert store.links[ref] == value
        for policy in self.newest(before, config.keep):
            await self.fetched(policy.hash)
        for ref in store.links:
            if ref.startswith("version/"):
                await self.fetched(ref.removeprefix("version/"))
        assert (await verify(store, every=True)).problems == []
        assert all(hash in store.objects for hash, age in ages.items() if age < grace)
        assert found.kept.bytes == sum(map(len, store.objects.values())) == whole - found.deleted.bytes
        again = await collect(store, config)
        assert (again.deleted.objects, again.gone) == (0, ())  # nothing was left undone

    def newest(self, refs, keep):
        there = [policy for policy in self.made if f"version/{policy.hash}" in refs]
        return sorted(there)[-keep:]

    async def fetched(self, root):
        policy = next(policy for policy in self.made if policy.hash == root)
        weights = await Follower(self.store).fetch(policy)
        expected = self.model(policy.number)
        assert weights["w"].data.tobytes() == expected["w"].data.tobytes()
        assert weights_root(weights) == root


@settings(max_examples=60)
@given(st.lists(STEPS, min_size=5, max_size=40))
def test_whatever_a_ref_holds_outlives_every_collection(steps):
    async def live():
        life = Life()
        for step in [*steps, ("wait", 30), ("collect", 1, 24.0)]:
            await life.step(step)

    asyncio.run(live())
