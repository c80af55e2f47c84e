"""A publisher that is killed or whose disk fills, at every step: the store stays sound and the next publication works."""

import asyncio
import random
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from tests.deadlines import WHOLE_PROGRAM_S
from tests.fakes.faults import FaultyDisk

from ostinato.core.errors import StorageFull
from ostinato.core.weights import WeightArray
from ostinato.weights.follow.follower import Follower
from ostinato.weights.keep.fsck import verify
from ostinato.weights.publish.publisher import PublisherConfig, VersionPublisher
from ostinato.weights.store.directory import DirectoryStore
from ostinato.weights.version.content import weights_root

CONFIG = PublisherConfig(object_bytes=4096, anchor_every=3)

PUBLISH_FOR_EVER = textwrap.dedent(
    """
    import asyncio, sys
    from pathlib import Path
    sys.path.insert(0, sys.argv[1])
    import test_publish_crash as t

    async def main():
        store = t.DirectoryStore(Path(sys.argv[2]))
        follower = t.Follower(store)
        publisher = t.VersionPublisher(store, t.CONFIG)
        base = await follower.resolve("candidate")
        number = 0 if base is None else base.number + 1
        print("ready", flush=True)
        while True:
            base = (await publisher.publish(number, t.model(number), run="r", base=base, ref="candidate")).policy
            number += 1
            print(number, flush=True)

    asyncio.run(main())
    """
)


def model(number: int):
    """Version `number` of a small model: a function of the number alone, so that any process can check it."""
    rng = np.random.default_rng(0)
    codes = (rng.normal(0, 0.1, 12_000).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    codes[: 50 * number] ^= 1
    codes[number % codes.size] ^= 2
    return {
        "a": WeightArray("BF16", (6000,), codes[:6000].view(np.uint8)),
        "b": WeightArray("BF16", (60, 100), codes[6000:].view(np.uint8)),
    }


async def assert_sound(store: DirectoryStore) -> int:
    """Everything that a ref reaches is there and verifies; returns candidate's number, or -1."""
    findings = await verify(store, every=True)
    assert findings.problems == []
    policy = await Follower(store).resolve("candidate")
    if policy is None:
        return -1
    assert weights_root(await Follower(store).fetch(policy)) == weights_root(model(policy.number)) == policy.hash
    return policy.number


async def start(script: str, *arguments: object):
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-W", "ignore", "-c", script, str(Path(__file__).parent), *map(str, arguments)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def publish(store: DirectoryStore, number: int):
    base = await Follower(store).resolve("candidate")
    return await VersionPublisher(store, CONFIG).publish(number, model(number), run="r", base=base, ref="candidate")


@pytest.mark.examination
async def test_killed_at_random_instants_the_store_is_sound_and_publication_goes_on(tmp_path):
    chance = random.Random(3)
    store = DirectoryStore(tmp_path)
    reached, acknowledged = -1, -1
    for _ in range(8):
        process = await start(PUBLISH_FOR_EVER, tmp_path)
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
        said = [await process.stdout.readline() for _ in range(chance.randint(0, 3))]
        await asyncio.sleep(chance.uniform(0.0, 0.03))
        process.kill()
        said += (await process.communicate())[0].split()
        acknowledged = max([acknowledged, *(int(line) - 1 for line in said)])
        now = await assert_sound(DirectoryStore(tmp_path))
        assert now >= max(reached, acknowledged)
        reached = now
    assert reached >= 3
    assert (await publish(store, reached + 1)).policy.number == reached + 1
    assert await assert_sound(store) == reached + 1
    assert not list((tmp_path / "tmp").iterdir())


KILL_AT = textwrap.dedent(
    """
    import asyncio, sys
    from pathlib import Path
    sys.path.insert(0, sys.argv[1])
    import test_publish_crash as t
    import os

    root = Path(sys.argv[2])
    for nth in range(1, 200):  # a child per system call: imports are paid once
        pid = os.fork()
        if pid == 0:
            disk = t.FaultyDisk(nth, kill=True)
            asyncio.run(t.publish(t.DirectoryStore(root / str(nth), disk), 0))
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if status == 0:
            print(nth)
            break
        assert os.WTERMSIG(status) == 9, status
    """
)


async def test_killed_at_each_system_call_the_store_is_sound_and_the_same_publication_succeeds(tmp_path):
    process = await start(KILL_AT, tmp_path)
    stdout, stderr = await asyncio.wait_for(process.communicate(), WHOLE_PROGRAM_S)
    assert process.returncode == 0, stderr.decode()
    calls = int(stdout)
    assert calls > 30
    for nth in range(1, calls):
        store = DirectoryStore(tmp_path / str(nth))
        assert await assert_sound(store) in (-1, 0)
        assert (await publish(store, 0)).policy.number == 0
        assert await assert_sound(store) == 0


@pytest.mark.parametrize("sticky", [False, True], ids=["one call", "from then on"])
async def test_a_disk_that_is_full_at_each_call_keeps_the_old_version_and_recovers(tmp_path, sticky):
    nth = 0
    while True:
        nth += 1
        root = tmp_path / str(nth)
        first = (await publish(DirectoryStore(root), 0)).policy
        disk = FaultyDisk(nth, sticky=sticky)
        store = DirectoryStore(root, disk)
        publisher = VersionPublisher(store, CONFIG)
        try:
            await publisher.publish(1, model(1), run="r", base=first, ref="candidate")
            break  # fewer than `nth` calls: every one has had its turn
        except StorageFull:
            moved = [
                what for call, what in disk.calls[: nth - 1] if call == "rename" and what.endswith("refs/candidate")
            ]
            now = await assert_sound(DirectoryStore(root))
            assert now == 0 or (now == 1 and sticky and moved)  # the disk refused to put the old ref back, too
        disk.fail_at = 0  # space again
        await publisher.publish(1, model(1), run="r", base=first, ref="candidate")
        assert await assert_sound(store) == 1
    assert nth > 15


async def test_two_processes_that_race_for_one_ref(tmp_path):
    """Each publishes its own sequence; whoever loses a compare-and-swap stops with a Conflict, and nothing is torn."""
    script = PUBLISH_FOR_EVER.replace('run="r"', "run=sys.argv[3]").replace("while True", "while number < 40")
    processes = [await start(script, tmp_path, f"r{i}") for i in range(2)]
    results = await asyncio.wait_for(asyncio.gather(*(process.communicate() for process in processes)), WHOLE_PROGRAM_S)
    assert sorted(process.returncode for process in processes) in ([0, 0], [0, 1])
    for process, (_, stderr) in zip(processes, results, strict=True):
        assert process.returncode == 0 or b"Conflict" in stderr
    assert await assert_sound(DirectoryStore(tmp_path)) == 39
