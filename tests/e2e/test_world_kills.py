"""kill -9 of everybody in a simulated run at 50 random instants: no reward twice, no group torn, the same final bits, nothing left over."""

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import random
import signal
from collections import Counter
from pathlib import Path

import psutil
import pytest
from tests.deadlines import WHOLE_PROGRAM_S
from world_runs import SETTINGS, crew, examined, graded_twice, published, steps, until_step, write_tasks

from ostinato.app.storage import home, model_path, open_run, open_store
from ostinato.config import load
from ostinato.core.records import Arm
from ostinato.launch.commands.weights import replay
from ostinato.launch.commands.worlds.train import world_overrides
from ostinato.weights.keep.fsck import verify

KILLS = 50
PATIENT_S = 120.0
GROUPS_OF_THE_KERNEL = Path("/sys/fs/cgroup")
PR_SET_CHILD_SUBREAPER = 36
KINDS = ("rollout", "train", "serve", "keeper", "zygote", "box")


def add_sandboxed(tasks: Path) -> Path:
    """Beside the letters: functions that are graded in one-shot runs, and files that are worked on in boxes and graded in further ones."""
    function = {
        "head": "def one():\n    return 1  #",
        "tests": "assert one() == 1\n",
    }  # an answer that begins with a space is a comment
    file = {
        "entry": "one.py:one",
        "reference": "def one(): return 1",
        "draw": "def draw(random): return ()",
        "draws": 1,
    }
    rows = [
        row | {"harness": harness, "grading": {"grader": grader, "data": data}, "turns": 2, "world": {"files": files}}
        for n in range(20)
        for row in [{"split": "train", "tokens": 6, "messages": [{"role": "user", "content": f"say {n}"}]}]
        for row, harness, grader, data, files in [
            (row | {"id": f"function{n}", "family": "functions"}, "single", "python_tests", function, {}),
            (
                row | {"id": f"file{n}", "family": "files"},
                "tools",
                "function",
                file,
                {"one.py": "def one(): return 1\n"},
            ),
        ]
    ]
    with tasks.open("a") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)
    return tasks


@contextlib.contextmanager
def orphans_are_ours():
    """Whatever a killed process leaves behind becomes a child of this one, and is seen."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def alive(pid: int) -> list[psutil.Process]:
    """A process's children that still run."""
    with contextlib.suppress(psutil.Error):
        return [child for child in psutil.Process(pid).children() if child.status() != psutil.STATUS_ZOMBIE]
    return []


def to_be_killed(workers: dict) -> dict[str, list[int]]:
    """Who runs now, by kind: workers, and the sandboxes' processes below the rollout worker."""
    found = {name: [worker.pid] for name, worker in workers.items() if worker.running}
    keepers = [child.pid for child in alive(workers["rollout"].pid)]
    zygotes = [child.pid for keeper in keepers for child in alive(keeper)]
    boxes = [child.pid for zygote in zygotes for child in alive(zygote)]
    return {kind: pids for kind, pids in (found | {"keeper": keepers, "zygote": zygotes, "box": boxes}).items() if pids}


async def kill_at_random(workers: dict, dice: random.Random) -> tuple[Counter[str], set[int]]:
    """How many of each kind were killed, and the ids of all that was there."""
    killed, seen, bag = Counter(), set(), []
    for _ in range(KILLS):
        bag = bag or dice.sample(KINDS, len(KINDS))
        async with asyncio.timeout(WHOLE_PROGRAM_S):
            while not (kinds := [kind for kind in bag if kind in to_be_killed(workers)]):
                await asyncio.sleep(0.02)
        await asyncio.sleep(dice.uniform(0.0, 3.0))
        while (there := to_be_killed(workers)) and kinds[0] not in there:
            await asyncio.sleep(0.005)  # a box lives for moments
        seen |= {pid for pids in there.values() for pid in pids}
        with contextlib.suppress(ProcessLookupError):
            os.kill(dice.choice(there[kinds[0]]), signal.SIGKILL)
            killed[kinds[0]] += 1
        bag.remove(kinds[0])
    return killed, seen


async def nothing_left(seen: set[int], mounts: str) -> None:
    """No process, no mount, no control group. What the kernel still clears away is waited for."""
    async with asyncio.timeout(WHOLE_PROGRAM_S):
        while [child for child in alive(os.getpid()) if child.pid in seen or child.ppid() == os.getpid()]:
            await asyncio.sleep(0.1)
        while left := [path for pid in seen for path in GROUPS_OF_THE_KERNEL.rglob(f"ostinato-{pid}")]:
            await asyncio.sleep(0.1)
    assert left == []
    assert Path("/proc/self/mounts").read_text() == mounts


@pytest.mark.examination
async def test_killed_at_fifty_instants_it_ends_as_it_would_have_undisturbed(tmp_path, quick_settings):
    tasks = add_sandboxed(write_tasks(tmp_path / "mixed.jsonl"))
    more = ["worlds.harness.tools={prompt=''}", "worlds.curriculum=false"]
    config = load(None, [*quick_settings(tmp_path, *world_overrides(tasks)), *SETTINGS, *more])
    place, mounts = home(config), Path("/proc/self/mounts").read_text()
    with orphans_are_ours():
        async with asyncio.timeout(580), crew(config) as launched:
            workers = {watched.worker.name: watched.worker for watched in launched.supervisor.watched}
            await launched.during(until_step(place, 2))
            killed, seen = await launched.during(kill_at_random(workers, random.Random(11)))
            await launched.during(until_step(place, max(line["step"] for line in steps(place)) + 3))
        await nothing_left(seen, mounts)
    found = await examined(config)
    assert graded_twice(place) == []
    assert sum(killed.values()) >= KILLS - 2
    assert min(killed[kind] for kind in KINDS) >= 5

    with open_run(config) as run:
        again, last = await replay(run, model_path(config)), await run.follower.resolve(Arm.WORLD.value)
    assert all(again[line["number"]] == line["hash"] for line in published(place)), "a killed trainer took another step"
    assert again[last.number] == last.hash
    assert last.number >= sorted(again)[-2]  # of the last recorded batch the step may not have been taken yet
    assert (await verify(open_store(config))).problems == []
    counts = {"killed": dict(killed), "steps": found["steps"], "lag": max(found["lags"]), "torn": found["torn"]}
    logging.getLogger(__name__).warning("%s", counts)
