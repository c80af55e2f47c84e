"""What a gateway that has served before begins beside everything else: the weights that it loads first, and nothing before it may."""

import numpy as np
import pytest

from ostinato.app import gateway
from ostinato.app.gateway import journal_of
from ostinato.config import load
from ostinato.core.errors import BadConfig, Unavailable
from ostinato.core.memory import Room
from ostinato.core.weights import WeightArray
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
    await gateway._fetch_ahead(config, model, following)
    read = store.read
    assert read
    policy = await following.resolve("control")
    assert (await following.fetch(policy))["w"].data.tolist() == [1] * 16, "other arms are loaded before live"
    assert store.read == read, "it is in memory"


async def test_a_first_start_fetches_nothing_beside_what_it_measures(tmp_path, store, model):
    assert gateway._fetch_ahead(settings(tmp_path), model, follower(store)) is None


async def test_a_store_that_is_away_is_left_to_the_follower(tmp_path, store, model):
    config = settings(tmp_path)
    await served(config, store)
    store.away = True
    await gateway._fetch_ahead(config, model, follower(store))
    assert not store.read


async def test_no_weights_are_fetched_that_the_memory_does_not_hold(tmp_path, store, model, monkeypatch):
    config = settings(tmp_path)
    await served(config, store)
    monkeypatch.setattr(gateway, "process_limit", lambda: Room(size=1 << 20, bound="the control group"))
    with pytest.raises(BadConfig, match="memory is too small to serve"):
        gateway._fetch_ahead(config, model, follower(store))
    assert not store.read
