"""The log's interface, independent of its database. One thread commits for all callers; another reads.

Group commit: all waiting rows are written in one transaction, so that many callers share one fsync. Every caller gets its answer within its
deadline. While another process holds the write lock, all callers wait together. If the shared transaction fails for another reason, each
caller's rows are tried in a transaction of their own: those that can be written are kept, and the other callers get the error. On a full
disk the smallest are tried first; once one does not fit, all larger ones are refused. The queue is bounded in callers and in bytes. If a
caller's deadline passes before a transaction takes its rows, they are freed at once.
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


GROUP = 512  # most callers per transaction
BACKLOG = 20_000  # most callers in the queue
BACKLOG_BYTES = 256 * 2**20  # most bytes of rows in the queue; a single caller is admitted whatever its size

Answer = Cursor | OstinatoError


class _ByteBudget:
    """The bytes that all queued rows may take together (`BACKLOG_BYTES`). Thread-safe."""

    def __init__(self) -> None:
        self._taken = 0
        self._gate = threading.Lock()

    def take(self, size: int) -> bool:
        """Reserve bytes. Return False, and reserve nothing, if they exceed the budget."""
        with self._gate:
            if self._taken and self._taken + size > BACKLOG_BYTES:
                return False
            self._taken += size
            return True

    def give_back(self, size: int) -> None:
        with self._gate:
            self._taken -= size


class _Job:
    """One caller's rows in the queue. It is answered once: by the writer or, at its deadline, by the caller's event loop."""

    def __init__(self, rows: Sequence[Row], wait_s: float, budget: _ByteBudget) -> None:
        self.rows = rows
        self._budget = budget
        self._reserved = 0
        self.ready: list[Ready] = []
        self.deadline = time.monotonic() + wait_s
        self.begun = False  # a transaction may contain its rows
        self.loop = asyncio.get_running_loop()
        self._future: asyncio.Future[Cursor] | None = self.loop.create_future()
        self._answered = False
        self._gate = threading.Lock()
        self.timer: asyncio.TimerHandle | None = None

    def size(self) -> int:
        """Return the approximate size of its stored rows in bytes."""
        return sum(row.size for row in self.ready)

    def enter(self) -> bool:
        """Reserve memory in the queue's budget. Return False if there is too little."""
        size = sum(_memory(getattr(row, name)) for row in self.rows for name in getattr(row, "__slots__", ()))
        self._reserved = size if self._budget.take(size) else 0
        return self._reserved == size

    def leave(self) -> None:
        """Free its rows, because the writer thread is done with it."""
        with self._gate:
            self._free()

    def begin(self) -> bool:
        """Claim it for a transaction. Return False if it was already answered."""
        with self._gate:
            self.begun = not self._answered
            return self.begun

    def expire(self, name: str) -> None:
        """Answer it with Unavailable, because its deadline has passed. Runs on its event loop."""
        with self._gate:
            if self._answered:
                return
            self._answered = True
            if not self.begun:
                self._free()
        kept = "it may still be kept: sending it again is safe" if self.begun else "nothing of it was kept"
        self.settle(
            Unavailable(f"the log at {name} could not be written in time; {kept}. See what holds its disk or file")
        )

    def answer(self) -> bool:
        """Mark it as answered. Return True for the first caller, which must then `settle` it."""
        with self._gate:
            first, self._answered = not self._answered, True
            return first

    def settle(self, answer: Answer) -> None:
        """Give the caller its answer. Runs on its event loop."""
        if self.timer is not None:
            self.timer.cancel()
        # the error's traceback references the rows, and this job may still be in the queue
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

    def _free(self) -> None:
        self.rows, self.ready = (), []
        self._budget.give_back(self._reserved)
        self._reserved = 0


H = TypeVar("H")


