"""Reads the log across its segments, from any cursor on."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from ostinato.core.errors import StorageFull
from ostinato.core.records import Identity, Row
from ostinato.core.seams import Cursor
from ostinato.record.codec.kinds import TURNS, Kind, key_of
from ostinato.record.keys import KeyRing
from ostinato.record.segment import END, Segment, SegmentGone
from ostinato.record.segment_directory import LogDirectory, OpenSegments, SegmentFilters
from ostinato.record.sqlite import driver, is_busy, translate

PAGE = 256  # rows of each kind read at once
_WAIT_S = 5.0  # a reader waits only while a database is being recovered or checkpointed

Found = list[tuple[Cursor, Row]]
T = TypeVar("T")


class LogReader:
    """Answers queries about the log. Thread-safe: one query at a time. Never blocks a writer."""

    def __init__(self, directory: LogDirectory, ring: KeyRing | None, sealed: SegmentFilters) -> None:
        self._directory = directory
        self._ring = ring
        self._segments = OpenSegments(directory, ring, sealed)
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            self._segments.close()

    def newest(self) -> Cursor:
        """Return the sequence number of the newest row; 0 for an empty log."""
        return self._ask(lambda: self._segments.newest().newest())

    def horizon(self) -> Cursor:
        """Return the sequence number up to which retention has dropped rows, apart from permanent ones; 0 if none."""
        return self._ask(lambda: self._segments.listing(again=True).horizon)

    def page(self, kinds: Collection[Kind], after: Cursor, end: Cursor) -> tuple[Found, Cursor]:
        """Return the next rows of these kinds above `after`, in order, and the cursor up to which all of them have been read."""
        return self._ask(lambda: self._page(kinds, after, end))

    def find(self, kind: Kind, identities: Sequence[Identity]) -> dict[Identity, Row]:
        """Return the rows with these identities, without unknown ones."""
        return self._ask(lambda: self._find(kind, identities, lambda segment, place: segment.row(kind, place)))

    def places(self, kind: Kind, identities: Sequence[Identity]) -> dict[Identity, Cursor]:
        """Return the sequence numbers of the rows with these identities, without unknown ones."""
        return self._ask(lambda: self._find(kind, identities, lambda _, place: place))

    def owners(self, turns: Sequence[str]) -> dict[str, tuple[str, str]]:
        """Return the tenant and the user of each of these turns, without unknown ones. Decrypts nothing."""
        identities = [(turn,) for turn in turns]
        found = self._ask(lambda: self._find(TURNS, identities, lambda segment, place: segment.owner(place)))
        return {str(turn): owner for (turn, *_), owner in found.items()}

    def tail(self, n: int, kinds: Collection[Kind]) -> Found:
        """Return the newest `n` rows of these kinds, in log order."""
        return self._ask(lambda: self._tail(n, kinds))

    def before_last(self, count: int, kind: Kind) -> Cursor:
        """Return the cursor above which the newest `count` (>= 1) rows of a kind lie; 0 if there are fewer. Decodes no row."""
        return self._ask(lambda: self._before_last(count, kind))

    # ------------------------------------------------------------ queries

    def _ask(self, question: Callable[[], T]) -> T:
        """Run a query. Retry if a segment was dropped in the meantime or a database is being recovered."""
        deadline = time.monotonic() + _WAIT_S
        with self._lock:
            while True:
                try:
                    if self._ring is not None:
                        self._ring.refresh()
                    return question()
                except SegmentGone:
                    continue
                except driver.Error as error:
                    if not is_busy(error) or time.monotonic() > deadline:
                        raise translate(error, self._directory.path) from error
                except OSError as error:
                    raise StorageFull(f"{self._directory.path} cannot be read: {error}; repair the disk") from error

    def _page(self, kinds: Collection[Kind], after: Cursor, end: Cursor) -> tuple[Found, Cursor]:
        listing = self._segments.listing()
        index = bisect_right(listing.firsts, after + 1) - 1
        if index < 0:
            upto, kept = min(end, listing.horizon), self._segments.kept()
            older = [kind for kind in kinds if kind.for_ever]
            return ([], upto) if kept is None else _rows(kept, older, after, upto)
        following = listing.firsts[index + 1 : index + 2]
        upto = min(end, following[0] - 1) if following else end
        segment = self._segments.get(listing.firsts[index])
        return _rows(segment, _present(segment, kinds), after, upto)

    def _newest_first(self) -> Iterator[Segment]:
        newest = self._segments.newest()
        for first in reversed(self._segments.listing().firsts):
            yield newest if first == newest.first else self._segments.get(first)

    def _find(
        self, kind: Kind, identities: Sequence[Identity], look: Callable[[Segment, Cursor], T | None]
    ) -> dict[Identity, T]:
        """Return the results of `look` for the rows with these identities, without None."""
        keys = {identity: key_of(kind, identity) for identity in identities}

        def seen(segment: Segment, wanted: Collection[Identity]) -> dict[Identity, T]:
            places = {identity: segment.place(kind, identity, keys[identity])[0] for identity in wanted}
            looks = {identity: look(segment, place) for identity, place in places.items() if place is not None}
            return {identity: found for identity, found in looks.items() if found is not None}

        found = seen(self._segments.newest(), keys)
        wanted = [identity for identity in keys if identity not in found]
        if wanted and len(self._segments.listing().firsts) > 1:
            self._segments.learn_filters()
            holding = self._segments.sealed.holding([keys[identity] for identity in wanted])
            for identity in wanted:
                for first in holding.get(keys[identity], ()):
                    if identity in found:
                        break
                    with suppress(SegmentGone):  # its row was dropped, or is now among the permanent rows
                        found |= seen(self._segments.get(first), [identity])
        kept = self._segments.kept() if kind.for_ever and len(found) < len(keys) else None
        if kept is not None:
            found |= seen(kept, [identity for identity in keys if identity not in found])
        return found

    def _tail(self, n: int, kinds: Collection[Kind]) -> Found:
        found: Found = []
        for segment in self._newest_first():
            found += _last(segment, _present(segment, kinds), n - len(found))
            if len(found) >= n:
                break
        kept = self._segments.kept() if len(found) < n else None
        if kept is not None:
            older = [kind for kind in kinds if kind.for_ever]
            found += _last(kept, older, n - len(found), self._segments.listing().horizon)
        return sorted(found, key=lambda item: item[0])

    def _before_last(self, count: int, kind: Kind) -> Cursor:
        for segment in self._newest_first():
            if _present(segment, [kind]):
                place, found = segment.before_last(count, kind)
                if place is not None:
                    return place
                count -= found
        kept = self._segments.kept() if kind.for_ever else None
        # a segment that is about to be dropped has its permanent rows in both files, so count only up to the horizon
        return 0 if kept is None else kept.before_last(count, kind, self._segments.listing().horizon)[0] or 0


def _place(item: tuple[Kind, Any]) -> Cursor:
    return item[1][0]


def _present(segment: Segment, kinds: Collection[Kind]) -> list[Kind]:
    seal = segment.seal()
    return [kind for kind in kinds if seal is None or kind.table in seal.tables]


def _rows(segment: Segment, kinds: Collection[Kind], after: Cursor, upto: Cursor) -> tuple[Found, Cursor]:
    """Return a page of one segment's rows, in order, and the cursor up to which it reaches."""
    stored: list[tuple[Kind, Any]] = []
    for kind in kinds:
        rows = segment.fetch(kind, after, upto, PAGE)
        if len(rows) == PAGE:
            upto = rows[-1][0]
        stored += [(kind, row) for row in rows]
    chosen = sorted((each for each in stored if _place(each) <= upto), key=_place)
    return [(row[0], segment.decode(kind, row)) for kind, row in chosen], upto


def _last(segment: Segment, kinds: Collection[Kind], n: int, end: Cursor = END) -> Found:
    stored = [(kind, row) for kind in kinds for row in segment.fetch(kind, 0, end, n, newest_first=True)]
    chosen = sorted(stored, key=_place, reverse=True)[:n]
    return [(row[0], segment.decode(kind, row)) for kind, row in chosen]
