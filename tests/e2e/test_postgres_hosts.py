"""One run on two hosts: two gateways that people use, one log in Postgres, one weight store, one trainer at work."""

import asyncio
import os
import signal

import pytest
from tests.oracles.turn_accounting import recount

from ostinato.app.storage import home, open_run
from ostinato.core.records import Batch, Signal, Turn


async def steps(log):
    return [row async for _, row in log.read(0, {Batch}) if isinstance(row, Batch)]


async def until(ask, timeout_s=400):
    async with asyncio.timeout(timeout_s):
        while not (found := await ask()):
            await asyncio.sleep(0.2)
        return found


def at_work(runs, role):
    """The hosts whose worker is not in reserve, of those whose worker says anything."""
    waits = [run.launched.doing(role).startswith("in reserve: another") for run in runs]
    return [run for run, waiting in zip(runs, waits, strict=True) if not waiting] if any(waits) else []


@pytest.mark.examination
async def test_two_hosts_serve_one_run_and_a_paused_or_killed_trainer_is_replaced(
    tmp_path, in_postgres, running, simulated_users
):
    record = in_postgres()
    shared = [
        f"record.url='{record.url}'",
        f"record.namespace='{record.namespace}'",
        "record.lease_s=3",
        "record.append_s=60",
        f"weights.url='{tmp_path / 'weights'}'",
        "supervise.silence_s=600",  # its own supervisor is not to be quicker than the other host
        "learn.max_lead=500",
        "reward.max_staleness=500",  # no release worker is there to let the trainer go on
        "learn.checkpoint_every=1",
    ]
    names = ("serve", "train")
    one = await running(tmp_path / "a", *shared, names=names)
    two = await running(tmp_path / "b", *shared, f"model.source='{one.config.model.source}'", names=names)
    runs = (one, two)
    with open_run(one.config) as opened:
        log = opened.log

        async def trained(more):
            return len(await steps(log)) >= more and at_work(runs, "train")

        try:
            async with simulated_users(one, 6) as here, simulated_users(two, 6) as there:
                (first,) = await until(lambda: trained(2))
                second = two if first is one else one
                paused = first.worker("train")
                os.kill(paused.pid, signal.SIGSTOP)

                async def replaced():
                    return not second.launched.doing("train").startswith("in reserve")

                await until(replaced)
                os.kill(paused.pid, signal.SIGCONT)

                async def ended():
                    return [what for who, what in first.events if who == "train" and "LeaseLost" in what]

                await until(ended)
                before = len(await steps(log))
                await until(lambda: trained(before + 2))
                assert at_work(runs, "train") == [second]
                os.kill(second.worker("train").pid, signal.SIGKILL)
                before = len(await steps(log))
                await until(lambda: trained(before + 1))
            await asyncio.sleep(1)
        finally:
            for run in runs:
                await run.stop()
        logs = [home(run.config).worker_log("train").read_text() for run in runs]
        assert "fetched the checkpoint" in logs[runs.index(second)], "it did not take the other host's steps again"
        taken = await steps(log)
        assert [batch.step for batch in taken] == list(range(1, len(taken) + 1))
        taught = [turn for batch in taken for turn in batch.turns]
        assert len(taught) == len(set(taught))
        turns = {row.id: row async for _, row in log.read(0, {Turn}) if isinstance(row, Turn)}
        assert not here.turns.keys() & there.turns.keys()
        acked = here.turns | there.turns
        assert {turn: turns[turn].text for turn in acked} == acked
        assert min(len(here.turns), len(there.turns)) > 10
        signals = [(row.tenant, row.id) async for _, row in log.read(0, {Signal}) if isinstance(row, Signal)]
        assert len(signals) == len(set(signals))
        assert set(taught) <= turns.keys()
        found = await recount(log)
        assert found.balanced, found
