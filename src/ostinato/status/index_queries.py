"""Queries on the page's index, and their threads. Each query has a deadline, uses the SQL indexes and returns one page of rows."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ostinato.core.errors import OstinatoError, Unavailable
from ostinato.core.records import PolicyVersion
from ostinato.core.seams import Cursor
from ostinato.record.sqlite import connect, driver, is_busy
from ostinato.status.log_index import REWARDED, TRAINED, WAITING
from ostinato.status.releases import LedgerEvent, ReleaseLine, ReleaseList

PAGE_ROWS = 50
MOST_COUNTED = 10_000
LONGEST_S = 0.15
"""Deadline of one query."""
THREADS = 2
"""Tenants' pages are made one at a time, which leaves the other thread for the operator."""
_NEWEST = 1_000  # newest turns of a tenant whose outcomes are offered as filters
_INSTRUCTIONS = 2_000  # instructions of SQLite's virtual machine between two checks of the deadline
_EVENT = "seq, id, action, number, hash, previous_number, previous_hash, reason, at, void"
_VERSION = "seq, number, hash, state, verdict, difference, lower, upper, margin, looks, reason, at"
_WORD = re.compile(r"[^\W_]+")
"""Words as the index tokenizes them. Nothing else reaches FTS5, so that a typed query cannot use its operators."""
_T = TypeVar("_T")


class TooWide(OstinatoError):
    """A search that took too long and was stopped."""

    status = 503
    code = "too_wide"


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnQuery:
    """Which turns to list. "" and None mean any. `outcome` is trained, rewarded, waiting, or the reason of a holdback.

    `before` and `after` are cursors: turns older than `before`, or newer than `after`. A tenant's viewer cannot choose `tenant`.
    """

    tenant: str | None = None
    user: str = ""
    arm: str = ""
    version: int | None = None
    outcome: str = ""
    text: str = ""
    before: Cursor | None = None
    after: Cursor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmLine:
    """One change of an alarm. `standing`: the alarm is raised."""

    name: str
    reason: str
    at: float
    standing: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmList:
    """The alarms that are raised now, and a page of past changes, newest first."""

    standing: tuple[AlarmLine, ...]
    rows: tuple[AlarmLine, ...]
    older: Cursor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedTurn:
    """A turn's row in the index. `outcome` is waiting, rewarded, trained, or the reason for which it was held back (`reason`)."""

    seq: Cursor
    id: str
    outcome: str
    value: float | None
    step: int | None

    @property
    def reason(self) -> str | None:
        return None if self.outcome in (WAITING, REWARDED, TRAINED) else self.outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPage:
    """A page of turns, newest first. `count` is capped at `MOST_COUNTED` + 1, its value also if counting took too long."""

    rows: tuple[IndexedTurn, ...]
    older: Cursor | None
    newer: Cursor | None
    count: int
    outcomes: tuple[str, ...]


