"""A release in the hands of a person, through the real processes: approved on the command line, moved on the page.

Who is told, who decides, what people are served meanwhile, and what the page of a run shows, after a kill of its gateway too.
"""

import asyncio
import json
import os
import re
import signal
import sys

import aiohttp
from tests.deadlines import LEARNING_S, WHOLE_PROGRAM_S
from tests.fakes.fork_server import FORK_SERVER

from ostinato.app.storage import open_run
from ostinato.core.records import ReleaseEvent, Turn


async def ostinato(run, *words):
    """The command line, in a process of its own."""
    command = (sys.executable, "-m", "ostinato.cli", *words, "--set", f"run.directory='{run.config.run.directory}'")
    done = await asyncio.to_thread(FORK_SERVER.run, command, env={"COLUMNS": "300", "NO_COLOR": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


async def read(log, kind):
    return [row async for _, row in log.read(0, {kind})]


async def until(condition, what, timeout_s=LEARNING_S):
    try:
        async with asyncio.timeout(timeout_s):
            while not (found := await condition()):
                await asyncio.sleep(0.3)
    except TimeoutError:
        raise AssertionError(f"not within {timeout_s} s: {what}") from None
    return found


class Page:
    """The page of a run, and its operator."""

    def __init__(self, run, session):
        self._session = session
        self._operator = {"Sec-Fetch-Site": "same-origin", "X-Ostinato-Key": run.launched.home.admin_key()}

    async def get(self, path):
        """A page's text; empty while the gateway does not answer."""
        try:
            async with self._session.get(path) as reply:
                return await reply.text() if reply.status == 200 else ""
        except (aiohttp.ClientError, TimeoutError):
            return ""

    async def post(self, path, expected):
        fields = {"expected_live": expected, "reason": "to see it", "actor": "ben"}
        async with self._session.post(path, data=fields, headers=self._operator) as reply:
            return reply.status

    async def trained(self):
        return re.findall(r'href="/turns/([^"]+)"', await self.get("/turns?outcome=trained"))

    async def candidate(self):
        found = re.search(
            r'>candidate</th><td><a href="/releases/([0-9a-f]+)">v([1-9]\d*)<', await self.get("/weights")
        )
        return found and found[1]


async def test_nothing_goes_live_until_a_person_says_so_on_the_command_line_or_on_the_page(
    tmp_path, running, simulated_users
):
    run = await running(tmp_path, "release.approval='manual'", "model.numerics=fast", "serve.control_share=0.0")
    with open_run(run.config) as opened:
        try:
            async with aiohttp.ClientSession(run.url, timeout=aiohttp.ClientTimeout(total=WHOLE_PROGRAM_S)) as session:
                page = Page(run, session)
                async with simulated_users(run) as acked:
                    approved, waits = await approve_what_waits(run, opened)
                    turns = await until(page.trained, "a turn that was trained on is found")
                    await until(page.candidate, "training published a version")
                    newest = await until(lambda: newer_than_live(opened.store), "a newer version")
                assert acked.failures == 0
                assert turns[0].replace("%3A", ":") in acked.turns
                await look(page, turns[0])
                before = await opened.store.read_ref("live")
                await move_on_the_page(page, newest, before)
                await outlive_its_gateway(run, page)
        finally:
            await run.stop()
        events = await read(opened.log, ReleaseEvent)
    told = [(event.action, event.policy.number, event.detail.get("actor")) for event in events]
    assert approved >= waits, "the newest that had passed"
    assert ("approved", approved, "ann") in told
    assert told.count(("shipped", approved, "ann")) == 1
    by_ann = next(at for at, event in enumerate(told) if event == ("shipped", approved, "ann"))
    assert {number for action, number, _ in told[:by_ann] if action == "shipped"} == {0}, "until then the first alone"
    moves = [
        (event.action, event.policy.hash, event.reason, event.detail["actor"])
        for event in events[by_ann + 1 :]
        if event.action in ("shipped", "rolled_back")
    ]
    assert moves == [("shipped", newest, "to see it", "ben"), ("rolled_back", before, "to see it", "ben")]


async def approve_what_waits(run, opened):
    """Approve what waits, by name, and see it served. Returns its number and that of what waited when this was looked at."""

    async def waiting():
        return any(event.action == "awaits_approval" for event in await read(opened.log, ReleaseEvent))

    await until(waiting, "something passed")
    waits = json.loads(await ostinato(run, "status", "--json"))["awaits_approval"]
    said = await ostinato(run, "approve", "--reason", "read its answers", "--actor", "ann")
    live = (await opened.follower.resolve("live")).number
    assert f"live is v{live}@" in said

    async def served():
        return live in {span.policy.number for turn in await read(opened.log, Turn) for span in turn.spans}

    await until(served, "people are served what was approved")
    return live, waits["number"]


async def newer_than_live(store):
    newest = await store.read_ref("candidate")
    return newest if newest != await store.read_ref("live") else None


async def look(page, turn):
    shown = await page.get(f"/turns/{turn}")
    assert "Optimizer step" in shown
    assert "sim-" in shown
    assert "Mean reward of the batch" in await page.get("/learning")
    assert "each counted once" in await page.get("/")


async def move_on_the_page(page, newest, before):
    assert await page.post(f"/releases/{newest}/ship", newest) == 409
    assert await page.post(f"/releases/{newest}/ship", before) == 200
    assert await page.post("/rollback", before) == 409
    assert await page.post("/rollback", newest) == 200


async def outlive_its_gateway(run, page):
    os.kill(run.worker("serve").pid, signal.SIGKILL)

    async def told():
        return "rolled back" in await page.get("/releases")

    await until(told, "the page is back, and knows what was done")
