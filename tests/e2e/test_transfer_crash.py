"""A push that is killed, at each system call and at random instants: the target is sound and a second push completes it."""

import asyncio
import random
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from tests.deadlines import WHOLE_PROGRAM_S

from ostinato.core.weights import WeightArray
from ostinato.weights.follow.follower import Follower
from ostinato.weights.keep.fsck import verify
from ostinato.weights.keep.transfer import transfer
from ostinato.weights.publish.publisher import PublisherConfig, VersionPublisher
from ostinato.weights.store.directory import DirectoryStore
from ostinato.weights.version.content import weights_root

VERSIONS = 3


def model(number: int, size: int = 6000):
    rng = np.random.default_rng(0)
    codes = (rng.normal(0, 0.1, size).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    codes[: 40 * number] ^= 1
    return {name: WeightArray("BF16", (size // 2,), codes[i::2].copy().view(np.uint8)) for i, name in enumerate("ab")}


async def publish(root: Path, size: int = 6000) -> DirectoryStore:
    store, base = DirectoryStore(root), None
    publisher = VersionPublisher(store, PublisherConfig(object_bytes=1 << 12, anchor_share=5.0))
    for number in range(VERSIONS):
        base = (await publisher.publish(number, model(number, size), run="r", base=base, ref="live")).policy
    return store


async def assert_sound(root: Path) -> bool:
    """Everything that a ref of the target reaches is there and verifies; True if `live` has arrived."""
    store = DirectoryStore(root)
    findings = await verify(store, every=True)
    assert findings.problems == []
    policy = await Follower(store).resolve("live")
    if policy is None:
        return False
    assert weights_root(await Follower(store).fetch(policy)) == policy.hash
    assert policy.number == VERSIONS - 1
    return True


async def run(script: str, *arguments: object):
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-W", "ignore", "-c", textwrap.dedent(script), str(Path(__file__).parent), *map(str, arguments)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


KILL_AT = """
    import asyncio, os, sys
    from pathlib import Path
    sys.path.insert(0, sys.argv[1])
    import test_transfer_crash as t
    from tests.fakes.faults import FaultyDisk

    source, targets = Path(sys.argv[2]), Path(sys.argv[3])
    for nth in range(1, 400):  # a child per system call: imports are paid once
        pid = os.fork()
        if pid == 0:
            target = t.DirectoryStore(targets / str(nth), FaultyDisk(nth, kill=True))
            asyncio.run(t.transfer(t.DirectoryStore(source), target, "live", ref="live", parallel=3))
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if status == 0:
            print(nth)
            break
        assert os.WTERMSIG(status) == 9, status
"""


async def test_killed_at_each_system_call_the_target_is_sound_and_the_same_push_completes(tmp_path):
    source = await publish(tmp_path / "source")
    process = await run(KILL_AT, tmp_path / "source", tmp_path / "targets")
    stdout, stderr = await asyncio.wait_for(process.communicate(), WHOLE_PROGRAM_S)
    assert process.returncode == 0, stderr.decode()
    calls = int(stdout)
    assert calls > 40
    arrived = 0
    for nth in range(1, calls):
        root = tmp_path / "targets" / str(nth)
        arrived += await assert_sound(root)
        await transfer(source, DirectoryStore(root), "live", ref="live")
        assert await assert_sound(root)
    assert arrived < 5  # only at the very end


PUSH = """
    import asyncio, sys
    from pathlib import Path
    sys.path.insert(0, sys.argv[1])
    import test_transfer_crash as t

    print("ready", flush=True)
    asyncio.run(t.transfer(t.DirectoryStore(Path(sys.argv[2])), t.DirectoryStore(Path(sys.argv[3])), "live", ref="live"))
"""


@pytest.mark.examination
async def test_killed_at_random_instants_again_and_again_a_push_gets_through(tmp_path):
    chance = random.Random(2)
    source, target = await publish(tmp_path / "source", size=400_000), tmp_path / "target"
    there, killed = 0, 0
    for _ in range(8):
        process = await run(PUSH, tmp_path / "source", target)
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
        await asyncio.sleep(chance.uniform(0.0, 0.05))
        process.kill()
        await process.communicate()
        killed += process.returncode == -9
        await assert_sound(target)
        now = sum(path.is_file() for path in (target / "objects").rglob("*"))
        assert now >= there  # what arrived stays
        there = now
    assert killed >= 3
    assert there > 0
    done = await transfer(source, DirectoryStore(target), "live", ref="live")
    assert await assert_sound(target)
    assert done.objects + there == sum(path.is_file() for path in (target / "objects").rglob("*"))
