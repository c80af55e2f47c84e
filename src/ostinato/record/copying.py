"""Copies a log from one database to another, with the same rows at the same sequence numbers. Can be killed and restarted."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from ostinato.core.errors import BadConfig, Conflict
from ostinato.core.records import Row, identity
from ostinato.core.seams import Cursor
from ostinato.record.codec.kinds import FOR_EVER, KINDS
from ostinato.record.rowlog import RowLog

_ROWS = 500  # per append

OpenTarget = Callable[[Cursor], RowLog]
"""Opens the target log; if it is created, its first row gets this sequence number."""


async def copy_log(source: RowLog, open_target: OpenTarget, on_row: Callable[[Cursor, Cursor], None]) -> Cursor:
    """Copy the missing rows; returns the place of the newest row. `on_row` gets the place reached and the last place.

    Rows that the source's retention keeps are kept in the target too. Rows appended to the source meanwhile are not copied, so stop its
    workers first.

    Raises:
        Conflict: the target holds other rows, or the source has dropped rows that the target lacks.
        BadConfig: the source has encrypted rows.
        StorageFull, Unavailable: call it again; it resumes where it stopped.
    """
    if source.encrypted:
        raise BadConfig("what people wrote lies under keys in this log, which are not copied; it stays where it is")
    end, horizon = source.newest(), await source.horizon()
    with open_target(horizon + 1) as target:
        after = target.newest()
        await _compare(source, target, after, horizon)
        kinds: set[type] = {kind.record for kind in FOR_EVER}
        kept = [item async for item in source.read(0, kinds) if item[0] <= horizon] if horizon else []
        if kept and await target.horizon():
            await target.keep(kept)
        everything: set[type] = {kind.record for kind in KINDS}
        page: list[tuple[Cursor, Row]] = []
        async for item in source.read(after, everything):
            page.append(item)
            if len(page) == _ROWS or item[0] == end:
                await _append(target, page)
                on_row(page[-1][0], end)
                page = []
            if item[0] == end:
                break
        return target.newest()


async def _compare(source: RowLog, target: RowLog, after: Cursor, horizon: Cursor) -> None:
    """Raise Conflict unless the target's rows are the source's first rows."""
    if after < horizon:
        raise Conflict(
            f"the log to copy to ends at row {after}, and rows up to {horizon} were dropped; begin with an empty one"
        )
    everything: set[type] = {kind.record for kind in KINDS}
    theirs = target.tail(1, everything)
    if not theirs or theirs[0][0] <= horizon:
        return
    place, row = theirs[0]
    if await source.places(type(row), [identity(row)]) != [place] or await source.find(type(row), [identity(row)]) != [
        row
    ]:
        raise Conflict(f"row {place} of the log to copy to is no row of this one; name an empty one")


async def _append(target: RowLog, page: list[tuple[Cursor, Row]]) -> None:
    gap = any(later != earlier + 1 for (earlier, _), (later, _) in pairwise(page))
    newest = await target.append(*(row for _, row in page))
    if gap or newest != page[-1][0]:
        raise Conflict(
            f"row {page[-1][0]} came to place {newest}: somebody else writes to the log that is copied to; stop it"
        )
