"""The log's interface, independent of its database: one thread commits for all callers, another reads.

Group commit: all waiting rows are written in one transaction, so that many callers share one fsync, and every caller is answered within its
deadline. While another process holds the write lock all callers wait together. When the shared transaction fails for another reason,
each caller's rows are tried alone: those that can be written are kept, and the other callers get the error. On a full disk the smallest
are tried first; if some rows do not fit, all larger ones are refused with them. The queue is bounded in callers and in bytes. If a
caller is answered before a transaction takes its rows, they are freed at once.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from copy import copy
from queue import Empty, SimpleQueue
from secrets import token_hex
from typing import Any, Protocol, Self, TypeVar, cast

from ostinato.core.errors import BadConfig, Corrupt, OstinatoError, StorageFull, Unavailable
from ostinato.core.notices import Forgotten
from ostinato.core.records import Identity, Row, Signal, Turn
from ostinato.core.seams import Cursor, R
from ostinato.record.codec.kinds import Kind, kind_of
from ostinato.record.codec.turns import Ready, prepare
from ostinato.record.config import Encrypt, RecordConfig
from ostinato.record.head import TokenText
from ostinato.record.keys import KeyRing, Scope

# ---------------------------------------------------------------- group commit


GROUP = 512  # callers per transaction
BACKLOG = 20_000  # callers that may wait
BACKLOG_BYTES = 256 * 2**20  # that their rows may take; a single caller may always wait, whatever its size

Answer = Cursor | OstinatoError


class _Room:
    """The byte budget of all waiting rows. Thread-safe."""

    def __init__(self) -> None:
        self._taken = 0
        self._gate = threading.Lock()

    def take(self, size: int) -> bool:
        """Reserve bytes; False, and nothing is reserved, if there is no room."""
        with self._gate:
            if self._taken and self._taken + size > BACKLOG_BYTES:
                return False
            self._taken += size
            return True

    def give_back(self, size: int) -> None:
        with self._gate:
            self._taken -= size


class _Job:
    """One caller's rows. It is answered once, by the writer or, at its deadline, by its own event loop."""

    def __init__(self, rows: Sequence[Row], wait_s: float, room: _Room) -> None:
        self.rows = rows
        self._room = room
        self._taken = 0
        self.ready: list[Ready] = []
        self.deadline = time.monotonic() + wait_s
        self.begun = False  # a transaction may hold its rows
        self.loop = asyncio.get_running_loop()
        self._future: asyncio.Future[Cursor] | None = self.loop.create_future()
        self._answered = False
        self._gate = threading.Lock()
        self.timer: asyncio.TimerHandle | None = None

    def size(self) -> int:
        """The approximate size of its rows in bytes."""
        return sum(row.size for row in self.ready)

    def enter(self) -> bool:
        """Reserve room in the queue; False if there is too little."""
        size = sum(_memory(getattr(row, name)) for row in self.rows for name in getattr(row, "__slots__", ()))
        self._taken = size if self._room.take(size) else 0
        return self._taken == size

    def leave(self) -> None:
        """Free its rows, because the thread is done with it."""
        with self._gate:
            self._let_go()

    def begin(self) -> bool:
        """Claim it for a transaction; False if it was answered already."""
        with self._gate:
            self.begun = not self._answered
            return self.begun

    def expire(self, name: str) -> None:
        """Answer it with Unavailable at its deadline. Runs on its event loop."""
        with self._gate:
            if self._answered:
                return
            self._answered = True
            if not self.begun:
                self._let_go()
        kept = "it may still be kept: sending it again is safe" if self.begun else "nothing of it was kept"
        self.settle(
            Unavailable(f"the log at {name} could not be written in time; {kept}. See what holds its disk or file")
        )

    def answer(self) -> bool:
        """Mark it as answered; True for the first caller, which must settle it."""
        with self._gate:
            first, self._answered = not self._answered, True
            return first

    def settle(self, answer: Answer) -> None:
        """Give the caller its answer. Runs on its event loop."""
        if self.timer is not None:
            self.timer.cancel()
        # an error's traceback holds the rows, and this job may still be in the queue
        future, self._future = self._future, None
        if future is None or future.done():  # the caller was cancelled
            return
        if isinstance(answer, OstinatoError):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    async def outcome(self) -> Cursor:
        """Wait for the answer."""
        assert self._future is not None
        return await self._future

    def _let_go(self) -> None:
        self.rows, self.ready = (), []
        self._room.give_back(self._taken)
        self._taken = 0