class Appending(Protocol[H]):
    """The write side of the log on one kind of database. Used by one thread."""

    name: str
    """The log's location, for messages."""
    token_text: TokenText | None
    """Gives the text of one token, so that a text which its tokens spell need not be stored. None: all texts are stored."""

    def close(self) -> None:
        """Close the database."""
        ...

    def assign_keys(self, rows: Sequence[Ready]) -> None:
        """Assign an encryption key to each row's text. Called before the transaction."""
        ...

    def transaction(self, rows: Sequence[Ready]) -> AbstractContextManager[H]:
        """Return a transaction that excludes other writers, commits at the end and rolls back on an error. It may write only these rows."""
        ...

    def write(self, head: H, rows: Sequence[Ready]) -> Cursor:
        """Write the rows that the log does not hold yet and return the newest sequence number. Called inside the transaction."""
        ...

    def waits(self, error: Exception) -> bool:
        """Return True if the transaction may be retried until the callers' deadlines."""
        ...

    def refusal(self, error: Exception) -> OstinatoError:
        """Translate an error of a transaction into an OstinatoError."""
        ...


class GroupWriter:
    """The only writer of a process: a queue and a thread that commits it in groups. Thread-safe; call `submit` on an event loop."""

    def __init__(self, appender: Appending[Any], wait_s: float) -> None:
        self._appender = appender
        self._wait_s = wait_s
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._gate = threading.Lock()  # nothing may be queued behind the None that ends the thread
        self._closed = False
        self._budget = _ByteBudget()
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    async def submit(self, rows: Sequence[Row]) -> Cursor:
        """Write all rows or none and return the newest sequence number once they are durable.

        Raises BadRequest, StorageFull, Unavailable, each before the deadline of an append.
        """
        job = _Job(rows, self._wait_s, self._budget)
        with self._gate:
            if self._closed:
                raise Unavailable(f"the log at {self._appender.name} is closed")
            if self._queue.qsize() >= BACKLOG:
                raise self._overloaded(f"{BACKLOG} appends")
            if not job.enter():
                raise self._overloaded(f"{BACKLOG_BYTES >> 20} MiB")
            job.timer = job.loop.call_later(self._wait_s, job.expire, self._appender.name)
            self._queue.put(job)
        return await job.outcome()

    def close(self) -> None:
        """Write the queued rows, then stop the thread. May be called twice."""
        with self._gate:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join()

    def _overloaded(self, backlog: str) -> Unavailable:
        return Unavailable(f"the log at {self._appender.name} is {backlog} behind; nothing was kept, send less")

    # ------------------------------------------------------------ the writer thread

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
        """Return the jobs whose rows can be stored; answer the others with an error."""
        good: list[_Job] = []
        refused: list[tuple[_Job, Answer]] = []
        for job in jobs:
            try:
                job.ready = [prepare(row) for row in job.rows]
                good.append(job)
            except Exception as error:  # noqa: BLE001 - the thread must survive any caller's rows
                refused.append((job, self._error(error)))
        _deliver(refused)
        return good

    def _commit(self, jobs: list[_Job]) -> list[_Job]:
        """Write the rows of these jobs and answer them. Return the jobs that must wait for another process's lock."""
        jobs = self._in_time(jobs)
        if not jobs:
            return []
        answer = self._try(jobs)
        if answer is None:
            return jobs
        if len(jobs) == 1 or not isinstance(answer, OstinatoError):
            _deliver([(job, answer) for job in jobs])
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
                _deliver([(job, answer)])
        return waiting

    def _in_time(self, jobs: list[_Job]) -> list[_Job]:
        """Return the jobs whose deadline has not passed. Expire the others here too, because their loop may be blocked on this thread."""
        now = time.monotonic()
        for job in jobs:
            if job.deadline <= now:
                job.leave()
                with suppress(RuntimeError):
                    job.loop.call_soon_threadsafe(job.expire, self._appender.name)
        return [job for job in jobs if job.deadline > now]

    def _try(self, jobs: list[_Job]) -> Answer | None:
        """Run one transaction for all jobs. Return None if another process holds the lock."""
        try:
            offered = [row for job in jobs for row in job.ready]
            self._appender.assign_keys(offered)
            with self._appender.transaction(offered) as head:
                rows = [row for job in jobs if job.begin() for row in job.ready]
                return self._appender.write(head, rows)
        except Exception as error:  # noqa: BLE001 - the thread must survive any caller's rows
            return None if self._appender.waits(error) else self._error(error)

    def _error(self, error: Exception) -> OstinatoError:
        if isinstance(error, OstinatoError):
            return error
        return self._appender.refusal(error)


