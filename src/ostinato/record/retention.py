"""Drops old segments. What the steps, releases, contracts and alarms were is copied out first, durably, and stays for ever."""

from __future__ import annotations

from contextlib import suppress

from ostinato.core.errors import StorageFull
from ostinato.core.seams import Cursor
from ostinato.record.codec.kinds import FOR_EVER, Kind
from ostinato.record.codec.rows import prepare
from ostinato.record.codec.shrink import Use
from ostinato.record.reader import PAGE
from ostinato.record.segments import schema
from ostinato.record.segments.directory import LogDirectory
from ostinato.record.segments.segment import Segment, SegmentGone
from ostinato.record.sqlite import driver, is_busy, sync_directory, translate

DAY_S = 86_400.0


def drop_segments(directory: LogDirectory, now: float, retain_days: float, keep_after: Cursor) -> int:
    """Drop the segments that were closed more than `retain_days` ago and have no row above `keep_after`; how many.

    The oldest first, and none out of turn, so that what is left has no gap. Safe beside readers, writers, other callers and kill -9: a
    segment's file goes after its rows that stay are on the disk elsewhere, and until then it counts. A segment in use is left for
    the next call.

    Raises StorageFull, Unavailable, Corrupt; what was dropped until then is dropped.
    """
    dropped = 0
    try:
        directory.sweep()
        firsts = directory.listing().firsts
        for first in firsts[:-1]:
            if not _drop(directory, first, now - retain_days * DAY_S, keep_after):
                break
            dropped += 1
    except driver.Error as error:
        if not is_busy(error):
            raise translate(error, directory.path) from error
    except OSError as error:
        raise StorageFull(f"{directory.path} could not be thinned: {error}; free space, then try again") from error
    return dropped


def _drop(directory: LogDirectory, first: Cursor, before: float, keep_after: Cursor) -> bool:
    try:
        segment = Segment(directory.segment(first), None, write=True)
    except SegmentGone:  # another process was quicker
        return True
    try:
        seal = segment.seal()
        # before the newest, only one that a process left which was stopped while it made it is open: it is empty
        needed = segment.newest() >= first if seal is None else seal.at >= before or seal.last > keep_after
        if needed or not _put_away(segment):
            return False
        if seal is not None:
            _copy(directory, segment, [kind for kind in FOR_EVER if kind.table in seal.tables], seal.last)
    finally:
        segment.close()
    directory.drop(first)
    sync_directory(directory.path)
    return True


def _put_away(segment: Segment) -> bool:
    """Bring all of a segment into its one file, so that who has it open goes on reading all of it when its name is gone."""
    busy, _, _ = segment.db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return not busy


def _copy(directory: LogDirectory, segment: Segment, kinds: list[Kind], last: Cursor) -> None:
    """Bring the rows that stay for ever into the file of such rows, each in its place. Those that are there stay as they are."""
    if not kinds:
        return
    schema.create(directory.kept, 0, 0.0)
    kept = Segment(directory.kept, None, write=True)
    try:
        kept.db.execute("BEGIN IMMEDIATE")
        for kind in kinds:
            after = 0
            while rows := segment.fetch(kind, after, last, PAGE):
                after = rows[-1][0]
                for stored in rows:
                    ready = prepare(segment.decode(kind, stored))
                    place, key = kept.place(kind, ready.identity, ready.key)
                    if place is None:
                        body = kept.shrinker.pack(Use.ROWS, ready.body)
                        kept.db.execute("INSERT INTO identities VALUES (?, ?)", (key, stored[0]))
                        kept.db.execute(f"INSERT INTO {kind.table} VALUES (?, ?)", (stored[0], body))
        kept.db.execute("COMMIT")
        with suppress(driver.Error):
            kept.db.execute("PRAGMA wal_checkpoint(PASSIVE)")
    finally:
        kept.close()
