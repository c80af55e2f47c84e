"""A run whose rollouts are made by a worker that has of it an address and a certificate: the real processes, killed once each."""

import asyncio
import os
import signal
import socket
import sys

import pytest
from tests.e2e.test_world_training import SETTINGS, crew, examined, until_step, write_tasks
from tests.fakes.certificates import Authority

from ostinato.app.storage import home, open_log
from ostinato.config import load
from ostinato.core.records import Turn
from ostinato.launch.commands.worlds.train import world_overrides


@pytest.mark.examination
async def test_a_worker_behind_a_certificate_trains_a_run_elsewhere(tmp_path, quick_settings):
    authority = Authority(tmp_path)
    ours, theirs = authority.sign("trainer"), authority.sign("acme")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    door = [
        'learn.source="worlds"',
        'worlds.door.host="127.0.0.1"',
        f"worlds.door.port={port}",
        f"worlds.door.certificate='{ours.certificate}'",
        f"worlds.door.key='{ours.key}'",
        f"worlds.door.authority='{authority.file}'",
        'worlds.door.names=["acme"]',
    ]
    config = load(None, [*quick_settings(tmp_path, *door), *SETTINGS])
    place, far = home(config), tmp_path / "far"
    tasks = write_tasks(tmp_path / "letters.jsonl")
    settings = [*world_overrides(tasks), *SETTINGS, f"run.directory='{far}'"]
    words = ["rollout", "--connect", f"https://127.0.0.1:{port}", "--cert", theirs.certificate, "--key", theirs.key]
    words += ["--ca", authority.file, *(word for setting in settings for word in ("--set", setting))]

    async def start():
        with (tmp_path / "far.log").open("ab") as output:
            return await asyncio.create_subprocess_exec(
                sys.executable, "-m", "ostinato.cli", *words, stdout=output, stderr=output, cwd=tmp_path
            )

    async with asyncio.timeout(300):
        worker = await start()
        try:
            async with crew(config) as launched:
                workers = {watched.worker.name: watched.worker for watched in launched.supervisor.watched}
                await launched.during(until_step(place, 4))
                worker.send_signal(signal.SIGKILL)
                await worker.wait()
                worker = await start()
                await launched.during(until_step(place, 8))
                os.kill(workers["rollout"].pid, signal.SIGKILL)  # the door
                await launched.during(until_step(place, 12))
        finally:
            worker.terminate()
            await worker.wait()
    found = await examined(config)
    assert found["steps"] >= 12
    assert not place.rollouts.exists(), "no rollout was made on this side"
    there = {path.name for path in far.iterdir()}
    assert there == {"rollouts.jsonl", "rollout.jsonl", "finished.jsonl", ".rollout.lock"}, (
        "nothing of the run is on the other"
    )
    with open_log(config) as log:
        turns = [row async for _, row in log.read(0, {Turn})]
    assert all(turn.episode.startswith("acme/") for turn in turns)
