"""A gateway in another region, as a process: it only reads a relay, and serves what is released at the origin."""

import asyncio
import sys

import aiohttp
from tests.deadlines import WHOLE_PROGRAM_S
from tests.fakes.fork_server import FORK_SERVER

from ostinato.app.storage import home, open_run, open_store
from ostinato.config import load
from ostinato.launch.commands.demo import ready
from ostinato.launch.workers.prepare import prepare
from ostinato.testing.serving import serving
from ostinato.testing.tiny import tiny_model
from ostinato.weights.follow.follower import Follower
from ostinato.weights.publish.publisher import VersionPublisher
from ostinato.weights.relay import RelayConfig, RelayStore, relay_app
from ostinato.weights.store.directory import DirectoryStore


async def live_at(url: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as response:
        return (await response.json())["slots"]["live"]["hash"]


async def test_a_gateway_that_can_only_read_a_relay_follows_the_releases_of_the_origin(tmp_path):
    model = tiny_model(tmp_path / "model")
    shared = [f"model.source='{model}'", "model.dtype='float32'", "listen.port=0", "follow.interval_s=0.1"]
    origin = load(None, [*shared, f"run.directory='{tmp_path / 'origin'}'"])
    with open_run(origin) as run:
        await prepare(run, lambda _: None)
    store = open_store(origin)
    follower = Follower(store)
    base = await follower.resolve("live")
    config = RelayConfig(fresh_s=0.05)
    async with serving(relay_app(RelayStore(store, DirectoryStore(tmp_path / "kept"), config)), lifespan=False) as url:
        region = [*shared, f"run.directory='{tmp_path / 'region'}'", f"weights.url='{url}'"]
        words = [word for setting in region for word in ("--set", setting)]
        process = FORK_SERVER.popen([sys.executable, "-m", "ostinato.cli", "serve", *words], env={"NO_COLOR": "1"})
        try:
            async with asyncio.timeout(WHOLE_PROGRAM_S):
                gateway = await ready(home(load(None, region)), ("live", "control"))
            assert await live_at(gateway) == base.hash
            weights = await follower.fetch(base)
            name, array = next(iter(weights.items()))
            data = array.data.copy()
            data[3] ^= 1
            changed = {**weights, name: type(array)(array.dtype, array.shape, data)}
            done = await VersionPublisher(store).publish(1, changed, run="origin", base=base, ref="live")
            async with asyncio.timeout(WHOLE_PROGRAM_S):
                while await live_at(gateway) != done.policy.hash:
                    await asyncio.sleep(0.05)
        finally:
            process.terminate()
            assert await asyncio.to_thread(process.wait) == 0
