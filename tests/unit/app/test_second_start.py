"""What a gateway that has served before begins beside everything else: the weights that it loads first, and nothing before it may."""

import asyncio

import numpy as np
import pytest

from ostinato.app import gateway, machine
from ostinato.app.gateway import journal_of
from ostinato.config import load
from ostinato.core.errors import BadConfig, Unavailable
from ostinato.core.memory import Room
from ostinato.core.weights import WeightArray
from ostinato.model import renderer, selftest, speed
from ostinato.model.renderer import HFRenderer
from ostinato.model.selftest import ExactnessVerdict
from ostinato.model.speed import Speed, Speeds
from ostinato.testing.store import MemoryStore
from ostinato.testing.tiny import tiny_model
from ostinato.weights.follow.follower import Follower, FollowerConfig
from ostinato.weights.publish.publisher import VersionPublisher


class Counting(MemoryStore):
    """Counts the objects that are read."""

    read, away = 0, False

    async def get_range(self, *where):
        self.read += 1
        return await super().get_range(*where)

    async def read_ref(self, name):
        if self.away:
            raise Unavailable("the store is away")
        return await super().read_ref(name)


@pytest.fixture
async def store():
    made, publisher, base = Counting(), None, None
    publisher = VersionPublisher(made)
    for number, ref in enumerate(("live", "control")):
        weights = {"w": WeightArray("F32", (4,), np.full(16, number, np.uint8))}
        base = (await publisher.publish(number, weights, run="r", base=base, ref=ref)).policy
    made.read = 0
    return made


@pytest.fixture
def model(tmp_path):
    return tiny_model(tmp_path / "model", layers=1)


def settings(tmp_path, *words):
    (tmp_path / "run").mkdir(exist_ok=True)
    return load(None, [f"run.directory='{tmp_path}/run'", *words])


def follower(store):
    return Follower(store, FollowerConfig(keep=2))


async def served(config, store):
    policy = await follower(store).resolve("live")
    journal_of(config).have("live", policy)


async def test_it_fetches_what_it_loads_first(tmp_path, store, model):
    config = settings(tmp_path)
    await served(config, store)
    following = follower(store)
    await gateway._prefetch(config, model, following)
    read = store.read
    assert read
    policy = await following.resolve("control")
    assert (await following.fetch(policy))["w"].data.tolist() == [1] * 16, "other arms are loaded before live"
    assert store.read == read, "it is in memory"


async def test_a_first_start_fetches_nothing_beside_what_it_measures(tmp_path, store, model):
    assert gateway._prefetch(settings(tmp_path), model, follower(store)) is None


async def test_what_is_not_kept_of_this_machine_is_measured_before_anything_else_begins(
    tmp_path, store, model, monkeypatch
):
    """Although the run was served before: on another machine, or by other code."""
    config = settings(tmp_path, f"model.source={model}", f"model.cache='{tmp_path}/cache'")
    await served(config, store)
    loop, seen, made = asyncio.get_running_loop(), [], []
    store.read = 0

    async def others_have_their_turns():
        for _ in range(200):
            await asyncio.sleep(0.001)

    def measuring(name, found):
        def measure(*_):
            asyncio.run_coroutine_threadsafe(others_have_their_turns(), loop).result()
            seen.append((name, store.read, len(made)))
            return found

        return measure

    class Renderer(HFRenderer):
        def __init__(self, path):
            made.append(path)
            super().__init__(path)

    whole = [
        Speed(inputs=8, outputs=8, rows=4, threads=1, dtype=dtype, gflops=9.0) for dtype in ("bfloat16", "float32")
    ]
    verdict = ExactnessVerdict(exact=True, threads=1, reason="", seconds=0.1, table=())
    speeds = Speeds(dtypes=tuple(whole), teams=(), load=0.0, cores=1)
    monkeypatch.setattr(machine, "_KNOWN", {})
    monkeypatch.setattr(speed, "measure", measuring("speed", speeds))
    monkeypatch.setattr(selftest, "examine", measuring("exact", verdict))
    monkeypatch.setattr(renderer, "HFRenderer", Renderer)
    _, ahead = await gateway._open_renderer(config, model, follower(store))
    assert {name for name, *_ in seen} == {"speed", "exact"}
    assert {tuple(begun) for _, *begun in seen} == {(0, 0)}, "objects read and renderers made until then"
    assert made == [model]
    await ahead
    assert store.read


async def test_a_store_that_is_away_is_left_to_the_follower(tmp_path, store, model):
    config = settings(tmp_path)
    await served(config, store)
    store.away = True
    await gateway._prefetch(config, model, follower(store))
    assert not store.read


async def test_no_weights_are_fetched_that_the_memory_does_not_hold(tmp_path, store, model, monkeypatch):
    config = settings(tmp_path)
    await served(config, store)
    monkeypatch.setattr(gateway, "process_limit", lambda: Room(size=1 << 20, bound="the control group"))
    with pytest.raises(BadConfig, match="memory is too small to serve"):
        gateway._prefetch(config, model, follower(store))
    assert not store.read
