"""A server that does not answer: who asks is told within the time that an append may take, however many ask; who has patience waits."""

import asyncio
import time
from contextlib import contextmanager

import pytest
from tests.contract.test_log import BATCH, EVENT, SIGNAL, TURN, read
from tests.deadlines import PATIENT_S, WHOLE_PROGRAM_S, OwnTime
from tests.fakes.distant_postgres import DistantPostgres
from tests.unit.record.postgres.test_leases import expire

from ostinato.app.roles import wait_for
from ostinato.core.errors import LeaseLost, Unavailable
from ostinato.core.records import Turn
from ostinato.core.retry import Patience
from ostinato.record.postgres.leases import PostgresRoles
from ostinato.record.postgres.log import PostgresFolds, PostgresLog
from ostinato.record.postgres.server import LogServer

APPEND_S = 2.0


@pytest.fixture
def far(postgres_server):
    with DistantPostgres(postgres_server.directory) as distant:
        yield distant


async def timed(work):
    began = time.monotonic()
    try:
        return await asyncio.wait_for(work, PATIENT_S), time.monotonic() - began
    except Unavailable as error:
        return error, time.monotonic() - began


async def test_questions_that_wait_for_each_other_are_told_at_the_same_time(in_postgres, far):
    with PostgresLog.open(far.of(in_postgres(append_s=APPEND_S))) as log:
        await log.append(TURN)
        assert await log.find(Turn, [(TURN.id,)]) == [TURN]
        with far.silent():
            asked = [log.find(Turn, [(TURN.id,)]), log.find(Turn, [("a",)]), read(log), log.horizon(), log.append()]
            async with OwnTime() as own:
                answers = await asyncio.gather(*map(timed, asked))
            later, _ = await timed(log.find(Turn, [("b",)]))
        assert [type(answer) for answer, _ in answers] == [Unavailable] * 5
        assert isinstance(later, Unavailable)
        assert "did not answer within 2 s" in str(later)
        assert own.seconds < 1.75 * APPEND_S
        assert min(seconds for _, seconds in answers) > 0.9 * APPEND_S
        assert await log.find(Turn, [(TURN.id,)]) == [TURN]


async def test_who_waits_long_for_others_whose_questions_are_answered_is_answered(in_postgres, far):
    with PostgresLog.open(far.of(in_postgres(append_s=4.0))) as log:
        await log.append(TURN)
        far.round_trip_s = 0.25
        asked = [log.find(Turn, [(str(n),)]) for n in range(20)]  # 5 s in all
        assert await asyncio.gather(*asked) == [[]] * 20


# ---------------------------------------------------------------- patience


class Said(list):
    @contextmanager
    def __call__(self, what):
        self.append(what)
        yield
        self.append("done")


async def test_who_has_patience_goes_on_where_the_server_went_silent(in_postgres, far):
    said = Said()
    patience, config = Patience(WHOLE_PROGRAM_S, said, again_s=0.1), far.of(in_postgres(append_s=1))
    with PostgresLog.open(config, patience=patience) as log:
        folds = PostgresFolds(LogServer.of(config), patience)
        assert await log.append(SIGNAL) == 1
        said.clear()
        with far.silent():
            asked = [log.append(BATCH), log.find(Turn, [(TURN.id,)]), folds.save("desk", 1, {"n": 1})]
            waiting = [asyncio.create_task(each) for each in asked]
            async with asyncio.timeout(PATIENT_S):
                while not said:
                    await asyncio.sleep(0.1)
            await asyncio.sleep(2)
            assert not any(task.done() for task in waiting)
            assert len(said) == 1
            assert said[0].startswith("waiting for the log: the log at ")
        assert await asyncio.gather(*waiting) == [2, [], None]
        assert said[-1] == "done"
        assert [row for _, row in await read(log)] == [SIGNAL, BATCH]  # however often it was sent
        assert await folds.load("desk") == (1, {"n": 1})


async def test_patience_ends(in_postgres, far):
    with PostgresLog.open(far.of(in_postgres(append_s=1)), patience=Patience(2, Said(), again_s=0.1)) as log:
        await log.append(SIGNAL)
        with far.silent():
            answer, seconds = await timed(log.append(BATCH))
        assert isinstance(answer, Unavailable)
        assert 2 <= seconds < PATIENT_S


async def test_who_lost_its_lease_while_it_waited_is_told(in_postgres, far):
    near = in_postgres(append_s=1, lease_s=3600)
    roles, said = PostgresRoles(near), Said()
    first = roles.take("train")
    with PostgresLog.open(
        far.of(near), token=first.token, patience=Patience(WHOLE_PROGRAM_S, said, again_s=0.1)
    ) as log:
        await log.append(BATCH)
        with far.silent():
            waiting = asyncio.create_task(log.append(EVENT))
            while not said:
                await asyncio.sleep(0.1)
            expire(near)
            second = await wait_for(
                roles, "train", lambda _: None
            )  # until the server has ended what the cut caught in a transaction
        with pytest.raises(LeaseLost):
            await waiting
        assert [row for _, row in await read(log)] == [BATCH]
    for lease in (first, second):
        lease.close()
