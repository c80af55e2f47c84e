"""kill -9 of the publisher at every system call of a publication, and of the follower at every step of its journal."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable, Generator
from pathlib import Path

from tests.examinations.weight_faults.following import INTERVAL_S, Looks, Seen, watching
from tests.examinations.weight_faults.outcome import FELL_BACK, REPAIRED, RIGHT, Broken, Case, must
from tests.examinations.weight_faults.process import Child, Ears, Say, Work
from tests.examinations.weight_faults.versions import SHORT, chain, check_sound, objects_of, policy, publish
from tests.fakes.faults import FaultyDisk, FaultyStore, flipped

from ostinato.core.seams import WeightStore
from ostinato.core.weights import Snapshot
from ostinato.weights.follow.follower import Follower
from ostinato.weights.follow.journal import Journal
from ostinato.weights.publish.publisher import VersionPublisher
from ostinato.weights.store.directory import DirectoryStore
from ostinato.weights.version.chain import Manifests
from ostinato.weights.version.content import version_ref, weights_root

KINDS = {0: "first version", 1: "delta", 4: "delta, full, two squashed"}
_STORE = Path("store")  # relative: each process has its own copy, in its own directory


def publisher(root: Path, *, wide: bool) -> Generator[Case]:
    """Kill a publication at each system call. Another process then repeats it and publishes the next version."""
    for number, kind in KINDS.items() if wide else [(4, KINDS[4])]:
        here = root / f"from-{number}"
        here.mkdir()
        os.chdir(here)
        disk = FaultyDisk(kill=True)
        inside = asyncio.run(chain(DirectoryStore(_STORE, disk), number, SHORT))
        before = len(disk.calls)
        for nth in range(1, 1000):
            copy = root / f"from-{number}-{nth}"
            shutil.copytree(here, copy)
            disk.fail_at = before + nth
            with Child(_publishing(inside, copy, number)) as child:
                child.all()
                if not child.killed:
                    must(child.wait() == 0, f"status {child.wait()}")
                    break
            yield _after(copy, number, f"call {nth} of a publication: {kind}")
            shutil.rmtree(copy)


def _publishing(inside: VersionPublisher, directory: Path, number: int) -> Work:
    async def work(say: Say, ears: Ears) -> None:
        os.chdir(directory)
        await publish(inside, number)

    return work


def _after(copy: Path, number: int, where: str) -> Case:
    """Check the store after the kill, and that a new process can continue to publish to it."""

    async def check() -> None:
        if any((copy / _STORE / "refs").glob("live")):
            now = await check_sound(DirectoryStore(copy / _STORE))
            must(now in (number - 1, number), f"live is version {now}")
        else:
            must(number == 0, "there is no ref live any more")
        store = DirectoryStore(copy / _STORE)
        again = VersionPublisher(store, SHORT)
        for step in (number, number + 1):
            await publish(again, step)
            must(await check_sound(store) == step, f"version {step} was published and live is another one")
        must(not list((copy / _STORE / "tmp").iterdir()), "files were left in tmp/")

    return _case("publisher killed", where.partition(" of a ")[2], where.partition(" of a ")[0], check)


def _case(fault: str, kind: str, at: str, check: Callable[[], object]) -> Case:
    try:
        asyncio.run(check())  # type: ignore[arg-type]
    except (Broken, OSError, ValueError) as error:
        return Case(fault=fault, where=kind, outcome="broken", problem=f"{at}: {error}")
    return Case(fault=fault, where=kind, outcome=RIGHT)


# ---------------------------------------------------------------- the follower

OLD, NEW = 2, 5


class DeadlyStore(FaultyStore):
    """Kills its process at the n-th read (from 1; 0: never)."""

    def __init__(self, inner: WeightStore, nth: int) -> None:
        super().__init__(inner, fail_get=nth, damage=_die)


def _die(data: bytes) -> bytes:
    os.kill(os.getpid(), signal.SIGKILL)
    return data


def follower(root: Path, *, wide: bool) -> Generator[Case]:
    """Kill a follower in its journal's writes, in its reads and around its deliveries, with and without a version served before."""
    store = DirectoryStore(root / "store")
    inside = asyncio.run(chain(store, OLD + 1, SHORT))
    journal = root / "served" / "follow.json"
    journal.parent.mkdir()
    with Child(_serving(store, journal, "", 0)) as child:
        child.all()
    must(_have(journal) == OLD, "the journal does not say what was delivered")
    served = journal.read_bytes()
    for number in range(OLD + 1, NEW + 1):
        asyncio.run(publish(inside, number))
    spoilt = objects_of(root / "store", asyncio.run(_manifest(store)))
    for had, state in ((None, "nothing served before"), (served, f"version {OLD} served before")):
        for step in ("journal", "read", "before delivery", "after delivery"):
            for nth in range(1, 100):
                directory = root / f"{'fresh' if had is None else 'served'}-{step}-{nth}"
                directory.mkdir()
                if had is not None:
                    (directory / journal.name).write_bytes(had)
                with Child(_serving(store, directory / journal.name, step, nth)) as child:
                    child.all()
                    if not child.killed:
                        break
                for damaged in (False, True):
                    yield _restarted(store, directory / journal.name, spoilt if damaged else None, step, nth, state)