def _memory(value: Any) -> int:
    """Return the approximate memory of a field in bytes. In a tuple 8 bytes per id count beside its pointer: turns share ids."""
    return sys.getsizeof(value) + (8 * len(value) if isinstance(value, tuple) else 0)


def _deliver(answers: Sequence[tuple[_Job, Answer]]) -> None:
    """Give each caller its answer on its own event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Job, Answer]]] = defaultdict(list)
    for job, answer in answers:
        job.leave()
        if job.answer():
            by_loop[job.loop].append((job, answer))
    for loop, settled in by_loop.items():
        with suppress(RuntimeError):  # the loop was closed, so no caller is left
            loop.call_soon_threadsafe(_settle, settled)


def _settle(settled: list[tuple[_Job, Answer]]) -> None:
    for job, answer in settled:
        # an error object per caller, because each raise attaches a traceback to it
        job.settle(copy(answer) if isinstance(answer, OstinatoError) else answer)


# ---------------------------------------------------------------- the log


T = TypeVar("T")

_MAX_LEAD_S = 3600.0  # a turn's row arrives at most this long after the first signal about it
_FIRST_SIGNALS = 10_000  # newest signals read first in search of such turns; then twice as many, and so on


class RowReader(Protocol):
    """The read side of the log on one kind of database. Thread-safe."""

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
    """The `Log` seam plus methods for a run's own workers. Call `close` when done, or use it as a context manager."""

    def __init__(self, reader: RowReader, appender: Appending[Any], ring: KeyRing | None, config: RecordConfig) -> None:
        self._config = config
        self._ring = ring
        # number of destroyed keys, and the newest one, when `note_forgotten` last ran
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

        Each turn is checked, and the texts of tokens are stored with the turns, so that the log can be read without a tokenizer.

        Example: ``log.derive_text(lambda token: renderer.decode([token]))``
        """
        self._appender.token_text = token_text

    # ------------------------------------------------------------ the seam

    async def append(self, *rows: Row) -> Cursor:
        """Write all rows or none, durably, and return the newest sequence number. A row whose identity the log has is ignored.

        Takes at most `record.append_s`. If it is unknown at the deadline whether the rows are kept (a slow disk), Unavailable says so, and
        it is safe to append them again.

        Raises:
            BadRequest: a field cannot be stored (NaN, a lone surrogate, a negative token id); `field` names it.
            StorageFull: the disk is full or refused the write; nothing of this call was kept. The log works again once there is room.
            Unavailable: the log is closed or overloaded, or the disk or another process was not ready in time.
        """
        return await self._writer.submit(rows) if rows else await self._ask(self.newest)

    async def read(self, after: Cursor, kinds: set[type]) -> AsyncIterator[tuple[Cursor, Row]]:
        """Yield the rows of the given kinds above `after`, oldest first, up to the newest row committed when reading began."""
        chosen = [kind_of(kind) for kind in kinds]
        end = await self._ask(self.newest)
        while after < end and chosen:
            page, after = await self._ask(lambda after=after: self._reader.page(chosen, after, end))
            for item in page:
                yield item

    async def find(self, kind: type[R], identities: Sequence[Identity]) -> list[R]:
        """Return the rows of one kind with these identities, in the order given, without unknown ones."""
        found = await self._ask(lambda: self._reader.find(kind_of(kind), identities))
        return [cast(R, found[each]) for each in identities if each in found]

    async def places(self, kind: type[Row], identities: Sequence[Identity]) -> list[Cursor]:
        """Return the sequence numbers of the rows of one kind with these identities, without unknown ones."""
        found = await self._ask(lambda: self._reader.places(kind_of(kind), identities))
        return [found[each] for each in identities if each in found]

    async def horizon(self) -> Cursor:
        """Return the sequence number up to which retention may have dropped rows; 0 if none. Permanent kinds (`Kind.for_ever`) stay."""
        return await self._ask(self._reader.horizon)

    async def before_last(self, count: int, kind: type[Row]) -> Cursor:
        """Return the sequence number above which exactly the newest `count` rows of a kind lie; 0 if there are fewer."""
        return await self._ask(lambda: self._reader.before_last(count, kind_of(kind))) if count > 0 else 0

    # ------------------------------------------------------------ synchronous queries

    def newest(self) -> Cursor:
        """Return the sequence number of the newest row; 0 for an empty log."""
        return self._reader.newest()

    def tail(self, n: int, kinds: set[type]) -> list[tuple[Cursor, Row]]:
        """Return the newest `n` rows of the given kinds, in log order."""
        return self._reader.tail(n, [kind_of(kind) for kind in kinds]) if n > 0 else []

    # ------------------------------------------------------------ retention and erasure

    @abstractmethod
    async def keep(self, rows: Sequence[tuple[Cursor, Row]]) -> None:
        """Add permanent rows of a log that is being copied, at their sequence numbers below the horizon. Existing rows stay as they are."""

    async def drop_old(self, now: float, keep_after: Cursor) -> int:
        """Drop whole segments that are older than `record.retain_days` and return how many. Called from time to time by a worker.

        `keep_after` is the oldest cursor of any saved fold: no row above it is dropped. If the open segment of an idle log is old enough,
        it is sealed here. Raises StorageFull, Unavailable, Corrupt.
        """
        days = self._config.retain_days
        if days is None:
            return 0
        await self._writer.submit(())
        return await asyncio.to_thread(self._drop_older, now, days, keep_after)

    @abstractmethod
    def _drop_older(self, now: float, days: float, keep_after: Cursor) -> int:
        """Do `drop_old` for segments older than `days`. Runs on a thread."""

    @property
    def keys(self) -> KeyRing | None:
        """The keys that encrypt its rows; None if nothing was ever encrypted."""
        return self._ring

    def check_forgettable(self, user: str | None) -> KeyRing:
        """Return the keys that `forget` may destroy. Raises BadConfig if nothing is encrypted, or not per user and `user` is given."""
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
        """Make the texts of one user, or of all users of a tenant, permanently unreadable by destroying their keys (crypto-shredding).

        Their turns stay in redacted form (`Turn.redacted`), their signals without correction and comment. This covers texts written while
        `record.encrypt` was on; for a single user, texts written while it was 'user'. It also covers all of the tenant's comments on turns
        that retention had dropped before the comment came, because nothing says whose they are. Returns the newest sequence number: a
        model trained on turns up to there may still know the texts until it is retrained without them.

        Then appends a `Forgotten` row, upon which every fold drops what it holds under the name. `note_forgotten` writes the rows of calls
        that were killed before this. Idempotent: forgetting somebody without new keys again leaves the log as it is.

        Raises:
            BadConfig: nothing is encrypted, or not per user.
            StorageFull, Unavailable: retry; the call is idempotent.
        """
        return await self.destroy_keys(self.check_forgettable(user), tenant, user)

    async def destroy_keys(self, ring: KeyRing, tenant: str, user: str | None) -> Cursor:
        """Do what `forget` does with these keys of the log, whatever `record.encrypt` is now."""
        scopes: list[Scope] | None = None
        missing: set[str] = set()
        if user is not None:
            early = await self._ask(lambda: ring.waiting_turns(tenant))
            found = {turn.id: turn.person for turn in await self.find(Turn, [(turn,) for turn in early])}
            theirs = [turn for turn, person in found.items() if person == (tenant, user)]
            scopes = [Scope(tenant, user), *(Scope(tenant, turn=turn) for turn in theirs)]
            missing = set(early).difference(found)
        await self._ask(lambda: ring.forget(tenant, scopes))
        newest_keys = await self._newest_forgotten_keys()
        notices = [
            row for row in await self._missing_forgotten(ring, newest_keys) if user is not None or row.tenant != tenant
        ]
        if user is None:
            newest = max(
                (number for number, scope in await self._ask(ring.destroyed) if scope.tenant == tenant), default=0
            )
            if (tenant, None) not in newest_keys or newest > newest_keys[tenant, None]:
                notices.append(_forgotten(tenant, None, newest, ring.clock()))
        elif (tenant, user) not in newest_keys and not any(
            row.user == user and row.tenant == tenant for row in notices
        ):
            notices.append(_forgotten(tenant, user, 0, ring.clock()))  # no key of theirs existed
        place = await self.append(*notices)
        # last, because it reads other people's rows, which may be damaged
        if missing and await self.horizon():
            awaited = await self._awaited_turns(tenant, missing, ring.clock() - _MAX_LEAD_S)
            dropped = [Scope(tenant, turn=turn) for turn in sorted(missing - awaited)]
            await self._ask(lambda: ring.forget(tenant, dropped))
        return place

    async def _awaited_turns(self, tenant: str, missing: set[str], since: float) -> set[str]:
        """Return those of the tenant's missing turns that a signal received since a time names, because they may still arrive.

        The other missing turns were dropped, whoever's they were. A signal that cannot be read is skipped.
        """
        awaited: set[str] = set()
        end, back = await self._ask(self.newest), _FIRST_SIGNALS
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
        """Yield the signals above `after` up to `end`, except damaged ones, which are found by bisection."""
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
        """Write the missing `Forgotten` rows of destroyed keys and return how many were missing.

        They are missing if a call of `forget` was killed, if an earlier version destroyed the keys, or after `restore`, which puts an older
        log beside the keys. Cheap if no key was destroyed since the last call. Raises StorageFull, Unavailable.
        """
        ring = self._ring
        destroyed = [] if ring is None else await self._ask(ring.destroyed)
        seen = len(destroyed), destroyed[-1][0] if destroyed else 0
        if ring is None or seen == self._noted:
            return 0
        notices = await self._missing_forgotten(ring, await self._newest_forgotten_keys())
        await self.append(*notices)
        self._noted = seen
        return len(notices)

    async def _newest_forgotten_keys(self) -> dict[tuple[str, str | None], int]:
        """Return the newest destroyed key that the log's `Forgotten` rows name, as {(tenant, user): key number}."""
        newest_keys: dict[tuple[str, str | None], int] = {}
        async for _, row in self.read(0, {Forgotten}):
            if isinstance(row, Forgotten):
                newest_keys[row.tenant, row.user] = max(row.key, newest_keys.get((row.tenant, row.user), 0))
        return newest_keys

    async def _missing_forgotten(
        self, ring: KeyRing, newest_keys: Mapping[tuple[str, str | None], int]
    ) -> list[Forgotten]:
        """Return the `Forgotten` rows of destroyed keys that the log lacks."""
        found: dict[tuple[str, str | None], int] = {}
        for number, scope in await self._ask(ring.destroyed):
            if number > max(newest_keys.get((scope.tenant, user), 0) for user in (scope.user, None)):
                found[scope.tenant, scope.user] = number
        return [_forgotten(tenant, user, number, ring.clock()) for (tenant, user), number in found.items()]

    async def _ask(self, question: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._asking, question)


def _forgotten(tenant: str, user: str | None, key: int, at: float) -> Forgotten:
    """Build a `Forgotten` row. With a key its id is deterministic, so that it is appended once; without one (0) it is random."""
    whose = "tenant" if user is None else "key"
    name = f"{whose}-{key}" if key else f"{whose}-{token_hex(16)}"
    return Forgotten(id=f"forgotten-{name}", tenant=tenant, user=user, key=key, at=at)
