"""Group commit: one thread writes whatever is waiting in one transaction, so that many callers share one fsync.

When the shared transaction fails, each caller's rows are tried alone: the ones that fit are kept, and exactly the others get the
error.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from sqlalchemy import Connection, Engine, func, select, tuple_
from sqlalchemy.exc import DatabaseError

from ostinato.core.errors import OstinatoError, Unavailable
from ostinato.core.records import Identity
from ostinato.core.seams import Clock, Cursor
from ostinato.record import schema
from ostinato.record.codec import BY_TABLE, Encoded, Values
from ostinato.record.sqlite import translate

GROUP = 512  # callers per transaction
LOOKUP = 400  # identities per query: below SQLite's bound on parameters

_newest = select(func.coalesce(func.max(schema.entries.c.seq), 0))


@dataclass(frozen=True, slots=True)
class _Job:
    rows: Sequence[Encoded]
    done: asyncio.Future[Cursor]
    loop: asyncio.AbstractEventLoop


class GroupWriter:
    """The only writer of one process. Thread-safe; `submit` is called on an event loop."""

    def __init__(self, engine: Engine, path: Path, clock: Clock | None) -> None:
        self._engine = engine
        self._path = path
        self._clock = clock
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._gate = threading.Lock()  # nothing may follow the closing mark into the queue
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    async def submit(self, rows: Sequence[Encoded]) -> Cursor:
        """Write all rows or none; returns the newest sequence number once they are on disk. Raises StorageFull, Unavailable."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Cursor] = loop.create_future()
        with self._gate:
            if self._closed:
                raise Unavailable(f"the log at {self._path} is closed")
            self._queue.put(_Job(rows, done, loop))
        return await done

    def close(self) -> None:
        """Write what is waiting, then stop the thread. May be called twice."""
        with self._gate:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        open_ = True
        while open_:
            jobs, open_ = self._take()
            if jobs:
                self._commit(jobs)

    def _take(self) -> tuple[list[_Job], bool]:
        jobs: list[_Job] = []
        job = self._queue.get()
        while job is not None:
            jobs.append(job)
            if len(jobs) == GROUP:
                return jobs, True
            try:
                job = self._queue.get_nowait()
            except Empty:
                return jobs, True
        return jobs, False

    def _commit(self, jobs: list[_Job]) -> None:
        answers = [self._try([row for job in jobs for row in job.rows])] * len(jobs)
        if len(jobs) > 1 and isinstance(answers[0], OstinatoError):
            answers = [self._try(job.rows) for job in jobs]
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Job, Cursor | OstinatoError]]] = defaultdict(list)
        for job, each in zip(jobs, answers, strict=True):
            by_loop[job.loop].append((job, each))
        for loop, settled in by_loop.items():
            with suppress(RuntimeError):  # the loop was closed meanwhile: nobody is left to be told
                loop.call_soon_threadsafe(_settle, settled)

    def _try(self, rows: Sequence[Encoded]) -> Cursor | OstinatoError:
        try:
            with self._engine.begin() as connection:
                return self._write(connection, rows)
        except DatabaseError as error:
            self._engine.dispose()  # after an I/O error the connection's state is not to be trusted
            return translate(error, self._path)
        except Exception as error:  # noqa: BLE001 - the thread must outlive any one caller's rows
            return Unavailable(f"rows could not be written to {self._path}: {error!r}")

    def _write(self, connection: Connection, rows: Sequence[Encoded]) -> Cursor:
        newest: int = connection.execute(_newest).scalar_one()
        fresh = _unseen(connection, rows)
        if not fresh:
            return newest
        now = None if self._clock is None else self._clock()
        entries: list[Values] = []
        by_table: dict[str, list[Values]] = defaultdict(list)
        for seq, row in enumerate(fresh, start=newest + 1):
            entries.append({"seq": seq, "kind": row.kind, "written_at": now})
            by_table[row.kind].append({"seq": seq, **row.values})
        connection.execute(schema.entries.insert(), entries)
        for table, values in by_table.items():
            connection.execute(schema.metadata.tables[table].insert(), values)
        return newest + len(fresh)


def _unseen(connection: Connection, rows: Sequence[Encoded]) -> list[Encoded]:
    """The rows whose identity is neither stored nor earlier in the list, in order."""
    wanted: dict[str, list[Identity]] = defaultdict(list)
    for row in rows:
        wanted[row.kind].append(row.identity)
    seen: set[tuple[str, Identity]] = set()
    for table, identities in wanted.items():
        columns = [schema.metadata.tables[table].c[name] for name in BY_TABLE[table].identity]
        for start in range(0, len(identities), LOOKUP):
            query = select(*columns).where(tuple_(*columns).in_(identities[start : start + LOOKUP]))
            seen.update((table, tuple(found)) for found in connection.execute(query))
    fresh: list[Encoded] = []
    for row in rows:
        key = (row.kind, row.identity)
        if key not in seen:
            seen.add(key)
            fresh.append(row)
    return fresh


def _settle(settled: list[tuple[_Job, Cursor | OstinatoError]]) -> None:
    for job, answer in settled:
        if job.done.done():  # its caller was cancelled
            continue
        if isinstance(answer, OstinatoError):
            job.done.set_exception(
                type(answer)(*answer.args)
            )  # one exception object per caller: tracebacks are attached to it
        else:
            job.done.set_result(answer)
