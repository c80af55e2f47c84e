"""A version that cannot be loaded ends a gateway that has nothing to serve, and is an alarm in one that has."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from tests.deadlines import PATIENT_S

from ostinato.core.errors import BadWeights, Corrupt, Unavailable
from ostinato.core.notices import Alarm, AlarmState
from ostinato.core.records import PolicyVersion
from ostinato.core.weights import Snapshot, WeightArray
from ostinato.launch.workers import serve as module
from ostinato.launch.workers.serve import WeightLoader, follow_trial, watch_reader
from ostinato.testing.log import MemoryLog
from ostinato.weights.config import FollowerConfig
from ostinato.weights.follow.follower import Follower
from ostinato.weights.publish.publisher import VersionPublisher
from ostinato.weights.store.directory import DirectoryStore

WHY = "the weights do not fit the model: missing none, extra lm_head.weight"
V1 = PolicyVersion(number=1, hash="v1")
WEIGHTS = {"w": WeightArray("F32", (1,), np.zeros(4, dtype=np.uint8))}


class Follows:
    """A follower whose refs move when the test says so; as the real one, it reports a refusal once and goes on."""

    def __init__(self):
        self.moves = asyncio.Queue()

    async def watch(self, refs, on_change, on_error, at_start, on_recovered):
        while True:
            ref = await self.moves.get()
            try:
                await on_change(ref, Snapshot(policy=V1, weights=WEIGHTS))
            except (BadWeights, Unavailable) as error:
                on_error(ref, error)


class World:
    def __init__(self):
        self.error, self.live, self.swaps = None, 0, []
        self.log, self.follows = MemoryLog(), Follows()
        metrics = SimpleNamespace(swapped=lambda swap: None)
        self.gateway = SimpleNamespace(state=SimpleNamespace(metrics=metrics))
        serving = SimpleNamespace(engine=self, follower=self.follows, gateway=self.gateway)
        self.following = WeightLoader(serving, self.log, SimpleNamespace(swapped=self.swaps.append), self._lived)

    def _lived(self):
        self.live += 1

    async def load(self, slot, snapshot):
        if self.error is not None:
            raise self.error
        return slot

    def move(self, ref, error=None):
        self.error = error
        self.follows.moves.put_nowait(ref)

    def alarms(self):
        return [(row.name, row.state, row.reason) for row in self.log.rows if isinstance(row, Alarm)]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "_POLL_S", 0.01)
    monkeypatch.setattr(module, "settle", lambda: None)


async def eventually(condition):
    async with asyncio.timeout(PATIENT_S):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_first_version_that_can_never_be_loaded_ends_the_worker():
    w = World()
    w.move("live", BadWeights(WHY))
    with pytest.raises(BadWeights, match=r"lm_head\.weight"):
        await w.following.run(("live",))
    assert w.live == 0


@pytest.mark.parametrize("error", [BadWeights(WHY), Unavailable("the store is away")])
async def test_a_later_version_that_cannot_be_loaded_is_an_alarm_until_one_can(error):
    w = World()
    running = asyncio.create_task(w.following.run(("live",)))
    w.move("live")
    await eventually(lambda: w.swaps)
    assert (w.live, w.following.trouble()) == (1, None)
    w.move("live", error)
    await eventually(w.alarms)
    assert w.alarms() == [("weights:live", AlarmState.RAISED, str(error))]
    assert w.following.trouble() == f"live cannot be loaded: {error}"
    w.move("live")
    await eventually(lambda: len(w.alarms()) == 2)
    assert w.alarms()[-1][1] is AlarmState.CLEARED
    assert (w.live, w.following.trouble(), running.done()) == (1, None, False)
    running.cancel()


@pytest.mark.parametrize(("ref", "error"), [("canary", BadWeights(WHY)), ("live", Unavailable("the store is away"))])
async def test_what_may_pass_or_is_not_live_does_not_end_the_worker(ref, error):
    w = World()
    running = asyncio.create_task(w.following.run(("live", "canary")))
    w.move(ref, error)
    await eventually(w.alarms)
    w.move("live")
    await eventually(lambda: w.live)
    assert not running.done()
    running.cancel()


async def test_an_alarm_about_a_ref_that_is_not_followed_any_more_ends():
    """With release.best_arm off, or a branch left out, it stood for good: nobody loads that version, and no person may end it."""
    w = World()
    for name in ("weights:verified", "weights:live", "monitor:edit"):
        await w.log.append(Alarm(id=name, name=name, state=AlarmState.RAISED, reason=WHY, at=1.0))
    running = asyncio.create_task(w.following.run(("live",)))
    await eventually(lambda: len(w.alarms()) > 3)
    w.move("live")
    await eventually(lambda: len(w.alarms()) > 4)
    assert [row[:2] for row in w.alarms()[3:]] == [
        ("weights:verified", AlarmState.CLEARED),
        ("weights:live", AlarmState.CLEARED),
    ]
    running.cancel()


async def test_a_store_that_was_away_and_has_nothing_new_ends_its_alarm(tmp_path, monkeypatch):
    w, store = World(), DirectoryStore(tmp_path / "weights")
    await VersionPublisher(store).publish(0, WEIGHTS, run="r", base=None, ref="live")
    follower = Follower(store, FollowerConfig(interval_s=0.01))
    w.following = WeightLoader(
        SimpleNamespace(engine=w, follower=follower, gateway=w.gateway),
        w.log,
        SimpleNamespace(swapped=w.swaps.append),
        w._lived,
    )
    running = asyncio.create_task(w.following.run(("live",)))
    await eventually(lambda: w.swaps)

    async def away(_):
        raise Unavailable("the store is away")

    with monkeypatch.context() as patched:
        patched.setattr(store, "read_ref", away)
        await eventually(w.alarms)
    assert w.alarms()[-1][1] is AlarmState.RAISED
    await eventually(lambda: len(w.alarms()) == 2)
    assert w.alarms()[-1][1] is AlarmState.CLEARED
    assert (w.following.trouble(), len(w.swaps)) == (None, 1)
    running.cancel()


class Damaged:
    """A log whose alarms cannot be read, until it is `repaired`."""

    def __init__(self, log):
        self.log, self.read, self.looks = log, log.read, 0
        log.read = self._read

    async def _read(self, after, kinds):
        self.looks += 1
        raise Corrupt("row 7 of the log is damaged; restore it from a copy")
        yield

    def repaired(self):
        self.log.read = self.read


async def test_the_alarms_about_weights_outlive_a_log_that_is_damaged_for_a_while():
    w = World()
    damaged = Damaged(w.log)
    running = asyncio.create_task(w.following.run(("live", "canary")))
    w.move("canary", BadWeights(WHY))
    await eventually(lambda: damaged.looks > 1)
    damaged.repaired()
    await eventually(w.alarms)
    assert w.alarms() == [("weights:canary", AlarmState.RAISED, WHY)]
    running.cancel()


async def test_a_damaged_log_ends_neither_the_word_about_long_requests_nor_who_is_dealt_to_releases():
    log, dealt = MemoryLog(), []
    damaged = Damaged(log)

    async def refreshed():
        async for _ in log.read(0, {Alarm}):
            pass
        return SimpleNamespace(dealt=lambda verified: verified)

    reader = SimpleNamespace(failures=1, trouble="it was killed", answers=0)
    telling = asyncio.create_task(watch_reader(reader, log))
    dealing = asyncio.create_task(
        follow_trial(SimpleNamespace(refresh=refreshed), SimpleNamespace(deal=dealt.append), 0.5)
    )
    await eventually(lambda: damaged.looks > 3 or telling.done() or dealing.done())
    damaged.repaired()
    await eventually(lambda: (log.rows and dealt) or telling.done() or dealing.done())
    assert [row.reason for row in log.rows] == ["it was killed"]
    assert dealt[0] == 0.5
    for task in (telling, dealing):
        task.cancel()
