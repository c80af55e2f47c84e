"""What has passed waits for a person, through the real processes: who is told, who decides, and what people are served meanwhile."""

import asyncio
import json
import os
import sys

from ostinato.app.storage import open_run
from ostinato.core.records import ReleaseEvent, Turn


async def ostinato(run, *words):
    """The command line, in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ostinato.cli", *words, "--set", f"run.directory='{run.config.run.directory}'"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ | {"COLUMNS": "300", "NO_COLOR": "1"},
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    return said.decode()


async def read(log, kind):
    return [row async for _, row in log.read(0, {kind})]


async def test_nothing_goes_live_until_somebody_approves_it_by_name(tmp_path, running, simulated_users):
    run = await running(tmp_path, "release.approval='manual'", "model.numerics=fast", "serve.control_share=0.0")
    with open_run(run.config) as opened:
        try:
            async with simulated_users(run) as acked, asyncio.timeout(120):
                while not (waits := json.loads(await ostinato(run, "status", "--json"))["awaits_approval"]):
                    await asyncio.sleep(0.5)
                assert "waits for approval" in await ostinato(run, "status")
                before = [event for event in await read(opened.log, ReleaseEvent) if event.action == "shipped"]
                said = await ostinato(run, "approve", "--reason", "read its answers", "--actor", "ann")
                live = (await opened.follower.resolve("live")).number
                assert f"live is v{live}@" in said
                while True:
                    served = {span.policy.number for turn in await read(opened.log, Turn) for span in turn.spans}
                    if live in served:
                        break
                    await asyncio.sleep(0.2)
        finally:
            await run.stop()
        events = await read(opened.log, ReleaseEvent)
    assert acked.failures == 0
    assert [event.policy.number for event in before] == [0], "until then only the starting model was live"
    assert live >= waits["number"], "the newest that had passed"
    told = [(event.action, event.policy.number, event.detail.get("actor")) for event in events]
    assert ("approved", live, "ann") in told
    assert told.count(("shipped", live, "ann")) == 1
    assert {number for action, number, _ in told if action == "shipped"} == {0, live}
