"""The open segments of a log reader or writer: those used most recently."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress

from ostinato.core.seams import Cursor
from ostinato.record.keys import KeyRing
from ostinato.record.segments.directory import Listing, LogDirectory
from ostinato.record.segments.filters import SealedKeys, build
from ostinato.record.segments.segment import Segment, SegmentGone

_OPEN = 6


class OpenSegments:
    """Opens segments for reading, and closes the least recently used ones. Used by one thread at a time.

    The filters of closed segments are added to `sealed` by `learn_filters`.
    """

    def __init__(self, directory: LogDirectory, ring: KeyRing | None, sealed: SealedKeys) -> None:
        self.directory = directory
        self.sealed = sealed
        self._ring = ring
        self._open: OrderedDict[Cursor, Segment] = OrderedDict()
        self._kept: Segment | None = None
        self._listing = Listing(())

    def close(self) -> None:
        """Close all segments."""
        while self._open:
            self._open.popitem()[1].close()
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def listing(self, *, again: bool = False) -> Listing:
        """The segments found when the directory was last read; with `again` it is read anew."""
        if again or not self._listing.firsts:
            self._listing = self.directory.listing()
            for first in set(self._open).difference(self._listing.firsts):
                self._open.pop(first).close()
        return self._listing

    def get(self, first: Cursor) -> Segment:
        """A segment by its first row. Raises SegmentGone, after reading the listing anew."""
        segment = self._open.pop(first, None)
        if segment is None:
            try:
                segment = Segment(self.directory.segment(first), self._ring)
            except SegmentGone:
                self.sealed.drop(first)
                self.listing(again=True)
                raise
        self._open[first] = segment
        if len(self._open) > _OPEN:
            self._open.popitem(last=False)[1].close()
        return segment

    def newest(self) -> Segment:
        """The newest segment: the one that rows are appended to, or a closed one that has no successor yet."""
        while True:
            with suppress(SegmentGone):
                segment = self.get(self.listing().firsts[-1])
                if segment.seal() is None or self.listing(again=True).firsts[-1] == segment.first:
                    return segment

    def kept(self) -> Segment | None:
        """The permanent rows of dropped segments; None if there are none yet."""
        if self._kept is None:
            with suppress(SegmentGone):
                self._kept = Segment(self.directory.kept, self._ring)
        return self._kept

    def learn_filters(self) -> None:
        """Read the filters of the closed segments that have not been read yet."""
        for first in self.sealed.missing(self.listing().firsts[:-1]):
            with suppress(SegmentGone):
                segment = Segment(self.directory.segment(first), self._ring)
                try:
                    self.sealed.add(first, segment.filter() or build([]))
                finally:
                    segment.close()
