"""The page's index of the log: narrow tables for queries by user, arm, version, outcome and word.

It holds nothing that the log does not, may be deleted at any time, and is then rebuilt. Of answers it holds only the set of words, without
their order, and only if the log itself is not encrypted, because a forgotten person's words must not remain anywhere.

The index is filled in slices that never take more than a share of the time. Turns are read from both ends: new rows first, then rows below
those already read, so that the newest turns of an old log can be found at once. Decisions (releases and alarms) are few rows, and are read
upwards, because their order matters.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from ostinato.core.errors import OstinatoError
from ostinato.core.notices import Alarm, AlarmState, Forgotten
from ostinato.core.records import Batch, Holdback, Quarantine, ReleaseEvent, Reward, Row, Signal, Turn
from ostinato.core.seams import Cursor
from ostinato.record.rowlog import RowLog
from ostinato.record.sqlite import connect, create, driver, remove, transaction
from ostinato.release.ledger import State, fold, is_void, taken_back

# ---------------------------------------------------------------- the schema


_T = TypeVar("_T")

FORMAT = 9
_STATEMENTS = (
    "CREATE TABLE state (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE turns (seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, user TEXT NOT NULL, arm TEXT NOT NULL, "
    "version INTEGER, at REAL NOT NULL, outcome TEXT NOT NULL, rank INTEGER NOT NULL, value REAL, step INTEGER, dealt INTEGER NOT NULL, "
    "auto INTEGER NOT NULL)",
    *(
        f"CREATE INDEX turns_by_{'_'.join(columns)} ON turns ({', '.join(columns)}, seq)"
        for columns in (("tenant",), ("tenant", "user"), ("user",), ("arm",), ("version",), ("outcome",), ("step",))
    ),
    "CREATE TABLE loose (turn TEXT PRIMARY KEY, outcome TEXT NOT NULL, rank INTEGER NOT NULL, value REAL, step INTEGER) WITHOUT ROWID",
    "CREATE TABLE signals (turn TEXT, tenant TEXT, id TEXT, name TEXT, seq INTEGER, PRIMARY KEY (turn, tenant, id)) WITHOUT ROWID",
    "CREATE INDEX signals_by_seq ON signals (seq)",
    "CREATE TABLE outcomes (name TEXT PRIMARY KEY) WITHOUT ROWID",
    "CREATE TABLE returns (first INTEGER PRIMARY KEY, base INTEGER NOT NULL)",
    "CREATE VIRTUAL TABLE words USING fts5 (text, content='', contentless_delete=1, detail=none)",
    "CREATE TABLE events (seq INTEGER PRIMARY KEY, id TEXT, action TEXT, number INTEGER, hash TEXT, previous_number INTEGER, "
    "previous_hash TEXT, reason TEXT, at REAL, void INTEGER NOT NULL)",
    "CREATE INDEX events_by_hash ON events (hash, seq)",
    "CREATE INDEX events_by_previous ON events (previous_hash, seq)",
    "CREATE INDEX events_by_action ON events (action, number)",
    "CREATE TABLE versions (hash TEXT PRIMARY KEY, seq INTEGER NOT NULL, number INTEGER, state TEXT, verdict TEXT, difference REAL, "
    "lower REAL, upper REAL, margin REAL, looks INTEGER, reason TEXT, at REAL) WITHOUT ROWID",
    "CREATE INDEX versions_by_seq ON versions (seq)",
    "CREATE TABLE chain (place INTEGER PRIMARY KEY, hash TEXT, number INTEGER)",
    "CREATE TABLE alarms (seq INTEGER PRIMARY KEY, name TEXT, reason TEXT, at REAL, standing INTEGER)",
    "CREATE INDEX alarms_by_name ON alarms (name, seq)",
    f"PRAGMA user_version={FORMAT}",
)


def open_index(path: Path) -> Any:
    """Open the index for writing. A file that is damaged or of another version is rebuilt. Raises OSError, the driver's error."""
    for _ in range(2):
        if not path.exists():
            create(path, _build)
        connection = connect(path, write=True)
        # commits need no fsync but stay in order: an erased name must not come back under a later cursor after a power cut
        connection.execute("PRAGMA synchronous=NORMAL")
        # deleted rows leave no trace in the file
        connection.execute("PRAGMA secure_delete=ON")
        if _is_sound(connection):
            return connection
        connection.close()
        remove(path)
    raise driver.OperationalError(f"{path} cannot be created")


