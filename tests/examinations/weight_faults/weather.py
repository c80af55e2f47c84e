"""Transient faults: reads that fail occasionally, disks that fill, clocks that jump."""

from __future__ import annotations

import asyncio
import errno
import inspect
import os
import random
import resource
import shutil
import time
from collections.abc import Callable, Generator
from pathlib import Path

from tests.examinations.weight_faults.following import INTERVAL_S, Looks, Seen, watching
from tests.examinations.weight_faults.outcome import REPAIRED, RIGHT, Broken, Case, must
from tests.examinations.weight_faults.process import Child, Ears, Say, Work
from tests.examinations.weight_faults.versions import LONG, SHORT, chain, check_sound, objects_of, policy, publish
from tests.fakes.faults import FaultyDisk, flipped, truncated

from ostinato.core.errors import NotFound, StorageFull, Unavailable
from ostinato.core.seams import WeightStore
from ostinato.core.weights import Snapshot
from ostinato.launch.views.progress import Progress
from ostinato.status.progress_lines import Lines
from ostinato.weights.follow.follower import Follower
from ostinato.weights.follow.journal import Journal
from ostinato.weights.publish.publisher import VersionPublisher
from ostinato.weights.store.directory import DirectoryStore
from ostinato.weights.version.chain import Manifests
from ostinato.weights.version.content import version_ref, weights_root

LAST = 41
SHARE = 0.05


class FlakyStore:
    """A weight store whose reads fail with probability `share`: not found, unavailable, an OS error, a flipped bit, or truncated."""

    def __init__(self, inner: WeightStore, share: float, seed: int) -> None:
        self.inner, self.share = inner, share
        self._chance = random.Random(seed)

    async def put(self, data: bytes | memoryview) -> str:
        return await self.inner.put(data)

    async def get(self, hash: str) -> bytes:
        return self._spoilt(await self.inner.get(hash), hash)

    async def get_range(self, hash: str, start: int, length: int) -> bytes:
        return self._spoilt(await self.inner.get_range(hash, start, length), hash)

    async def move_ref(self, ref: str, old: str | None, new: str) -> None:
        await self.inner.move_ref(ref, old, new)

    async def read_ref(self, ref: str) -> str | None:
        value = await self.inner.read_ref(ref)
        if self._chance.random() < self.share:
            raise Unavailable(f"reading ref {ref}: not now")
        return value

    def _spoilt(self, data: bytes, hash: str) -> bytes:
        if self._chance.random() >= self.share:
            return data
        match self._chance.randrange(5):
            case 0:
                raise NotFound(f"object {hash} is not there now", field="hash")
            case 1:
                raise Unavailable(f"reading object {hash}: not now")
            case 2:
                raise OSError(errno.EIO, f"object {hash}")
            case 3:
                return flipped(data)
            case _:
                return truncated(data)


def _judged(fault: str, where: str, act: Callable[[], str]) -> Case:
    try:
        return Case(fault=fault, where=where, outcome=act())
    except (Broken, OSError) as error:
        return Case(fault=fault, where=where, outcome="broken", problem=str(error))


# ---------------------------------------------------------------- reads that fail occasionally


def transient(root: Path, *, wide: bool) -> Generator[Case]:
    """Followers that are far behind, hold a collected version, or must roll back, with 5% of all reads failing."""
    store = DirectoryStore(root / "store")
    publisher = asyncio.run(chain(store, LAST + 1, LONG))
    seeds = range(40 if wide else 6)
    fault = f"{SHARE:.0%} of reads fail"
    for state, held in (("fresh", None), ("40 behind", LAST - 40)):
        for seed in seeds:
            yield _judged(fault, state, lambda held=held, seed=seed: _through(store, held, LAST, seed))
    asyncio.run(store.move_ref("live", policy(LAST).hash, policy(10).hash))
    for seed in seeds:
        yield _judged(fault, "rolled back by 31", lambda seed=seed: _through(store, LAST, 10, seed))
    asyncio.run(store.move_ref("live", policy(10).hash, policy(LAST).hash))
    holders = [_holding(store, 1) for _ in seeds]
    asyncio.run(_collect(root / "store", store))
    for seed, holder in zip(seeds, holders, strict=True):
        yield _judged(fault, "holds a collected version", lambda h=holder, s=seed: _converges(h, store, LAST, s))
    asyncio.run(publish(publisher, LAST + 1))
    must(asyncio.run(check_sound(store)) == LAST + 1, "after the collection the next version cannot be published")


