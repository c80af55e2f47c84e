"""The page of a whole run on the tiny model: what users do is on it, an operator ships and takes back from it, a killed gateway returns."""

import asyncio
import os
import re
import signal

import aiohttp

from ostinato.core.records import ReleaseEvent
from ostinato.record.log import SqlLog


async def until(condition, what, timeout_s=100):
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout_s
    while not (found := await condition()):
        assert loop.time() < end, what
        await asyncio.sleep(0.3)
    return found


async def test_the_page_shows_a_run_and_moves_its_releases(tmp_path, running, simulated_users):
    run = await running(tmp_path, "evaluate.suite=''")
    key = run.launched.home.admin_key()

    async def get(session, path):
        try:
            async with session.get(path) as reply:
                return await reply.text() if reply.status == 200 else ""
        except (aiohttp.ClientError, TimeoutError):
            return ""

    async def post(path, expected):
        fields = {"expected_live": expected, "reason": "to see it", "actor": "ann"}
        headers = {"Sec-Fetch-Site": "same-origin", "X-Ostinato-Key": key}
        async with aiohttp.ClientSession(run.url, headers=headers) as session, session.post(path, data=fields) as reply:
            return reply.status

    try:
        async with aiohttp.ClientSession(run.url, timeout=aiohttp.ClientTimeout(total=20)) as session:
            async with simulated_users(run, 6) as acked:
                await until(lambda: get(session, "/turns?outcome=trained"), "the page answers")

                async def trained():
                    return re.findall(r'href="/turns/([^"]+)"', await get(session, "/turns?outcome=trained"))

                async def candidate():
                    found = re.search(
                        r'>candidate</th><td><a href="/releases/([0-9a-f]+)">v([1-9]\d*)<',
                        await get(session, "/weights"),
                    )
                    return found and found[1]

                turns = await until(trained, "a turn that was trained on is found")
                await until(candidate, "training published a version")
            assert turns[0].replace("%3A", ":") in acked.turns
            turn = await get(session, f"/turns/{turns[0]}")
            assert "Optimizer step" in turn
            assert "sim-" in turn
            assert "Mean reward of the batch" in await get(session, "/learning")
            now = await get(session, "/")
            assert "each counted once" in now
            assert "release:suite" in now

            newest, before = await run_refs(run)
            assert await post(f"/releases/{newest}/ship", newest) == 409
            assert await post(f"/releases/{newest}/ship", before) == 200
            assert await post("/rollback", before) == 409
            assert await post("/rollback", newest) == 200
            with SqlLog.open(run.launched.home.log) as log:
                events = [row async for _, row in log.read(0, {ReleaseEvent})]
            done = [(event.action, event.policy.hash, event.reason, event.detail["actor"]) for event in events[-2:]]
            assert done == [("shipped", newest, "to see it", "ann"), ("rolled_back", before, "to see it", "ann")]

            os.kill(run.worker("serve").pid, signal.SIGKILL)
            page = await until(lambda: get(session, "/releases"), "the page is back")
            assert "rolled back" in page
    finally:
        await run.stop()


async def run_refs(run):
    """The newest version's root, and the one that is live."""
    from ostinato.app.storage import open_store

    store = open_store(run.config)
    return await store.read_ref("candidate"), await store.read_ref("live")
