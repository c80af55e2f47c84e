"""A collection that is killed with signal 9 at random instants, beside a publisher: everything kept is there bit for bit."""

import asyncio
import os
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from tests.deadlines import WHOLE_PROGRAM_S

from ostinato.core.errors import Conflict
from ostinato.core.weights import WeightArray
from ostinato.weights.follow.follower import Follower
from ostinato.weights.keep.fsck import verify
from ostinato.weights.keep.gc import CollectConfig, collect
from ostinato.weights.keep.pins import pin
from ostinato.weights.publish.publisher import PublisherConfig, VersionPublisher
from ostinato.weights.store.directory import DirectoryStore
from ostinato.weights.version.content import version_ref, weights_root

CONFIG = PublisherConfig(object_bytes=4096, anchor_every=3, anchor_share=100)
COLLECT = CollectConfig(keep=2, parallel=2)

KILL_AFTER = textwrap.dedent(
    """
    import asyncio, os, random, shutil, signal, sys, time
    from pathlib import Path
    sys.path.insert(0, sys.argv[1])
    import test_collecting_kill as t

    root, chance, killed, whole = Path(sys.argv[2]), random.Random(5), 0, 0.5
    before = len(t.files(root / "first"))
    for nth in range(21):  # imports are paid once; the first child runs to its end and says how long that takes
        copy = root / str(nth)
        shutil.copytree(root / "first", copy)
        started = time.monotonic()
        pid = os.fork()
        if pid == 0:
            asyncio.run(t.collect(t.DirectoryStore(copy), t.COLLECT))
            os._exit(0)
        if nth % 2:  # at any instant
            time.sleep(chance.uniform(0, whole))
            os.kill(pid, signal.SIGKILL)
        elif nth:  # once so many are deleted, however fast that goes here
            most = before - chance.randrange(1, before - len(t.files(root / "0")))
            while len(t.files(copy)) > most:
                pass
            os.kill(pid, signal.SIGKILL)
        killed += os.waitpid(pid, 0)[1] == 9
        whole = whole if nth else time.monotonic() - started
    print(killed)
    """
)

KILL_AT = textwrap.dedent(
    """
    import asyncio, os, shutil, sys
    from pathlib import Path
    sys.path.insert(0, sys.argv[1])
    import test_collecting_kill as t
    from tests.fakes.faults import FaultyDisk

    root = Path(sys.argv[2])
    for nth in range(1, 300):  # a child per system call: imports are paid once
        copy = root / str(nth)
        shutil.copytree(root / "first", copy)
        pid = os.fork()
        if pid == 0:
            disk = FaultyDisk(nth, kill=True)
            asyncio.run(t.collect(t.DirectoryStore(copy, disk), t.COLLECT))
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if status == 0:
            print(nth)
            break
        assert os.WTERMSIG(status) == 9, status
    """
)


def model(number: int):
    """Version `number` of a small model: a function of the number alone, so that any process can check it."""
    codes = (np.random.default_rng(0).normal(0, 0.1, 8000).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    codes[: 40 * number] ^= 1
    codes[number % codes.size] ^= 2
    return {"a": WeightArray("BF16", (80, 100), codes.view(np.uint8))}


async def publish(store: DirectoryStore, numbers: range):
    publisher, base = VersionPublisher(store, CONFIG), await Follower(store).resolve("candidate")
    for number in numbers:
        base = (await publisher.publish(number, model(number), run="r", base=base, ref="candidate")).policy


def age(root: Path) -> None:
    """Two days pass: more than the grace."""
    for path in [*(root / "objects").rglob("*"), *(root / "refs").rglob("*")]:
        if path.is_file():
            then = path.stat().st_mtime - 2 * 86_400
            os.utime(path, (then, then))


async def assert_kept(store: DirectoryStore, numbers: list[int]) -> None:
    """These versions, and whatever else has a ref, are there bit for bit."""
    assert (await verify(store, every=True)).problems == []
    roots = [weights_root(model(number)) for number in numbers]
    manifests = {root: await store.read_ref(version_ref(root)) for root in roots}
    assert None not in manifests.values()
    follower = Follower(store)
    for ref in await store.refs():
        policy = await follower.resolve(ref)
        assert policy is not None
        assert weights_root(await follower.fetch(policy)) == weights_root(model(policy.number)) == policy.hash


async def run(script: str, *arguments: object) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-W", "ignore", "-c", script, str(Path(__file__).parent), *map(str, arguments)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    stdout, stderr = await asyncio.wait_for(process.communicate(), WHOLE_PROGRAM_S)
    assert process.returncode == 0, stderr.decode()
    return stdout.decode()


async def prepare(root: Path, count: int) -> DirectoryStore:
    """Versions v0, v1, ..., all old; v1 is pinned."""
    store = DirectoryStore(root)
    await publish(store, range(count))
    await pin(store, "first", weights_root(model(1)))
    age(root)
    return store


def files(root: Path) -> set[str]:
    return {path.name for path in (root / "objects").rglob("*") if path.is_file()}


@pytest.mark.examination
async def test_killed_at_random_instants_every_kept_version_is_there_bit_for_bit(tmp_path):
    await prepare(tmp_path / "first", 24)
    killed = int(await run(KILL_AFTER, tmp_path))
    assert killed >= 10
    clean, left = files(tmp_path / "0"), set()
    for nth in range(21):
        store = DirectoryStore(tmp_path / str(nth))
        await assert_kept(store, [1, 22, 23])
        left.add(len(files(tmp_path / str(nth))))
        await collect(store, COLLECT)
        await assert_kept(store, [1, 22, 23])
        assert files(tmp_path / str(nth)) == clean
        assert not list((tmp_path / str(nth) / "tmp").iterdir())
    assert len(left) > 2  # some were killed in the middle of deleting


async def test_killed_at_each_system_call_every_kept_version_is_there_and_the_next_run_ends_the_work(tmp_path):
    await prepare(tmp_path / "first", 6)
    calls = int(await run(KILL_AT, tmp_path))
    assert calls > 15
    for nth in range(1, calls):
        store = DirectoryStore(tmp_path / str(nth))
        await assert_kept(store, [1, 4, 5])
        await collect(store, COLLECT)
        await assert_kept(store, [1, 4, 5])
        assert files(tmp_path / str(nth)) == files(tmp_path / str(calls))  # the one that was not killed


async def test_beside_a_publisher_that_never_stops_nothing_that_it_made_is_lost(tmp_path):
    """Old versions go while new ones come, from another process."""
    store = DirectoryStore(tmp_path)
    await publish(store, range(6))
    age(tmp_path)
    script = (
        "import asyncio, sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); import test_collecting_kill as t; "
        "asyncio.run(t.publish(t.DirectoryStore(Path(sys.argv[2])), range(6, 46)))"
    )
    publishing = asyncio.create_task(run(script, tmp_path))
    gone = []
    while not publishing.done():
        with suppress(Conflict):  # a ref moved while it looked: nothing was deleted, and it is run again
            gone += (await collect(store, COLLECT)).gone
        await asyncio.sleep(0.02)
    await publishing
    assert gone
    await assert_kept(store, list(range(6, 46)))
