"""A whole run whose trainer is two processes: what it learned is served, and a rank that is killed costs one step."""

import asyncio
import os
import signal

import psutil
import pytest
from tests.oracles.turn_accounting import recount

from ostinato.app.storage import home, open_run
from ostinato.core.records import Batch
from ostinato.status.progress_lines import last_lines


def published(run):
    return [line for line in last_lines(home(run.config).progress("train"), 1 << 22) if line["kind"] == "published"]


def ranks_of(pid):
    """The processes that the trainer started."""
    return [child.pid for child in psutil.Process(pid).children() if "ostinato.app.rank" in " ".join(child.cmdline())]


async def until(ask, timeout_s=240):
    async with asyncio.timeout(timeout_s):
        while not (found := ask()):
            await asyncio.sleep(0.2)
        return found


@pytest.mark.examination
async def test_what_two_ranks_learned_is_served_and_a_killed_rank_costs_one_step(tmp_path, running, simulated_users):
    run = await running(
        tmp_path,
        "train.ranks=2",
        "learn.checkpoint_every=1",
        "learn.max_lead=500",
        "reward.max_staleness=500",
        "evaluate.suite=''",
    )
    with open_run(run.config) as opened:
        log = opened.log
        try:
            async with simulated_users(run, 6) as acked:
                await until(lambda: len(published(run)) >= 2)
                trainer = run.worker("train").pid
                (rank, *_) = await until(lambda: ranks_of(trainer))
                os.kill(rank, signal.SIGKILL)
                await until(lambda: run.worker("train").pid not in (0, trainer))
                before = len(published(run))
                await until(lambda: len(published(run)) > before + 1)
            await asyncio.sleep(1)
        finally:
            await run.stop()
        ended = [what for who, what in run.events if who == "train" and "starts again" in what]
        assert len(ended) == 1
        assert "a rank of the trainer is lost" in ended[0]
        taken = [row async for _, row in log.read(0, {Batch}) if isinstance(row, Batch)]
        assert [batch.step for batch in taken] == list(range(1, len(taken) + 1))
        lines = last_lines(home(run.config).progress("train"), 1 << 22)
        steps = [line["step"] for line in lines if line["kind"] == "step"]
        assert len(steps) - len(set(steps)) <= 1, "at most one step was taken twice"
        taught = [turn for batch in taken for turn in batch.turns]
        assert len(taught) == len(set(taught))
        assert (await recount(log)).balanced
        assert acked.failures == 0
        assert {line["form"] for line in published(run)} == {"delta"}, "each rank had what it started from"
        roots = {line["number"]: line["hash"] for line in published(run)}
        assert (await opened.store.refs())["candidate"] in roots.values()
