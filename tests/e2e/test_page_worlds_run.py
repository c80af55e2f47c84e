"""The pages of simulated worlds over a run of real processes: what its rollouts said and were worth stands there while they are made."""

import asyncio
import html
import json
import re
from urllib.parse import quote

import aiohttp
import pytest
from tests.e2e.test_world_training import SETTINGS, crew, until_step, write_tasks

from ostinato.app.storage import home, open_log
from ostinato.config import load
from ostinato.core.records import Turn
from ostinato.launch.commands.worlds.train import world_overrides
from ostinato.status.gateway_address import read_address


@pytest.mark.examination
async def test_the_page_shows_the_rollouts_of_a_run_as_they_are(tmp_path, quick_settings):
    tasks = write_tasks(tmp_path / "letters.jsonl", held_out=3, canary=1)
    settings = quick_settings(tmp_path, *world_overrides(tasks), "worlds.measure_every=4")
    config = load(None, [*settings, *SETTINGS])
    place = home(config)
    async with asyncio.timeout(300), crew(config) as launched:
        await launched.during(until_step(place, 2))
        url = read_address(place.address)
        async with aiohttp.ClientSession(url) as session:

            async def get(path, **headers):
                async with session.get(path, headers=headers) as reply:
                    return reply.status, html.unescape(await reply.text())

            status, page = await get("/worlds")
            assert status == 200
            assert re.search(r"letters\s*<span class=\"badge good\">now", page)
            assert "held out" in page
            assert re.search(r"Groups drawn</dt><dd>[1-9]", page)
            record = json.loads(place.finished.read_text().splitlines()[3])
            status, page = await get(f"/worlds/rollouts/{quote(record['episode'])}")
            assert status == 200
            assert f"<dt>Value</dt><dd>{record['value']:g}" in page
            with open_log(config) as log:
                (turn,) = await log.find(Turn, [(record["turns"][0],)])
            assert f"{len(turn.sampled_ids)} answered by v{turn.spans[0].policy.number}" in page
            assert "say " in page, "what was asked"
            status, page = await get(f"/worlds/tasks/{record['task']}")
            assert (status, "[a-z]" in page, "are hidden here" in page) == (200, False, True)
            status, page = await get(f"/worlds/tasks/{record['task']}", **{"X-Ostinato-Key": place.admin_key()})
            assert "^[a-z]" in page
            status, page = await get("/worlds/rollouts?split=held_out")
            assert "held_out0" in page
