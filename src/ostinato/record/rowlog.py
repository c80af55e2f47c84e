"""The log's interface, independent of its database: one thread commits for all callers, another reads."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, Self, TypeVar, cast

from ostinato.core.errors import BadConfig
from ostinato.core.records import Identity, Row, Turn
from ostinato.core.seams import Cursor, R
from ostinato.record.codec.kinds import Kind, kind_of
from ostinato.record.config import Encrypt, RecordConfig
from ostinato.record.head import TokenText
from ostinato.record.keys import KeyRing, Scope
from ostinato.record.writer import Appending, GroupWriter

T = TypeVar("T")


class Reading(Protocol):
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

    def __init__(self, reader: Reading, appender: Appending[Any], ring: KeyRing | None, config: RecordConfig) -> None:
        self._config = config
        self._ring = ring
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

    @property
    def encrypted(self) -> bool:
        """True if there are keys, so that rows may be encrypted."""
        return self._ring is not None

    @abstractmethod
    async def keep(self, rows: Sequence[tuple[Cursor, Row]]) -> None:
        """Add permanent rows of a log that is being copied, each at its place below the horizon. Existing rows stay as they are."""

    @abstractmethod
    async def drop_old(self, now: float, keep_after: Cursor) -> int:
        """Drop whole segments that are older than `record.retain_days`; returns how many. A worker calls this from time to time.

        `keep_after` is the oldest cursor of any saved fold: nothing above it is dropped. An idle log's last segment is closed here when
        its time has come. Raises StorageFull, Unavailable, Corrupt.
        """

    async def forget(self, tenant: str, user: str | None = None) -> Cursor:
        """Make the texts of a tenant's user, or of all its users, unreadable for ever by destroying their keys.

        Their turns stay in redacted form (`Turn.redacted`), their signals without correction and comment. Covers texts written while
        `record.encrypt` was on, and for a single user texts written while it was 'user'. Returns the newest place in the log: a model
        trained on turns up to there may still know them, until it is trained again without them.

        Raises:
            BadConfig: nothing is encrypted, or not per user.
            StorageFull, Unavailable: call it again.
        """
        ring = self._ring
        if ring is None:
            raise BadConfig(
                "record.encrypt is 'none': nothing can be forgotten; set it to 'tenant' or 'user' beforehand"
            )
        if user is not None and self._config.encrypt is not Encrypt.USER:
            raise BadConfig(
                f"record.encrypt is {self._config.encrypt.value!r}: set it to 'user' to forget a user alone"
            )
        scopes: list[Scope] | None = None
        if user is not None:
            early = await self._ask(lambda: ring.waiting_turns(tenant))
            turns = await self.find(Turn, [(turn,) for turn in early])
            theirs = [turn.id for turn in turns if (turn.tenant, turn.user) == (tenant, user)]
            scopes = [Scope(tenant, user), *(Scope(tenant, turn=turn) for turn in theirs)]
        await self._ask(lambda: ring.forget(tenant, scopes))
        return await self._ask(self.newest)

    async def _ask(self, question: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._asking, question)