H = TypeVar("H")


class Appending(Protocol[H]):
    """The write side for one kind of database, in transactions. Used by one thread."""

    name: str
    """The log's location, for messages."""
    token_text: TokenText | None
    """Gives the text of one token, so that texts which tokens spell are not stored; None: all texts are stored."""

    def close(self) -> None:
        """Close the database."""
        ...

    def assign_keys(self, rows: Sequence[Ready]) -> None:
        """Assign each row's text its key. Called before the transaction."""
        ...

    def transaction(self, rows: Sequence[Ready]) -> AbstractContextManager[H]:
        """A transaction that excludes other writers, committed at the end, rolled back on an error. Only these rows are written in it."""
        ...

    def write(self, head: H, rows: Sequence[Ready]) -> Cursor:
        """Write the rows that the log does not hold yet; returns the newest row's place. Called inside the transaction."""
        ...

    def waits(self, error: Exception) -> bool:
        """True if the transaction may be tried again until the callers' deadlines."""
        ...

    def refusal(self, error: Exception) -> OstinatoError:
        """Translate an error of a transaction into the project's own."""
        ...


class GroupWriter:
    """The only writer of one process. Thread-safe; `submit` is called on an event loop."""

    def __init__(self, appender: Appending[Any], wait_s: float) -> None:
        self._appender = appender
        self._wait_s = wait_s
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._gate = threading.Lock()  # nothing may follow the closing mark into the queue
        self._closed = False
        self._room = _Room()
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    async def submit(self, rows: Sequence[Row]) -> Cursor:
        """Write all rows or none; returns the newest sequence number once they are on disk.

        Raises BadRequest, StorageFull, Unavailable, each within the time that an append may take.
        """
        job = _Job(rows, self._wait_s, self._room)
        with self._gate:
            if self._closed:
                raise Unavailable(f"the log at {self._appender.name} is closed")
            if self._queue.qsize() >= BACKLOG:
                raise self._behind(f"{BACKLOG} appends")
            if not job.enter():
                raise self._behind(f"{BACKLOG_BYTES >> 20} MiB")
            job.timer = job.loop.call_later(self._wait_s, job.expire, self._appender.name)
            self._queue.put(job)
        return await job.outcome()

    def close(self) -> None:
        """Write the waiting rows, then stop the thread. May be called twice."""
        with self._gate:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join()

    def _behind(self, how_far: str) -> Unavailable:
        return Unavailable(f"the log at {self._appender.name} is {how_far} behind; nothing was kept, send less")

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        open_, jobs = True, list[_Job]()
        while open_ or jobs:
            fresh: list[_Job] = []
            if open_ and len(jobs) < GROUP:
                fresh, open_ = self._take(GROUP - len(jobs), wait=not jobs)
            jobs = self._commit(jobs + self._prepared(fresh))
        self._appender.close()

    def _take(self, most: int, *, wait: bool) -> tuple[list[_Job], bool]:
        jobs: list[_Job] = []
        with suppress(Empty):
            while len(jobs) < most:
                job = self._queue.get(block=wait and not jobs)
                if job is None:
                    return jobs, False
                jobs.append(job)
        return jobs, True

    def _prepared(self, jobs: list[_Job]) -> list[_Job]:
        """The jobs whose rows can be stored; the others are answered."""
        good: list[_Job] = []
        refused: list[tuple[_Job, Answer]] = []
        for job in jobs:
            try:
                job.ready = [prepare(row) for row in job.rows]
                good.append(job)
            except Exception as error:  # noqa: BLE001 - the thread must outlive any one caller's rows
                refused.append((job, self._error(error)))
        _tell(refused)
        return good

    def _commit(self, jobs: list[_Job]) -> list[_Job]:
        """Write the rows of these jobs and answer them; returns those that must wait for another process."""
        jobs = self._in_time(jobs)
        if not jobs:
            return []
        answer = self._try(jobs)
        if answer is None:
            return jobs
        if len(jobs) == 1 or not isinstance(answer, OstinatoError):
            _tell([(job, answer) for job in jobs])
            return []
        full = isinstance(answer, StorageFull)
        waiting: list[_Job] = []
        refusal: Answer | None = None
        for job in sorted(jobs, key=_Job.size) if full else jobs:
            answer = refusal or (None if waiting else self._try([job]))
            if full and isinstance(answer, StorageFull):
                refusal = answer
            if answer is None:
                waiting.append(job)
            else:
                _tell([(job, answer)])
        return waiting

    def _in_time(self, jobs: list[_Job]) -> list[_Job]:
        """The jobs whose deadline has not passed. The others are answered here too, because their loop may be waiting for this thread."""
        now = time.monotonic()
        for job in jobs:
            if job.deadline <= now:
                job.leave()
                with suppress(RuntimeError):
                    job.loop.call_soon_threadsafe(job.expire, self._appender.name)
        return [job for job in jobs if job.deadline > now]

    def _try(self, jobs: list[_Job]) -> Answer | None:
        """Run one transaction for all jobs; None if another process holds the lock."""
        try:
            offered = [row for job in jobs for row in job.ready]
            self._appender.assign_keys(offered)
            with self._appender.transaction(offered) as head:
                rows = [row for job in jobs if job.begin() for row in job.ready]
                return self._appender.write(head, rows)
        except Exception as error:  # noqa: BLE001 - the thread must outlive any one caller's rows
            return None if self._appender.waits(error) else self._error(error)

    def _error(self, error: Exception) -> OstinatoError:
        if isinstance(error, OstinatoError):
            return error
        return self._appender.refusal(error)


