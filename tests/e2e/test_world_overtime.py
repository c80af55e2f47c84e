"""Rollouts that overrun their time, through the real processes: cut at the gateway, worth nothing, learned from with their group."""

import asyncio
import json
from collections import Counter, defaultdict

import pytest
from world_runs import crew, until_step

from ostinato.app.storage import home, open_log
from ostinato.config import load
from ostinato.core.records import Batch, Finish, Holdback, Reward, Turn
from ostinato.launch.commands.worlds.train import world_overrides
from ostinato.worlds.harness.rollout import Ended
from ostinato.worlds.rollout.finished import read_finished

TIMES = (0.3, 0.6, 1.2, 2.4, 4.8, 9.6)  # on any machine some answers fit into one of them, and some do not
SETTINGS = (
    "worlds.group=16",
    "worlds.groups=1",
    "worlds.concurrency=16",
    "worlds.lead=1",
    "worlds.window=1",
    "worlds.epochs=0",
    "worlds.retry_pause_s=0.1",
    "worlds.poll_s=0.05",
    "reward.world_staleness=50",
    "follow.interval_s=0.1",
    "evaluate.suite=''",
    "model.numerics=fast",
)


def write_tasks(path):
    """Whatever comes to its end in time is right."""
    rows = [
        {
            "id": f"within{seconds}-{n}",
            "family": "any",
            "messages": [{"role": "user", "content": f"say {n}"}],
            "tokens": 400,
            "timeout_s": seconds,
            "grading": {"grader": "pattern", "data": {"pattern": "^"}},
        }
        for n in range(3)
        for seconds in TIMES
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


async def rows(config, *kinds):
    with open_log(config) as log:
        return [row async for _, row in log.read(0, set(kinds))]


async def until_overtime_taught(config):
    """Until steps were taken on batches in which something overran."""
    while True:
        found = await rows(config, Turn, Batch)
        late = {row.id for row in found if isinstance(row, Turn) and row.finish is Finish.DEADLINE}
        taught = [row.step for row in found if isinstance(row, Batch) and late & set(row.turns)]
        if len(taught) >= 2:
            return await until_step(home(config), taught[1])
        await asyncio.sleep(0.2)


@pytest.mark.examination
async def test_what_overran_is_learned_from_with_its_group(tmp_path, quick_settings):
    tasks = write_tasks(tmp_path / "times.jsonl")
    config = load(None, [*quick_settings(tmp_path, *world_overrides(tasks)), *SETTINGS])
    async with asyncio.timeout(400):
        async with crew(config) as launched:
            await launched.during(until_overtime_taught(config))
    found = await rows(config, Turn, Batch, Reward, Holdback)
    turns = {row.id: row for row in found if isinstance(row, Turn)}
    rewards = {row.turn: row.value for row in found if isinstance(row, Reward)}
    held = {row.turn: row.reason for row in found if isinstance(row, Holdback)}
    late = {id for id, turn in turns.items() if turn.finish is Finish.DEADLINE}
    assert all(turns[id].sampled_ids for id in late), "where nothing was said there is no turn"
    assert {rewards[id] for id in late if id in rewards} == {0.0}
    groups = defaultdict(set)
    for id in rewards:
        groups[turns[id].group].add(id)
    for batch in (row for row in found if isinstance(row, Batch)):
        credits = dict(zip(batch.turns, batch.credits, strict=True))
        assert {turns[id].group for id in batch.turns} == {turns[batch.turns[0]].group}, "one group a step"
        assert set(batch.turns) == groups[turns[batch.turns[0]].group], "nobody of a group is left out"
        for id in late & set(batch.turns):
            assert len(credits[id]) == len(turns[id].sampled_ids)
            assert credits[id][0] < 0.0
    assert not [id for id in late if held.get(id, "").startswith("finish:")]
    records, bad = read_finished(home(config).finished.read_text().splitlines())
    assert bad == 0
    over = [record for record in records if record.ended is Ended.TIMEOUT]
    assert over
    assert {(record.value, record.turns[0] in late, len(record.turns)) for record in over} == {(0.0, True, 1)}
    silent = [record for record in records if record.ended is Ended.FAILED]
    assert all(record.why.startswith("the model gave no answer in time") for record in silent)
    tries = Counter((record.group, record.member) for record in records if record.group is not None)
    assert set(tries.values()) == {1}, "each member ends once"
