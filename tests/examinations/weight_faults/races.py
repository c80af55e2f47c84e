"""Publishers that race for one ref, in processes of their own, on a directory and on a bucket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path

from tests.examinations.weight_faults.network import bucket_at, bucket_server
from tests.examinations.weight_faults.outcome import RIGHT, Broken, Case, must
from tests.examinations.weight_faults.process import Child, Ears, Say, Work
from tests.examinations.weight_faults.versions import SHORT, model
from tests.fakes.faults import FaultyStore

from ostinato.core.errors import Conflict
from ostinato.core.records import PolicyVersion
from ostinato.core.seams import WeightStore
from ostinato.core.weights import WeightArray, Weights
from ostinato.weights.follow.follower import Follower
from ostinato.weights.keep.fsck import verify
from ostinato.weights.publish.publisher import VersionPublisher
from ostinato.weights.store.directory import DirectoryStore
from ostinato.weights.store.interface import RefStore
from ostinato.weights.version.content import weights_root

Open = Callable[[], RefStore]


class Gate(FaultyStore):
    """A weight store that waits, after live was first read, until the parent lets all racers continue together."""

    def __init__(self, inner: WeightStore, say: Say, ears: Ears) -> None:
        super().__init__(inner)
        self._say, self._ears, self.closed = say, ears, False

    async def read_ref(self, ref: str) -> str | None:
        value = await super().read_ref(ref)
        if ref == "live" and self.closed:
            self.closed = False
            self._say(read=value)
            await self._ears.line()
        return value


def entry(number: int, racer: int) -> Weights:
    """The weights that a racer publishes as version `number`."""
    data = model(number)["a"].data.copy()
    data[: racer + 1] ^= 1
    return {**model(number), "a": WeightArray("BF16", (data.nbytes // 2,), data)}


def _racing(open_store: Open, racer: int) -> Work:
    async def work(say: Say, ears: Ears) -> None:
        store = Gate(open_store(), say, ears)
        publisher, follower = VersionPublisher(store, SHORT), Follower(store)
        while line := await ears.line():
            number = int(line)
            base = await follower.resolve("live")
            store.closed = True
            try:
                await publisher.publish(number, entry(number, racer), run=f"r{racer}", base=base, ref="live")
                say(won=True)
            except Conflict:
                say(won=False)

    return work


async def _round(store: RefStore, number: int, won: list[bool]) -> None:
    must(won.count(True) == 1, f"round {number}: {won.count(True)} of {len(won)} won")
    live = await Follower(store).resolve("live")
    for racer, winner in enumerate(won):
        root = weights_root(entry(number, racer))
        must(winner is (live is not None and live.hash == root), f"round {number}: live is {live}")
        got = await Follower(store).fetch(PolicyVersion(number=number, hash=root))
        must(weights_root(got) == root, f"round {number}: racer {racer}'s version has other bytes")


def _race(kind: str, open_store: Open, rounds: int, racers: int) -> Generator[Case]:
    with ExitStack() as stack:
        children = [stack.enter_context(Child(_racing(open_store, racer))) for racer in range(racers)]
        for number in range(rounds):
            for child in children:
                child.tell(str(number))
            held = {(child.hear() or {})["read"] for child in children}
            must(len(held) == 1, f"racers started from {held}")
            for child in children:
                child.tell("go")
            won = [(child.hear() or {})["won"] for child in children]
            try:
                asyncio.run(_round(open_store(), number, won))
                yield Case(fault="two publishers, one ref", where=kind, outcome=f"one won, one Conflict, {RIGHT}")
            except Broken as error:
                yield Case(fault="two publishers, one ref", where=kind, outcome="broken", problem=str(error))
    findings = asyncio.run(verify(open_store()))
    problem = "; ".join(findings.problems)
    yield Case(fault="two publishers, one ref", where=f"{kind}, fsck after all rounds", outcome=RIGHT, problem=problem)


def examine(root: Path, *, wide: bool) -> Generator[Case]:
    """Rounds in which two processes publish different weights from the same state of the ref."""
    yield from _race("directory", lambda: DirectoryStore(root / "store"), 200 if wide else 25, 2)
    with bucket_server() as url:
        yield from _race("S3 (moto)", lambda: bucket_at(url, "race"), 50 if wide else 8, 2)
