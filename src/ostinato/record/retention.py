"""Drops old segments. Rows of permanent kinds (`FOR_EVER`) are first copied, durably, to a file that is kept for ever."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress

from ostinato.core.errors import Corrupt, StorageFull
from ostinato.core.files import sync_directory
from ostinato.core.records import Row
from ostinato.core.seams import Cursor
from ostinato.record.codec.kinds import FOR_EVER, Kind
from ostinato.record.codec.shrink import Use
from ostinato.record.codec.turns import prepare
from ostinato.record.reader import PAGE
from ostinato.record.segment import Segment, SegmentGone, create_segment, open_segment
from ostinato.record.segment_directory import LogDirectory
from ostinato.record.sqlite import driver, is_busy, transaction, translate

DAY_S = 86_400.0


def drop_segments(directory: LogDirectory, now: float, retain_days: float, keep_after: Cursor) -> int:
    """Drop the segments that were closed more than `retain_days` ago and have no row above `keep_after`; return how many.

    Segments are dropped strictly oldest first, so that the log has no gap. Safe alongside readers, writers, other callers and kill -9:
    a segment's file is deleted only after its permanent rows are durable elsewhere, and counts until then. A segment in use is left for
    the next call. `closed_at` decides when a segment was closed.

    Raises StorageFull, Unavailable, Corrupt; segments dropped before the error stay dropped.
    """
    dropped, before = 0, now - retain_days * DAY_S
    try:
        directory.sweep()
        firsts = directory.listing().firsts
        closed = closed_at([_seal_of(directory, first) for first in firsts], now)
        for first, at in zip(firsts[:-1], closed, strict=False):
            if not _drop(directory, first, keep_after, old=at is not None and at < before):
                break
            dropped += 1
    except driver.Error as error:
        if not is_busy(error):
            raise translate(error, directory.path) from error
    except OSError as error:
        raise StorageFull(
            f"old rows of {directory.path} could not be dropped: {error}; free space, then try again"
        ) from error
    return dropped


def closed_at(seals: Sequence[float | None], now: float) -> list[float | None]:
    """Return the latest time at which each segment can have been closed, oldest first; None if unknown. `seals` are the recorded times.

    The clock may have been ahead or behind for a while. Times in the future are ignored; of the rest, the longest non-decreasing
    subsequence is believed. A segment whose time is not believed counts as closed when the next believed one was. Thus a single seal of
    2030 delays no other segment, and a single seal of 1970 makes no other segment old.

    Example: ``closed_at([1.0, 9.0, 3.0, 0.5, 4.0, 99.0, None], now=50.0) == [1.0, 3.0, 3.0, 4.0, 4.0, None, None]``
    """
    times = {place: at for place, at in enumerate(seals) if at is not None and at <= now}
    believed = _in_order(times)
    found: list[float | None] = []
    following: float | None = None
    for place in reversed(range(len(seals))):
        following = times[place] if place in believed else following
        found.append(following)
    return found[::-1]


def _in_order(times: Mapping[int, float]) -> set[int]:
    """Return the indices of the longest ordered subsequence. Ties prefer late times: better to keep a segment too long than to lose it."""
    # latest[n - 1]: the latest time, negated, that an ordered set of n times can begin with
    latest: list[float] = []
    begins: list[int] = []  # the index of that time
    follows: dict[int, int | None] = {}
    for place, at in sorted(times.items(), reverse=True):
        many = bisect_right(latest, -at)
        follows[place] = begins[many - 1] if many else None
        latest[many : many + 1] = [-at]
        begins[many : many + 1] = [place]
    chosen: set[int] = set()
    place = begins[-1] if begins else None
    while place is not None:
        chosen.add(place)
        place = follows[place]
    return chosen


def _seal_of(directory: LogDirectory, first: Cursor) -> float | None:
    """Return when a segment records that it was closed; None if it is open, gone or damaged (damage is reported when it is dropped)."""
    try:
        with open_segment(directory.segment(first)) as segment:
            seal = segment.seal()
    except (SegmentGone, Corrupt):
        return None
    return None if seal is None else seal.at


def _drop(directory: LogDirectory, first: Cursor, keep_after: Cursor, *, old: bool) -> bool:
    try:
        with open_segment(directory.segment(first), write=True) as segment:
            seal = segment.seal()
            # an open segment before the newest is empty: a process was killed while creating it
            needed = segment.newest() >= first if seal is None else not old or seal.last > keep_after
            if needed or not _checkpoint(segment):
                return False
            if seal is not None:
                _copy(directory, segment, [kind for kind in FOR_EVER if kind.table in seal.tables], seal.last)
    except SegmentGone:  # another process dropped it
        return True
    directory.drop(first)
    sync_directory(directory.path)
    return True


def _checkpoint(segment: Segment) -> bool:
    """Move a segment's WAL into its file, so that readers that have it open see all of it after the unlink. False if it is in use."""
    busy, _, _ = segment.db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return not busy


def _copy(directory: LogDirectory, segment: Segment, kinds: list[Kind], last: Cursor) -> None:
    """Copy a segment's permanent rows into the file of permanent rows, with their sequence numbers."""
    for kind in kinds:
        after = 0
        while rows := segment.fetch(kind, after, last, PAGE):
            after = rows[-1][0]
            keep_rows(directory, [(stored[0], segment.decode(kind, stored)) for stored in rows])


def keep_rows(directory: LogDirectory, rows: Sequence[tuple[Cursor, Row]]) -> None:
    """Write rows into the file of permanent rows, with their sequence numbers. Existing rows stay as they are."""
    create_segment(directory.kept, 0, 0.0)
    with closing(Segment(directory.kept, None, write=True)) as kept:
        with transaction(kept.db):
            if not kept.is_current:
                kept.upgrade()
            for seq, row in rows:
                ready = prepare(row)
                place, key = kept.place(ready.kind, ready.identity, ready.key)
                if place is None:
                    body = kept.shrinker.pack(Use.ROWS, ready.body)
                    kept.db.execute("INSERT INTO identities VALUES (?, ?)", (key, seq))
                    kept.db.execute(f"INSERT INTO {ready.kind.table} VALUES (?, ?)", (seq, body))
        with suppress(driver.Error):
            kept.db.execute("PRAGMA wal_checkpoint(PASSIVE)")
