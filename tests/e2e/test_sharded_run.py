"""A whole run whose trainer is two processes: one of them is killed, and every version is what the log alone gives again."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from ostinato.app.storage import home, model_path, open_log, open_run, open_store
from ostinato.core.records import Turn
from ostinato.launch.commands.weights.replay import replay
from ostinato.launch.views.progress import Lines
from ostinato.weights.keep.fsck import verify

PATIENT_S = 600.0  # for a machine that others compute on too


def numbers(run) -> set[int]:
    """The versions that were published, over all lives of the trainer."""
    lines = Lines(home(run.config).progress("train")).new()
    return {line["number"] for line in lines if line["kind"] == "published"}


async def published(run, count: int) -> None:
    async with asyncio.timeout(PATIENT_S):
        while len(numbers(run)) < count:
            await asyncio.sleep(0.5)


def ranks_of(pid: int) -> list[int]:
    """The processes that a training worker started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    every = [Path(task).name for task in Path(f"/proc/{pid}/task").iterdir()]
    children += [child for task in every for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    return sorted({int(child) for child in children if b"sharding.rank" in Path(f"/proc/{child}/cmdline").read_bytes()})


@pytest.mark.examination
async def test_a_run_on_two_ranks_loses_one_and_goes_on_with_the_same_bits(tmp_path, running, simulated_users):
    run = await running(tmp_path, "train.ranks=2", "learn.checkpoint_every=1")
    try:
        async with simulated_users(run):
            await published(run, 2)
            worker = run.worker("train")
            (rank,) = ranks_of(worker.process.pid)
            before = worker.process.pid
            os.kill(rank, signal.SIGKILL)
            await published(run, len(numbers(run)) + 3)
            assert worker.process.pid != before
        await asyncio.sleep(2)
    finally:
        await run.stop()
    lines = [line for line in Lines(home(run.config).progress("train")).new() if line["kind"] == "published"]
    with open_run(run.config) as opened:
        roots = await replay(opened, model_path(run.config))
    assert len(lines) >= 5
    assert all(roots[line["number"]] == line["hash"] for line in lines)
    store = open_store(run.config)
    known = dict(roots) | {0: await store.read_ref("base")}
    with open_log(run.config) as log:
        turns = [row async for _, row in log.read(0, {Turn})]
    assert all(known[span.policy.number] == span.policy.hash for turn in turns for span in turn.spans)
    assert {span.policy.number for turn in turns for span in turn.spans} != {0}  # followers served what the ranks made
    assert (await verify(store)).problems == []
