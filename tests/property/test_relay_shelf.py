"""A relay under a cap, against a model of what the objects used least recently are."""

import asyncio
import tempfile
from collections import OrderedDict
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from ostinato.testing.store import MemoryStore, WatchedStore
from ostinato.weights.relay import RelayConfig, RelayStore
from ostinato.weights.store.directory import DirectoryStore, Disk

CAP = 100


class QuickDisk(Disk):
    def fsync(self, fd):
        """Durability is not what is tested here."""


@example(  # the file system's clock is behind ours: what was put last seemed older than what was read before
    sizes=[44, 0, 56, 0],
    steps=[(0, "get"), (0, "get"), (0, "get"), (0, "get"), (4, "open"), (5, "get"), (0, "restart"), (2, "get")],
)
@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 45), min_size=3, max_size=6),
    steps=st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from(["get", "get", "open", "open", "restart"])),
        min_size=10,
        max_size=40,
    ),
)
def test_a_relay_keeps_what_was_used_last_and_never_more_than_its_cap(sizes, steps):
    async def play(root: Path) -> None:
        upstream = WatchedStore(MemoryStore())
        data = [bytes([n]) * size + b"%d" % n for n, size in enumerate(sizes)]
        names = [await upstream.put(each) for each in data]
        config = RelayConfig().model_copy(update={"max_bytes": CAP})
        store = RelayStore(upstream, DirectoryStore(root, QuickDisk()), config)
        kept: OrderedDict[str, int] = OrderedDict()
        fetched = 0
        for number, how in steps:
            name, want = names[number % len(names)], data[number % len(names)]
            if how == "restart":
                store = RelayStore(upstream, DirectoryStore(root, QuickDisk()), config)
                continue
            if how == "get":
                assert await store.get(name) == want
            else:
                async with store.opened(name) as path:
                    assert path.read_bytes() == want
            if name not in kept:
                fetched += 1
                while sum(kept.values()) + len(want) > CAP:
                    kept.popitem(last=False)
                kept[name] = len(want)
            kept.move_to_end(name)
            there = {path.parent.name + path.name for path in (root / "objects").glob("*/*")}
            assert there == set(kept)
            assert store.figures()["bytes"] == sum(kept.values()) <= CAP
        assert sum(upstream.gets.values()) == fetched

    with tempfile.TemporaryDirectory() as root:
        asyncio.run(play(Path(root)))
