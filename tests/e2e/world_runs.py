"""Runs of `ostinato train --world` for examinations: a toy taskset, its settings, the crew, and what its log must hold to at the end."""

import asyncio
import contextlib
import json
from collections import Counter, defaultdict
from pathlib import Path

from tests.oracles.turn_accounting import recount

from ostinato.app.storage import Home, home, open_log
from ostinato.core.records import Arm, Batch, Holdback, Reward, Turn
from ostinato.launch.commands.crew import launch
from ostinato.launch.commands.worlds.train import CREW
from ostinato.record.roles import hold
from ostinato.reward.accounting import account
from ostinato.status.progress_lines import last_lines
from ostinato.worlds.rollout.groups import EventFile

LIKED = "^[a-z]"
GROUP, GROUPS, BOUND = 16, 4, 6
SETTINGS = (
    f"worlds.group={GROUP}",
    f"worlds.groups={GROUPS}",
    "worlds.concurrency=64",
    "worlds.window=8",
    "worlds.epochs=0",
    "worlds.retry_pause_s=0.1",
    "worlds.poll_s=0.05",
    f"reward.world_staleness={BOUND}",
    "learn.publish_every=1000",
    "train.learning_rate=5e-3",
    "follow.interval_s=0.1",
    "evaluate.suite=''",
    "model.numerics=fast",
)


def write_tasks(path: Path, *, tokens: int = 6, **held_out: int) -> Path:
    """Prompts that are answered well with a lower-case letter."""
    rows = [
        {
            "id": f"{split}{n}",
            "family": "letters",
            "split": split,
            "messages": [{"role": "user", "content": f"say {n % 7}"}],
            "tokens": tokens,
            "grading": {"grader": "pattern", "data": {"pattern": LIKED}},
        }
        for split, count in ({"train": 40} | held_out).items()
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@contextlib.asynccontextmanager
async def crew(config):
    events = []
    with hold(home(config).root, "up"):
        async with launch(config, lambda who, what: events.append((who, what)), names=CREW) as launched:
            yield launched


def steps(place: Home) -> list[dict]:
    return [line for line in last_lines(place.progress("train"), 1 << 22) if line["kind"] == "step"]


def published(place: Home) -> list[dict]:
    """What the trainer wrote of every version that it stored, over all its lives."""
    return [line for line in last_lines(place.progress("train"), 1 << 22) if line["kind"] == "published"]


async def until_step(place: Home, count: int) -> None:
    while max((line["step"] for line in steps(place)), default=0) < count:
        await asyncio.sleep(0.1)


async def examined(config) -> dict:
    """What the log says of the run, and that nothing in it contradicts a promise."""
    with open_log(config) as log:
        rows = [row async for _, row in log.read(0, {Turn, Batch, Reward, Holdback})]
        found, again = await recount(log), await account(log, config=config.reward)
    turns = {row.id: row for row in rows if isinstance(row, Turn)}
    batches = [row for row in rows if isinstance(row, Batch)]
    rewards = Counter(row.turn for row in rows if isinstance(row, Reward))
    trained = Counter(turn for batch in batches for turn in batch.turns)
    assert found.balanced, found.contradictions
    assert (found.trained, found.held) == (again.trained, again.held)
    assert max(rewards.values()) == max(trained.values()) == 1, "nothing is rewarded or learned from twice"
    assert {turn.arm for turn in turns.values()} == {Arm.WORLD}
    lags = [
        batch.step - 1 - span.policy.number for batch in batches for turn in batch.turns for span in turns[turn].spans
    ]
    assert max(lags) <= BOUND
    taken = defaultdict(set)
    for batch in batches:
        for turn in batch.turns:
            taken[turns[turn].group].add(batch.step)
        assert len({turns[turn].group for turn in batch.turns}) == GROUPS
    assert all(len(at) == 1 for at in taken.values()), "no group is parted"
    sizes = Counter(turns[turn].group for turn in trained)
    assert set(sizes.values()) == {GROUP}, "a rollout that was torn is replaced"
    return {"lags": lags, "steps": len(batches), "torn": found.held.get("world:rollout_torn", 0)}


def graded_twice(place: Home) -> list[str]:
    """Members of groups that the journal graded more than once."""
    journal, events = EventFile.open(place.rollouts)
    journal.close()
    graded = Counter((event["n"], event["member"]) for event in events if event["kind"] == "ended" and event["last"])
    return [str(member) for member, times in graded.items() if times > 1]