def _holding(store: DirectoryStore, number: int | None) -> tuple[Looks, Follower]:
    looks = Looks(store)
    follower = Follower(looks)
    if number is not None:
        asyncio.run(follower.fetch(policy(number)))
    return looks, follower


def _through(store: DirectoryStore, held: int | None, target: int, seed: int) -> str:
    return _converges(_holding(store, held), store, target, seed)


def _converges(holder: tuple[Looks, Follower], store: DirectoryStore, target: int, seed: int) -> str:
    looks, follower = holder
    looks.inner = FlakyStore(store, SHARE, seed)
    seen = Seen()
    with Child(watching(follower, looks)) as child:
        seen.until(child, target)
        seen.rounds(child, 2)
    must(set(seen.delivered) == {target}, f"delivered {seen.delivered}")
    return REPAIRED if seen.errors else RIGHT


async def _collect(root: Path, store: DirectoryStore) -> None:
    """Delete everything not needed by live's version and its ancestors, back to the first with a full snapshot."""
    manifests = Manifests(store)
    keep: set[str] = set()
    async for hash, manifest in manifests.walk((await manifests.at(policy(LAST).hash))[0]):
        keep |= {version_ref(manifest.root), hash, *manifest.objects()}
        for route in manifest.routes:
            keep |= {route.manifest, *(await manifests.read(route.manifest)).objects()}
        if manifest.links == 0:
            break
    for ref in await store.refs():
        if ref != "live" and ref not in keep:
            (root / "refs" / ref).unlink()
    for path in (root / "objects").glob("*/*"):
        if path.parent.name + path.name not in keep:
            path.unlink()
    must(
        not objects_of(root, policy(1).hash).exists() and await store.read_ref(version_ref(policy(1).hash)) is None, ""
    )


# ---------------------------------------------------------------- disks that fill


def full_disk(root: Path, *, wide: bool) -> Generator[Case]:
    """A disk that fails at each system call of a publication and then recovers, and one that refuses all writes of a follower."""
    here = root / "base"
    here.mkdir()
    os.chdir(here)
    disk = FaultyDisk()
    inside = asyncio.run(chain(DirectoryStore(Path("store"), disk), 4, SHORT))
    before = len(disk.calls)
    for sticky in (False, True) if wide else (True,):
        for nth in range(1, 1000):
            copy = root / f"{sticky}-{nth}"
            shutil.copytree(here, copy)
            os.chdir(copy)
            with Child(_refused(inside, disk, before + nth, sticky)) as child:
                said = child.all()
            if said[0]["refused"] is None:
                break
            fault = f"disk full, {'from then on' if sticky else 'one call'}"
            yield _judged(fault, "publication: delta, full, two squashed", lambda c=copy, s=said: _emptied(c, s))
            os.chdir(here)
            shutil.rmtree(copy)
    yield _judged("disk full, by the kernel's limit", "follower's journal and log", lambda: _no_space(root, here))


def _refused(inside: VersionPublisher, disk: FaultyDisk, nth: int, sticky: bool) -> Work:
    """Publish with the fault, check the store, then publish again with space, all in one process as a trainer would."""

    async def work(say: Say, ears: Ears) -> None:
        disk.fail_at, disk.sticky = nth, sticky
        try:
            await publish(inside, 4)
            say(refused=None)
            return
        except StorageFull as error:
            say(refused=str(error), live=await check_sound(DirectoryStore(Path("store"))))
        disk.fail_at = 0
        for number in (4, 5):
            await publish(inside, number)
            say(live=await check_sound(DirectoryStore(Path("store"))))

    return work


def _emptied(copy: Path, said: list[dict[str, object]]) -> str:
    must("free some space" in str(said[0]["refused"]), str(said[0]))
    must(said[0]["live"] in (3, 4) and [line["live"] for line in said[1:]] == [4, 5], f"live went {said}")
    must(not list((copy / "store" / "tmp").iterdir()), "files were left in tmp/")
    return REPAIRED


