"""A follower of the log: its snapshots are used where the log continues them, and never elsewhere."""

import json

import pytest

from ostinato.core.errors import StorageFull
from ostinato.core.fold import FoldFollower
from ostinato.core.records import Signal, Turn
from ostinato.testing.log import MemoryFolds, MemoryLog
from ostinato.testing.records import a_signal, a_turn


class Names:
    """The ids of the turns, in order."""

    kinds = frozenset({Turn})

    def __init__(self, version=1):
        self.version, self.names, self.begun = version, [], []

    async def begin(self, horizon):
        self.names = []
        self.begun.append(horizon)
        return horizon

    def apply(self, seq, row):
        self.names.append(row.id)

    def state(self):
        return {"version": self.version, "names": self.names}

    def restore(self, state):
        if state["version"] != self.version:
            return False
        self.names = list(state["names"])
        return True


def follower(log, folds=None, *, version=1, every=1000, gaps=False):
    return FoldFollower(log, Names(version), name="names", folds=folds, every=every, gaps=gaps)


async def a_log(*names):
    log = MemoryLog()
    for name in names:
        await log.append(a_turn(name), a_signal(a_turn(name), id=f"of-{name}"))
    return log


async def saved(log, **options):
    folds = MemoryFolds()
    first = follower(log, folds, **options)
    await first.catch_up()
    await first.save()
    return folds


async def test_a_follower_goes_on_from_its_snapshot():
    log = await a_log("a", "b")
    folds = await saved(log)
    await log.append(a_turn("c"))
    second = follower(log, folds)
    await second.catch_up()
    assert second.fold.names == ["a", "b", "c"]
    assert second.fold.begun == []
    assert second.cursor == 5


async def test_a_follower_reads_only_the_rows_of_its_kinds_and_yields_them_after_they_were_taken_in():
    reader = follower(await a_log("a", "b"))
    seen = [(row.id, list(reader.fold.names)) async for row in reader.rows()]
    assert seen == [("a", ["a"]), ("b", ["a", "b"])]
    assert Signal not in reader.fold.kinds


@pytest.mark.parametrize("other", [(), ("x", "y"), ("a", "x"), ("a",), ("x", "a", "b")])
async def test_the_snapshot_of_another_log_or_of_a_longer_one_is_read_anew(other):
    folds = await saved(await a_log("a", "b"))
    second = follower(await a_log(*other), folds)
    await second.catch_up()
    assert second.fold.names == list(other)
    assert second.fold.begun == [0]


@pytest.mark.parametrize(
    ("state", "warns"),
    [
        ({"version": 2, "names": [], "last": ["Turn", "b"]}, False),
        ({"version": 1, "last": ["Turn", "b"]}, True),
        ({"version": 1, "names": 7, "last": ["Turn", "b"]}, True),
        ({"version": 1, "names": ["forged"], "last": None}, False),
        ({"version": 1, "names": ["forged"]}, False),
    ],
)
async def test_the_snapshot_of_another_version_or_a_damaged_one_is_read_anew(state, warns, caplog):
    log = await a_log("a", "b")
    folds = await saved(log)
    cursor, _ = folds.kept["names"]
    folds.kept["names"] = (cursor, json.dumps(state))
    second = follower(log, folds)
    await second.catch_up()
    assert second.fold.names == ["a", "b"]
    assert bool(caplog.messages) == warns


@pytest.mark.parametrize(
    ("horizon", "gaps", "names"),
    [
        (3, False, ["a", "b", "c"]),
        (4, False, ["c"]),
        (4, True, ["a", "b", "c"]),
        (2, False, ["a", "b", "c"]),
    ],
)
async def test_a_snapshot_is_used_after_retention_if_it_misses_nothing_or_may(horizon, gaps, names):
    log = await a_log("a", "b")
    folds = await saved(log, gaps=gaps)  # after row 3
    await log.append(a_turn("c"))
    read = log.read

    async def whats_left(after, kinds):
        async for seq, row in read(after, kinds):
            if seq > horizon:
                yield seq, row

    async def dropped():
        return horizon

    log.read, log.horizon = whats_left, dropped
    second = follower(log, folds, gaps=gaps)
    await second.catch_up()
    assert second.fold.names == names


async def test_a_follower_saves_every_so_many_rows_and_never_where_it_only_looks():
    log, folds = await a_log("a", "b", "c"), MemoryFolds()
    await follower(log, folds, every=2).catch_up(saving=False)
    assert folds.kept == {}
    await follower(log, folds, every=2).catch_up()
    cursor, text = folds.kept["names"]
    assert (cursor, json.loads(text)["names"]) == (3, ["a", "b"])


async def test_what_a_full_disk_refused_is_saved_later():
    log = await a_log("a")

    class Full(MemoryFolds):
        full = True

        async def save(self, name, cursor, state):
            if self.full:
                raise StorageFull("no room; free space")
            await super().save(name, cursor, state)

    folds = Full()
    reader = follower(log, folds)
    await reader.catch_up()
    with pytest.raises(StorageFull):
        await reader.save()
    folds.full = False
    await reader.save()
    assert folds.kept["names"][0] == 1
    folds.kept.clear()
    await reader.save()
    assert folds.kept == {}, "there is no news"


async def test_a_follower_that_stops_midway_goes_on_with_the_next_row():
    reader = follower(await a_log("a", "b", "c"))
    async for row in reader.rows():
        if row.id == "b":
            break
    await reader.catch_up()
    assert reader.fold.names == ["a", "b", "c"]