class IndexQueries:
    """Queries on the index at `path`. Every method opens its own connection, so that threads may call it concurrently."""

    def __init__(self, path: Path, *, longest_s: float = LONGEST_S) -> None:
        self._path, self._longest_s = path, longest_s

    # ------------------------------------------------------------ turns

    def turns(self, query: TurnQuery) -> TurnPage:
        """Return the turns that match a query. Raises TooWide, Unavailable."""
        where, values = _conditions(query)
        with self.open() as db:
            outcomes = tuple(name for (name,) in self._outcomes(db, query.tenant))
            rows = self._page(db, where, values, query)
            older = rows[PAGE_ROWS - 1].seq if len(rows) > PAGE_ROWS and query.after is None else None
            newer = rows[0].seq if rows and query.before is not None else None
            if query.after is not None:
                newer = rows[PAGE_ROWS - 1].seq if len(rows) > PAGE_ROWS else None
                rows = rows[:PAGE_ROWS][::-1]
                older = rows[-1].seq if rows else None
            count = self._count(db, where, values)
        return TurnPage(rows=tuple(rows[:PAGE_ROWS]), older=older, newer=newer, count=count, outcomes=outcomes)

    def turn(self, id: str, tenant: str | None) -> IndexedTurn | None:
        """Return one turn's row; None if the index lacks it or it is another tenant's (`tenant` None: any tenant's)."""
        sql = "SELECT seq, id, outcome, value, step FROM turns WHERE id = ? AND (?2 IS NULL OR tenant = ?2)"
        return next(map(_turn_row, self.rows(sql, id, tenant)), None)

    def signals(self, turns: Mapping[str, str]) -> dict[str, list[tuple[str, str]]]:
        """Return (id, name) of each turn's newest hundred signals, in log order. `turns`: {turn: its tenant}; only its signals count."""
        newest = "SELECT id, name, seq FROM signals WHERE turn = ? AND tenant = ? ORDER BY seq DESC LIMIT 100"
        with self.open() as db:
            return {
                turn: db.execute(f"SELECT id, name FROM ({newest}) ORDER BY seq", (turn, tenant)).fetchall()
                for turn, tenant in turns.items()
            }

    def _outcomes(self, db: Any, tenant: str | None) -> Any:
        """Return the outcomes to filter by; a tenant sees only those of its own newest turns, because others' reasons are confidential."""
        if tenant is None:
            return db.execute("SELECT name FROM outcomes ORDER BY name LIMIT 100")
        newest = "SELECT outcome FROM turns INDEXED BY turns_by_tenant WHERE tenant = ? ORDER BY seq DESC LIMIT ?"
        distinct = f"SELECT DISTINCT outcome FROM ({newest}) WHERE outcome <> ? ORDER BY outcome LIMIT 100"
        return db.execute(distinct, (tenant, _NEWEST, WAITING))

    def _page(self, db: Any, where: str, values: list[Any], query: TurnQuery) -> list[IndexedTurn]:
        at = "words.rowid" if where.startswith("words") else "turns.seq"
        place, order = "", "DESC"
        bounds: list[Any] = []
        if query.after is not None:
            place, order, bounds = f" AND {at} > ?", "ASC", [query.after]
        elif query.before is not None:
            place, bounds = f" AND {at} < ?", [query.before]
        sql = f"SELECT turns.seq, id, outcome, value, step FROM {where}{place} ORDER BY {at} {order} LIMIT {PAGE_ROWS + 1}"
        return [_turn_row(row) for row in db.execute(sql, values + bounds)]

    def _count(self, db: Any, where: str, values: list[Any]) -> int:
        try:
            sql = f"SELECT count(*) FROM (SELECT 1 FROM {where} LIMIT {MOST_COUNTED + 1})"
            return int(db.execute(sql, values).fetchone()[0])
        except driver.OperationalError as error:
            if "interrupted" not in str(error):
                raise
            return MOST_COUNTED + 1

    # ------------------------------------------------------------ the ledger

    def releases(self, before: Cursor | None) -> ReleaseList:
        """Return a page of versions, the last decided first."""
        with self.open() as db:
            sql = f"SELECT {_VERSION} FROM versions WHERE seq < ? ORDER BY seq DESC LIMIT {PAGE_ROWS + 1}"
            found = db.execute(sql, ((1 << 62) if before is None else before,)).fetchall()
            live, previous = self._chain(db)
            counts = dict(db.execute("SELECT action, count(*) FROM events GROUP BY action"))
        rows = [_line(row, live) for row in found[:PAGE_ROWS]]
        older = rows[-1].seq if len(found) > PAGE_ROWS else None
        return ReleaseList(rows=tuple(rows), older=older, counts=counts, live=live, previous=previous)

    def release(
        self, root: str
    ) -> tuple[ReleaseLine, list[LedgerEvent], PolicyVersion | None, PolicyVersion | None] | None:
        """Return one version, its newest hundred events, the live version, and the version that a rollback would restore.

        `root` is "live", "v12" (the newest of that number, since training that went back reuses numbers), or a prefix of the hash. None
        unless exactly one version matches.
        """
        with self.open() as db:
            live, previous = self._chain(db)
            root = live.hash if root == "live" and live is not None else root
            if root.startswith("v"):
                sql = f"SELECT {_VERSION} FROM versions WHERE number = ? ORDER BY seq DESC LIMIT 1"
                found = db.execute(sql, (int(root[1:]),)).fetchall()
            else:
                sql = f"SELECT {_VERSION} FROM versions WHERE hash >= ? AND hash < ? LIMIT 2"
                found = db.execute(sql, (root, root + "\U0010ffff")).fetchall()
            if len(found) != 1:
                return None
            line = _line(found[0], live)
            sql = (
                f"SELECT {_EVENT} FROM events WHERE hash = ?1 UNION SELECT {_EVENT} FROM events WHERE previous_hash = ?1 AND "
                "action = 'rolled_back' ORDER BY seq DESC LIMIT 100"
            )
            events = [_event(row) for row in db.execute(sql, (line.policy.hash,))]
        return line, events, live, previous

    def shipped_since(self, step: int) -> LedgerEvent | None:
        """Return the first release whose training includes this step; None if there is none, or training went back behind it."""
        gone = "SELECT min(first) FROM returns WHERE first > ?1 AND base < ?1"
        sql = (
            f"SELECT {_EVENT} FROM events WHERE action = 'shipped' AND number >= ?1 AND number < ifnull(({gone}), 1 << 62) "
            "ORDER BY number, seq LIMIT 1"
        )
        return next(map(_event, self.rows(sql, step)), None)

    def shipped(self, most: int) -> list[LedgerEvent]:
        """Return the newest releases and rollbacks, the last first."""
        sql = f"SELECT {_EVENT} FROM events WHERE +action IN ('shipped', 'rolled_back') ORDER BY seq DESC LIMIT ?"
        return [_event(row) for row in self.rows(sql, most)]

    def _chain(self, db: Any) -> tuple[PolicyVersion | None, PolicyVersion | None]:
        last = db.execute("SELECT number, hash FROM chain ORDER BY place DESC LIMIT 2").fetchall()
        both = [PolicyVersion(number=number, hash=hash) for number, hash in last]
        return (both[0] if both else None), (both[1] if len(both) > 1 else None)

    # ------------------------------------------------------------ alarms

    def alarms(self, before: Cursor | None) -> AlarmList:
        """Return the alarms that are raised now, and a page of past changes."""
        with self.open() as db:
            last = "SELECT max(seq) FROM alarms GROUP BY name"
            sql = f"SELECT name, reason, at FROM alarms WHERE seq IN ({last}) AND standing ORDER BY at DESC LIMIT 200"
            standing = db.execute(sql).fetchall()
            sql = f"SELECT seq, name, reason, at, standing FROM alarms WHERE seq < ? ORDER BY seq DESC LIMIT {PAGE_ROWS + 1}"
            rows = db.execute(sql, ((1 << 62) if before is None else before,)).fetchall()
        lines = tuple(
            AlarmLine(name=name, reason=why, at=at, standing=bool(up)) for _, name, why, at, up in rows[:PAGE_ROWS]
        )
        return AlarmList(
            standing=tuple(AlarmLine(name=name, reason=reason, at=at, standing=True) for name, reason, at in standing),
            rows=lines,
            older=rows[PAGE_ROWS - 1][0] if len(rows) > PAGE_ROWS else None,
        )

    def alarm(self, name: str) -> tuple[Cursor, bool] | None:
        """Return the cursor of an alarm's last row in the log, and whether the alarm is raised."""
        found = self.rows("SELECT seq, standing FROM alarms WHERE name = ? ORDER BY seq DESC LIMIT 1", name)
        return next(((seq, bool(standing)) for seq, standing in found), None)

    # ------------------------------------------------------------ running a query

    def rows(self, sql: str, *values: Any) -> list[Any]:
        """Return all rows of one query. Raises TooWide, Unavailable."""
        with self.open() as db:
            return db.execute(sql, values).fetchall()

    @contextlib.contextmanager
    def open(self) -> Generator[Any]:
        """Yield a connection whose queries are interrupted at the deadline. Raises TooWide, Unavailable."""
        until = time.monotonic() + self._longest_s
        try:
            db = connect(self._path, write=False)
        except driver.Error as error:
            raise Unavailable(f"the page's index cannot be read now: {error}; try again in a moment") from error
        try:
            db.set_progress_handler(lambda: int(time.monotonic() > until), _INSTRUCTIONS)
            yield db
        except driver.Error as error:
            if "interrupted" in str(error):
                raise TooWide(
                    f"this search took longer than {1e3 * self._longest_s:.0f} ms and was stopped: name a user, an arm, a version or "
                    "an outcome"
                ) from error
            why = "is being written" if is_busy(error) else f"cannot be read: {error}"
            raise Unavailable(f"the page's index {why}; try again in a moment") from error
        finally:
            db.close()


