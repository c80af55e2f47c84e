"""A whole run whose log is in Postgres: gateway, trainer, release worker and housekeeping, as processes."""

import asyncio

from tests.deadlines import LEARNING_S
from tests.oracles.turn_accounting import recount

from ostinato.app.storage import home, open_run
from ostinato.core.records import Batch, ReleaseEvent, Signal, Turn
from ostinato.record.postgres.log import PostgresLog


async def test_people_teach_a_model_whose_log_lies_in_postgres(tmp_path, in_postgres, running, simulated_users):
    record = in_postgres()
    run = await running(tmp_path, f"record.url='{record.url}'", f"record.namespace='{record.namespace}'")
    with open_run(run.config) as opened:
        log = opened.log
        assert isinstance(log, PostgresLog)

        async def shipped():
            events = [row async for _, row in log.read(0, {ReleaseEvent})]
            return [row for row in events if row.action == "shipped" and row.policy.number > 0]

        try:
            async with simulated_users(run) as acked, asyncio.timeout(LEARNING_S):
                while not await shipped():
                    await asyncio.sleep(0.3)
            await asyncio.sleep(1)
        finally:
            await run.stop()
        assert not [event for event in run.events if "starts again" in event[1]]
        turns = {row.id: row async for _, row in log.read(0, {Turn}) if isinstance(row, Turn)}
        assert {turn: turns[turn].text for turn in acked.turns} == acked.turns
        assert acked.signals <= {row.id async for _, row in log.read(0, {Signal}) if isinstance(row, Signal)}
        assert [row async for _, row in log.read(0, {Batch})]
        found = await recount(log)
        assert found.balanced, found
    assert [path.name for path in home(run.config).log.iterdir()] == ["postgres"]
