"""Reads a log in Postgres, from any cursor."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any, LiteralString, TypeVar, cast

import psycopg

from ostinato.core.records import Identity, Row, Turn
from ostinato.core.seams import Cursor
from ostinato.record.codec.kinds import TURNS, Kind
from ostinato.record.keys import KeyRing
from ostinato.record.postgres.schema import table_of
from ostinato.record.postgres.segment import KeptRows, PostgresSegment
from ostinato.record.postgres.server import Connection, LogServer, ask_at_once, digest_of, passes
from ostinato.record.reader import PAGE, Found

_OPEN = 6
_STANDING: LiteralString = "SELECT max(first) FROM segments; SELECT coalesce(max(seq), {below}) FROM {rows}"
_BEGIN: LiteralString = (
    "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SELECT first, layout FROM segments ORDER BY first"
)
T = TypeVar("T")


class PostgresReader:
    """Answers queries about the log, each as of one moment. Thread-safe; one query at a time. Never blocks a writer."""

    def __init__(self, server: LogServer, ring: KeyRing | None) -> None:
        self._server = server
        self._ring = ring
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self.heard = 0.0  # when the server answered last, on the monotonic clock
        self._segments: OrderedDict[Cursor, PostgresSegment] = OrderedDict()
        self._layouts: dict[Cursor, int] = {}

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._leave()

    def newest(self) -> Cursor:
        """The place of the newest row, or the horizon if no row is above it. One round trip if the newest segment is known."""
        return self._again(self._newest)

    def horizon(self) -> Cursor:
        """The place up to which retention has dropped rows, apart from the permanent ones; 0 if there is none."""
        return self._ask(lambda firsts: firsts[0] - 1)

    def page(self, kinds: Collection[Kind], after: Cursor, end: Cursor) -> tuple[Found, Cursor]:
        """The next rows above `after` of these kinds, in order, and the place up to which no row is left unread."""
        return self._again(lambda: self._page(self._firsts(), kinds, after, end))

    def find(self, kind: Kind, identities: Sequence[Identity]) -> dict[Identity, Row]:
        """The rows with these identities, as far as they exist. One round trip if none exists, because most calls and signals are new."""
        return self._again(lambda: self._find(kind, identities))

    def places(self, kind: Kind, identities: Sequence[Identity]) -> dict[Identity, Cursor]:
        """The places of the rows with these identities, as far as they exist."""
        return self._again(lambda: self._places(kind, identities))

    def owners(self, turns: Sequence[str]) -> dict[str, tuple[str, str]]:
        """The tenant and the user of each of these turns, as far as they exist."""
        found = cast("dict[Identity, Turn]", self.find(TURNS, [(turn,) for turn in turns]))
        return {turn.id: (turn.tenant, turn.user) for turn in found.values()}

    def tail(self, n: int, kinds: Collection[Kind]) -> Found:
        """The newest `n` rows of these kinds, in log order."""
        return self._ask(lambda firsts: self._tail(firsts, n, kinds))

    def before_last(self, count: int, kind: Kind) -> Cursor:
        """The place above which the newest `count` (at least 1) rows of a kind lie; 0 if there are fewer."""
        return self._ask(lambda firsts: self._before_last(firsts, count, kind))

    # ------------------------------------------------------------ one query

    def _ask(self, question: Callable[[list[Cursor]], T]) -> T:
        """Run a query in one snapshot. `question` receives the first rows of the segments."""
        return self._again(lambda: self._in_snapshot(question))

    def _again(self, ask: Callable[[], T]) -> T:
        """Run a query, again if a segment was dropped meanwhile or the connection was lost."""
        deadline = time.monotonic() + self._server.wait_s
        with self._lock:
            while True:
                try:
                    if self._ring is not None:
                        self._ring.refresh()
                    answer = ask()
                    self._hear()
                    return answer
                except psycopg.Error as error:
                    self._leave()
                    dropped = isinstance(error, psycopg.errors.UndefinedTable)
                    if not (dropped or passes(error)) or time.monotonic() > deadline:
                        raise self._server.refusal(error) from error
                except BaseException:
                    self._leave()
                    raise

    def _dialled(self) -> Connection:
        self._connection = self._connection or self._server.dial()
        return self._connection

    def _in_snapshot(self, question: Callable[[list[Cursor]], T]) -> T:
        connection = self._dialled()
        _, listing = ask_at_once(connection, _BEGIN)
        answer = question(self._listed(listing))
        connection.execute("COMMIT")
        return answer

    def _leave(self) -> None:
        self._segments.clear()
        if self._connection is not None:
            with suppress(psycopg.Error):
                self._connection.close()
            self._connection = None

    def _newest(self) -> Cursor:
        """The place of the newest row. If the known segment is still the newest, it holds the newest row, and no snapshot is needed."""
        connection, known = self._dialled(), max(self._segments, default=None)
        if known is not None:
            ((newest,),), ((place,),) = ask_at_once(connection, _STANDING, below=known - 1, rows=table_of(known))
            if newest == known:
                return place
        return self._in_snapshot(lambda firsts: self._segment(firsts[-1]).standing())

    def _asked(self, query: LiteralString, values: Sequence[Any]) -> list[Any]:
        found = self._dialled().execute(query, values, binary=True).fetchall()
        self._hear()
        return found

    def _hear(self) -> None:
        self.heard = time.monotonic()

    def _firsts(self) -> list[Cursor]:
        return self._listed(self._asked("SELECT first, layout FROM segments ORDER BY first", ()))

    def _listed(self, segments: Sequence[Any]) -> list[Cursor]:
        """The segments' first rows; notes their layouts."""
        self._layouts = dict(segments)
        return list(self._layouts)

    def _segment(self, first: Cursor) -> PostgresSegment:
        assert self._connection is not None
        segment, layout = self._segments.pop(first, None), self._layouts[first]
        if segment is None:
            segment = PostgresSegment(self._connection, self._server.name, first, self._ring, layout, self._hear)
        segment.layout = layout  # that of an empty segment changes
        self._segments[first] = segment
        if len(self._segments) > _OPEN:
            self._segments.popitem(last=False)
        return segment

    def _kept(self) -> KeptRows:
        assert self._connection is not None
        return KeptRows(self._connection, self._server.name)

    def _page(self, firsts: list[Cursor], kinds: Collection[Kind], after: Cursor, end: Cursor) -> tuple[Found, Cursor]:
        """Read a page without a snapshot, like `_find`: all rows up to `end` are in segments of the listing, which is newer."""
        index = bisect_right(firsts, after + 1) - 1
        if index < 0:
            upto = min(end, firsts[0] - 1)
            rows = self._kept().fetch_kinds([kind for kind in kinds if kind.for_ever], after, upto, PAGE)
            decode = self._kept().decode
        else:
            following = firsts[index + 1 : index + 2]
            upto = min(end, following[0] - 1) if following else end
            segment = self._segment(firsts[index])
            rows, decode = segment.fetch_kinds(kinds, after, upto, PAGE), segment.decode
        by_kind: dict[str, list[Cursor]] = defaultdict(list)
        for kind, stored in rows:
            by_kind[kind.table].append(stored[0])
        upto = min([upto, *(places[-1] for places in by_kind.values() if len(places) == PAGE)])
        return [(stored[0], decode(kind, stored)) for kind, stored in rows if stored[0] <= upto], upto

    def _places(self, kind: Kind, identities: Sequence[Identity]) -> dict[Identity, Cursor]:
        digests = {digest_of(kind, identity): identity for identity in identities}
        query: LiteralString = "SELECT identity, seq FROM identities WHERE identity = ANY(%s::uuid[])"
        return {digests[digest]: seq for digest, seq in self._asked(query, (list(digests),))} if digests else {}

    def _find(self, kind: Kind, identities: Sequence[Identity]) -> dict[Identity, Row]:
        """Find rows without a snapshot: rows never change, and the segments, listed after the places were found, hold them all."""
        places = self._places(kind, identities)
        if not places:
            return {}
        firsts = self._firsts()
        by_segment: dict[int, list[Cursor]] = defaultdict(list)
        for seq in sorted(places.values()):
            by_segment[bisect_right(firsts, seq) - 1].append(seq)
        found: dict[Cursor, Row] = {}
        for index, seqs in by_segment.items():
            home = self._segment(firsts[index]) if index >= 0 else self._kept()
            found |= {stored[0]: home.decode(kind, stored) for kind, stored in home.fetch_places(seqs)}
        return {identity: found[seq] for identity, seq in places.items() if seq in found}

    def _tail(self, firsts: list[Cursor], n: int, kinds: Collection[Kind]) -> Found:
        found: Found = []
        for first in reversed(firsts):
            if len(found) >= n:
                break
            segment = self._segment(first)
            rows = segment.fetch_kinds(kinds, 0, _END, n - len(found), newest_first=True)
            found += [(stored[0], segment.decode(kind, stored)) for kind, stored in rows[: n - len(found)]]
        if len(found) < n:
            older, kept = [kind for kind in kinds if kind.for_ever], self._kept()
            rows = kept.fetch_kinds(older, 0, _END, n - len(found), newest_first=True)[: n - len(found)]
            found += [(stored[0], kept.decode(kind, stored)) for kind, stored in rows]
        return sorted(found, key=lambda item: item[0])

    def _before_last(self, firsts: list[Cursor], count: int, kind: Kind) -> Cursor:
        homes = [lambda first=first: self._segment(first) for first in reversed(firsts)]
        for home in (*homes, self._kept):
            place, found = home().before_last(count, kind)
            if place is not None:
                return place
            count -= found
        return 0


_END = (1 << 63) - 1