async def _manifest(store: DirectoryStore) -> str:
    return (
        (await Manifests(store).at(policy(NEW).hash))[0] if await store.read_ref(version_ref(policy(NEW).hash)) else ""
    )


def _serving(store: DirectoryStore, path: Path, step: str, nth: int) -> Work:
    """Follow until the journal records the delivery of live; killed at the `nth` system call, read or delivery of `step`."""

    async def work(say: Say, ears: Ears) -> None:
        journal = Journal(path, FaultyDisk(nth if step == "journal" else 0, kill=True))
        task: asyncio.Task[None]

        async def changed(ref: str, snapshot: Snapshot) -> None:
            if step == "before delivery" and nth == 1:
                _die(b"")
            say(root=weights_root(snapshot.weights))
            if step == "after delivery" and nth == 1:
                _die(b"")

        following = Follower(DeadlyStore(store, nth if step == "read" else 0), journal=journal)
        task = asyncio.create_task(following.watch(["live"], changed, INTERVAL_S))
        live = await Follower(store).resolve("live")
        while not ((entry := journal.entries.get("live")) and entry.have and entry.have.policy == live):
            await asyncio.sleep(INTERVAL_S)
        task.cancel()

    return work


def _have(path: Path) -> int | None:
    entry = Journal(path).entries.get("live")
    return entry.have.number if entry is not None and entry.have is not None else None


def _restarted(store: DirectoryStore, path: Path, spoilt: Path | None, step: str, nth: int, state: str) -> Case:
    """Start a new process on the killed one's journal; with `spoilt`, the object in this file is damaged at first and repaired later."""
    fault = f"follower killed, {'journal write' if step == 'journal' else step}"
    where = state if spoilt is None else f"{state}, live's manifest damaged"
    journal = path.read_bytes() if path.exists() else None
    try:
        have, seen = _have(path), Seen()
        good = spoilt.read_bytes() if spoilt is not None else b""
        looks = Looks(store)
        try:
            if spoilt is not None:
                spoilt.write_bytes(flipped(good))
            with Child(watching(Follower(looks, journal=Journal(path)), looks)) as child:
                seen.rounds(child, 2)
                first = list(seen.delivered)
                if spoilt is not None:
                    spoilt.write_bytes(good)
                seen.until(child, NEW)
                seen.rounds(child, 2)
        finally:
            if spoilt is not None:
                spoilt.write_bytes(good)
        must(_have(path) == NEW, f"the journal says {_have(path)}")
        left = [file.name for file in path.parent.iterdir() if file != path]
        must(not left, f"left behind: {left}")
        if spoilt is None:
            must(first == [NEW] and not seen.errors, f"delivered {first}, refused {seen.errors}")
            return Case(fault=fault, where=where, outcome=RIGHT)
        must(bool(seen.errors) and all(spoilt.name in error for error in seen.errors), f"no name in {seen.errors}")
        must(first == ([OLD] if have == OLD else []), f"had {have}, served {first} beside the damage")
        return Case(fault=fault, where=where, outcome=FELL_BACK if first else REPAIRED)
    except Broken as error:
        return Case(fault=fault, where=where, outcome="broken", problem=f"{nth}: {error}")
    finally:
        path.unlink(missing_ok=True)
        if journal is not None:
            path.write_bytes(journal)
