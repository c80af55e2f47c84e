"""Rows of every kind, and what is in a log."""

from pathlib import Path
from typing import Any

from ostinato.core.notices import Alarm, AlarmState, Stamp
from ostinato.core.records import (
    Batch,
    Delivered,
    Holdback,
    PolicyVersion,
    Quarantine,
    ReleaseEvent,
    Reward,
    Row,
    Signal,
    Source,
)
from ostinato.record.codec.kinds import KINDS
from ostinato.record.log import SqlLog
from ostinato.testing.records import a_turn

EVERY = {kind.record for kind in KINDS}
V1 = PolicyVersion(number=1, hash="a")


def signal(i: int) -> Signal:
    return Signal(
        id=f"s{i}", turn="t", name="n", value=1.0, source=Source.LLM, occurred_at=float(i), received_at=float(i)
    )


def one_of_each(i: int) -> list[Row]:
    return [
        a_turn(f"t{i}:0"),
        Delivered(id=f"d{i}", turns=(f"t{i}:0",), at=1.0),
        signal(i),
        Reward(turn=f"t{i}:0", value=1.0, function="f", signals=(), at=1.0),
        Quarantine(turn=f"t{i}:0", reason="x", at=1.0),
        Holdback(turn=f"t{i}:0", reason="x", at=1.0),
        Batch(step=i, turns=(), credits=(), reference=V1, at=1.0),
        ReleaseEvent(id=f"r{i}", action="shipped", policy=V1, previous=None, reason="", detail={}, at=1.0),
        Stamp(id=f"c{i}", contract="{}", at=1.0),
        Alarm(id=f"a{i}", name="n", state=AlarmState.RAISED, reason="", at=1.0),
    ]


async def collect(log: SqlLog, after: int = 0, kinds: set[type] = EVERY) -> list[tuple[int, Row]]:
    return [item async for item in log.read(after, kinds)]


def firsts(directory: Path) -> list[int]:
    """The first row of each segment that is there."""
    return sorted(int(path.stem) for path in directory.glob("0*.db"))


def limit_pages(log: SqlLog, pages: int | None) -> None:
    """Let the open segment grow no further than `pages` (SQLite itself answers SQLITE_FULL); None lifts the limit."""
    appender = log._appender
    opened = appender._open_newest

    def limited() -> Any:
        head = opened()
        head.segment.db.execute(f"PRAGMA max_page_count={pages or 2**30}")
        return head

    appender._open_newest = limited  # type: ignore[method-assign]
    appender._forget_head()


def when_trained(log: SqlLog) -> None:
    """Wait for the dictionaries whose training has begun."""
    head = log._appender._head
    assert head is not None
    for thread in head._training._begun.values():
        thread.join()