def match_of(text: str) -> str:
    """Return typed text as an FTS5 query in which every word must occur; "" if there is no word.

    It does not search for prefixes of words, because FTS5 would collect all matches before returning the newest.
    """
    return " ".join(f'"{word}"' for word in _WORD.findall(text))


def _conditions(query: TurnQuery) -> tuple[str, list[Any]]:
    """Return the tables and conditions of a query, and the values of its placeholders. The narrowest filter determines the SQL index."""
    asked: Mapping[str, Any] = {
        "user": query.user or None,
        "version": query.version,
        "outcome": query.outcome or None,
        "tenant": query.tenant,
        "arm": query.arm or None,
    }
    chosen = {name: value for name, value in asked.items() if value is not None}
    parts, values = [f"turns.{name} = ?" for name in chosen], list(chosen.values())
    # with the tenant in the index, the time of a tenant's search does not depend on other tenants' users of the same name
    narrowest = "tenant_user" if {"tenant", "user"} <= chosen.keys() else next(iter(chosen), "")
    tables = f"turns INDEXED BY turns_by_{narrowest}" if narrowest else "turns"
    if match := match_of(query.text):
        tables = (
            f"{tables} CROSS JOIN words ON words.rowid = turns.seq"
            if query.user
            else "words CROSS JOIN turns ON turns.seq = words.rowid"
        )
        parts, values = ["words MATCH ?", *parts], [match, *values]
    return f"{tables} WHERE {' AND '.join(parts) or 'TRUE'}", values


