"""Texts of tokens that another gateway writes at the same moment: no row is kept whose text nobody can spell."""

from dataclasses import replace

import pytest
from tests.contract.test_log import SIGNAL, TURN, read
from tests.unit.record.postgres.test_postgres_log import sql

from ostinato.record.postgres.log import PostgresLog
from ostinato.record.postgres.server import LogServer

SPELT = replace(TURN, id="spelt", parent=TURN.id, sampled_ids=(71, 72), text="<71><72>")


@pytest.mark.parametrize("end", ["ROLLBACK", "COMMIT"])
@pytest.mark.parametrize("text", ["<72>", "another tokenizer's"])
async def test_a_text_that_waited_for_another_gateways_token_in_vain_is_read_back_whole(
    in_postgres, monkeypatch, end, text
):
    config, refused = in_postgres(), []
    with PostgresLog.open(config) as log, PostgresLog.open(config) as other, LogServer.of(config).dial() as gateway:
        log.derive_text(lambda token: f"<{token}>")
        await log.append(SIGNAL, TURN)
        gateway.execute("BEGIN")
        gateway.execute("INSERT INTO pieces VALUES (1, 72, %s)", (text.encode(),))
        roll_back = log._appender._roll_back

        def refused_once():  # the server has answered LockNotAvailable
            refused.append(1)
            gateway.execute(end)
            roll_back()

        monkeypatch.setattr(log._appender, "_roll_back", refused_once)
        assert await log.append(SPELT) == 3
        assert refused == [1]
        assert [row for _, row in await read(other)] == [SIGNAL, TURN, SPELT]
        assert await log.append(replace(SPELT, id="again")) == 4
        assert [row for _, row in await read(other)] == [SIGNAL, TURN, SPELT, replace(SPELT, id="again")]
    kept = sql(config, "SELECT said IS NULL FROM rows_0000000000000001 WHERE tokens IS NOT NULL AND seq > 2")
    assert kept == [(end == "ROLLBACK" or text == "<72>",)] * 2