def _no_space(root: Path, here: Path) -> str:
    """The kernel refuses every write of a follower's process, to journal and log, and later accepts them again."""
    store, path = DirectoryStore(here / "store"), root / "follow.json"

    async def work(say: Say, ears: Ears) -> None:
        journal, progress = Journal(path), Progress(root / "serve.jsonl")
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))

        async def changed(ref: str, snapshot: Snapshot) -> None:
            progress.write("swapped", number=snapshot.policy.number)
            say(root=weights_root(snapshot.weights))

        def refused(ref: str, error: Exception) -> None:
            say(error=str(error))
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            progress.write("space")

        following = Follower(store, journal=journal)
        task = asyncio.create_task(following.watch(["live"], changed, INTERVAL_S, refused))
        while "live" not in journal.entries or journal.entries["live"].have is None:
            await asyncio.sleep(INTERVAL_S)
        task.cancel()

    with Child(work) as child:
        said = child.all()
    must([*said[0]] == ["root"] and said[0]["root"] == policy(3).hash, f"was not served: {said}")
    must(len(said) == 2 and str(path) in said[1]["error"], f"the disk was not reported: {said}")
    entry = Journal(path).entries["live"]
    must(entry.have is not None and entry.have.policy == policy(3), "the journal was not written")
    must([line["kind"] for line in Lines(root / "serve.jsonl").new()] == ["space"], "the log is torn")
    return RIGHT


# ---------------------------------------------------------------- clocks that jump

_DAY, _YEAR = 86_400.0, 31_557_600.0
SHIFTS = {"a day": _DAY, "10 years": 10 * _YEAR}


def clocks(root: Path, *, wide: bool) -> Generator[Case]:
    """Publisher and follower in processes whose wall clocks jump in opposite directions between any two steps."""
    for name, shift in SHIFTS.items():
        for sign, back in ((1, "publisher ahead"), (-1, "follower ahead")):
            act = lambda n=name, s=sign * shift: _shifted(root / f"{n}-{s}", s)  # noqa: E731
            yield _judged(f"clocks jump by {name}", back, act)


class Clock:
    """Shifts this process's clocks: `jump` moves the wall clock, alternately back and forth; the monotonic one moves once, at the start.

    `reads` lists the `ostinato` modules that read the wall clock.
    """

    def __init__(self, shift: float) -> None:
        self._shift, self._now = shift, 0.0
        wall, wall_ns, steady, steady_ns = time.time, time.time_ns, time.monotonic, time.monotonic_ns
        self.reads: list[str] = []

        def read() -> float:
            frame = inspect.currentframe()
            caller = frame.f_back.f_globals["__name__"] if frame is not None and frame.f_back is not None else ""
            if caller.startswith("ostinato."):
                self.reads.append(caller)
            return wall() + self._now

        time.time = read
        time.time_ns = lambda: wall_ns() + int(1e9 * self._now)
        time.monotonic = lambda: steady() + max(shift, 0.0)
        time.monotonic_ns = lambda: steady_ns() + int(1e9 * max(shift, 0.0))

    def jump(self) -> None:
        """Move the wall clock to the other side of the true time."""
        self._now = -self._now if self._now else self._shift


def _shifted(root: Path, shift: float) -> str:
    async def publishing(say: Say, ears: Ears) -> None:
        clock = Clock(shift)
        publisher = VersionPublisher(DirectoryStore(root), SHORT)
        for number in range(8):
            clock.jump()
            await publish(publisher, number)
            say(published=number)
            await ears.line()
        say(reads=clock.reads)

    async def following(say: Say, ears: Ears) -> None:
        clock = Clock(-shift)
        looks = Looks(DirectoryStore(root))

        def jumping(**said: object) -> None:
            clock.jump()
            say(**said)

        await watching(Follower(looks, journal=Journal(root / "follow.json")), looks)(jumping, ears)

    seen, said = Seen(), list[dict[str, object]]()
    with Child(publishing) as one:
        one.hear()
        with Child(following) as two:
            for number in range(8):
                seen.until(two, number)
                one.tell("next")
                said.append(one.hear() or {})
            seen.rounds(two, 2)
    must(seen.delivered == [*range(8)] and not seen.errors, f"delivered {seen.delivered}, refused {seen.errors}")
    must(said[-1] == {"reads": []}, f"the publisher read the wall clock: {said[-1]}")
    must(asyncio.run(check_sound(DirectoryStore(root))) == 7, "live is not the last version")
    return RIGHT
