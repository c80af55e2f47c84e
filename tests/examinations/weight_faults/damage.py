"""Each object and ref of a chain lost, truncated, flipped, replaced or served stale, for followers at several distances."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.examinations.weight_faults.following import Looks, Seen, watching
from tests.examinations.weight_faults.outcome import OBEYED, REPAIRED, RIGHT, WAITED, Broken, Case, must
from tests.examinations.weight_faults.process import Child
from tests.examinations.weight_faults.versions import LONG, chain, objects_of, policy
from tests.fakes.faults import flipped, truncated

from ostinato.weights.follow.follower import Follower
from ostinato.weights.store.directory import DirectoryStore
from ostinato.weights.version.chain import Manifests
from ostinato.weights.version.content import version_ref
from ostinato.weights.version.manifest import Manifest

LAST = 41
STATES: dict[str, int | None] = {"fresh": None, "40 behind": LAST - 40, "one behind": LAST - 1, "current": LAST}
Damage = Callable[[bytes], bytes | None]


@dataclass(frozen=True, slots=True)
class Target:
    """A target of faults: an object or a ref, its file, and the name that an error about it must contain."""

    kind: str
    name: str
    path: Path
    other: bytes  # bytes of another object or ref
    older: bytes | None = None  # the ref's earlier value


def faults_of(target: Target) -> dict[str, Damage]:
    """The faults that apply to a target."""
    found: dict[str, Damage] = {
        "dropped": lambda data: None,
        "truncated": truncated,
        "emptied": lambda data: b"",
        "bit flipped": flipped,
        "replaced": lambda data: target.other,
    }
    if target.kind.startswith("ref"):
        found["another hash"] = lambda data: (b"0" if data[:1] != b"0" else b"1") + data[1:]
    if target.older is not None:
        found["stale"] = lambda data: target.older
    return found


async def targets(root: Path) -> list[Target]:
    """Every object and ref that live's chain consists of, newest first."""
    store = DirectoryStore(root)
    manifests = Manifests(store)
    found: dict[str, Target] = {}
    other = policy(0).hash.encode()

    def add(kind: str, name: str) -> None:
        path = objects_of(root, name)
        found.setdefault(name, Target(kind, name, path, b"bytes of something else, " + path.read_bytes()[:100]))

    def parts(prefix: str, hash: str, manifest: Manifest) -> None:
        add(f"{prefix} manifest", hash)
        for name in manifest.objects():
            add(f"{prefix} payloads", name)

    async for hash, manifest in manifests.walk((await manifests.at(policy(LAST).hash))[0]):
        newest = "target's" if manifest.number == LAST else "ancestor's"
        parts(newest, hash, manifest)
        for route in manifest.routes:
            parts(
                "full route's" if route.base is None else "squashed route's",
                route.manifest,
                await manifests.read(route.manifest),
            )
        ref = version_ref(manifest.root)
        value = (await store.read_ref(version_ref(policy(0).hash)) or "").encode() + b"\n"
        found[ref] = Target(f"ref of {newest} version", ref, root / "refs" / ref, value if manifest.number else other)
    older = policy(LAST - 3).hash.encode() + b"\n"
    found["live"] = Target("ref live", "live", root / "refs/live", other, older)
    return list(found.values())


def some(every: Sequence[Target]) -> list[Target]:
    """The newest target of each kind."""
    kinds: dict[str, list[Target]] = {}
    for target in every:
        kinds.setdefault(target.kind, []).append(target)
    return [kind[0] for kind in kinds.values()]


def examine(root: Path, *, wide: bool) -> Generator[Case]:
    """Every fault of every target for every follower; only the newest target of each kind unless `wide`."""
    store = DirectoryStore(root)
    asyncio.run(chain(store, LAST + 1, LONG))
    every = asyncio.run(targets(root))
    for state, number in STATES.items():
        looks = Looks(store)
        follower = Follower(looks)
        if number is not None:
            asyncio.run(follower.fetch(policy(number)))
        for target in every if wide else some(every):
            for fault, damage in faults_of(target).items():
                where = f"{target.kind}, {state}"
                try:
                    outcome = _one(follower, looks, target, damage, current=state == "current")
                    yield Case(fault=fault, where=where, outcome=outcome)
                except Broken as error:
                    yield Case(fault=fault, where=where, outcome="broken", problem=f"{target.name}: {error}")


def _one(follower: Follower, looks: Looks, target: Target, damage: Damage, *, current: bool) -> str:
    """Inject one fault, and restore the file while the same follower process keeps running."""
    good = target.path.read_bytes()
    seen = Seen()
    if current:
        with Child(watching(follower, looks)) as child:
            seen.until(child, LAST)
            try:
                _put(target.path, damage(good))
                seen.rounds(child, 3)
            finally:
                _put(target.path, good)
            return _judge(child, seen, target, damage(good))
    try:
        _put(target.path, damage(good))
        with Child(watching(follower, looks)) as child:
            seen.rounds(child, 2)
            _put(target.path, good)
            return _judge(child, seen, target, damage(good))
    finally:
        _put(target.path, good)


def _judge(child: Child, seen: Seen, target: Target, held: bytes | None) -> str:
    before = list(seen.delivered)
    seen.rounds(child, 1)
    seen.until(child, LAST)
    seen.rounds(child, 3)
    must(seen.delivered[-1] == LAST, f"ended at version {seen.delivered[-1]}")
    named = {policy(number).hash for number in before} - {policy(LAST).hash}
    if target.name == "live" and held is not None:
        named.discard(held.decode("ascii", "replace").strip())  # the ref really named it
    must(not named, f"delivered {named}, which nothing asked for")
    for error in seen.errors:
        must(target.name in error, f"an error that does not name it: {error}")
    if seen.errors:
        return REPAIRED
    return RIGHT if set(before) == {LAST} else OBEYED if before else WAITED


def _put(path: Path, data: bytes | None) -> None:
    if data is None:
        path.unlink()
    else:  # atomically, so that no reader sees a partial file
        fd, partial = tempfile.mkstemp(dir=path.parents[3])
        with open(fd, "wb") as file:
            file.write(data)
        Path(partial).replace(path)