def _build(connection: Any) -> None:
    for statement in _STATEMENTS:
        connection.execute(statement)


def _is_sound(connection: Any) -> bool:
    with contextlib.suppress(driver.DatabaseError):
        return connection.execute("PRAGMA user_version").fetchone() == (FORMAT,)
    return False


# ---------------------------------------------------------------- writing the index


SERVED: frozenset[type] = frozenset({Turn, Signal, Reward, Quarantine, Holdback, Batch})
DECIDED: frozenset[type] = frozenset({ReleaseEvent, Alarm, Forgotten})
WAITING, REWARDED, TRAINED = "waiting", "rewarded", "trained"
_RANK = {Reward: 1, Quarantine: 2, Holdback: 3, Batch: 4}
_SETTLE = (
    "outcome = CASE WHEN ?2 >= rank THEN ?1 ELSE outcome END, rank = max(rank, ?2), value = ifnull(?3, value), "
    "step = ifnull(?4, step)"
)

_DROP_BATCH = 2_000  # turns deleted in one transaction

Rows = Sequence[tuple[Cursor, Row]]


class PageIndex:
    """Write access to the index, for one writer. Methods block and run one at a time, so call them on a thread. The first opens the file.

    `words`: whether answers may be searched by word. Every method raises OSError and the driver's errors.
    """

    def __init__(self, path: Path, *, words: bool) -> None:
        self.path = path
        self.words = words
        self._lock = threading.Lock()
        self._opened: Any = None
        self.ledger = State()
        """The release ledger's state after the decisions in the file. A caller that opens a file with decisions must set it."""
        self.forgotten: dict[tuple[str, str | None], Cursor] = {}
        """Who was forgotten, and at which cursor: earlier turns belong to nobody. Set like `ledger`, because the file must name nobody."""
        self._traces = False  # SQLite's WAL may still hold deleted rows

    @property
    def _db(self) -> Any:
        if self._opened is None:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._opened = open_index(self.path)
            if not self.words:
                self._opened.execute("INSERT INTO words(words) VALUES ('delete-all')")
                self._traces = not self._clean()
        return self._opened

    def close(self) -> None:
        with self._lock:
            self._close()

    def start_over(self) -> None:
        """Delete the file, because the log is a different one or the file is damaged."""
        with self._lock:
            self._close()
            remove(self.path)
            self.ledger, self.forgotten = State(), {}

    def cursors(self) -> dict[str, int]:
        """Return how far the log was read: decisions up to `decided`, turns between `low` and `high`."""
        with self._lock:
            return dict(self._db.execute("SELECT name, value FROM state"))

    def _close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    def write(self, rows: Rows, cursors: Mapping[str, int]) -> None:
        """Write rows and the new cursors in one transaction."""
        with self._lock:
            before = self.ledger
            try:
                with transaction(self._db):
                    for seq, row in rows:
                        self._take(seq, row)
                    self._db.executemany("INSERT OR REPLACE INTO state VALUES (?, ?)", list(cursors.items()))
            except BaseException:
                self.ledger = before
                raise

    def drop(self, horizon: Cursor) -> int:
        """Remove a batch of turns that the log may have dropped; return how many."""
        with self._lock:
            oldest = self._db.execute(
                "SELECT seq FROM turns WHERE seq <= ? ORDER BY seq LIMIT ?", (horizon, _DROP_BATCH)
            )
            places = oldest.fetchall()
            if places:
                with transaction(self._db):
                    self._db.executemany("DELETE FROM turns WHERE seq = ?", places)
                    if self.words:
                        self._db.executemany("DELETE FROM words WHERE rowid = ?", places)
                    self._db.execute("DELETE FROM signals WHERE seq <= ?", places[-1])
                self._traces = True
            if self._traces and len(places) < _DROP_BATCH:
                self._traces = not self._clean()
            return len(places)

    def _clean(self) -> bool:
        """Erase deleted rows from the files, including the word index, which only marks deletions. Return False if a reader prevents it."""
        if self.words:
            self._db.execute("INSERT INTO words(words) VALUES ('optimize')")
        busy, _, _ = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        return not busy

    # ------------------------------------------------------------ rows

    def _take(self, seq: Cursor, row: Row) -> None:
        match row:
            case Turn():
                self._turn(seq, row)
            case Signal():
                values = (row.turn, row.tenant, row.id, row.name, seq)
                self._db.execute("INSERT OR IGNORE INTO signals VALUES (?, ?, ?, ?, ?)", values)
            case Reward():
                self._settle([row.turn], REWARDED, Reward, value=row.value)
            case Quarantine() | Holdback():
                self._settle([row.turn], row.reason.partition(": ")[0], type(row))
            case Batch():
                self._settle(row.turns, TRAINED, Batch, step=row.step)
                if row.base is not None:
                    self._db.execute("INSERT OR IGNORE INTO returns VALUES (?, ?)", (row.step, row.base.number))
            case ReleaseEvent():
                self._event(seq, row)
            case Alarm():
                self._alarm(seq, row)
            case Forgotten():
                self._forget(seq, row)
            case _:
                pass

    def _forget(self, seq: Cursor, row: Forgotten) -> None:
        """Remove a person's name from their turns."""
        self.forgotten[row.tenant, row.user] = seq
        theirs = "UPDATE turns SET user = '' WHERE tenant = ? AND seq < ? AND (? IS NULL OR user = ?)"
        self._db.execute(theirs, (row.tenant, seq, row.user, row.user))
        self._traces = True

    def _user(self, seq: Cursor, turn: Turn) -> str:
        """Return a turn's user; "" if the turn is from before the user was forgotten (turns are also read backwards)."""
        gone = max(self.forgotten.get((turn.tenant, user), 0) for user in (turn.user, None))
        return "" if seq < gone else turn.user

    def _turn(self, seq: Cursor, turn: Turn) -> None:
        loose = self._db.execute("SELECT outcome, rank, value, step FROM loose WHERE turn = ?", (turn.id,)).fetchone()
        if loose is not None:
            self._db.execute("DELETE FROM loose WHERE turn = ?", (turn.id,))
        outcome = loose or (WAITING, 0, None, None)
        whose = (seq, turn.id, turn.tenant, self._user(seq, turn), turn.arm.value, turn.oldest, turn.ended_at)
        values = (*whose, *outcome, int(turn.propensity < 1.0), int(turn.auto is not None))
        self._db.execute("INSERT OR IGNORE INTO turns VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
        if self.words and turn.text:
            self._db.execute("INSERT OR REPLACE INTO words(rowid, text) VALUES (?, ?)", (seq, turn.text))

    def _settle(
        self, turns: Sequence[str], outcome: str, kind: type, value: float | None = None, step: int | None = None
    ) -> None:
        """Record the outcome of turns. Some may not be in the index yet, because turns are also read backwards."""
        self._db.execute("INSERT OR IGNORE INTO outcomes VALUES (?)", (outcome,))
        values = (outcome, _RANK[kind], value, step)
        for turn in turns:
            if not self._db.execute(f"UPDATE turns SET {_SETTLE} WHERE id = ?5", (*values, turn)).rowcount:
                insert = "INSERT INTO loose (outcome, rank, value, step, turn) VALUES (?1, ?2, ?3, ?4, ?5)"
                self._db.execute(f"{insert} ON CONFLICT (turn) DO UPDATE SET {_SETTLE}", (*values, turn))

    def _alarm(self, seq: Cursor, alarm: Alarm) -> None:
        values = (seq, alarm.name, alarm.reason, alarm.at, int(alarm.state is AlarmState.RAISED))
        self._db.execute("INSERT OR IGNORE INTO alarms VALUES (?, ?, ?, ?, ?)", values)

    # ------------------------------------------------------------ the ledger

    def _event(self, seq: Cursor, event: ReleaseEvent) -> None:
        """Write an event of the release ledger. `release.ledger` decides what is live, and what a rollback takes back."""
        policy, previous = event.policy, event.previous
        before = (None, None) if previous is None else (previous.number, previous.hash)
        void = is_void(self.ledger, event)
        values = (seq, event.id, event.action, policy.number, policy.hash, *before, event.reason, event.at, int(void))
        done = self._db.execute("INSERT OR IGNORE INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
        if not done.rowcount:  # read before
            return
        if not void:
            self._version(seq, event)
        for hash in _tolerant(lambda: taken_back(self.ledger, event), ()):
            taken = "UPDATE versions SET seq = ?, state = 'rolled_back', reason = ?, at = ? WHERE hash = ?"
            self._db.execute(taken, (seq, event.reason, event.at, hash))
        known, self.ledger = self.ledger.releases, _folded(self.ledger, event)
        if self.ledger.releases is not known:
            newest = [(place, each.hash, each.number) for place, each in enumerate(self.ledger.releases[-2:])]
            self._db.execute("DELETE FROM chain")
            self._db.executemany("INSERT INTO chain VALUES (?, ?, ?)", newest)

    def _version(self, seq: Cursor, event: ReleaseEvent) -> None:
        state = "shipped" if event.action == "rolled_back" else event.action
        self._db.execute(
            "INSERT INTO versions (hash, seq, number, state, verdict, looks, reason, at) VALUES (?1, ?2, ?3, ?4, '', 0, ?5, ?6) "
            "ON CONFLICT (hash) DO UPDATE SET seq = ?2, state = iif(?4 = 'looked', state, ?4), reason = ?5, at = ?6",
            (event.policy.hash, seq, event.policy.number, state, event.reason, event.at),
        )
        report = mapping(event.detail.get("report"))
        if event.action == "evaluated" and report:
            figures = [finite(report.get(name)) for name in ("difference", "lower", "upper", "margin")]
            self._db.execute(
                "UPDATE versions SET looks = looks + 1, verdict = ?, difference = ?, lower = ?, upper = ?, margin = ? WHERE hash = ?",
                (str(report.get("verdict", "")), *figures, event.policy.hash),
            )


def _folded(state: State, event: ReleaseEvent) -> State:
    """Return the ledger after one more event. A malformed one changes nothing: it stops the release worker, and the page must show why."""
    return _tolerant(lambda: fold(state, event), state)


def _tolerant(read: Callable[[], _T], otherwise: _T) -> _T:
    try:
        return read()
    except (AttributeError, KeyError, TypeError, ValueError):
        return otherwise


def is_expected(error: Exception) -> bool:
    """Return True for errors that disks and other processes cause; any other error is a bug."""
    return isinstance(error, OstinatoError | OSError | driver.OperationalError)


def is_damaged(error: Exception) -> bool:
    """Return True if the file is damaged, so that rebuilding it helps."""
    return isinstance(error, driver.DatabaseError) and not isinstance(error, driver.OperationalError)


def mapping(value: object) -> Mapping[str, Any]:
    """Return a JSON object; {} for anything else."""
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def finite(value: object) -> float | None:
    """Return a number that can be drawn; None for anything else."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(cast("float", value)) if known else None


# ---------------------------------------------------------------- feeding the index


logger = logging.getLogger(__name__)

SLICE = 1_000
"""Rows of one transaction."""
BUSY, IDLE = 0.5, 0.05
"""The largest share of the time that the feed takes while somebody watches the page, and while nobody does."""
_LOOK_S = 1.0
_YIELD_EVERY = 128
"""Events of the release ledger that are folded before yielding to the event loop."""


class Feed:
    """Keeps one index up to date with one log. `watched` returns whether somebody watches the page."""

    def __init__(self, log: RowLog, index: PageIndex, watched: Callable[[], bool]) -> None:
        self._log = log
        self._index = index
        self._watched = watched
        self._cursors: dict[str, int] | None = None
        self.unread_turns = 0
        self.unread_decisions = 0

    async def keep(self) -> None:
        """Run until cancelled. A failed step is retried; a damaged index is rebuilt."""
        loop, failing = asyncio.get_running_loop(), ""
        while True:
            began, more = loop.time(), False
            try:
                more = await self.step()
                failing = ""
            except Exception as error:
                if str(error) != failing:
                    failing = str(error)
                    logger.warning("the page's index: %s", failing, exc_info=not is_expected(error))
                self._cursors = None
                if is_damaged(error):
                    await self._start_over()
            spent = loop.time() - began
            share = BUSY if self._watched() else IDLE
            await asyncio.sleep(spent * (1 / share - 1) if more else _LOOK_S)

    async def decided(self) -> None:
        """Read all decisions. Raises the log's and the driver's errors."""
        newest = await asyncio.to_thread(self._log.newest)
        at = await self._start(newest)
        while await self._upwards(at, "decided", newest, DECIDED):
            pass
        self.unread_decisions = 0

    async def step(self) -> bool:
        """Read one slice of each kind that is due; return True if more is due. Raises the log's and the driver's errors."""
        newest = await asyncio.to_thread(self._log.newest)
        at = await self._start(newest)
        more = await self._upwards(at, "decided", newest, DECIDED)
        more = await self._upwards(at, "high", newest, SERVED) or more
        if not more:
            more = await self._older(at)
        horizon = await self._log.horizon()
        more = await asyncio.to_thread(self._index.drop, horizon) > 0 or more
        self.unread_decisions = newest - at["decided"]
        self.unread_turns = newest - at["high"] + max(0, at["low"] - horizon)
        return more

    async def _start_over(self) -> None:
        with contextlib.suppress(OSError):
            await asyncio.to_thread(self._index.start_over)

    async def _start(self, newest: Cursor) -> dict[str, int]:
        at = self._cursors
        if at is None:
            at = await asyncio.to_thread(self._index.cursors)
            self._index.ledger = await self._ledger(at.get("decided", 0))
            self._index.forgotten = await self._forgotten()
        if not at or max(at.values()) > newest:  # a shorter log was restored, which is a different log
            if at:
                await self._start_over()
            at = {"decided": 0, "low": newest, "high": newest}
        self._cursors = at
        return at

    async def _forgotten(self) -> dict[tuple[str, str | None], Cursor]:
        rows = [(seq, row) async for seq, row in self._log.read(0, {Forgotten})]
        return {(row.tenant, row.user): seq for seq, row in rows if isinstance(row, Forgotten)}

    async def _ledger(self, decided: Cursor) -> State:
        """Return the release ledger's state at a cursor. Its events are few, and never dropped."""
        state = State()
        async for seq, row in self._log.read(0, {ReleaseEvent}):
            if seq > decided:
                break
            if isinstance(row, ReleaseEvent):
                state = _folded(state, row)
            if state.events % _YIELD_EVERY == 0:
                await asyncio.sleep(0)
        return state

    async def _upwards(self, at: dict[str, int], cursor: str, newest: Cursor, kinds: frozenset[type]) -> bool:
        """Read one slice of rows of these kinds above the cursor; return True if there are more."""
        if at[cursor] >= newest:
            return False
        rows, upto = await self._slice(at[cursor], newest, kinds)
        await self._write(at, rows, cursor, upto)
        return upto < newest

    async def _older(self, at: dict[str, int]) -> bool:
        low = at["low"]
        if low <= 0 or low <= await self._log.horizon():
            return False
        start = max(0, low - SLICE)
        rows, upto = await self._slice(start, low, SERVED)
        assert upto == low  # a slice spans at most `SLICE` sequence numbers, so it cannot hold more rows
        await self._write(at, rows, "low", start)
        return start > 0

    async def _slice(
        self, after: Cursor, end: Cursor, kinds: frozenset[type]
    ) -> tuple[list[tuple[Cursor, Row]], Cursor]:
        """Return at most `SLICE` rows above `after`, and the cursor up to which they are complete."""
        rows: list[tuple[Cursor, Row]] = []
        async for seq, row in self._log.read(after, set(kinds)):
            if seq > end:
                break
            rows.append((seq, row))
            if len(rows) == SLICE:
                return rows, seq
        return rows, end

    async def _write(self, at: dict[str, int], rows: list[tuple[Cursor, Row]], cursor: str, place: Cursor) -> None:
        await asyncio.to_thread(self._index.write, rows, {**at, cursor: place})
        at[cursor] = place