def _memory(value: Any) -> int:
    """The approximate bytes of a field: the ids in a tuple are shared between turns, texts are not."""
    return sys.getsizeof(value) + (8 * len(value) if isinstance(value, tuple) else 0)


def _tell(answers: Sequence[tuple[_Job, Answer]]) -> None:
    """Give each caller its answer, on its own event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Job, Answer]]] = defaultdict(list)
    for job, answer in answers:
        job.leave()
        if job.answer():
            by_loop[job.loop].append((job, answer))
    for loop, settled in by_loop.items():
        with suppress(RuntimeError):  # the loop was closed meanwhile: no caller is left
            loop.call_soon_threadsafe(_settle, settled)


def _settle(settled: list[tuple[_Job, Answer]]) -> None:
    for job, answer in settled:
        # each caller gets its own error object, because tracebacks are attached to it
        job.settle(copy(answer) if isinstance(answer, OstinatoError) else answer)


# ---------------------------------------------------------------- the log


T = TypeVar("T")

_EARLY_S = 3600.0  # a turn comes at most so long after the first signal about it
_BACK = 10_000  # signals that are read at first for those


class RowReader(Protocol):
    """The read side for one kind of database. Thread-safe."""

    def close(self) -> None: ...

    def newest(self) -> Cursor: ...

    def horizon(self) -> Cursor: ...

    def page(
        self, kinds: Collection[Kind], after: Cursor, end: Cursor
    ) -> tuple[Sequence[tuple[Cursor, Row]], Cursor]: ...

    def find(self, kind: Kind, identities: Sequence[Identity]) -> dict[Identity, Row]: ...

    def places(self, kind: Kind, identities: Sequence[Identity]) -> dict[Identity, Cursor]: ...

    def tail(self, n: int, kinds: Collection[Kind]) -> list[tuple[Cursor, Row]]: ...

    def before_last(self, count: int, kind: Kind) -> Cursor: ...


class RowLog(ABC):
    """The `Log` seam, with further methods for a run's own workers. Call `close` when done, or use it as a context manager."""

    def __init__(self, reader: RowReader, appender: Appending[Any], ring: KeyRing | None, config: RecordConfig) -> None:
        self._config = config
        self._ring = ring
        # destroyed keys at the last look for missing rows: how many, and the newest
        self._noted: tuple[int, int] | None = None
        self._reader = reader
        self._appender = appender
        self._writer = GroupWriter(appender, config.append_s)
        self._asking = ThreadPoolExecutor(max_workers=1, thread_name_prefix="log-reader")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Commit waiting appends and close the files."""
        self._writer.close()
        self._asking.shutdown()
        self._reader.close()
        if self._ring is not None:
            self._ring.close()

    def derive_text(self, token_text: TokenText) -> None:
        """From now on, do not store a turn's text if its tokens spell it. `token_text` gives the text of one token.

        This is checked for each turn, and the texts of tokens are stored with the turns, so the log can be read without a tokenizer.

        Example: ``log.derive_text(lambda token: renderer.decode([token]))``
        """
        self._appender.token_text = token_text

    # ------------------------------------------------------------ the seam

    async def append(self, *rows: Row) -> Cursor:
        """Write all rows or none, durably, and return the newest sequence number. A repeated identity is ignored.

        It takes no longer than `record.append_s`. If a slow disk leaves open whether the rows are kept, Unavailable says so, and it is
        safe to append them again.

        Raises:
            BadRequest: a field cannot be stored (NaN, a lone surrogate, a negative token id); `field` names it.
            StorageFull: the disk refused; nothing of this call was kept, and the log works again once there is room.
            Unavailable: the log is closed, or the disk or another process was not ready in time.
        """
        return await self._writer.submit(rows) if rows else await self._ask(self.newest)

    async def read(self, after: Cursor, kinds: set[type]) -> AsyncIterator[tuple[Cursor, Row]]:
        """Rows of the given kinds above `after`, oldest first, up to the newest row committed when reading began."""
        chosen = [kind_of(kind) for kind in kinds]
        end = await self._ask(self.newest)
        while after < end and chosen:
            page, after = await self._ask(lambda after=after: self._reader.page(chosen, after, end))
            for item in page:
                yield item

    async def find(self, kind: type[R], identities: Sequence[Identity]) -> list[R]:
        """The rows of one kind with these identities, in the order asked for; unknown ones are left out."""
        found = await self._ask(lambda: self._reader.find(kind_of(kind), identities))
        return [cast(R, found[each]) for each in identities if each in found]

    async def places(self, kind: type[Row], identities: Sequence[Identity]) -> list[Cursor]:
        """The sequence numbers of the rows of one kind with these identities; unknown ones are left out."""
        found = await self._ask(lambda: self._reader.places(kind_of(kind), identities))
        return [found[each] for each in identities if each in found]

    async def horizon(self) -> Cursor:
        """The sequence number up to which retention may have dropped rows; 0 if none. Batches, releases, stamps and alarms stay."""
        return await self._ask(self._reader.horizon)

    async def before_last(self, count: int, kind: type[Row]) -> Cursor:
        """The sequence number above which exactly the newest `count` rows of a kind lie; 0 if there are fewer."""
        return await self._ask(lambda: self._reader.before_last(count, kind_of(kind))) if count > 0 else 0

    # ------------------------------------------------------------ queries for people

    def newest(self) -> Cursor:
        """The sequence number of the newest row; 0 for an empty log."""
        return self._reader.newest()

    def tail(self, n: int, kinds: set[type]) -> list[tuple[Cursor, Row]]:
        """The newest `n` rows of the given kinds, in log order."""
        return self._reader.tail(n, [kind_of(kind) for kind in kinds]) if n > 0 else []

    # ------------------------------------------------------------ retention and deletion

    @abstractmethod
    async def keep(self, rows: Sequence[tuple[Cursor, Row]]) -> None:
        """Add permanent rows of a log that is being copied, each at its place below the horizon. Existing rows stay as they are."""

    async def drop_old(self, now: float, keep_after: Cursor) -> int:
        """Drop whole segments that are older than `record.retain_days`; returns how many. A worker calls this from time to time.

        `keep_after` is the oldest cursor of any saved fold: nothing above it is dropped. An idle log's last segment is closed here when
        its time has come. Raises StorageFull, Unavailable, Corrupt.
        """
        days = self._config.retain_days
        if days is None:
            return 0
        await self._writer.submit(())
        return await asyncio.to_thread(self._drop_older, now, days, keep_after)

    @abstractmethod
    def _drop_older(self, now: float, days: float, keep_after: Cursor) -> int:
        """`drop_old` for segments older than `days`, on a thread."""

    @property
    def keys(self) -> KeyRing | None:
        """The keys that its rows lie under; None if nothing was ever encrypted."""
        return self._ring

    def check_forgettable(self, user: str | None) -> KeyRing:
        """The keys of rows that can be forgotten. Raises BadConfig if nothing is encrypted, or not per user and one is named."""
        if self._ring is None:
            raise BadConfig(
                "record.encrypt is 'none': nothing can be forgotten; set it to 'tenant' or 'user' beforehand"
            )
        if user is not None and self._config.encrypt is not Encrypt.USER:
            raise BadConfig(
                f"record.encrypt is {self._config.encrypt.value!r}: set it to 'user' to forget a user alone"
            )
        return self._ring

    async def forget(self, tenant: str, user: str | None = None) -> Cursor:
        """Make the texts of a tenant's user, or of all its users, unreadable for ever by destroying their keys.

        Their turns stay in redacted form (`Turn.redacted`), their signals without correction and comment. Covers texts written while
        `record.encrypt` was on, and for a single user texts written while it was 'user'. So are comments on turns that retention had
        dropped before they came, of anybody in the tenant, because nothing says whose they are. Returns the newest place in the log: a
        model trained on turns up to there may still know them, until it is trained again without them.

        A row `Forgotten` follows, on which every fold drops what it holds under the name; `note_forgotten` writes those of calls that were
        killed before. Nothing is written twice: once more for somebody without a key since, and the log stays as it is.

        Raises:
            BadConfig: nothing is encrypted, or not per user.
            StorageFull, Unavailable: call it again.
        """
        return await self.destroy_keys(self.check_forgettable(user), tenant, user)

    async def destroy_keys(self, ring: KeyRing, tenant: str, user: str | None) -> Cursor:
        """As `forget`, whatever `record.encrypt` is now: of what lies under these keys of the log."""
        scopes: list[Scope] | None = None
        missing: set[str] = set()
        if user is not None:
            early = await self._ask(lambda: ring.waiting_turns(tenant))
            found = {turn.id: turn.person for turn in await self.find(Turn, [(turn,) for turn in early])}
            theirs = [turn for turn, person in found.items() if person == (tenant, user)]
            scopes = [Scope(tenant, user), *(Scope(tenant, turn=turn) for turn in theirs)]
            missing = set(early).difference(found)
        await self._ask(lambda: ring.forget(tenant, scopes))
        told = await self._told_forgotten()
        untold = [row for row in await self._untold(ring, told) if user is not None or row.tenant != tenant]
        if user is None:
            newest = max(
                (number for number, scope in await self._ask(ring.destroyed) if scope.tenant == tenant), default=0
            )
            if (tenant, None) not in told or newest > told[tenant, None]:
                untold.append(_forgotten(tenant, None, newest, ring.clock()))
        elif (tenant, user) not in told and not any(row.user == user and row.tenant == tenant for row in untold):
            untold.append(_forgotten(tenant, user, 0, ring.clock()))  # nothing of theirs lay under a key
        place = await self.append(*untold)
        # last, because it reads rows of others, which may be damaged
        if missing and await self.horizon():
            awaited = await self._awaited_turns(tenant, missing, ring.clock() - _EARLY_S)
            dropped = [Scope(tenant, turn=turn) for turn in sorted(missing - awaited)]
            await self._ask(lambda: ring.forget(tenant, dropped))
        return place

    async def _awaited_turns(self, tenant: str, missing: set[str], since: float) -> set[str]:
        """Those of the tenant's missing turns that a signal named since a time: they may still come. The others were dropped,
        whoever's they were. A signal that cannot be read names none.
        """
        awaited: set[str] = set()
        end, back = await self._ask(self.newest), _BACK
        while end and awaited != missing:
            after, read, recent = await self.before_last(back, Signal), 0, 0
            async for row in self._readable_signals(after, end):
                read += 1
                if row.received_at >= since:
                    recent += 1
                    if row.tenant == tenant and row.turn in missing:
                        awaited.add(row.turn)
            if read and not recent:
                break
            end, back = min(after, end), 2 * back
        return awaited

    async def _readable_signals(self, after: Cursor, end: Cursor) -> AsyncIterator[Signal]:
        """The signals above `after` up to `end`, but for damaged ones, which are found by bisection."""
        ends = [end]
        while ends:
            upto = ends[-1]
            if after >= upto:
                ends.pop()
                continue
            try:
                page, after = await self._ask(
                    lambda after=after, upto=upto: self._reader.page([kind_of(Signal)], after, upto)
                )
            except Corrupt:
                if upto == after + 1:
                    after = upto
                else:
                    ends.append((after + upto) // 2)
                continue
            for _, row in page:
                yield cast(Signal, row)

    async def note_forgotten(self) -> int:
        """Write the missing `Forgotten` rows of keys that were destroyed: by a call that was killed just then, by an earlier version, or by
        `restore`, which puts an older log beside them. Returns how many. Cheap if there is no news. Raises StorageFull, Unavailable.
        """
        ring = self._ring
        destroyed = [] if ring is None else await self._ask(ring.destroyed)
        seen = len(destroyed), destroyed[-1][0] if destroyed else 0
        if ring is None or seen == self._noted:
            return 0
        untold = await self._untold(ring, await self._told_forgotten())
        await self.append(*untold)
        self._noted = seen
        return len(untold)

    async def _told_forgotten(self) -> dict[tuple[str, str | None], int]:
        """The newest key that a row `Forgotten` is about, by tenant and user."""
        told: dict[tuple[str, str | None], int] = {}
        async for _, row in self.read(0, {Forgotten}):
            if isinstance(row, Forgotten):
                told[row.tenant, row.user] = max(row.key, told.get((row.tenant, row.user), 0))
        return told

    async def _untold(self, ring: KeyRing, told: Mapping[tuple[str, str | None], int]) -> list[Forgotten]:
        """The rows about destroyed keys that the log lacks."""
        found: dict[tuple[str, str | None], int] = {}
        for number, scope in await self._ask(ring.destroyed):
            if number > max(told.get((scope.tenant, user), 0) for user in (scope.user, None)):
                found[scope.tenant, scope.user] = number
        return [_forgotten(tenant, user, number, ring.clock()) for (tenant, user), number in found.items()]

    async def _ask(self, question: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._asking, question)


def _forgotten(tenant: str, user: str | None, key: int, at: float) -> Forgotten:
    """A row that is the same whoever writes it; without a key, a new one."""
    whose = "tenant" if user is None else "key"
    name = f"{whose}-{key}" if key else f"{whose}-{token_hex(16)}"
    return Forgotten(id=f"forgotten-{name}", tenant=tenant, user=user, key=key, at=at)