def _turn_row(row: Sequence[Any]) -> IndexedTurn:
    seq, id, outcome, value, step = row
    return IndexedTurn(seq=seq, id=id, outcome=outcome, value=value, step=step)


def _event(row: Sequence[Any]) -> LedgerEvent:
    seq, id, action, number, hash, before, before_hash, reason, at, void = row
    policy = PolicyVersion(number=number, hash=hash)
    previous = None if before_hash is None else PolicyVersion(number=before, hash=before_hash)
    return LedgerEvent(
        seq=seq, id=id, action=action, policy=policy, previous=previous, reason=reason, at=at, void=bool(void)
    )


def _line(row: Sequence[Any], live: PolicyVersion | None) -> ReleaseLine:
    found = dict(zip(_VERSION.split(", "), row, strict=True))
    policy = PolicyVersion(number=found.pop("number"), hash=found.pop("hash"))
    return ReleaseLine(policy=policy, live=policy == live, **found)


# ---------------------------------------------------------------- threads


class Threads:
    """The page's own thread pool, for its queries, texts and charts, so that nothing else waits for viewers. Close it when done."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="ostinato-page")
        self._closed = False

    async def ask(self, question: Callable[[], _T], /) -> _T:
        """Run a blocking function and return its result. Raises its errors, and Unavailable after `close`."""
        if self._closed:
            raise Unavailable("the page is closed because the gateway is stopping; try again in a moment")
        return await asyncio.get_running_loop().run_in_executor(self._pool, question)

    async def ask_index(self, question: Callable[[], _T], otherwise: _T) -> _T:
        """Return the index's answer; `otherwise` if it takes too long or cannot be read, so that the rest can still be shown."""
        try:
            return await self.ask(question)
        except (TooWide, Unavailable):
            return otherwise

    def close(self) -> None:
        """Start no further function; one that is running ends by itself."""
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
