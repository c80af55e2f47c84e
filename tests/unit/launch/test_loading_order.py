"""At a gateway's start people's other arms are loaded before live, which answers whoever belongs to an arm that is not there yet."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from tests.deadlines import PATIENT_S

from ostinato.app.storage import live_last, served_refs
from ostinato.config import load
from ostinato.core.weights import WeightArray
from ostinato.launch.workers import serve as module
from ostinato.testing.engine import FakeEngine
from ostinato.testing.log import MemoryLog
from ostinato.testing.store import MemoryStore
from ostinato.weights.follow.follower import Follower, FollowerConfig
from ostinato.weights.publish.publisher import VersionPublisher


def test_live_comes_after_the_arms_of_people_and_before_what_serves_nobody():
    refs = served_refs(load(None, ["release.best_arm=true", "learn.source=both", "serve.learner_share=0.05"]))
    order = live_last(refs)
    assert sorted(order) == sorted(refs)
    at = {ref: place for place, ref in enumerate(order)}
    assert all(at[ref] < at["live"] for ref in ("control", "canary", "previous", "verified", "learner"))
    assert all(at[ref] > at["live"] for ref in ("evaluation", "evaluation-best", "learner-test", "world"))
    off = served_refs(load(None, ["serve.control_share=0.05"]))
    assert not {"learner", "learner-test"} & {*off}, "its versions take memory only where it is on"


async def test_a_gateway_that_starts_never_serves_live_without_the_other_arms(monkeypatch):
    store, seen = MemoryStore(), []
    publisher, policies = VersionPublisher(store), []
    for number in range(2):
        weights = {"w": WeightArray("F32", (4,), np.full(16, number, np.uint8))}
        base = policies[-1] if policies else None
        policies.append((await publisher.publish(number, weights, run="r", base=base, ref="live")).policy)
    for ref in ("control", "canary", "evaluation"):
        await store.move_ref(ref, None, policies[0].hash)

    class Engine(FakeEngine):
        async def load(self, slot, snapshot):
            swap = await super().load(slot, snapshot)
            seen.append((slot, frozenset(self.slots())))
            return swap

    engine = Engine()
    await engine.start()
    monkeypatch.setattr(module, "settle", lambda: None)
    gateway = SimpleNamespace(state=SimpleNamespace(metrics=SimpleNamespace(swapped=lambda swap: None)))
    serving = SimpleNamespace(engine=engine, gateway=gateway, follower=Follower(store, FollowerConfig(interval_s=0.01)))
    progress = SimpleNamespace(swapped=lambda swap: None)
    refs = ("live", "control", "canary", "previous", "evaluation")
    following = asyncio.create_task(module.WeightLoader(serving, MemoryLog(), progress, lambda: None).run(refs))
    try:
        async with asyncio.timeout(PATIENT_S):
            while len(seen) < 4:
                await asyncio.sleep(0.005)
            assert [slot for slot, _ in seen] == ["control", "canary", "live", "evaluation"]
            await store.move_ref("live", policies[1].hash, policies[0].hash)
            while len(seen) < 5:
                await asyncio.sleep(0.005)
    finally:
        following.cancel()
        with pytest.raises(asyncio.CancelledError):
            await following
    assert seen[4][0] == "live"
