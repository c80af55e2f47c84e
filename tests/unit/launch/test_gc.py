import os

import numpy as np
import pytest
from rich.console import Console

from ostinato.app.storage import open_log, open_store
from ostinato.config import load
from ostinato.core.errors import BadRequest, NotFound
from ostinato.core.records import ReleaseEvent
from ostinato.core.weights import WeightArray
from ostinato.launch.commands.weights import collect_garbage, pin_version, unpin_version
from ostinato.weights.follow.follower import Follower
from ostinato.weights.publish.publisher import VersionPublisher


def console() -> Console:
    return Console(record=True, width=160)


@pytest.fixture
async def run(tmp_path):
    """v0 to v5, all full snapshots, two days old; v1 and then v3 were live, v5 is the candidate."""
    config = load(None, [f"run.directory={tmp_path / 'run'}"])
    store = open_store(config)
    publisher, made = VersionPublisher(store, config.publish), []
    for step in range(6):
        codes = np.full(512, 0x3F80 + step, np.uint16)
        weights = {"w": WeightArray("BF16", (512,), codes.view(np.uint8))}
        done = await publisher.publish(step, weights, run="r", base=None, ref="candidate")
        made.append(done.policy)
    with open_log(config) as log:
        for at, number in enumerate((0, 1, 3)):
            before = made[number - 1] if number else None
            event = ReleaseEvent(
                id=str(at), at=float(at), action="shipped", policy=made[number], previous=before, reason="", detail={}
            )
            await log.append(event)
    for path in (tmp_path / "run" / "weights").rglob("*"):
        if path.is_file():
            then = path.stat().st_mtime - 2 * 86_400
            os.utime(path, (then, then))
    return load(None, [f"run.directory={tmp_path / 'run'}", "collect.keep=1", "collect.releases=2"]), made


async def test_gc_keeps_refs_pins_the_newest_and_past_releases_and_says_why(run):
    config, made = run
    out = console()
    await pin_version(config, "paper", "v2", out)
    await collect_garbage(config, True, out)
    assert len(await open_store(config).refs()) == 8
    await collect_garbage(config, False, out)
    text = " ".join(out.export_text().split())
    assert "pin paper holds v2@" in text
    assert f"would delete {made[0]}, {made[4]}" in text
    assert f"deleted {made[0]}, {made[4]}" in text
    assert "listing objects" in text
    assert "10/?" not in text  # 12 objects: six manifests, six payloads
    assert "12/?" in text
    for number, why in ((1, "released"), (2, "pin/paper"), (3, "released"), (5, "candidate, newest 1")):
        assert f"v{number} {made[number].hash[:16]} {why}" in text
    follower = Follower(open_store(config))
    for number in (1, 2, 3, 5):
        await follower.fetch(made[number])
    with pytest.raises(NotFound):
        await follower.fetch(made[0])


async def test_a_pin_moves_and_goes(run):
    config, made = run
    out = console()
    await pin_version(config, "paper", "v2", out)
    await pin_version(config, "paper", made[3].hash[:12], out)
    assert f"it held {made[2].hash[:16]} before" in out.export_text()
    with pytest.raises(NotFound, match="paper"):
        await unpin_version(config, "papre", out)
    with pytest.raises(NotFound):
        await pin_version(config, "paper", "v77", out)
    with pytest.raises(BadRequest):
        await pin_version(config, "../x", "v2", out)
    await unpin_version(config, "paper", out)
    assert not any(ref.startswith("pin/") for ref in await open_store(config).refs())


async def test_gc_without_a_log_says_what_that_means(run, tmp_path):
    config, _ = run
    store = config.run.directory / "weights"
    elsewhere = load(None, [f"run.directory={tmp_path / 'other'}", f"weights.url={store}", "collect.keep=1"])
    out = console()
    await collect_garbage(elsewhere, True, out)
    assert "no log in" in out.export_text()
