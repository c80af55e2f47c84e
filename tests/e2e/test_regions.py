"""A gateway in another region, as a process: it only reads a relay, and serves what is released at the origin."""

import asyncio
import os
import sys

import aiohttp

from ostinato import app
from ostinato.config import load
from ostinato.launch.demo import ready
from ostinato.launch.prepare import prepare
from ostinato.launch.up import address
from ostinato.publish.publisher import Publisher
from ostinato.publish.relay import RelayConfig, RelayStore
from ostinato.publish.relay_http import relay_app
from ostinato.publish.store import DirectoryStore
from ostinato.testing.serving import serving
from ostinato.testing.tiny import tiny_model


async def live_at(url: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as response:
        return (await response.json())["slots"]["live"]["hash"]


async def test_a_gateway_that_can_only_read_a_relay_follows_the_releases_of_the_origin(tmp_path):
    model = tiny_model(tmp_path / "model")
    shared = [f"model.source='{model}'", "model.dtype='float32'", "listen.port=0", "follow.interval_s=0.1"]
    origin = load(None, [*shared, f"run.directory='{tmp_path / 'origin'}'"])
    await prepare(origin, lambda _: None)
    store = app.open_store(origin)
    follower = app.Follower(store)
    base = await follower.resolve("live")
    config = RelayConfig(fresh_s=0.05)
    async with serving(relay_app(RelayStore(store, DirectoryStore(tmp_path / "kept"), config)), lifespan=False) as url:
        region = [*shared, f"run.directory='{tmp_path / 'region'}'", f"weights.url='{url}'"]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "ostinato.cli", "serve"),
            *(word for setting in region for word in ("--set", setting)),
            env=os.environ | {"NO_COLOR": "1"},
        )
        try:
            gateway = await address(app.home(load(None, region)).address)
            await ready(gateway, ("live", "control"))
            assert await live_at(gateway) == base.hash
            weights = await follower.fetch(base)
            name, array = next(iter(weights.items()))
            data = array.data.copy()
            data[3] ^= 1
            changed = {**weights, name: type(array)(array.dtype, array.shape, data)}
            done = await Publisher(store).publish(1, changed, run="origin", base=base, ref="live")
            async with asyncio.timeout(20):
                while await live_at(gateway) != done.policy.hash:
                    await asyncio.sleep(0.05)
        finally:
            process.terminate()
            assert await process.wait() == 0
