"""Roles of a run's workers: one at work, the others in reserve, and who lost its role ends before it writes anything."""

import asyncio
from contextlib import closing
from dataclasses import replace

import pytest
from tests.contract.test_log import BATCH, read
from tests.deadlines import PATIENT_S
from tests.fakes.postgres_server import started
from tests.unit.record.postgres.test_leases import expire

from ostinato.app.roles import open_roles
from ostinato.app.storage import open_run
from ostinato.config import load
from ostinato.core.errors import Conflict, LeaseLost, Unavailable
from ostinato.launch.placing.heartbeat import Heartbeat
from ostinato.launch.workers.shutdown import Stopped
from ostinato.launch.workers.worker_main import WorkerContext, run_in_role
from ostinato.weights.version.content import hash_of

ONE, TWO = hash_of(b"1"), hash_of(b"2")


@pytest.fixture
def hosts(in_postgres, tmp_path):
    """Two hosts of one run: directories of their own, one log, one weight store."""
    record = in_postgres()
    shared = [
        f"record.url='{record.url}'",
        f"record.namespace='{record.namespace}'",
        "record.lease_s=3600",
        "record.append_s=600",
        f"weights.url='{tmp_path / 'weights'}'",
    ]
    return [load(None, [f"run.directory='{tmp_path / name}'", *shared]) for name in ("a", "b")]


def life():
    return WorkerContext(stopping=asyncio.Event(), pulse=Heartbeat())


class Work:
    """What a worker does: it says when it began, and waits until it is told what to do."""

    def __init__(self):
        self.began, self.run, self.ended = asyncio.Event(), None, False

    async def __call__(self, run):
        self.run = run
        self.began.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended = True


async def stopped(task, told):
    told.stopping.set()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_on_one_machine_a_second_worker_is_refused(tmp_path):
    config = load(None, [f"run.directory='{tmp_path}'"])
    first, at_work = Work(), life()
    task = asyncio.create_task(run_in_role(config, at_work, "train", first))
    await first.began.wait()
    assert first.run.log is not None
    with pytest.raises(Conflict, match="another train process"):
        await run_in_role(config, life(), "train", Work())
    await stopped(task, at_work)
    assert first.ended


async def test_the_reserve_of_another_host_waits_takes_over_and_the_first_ends_without_a_trace(hosts):
    first, second, lives = Work(), Work(), (life(), life())
    tasks = [asyncio.create_task(run_in_role(hosts[0], lives[0], "release", first))]
    await first.began.wait()
    await first.run.store.move_ref("live", None, ONE)
    tasks.append(asyncio.create_task(run_in_role(hosts[1], lives[1], "release", second)))
    while not lives[1].pulse.sign().doing.startswith("in reserve: another release process (process "):
        await asyncio.sleep(0.02)
    assert not second.began.is_set()
    expire(hosts[0].record, "release")  # as if the first gave no sign of life any more
    await second.began.wait()
    for attempt in (
        first.run.log.append(BATCH),
        first.run.folds.save("monitors", 1, {}),
        first.run.store.move_ref("live", ONE, TWO),
    ):
        with pytest.raises(LeaseLost, match="another process has become the release process"):
            await attempt
    with pytest.raises(LeaseLost):
        await tasks[0]
    assert first.ended
    assert await second.run.log.append(BATCH) == 1
    await second.run.store.move_ref("live", ONE, TWO)
    assert await read(second.run.log) == [(1, BATCH)]
    await stopped(tasks[1], lives[1])
    with open_run(hosts[0]) as run:
        assert await run.store.refs() == {"live": TWO}


async def test_a_reserve_that_is_told_to_end_ends(hosts):
    with closing(await asyncio.to_thread(open_roles(hosts[0]).take, "train")):
        waiting = life()
        asyncio.get_running_loop().call_later(0.3, waiting.stopping.set)
        with pytest.raises(Stopped):
            await run_in_role(hosts[1], waiting, "train", Work())


async def test_who_ends_lets_the_reserve_in_at_once(hosts):
    first, second, lives = Work(), Work(), (life(), life())
    one = asyncio.create_task(run_in_role(hosts[0], lives[0], "housekeeping", first))
    await first.began.wait()
    two = asyncio.create_task(run_in_role(hosts[1], lives[1], "housekeeping", second))
    await stopped(one, lives[0])
    await second.began.wait()
    await stopped(two, lives[1])


# ---------------------------------------------------------------- a server that is away


@pytest.fixture
def own_server(tmp_path):
    """The settings of a run, and the server of its log, which the test may stop."""
    with started() as server:
        url = f"record.url='{server.url}'"
        yield server, load(None, [f"run.directory='{tmp_path}'", url, "record.append_s=3", "record.lease_s=3600"])


class Counts:
    """What a trainer does: it writes steps, and what it folded, one after the other."""

    def __init__(self):
        self.steps, self.step, self.starts = 0, asyncio.Event(), 0

    async def __call__(self, run):
        self.starts += 1
        while True:
            await run.log.append(replace(BATCH, step=self.steps + 1))
            await run.folds.save("desk", self.steps + 1, {})
            self.steps += 1
            self.step.set()
            await asyncio.sleep(0.05)

    async def goes_on(self):
        self.step.clear()
        async with asyncio.timeout(PATIENT_S):
            await self.step.wait()


@pytest.mark.parametrize("role", ["train", "housekeeping"])
async def test_a_worker_waits_for_a_server_that_is_away_for_longer_than_an_append_may_take(own_server, role):
    server, config = own_server
    work, at_work = Counts(), life()
    task = asyncio.create_task(run_in_role(config, at_work, role, work))
    await work.goes_on()
    await asyncio.to_thread(server.stop)
    async with asyncio.timeout(PATIENT_S):
        while not at_work.pulse.sign().doing.startswith("waiting for the log: "):
            await asyncio.sleep(0.05)
    await asyncio.sleep(2)
    assert not task.done()
    assert at_work.pulse.sign().doing.startswith("waiting for the log: ")
    await asyncio.to_thread(server.start)
    await work.goes_on()
    assert not at_work.pulse.sign().doing.startswith("waiting for the log")
    assert work.starts == 1
    await stopped(task, at_work)
    with open_run(config) as run:
        rows = [row.step for _, row in await read(run.log)]
    assert rows == list(range(1, len(rows) + 1))
    assert len(rows) - work.steps in (0, 1)


async def test_a_worker_waits_no_longer_than_it_may_and_one_without_patience_not_at_all(own_server):
    server, config = own_server
    hasty = config.model_copy(update={"record": config.record.model_copy(update={"away_s": 2.0})})
    began = {"train": Counts(), "release": Counts()}
    tasks = [
        asyncio.create_task(run_in_role(hasty, life(), "train", began["train"])),
        asyncio.create_task(run_in_role(config, life(), "release", began["release"], patient=False)),
    ]
    for each in began.values():
        await each.goes_on()
    await asyncio.to_thread(server.stop)
    async with asyncio.timeout(PATIENT_S):
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(found, Unavailable)
