"""A worker's journal of rollouts beside a log that an older backup has replaced: what the log will never tell is not waited for."""

import asyncio
import contextlib

import pytest
from tests.deadlines import PATIENT_S

from ostinato.app.storage import open_run
from ostinato.app.worlds import open_rollouts
from ostinato.config import load
from ostinato.core.conversation import Message, Role
from ostinato.core.records import Arm, Batch, PolicyVersion
from ostinato.testing.records import a_turn
from ostinato.worlds.rollout.groups import EventFile
from ostinato.worlds.tasks.task import Grading, Task
from ostinato.worlds.tasks.tasksets import taskset_of

ASKED = (Message(role=Role.USER, text="Go."),)
TASKS = taskset_of(
    "tasks", [Task(id="t", family="f", messages=ASKED, grading=Grading(grader="pattern", data={"pattern": "x"}))]
)
REACHED_BY_NOBODY = "http://127.0.0.1:1"


def told(number: int, turn: str) -> list[dict]:
    ended = {"kind": "ended", "n": number, "member": 0, "episode": f"w.{number}.0.0", "last": True}
    return [
        {"kind": "drawn", "n": number, "task": "t", "epoch": 0, "size": 1},
        {"kind": "begun", "n": number, "member": 0, "episode": f"w.{number}.0.0"},
        ended | {"turns": [turn], "grade": 1.0, "why": ""},
        {"kind": "told", "n": number},
    ]


@contextlib.asynccontextmanager
async def resumed(tmp_path, events: list[dict]):
    """A run whose log has the turn `kept:0` alone, and its worker's rollouts after these events."""
    with open_run(load(None, [f"run.directory={tmp_path / 'run'}", "worlds.poll_s=0.01"])) as run:
        await run.log.append(a_turn("kept:0", arm=Arm.WORLD, user="world", group="w.1"))
        journal, _ = EventFile.open(run.home.rollouts)
        for event in events:
            journal.append(event)
        journal.close()
        opening = open_rollouts(run, REACHED_BY_NOBODY, TASKS, lambda kind, **more: None, lambda finished: None)
        async with opening as rollouts:
            yield run, rollouts


UNDER_WAY = [{"kind": "drawn", "n": 2, "task": "t", "epoch": 0, "size": 1}]
SPENT_LATER = {"kind": "spent", "n": 9, "after": 500}


@pytest.mark.parametrize("events", [[*told(0, "lost:0"), SPENT_LATER], told(0, "lost:0"), [SPENT_LATER]])
async def test_after_a_restore_the_worker_waits_for_no_lost_turn_and_sees_what_is_taken(tmp_path, events):
    async with resumed(tmp_path, [*told(1, "kept:0"), *UNDER_WAY, *events]) as (run, rollouts):
        assert sorted(rollouts.groups.open) == [1, 2]
        working = asyncio.create_task(rollouts.run())
        version = PolicyVersion(number=0, hash="00")
        taken = await run.log.append(Batch(step=1, turns=("kept:0",), credits=((1.0, 1.0),), reference=version, at=1.0))
        async with asyncio.timeout(PATIENT_S):
            while 1 in rollouts.groups.open:
                await asyncio.sleep(0.01)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
    journal, events = EventFile.open(run.home.rollouts)
    journal.close()
    assert max(event.get("after", 0) for event in events) == taken, "of the restored log"


async def test_a_journal_of_the_log_that_is_here_stays_as_it_is(tmp_path):
    events = [*told(1, "kept:0"), *UNDER_WAY, SPENT_LATER | {"after": 1}]
    async with resumed(tmp_path, events) as (run, rollouts):
        assert sorted(rollouts.groups.open) == [1, 2]
    journal, found = EventFile.open(run.home.rollouts)
    journal.close()
    assert found == events
