"""A log that moves from SQLite to Postgres and back is the same log, row for row and place for place."""

import pytest
from tests.contract.test_log import BATCH, ROWS, TURN, read
from tests.unit.record.postgres.test_postgres_log import DAY, signals

from ostinato.core.errors import BadConfig, Conflict, StorageFull
from ostinato.record.backup import copy_log
from ostinato.record.config import Encrypt, RecordConfig
from ostinato.record.log import SqlLog
from ostinato.record.postgres.log import PostgresLog

SMALL = RecordConfig(segment_rows=7, retain_days=1)


def told(*_):
    """Nobody looks at the bar."""


async def test_there_and_back_every_row_has_its_place(tmp_path, in_postgres):
    config = in_postgres(segment_rows=11)
    with SqlLog.open(tmp_path / "a", config=SMALL) as source:
        await source.append(*ROWS, *signals(700))
        rows = await read(source)
        seen = []
        assert (
            await copy_log(source, lambda first: PostgresLog.open(config, first=first), lambda *at: seen.append(at))
            == len(ROWS) + 700
        )
        assert seen[-1] == (len(ROWS) + 700, len(ROWS) + 700)
    with PostgresLog.open(config) as middle:
        assert await read(middle) == rows
        await copy_log(middle, lambda first: SqlLog.open(tmp_path / "b", config=SMALL, first=first), told)
    with SqlLog.open(tmp_path / "b") as back:
        assert await read(back) == rows
        assert await back.append(*ROWS) == len(ROWS) + 700


async def test_what_was_dropped_stays_dropped_and_what_stays_for_ever_keeps_its_place(tmp_path, in_postgres):
    now, config = [0.0], in_postgres()
    with SqlLog.open(tmp_path / "a", lambda: now[0], SMALL) as source:
        await source.append(*ROWS)
        await source.append(*signals(10, 50))
        now[0] = 3 * DAY
        assert await source.drop_old(now[0], len(ROWS)) == 1
        rows, horizon = await read(source), await source.horizon()
        assert horizon == len(ROWS)
        await copy_log(source, lambda first: PostgresLog.open(config, first=first), told)
    with PostgresLog.open(config) as middle:
        assert (await read(middle), await middle.horizon()) == (rows, horizon)
        assert await middle.append(BATCH) == len(ROWS) + 10
        await copy_log(middle, lambda first: SqlLog.open(tmp_path / "b", first=first), told)
    with SqlLog.open(tmp_path / "b") as back:
        assert (await read(back), await back.horizon()) == (rows, horizon)
        assert await back.append(BATCH) == len(ROWS) + 10
        assert await back.append(TURN) == len(ROWS) + 11


async def test_a_copy_that_was_cut_short_goes_on_where_it_stood(tmp_path, in_postgres):
    config = in_postgres()
    with SqlLog.open(tmp_path / "a") as source:
        await source.append(*signals(1200))

        def full(done, _):
            if done >= 500:
                raise StorageFull("no room")

        with pytest.raises(StorageFull):
            await copy_log(source, lambda first: PostgresLog.open(config, first=first), full)
        with PostgresLog.open(config) as part:
            assert part.newest() == 500
        copied = []
        await copy_log(source, lambda first: PostgresLog.open(config, first=first), lambda done, _: copied.append(done))
        assert copied == [1000, 1200]
        assert await copy_log(source, lambda first: PostgresLog.open(config, first=first), told) == 1200
        with PostgresLog.open(config) as whole:
            assert await read(whole) == await read(source)


async def test_a_log_with_other_rows_is_not_copied_to(tmp_path, in_postgres):
    config = in_postgres()
    with SqlLog.open(tmp_path / "a") as source, PostgresLog.open(config) as target:
        await source.append(*signals(3))
        await target.append(*signals(2, 7))
        with pytest.raises(Conflict, match=r"row 2 .* is not a row of this one"):
            await copy_log(source, lambda first: PostgresLog.open(config, first=first), told)


async def test_what_lies_under_keys_is_not_copied_in_the_clear(tmp_path, in_postgres):
    with SqlLog.open(tmp_path / "a", config=RecordConfig(encrypt=Encrypt.USER)) as source:
        await source.append(TURN)
        with pytest.raises(BadConfig, match="encrypted with its own keys"):
            await copy_log(source, lambda first: PostgresLog.open(in_postgres(), first=first), told)
