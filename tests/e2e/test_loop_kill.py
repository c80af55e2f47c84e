"""kill -9 of the workers at random instants of a running loop: nothing acknowledged is lost, no version mixes, same final bits."""

import asyncio
import os
import random
import signal
from collections import Counter

import pytest
from tests.oracles.turn_accounting import recount

from ostinato.app.storage import home, model_path, open_log, open_run, open_store
from ostinato.core.records import Signal, Turn
from ostinato.launch.commands.weights import replay
from ostinato.status.progress_lines import Lines
from ostinato.weights.keep.fsck import verify

KILLS = 20
PATIENT_S = 180.0


def versions(run) -> list[dict]:
    """What the trainer wrote of every publication, over all its lives."""
    return [line for line in Lines(home(run.config).progress("train")).new() if line["kind"] == "published"]


async def published(run, count: int) -> None:
    """Once so many versions are, however slow the machine."""
    async with asyncio.timeout(PATIENT_S):
        while len({line["number"] for line in versions(run)}) < count:
            await asyncio.sleep(0.5)


@pytest.mark.examination
@pytest.mark.parametrize("log", ["segments", "postgres"])
async def test_kills_lose_nothing(log, request, tmp_path, running, simulated_users):
    dice, elsewhere = random.Random(7), []
    if log == "postgres":
        record = request.getfixturevalue("in_postgres")()
        elsewhere = [f"record.url='{record.url}'", f"record.namespace='{record.namespace}'", "record.lease_s=3"]
    run = await running(tmp_path, *elsewhere, "serve.learner_share=0.2")
    names = [worker.name for worker in run.crew]
    killed = Counter()
    try:
        async with simulated_users(run) as acked:
            await published(run, 1)
            for number in range(KILLS):
                worker = run.worker(names[number % len(names)])
                while worker.process is None or worker.process.returncode is not None:
                    await asyncio.sleep(0.1)  # it is being started again
                os.kill(worker.process.pid, signal.SIGKILL)
                killed[worker.name] += 1
                await asyncio.sleep(dice.uniform(0.5, 5.0))
            await published(run, 5)
        await asyncio.sleep(2)
    finally:
        await run.stop()
    assert sum(killed.values()) == KILLS
    assert len(killed) == 4

    with open_log(run.config) as opened_log:
        rows = [row async for _, row in opened_log.read(0, {Turn, Signal})]
        turns = Counter(row.id for row in rows if isinstance(row, Turn))
        signals = Counter(row.id for row in rows if isinstance(row, Signal))
        assert len(acked.turns) > 100
        assert [turn for turn in acked.turns if turns[turn] != 1] == []
        assert [event for event in acked.signals if signals[event] != 1] == []
        stored = {row.id: row for row in rows if isinstance(row, Turn)}
        assert all(stored[turn].text == text for turn, text in acked.turns.items())

        with open_run(run.config) as opened:
            roots = await replay(opened, model_path(run.config))
        lines = versions(run)
        assert len({line["number"] for line in lines}) >= 5
        assert all(roots[line["number"]] == line["hash"] for line in lines), "a killed trainer took another step"

        store = open_store(run.config)
        known = dict(roots) | {0: await store.read_ref("base")}
        for turn in stored.values():
            assert sum(span.tokens for span in turn.spans) == len(turn.sampled_ids)
            assert all(known[span.policy.number] == span.policy.hash for span in turn.spans)
        assert (await verify(store)).problems == []
        assert (await recount(opened_log)).balanced
