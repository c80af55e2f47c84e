"""What Postgres writes to its own log when an append fails: nothing that people wrote, neither plain nor packed."""

from base64 import b64encode
from dataclasses import replace

import pytest
from tests.contract.test_log import SIGNAL, TURN, read
from tests.unit.record.postgres.test_postgres_log import sql

from ostinato.core.errors import StorageFull, Unavailable
from ostinato.record.postgres.log import PostgresLog

WORDS = "Grandmother's recipe, 0x5eed: never tell the neighbours"
ROWS = "rows_0000000000000001"
FAILING = {
    "full disk": ("RAISE EXCEPTION 'planted' USING ERRCODE = '53100'", StorageFull, b"planted"),
    "timeout": ("PERFORM pg_sleep(30)", Unavailable, b"statement timeout"),
    "constraint": (f"INSERT INTO {ROWS} SELECT * FROM {ROWS} LIMIT 1", Unavailable, b"duplicate key"),
}


@pytest.mark.parametrize("failing", FAILING)
async def test_an_append_that_fails_leaves_no_words_in_the_servers_log(in_postgres, postgres_server, failing):
    body, error, said = FAILING[failing]
    config = in_postgres(append_s=2)
    turn, signal = replace(TURN, user=WORDS, text=WORDS), replace(SIGNAL, comment=WORDS)
    with PostgresLog.open(config) as log:
        await log.append(replace(SIGNAL, id="before"))
        told = (postgres_server.directory / "log").stat().st_size
        sql(config, f"CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN {body}; RETURN NEW; END$$")
        # pg_trigger_depth: what it inserts itself meets no trigger
        planted = "FOR EACH ROW WHEN (pg_trigger_depth() = 0) EXECUTE FUNCTION fail()"
        sql(config, f"CREATE TRIGGER planted BEFORE INSERT ON {ROWS} {planted}")
        with pytest.raises(error):
            await log.append(turn, signal)
        sql(config, f"DROP TRIGGER planted ON {ROWS}")
        assert await log.append(turn, signal) == 3
        assert [row for _, row in await read(log)][1:] == [turn, signal]
    found = (postgres_server.directory / "log").read_bytes()[told:]
    assert said in found
    assert f"INSERT INTO {ROWS}".encode() in found.replace(b'"', b"")  # statements that fail are written down
    packed = sql(config, f"SELECT body, said, tokens, logprobs FROM {ROWS} WHERE seq > 1")
    kept = [value for row in packed for value in row if value]
    assert len(kept) >= 6
    for value in (WORDS.encode(), *kept):
        for written in (value, b64encode(value), value.hex().encode(), b64encode(value)[4:-4]):
            assert written not in found
